"""How many threads check at a time: more than cores, since some wait for the disk, and no more than memory
has room for.
"""

from __future__ import annotations

from threading import Barrier

import pytest

from marlin_convert.checks import tasks
from marlin_convert.checks.tasks import Task, run_tasks, threads_for
from marlin_convert.limits import Limit, Limits
from marlin_convert.progress import Point


def limits(cores: int, memory: int | None = None) -> Limits:
    """A machine."""
    group = None if memory is None else Limit(memory << 20, "/memory.max")
    return Limits(Limit(cores, "cores"), group, None, None, None, None)


@pytest.mark.parametrize(
    ("machine", "memory", "threads"),
    [
        (limits(2), 78 << 20, 6),
        (limits(16), 78 << 20, 20),
        (limits(16), 300 << 20, 8),  # of 20 times 128 MiB
        (limits(2), 2 << 30, 1),  # not even one fits, and one has to
        (limits(2, 384 + 2 * 200), 78 << 20, 2),  # half of what the program leaves
        (limits(2, 450), 78 << 20, 1),
    ],
)
def test_threads(machine: Limits, memory: int, threads: int) -> None:
    assert threads_for(memory, machine) == threads


def test_more_steps_than_cores_are_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else nobody reads while all check."""
    monkeypatch.setattr(tasks, "read_limits", lambda: limits(1))
    together = Barrier(1 + tasks.WAITING, timeout=20)
    told: list[Point] = []

    def check() -> None:
        together.wait()

    todo = [Task(f"layer-{i // 5:03d}", 7, 1, check) for i in range(10)]
    run_tasks(todo, None, told.append)
    assert told == [
        Point("verifying", 7 * (i + 1), 70, f"layer-{i // 5:03d}", 1 + i // 5, 2) for i in range(10)
    ]
