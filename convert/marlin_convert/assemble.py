"""Source tensors put together again out of shards, streaming: the inverse of a conversion, which every check
uses.

Slices are put side by side in the order in which the caller gives them. Whose slice comes where is the
caller's to say: the checks derive it from the format page, on purpose not from `slicing`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from marlin_convert.documents.manifest import Shard, StoredTensor
from marlin_convert.layout.protocol import ELEMENT, PROJECTIONS, ExpertShape, ExpertSlice, Layout, Role
from marlin_convert.layout.rows import RowView
from marlin_convert.storage.buffers import Bytes, aligned_buffer
from marlin_convert.storage.files import PAGE
from marlin_convert.storage.reads import Piece, PieceReader, ReadPlan, plan_reads
from marlin_convert.storage.shard_file import DTYPE_SIZE

#: rows `begin` to `end` of a whole source tensor, [rows, bytes of a row]
Fill = Callable[[int, int], Bytes]
#: the source matrices of an expert, uint8 [out, bytes of a row], by projection and role
Matrices = dict[tuple[str, Role], Bytes]

#: bytes of one rank's rows read at a time
CHUNK = 8 << 20


@dataclass(frozen=True)
class StoredSlice:
    """A tensor as one shard has it."""

    shard: Shard
    tensor: StoredTensor

    @property
    def rank(self) -> int:
        """Whose it is; 0 in common/."""
        return self.shard.rank or 0

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of its first dimension: of one expert, where it is stacked."""
        return self.tensor.size // self.tensor.shape[0]


@dataclass(frozen=True)
class Chunk:
    """Some rows of a source tensor, and what of them each slice holds, by the slice's place in the order."""

    whole: Bytes
    parts: dict[int, Bytes]


def read_pieces(reader: PieceReader, pieces: Sequence[Piece]) -> list[Bytes]:
    """The bytes of each piece, as views of one page-aligned buffer. Raises SourceError where a file is
    short.
    """
    plan = plan_reads(list(pieces))
    return read_planned(reader, pieces, plan, aligned_buffer(plan.size))


def read_planned(reader: PieceReader, pieces: Sequence[Piece], plan: ReadPlan, buffer: Bytes) -> list[Bytes]:
    """`read_pieces` by their plan, into a page-aligned buffer that is there."""
    files = {piece.file for piece in pieces}
    reader.open_files(files)
    try:
        reader.read(plan, buffer)
    finally:
        reader.close_files(files)
    return [buffer[at : at + piece.size] for at, piece in zip(plan.places, pieces, strict=True)]


def piece_of(stored: StoredSlice, begin: int, end: int) -> Piece:
    """Where rows `begin` to `end` of a stored tensor lie."""
    offset = stored.tensor.offset + begin * stored.row_bytes
    return Piece(stored.shard.path, offset, (end - begin) * stored.row_bytes)


def read_rows(reader: PieceReader, stored: StoredSlice, begin: int, end: int) -> Bytes:
    """Rows `begin` to `end` of a stored tensor, [rows, bytes of a row]."""
    (data,) = read_pieces(reader, [piece_of(stored, begin, end)])
    return data.reshape(end - begin, stored.row_bytes)


def stream_tensor(
    reader: PieceReader, slices: Sequence[StoredSlice | None], axis: int | None, fill: Fill | None = None
) -> Iterator[Chunk]:
    """A tensor that is cut along `axis` (None or 0: rows, 1: columns), row by row, from its slices in order.

    A slice that is not there (None) comes from `fill`; without that its rows are left out, its columns zero.
    """
    known = next(each for each in slices if each is not None)
    rows, width = known.tensor.shape[0], known.row_bytes
    if axis == 1:
        step = max(CHUNK // (width * len(slices)), 1)
        for begin in range(0, rows, step):
            yield _joined_columns(reader, slices, range(begin, min(begin + step, rows)), fill)
        return
    step = max(CHUNK // width, 1)
    for index, stored in enumerate(slices):
        for begin in range(0, rows, step):
            end = min(begin + step, rows)
            if stored is not None:
                part = read_rows(reader, stored, begin, end)
                yield Chunk(part, {index: part})
            elif fill is not None:
                yield Chunk(fill(index * rows + begin, index * rows + end), {})


def _joined_columns(
    reader: PieceReader, slices: Sequence[StoredSlice | None], rows: range, fill: Fill | None
) -> Chunk:
    width = next(each.row_bytes for each in slices if each is not None)
    whole = np.zeros((len(rows), width * len(slices)), np.uint8)
    if fill is not None and None in slices:
        whole[:] = fill(rows.start, rows.stop)
    parts = {
        index: read_rows(reader, stored, rows.start, rows.stop)
        for index, stored in enumerate(slices)
        if stored is not None
    }
    for index, part in parts.items():
        whole[:, index * width : (index + 1) * width] = part
    return Chunk(whole, parts)


def assemble_expert(
    layout: Layout,
    shape: ExpertShape,
    slices: Sequence[Mapping[str, Bytes] | None],
    fill: Callable[[str, Role], Bytes] | None = None,
    space: Bytes | None = None,
) -> tuple[Matrices, dict[int, tuple[str, ...]]]:
    """The published matrices of one expert, from its stored bytes: per slice in order, the bytes of each
    stacked tensor by name. Slices that are not there (None) come from `fill(projection, role)`, a whole
    source matrix; without that they are zero. The matrices lie in `space`, page-aligned and of at least
    `matrices_size` bytes (None: memory of their own).

    Also returns the slices whose padding is not zero, with the projections that it is of; what they hold of
    the matrices means nothing.
    """
    stacked = layout.stacked(shape)
    matrices = _matrices(shape, aligned_buffer(matrices_size(shape)) if space is None else space)
    if None in slices:
        for (projection, role), matrix in matrices.items():
            matrix[:] = 0 if fill is None else fill(projection, role).reshape(matrix.shape)
    dirty = {}
    for index, pieces in enumerate(slices):
        if pieces is None:
            continue
        stored = {
            tensor.name: RowView.of(
                pieces[tensor.name].view(ELEMENT[tensor.role]).reshape(tensor.shape[0], -1)
            )
            for tensor in stacked
        }
        source = {
            (projection, role): _slice_of(matrix.view(ELEMENT[role]), projection, index, len(slices))
            for (projection, role), matrix in matrices.items()
        }
        if projections := layout.unpack(shape, ExpertSlice(source, stored)):
            dirty[index] = projections
    return matrices, dirty


def matrices_size(shape: ExpertShape) -> int:
    """Bytes that the matrices of an expert take, each in whole pages."""
    return sum(-(-rows * width // PAGE) * PAGE for rows, width in _sizes(shape).values())


def _sizes(shape: ExpertShape) -> dict[tuple[str, Role], tuple[int, int]]:
    """Rows, and bytes of a row, of each matrix."""
    sizes = {}
    for projection in PROJECTIONS:
        for role in shape.scheme.roles:
            rows, cols = shape.scheme.source_shape(role, *shape.matrix(projection))
            sizes[projection, role] = rows, cols * DTYPE_SIZE[shape.scheme.dtype(role)]
    return sizes


def _matrices(shape: ExpertShape, space: Bytes) -> Matrices:
    """`space` as matrices; whatever it holds."""
    at, matrices = 0, {}
    for name, (rows, width) in _sizes(shape).items():
        matrices[name] = space[at : at + rows * width].reshape(rows, width)
        at += -(-rows * width // PAGE) * PAGE
    return matrices


def _slice_of(matrix: npt.NDArray[np.generic], projection: str, index: int, count: int) -> RowView:
    """Slice `index` of `count`: gate and up are cut along their outputs, down along its inputs. Stated here
    again, so that the way back does not repeat a mistake of the way there.
    """
    rows, cols = matrix.shape
    if projection == "down_proj":
        return RowView.of(matrix[:, index * (cols // count) : (index + 1) * (cols // count)])
    return RowView.of(matrix[index * (rows // count) : (index + 1) * (rows // count)])
