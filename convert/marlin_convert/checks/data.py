"""The part of `verify` that reads all tensor data, in tasks of a tensor or an expert."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from marlin_convert.assemble import CHUNK, StoredSlice, read_rows
from marlin_convert.checks.experts import ExpertCheck
from marlin_convert.checks.findings import Finding, Verification
from marlin_convert.checks.origins import expected_origin
from marlin_convert.checks.part import Part
from marlin_convert.checks.plain import PlainCheck
from marlin_convert.checks.published import Published
from marlin_convert.checks.split import Split
from marlin_convert.checks.stored_layer import StoredLayer
from marlin_convert.checks.tasks import Task
from marlin_convert.checks.units import UnitVerification
from marlin_convert.documents.manifest import Unit
from marlin_convert.errors import OutputError
from marlin_convert.layout import get_layout, known_layouts
from marlin_convert.shards.kept_source import KeptSource, sound_bytes
from marlin_convert.storage.buffers import BufferPool
from marlin_convert.storage.files import digest
from marlin_convert.storage.reads import PieceReader
from marlin_convert.storage.shard_file import is_filler

#: memory that checking a tensor takes that is streamed: a chunk as stored, joined, and of the source
STREAMED = 3 * CHUNK


class DataPass:
    """The pass over all tensor data of shards that are structurally sound."""

    def __init__(self, out: Path, part: Part, kept: KeptSource, split: Split, published: Published) -> None:
        self._part, self._manifest, self._kept, self._published = part, part.manifest, kept, published
        self._split, manifest = split, part.manifest
        self._reader = PieceReader(lambda path: out / path)
        self._pool = BufferPool(sys.maxsize)  # there are only so many threads, chosen by memory
        self._digests = sound_bytes(out, manifest, "digests.bin") or b""
        if manifest.layout_id not in known_layouts():
            raise OutputError(f"{out}: the layout {manifest.layout_id} is not one this program knows")

    def tasks(self, good: set[str], report: Verification) -> Iterator[Task]:
        """A task for each tensor and each expert; `good` are the paths of shards that may be read."""
        for unit in self._manifest.units:
            shards = self._part.of_unit(unit)
            if not shards and not self._part.whole:
                continue
            part = UnitVerification(whole=report, unit=unit, shards=shards)
            if not shards or any(shard.path not in good for shard in shards):
                part.read = False
                part.count(unproven=self._part.tensors(unit, self._split))
                continue
            for task in self._unit_tasks(part):
                yield task._replace(check=partial(part.timed, task.check))

    def _unit_tasks(self, part: UnitVerification) -> Iterator[Task]:
        unit, shards = part.unit, part.shards
        stored = [StoredSlice(shard, tensor) for shard in shards for tensor in shard.tensors]
        yield from self._plain_tasks(unit, stored, len(shards), part)
        yield from self._expert_tasks(unit, stored, part)
        for item in stored:
            if is_filler(item.tensor.name):
                check = partial(self._check_filler, item, unit.layer, part)
                yield Task(unit.name, item.tensor.size, item.tensor.size, check)

    def _plain_tasks(
        self, unit: Unit, stored: Sequence[StoredSlice], shards: int, report: Verification
    ) -> Iterator[Task]:
        check = PlainCheck(self._reader, self._published, report, self._split, unit.layer)
        for origin in unit.tensors:
            if origin.rule == "experts":
                continue
            if origin != expected_origin(origin.tensor, self._kept.model, self._split):
                report.count(unproven=1)  # check_manifest has reported it; what it claims cannot be used
                continue
            held = [item for item in stored if item.tensor.name == origin.tensor]
            if len(held) != shards:
                what = f"{origin.tensor} is not in all shards of {unit.name}"
                report.add(Finding("manifest.json", what, unit.layer))
                continue
            size = sum(item.tensor.size for item in held)
            yield Task(unit.name, size, STREAMED, partial(check.check, origin, held))

    def _expert_tasks(
        self, unit: Unit, stored: Sequence[StoredSlice], report: UnitVerification
    ) -> Iterator[Task]:
        stacked = [origin.tensor for origin in unit.tensors if origin.rule == "experts"]
        if not stacked or unit.layer is None:
            return
        split = self._split
        prefix, layout = stacked[0].rpartition(".")[0], get_layout(self._manifest.layout_id)
        held = {
            (item.shard.rank, item.tensor.name.removeprefix(f"{prefix}.")): item
            for item in stored
            if item.tensor.name in stacked and item.shard.rank is not None
        }
        ranks = {rank for rank, _ in held}
        shape = self._kept.model.expert_shape(split.moe_tp)
        if {name for _, name in held} != {tensor.name for tensor in layout.stacked(shape)}:
            report.count(unproven=self._part.tensors(unit, split))
            return  # `check_manifest` has reported it, and the others mean nothing alone
        layer = StoredLayer(unit.layer, prefix, layout, shape, split, split.placed(unit), held, self._digests)
        sound = [self._is_sound(layer, key, report) for key in held]
        if all(sound):
            check = ExpertCheck(self._pool, self._reader, self._published, report, layer)
            owned = layer.owned()
            size = sum(item.tensor.size for item in held.values()) // max(len(owned), 1)
            # as stored, put together, and a copy to look closer at what is wrong
            memory = 3 * shape.moe_tp * sum(item.row_bytes for item in held.values()) // max(len(ranks), 1)
            for copies in owned:
                yield Task(unit.name, size, memory, partial(check.check, copies))

    def _is_sound(self, layer: StoredLayer, key: tuple[int, str], report: Verification) -> bool:
        """Whether a stacked tensor has the shape of its experts; and its digest must be that of theirs."""
        (rank, name), item = key, layer.held[key]
        full, local = f"{layer.prefix}.{name}", self._split.local
        expected = {t.name: (local, *t.shape) for t in layer.layout.stacked(layer.shape)}
        if item.tensor.shape != expected.get(name) or item.tensor.experts is None:
            what = f"{full} has the shape {list(item.tensor.shape)}, not that of its experts"
            report.add(Finding(item.shard.path, what, layer.layer, rank=rank))
            return False
        at = item.tensor.experts
        if self._digests and digest(self._digests[at : at + 16 * local]).hex() != item.tensor.digest:
            what = f"{full}: its digest is not that of its experts' digests in digests.bin"
            report.add(Finding(item.shard.path, what, layer.layer, rank=rank))
        return True

    def _check_filler(self, item: StoredSlice, layer: int | None, report: Verification) -> None:
        data = read_rows(self._reader, item, 0, item.tensor.shape[0])
        if data.any() or digest(np.ascontiguousarray(data)).hex() != item.tensor.digest:
            what = f"the filler {item.tensor.name} is not all zeros"
            report.add(Finding(item.shard.path, what, layer, rank=item.shard.rank))
