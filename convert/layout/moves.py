"""Many slices repacked, or checked, in one call of a compiled function: on a machine of many cores the interpreter would be in the way otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from convert.layout import marlin, scales, words
from convert.layout.rows import Rows
from convert.layout.words import Flat, Table

#: source and Marlin side of one slice
Pair = tuple[Rows, Rows]


@dataclass(frozen=True)
class Moves:
    """Slices of words and of scales, and for each the K its GEMM is called with.

    Where both sides of all slices lie in one buffer each (a batch of the pipeline), they go as one table; else one by one.
    """

    word_pairs: Sequence[Pair]
    scale_pairs: Sequence[Pair]
    group_size: int
    size_k: Sequence[int]

    def pack(self) -> None:
        """Fill the Marlin sides."""
        if (batch := _word_table(self.word_pairs)) is not None:
            words.pack_table(*batch)
        else:
            for source, target in self.word_pairs:
                marlin.pack_rows(source, target)
        if (batch := self._scale_table()) is not None:
            scales.pack_scale_table(*batch)
        else:
            for (source, target), size_k in zip(self.scale_pairs, self.size_k, strict=True):
                marlin.pack_scale_rows(source, target, self.group_size, size_k)

    def mismatch(self) -> tuple[int, str] | None:
        """The first slice whose inverse differs from its source, and where; None where there is none."""
        if (batch := _word_table(self.word_pairs)) is None or words.first_wrong_slice(*batch) >= 0:
            for i, (source, target) in enumerate(self.word_pairs):
                if (at := marlin.wrong_row(target, source)) is not None:
                    return i, f"weight_packed differs at row {at[0]} of the slice, inputs {at[1]} to {at[1] + marlin.TILE_K - 1}"
        if (batch := self._scale_table()) is None or scales.first_wrong_scale_slice(*batch) >= 0:
            for i, ((source, target), size_k) in enumerate(zip(self.scale_pairs, self.size_k, strict=True)):
                if (at := marlin.wrong_scale(target, source, self.group_size, size_k)) is not None:
                    return i, f"weight_scale differs at row {at[0]} of the slice, group {at[1]}"
        return None

    def _scale_table(self) -> tuple[Flat, Flat, Table] | None:
        """The table of 64-bit words, where every slice has the common order and falls on whole words."""
        if any(scales.column_order(self.group_size, size_k) is not scales.GROUPED for size_k in self.size_k):
            return None
        for pair in self.scale_pairs:
            if any(rows.base % 4 or rows.stride % 4 or rows.cols % 4 for rows in pair):
                return None
        wide = [tuple(rows.in_words() for rows in pair) for pair in self.scale_pairs]
        return _table(self.scale_pairs, wide, 64)


def _word_table(pairs: Sequence[Pair]) -> tuple[Flat, Flat, Table] | None:
    return _table(pairs, pairs, marlin.TILE_N)


def _table(pairs: Sequence[Pair], wide: Sequence[tuple[Rows, ...]], unit: int) -> tuple[Flat, Flat, Table] | None:
    """(source memory, Marlin memory, table) of slices that share both, else None. Shapes are checked as for single slices."""
    if not pairs:
        return None
    source_flat, target_flat = pairs[0][0].flat, pairs[0][1].flat
    if source_flat.ctypes.data % 8 or target_flat.ctypes.data % 8:
        return None
    rows = []
    for (source, target), (s, m) in zip(pairs, wide, strict=True):
        if source.flat is not source_flat or target.flat is not target_flat:
            return None
        marlin.check_shapes(source, target, unit)
        rows.append((s.base, s.stride, s.rows, s.cols, m.base, m.stride))
    return wide[0][0].flat, wide[0][1].flat, np.array(rows, np.int64)
