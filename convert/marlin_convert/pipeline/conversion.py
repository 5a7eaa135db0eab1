"""The conversion from end to end."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from secrets import token_hex

from marlin_convert.checkpoint.fetcher import Fetcher
from marlin_convert.documents.manifest import read_manifest
from marlin_convert.documents.records import FinishedUnit
from marlin_convert.errors import UsageError
from marlin_convert.layout import load_code
from marlin_convert.pipeline.budget import Budget, choose_budget
from marlin_convert.pipeline.clear import (
    clear_output,
    leftovers,
    removable,
    remove_work,
)
from marlin_convert.pipeline.finish import finish_output
from marlin_convert.pipeline.kernel_check import kernel_check
from marlin_convert.pipeline.locks import locked, turn
from marlin_convert.pipeline.making import Maker, source_bytes
from marlin_convert.pipeline.on_ray import RayEngine
from marlin_convert.pipeline.out_state import observe
from marlin_convert.pipeline.recheck import compare_recorded
from marlin_convert.pipeline.remote import Origin
from marlin_convert.pipeline.repair import lost_units, reopen
from marlin_convert.pipeline.resume import Action, Decision, Request, decide
from marlin_convert.pipeline.space import Need, refuse_full_disk
from marlin_convert.pipeline.stages import Stages
from marlin_convert.pipeline.target import Target
from marlin_convert.pipeline.work_folder import WorkFolder, staging_of
from marlin_convert.planning.needs import needs
from marlin_convert.planning.output_plan import OutputUnit
from marlin_convert.progress import Progress
from marlin_convert.shares import Share, split_evenly
from marlin_convert.spread import Spread
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
    #: of a share: the numbers of the shares whose units are not made yet, without which OUT is not finished
    waiting: tuple[int, ...] = ()


@dataclass
class Conversion:
    """One run: look, lock, prepare, make what is left, finish. Of several that make a `share` each, the one
    that ends last finishes. An `engine` makes the units elsewhere than in this process.
    """

    target: Target
    request: Request
    budget: Budget
    progress: Progress | None
    share: Share | None = None
    engine: RayEngine | None = None

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

    def over(self, spread: Spread, origin: Origin) -> Conversion:
        """The same, over the processes that were asked for."""
        if spread.engine == "ray":
            engine = RayEngine(origin, spread.address, spread.threads, spread.memory)
            return replace(self, engine=engine)
        return replace(self, share=spread.share)

    def __post_init__(self) -> None:
        self.stages = Stages()
        if self.share is not None:
            self.target = replace(self.target, attempt=token_hex(4))
        self.work = WorkFolder(self.target.out, self.target.attempt)
        self.records: dict[str, FinishedUnit] = {}
        plan = self.target.plan
        sizes = [source_bytes(self.target, unit) for unit in plan.units] if self.share else []
        shares = split_evenly(sizes, self.share.count) if self.share else [0] * len(plan.units)
        #: the share of each unit
        self.shares = dict(zip((unit.name for unit in plan.units), shares, strict=True))

    def run(self, fetch_progress: Progress | None, confirm: Confirm | None) -> Converted:
        """Do what is left to do in OUT. Raises what `convert` raises."""
        target, out = self.target, self.target.out
        self._decide()  # a refusal leaves no trace
        here = self.engine is None
        kernel = kernel_check(target) if self.request.verify == "kernel" and here else None
        with machine_errors(f"creating {out}"):
            make_path(out)
        with locked(out, shared=self.share is not None):
            with self._alone():
                decision = self._decide()
                if decision.action is Action.REPLACE:
                    self._ask(confirm)
                self._claim(decision)
                left, fetcher = self._begin(decision, fetch_progress)
            if fetcher is not None and (left or self.share is None):
                target = self.target
                maker = Maker(target, self.request.stamps, self.budget, decision.checks, kernel, self.stages)
                if self.engine is None:
                    maker.make(left, fetcher, self._made, self.progress)
                else:
                    self.engine.make(maker, left, self._made, self.progress)
            with self._alone():
                waiting = self._end(decision)
        made = sum(unit.file_size * len(unit.ranks) for unit in left)
        found = len(self._mine) - len(left)
        total = target.plan.total_bytes
        return Converted(out, decision.action.value, len(left), made, found, total, self.stages, waiting)

    @property
    def _mine(self) -> list[OutputUnit]:
        """The units that are this run's to make."""
        index = 0 if self.share is None else self.share.index
        return [unit for unit in self.target.plan.units if self.shares[unit.name] == index]

    def _claim(self, decision: Decision) -> None:
        """Name repository and commit no more where what was made before was not compared with them."""
        if not decision.claim:
            self.target = replace(self.target, identity=self.target.identity.unclaimed())

    def _alone(self) -> AbstractContextManager[None]:
        """What is in this context no other process does at the same time."""
        return nullcontext() if self.share is None else turn(self.target.out)

    def _is_done(self, decision: Decision) -> bool:
        """Whether nothing is left to be done here: all is there, or what was lost since is of other shares,
        who alone can begin to mend it.
        """
        if decision.action is not Action.REPAIR or self.share is None:
            return decision.action is Action.DONE
        lost = lost_units(self.target.out, read_manifest(self.target.out))
        return bool(lost) and lost.isdisjoint(unit.name for unit in self._mine)

    def _end(self, decision: Decision) -> tuple[int, ...]:
        """Finish OUT, unless units of other shares are not made yet: returns the numbers of these."""
        out = self.target.out
        missing: Iterable[str] = ()
        if self.share is not None:
            decision = self._decide()
            self._claim(decision)
            self.records = self._recorded()
            if decision.action is Action.REPAIR:
                missing = lost_units(out, read_manifest(out))
            elif decision.action is not Action.DONE:
                missing = self.shares.keys() - self.records.keys()
        if waiting := tuple(sorted({self.shares[name] for name in missing})):
            return waiting
        if decision.action is not Action.DONE:
            finish_output(self.target, self.records, decision.checks, self.stages)
        remove_work(out)
        return ()

    def _made(self, record: FinishedUnit) -> None:
        self.records[record.name] = record

    def _ask(self, confirm: Confirm | None) -> None:
        """Raise UsageError unless the files that are to be removed may be, MachineError where the disk is too
        small without them, too. Asked under the lock: what is removed is what was shown.
        """
        source, plan, out = self.target.source, self.target.plan, self.target.out
        files = [out / path for path in removable(out, source)]
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
        self.work.look_again()
        found = {unit.name: self.work.finished(plan, unit) for unit in plan.units}
        return {name: record for name, record in found.items() if record is not None}

    def _prepare(self, decision: Decision) -> list[OutputUnit]:
        """Remove what is to be replaced, see what is made already; returns the units that are left."""
        target, out = self.target, self.target.out
        start(load_code, "load")  # where that cannot be, it is loaded when it is needed
        if decision.action is Action.REPLACE:
            with machine_errors(f"clearing {out}"):
                clear_output(out, target.source)
        with machine_errors(f"beginning in {out}"):
            if decision.action is Action.REPAIR:
                reopen(target, self.work, decision.job)
            self.records = self._recorded()
            if decision.recheck:
                compare_recorded(target.source, self.records.values(), decision.recheck)
            left = [unit for unit in self._mine if unit.name not in self.records]
            for path in leftovers(out, target.plan, left):
                path.unlink()  # before what is made anew takes as much again
        return left

    def _begin(
        self, decision: Decision, fetch_progress: Progress | None
    ) -> tuple[list[OutputUnit], Fetcher | None]:
        """Record the job, once it is seen that the disk has room; returns the units that are left, and what
        brings the source's files, unless nothing is to be done.
        """
        if self._is_done(decision):
            return [], None
        left = self._prepare(decision)
        source, plan, out = self.target.source, self.target.plan, self.target.out
        staging = staging_of(out, "" if self.share is None else self.share.part)
        fetcher = source.store.fetcher(needs(source, plan, left), staging, fetch_progress)
        refuse_full_disk(out, Need.of(source, plan, left), fetcher)
        with machine_errors(f"beginning in {out}"):
            if decision.job is not None and decision.action is not Action.REPAIR:
                self.work.begin(decision.job)
            for folder in plan.folders:
                make_folder(out / folder)
            sync_folder(out)  # what the source's files are let go for is reached from the root
        return left, fetcher
