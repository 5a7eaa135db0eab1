"""What `plan` tells: what a conversion would write, from headers alone, and what it would do in OUT."""

from __future__ import annotations

import re
from dataclasses import dataclass

from marlin_convert.checkpoint.fetcher import fetch_order, most_at_once
from marlin_convert.checkpoint.source import Source
from marlin_convert.documents.plan import (
    Plan,
    PlanBytes,
    PlanProspect,
    PlanResources,
    PlanSource,
    PlanTensor,
    PlanUnit,
    PlanView,
)
from marlin_convert.errors import ConvertError
from marlin_convert.limits import Allowance
from marlin_convert.planning.needs import needs
from marlin_convert.planning.output_plan import OutputPlan, OutputUnit
from marlin_convert.storage.shard_file import is_filler


@dataclass(frozen=True, repr=False)
class PlanReport:
    """A plan, the source it is for, and what `convert` would do in OUT: `prospect` and why it would refuse,
    both None where no place was given.
    """

    source: Source
    output: OutputPlan
    notes: tuple[str, ...]
    allowance: Allowance
    prospect: Prospect | None = None
    refusal: ConvertError | None = None

    def __repr__(self) -> str:
        made = self.output
        return (
            f"PlanReport({self.source.label!r}, tp={made.topology.tp}, ep={made.topology.ep},"
            f" attn_tp={made.topology.attn_tp or made.topology.tp}, units={len(made.units)},"
            f" bytes={made.total_bytes}, refusal={self.refusal!r})"
        )

    def document(self) -> Plan:
        """For `--json`."""
        plan, source = self.output, self.source
        placement = plan.topology.placement
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
            attn_tp=plan.topology.attn_tp or plan.topology.tp,
            pp=plan.topology.pp,
            slots=plan.experts if placement is None else placement.slots,
            moe_tp=plan.topology.moe_tp,
            ranks=tuple(plan.ranks),
            layers=tuple(plan.layers),
            complete=plan.complete,
            padding=plan.padding,
            bytes=PlanBytes(plan.total_bytes, plan.rank_bytes(), fetched, staged),
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
            convert=None if self.prospect is None else self._prospect(self.prospect),
            refusal=None if self.refusal is None else str(self.refusal),
        )

    def _prospect(self, found: Prospect) -> PlanProspect:
        return PlanProspect(
            action=found.action,
            units=found.units,
            read=found.read,
            written=found.written,
            needed=found.needed,
            free=found.free,
            read_rate=found.read_rate,
            write_rate=found.write_rate,
            seconds=found.seconds,
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


@dataclass(frozen=True)
class Prospect:
    """What a conversion would do in OUT now: `units` of all are left to make, of `read` source bytes; it
    takes `needed` bytes of space, documents and fetched files included, where `free` are. Rates are what was
    measured, in bytes a second, None where nothing could be.
    """

    action: str
    units: int
    read: int
    written: int
    needed: int
    free: int
    read_rate: float | None
    write_rate: float | None
    same_disk: bool

    @property
    def seconds(self) -> float | None:
        """About what it takes where the disk decides."""
        if self.read_rate is None or self.write_rate is None:
            return None
        reading, writing = self.read / self.read_rate, self.written / self.write_rate
        return reading + writing if self.same_disk else max(reading, writing)


def notes_on(source: Source) -> list[str]:
    """What a person should know of a source."""
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
