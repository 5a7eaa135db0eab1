"""`--engine ray`: a task of a Ray cluster for each unit. Ray schedules the tasks, gives them to another
machine where one is lost, and brings back what they return or raise; nothing of that is done here.
"""

from __future__ import annotations

import logging
import pickle
import re
import signal
import socket
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from marlin_convert.documents.records import FinishedUnit
from marlin_convert.errors import ConvertError, MachineError, UsageError
from marlin_convert.extras import package_version, require
from marlin_convert.pipeline.budget import Budget, choose_budget
from marlin_convert.pipeline.making import Maker, source_bytes
from marlin_convert.pipeline.remote import KINDS, Job, Made, Origin, make_unit
from marlin_convert.planning.output_plan import OutputUnit
from marlin_convert.progress import Point, Progress, Tally

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


@dataclass(frozen=True)
class RayEngine:
    """Makes units on a cluster; `address` as Ray takes it, None for what RAY_ADDRESS names or else a cluster
    of this machine alone. `threads` and `memory` of a task, None for what is best.
    """

    origin: Origin
    address: str | None
    threads: int | None
    memory: int | None

    def make(
        self,
        maker: Maker,
        left: Sequence[OutputUnit],
        made: Callable[[FinishedUnit], None],
        progress: Progress | None,
    ) -> None:
        """Make these units as `maker` would. Raises what that raises, UsageError and MachineError for a
        cluster on which that cannot be.
        """
        with _cluster(self.address) as ray:
            budget = choose_budget(maker.target, self._threads(ray), self.memory)
            job = self._job(maker, budget)
            _Run(ray, maker, progress, made).make(pickle.dumps(job), left, job.budget)

    def _threads(self, ray: Any) -> int:
        """No more than the largest machine has, so that a task fits somewhere. Raises UsageError,
        MachineError.
        """
        cpus = [int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]]
        if not max(cpus, default=0):
            raise MachineError("no machine of the Ray cluster offers a CPU; start workers with --num-cpus")
        if self.threads is not None and self.threads > max(cpus):
            raise UsageError(
                f"--threads {self.threads}: the largest machine of the Ray cluster offers {max(cpus)} CPUs,"
                " and a task runs on one machine"
            )
        return self.threads or min(THREADS, max(cpus))

    def _job(self, maker: Maker, budget: Budget) -> Job:
        target = maker.target
        return Job(
            self.origin,
            str(target.out.absolute()),
            target.identity,
            maker.stamps,
            maker.checks,
            budget,
            target.direct_io,
            package_version("marlin-convert"),
        )


class _Run:
    """The tasks of one run."""

    def __init__(
        self, ray: Any, maker: Maker, progress: Progress | None, made: Callable[[FinishedUnit], None]
    ) -> None:
        self._ray, self._maker, self._progress, self._made = ray, maker, progress, made
        self._done: dict[str, int] = {}

    def make(self, job: bytes, left: Sequence[OutputUnit], budget: Budget) -> None:
        """Have all made. On a failure or an interrupt no task begins any more, and those under way end first:
        what they have half made goes with them.
        """
        ray, target = self._ray, self._maker.target
        sizes = {unit.name: source_bytes(target, unit) for unit in left}
        names = [unit.name for unit in target.plan.units]
        tally = Tally("converting", sum(sizes.values()), names, self._progress)
        board, common = _board(ray), ray.put(job)
        task = ray.remote(_task).options(
            num_cpus=budget.threads,
            num_gpus=1 if self._maker.checks == "kernel" else 0,
            memory=budget.memory + PROCESS,
            max_retries=RETRIES,
            name="marlin-convert",
        )
        pending = {task.remote(common, unit.name, board): unit.name for unit in left}
        try:
            while pending:
                ended, _ = ray.wait(list(pending), num_returns=1, timeout=LOOK)
                for unit, done in ray.get(board.take.remote()).items():
                    self._tell(tally, unit, done)
                for ref in ended:
                    self._take(self._get(ref))
                    self._tell(tally, unit := pending.pop(ref), sizes[unit])
        except BaseException:
            self._cancel(list(pending))
            raise
        tally.then("writing manifest and documents")

    def _get(self, ref: Any) -> Made:
        """What a task returns; raises what it raised, MachineError where it was lost for good."""
        errors = self._ray.exceptions
        try:
            made: Made = self._ray.get(ref)
        except errors.RayTaskError as error:
            if isinstance(error.cause, ConvertError):
                raise error.cause from None
            raise MachineError(f"a task on the Ray cluster failed: {error.cause!r}") from error
        except errors.RayError as error:
            raise MachineError(
                f"the Ray cluster lost a task {RETRIES + 1} times: {str(error).splitlines()[0]}; see `ray"
                " status` and the logs of its machines, then run the same command again"
            ) from error
        return made

    def _take(self, made: Made) -> None:
        for kind, text in made.said:
            warnings.warn(text, KINDS[kind], stacklevel=2)
        self._maker.stages.add(made.stages)
        self._made(made.record)

    def _tell(self, tally: Tally, unit: str, done: int) -> None:
        """A task that was begun anew counts from there on once it is further than before."""
        before = self._done.get(unit, 0)
        self._done[unit] = max(before, done)
        tally.count(unit, self._done[unit] - before)

    def _cancel(self, refs: list[Any]) -> None:
        with suppress(Exception):
            for ref in refs:
                self._ray.cancel(ref, force=False)
            _, running = self._ray.wait(refs, num_returns=len(refs), timeout=PATIENCE) if refs else ([], [])
            for ref in running:
                self._ray.cancel(ref, force=True)


def _task(job: bytes, unit: str, board: Any) -> Made:
    """On a machine of the cluster."""
    last = 0.0

    def tell(point: Point) -> None:
        nonlocal last
        if (now := time.monotonic()) - last >= LOOK:
            last = now
            board.tell.remote(unit, point.done)

    return make_unit(job, unit, tell)


class _Board:
    """Where tasks say how far they are."""

    def __init__(self) -> None:
        self._done: dict[str, int] = {}

    def tell(self, unit: str, done: int) -> None:
        """So many bytes of a unit are done."""
        self._done[unit] = done

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
def _cluster(address: str | None) -> Iterator[Any]:
    """Ray, connected; what was connected before stays so. Raises UsageError where it is not installed,
    MachineError where no cluster answers.
    """
    require("ray")
    import ray
    import ray.exceptions

    if ray.is_initialized():
        yield ray
        return
    where = "the Ray cluster" if address is None else f"the Ray cluster at {address}"
    _refuse_silence(address, where)
    main = threading.current_thread() is threading.main_thread()
    numbers = (signal.SIGINT, signal.SIGTERM) if main else ()
    handlers = {number: signal.getsignal(number) for number in numbers}
    try:
        ray.init(address=address, logging_level=logging.ERROR, log_to_driver=False)
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        raise _unreached(where, str(error).splitlines()[0]) from error
    for number, handler in handlers.items():  # Ray ends a process by a way of its own
        signal.signal(number, handler)
    try:
        yield ray
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
