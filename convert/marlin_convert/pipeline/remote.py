"""One unit of a conversion made in a process that knows nothing but this task: on whatever machine, for
whatever brings tasks to machines. SOURCE and OUT are folders that all machines have in common, or SOURCE is a
repository or in an object store.
"""

from __future__ import annotations

import os
import pickle
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from secrets import token_hex

from marlin_convert.checkpoint.hub_files import HubOptions
from marlin_convert.checkpoint.identify import identify, stamps
from marlin_convert.checkpoint.source import Source, open_source
from marlin_convert.documents.identity import SourceIdentity
from marlin_convert.documents.provenance import Stage
from marlin_convert.documents.records import WORK, FinishedUnit
from marlin_convert.errors import MachineError
from marlin_convert.extras import package_version
from marlin_convert.pipeline.budget import Budget, choose_budget
from marlin_convert.pipeline.clear import leftovers
from marlin_convert.pipeline.kernel_check import Check, kernel_check
from marlin_convert.pipeline.making import Maker
from marlin_convert.pipeline.resume import Stamps
from marlin_convert.pipeline.target import Target
from marlin_convert.pipeline.work_folder import WorkFolder, staging_of
from marlin_convert.planning.needs import needs
from marlin_convert.planning.output_plan import Options, OutputPlan, plan_output
from marlin_convert.progress import Progress
from marlin_convert.shards.stored_source import ConvertedStore
from marlin_convert.storage.files import machine_errors


@dataclass(frozen=True)
class Origin:
    """How a machine opens what is converted: a checkpoint, or out of the shards of a folder that is
    `converted`.
    """

    source: str
    options: Options
    hub: HubOptions | None = field(default=None, repr=False)
    converted: bool = False

    @staticmethod
    def of(
        source: str | os.PathLike[str], opened: Source, options: Options, hub: HubOptions | None
    ) -> Origin:
        """Of a source as it was opened here: a folder by its full path, a repository at its commit."""
        if opened.folder is not None:
            return Origin(str(opened.folder.absolute()), options, hub)
        commit = opened.store.hub_commit
        pinned = hub if commit is None else replace(hub or HubOptions(), revision=commit[1])
        return Origin(os.fspath(source), options, pinned)

    def open(self) -> tuple[Source, OutputPlan]:
        """The source, and what is to be written. Raises SourceError, OutputError, UsageError."""
        source = (
            ConvertedStore.open(self.source).source()
            if self.converted
            else open_source(self.source, self.hub)
        )
        return source, plan_output(source, self.options)


@dataclass(frozen=True)
class Job:
    """What all tasks of a run have in common. `version` is that of this package where the run was begun."""

    origin: Origin
    out: str
    identity: SourceIdentity
    stamps: Stamps
    checks: str
    budget: Budget
    direct_io: bool
    version: str | None


@dataclass(frozen=True)
class Made:
    """A unit that is made and recorded, and how long the stages took."""

    record: FinishedUnit
    stages: Mapping[str, Stage]


def make_unit(job: bytes, name: str, progress: Progress | None = None) -> Made:
    """Make the unit `name` of a pickled `Job`, unless there is a whole record of it. Raises what `convert`
    raises, and MachineError where this machine has another version of this package or other folders than the
    one where the run was begun.
    """
    record, maker = _ready(job).make(name, progress)
    return Made(record, maker.stages.times())


@lru_cache(maxsize=1)
def _ready(pickled: bytes) -> _Ready:
    """A job on this machine: a process opens it once for all its units."""
    job: Job = pickle.loads(pickled)
    node = platform.node()
    if (version := package_version("marlin-convert")) != job.version:
        raise MachineError(
            f"{node} has marlin-convert {version}, the run was begun by {job.version}; install the same"
            " version on all machines, then run the same command again"
        )
    source, plan = job.origin.open()
    here = identify(source, sampled=False)
    if (difference := job.identity.difference(here) or job.identity.rewritten(here)) is not None:
        raise _not_common(node, job.origin.source, difference)
    if stamps(source, job.stamps) != job.stamps:
        raise _not_common(node, job.origin.source, "the times of its files differ")
    out = Path(job.out)
    if not (out / WORK / "job.json").exists():
        raise _not_common(node, out, "what was begun there is not there")
    target = Target(source, job.identity, plan, out, job.direct_io, token_hex(4))
    kernel = kernel_check(target) if job.checks == "kernel" else None
    return _Ready(job, target, choose_budget(target, job.budget.threads, job.budget.memory), kernel)


def _not_common(node: str, path: object, why: str) -> MachineError:
    return MachineError(
        f"{path} is not on {node} what it is where the run was begun ({why}); SOURCE and OUT must be folders"
        " that all machines have in common, under the same path"
    )


@dataclass(frozen=True)
class _Ready:
    """A job that was opened on this machine."""

    job: Job
    target: Target
    budget: Budget
    kernel: Check | None

    def make(self, name: str, progress: Progress | None) -> tuple[FinishedUnit, Maker]:
        """The record of a unit, made now or found: a task that is given to another machine may have done its
        work and only not have said so.
        """
        target, job = self.target, self.job
        source, plan, work = target.source, target.plan, WorkFolder(target.out)
        unit = next(unit for unit in plan.units if unit.name == name)
        maker = Maker(target, job.stamps, self.budget, job.checks, self.kernel)
        work.look_again()
        if (found := work.finished(plan, unit)) is not None:
            return found, maker
        with machine_errors(f"beginning in {target.out}"):
            for path in leftovers(target.out, plan, [unit]):
                path.unlink()
        fetcher = source.store.fetcher(needs(source, plan, [unit]), staging_of(target.out, name), None)
        made: list[FinishedUnit] = []
        maker.make([unit], fetcher, made.append, progress)
        return made[0], maker
