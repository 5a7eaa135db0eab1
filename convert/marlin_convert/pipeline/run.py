"""The conversion from end to end."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from marlin_convert.arguments import refuse_odd
from marlin_convert.checkpoint.fetcher import Fetcher
from marlin_convert.checkpoint.hub_files import HubOptions
from marlin_convert.checkpoint.identify import identify, stamps
from marlin_convert.checkpoint.source import Source
from marlin_convert.documents.records import FinishedUnit
from marlin_convert.errors import SourceError, UsageError
from marlin_convert.layout import load_code
from marlin_convert.pipeline.budget import Budget, choose_budget
from marlin_convert.pipeline.clear import (
    clear_output,
    leftovers,
    removable,
    remove_work,
)
from marlin_convert.pipeline.executor import Executor, Job
from marlin_convert.pipeline.expert_job import expert_jobs
from marlin_convert.pipeline.finish import finish_output
from marlin_convert.pipeline.kernel_check import Check, kernel_check
from marlin_convert.pipeline.locks import locked
from marlin_convert.pipeline.opening import open_and_plan
from marlin_convert.pipeline.out_state import observe
from marlin_convert.pipeline.recheck import compare_recorded
from marlin_convert.pipeline.repair import reopen
from marlin_convert.pipeline.resume import CHECKS, Action, Decision, Request, decide
from marlin_convert.pipeline.space import Need, refuse_full_disk
from marlin_convert.pipeline.stages import Stages, Tools
from marlin_convert.pipeline.target import Target
from marlin_convert.pipeline.tensor_job import tensor_jobs
from marlin_convert.pipeline.unit_work import UnitWork
from marlin_convert.pipeline.work_folder import WorkFolder, staging_of
from marlin_convert.planning.needs import needs, source_tensors
from marlin_convert.planning.output_plan import Options, OutputPlan, OutputUnit
from marlin_convert.progress import Progress, Tally
from marlin_convert.shards.kept_source import recorded_digests
from marlin_convert.storage.buffers import BufferPool
from marlin_convert.storage.files import machine_errors, make_folder, make_path, sync_folder
from marlin_convert.threads import start

#: asked with the files of a conversion that --overwrite is about to remove; False leaves them
Confirm = Callable[[Sequence[Path]], bool]


@dataclass(frozen=True)
class Converted:
    """What a run did: how it went on in OUT (`new`, `continue`, `repair`, `replace`, or `done` where nothing
    was to do); units made now, with the bytes of their files, and found finished; bytes of all shard files;
    seconds and bytes per stage, summed over threads.
    """

    out: Path
    action: str
    made: int
    made_bytes: int
    found: int
    output_bytes: int
    stages: Stages


def convert(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    tp: int,
    ep: int = 1,
    attn_tp: int | None = None,
    pp: int = 1,
    expert_map: str | os.PathLike[str] | None = None,
    layers: Sequence[int] | None = None,
    ranks: Sequence[int] | None = None,
    layout: str | None = None,
    threads: int | None = None,
    memory: int | None = None,
    verify: str = "exact",
    overwrite: bool = False,
    direct_io: bool = True,
    progress: Progress | None = None,
    hub: HubOptions | None = None,
    fetch_progress: Progress | None = None,
    confirm: Confirm | None = None,
) -> Converted:
    """Convert a checkpoint, a folder or a repository `org/name`; run again, it continues.

    `attn_tp` cuts attention and dense layers into so many slices, each on tp / attn_tp ranks (None: into tp);
    `pp` spreads the layers over so many pipeline stages of tp ranks each. `expert_map` is a file that says
    which routed expert is in which slot of each layer (None: each in the slot of its number).
    `layers` and `ranks` limit what is made (None: all); `layout` is the id of one of the registered layouts
    (None: that of the Marlin MoE kernel). `memory` is the budget for buffers in bytes. `verify` is "exact"
    (each buffer is inverted and compared with the source before it is written), "kernel" (and each written
    layer goes through the kernel on a GPU) or "none". `progress(point)` gets a
    `progress.Point` of source bytes and may be called from any thread; `fetch_progress` the same for what
    comes from the hub. `hub` says how a repository
    is read and kept. `overwrite` keeps what the same conversion has made and removes any other one, where
    `confirm(files)` agrees or is not given: then nobody is asked.

    Raises UsageError for options that conflict with each other or with what OUT holds; SourceError for a
    source that is not what it should be; MachineError where disk or machine failed.
    """
    refuse_odd(threads=threads, memory=memory)
    options = Options.of((tp, ep, attn_tp, pp), layers, ranks, layout, expert_map)
    opened, plan = open_and_plan(source, out, options, hub, overwrite)
    request = request_of(opened, plan, Path(out), verify, overwrite)
    return Conversion.of(request, threads, memory, direct_io, progress).run(fetch_progress, confirm)


def request_of(
    source: Source, plan: OutputPlan, out: Path, verify: str, overwrite: bool, sampled: bool = True
) -> Request:
    """What is asked for, with what tells the source from another one; without samples of its files where it
    is not `sampled`. Raises UsageError, SourceError.
    """
    if verify not in CHECKS:
        raise UsageError(f"--verify {verify}: choose one of {', '.join(CHECKS)}")
    # before anything more is read: what is put in a file's place later is seen
    files = () if source.folder is None else [header.file for header in source.headers]
    before = stamps(source, files)
    return Request(Target(source, identify(source, sampled), plan, out), before, verify, overwrite)


@dataclass
class Conversion:
    """One run: look, lock, prepare, make what is left, finish."""

    target: Target
    request: Request
    budget: Budget
    progress: Progress | None

    @staticmethod
    def of(
        request: Request,
        threads: int | None,
        memory: int | None,
        direct_io: bool,
        progress: Progress | None,
    ) -> Conversion:
        """A run for what is asked for, in the threads and memory that there are. Raises UsageError,
        MachineError.
        """
        target = replace(request.target, direct_io=direct_io)
        return Conversion(target, request, choose_budget(target, threads, memory), progress)

    def __post_init__(self) -> None:
        self.stages = Stages()
        self.work = WorkFolder(self.target.out)
        self.records: dict[str, FinishedUnit] = {}

    def run(self, fetch_progress: Progress | None, confirm: Confirm | None) -> Converted:
        """Do what is left to do in OUT. Raises what `convert` raises."""
        target, out = self.target, self.target.out
        self._decide()  # a refusal leaves no trace
        kernel = kernel_check(target) if self.request.verify == "kernel" else None
        with machine_errors(f"creating {out}"):
            make_path(out)
        with locked(out):
            decision = self._decide()
            if decision.action is Action.REPLACE:
                self._ask(confirm)
            if not decision.claim:
                target = self.target = replace(target, identity=target.identity.unclaimed())
            if decision.action is not Action.DONE:
                left = self._prepare(decision)
                fetcher = self._begin(decision, left, fetch_progress)
                self._make(left, decision.checks, kernel, fetcher)
                finish_output(target, self.records, decision.checks, self.stages)
            else:
                left = []
            remove_work(out)
        made = sum(unit.file_size * len(unit.ranks) for unit in left)
        found = len(target.plan.units) - len(left)
        return Converted(
            out, decision.action.value, len(left), made, found, target.plan.total_bytes, self.stages
        )

    def _ask(self, confirm: Confirm | None) -> None:
        """Raise UsageError unless the files that are to be removed may be, MachineError where the disk is too
        small without them, too. Asked under the lock: what is removed is what was shown.
        """
        source, plan, out = self.target.source, self.target.plan, self.target.out
        files = [out / path for path in removable(out, source.auxiliary)]
        need = Need.of(source, plan, plan.units, sum(path.stat().st_size for path in files))
        fetcher = source.store.fetcher(needs(source, plan, plan.units), staging_of(out), None)
        refuse_full_disk(out, need, fetcher)
        if files and confirm is not None and not confirm(files):
            raise UsageError(f"{out} was left as it is")

    def _decide(self) -> Decision:
        """What may be done with OUT as it is now."""
        target, request = self.target, self.request
        return decide(observe(target.out, target.source), request)

    def _recorded(self) -> dict[str, FinishedUnit]:
        """The records of units that are made and whole."""
        plan = self.target.plan
        found = {unit.name: self.work.finished(plan, unit) for unit in plan.units}
        return {name: record for name, record in found.items() if record is not None}

    def _prepare(self, decision: Decision) -> list[OutputUnit]:
        """Remove what is to be replaced, see what is made already; returns the units that are left."""
        target, out = self.target, self.target.out
        start(load_code, "load")  # where that cannot be, it is loaded when it is needed
        if decision.action is Action.REPLACE:
            with machine_errors(f"clearing {out}"):
                clear_output(out, target.source.auxiliary)
        with machine_errors(f"beginning in {out}"):
            if decision.action is Action.REPAIR:
                reopen(target, self.work, decision.job)
            self.records = self._recorded()
            if decision.recheck:
                compare_recorded(target.source, self.records.values(), decision.recheck)
            left = [unit for unit in target.plan.units if unit.name not in self.records]
            for path in leftovers(out, target.plan, left):
                path.unlink()  # before what is made anew takes as much again
        return left

    def _begin(
        self, decision: Decision, left: Sequence[OutputUnit], fetch_progress: Progress | None
    ) -> Fetcher:
        """Record the job, once it is seen that the disk has room; returns what brings the source's files."""
        source, plan, out = self.target.source, self.target.plan, self.target.out
        fetcher = source.store.fetcher(needs(source, plan, left), staging_of(out), fetch_progress)
        refuse_full_disk(out, Need.of(source, plan, left), fetcher)
        with machine_errors(f"beginning in {out}"):
            if decision.job is not None and decision.action is not Action.REPAIR:
                self.work.begin(decision.job)
            for folder in plan.folders:
                make_folder(out / folder)
            sync_folder(out)  # what the source's files are let go for is reached from the root
        return fetcher

    def _make(self, left: Sequence[OutputUnit], checks: str, kernel: Check | None, fetcher: Fetcher) -> None:
        """Make the units that are left and record each."""
        source, reader = self.target.source, self.target.reader

        def finish(done: UnitWork) -> None:
            """Once a unit's files are durable, its record makes it count, unless the source was touched
            meanwhile.
            """
            record = done.finish()
            if stamps(source, self.request.stamps) != self.request.stamps:
                raise SourceError(
                    f"a weight file was changed while {done.unit.name} was being converted; fetch it again,"
                    " then use --overwrite, or run the same command again where only its attributes changed"
                )
            fetcher.check(done.unit.name)
            if kernel is not None:
                kernel(done.unit)
            self.work.record(record)
            self.records[record.name] = record
            fetcher.release(done.unit.name)

        tally, pool = self._tally(left), BufferPool(self.budget.memory)
        tools = Tools(fetcher, reader, pool, self.stages, checks != "none", tally.count)
        fetcher.start()
        Executor(tools, self.budget.threads, finish).run(self._jobs(left))
        tally.then("writing manifest and documents")

    def _tally(self, left: Sequence[OutputUnit]) -> Tally:
        """Counts the source bytes of the units that are made."""
        plan, tensors = self.target.plan, self.target.source.tensors
        total = sum(tensors[name].entry.size for unit in left for name in source_tensors(plan, unit))
        names = [unit.name for unit in plan.units]
        tally = Tally("converting", total, names, self.progress)
        tally.count(min((unit.name for unit in left), key=names.index, default=""))
        return tally

    def _jobs(self, units: Sequence[OutputUnit]) -> Iterator[Job[UnitWork]]:
        """All jobs in order, each unit's made only when its turn comes."""
        source = self.target.source
        recorded = recorded_digests(self.target.out, source)
        for unit in units:
            work = UnitWork(self.target, unit, recorded)
            jobs: list[Job[UnitWork]] = [*expert_jobs(work, self.budget.batch), *tensor_jobs(work)]
            work.jobs_left = len(jobs)
            yield from jobs
