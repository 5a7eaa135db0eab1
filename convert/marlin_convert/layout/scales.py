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
from marlin_convert.layout.words import Table, swap

Flat = npt.NDArray[np.uint16]
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
def pack_scales(
    source: Flat,
    s_base: int,
    s_stride: int,
    size_n: int,
    groups: int,
    order: Order,
    marlin: Flat,
    m_base: int,
    m_stride: int,
) -> None:
    """Fill Marlin scales [groups, size_n] from `weight_scale` rows [size_n, groups]; size_n must be a
    multiple of len(order).
    """
    width = order.size
    for run in range(0, size_n, width):
        for group in range(groups):
            out = m_base + group * m_stride + run
            for c in range(width):
                marlin[out + c] = source[s_base + (run + order[c]) * s_stride + group]


@jit
def unpack_scales(
    marlin: Flat,
    m_base: int,
    m_stride: int,
    size_n: int,
    groups: int,
    order: Order,
    source: Flat,
    s_base: int,
    s_stride: int,
) -> None:
    """Inverse of `pack_scales`."""
    width = order.size
    for run in range(0, size_n, width):
        for c in range(width):
            out = s_base + (run + order[c]) * s_stride
            for group in range(groups):
                source[out + group] = marlin[m_base + group * m_stride + run + c]


@jit
def first_wrong_scale(
    marlin: Flat,
    m_base: int,
    m_stride: int,
    size_n: int,
    groups: int,
    order: Order,
    source: Flat,
    s_base: int,
    s_stride: int,
) -> int:
    """Unpack and compare with `source`: -1 where all agree, else n * groups + group of a scale that
    differs.
    """
    width = order.size
    for run in range(0, size_n, width):
        for group in range(groups):
            differ = np.uint16(0)
            row = m_base + group * m_stride + run
            for c in range(width):
                differ |= marlin[row + c] ^ source[s_base + (run + order[c]) * s_stride + group]
            if differ != np.uint16(0):
                for c in range(width):
                    if marlin[row + c] != source[s_base + (run + order[c]) * s_stride + group]:
                        return int((run + order[c]) * groups + group)
    return -1


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
def pack_scale_words(
    source: Flat64,
    s_base: int,
    s_stride: int,
    size_n: int,
    quads: int,
    marlin: Flat64,
    m_base: int,
    m_stride: int,
) -> None:
    """`pack_scales` in the order `GROUPED` on 64-bit words: source [size_n, quads] of 4 groups -> marlin [4 *
    quads, size_n / 4].
    """
    words = np.empty((64, RUN + 2), np.uint64)  # [group of the four * 16 + word of the row, quad]
    for run in range(0, size_n, 64):
        for first in range(0, quads, RUN):
            count = min(RUN, quads - first)
            for q in range(
                16
            ):  # columns 4q .. 4q + 3 of the run are the old columns i + 8j, j = 4 (q % 2) .. + 3
                row = s_base + (run + q // 2 + 32 * (q % 2)) * s_stride + first
                r0 = source[row : row + count]
                r1 = source[row + 8 * s_stride : row + 8 * s_stride + count]
                r2 = source[row + 16 * s_stride : row + 16 * s_stride + count]
                r3 = source[row + 24 * s_stride : row + 24 * s_stride + count]
                for k in range(count):
                    words[q, k], words[16 + q, k], words[32 + q, k], words[48 + q, k] = _transpose(
                        r0[k], r1[k], r2[k], r3[k]
                    )
            for k in range(count):
                for g in range(4):
                    at = m_base + (4 * (first + k) + g) * m_stride + run // 4
                    out = marlin[at : at + 16]
                    for q in range(16):
                        out[q] = words[16 * g + q, k]


@jit
def scale_words_differ(
    source: Flat64,
    s_base: int,
    s_stride: int,
    size_n: int,
    quads: int,
    marlin: Flat64,
    m_base: int,
    m_stride: int,
) -> bool:
    """Whether the inverse of `pack_scale_words` gives something else than `source`."""
    words = np.empty((64, RUN + 2), np.uint64)
    differ = np.uint64(0)
    for run in range(0, size_n, 64):
        for first in range(0, quads, RUN):
            count = min(RUN, quads - first)
            for k in range(count):
                for g in range(4):
                    at = m_base + (4 * (first + k) + g) * m_stride + run // 4
                    stored = marlin[at : at + 16]
                    for q in range(16):
                        words[16 * g + q, k] = stored[q]
            for q in range(16):
                row = s_base + (run + q // 2 + 32 * (q % 2)) * s_stride + first
                r0 = source[row : row + count]
                r1 = source[row + 8 * s_stride : row + 8 * s_stride + count]
                r2 = source[row + 16 * s_stride : row + 16 * s_stride + count]
                r3 = source[row + 24 * s_stride : row + 24 * s_stride + count]
                for k in range(count):
                    c0, c1, c2, c3 = _transpose(
                        words[q, k], words[16 + q, k], words[32 + q, k], words[48 + q, k]
                    )
                    differ |= (c0 ^ r0[k]) | (c1 ^ r1[k]) | (c2 ^ r2[k]) | (c3 ^ r3[k])
    return bool(differ != np.uint64(0))


@jit
def pack_scale_table(source: Flat64, marlin: Flat64, table: Table, check: bool) -> int:
    """`pack_scale_words` for each row (s_base, s_stride, size_n, quads, m_base, m_stride, ...) of a table;
    else as `words.pack_table`.
    """
    wrong = -1
    for i in range(table.shape[0]):
        pack_scale_words(
            source, table[i, 0], table[i, 1], table[i, 2], table[i, 3], marlin, table[i, 4], table[i, 5]
        )
        if check and scale_words_differ(
            source, table[i, 0], table[i, 1], table[i, 2], table[i, 3], marlin, table[i, 4], table[i, 5]
        ):
            wrong = i if wrong < 0 else wrong
    return wrong
