"""`plan`, which is `convert --dry-run`: what would be written, and what `convert` would do in OUT or refuse
for, through the code that does it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from marlin_convert.arguments import refuse_odd
from marlin_convert.checkpoint.hub_files import HubOptions
from marlin_convert.checkpoint.source import Source
from marlin_convert.documents.manifest import read_manifest
from marlin_convert.errors import ConvertError, MachineError
from marlin_convert.limits import allow, read_limits
from marlin_convert.pipeline.budget import choose_budget
from marlin_convert.pipeline.clear import leftovers, removable
from marlin_convert.pipeline.kernel_check import kernel_check
from marlin_convert.pipeline.locks import locked
from marlin_convert.pipeline.opening import open_and_plan
from marlin_convert.pipeline.out_state import OutState, observe
from marlin_convert.pipeline.repair import lost_units, what_is_kept
from marlin_convert.pipeline.resume import Action, decide, refuse_place
from marlin_convert.pipeline.run import request_of
from marlin_convert.pipeline.space import Need, refuse_full_disk
from marlin_convert.pipeline.work_folder import WorkFolder, staging_of
from marlin_convert.planning.needs import needs, source_tensors
from marlin_convert.planning.output_plan import Options, OutputPlan, OutputUnit
from marlin_convert.planning.plan_report import PlanReport, Prospect, notes_on
from marlin_convert.storage.disk_rate import read_rate, write_rate
from marlin_convert.storage.files import existing, free_space, machine_error, machine_errors


def plan(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str] | None = None,
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
    hub: HubOptions | None = None,
) -> PlanReport:
    """Plan a conversion; of the source no more than headers is read, but for samples where OUT holds a
    conversion already. The options are those of `convert`.

    With `out` the report has what `convert` would do there and how long it takes at the rates of a short
    measurement, for which a file is written there and removed; and `refusal`, the error that `convert` would
    raise for this place. Raises SourceError and UsageError as `convert` does for a source or a request that
    cannot be met anywhere.
    """
    refuse_odd(threads=threads, memory=memory)
    options = Options.of((tp, ep, attn_tp, pp), layers, ranks, layout, expert_map)
    opened, output = open_and_plan(source, out, options, hub, overwrite)
    allowance = allow(read_limits(), threads, len(output.ranks))
    report = PlanReport(opened, output, tuple(notes_on(opened)), allowance)
    if out is None:
        return report
    wish = _Wish(opened, output, Path(out), verify, overwrite)
    prospect, refusal = wish.foresee(threads, memory)
    return PlanReport(opened, output, report.notes, allowance, prospect, refusal)


@dataclass(frozen=True)
class _Wish:
    """A conversion that is asked for."""

    source: Source
    plan: OutputPlan
    out: Path
    verify: str
    overwrite: bool

    def foresee(self, threads: int | None, memory: int | None) -> tuple[Prospect | None, ConvertError | None]:
        """What would be done, as far as it can be told, and what would be refused."""
        try:
            state = observe(self.out, self.source)
            action = self._action(state, threads, memory)
            left, freed = self._left(action)
            fetcher = self.source.store.fetcher(
                needs(self.source, self.plan, left), staging_of(self.out), None
            )
            need = Need.of(self.source, self.plan, left, freed)
            rate = self._write_rate()
        except ConvertError as error:
            return None, error
        except OSError as error:
            return None, machine_error(f"creating {self.out}", error)
        here = existing(self.out)
        folder = self.source.folder
        prospect = Prospect(
            action=action.value,
            units=len(left),
            read=self._source_bytes(left),
            written=need.shards,
            needed=(need.shards + need.documents + fetcher.room) if action is not Action.DONE else 0,
            free=free_space(here) + freed,
            read_rate=self._read_rate(),
            write_rate=rate,
            same_disk=folder is None or folder.stat().st_dev == here.stat().st_dev,
        )
        if action is not Action.DONE:
            try:
                refuse_full_disk(self.out, need, fetcher)
            except MachineError as error:
                return prospect, error
        return prospect, None

    def _action(self, state: OutState, threads: int | None, memory: int | None) -> Action:
        """What would be decided; where nothing is there yet, without reading samples of the source."""
        refuse_place(state, self.source)
        request = request_of(self.source, self.plan, self.out, self.verify, self.overwrite, not state.fresh)
        choose_budget(request.target, threads, memory)
        action = Action.NEW if state.fresh else decide(state, request).action
        if self.verify == "kernel":
            kernel_check(request.target)
        if self.out.exists():
            with machine_errors(f"locking {self.out}"), locked(self.out):
                pass
        return action

    def _left(self, action: Action) -> tuple[list[OutputUnit], int]:
        """The units that would be made, and the bytes that would go away before."""
        units = list(self.plan.units)
        if action is Action.DONE:
            return [], 0
        if action is Action.REPLACE:
            files = [self.out / path for path in removable(self.out, self.source)]
            return units, sum(path.stat().st_size for path in files)
        if action is Action.REPAIR:
            manifest = read_manifest(self.out)
            what_is_kept(self.out, manifest, self.source)
            lost = lost_units(self.out, manifest)
            units = [unit for unit in units if unit.name in lost]
            leftovers(self.out, self.plan, units)
            return units, 0
        if action is Action.CONTINUE:
            work = WorkFolder(self.out)
            left = [unit for unit in units if work.finished(self.plan, unit) is None]
            return left, sum(path.stat().st_size for path in leftovers(self.out, self.plan, left))
        return units, 0

    def _source_bytes(self, units: Sequence[OutputUnit]) -> int:
        tensors = self.source.tensors
        return sum(tensors[name].entry.size for unit in units for name in source_tensors(self.plan, unit))

    def _read_rate(self) -> float | None:
        if self.source.folder is None:
            return None
        largest = max(self.source.headers, key=lambda header: header.size)
        try:
            return read_rate(self.source.path(largest.file))
        except OSError:
            return None

    def _write_rate(self) -> float | None:
        """Raises OSError where nothing can be written."""
        here = existing(self.out)
        return write_rate(here, min(free_space(here) // 4, 256 << 20))
