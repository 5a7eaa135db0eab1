"""Make units of a conversion in this process: what a whole run, a share of one and a task on another machine
have in common.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from marlin_convert.checkpoint.fetcher import Fetcher
from marlin_convert.checkpoint.identify import stamps
from marlin_convert.documents.records import FinishedUnit
from marlin_convert.errors import SourceError
from marlin_convert.pipeline.budget import Budget
from marlin_convert.pipeline.executor import Executor, Job
from marlin_convert.pipeline.expert_job import expert_jobs
from marlin_convert.pipeline.kernel_check import Check
from marlin_convert.pipeline.resume import Stamps
from marlin_convert.pipeline.stages import Stages, Tools
from marlin_convert.pipeline.target import Target
from marlin_convert.pipeline.tensor_job import tensor_jobs
from marlin_convert.pipeline.unit_work import UnitWork
from marlin_convert.pipeline.work_folder import WorkFolder
from marlin_convert.planning.needs import source_tensors
from marlin_convert.planning.output_plan import OutputUnit
from marlin_convert.progress import Progress, Tally
from marlin_convert.shards.kept_source import recorded_digests
from marlin_convert.storage.buffers import BufferPool


@dataclass(frozen=True)
class Maker:
    """How units are made: in which threads and memory, proven how (`checks`), by the `kernel`, too, where it
    is not None, out of files with these `stamps`.
    """

    target: Target
    stamps: Stamps
    budget: Budget
    checks: str
    kernel: Check | None = None
    stages: Stages = field(default_factory=Stages)

    def make(
        self,
        left: Sequence[OutputUnit],
        fetcher: Fetcher,
        made: Callable[[FinishedUnit], None],
        progress: Progress | None = None,
    ) -> None:
        """Make these units; each is recorded in OUT, then `made` is told of it. Raises SourceError,
        OutputError, MachineError.
        """
        source, work = self.target.source, WorkFolder(self.target.out, self.target.attempt)

        def finish(done: UnitWork) -> None:
            """Once a unit's files are durable, its record makes it count, unless the source was touched
            meanwhile.
            """
            record = done.finish()
            if stamps(source, self.stamps) != self.stamps:
                raise SourceError(
                    f"a weight file was changed while {done.unit.name} was being converted; fetch it again,"
                    " then use --overwrite, or run the same command again where only its attributes changed"
                )
            fetcher.check(done.unit.name)
            if self.kernel is not None:
                self.kernel(done.unit)
            work.record(record)
            made(record)
            fetcher.release(done.unit.name)

        tally, pool = self._tally(left, progress), BufferPool(self.budget.memory)
        tools = Tools(fetcher, self.target.reader, pool, self.stages, self.checks != "none", tally.count)
        fetcher.start()
        Executor(tools, self.budget.threads, finish).run(self._jobs(left))
        tally.then("writing manifest and documents")

    def _tally(self, left: Sequence[OutputUnit], progress: Progress | None) -> Tally:
        """Counts the source bytes of the units that are made."""
        plan, total = self.target.plan, sum(source_bytes(self.target, unit) for unit in left)
        names = [unit.name for unit in plan.units]
        tally = Tally("converting", total, names, progress)
        tally.count(min((unit.name for unit in left), key=names.index, default=""))
        return tally

    def _jobs(self, units: Sequence[OutputUnit]) -> Iterator[Job[UnitWork]]:
        """All jobs in order, each unit's made only when its turn comes."""
        recorded = recorded_digests(self.target.out, self.target.source)
        for unit in units:
            work = UnitWork(self.target, unit, recorded)
            jobs: list[Job[UnitWork]] = [*expert_jobs(work, self.budget.batch), *tensor_jobs(work)]
            work.jobs_left = len(jobs)
            yield from jobs


def source_bytes(target: Target, unit: OutputUnit) -> int:
    """Bytes of the source tensors that a unit reads."""
    tensors = target.source.tensors
    return sum(tensors[name].entry.size for name in source_tensors(target.plan, unit))
