"""One converted layer as the kernel check sees it: where each rank's experts lie, and where their originals
come from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from marlin_convert.buffers import aligned_buffer
from marlin_convert.checkpoint.source import Source
from marlin_convert.checks.report import Finding
from marlin_convert.files import digest
from marlin_convert.layout.protocol import PROJECTIONS, ExpertShape, Layout
from marlin_convert.layout.rows import Rows
from marlin_convert.reads import Piece, PieceReader, plan_reads

Bytes = npt.NDArray[np.uint8]
#: (packed int32 [N, K/8], scale uint16 [N, K/g]) per projection
Original = dict[str, tuple[npt.NDArray[np.int32], npt.NDArray[np.uint16]]]


@dataclass(frozen=True)
class LayerFiles:
    """A layer's stacked tensors on all ranks at hand.

    `stored(rank, name, begin, count)` is the bytes of some of a rank's experts of one of them; `path(rank)`
    is the file's name inside OUT.
    """

    layer: int
    prefix: str
    layout: Layout
    shape: ExpertShape
    experts: int
    tp: int
    ep: int
    ranks: tuple[int, ...]
    stored: Callable[[int, str, int, int], Bytes]
    path: Callable[[int], str]

    @property
    def moe_tp(self) -> int:
        """Slices of one expert."""
        return self.tp // self.ep

    def owned(self, rank: int) -> range:
        """The experts of a rank."""
        local = self.experts // self.ep
        return range(rank // self.moe_tp * local, (rank // self.moe_tp + 1) * local)

    def read(self, rank: int, experts: range) -> dict[str, Bytes]:
        """Stored bytes of consecutive experts of a rank, per stacked tensor name (without prefix)."""
        begin = experts.start - self.owned(rank).start
        names = [tensor.name for tensor in self.layout.stacked(self.shape)]
        return {name: self.stored(rank, f"{self.prefix}.{name}", begin, len(experts)) for name in names}


def read_pieces(reader: PieceReader, pieces: Sequence[Piece]) -> list[Bytes]:
    """The bytes of each piece, as views of one buffer."""
    plan = plan_reads(list(pieces))
    buffer = aligned_buffer(plan.size)
    files = {piece.file for piece in pieces}
    reader.open_files(files)
    try:
        reader.read(plan, buffer)
    finally:
        reader.close_files(files)
    return [buffer[at : at + piece.size] for at, piece in zip(plan.places, pieces, strict=True)]


Originals = Callable[[range], list[Original]]


def originals_from_source(source: Source, files: LayerFiles) -> Originals:
    """The published matrices, read from the checkpoint."""

    def read(experts: range) -> list[Original]:
        names = [
            f"{files.prefix}.{expert}.{projection}.{kind}"
            for expert in experts
            for projection in PROJECTIONS
            for kind in ("weight_packed", "weight_scale")
        ]
        places = [source.tensors[name] for name in names]
        data = read_pieces(
            PieceReader(source.path, direct=False),
            [Piece(p.file, p.entry.offset, p.entry.size) for p in places],
        )
        arrays = iter(data)
        return [
            {
                projection: _matrix(files.shape, projection, next(arrays), next(arrays))
                for projection in PROJECTIONS
            }
            for _ in experts
        ]

    return read


def originals_restored(
    files: LayerFiles, digests: Mapping[str, bytes], report: Callable[[Finding], None]
) -> Originals:
    """The matrices restored from all ranks' shards by the inverse layout: what is left of them when the
    source is gone.

    Both sides of the kernel check then come from the same bytes, so each restored matrix is first compared
    with the digest that the published one had (`digests`, kept in OUT); `report` gets a finding for each that
    differs.
    """

    shapes = {tensor.name: tensor.shape for tensor in files.layout.stacked(files.shape)}

    def restore(
        pieces: Mapping[int, dict[str, Bytes]], experts: range, i: int, projection: str
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.uint16]]:
        out, inputs = files.shape.matrix(projection)
        packed, scale = (
            np.zeros((out, inputs // 16), np.uint64),
            np.zeros((out, inputs // files.shape.group_size), np.uint16),
        )
        words, scales = files.layout.targets(projection)
        for index, rank in enumerate(pieces):
            w = pieces[rank][words].view(np.uint64).reshape(len(experts), shapes[words][0], -1)[i]
            s = pieces[rank][scales].view(np.uint16).reshape(len(experts), shapes[scales][0], -1)[i]
            try:
                files.layout.unpack(
                    files.shape, projection, index, Rows.of(w), Rows.of(s), Rows.of(packed), Rows.of(scale)
                )
            except ValueError as error:
                report(
                    Finding(files.path(rank), str(error), files.layer, experts.start + i, projection, rank)
                )
        for kind, matrix in (("weight_packed", packed), ("weight_scale", scale)):
            if digests.get(f"{files.prefix}.{experts.start + i}.{projection}.{kind}") != digest(matrix):
                what = (
                    f"{kind}, restored from all ranks, is not what the source had; `marlin-convert verify`"
                    " says on which rank"
                )
                report(
                    Finding(
                        f"rank-*/layer-{files.layer:03d}.safetensors",
                        what,
                        files.layer,
                        experts.start + i,
                        projection,
                    )
                )
        return packed.view(np.int32), scale

    def read(experts: range) -> list[Original]:
        group = experts.start // (files.experts // files.ep)
        pieces = {
            rank: files.read(rank, experts)
            for rank in range(group * files.moe_tp, (group + 1) * files.moe_tp)
        }
        return [
            {projection: restore(pieces, experts, i, projection) for projection in PROJECTIONS}
            for i in range(len(experts))
        ]

    return read


def _matrix(
    shape: ExpertShape, projection: str, packed: Bytes, scale: Bytes
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.uint16]]:
    out, inputs = shape.matrix(projection)
    aligned_packed = packed if packed.ctypes.data % 4 == 0 else packed.copy()
    aligned_scale = scale if scale.ctypes.data % 2 == 0 else scale.copy()
    return aligned_packed.view(np.int32).reshape(out, inputs // 8), aligned_scale.view(np.uint16).reshape(
        out, inputs // shape.group_size
    )
