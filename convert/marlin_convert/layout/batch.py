"""Many slices repacked, and checked, in one call of a compiled function: with a call
for each slice, threads would wait for the interpreter's lock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from marlin_convert.layout import marlin, qweight, scales
from marlin_convert.layout.protocol import Mismatch
from marlin_convert.layout.qweight import Flat, Table
from marlin_convert.layout.rows import RowView

#: bytes of source that a part spans at most (64 rows at least): with its Marlin side it stays in the second
#: cache until it is checked
SPAN = 256 << 10


class Column(IntEnum):
    """Columns of a table of parts, in elements of 64 bits: where the part lies in the source (first element,
    distance of rows, rows, elements of a row), where on the Marlin side, which slice it is of, and how many
    elements a whole slice has in a row of the Marlin side.
    """

    SOURCE = 0
    SOURCE_STRIDE = 1
    ROWS = 2
    COLS = 3
    MARLIN = 4
    MARLIN_STRIDE = 5
    SLICE = 6
    WIDTH = 7


@dataclass(frozen=True)
class Parts:
    """The memory of both sides and a table of parts of slices, a row each."""

    source: Flat
    marlin: Flat
    table: Table


@dataclass(frozen=True, slots=True)
class Move:
    """One role of a projection on its way: of which slice it is, both sides, and the K its GEMM is called
    with.
    """

    slice: int
    projection: str
    source: RowView
    marlin: RowView
    size_k: int


@dataclass(frozen=True)
class MarlinBatch:
    """Slices of weights and of scales.

    Where both sides of all slices lie in one buffer each (a batch of the pipeline), they go as one table;
    else one by one.
    """

    weights: Sequence[Move]
    scales: Sequence[Move]
    group_size: int

    def pack(self, check: bool = False) -> Mismatch | None:
        """Fill the Marlin sides. With `check` each is inverted and compared with its source, and the first
        that differs returned.
        """
        wrong_weight = self._pack_weights(check)
        wrong_scale = self._pack_scales(check)
        return wrong_weight or wrong_scale

    def _pack_weights(self, check: bool) -> Mismatch | None:
        parts = parts_of(self.weights, 1, marlin.TILE_N)
        if parts is not None:
            at = qweight.pack_qweight_parts(parts.source, parts.marlin, parts.table, check)
            return self._explain(parts, at, self.weights, self._weight_mismatch)
        for move in self.weights:
            marlin.pack_weight_view(move.source, move.marlin)
        return next(filter(None, map(self._weight_mismatch, self.weights)), None) if check else None

    def _pack_scales(self, check: bool) -> Mismatch | None:
        orders = (scales.column_order(self.group_size, move.size_k) for move in self.scales)
        grouped = all(order is scales.GROUPED for order in orders)
        parts = parts_of(self.scales, 4, scales.GROUPED.size) if grouped else None
        if parts is not None:
            at = scales.pack_scale_parts(parts.source, parts.marlin, parts.table, check)
            return self._explain(parts, at, self.scales, self._scale_mismatch)
        for move in self.scales:
            marlin.pack_scale_view(move.source, move.marlin, self.group_size, move.size_k)
        return next(filter(None, map(self._scale_mismatch, self.scales)), None) if check else None

    def _explain(
        self, parts: Parts, at: int, moves: Sequence[Move], mismatch: Callable[[Move], Mismatch | None]
    ) -> Mismatch | None:
        """What a check of a table came to: `at` is the row that differed, or -1."""
        if at < 0:
            return None
        move = moves[int(parts.table[at, Column.SLICE])]
        vanished = "it differed when it was made and does not when it is read again"
        return mismatch(move) or Mismatch(move.slice, move.projection, vanished)

    def _weight_mismatch(self, move: Move) -> Mismatch | None:
        if not marlin.weight_differs(move.marlin, move.source):
            return None
        back = RowView.of(np.empty((move.source.rows, move.source.cols), np.uint64))
        marlin.unpack_weight_view(move.marlin, back)
        row, k = _first_difference(back, move.source, marlin.TILE_K)
        where = f"weight_packed differs at row {row} of the slice, inputs {k} to {k + marlin.TILE_K - 1}"
        return Mismatch(move.slice, move.projection, where)

    def _scale_mismatch(self, move: Move) -> Mismatch | None:
        if not marlin.scale_differs(move.marlin, move.source, self.group_size, move.size_k):
            return None
        back = RowView.of(np.empty((move.source.rows, move.source.cols), np.uint16))
        marlin.unpack_scale_view(move.marlin, back, self.group_size, move.size_k)
        row, group = _first_difference(back, move.source, 1)
        where = f"weight_scale differs at row {row} of the slice, group {group}"
        return Mismatch(move.slice, move.projection, where)


def _first_difference(found: RowView, expected: RowView, per_element: int) -> tuple[int, int]:
    """Row and column of the first element that differs, columns counted in what an element holds."""
    row, col = np.argwhere(found.array() != expected.array())[0]
    return int(row), int(col) * per_element


def parts_of(moves: Sequence[Move], per_element: int, unit: int) -> Parts | None:
    """All slices as one table, where they share both memories and fall on whole 64-bit elements
    (`per_element` of theirs each); else None. Shapes are checked as for single slices.

    Parts come in the order of the source: slices along the inputs lie side by side in each line of it, so
    going through them one after the other would read the memory as often as there are ranks.
    """
    if not moves:
        return None
    source_flat, marlin_flat = moves[0].source.flat, moves[0].marlin.flat
    if source_flat.ctypes.data % 8 or marlin_flat.ctypes.data % 8:
        return None
    for move in moves:
        if move.source.flat is not source_flat or move.marlin.flat is not marlin_flat:
            return None
        marlin.check_shapes(move.source, move.marlin, unit)
    whole = np.array(
        [
            (s.base, s.stride, s.rows * per_element, s.cols, m.base, m.stride, i * per_element, m.cols)
            for i, (s, m) in enumerate((move.source, move.marlin) for move in moves)
        ],
        np.int64,
    )
    if (whole % per_element).any():
        return None
    whole //= per_element
    source, target = (
        flat[: flat.size // per_element * per_element].view(np.uint64) for flat in (source_flat, marlin_flat)
    )
    return Parts(source, target, _cut_to_span(whole, unit, per_element))


def _cut_to_span(whole: Table, unit: int, lines: int) -> Table:
    """Slices in parts of at most SPAN bytes of source and of whole `unit`s of rows, in the order of the
    source.
    """
    stride, rows = whole[:, Column.SOURCE_STRIDE], whole[:, Column.ROWS]
    step = np.maximum(SPAN // (8 * stride) // unit * unit, unit)
    parts = -(-rows // step)
    first = (np.arange(parts.sum()) - np.repeat(np.cumsum(parts) - parts, parts)) * np.repeat(step, parts)
    table = np.repeat(whole, parts, axis=0)
    table[:, Column.SOURCE] += first * table[:, Column.SOURCE_STRIDE]
    # outputs are rows of the source and columns of the Marlin side
    table[:, Column.MARLIN] += first * table[:, Column.WIDTH] // table[:, Column.ROWS]
    table[:, Column.ROWS] = np.minimum(np.repeat(step, parts), table[:, Column.ROWS] - first)
    table = np.ascontiguousarray(table[np.argsort(table[:, Column.SOURCE], kind="stable")])
    require_all_once(whole, table, lines)
    return table


def require_all_once(whole: Table, table: Table, lines: int = 1) -> None:
    """Raise ValueError unless the parts are all of each slice and no two of them write to one place.

    Parts are checked one by one, right after each is made, so a part that is missing, or that another one
    overwrites later, must not be possible. An element of a source row becomes `lines` rows of the Marlin
    side.
    """
    made = np.bincount(table[:, Column.SLICE], weights=table[:, Column.ROWS], minlength=len(whole))
    if (made != whole[:, Column.ROWS]).any():
        raise ValueError("the parts of a slice are not all of it")
    table = table[np.argsort(table[:, Column.MARLIN], kind="stable")]
    begin, stride = table[:, Column.MARLIN], table[:, Column.MARLIN_STRIDE]
    width = table[:, Column.ROWS] * table[:, Column.WIDTH] // whole[table[:, Column.SLICE], Column.ROWS]
    reach = np.maximum.accumulate(begin + (table[:, Column.COLS] * lines - 1) * stride + width)
    alone = np.concatenate(([True], begin[1:] >= reach[:-1]))  # begins behind all that came before
    group = np.cumsum(alone) - 1
    first = begin[alone][group]
    same_lines = (begin[1:] >= begin[:-1] + width[:-1]) & (stride[1:] == stride[:-1])
    beside = alone | np.concatenate(([True], same_lines))
    if not beside.all() or (begin + width > first + stride).any():
        raise ValueError("two slices would be written to one place")
