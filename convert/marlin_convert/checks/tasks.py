"""What `verify` does with tensor data, in steps that threads take one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from marlin_convert.limits import Limits, allow, read_limits
from marlin_convert.progress import Progress, Tally
from marlin_convert.threads import Workers

#: threads beyond the cores. A step reads and then checks what it read: with as many threads as cores nobody
#: reads while they check, and two threads in three wait for the disk
WAITING = 4


class Task(NamedTuple):
    """Something to check: of which unit, how many stored bytes, how much memory that takes at most, and what
    does it.
    """

    unit: str
    size: int
    memory: int
    check: Callable[[], None]


def run_tasks(tasks: Sequence[Task], threads: int | None, progress: Progress | None) -> None:
    """Do all of it, on so many threads (None: as `threads_for` has it), and tell how far it is."""
    threads = threads or threads_for(max((task.memory for task in tasks), default=1), read_limits())
    units = list(dict.fromkeys(task.unit for task in tasks))
    tally = Tally("verifying", sum(task.size for task in tasks), units, progress)
    with Workers(threads) as workers:
        for task, _ in zip(tasks, workers.map(lambda task: task.check(), tasks), strict=True):
            tally.count(task.unit, task.size)


def threads_for(memory: int, limits: Limits) -> int:
    """Threads where none are given: the cores and those that wait, as far as there is room for the `memory`
    that each takes.
    """
    wanted = limits.cores.value + WAITING
    return max(min(wanted, allow(limits, wanted).memory.value // memory), 1)
