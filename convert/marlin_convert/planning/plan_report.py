"""`plan`: what a conversion would write, from headers alone, through the code the conversion uses."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from marlin_convert.checkpoint.fetcher import fetch_order, most_at_once
from marlin_convert.checkpoint.hub_files import HubOptions
from marlin_convert.checkpoint.source import Source, open_source
from marlin_convert.documents.plan import (
    Plan,
    PlanBytes,
    PlanResources,
    PlanSource,
    PlanTensor,
    PlanUnit,
    PlanView,
)
from marlin_convert.limits import Allowance, allow, read_limits
from marlin_convert.planning.needs import needs
from marlin_convert.planning.output_plan import Options, OutputPlan, OutputUnit, plan_output
from marlin_convert.storage.files import free_space
from marlin_convert.storage.shard_file import is_filler


@dataclass(frozen=True)
class PlanReport:
    """A plan and the source it is for; `free` is the space at the output's place, None where no place was
    given.
    """

    source: Source
    output: OutputPlan
    free: int | None
    notes: tuple[str, ...]
    allowance: Allowance

    def document(self) -> Plan:
        """For `--json`."""
        plan, source = self.output, self.source
        repo, revision = source.store.hub_commit or (None, None)
        fetched, staged = self.fetched() or (None, None)
        return Plan(
            source=PlanSource(
                label=source.label,
                files=len(source.headers),
                tensors=len(source.tensors),
                payload_bytes=source.payload_bytes,
                quantization_config_at=source.model.quantization.found_at,
                repo=repo,
                revision=revision,
            ),
            layout=plan.layout.id,
            tp=plan.topology.tp,
            ep=plan.topology.ep,
            moe_tp=plan.topology.moe_tp,
            ranks=tuple(plan.ranks),
            layers=tuple(plan.layers),
            complete=plan.complete,
            padding=plan.padding,
            bytes=PlanBytes(plan.total_bytes, plan.rank_bytes(), self.free, fetched, staged),
            resources=PlanResources(
                self.allowance.threads.value,
                self.allowance.threads.by,
                self.allowance.memory.value,
                self.allowance.memory.by,
            ),
            units=tuple(self._unit(unit) for unit in plan.units),
            copied=tuple(source.auxiliary),
            left_out=tuple(source.left_out),
            notes=self.notes,
        )

    def _unit(self, unit: OutputUnit) -> PlanUnit:
        tensors = tuple(
            PlanTensor(
                placed.spec.name,
                placed.spec.dtype,
                placed.spec.shape,
                unit.offset(placed.spec.name),
                placed.spec.size,
                rule_of(unit, placed.spec.name),
            )
            for placed in unit.files.tensors
        )
        paths = tuple(self.output.path(unit, rank) for rank in unit.ranks)
        views = tuple(PlanView(view.name, view.members) for view in unit.files.fused)
        return PlanUnit(unit.name, paths, unit.file_size, tensors, views)

    def fetched(self) -> tuple[int, int] | None:
        """Of a repository: bytes that come over the wire, and how many of them lie on the disk at a time with
        --free-source.
        """
        if self.source.folder is not None:
            return None
        needed = needs(self.source, self.output, self.output.units)
        sizes = {header.file: header.size for header in self.source.headers}
        return sum(sizes[name] for name in fetch_order(needed)), most_at_once(needed, sizes)

    def groups(self) -> list[list[OutputUnit]]:
        """Units that differ in nothing but the layer's number, together."""
        groups: dict[tuple[object, ...], list[OutputUnit]] = {}
        for unit in self.output.units:
            key = tuple(
                (re.sub(r"\.layers\.\d+\.", ".layers.*.", p.spec.name), p.spec.dtype, p.spec.shape, p.offset)
                for p in unit.files.tensors
            )
            groups.setdefault(key, []).append(unit)
        return list(groups.values())


def rule_of(unit: OutputUnit, name: str) -> str:
    """The rule a stored tensor came by."""
    if is_filler(name):
        return "filler"
    return next((tensor.rule for tensor in unit.source.plain if tensor.name == name), "experts")


def plan(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str] | None = None,
    *,
    tp: int,
    ep: int = 1,
    layers: Sequence[int] | None = None,
    ranks: Sequence[int] | None = None,
    layout: str | None = None,
    hub: HubOptions | None = None,
) -> PlanReport:
    """Plan a conversion; nothing is written and no tensor data is read. Raises SourceError and UsageError as
    `convert` does.
    """
    opened = open_source(source, hub)
    output = plan_output(opened, Options.of(tp, ep, layers, ranks, layout))
    free = None if out is None else free_space(Path(out))
    allowance = allow(read_limits(), ranks=len(output.ranks))
    return PlanReport(opened, output, free, tuple(_notes(opened)), allowance)


def _notes(source: Source) -> list[str]:
    quantization = source.model.quantization
    modules = [
        name.removesuffix(".weight_packed") for name in source.tensors if name.endswith(".weight_packed")
    ]
    odd = [module for module in modules if quantization.ignores(module)]
    notes = list(source.notes)
    if quantization.unread:
        notes.append(
            f"the config's ignore list has {len(quantization.unread)} patterns that were not compared, such"
            f" as {quantization.unread[0]}; packed weights decide what is converted"
        )
    if odd:
        notes.append(
            f"{len(odd)} packed modules, such as {odd[0]}, are in the config's ignore list; they are"
            " converted, since packed weights decide"
        )
    return notes
