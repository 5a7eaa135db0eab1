"""`plan`: what a conversion would write, from headers alone, through the code the conversion uses."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from marlin_convert.checkpoint.fetcher import fetch_order, most_at_once
from marlin_convert.checkpoint.hub_files import HubOptions
from marlin_convert.checkpoint.source import Source, open_source
from marlin_convert.planning.needs import needs
from marlin_convert.planning.output import Options, OutputPlan, OutputUnit, plan_output
from marlin_convert.storage.files import existing
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

    def as_json(self) -> dict[str, Any]:
        """For `--json`; its schema is schemas/plan.schema.json."""
        plan = self.output
        return {
            "source": {
                "label": self.source.label,
                "files": len(self.source.headers),
                "tensors": len(self.source.tensors),
                "payload_bytes": self.source.payload_bytes,
                "quantization_config_at": self.source.model.quantization.found_at,
                **(
                    {}
                    if self.source.store.origin is None
                    else dict(zip(("repo", "revision"), self.source.store.origin, strict=True))
                ),
            },
            "layout": plan.layout.id,
            "tp": plan.topology.tp,
            "ep": plan.topology.ep,
            "moe_tp": plan.topology.moe_tp,
            "ranks": list(plan.ranks),
            "layers": list(plan.layers),
            "complete": plan.complete,
            "padding": (
                None
                if plan.layout.padded(plan.shape) == plan.shape.local
                else {"moe_intermediate": plan.shape.local, "padded": plan.layout.padded(plan.shape)}
            ),
            "bytes": {
                "output": plan.total_bytes,
                "rank": plan.rank_bytes(),
                "free": self.free,
                **self._fetched_json(),
            },
            "units": [self._unit(unit) for unit in plan.units],
            "copied": list(self.source.auxiliary),
            "left_out": list(self.source.left_out),
            "notes": list(self.notes),
        }

    def _fetched_json(self) -> dict[str, int]:
        return {} if (fetched := self.fetched()) is None else {"fetched": fetched[0], "staged": fetched[1]}

    def _unit(self, unit: OutputUnit) -> dict[str, Any]:
        tensors = []
        for placed in unit.files.tensors:
            spec = placed.spec
            tensors.append(
                {
                    "name": spec.name,
                    "dtype": spec.dtype,
                    "shape": list(spec.shape),
                    "offset": unit.data_start + placed.offset,
                    "size": spec.size,
                    "rule": rule_of(unit, spec.name),
                }
            )
        return {
            "unit": unit.name,
            "paths": [self.output.path(unit, rank) for rank in unit.ranks],
            "file_size": unit.file_size,
            "tensors": tensors,
            "fused": [{"name": view.name, "members": list(view.members)} for view in unit.files.fused],
        }

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
    source: str,
    out: str | None = None,
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
    return PlanReport(opened, output, None if out is None else free_space(Path(out)), tuple(_notes(opened)))


def free_space(place: Path) -> int:
    """Bytes free where `place` is or would be."""
    return shutil.disk_usage(existing(place)).free


def _notes(source: Source) -> list[str]:
    quantization = source.model.quantization
    modules = [
        name.removesuffix(".weight_packed") for name in source.tensors if name.endswith(".weight_packed")
    ]
    odd = [module for module in modules if quantization.ignores(module)]
    notes = list(source.notes)
    if odd:
        notes.append(
            f"{len(odd)} packed modules, such as {odd[0]}, are in the config's ignore list; they are"
            " converted, since packed weights decide"
        )
    return notes
