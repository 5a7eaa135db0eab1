"""Where each tensor of the source lies in a converted folder: by its manifest, never by a plan made again, so
that what another release has written is read as it was written.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from marlin_convert.assemble import StoredSlice
from marlin_convert.documents.manifest import Manifest, Origin, Unit
from marlin_convert.errors import OutputError
from marlin_convert.layout import get_layout
from marlin_convert.layout.protocol import PROJECTIONS, Role, StackedTensor
from marlin_convert.shards.kept_source import ZEROS, KeptSource
from marlin_convert.shards.stored_places import ExpertSource, Held, Missing, PlainSource, StoredExperts
from marlin_convert.slicing import Cut
from marlin_convert.storage.shard_file import DTYPE_SIZE

#: what to do about a manifest that cannot be right
AGAIN = "run verify, or make the folder again: convert with --overwrite"
#: what stands for an expert's number in the manifest, and such a number in a name
EXPERT, NUMBER = "{expert}", re.compile(r"(?<=\.)(?:0|[1-9]\d*)(?=\.)")


@dataclass(frozen=True)
class StoredIndex:
    """Where each source tensor is: those that keep their name by it, those of experts by their pattern."""

    kept: KeptSource
    plain: Mapping[str, PlainSource]
    experts: Mapping[str, tuple[StoredExperts, str, Role | None]]

    @staticmethod
    def of(manifest: Manifest, kept: KeptSource) -> StoredIndex:
        """Raises OutputError where the manifest says of a tensor what cannot be; UsageError for a layout that
        is not known here.
        """
        plain: dict[str, PlainSource] = {}
        experts: dict[str, tuple[StoredExperts, str, Role | None]] = {}
        stored = _stored(manifest)
        for unit in manifest.units:
            for origin in unit.tensors:
                if origin.rule != "experts":
                    held = stored.get((unit.name, origin.tensor), {})
                    plain[origin.sources[0]] = _plain(origin, held, manifest, kept)
            if any(origin.rule == "experts" for origin in unit.tensors):
                layer = _experts(unit, stored, manifest, kept)
                for pattern in (*(p for o in unit.tensors for p in o.sources if EXPERT in p), *unit.checked):
                    experts[pattern] = layer, *_matrix(pattern)
        return StoredIndex(kept, plain, experts)

    def where(self, tensor: str) -> PlainSource | ExpertSource | None:
        """Where a source tensor is; None where it is not, or not wholly, here."""
        found = self._find(tensor)
        whole = found is not None and not found.absent and self.kept.digests.get(tensor, ZEROS) != ZEROS
        return found if whole else None

    def missing(self, tensors: Iterable[str]) -> Missing:
        """Those of `tensors` that are not wholly here, and why."""
        names: list[str] = []
        others: list[str] = []
        layers: set[int] = set()
        ranks: set[int] = set()
        for name in tensors:
            if self.where(name) is not None:
                continue
            names.append(name)
            found = self._find(name)
            if found is not None and found.absent:
                ranks |= set(found.absent)
            elif (layer := self._layer(name)) is not None:
                layers.add(layer)
            else:
                others.append(name)
        return Missing(tuple(names), tuple(sorted(layers)), tuple(sorted(ranks)), tuple(others))

    def _find(self, tensor: str) -> PlainSource | ExpertSource | None:
        if tensor in self.plain:
            return self.plain[tensor]
        for number in NUMBER.finditer(tensor):
            found = self.experts.get(tensor[: number.start()] + EXPERT + tensor[number.end() :])
            if found is not None and int(number[0]) < found[0].experts:
                return ExpertSource(found[0], int(number[0]), *found[1:])
        return None

    def _layer(self, tensor: str) -> int | None:
        """The layer that a tensor is of, by its name."""
        before = re.escape(self.kept.model.family.prefix(self.kept.entries))
        match = re.match(rf"{before}model\.layers\.(\d+)\.", tensor)
        return None if match is None else int(match[1])


def _matrix(pattern: str) -> tuple[str, Role | None]:
    """Which matrix of an expert a pattern is of; None is its weight_shape."""
    _, _, name = pattern.partition(f".{EXPERT}.")
    projection, _, kind = name.partition(".")
    if projection not in PROJECTIONS or kind not in (*Role, "weight_shape"):
        raise OutputError(f"manifest.json: {pattern} is no tensor of an expert; {AGAIN}")
    return projection, Role(kind) if kind in set(Role) else None


def _stored(manifest: Manifest) -> dict[tuple[str, str], dict[int, StoredSlice]]:
    """Every stored tensor by unit and name, then by rank; 0 in common/."""
    stored: dict[tuple[str, str], dict[int, StoredSlice]] = {}
    for shard in manifest.shards:
        for tensor in shard.tensors:
            stored.setdefault((shard.unit, tensor.name), {})[shard.rank or 0] = StoredSlice(shard, tensor)
    return stored


def _plain(origin: Origin, held: Held, manifest: Manifest, kept: KeptSource) -> PlainSource:
    """A tensor that keeps its name, its slices seen to be those of the source's tensor."""
    parts = 1 if origin.axis is None else manifest.parallel.slices(origin)
    entry = kept.entries.get(origin.sources[0])
    cut = Cut(origin.axis, parts, origin.replicas)
    if entry is None or not 0 < parts <= manifest.tp:
        raise OutputError(f"manifest.json: {origin.tensor} comes of nothing that the source has; {AGAIN}")
    for stored in held.values():
        rows = stored.tensor.shape[0] if stored.tensor.shape else 1
        if stored.tensor.size * parts != entry.size or (origin.axis == 1 and rows != entry.shape[0]):
            raise _unlike(stored, f"not a slice of {list(entry.shape)}, {parts} in all")
    firsts = {cut.index(rank): held[rank] for rank in sorted(held, reverse=True)}
    return PlainSource(cut, manifest.tp, tuple(firsts.get(i) for i in range(parts)))


def _experts(
    unit: Unit, stored: Mapping[tuple[str, str], Held], manifest: Manifest, kept: KeptSource
) -> StoredExperts:
    """The experts of a layer, their stacked tensors seen to be of the sizes that the layout says."""
    topology, experts = manifest.topology, kept.model.experts
    layout, shape = get_layout(manifest.layout_id), kept.model.expert_shape(topology.moe_tp)
    placed = unit.placed(experts)
    if (problem := layout.validate(shape)) is not None or len(placed) % topology.ep:
        raise OutputError(
            f"manifest.json: tp {topology.tp} ep {topology.ep} cannot be of this model"
            f" ({problem or f'{experts} experts'}); {AGAIN}"
        )
    if set(placed) != set(range(experts)):
        raise OutputError(f"manifest.json: {unit.name} has not each of {experts} experts in a slot; {AGAIN}")
    held = {}
    for stack in layout.stacked(shape):
        full = [o.tensor for o in unit.tensors if o.tensor.endswith(f".{stack.name}")]
        held[stack.name] = stored.get((unit.name, full[0]), {}) if len(full) == 1 else {}
        whole = (len(placed) // topology.ep, *stack.shape)
        for each in held[stack.name].values():
            _check_stacked(each, stack, whole)
    return StoredExperts(layout, shape, experts, placed, topology, held)


def _check_stacked(stored: StoredSlice, stack: StackedTensor, whole: tuple[int, ...]) -> None:
    """What is moved by compiled code is where, and as large as, that code takes it to be."""
    tensor, size = stored.tensor, DTYPE_SIZE[stack.dtype]
    for extent in whole:
        size *= extent
    if (tensor.shape, tensor.dtype, tensor.size) != (whole, stack.dtype, size) or tensor.offset % 8:
        raise _unlike(stored, f"expected {stack.dtype} {list(whole)}, {size} bytes, at a multiple of 8")


def _unlike(stored: StoredSlice, expected: str) -> OutputError:
    tensor = stored.tensor
    return OutputError(
        f"manifest.json: {tensor.name} in {stored.shard.path} is {tensor.dtype} {list(tensor.shape)},"
        f" {tensor.size} bytes at {tensor.offset}, {expected}; {AGAIN}"
    )
