"""Many slices repacked, and checked, in one call of a compiled function: on a machine of many cores the
interpreter would be in the way otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from marlin_convert.layout import marlin, scales, words
from marlin_convert.layout.rows import Rows
from marlin_convert.layout.words import Flat, Table

#: source and Marlin side of one slice
Pair = tuple[Rows, Rows]
#: which slice is wrong, and where
Wrong = tuple[int, str]

#: bytes of source that a row of a table spans at most (64 rows at least): with its Marlin side it stays in
#: the second cache until it is checked
SPAN = 256 << 10


@dataclass(frozen=True)
class Moves:
    """Slices of words and of scales, and for each the K its GEMM is called with.

    Where both sides of all slices lie in one buffer each (a batch of the pipeline), they go as one table;
    else one by one.
    """

    word_pairs: Sequence[Pair]
    scale_pairs: Sequence[Pair]
    group_size: int
    size_k: Sequence[int]

    def pack(self, check: bool = False) -> Wrong | None:
        """Fill the Marlin sides. With `check` each is inverted and compared with its source, and the first
        that differs returned.
        """
        table, at = _table(self.word_pairs, 1, marlin.TILE_N), -1
        if table is not None:
            at = words.pack_table(*table, check)
        else:
            for source, target in self.word_pairs:
                marlin.pack_rows(source, target)
        wrong = _judge(table, at, self._wrong_words()) if check else None
        table, at = self._scale_table(), -1
        if table is not None:
            at = scales.pack_scale_table(*table, check)
        else:
            for (source, target), size_k in zip(self.scale_pairs, self.size_k, strict=True):
                marlin.pack_scale_rows(source, target, self.group_size, size_k)
        return wrong or (_judge(table, at, self._wrong_scales()) if check else None)

    def mismatch(self) -> Wrong | None:
        """The first slice whose inverse differs from its source, and where; None where there is none."""
        return next(self._wrong_words(), None) or next(self._wrong_scales(), None)

    def _wrong_words(self) -> Iterator[Wrong]:
        for i, (source, target) in enumerate(self.word_pairs):
            if (at := marlin.wrong_row(target, source)) is not None:
                yield (
                    i,
                    (
                        f"weight_packed differs at row {at[0]} of the slice, inputs {at[1]} to"
                        f" {at[1] + marlin.TILE_K - 1}"
                    ),
                )

    def _wrong_scales(self) -> Iterator[Wrong]:
        for i, ((source, target), size_k) in enumerate(zip(self.scale_pairs, self.size_k, strict=True)):
            if (at := marlin.wrong_scale(target, source, self.group_size, size_k)) is not None:
                yield i, f"weight_scale differs at row {at[0]} of the slice, group {at[1]}"

    def _scale_table(self) -> tuple[Flat, Flat, Table] | None:
        """The table of 64-bit words, where every slice has the common order and falls on whole words."""
        if any(scales.column_order(self.group_size, size_k) is not scales.GROUPED for size_k in self.size_k):
            return None
        return _table(self.scale_pairs, 4, scales.GROUPED.size)


def _judge(table: tuple[Flat, Flat, Table] | None, at: int, wrong: Iterator[Wrong]) -> Wrong | None:
    """What a check came to: `at` is the row of the table that differed or -1; without a table, and to say
    where, the slices are gone through.
    """
    if table is None:
        return next(wrong, None)
    if at < 0:
        return None
    return next(
        wrong, (int(table[2][at, 6]), "it differed when it was made and does not when it is read again")
    )


def _table(pairs: Sequence[Pair], per_word: int, unit: int) -> tuple[Flat, Flat, Table] | None:
    """(source memory, Marlin memory, table) in 64-bit words of `per_word` elements, where all slices share
    both and fall on whole words, else None. Shapes are checked as for single slices.

    A row is part of a slice, (s_base, s_stride, size_n, cols, m_base, m_stride, slice, -), and rows come in
    the order of the source: slices along the inputs lie side by side in each line of it, so going through
    them one after the other would read the memory as often as there are ranks.
    """
    if not pairs:
        return None
    flats = pairs[0][0].flat, pairs[0][1].flat
    if any(flat.ctypes.data % 8 for flat in flats):
        return None
    for source, target in pairs:
        if source.flat is not flats[0] or target.flat is not flats[1]:
            return None
        marlin.check_shapes(source, target, unit)
    whole = np.array(
        [
            (s.base, s.stride, s.cols, m.base, m.stride, m.cols, s.rows * per_word, i * per_word)
            for i, (s, m) in enumerate(pairs)
        ],
        np.int64,
    )
    if (whole % per_word).any():
        return None
    whole //= per_word
    source_flat, target_flat = (flat[: flat.size // per_word * per_word].view(np.uint64) for flat in flats)
    return source_flat, target_flat, _cut(whole[:, (0, 1, 6, 2, 3, 4, 7, 5)], unit)


def _cut(whole: Table, unit: int) -> Table:
    """Slices in parts of at most SPAN bytes of source and of whole `unit`s of rows, in the order of the
    source.

    The last column is how many words a slice has in each row of the Marlin side: outputs are rows of the
    source and columns there.
    """
    stride, rows = whole[:, 1], whole[:, 2]
    step = np.maximum(SPAN // (8 * stride) // unit * unit, unit)
    parts = -(-rows // step)
    first = (np.arange(parts.sum()) - np.repeat(np.cumsum(parts) - parts, parts)) * np.repeat(step, parts)
    table = np.repeat(whole, parts, axis=0)
    table[:, 0] += first * table[:, 1]
    table[:, 4] += first * table[:, 7] // table[:, 2]
    table[:, 2] = np.minimum(np.repeat(step, parts), table[:, 2] - first)
    table = np.ascontiguousarray(table[np.argsort(table[:, 0], kind="stable")])
    require_all_once(whole, table)
    return table


def require_all_once(whole: Table, table: Table) -> None:
    """Raise ValueError unless the parts are all of each slice and no two of them write to one place.

    Parts are checked one by one, right after each is made, so a part that is missing, or that another one
    overwrites later, must not be possible.
    """
    if (np.bincount(table[:, 6], weights=table[:, 2], minlength=len(whole)) != whole[:, 2]).any():
        raise ValueError("the parts of a slice are not all of it")
    rows = whole[table[:, 6], 2]
    by_place = table[np.argsort(table[:, 4], kind="stable")]
    width = table[:, 2] * table[:, 7] // rows
    width = width[np.argsort(table[:, 4], kind="stable")]
    begin, stride = by_place[:, 4], by_place[:, 5]
    reach = np.maximum.accumulate(begin + (by_place[:, 3] - 1) * stride + width)
    alone = np.concatenate(([True], begin[1:] >= reach[:-1]))  # begins behind all that came before
    group = np.cumsum(alone) - 1
    first = begin[alone][group]
    beside = alone | np.concatenate(
        ([True], (begin[1:] >= begin[:-1] + width[:-1]) & (stride[1:] == stride[:-1]))
    )
    if not beside.all() or (begin + width > first + stride).any():
        raise ValueError("two slices would be written to one place")
