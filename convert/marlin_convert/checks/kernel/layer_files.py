"""One converted layer as the kernel check sees it: where each rank's experts lie, and where their originals
come from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from marlin_convert.assemble import assemble_expert
from marlin_convert.checkpoint.source import Source
from marlin_convert.checks.findings import Finding, on_some_rank
from marlin_convert.checks.split import Split
from marlin_convert.layout.protocol import PROJECTIONS, ExpertShape, Layout, Role
from marlin_convert.storage.buffers import Bytes
from marlin_convert.storage.files import digest

#: (packed int32 [N, K/8], scale uint16 [N, K/g]) per projection
Original = dict[str, tuple[npt.NDArray[np.int32], npt.NDArray[np.uint16]]]


@dataclass(frozen=True)
class LayerFiles:
    """A layer's stacked tensors on all ranks at hand; `placed` is the expert in each slot.

    `stored(rank, name, begin, count)` is the bytes of some of a rank's experts of one of them; `path(rank)`
    is the file's name inside OUT.
    """

    layer: int
    prefix: str
    layout: Layout
    shape: ExpertShape
    split: Split
    placed: Sequence[int]
    stored: Callable[[int, str, int, int], Bytes]
    path: Callable[[int], str]

    def experts(self, slots: range) -> list[int]:
        """The experts in some slots."""
        return [self.placed[slot] for slot in slots]

    def read(self, rank: int, slots: range) -> dict[str, Bytes]:
        """Stored bytes of consecutive slots of a rank, per stacked tensor name (without prefix)."""
        begin = slots.start - self.split.held(rank).start
        names = [tensor.name for tensor in self.layout.stacked(self.shape)]
        return {name: self.stored(rank, f"{self.prefix}.{name}", begin, len(slots)) for name in names}


#: the published matrices of what is in some slots
Originals = Callable[[range], list[Original]]


def originals_from_source(source: Source, files: LayerFiles) -> Originals:
    """The published matrices, read from the checkpoint."""

    def read(slots: range) -> list[Original]:
        names = [
            f"{files.prefix}.{expert}.{projection}.{kind}"
            for expert in files.experts(slots)
            for projection in PROJECTIONS
            for kind in Role
        ]
        places = [source.tensors[name] for name in names]
        arrays = (
            np.frombuffer(source.part(p.file, p.entry.offset, p.entry.size), np.uint8).copy() for p in places
        )
        return [
            {
                projection: _matrix(files.shape, projection, next(arrays), next(arrays))
                for projection in PROJECTIONS
            }
            for _ in slots
        ]

    return read


#: who names the rank: always with the source, without it where bytes do not have their digest
ON_WHICH = "; on which rank, `verify` tells, and in any case `verify --source`"


def originals_restored(
    files: LayerFiles, digests: Mapping[str, bytes], report: Callable[[Finding], None]
) -> Originals:
    """The matrices restored from all ranks' shards by the inverse layout: what is left of them when the
    source is gone.

    Both sides of the kernel check then come from the same bytes, so each restored matrix is first compared
    with the digest that the published one had (`digests`, kept in OUT); `report` gets a finding for each that
    differs.
    """

    def read(slots: range) -> list[Original]:
        ranks, experts = files.split.owners(slots.start), files.experts(slots)
        stored = [files.read(rank, slots) for rank in ranks]
        return [restore(stored, ranks, experts, i) for i in range(len(experts))]

    def restore(stored: list[dict[str, Bytes]], ranks: range, experts: list[int], i: int) -> Original:
        expert, only = experts[i], ranks[0] if len(ranks) == 1 else None
        path = files.path(ranks[0]) if only is not None else on_some_rank(files.path(ranks[0]))
        slices = [{name: data.reshape(len(experts), -1)[i] for name, data in each.items()} for each in stored]
        matrices, dirty = assemble_expert(files.layout, files.shape, slices)
        for index, projections in dirty.items():
            for projection in projections:
                rank, what = ranks[index], "padding is not zero"
                report(Finding(files.path(rank), what, files.layer, expert, projection, rank))
        for (projection, role), matrix in matrices.items():
            if digests.get(f"{files.prefix}.{expert}.{projection}.{role}") != digest(matrix):
                what = f"{role}, restored from the shards, is not what the source had"
                what += ON_WHICH if only is None else ""
                report(Finding(path, what, files.layer, expert, projection, only))
        return {
            projection: _matrix(files.shape, projection, *(matrices[projection, role] for role in Role))
            for projection in PROJECTIONS
        }

    return read


def _matrix(
    shape: ExpertShape, projection: str, packed: Bytes, scale: Bytes
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.uint16]]:
    out, inputs = shape.matrix(projection)
    aligned_packed = packed.reshape(-1) if packed.ctypes.data % 4 == 0 else packed.reshape(-1).copy()
    aligned_scale = scale.reshape(-1) if scale.ctypes.data % 2 == 0 else scale.reshape(-1).copy()
    return aligned_packed.view(np.int32).reshape(out, inputs // 8), aligned_scale.view(np.uint16).reshape(
        out, inputs // shape.scheme.group_size
    )
