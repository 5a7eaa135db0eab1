"""Tasks on a Ray cluster. Ray schedules them, gives them to another machine where one is lost, and brings
back what they return or raise; nothing of that is done here.
"""

from __future__ import annotations

import logging
import re
import signal
import socket
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from marlin_convert.errors import ConvertError, MachineError, MachineWarning, SourceWarning, UsageError
from marlin_convert.extras import require
from marlin_convert.progress import Point, Progress

T = TypeVar("T")

#: threads of a task, unless told otherwise: a few tasks a machine overlap their beginnings and ends
THREADS = 4
#: bytes that a process takes beside its buffers: Python, compiled code, headers and plan
PROCESS = 1 << 30
#: times that a task whose machine or process was lost is begun anew
RETRIES = 8
#: seconds between two looks at what has come, and between two words of a task on how far it is
LOOK = 0.5
#: seconds for which tasks that were cancelled may end by themselves
PATIENCE = 30.0
#: seconds within which a cluster must take a connection
ANSWERS = 20.0
#: what a task may say, by name
KINDS = {kind.__name__: kind for kind in (MachineWarning, SourceWarning)}


@dataclass(frozen=True)
class Need:
    """What a task takes: threads, bytes for buffers, whether a GPU."""

    threads: int
    memory: int
    gpu: bool = False


@dataclass(frozen=True)
class Tasks(Generic[T]):
    """The same work for each of `names`: `work(common, name, progress)`, which is called on some machine and
    must be a function that this package has there, too. `took(name, result)` is told of each that has ended,
    `told(name, done)` of how far one is.
    """

    work: Callable[[bytes, str, Progress], T]
    common: bytes
    names: Sequence[str]
    need: Need
    took: Callable[[str, T], None]
    told: Callable[[str, int], None]


class Cluster:
    """A cluster that this process is connected to."""

    def __init__(self, ray: Any) -> None:
        self._ray = ray

    def threads(self, asked: int | None) -> int:
        """Threads of a task: as asked for, else no more than the largest machine has. Raises UsageError,
        MachineError.
        """
        cpus = self._cpus()
        if asked is not None and asked > max(cpus):
            raise UsageError(
                f"--threads {asked}: the largest machine of the Ray cluster offers {max(cpus)} CPUs, and a"
                " task runs on one machine"
            )
        return asked or min(THREADS, max(cpus))

    def at_a_time(self, threads: int) -> int:
        """How many tasks of so many threads run together."""
        return sum(each // threads for each in self._cpus())

    def _cpus(self) -> list[int]:
        cpus = [int(node["Resources"].get("CPU", 0)) for node in self._ray.nodes() if node["Alive"]]
        if not max(cpus, default=0):
            raise MachineError("no machine of the Ray cluster offers a CPU; start workers with --num-cpus")
        return cpus

    def run(self, tasks: Tasks[T]) -> None:
        """Have all done. On a failure or an interrupt no task begins any more, and those under way end first:
        what they have half made goes with them. Raises what a task raises, MachineError where the cluster
        fails.
        """
        ray, need = self._ray, tasks.need
        board, common = _board(ray), ray.put(tasks.common)
        task = ray.remote(_task).options(
            num_cpus=need.threads,
            num_gpus=int(need.gpu),
            memory=need.memory + PROCESS,
            max_retries=RETRIES,
            name="marlin-convert",
        )
        pending = {task.remote(tasks.work, common, name, board): name for name in tasks.names}
        try:
            while pending:
                ended, _ = ray.wait(list(pending), num_returns=1, timeout=LOOK)
                for name, done in ray.get(board.take.remote()).items():
                    tasks.told(name, done)
                for ref in ended:
                    result, said = self._get(ref)
                    for kind, text in said:
                        warnings.warn(text, KINDS[kind], stacklevel=2)
                    tasks.took(pending.pop(ref), result)
        except BaseException:
            self._cancel(list(pending))
            raise

    def _get(self, ref: Any) -> Any:
        """What a task returns; raises what it raised, MachineError where it was lost for good."""
        errors = self._ray.exceptions
        try:
            return self._ray.get(ref)
        except errors.RayTaskError as error:
            if isinstance(error.cause, ConvertError):
                raise error.cause from None
            raise MachineError(f"a task on the Ray cluster failed: {error.cause!r}") from error
        except errors.RayError as error:
            raise MachineError(
                f"the Ray cluster lost a task {RETRIES + 1} times: {_first(error)}; see `ray status` and the"
                " logs of its machines, then run the same command again"
            ) from error

    def _cancel(self, refs: list[Any]) -> None:
        with suppress(Exception):
            for ref in refs:
                self._ray.cancel(ref, force=False)
            _, running = self._ray.wait(refs, num_returns=len(refs), timeout=PATIENCE) if refs else ([], [])
            for ref in running:
                self._ray.cancel(ref, force=True)


def _task(
    work: Callable[[bytes, str, Progress], T], common: bytes, name: str, board: Any
) -> tuple[T, list[tuple[str, str]]]:
    """On a machine of the cluster: what the work returns, and what had to be said, kind and text."""
    last = 0.0

    def tell(point: Point) -> None:
        nonlocal last
        if (now := time.monotonic()) - last >= LOOK:
            last = now
            board.tell.remote(name, point.done)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = work(common, name, tell)
    said = dict.fromkeys((type(each.message).__name__, str(each.message)) for each in caught)
    return result, [each for each in said if each[0] in KINDS]


class _Board:
    """Where tasks say how far they are."""

    def __init__(self) -> None:
        self._done: dict[str, int] = {}

    def tell(self, name: str, done: int) -> None:
        """So many bytes of a task are done."""
        self._done[name] = done

    def take(self) -> dict[str, int]:
        """What was said since the last time."""
        done, self._done = self._done, {}
        return done


def _board(ray: Any) -> Any:
    """One on the machine that this process is on, which is there as long as it is."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    return ray.remote(_Board).options(num_cpus=0, scheduling_strategy=here).remote()


@contextmanager
def connected(address: str | None) -> Iterator[Cluster]:
    """The cluster at `address`, as Ray takes it (None: what RAY_ADDRESS names, else one of this machine
    alone); one that the process is connected to already stays so. Raises UsageError where Ray is not
    installed, MachineError where no cluster answers.
    """
    require("ray")
    import ray
    import ray.exceptions

    if ray.is_initialized():
        yield Cluster(ray)
        return
    where = "the Ray cluster" if address is None else f"the Ray cluster at {address}"
    _refuse_silence(address, where)
    main = threading.current_thread() is threading.main_thread()
    numbers = (signal.SIGINT, signal.SIGTERM) if main else ()
    handlers = {number: signal.getsignal(number) for number in numbers}
    try:
        ray.init(address=address, logging_level=logging.ERROR, log_to_driver=False)
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        raise _unreached(where, _first(error)) from error
    for number, handler in handlers.items():  # Ray ends a process by a way of its own
        signal.signal(number, handler)
    try:
        yield Cluster(ray)
    finally:
        ray.shutdown()


def _refuse_silence(address: str | None, where: str) -> None:
    """Raise MachineError where nobody answers at HOST:PORT: Ray itself would try for minutes."""
    match = re.fullmatch(r"(?:ray://)?\[?([^\[\]/]+?)\]?:(\d{1,5})", address or "")
    if match is None:
        return
    try:
        socket.create_connection((match[1], int(match[2])), ANSWERS).close()
    except (OSError, OverflowError) as error:
        raise _unreached(where, getattr(error, "strerror", None) or str(error)) from error


def _unreached(where: str, why: str) -> MachineError:
    return MachineError(
        f"{where} cannot be reached ({why}); see `ray status --address ...`, then run the same command again"
    )


def _first(error: Exception) -> str:
    """The first line of what an error says."""
    return (str(error).splitlines() or [type(error).__name__])[0]
