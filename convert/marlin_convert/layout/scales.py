"""Scales: `weight_scale` [N, G] <-> Marlin [G, N], columns permuted within runs of 64 (or 32).

A thread of the kernel needs the scales of the 8 columns it holds; the permutation puts them side by side.
Which of the two orders the kernel expects depends on `group_size < size_k`, with size_k the K that the GEMM
is called with.

There are two ways to do the same: the general one, scale by scale, and for `GROUPED` with groups in fours one
that moves four scales as a 64-bit word and transposes 4 x 4 of them by exchanges, several times as fast.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from marlin_convert.layout.jit import inline, jit
from marlin_convert.layout.qweight import Table, four_rows, swap
from marlin_convert.layout.rows import RowView

Flat64 = npt.NDArray[np.uint64]
Order = npt.NDArray[np.int64]

#: new column 8i + j is old column i + 8j, in each run of 64
GROUPED: Order = np.array([i + 8 * j for i in range(8) for j in range(8)], np.int64)
#: one scale per column (group_size -1 or not smaller than size_k): in each run of 32
SINGLE: Order = np.array([2 * i + j for i in range(4) for j in (0, 1, 8, 9, 16, 17, 24, 25)], np.int64)


def column_order(group_size: int, size_k: int) -> Order:
    """The permutation the kernel expects: `GROUPED` iff group_size is a real group smaller than size_k."""
    return GROUPED if 0 < group_size < size_k else SINGLE


@jit
def pack_scales(source: RowView, marlin: RowView, order: Order) -> None:
    """Fill Marlin scales [groups, size_n] from `weight_scale` rows [size_n, groups]; size_n must be a
    multiple of len(order).
    """
    width = order.size
    for run in range(0, source.rows, width):
        for group in range(source.cols):
            out = marlin.base + group * marlin.stride + run
            for c in range(width):
                marlin.flat[out + c] = source.flat[source.base + (run + order[c]) * source.stride + group]


@jit
def unpack_scales(source: RowView, marlin: RowView, order: Order) -> None:
    """Inverse of `pack_scales`: fills `source` from `marlin`."""
    width = order.size
    for run in range(0, source.rows, width):
        for c in range(width):
            out = source.base + (run + order[c]) * source.stride
            for group in range(source.cols):
                source.flat[out + group] = marlin.flat[marlin.base + group * marlin.stride + run + c]


#: 64-bit words (4 groups) of a row handled together
RUN = 64

_FIELDS = np.uint64(0x0000FFFF0000FFFF)
_HALVES = np.uint64(0x00000000FFFFFFFF)
_16, _32 = np.uint64(16), np.uint64(32)


@inline
def _transpose(r0: Any, r1: Any, r2: Any, r3: Any) -> Any:
    """4 rows of 4 16-bit fields -> 4 columns; its own inverse."""
    even01, odd01 = swap(r0, r1, _FIELDS, _16)
    even23, odd23 = swap(r2, r3, _FIELDS, _16)
    c0, c2 = swap(even01, even23, _HALVES, _32)
    c1, c3 = swap(odd01, odd23, _HALVES, _32)
    return c0, c1, c2, c3


@jit
def pack_scale_words(source: RowView, marlin: RowView) -> None:
    """`pack_scales` in the order `GROUPED` on 64-bit words: source [size_n, quads] of 4 groups -> marlin
    [4 * quads, size_n / 4].
    """
    words = np.empty((64, RUN + 2), np.uint64)  # [group of the four * 16 + word of the row, quad]
    for run in range(0, source.rows, 64):
        for first in range(0, source.cols, RUN):
            count = min(RUN, source.cols - first)
            # columns 4q .. 4q + 3 of the run are the old columns i + 8j, j = 4 (q % 2) .. + 3
            for q in range(16):
                row = source.base + (run + q // 2 + 32 * (q % 2)) * source.stride + first
                r0, r1, r2, r3 = four_rows(source.flat, row, source.stride, count)
                for k in range(count):
                    c0, c1, c2, c3 = _transpose(r0[k], r1[k], r2[k], r3[k])
                    words[q, k], words[16 + q, k], words[32 + q, k], words[48 + q, k] = c0, c1, c2, c3
            for k in range(count):
                for g in range(4):
                    at = marlin.base + (4 * (first + k) + g) * marlin.stride + run // 4
                    out = marlin.flat[at : at + 16]
                    for q in range(16):
                        out[q] = words[16 * g + q, k]


@jit
def scale_words_differ(source: RowView, marlin: RowView) -> bool:
    """Whether the inverse of `pack_scale_words` gives something else than `source`."""
    words = np.empty((64, RUN + 2), np.uint64)
    differ = np.uint64(0)
    for run in range(0, source.rows, 64):
        for first in range(0, source.cols, RUN):
            count = min(RUN, source.cols - first)
            for k in range(count):
                for g in range(4):
                    at = marlin.base + (4 * (first + k) + g) * marlin.stride + run // 4
                    stored = marlin.flat[at : at + 16]
                    for q in range(16):
                        words[16 * g + q, k] = stored[q]
            for q in range(16):
                row = source.base + (run + q // 2 + 32 * (q % 2)) * source.stride + first
                r0, r1, r2, r3 = four_rows(source.flat, row, source.stride, count)
                for k in range(count):
                    c0, c1, c2, c3 = _transpose(
                        words[q, k], words[16 + q, k], words[32 + q, k], words[48 + q, k]
                    )
                    differ |= (c0 ^ r0[k]) | (c1 ^ r1[k]) | (c2 ^ r2[k]) | (c3 ^ r3[k])
    return bool(differ != np.uint64(0))


@jit
def pack_scale_parts(source: Flat64, marlin: Flat64, parts: Table, check: bool) -> int:
    """`pack_scale_words` for each row of a table; else as `qweight.pack_qweight_parts`."""
    wrong = -1
    for i in range(parts.shape[0]):
        rows, cols = parts[i, 2], parts[i, 3]
        from_ = RowView(source, parts[i, 0], parts[i, 1], rows, cols)
        to = RowView(marlin, parts[i, 4], parts[i, 5], 4 * cols, rows // 4)
        pack_scale_words(from_, to)
        if check and scale_words_differ(from_, to):
            wrong = i if wrong < 0 else wrong
    return wrong
