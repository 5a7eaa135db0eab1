"""Scales: `weight_scale` [N, G] <-> Marlin [G, N], columns permuted within runs of 64 (or 32).

A thread of the kernel needs the scales of the 8 columns it holds; the permutation puts them side by side. Which of the two orders the kernel
expects depends on `group_size < size_k`, with size_k the K that the GEMM is called with.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from convert.layout.jit import jit

Flat = npt.NDArray[np.uint16]
Order = npt.NDArray[np.int64]

#: new column 8i + j is old column i + 8j, in each run of 64
GROUPED: Order = np.array([i + 8 * j for i in range(8) for j in range(8)], np.int64)
#: one scale per column (group_size -1 or not smaller than size_k): in each run of 32
SINGLE: Order = np.array([2 * i + j for i in range(4) for j in (0, 1, 8, 9, 16, 17, 24, 25)], np.int64)


def column_order(group_size: int, size_k: int) -> Order:
    """The permutation the kernel expects: `GROUPED` iff group_size is a real group smaller than size_k."""
    return GROUPED if 0 < group_size < size_k else SINGLE


@jit
def pack_scales(source: Flat, s_base: int, s_stride: int, size_n: int, groups: int, order: Order, marlin: Flat, m_base: int, m_stride: int) -> None:
    """Fill Marlin scales [groups, size_n] from `weight_scale` rows [size_n, groups]; size_n must be a multiple of len(order)."""
    width = order.size
    for run in range(0, size_n, width):
        for group in range(groups):
            out = m_base + group * m_stride + run
            for c in range(width):
                marlin[out + c] = source[s_base + (run + order[c]) * s_stride + group]


@jit
def unpack_scales(marlin: Flat, m_base: int, m_stride: int, size_n: int, groups: int, order: Order, source: Flat, s_base: int, s_stride: int) -> None:
    """Inverse of `pack_scales`."""
    width = order.size
    for run in range(0, size_n, width):
        for c in range(width):
            out = s_base + (run + order[c]) * s_stride
            for group in range(groups):
                source[out + group] = marlin[m_base + group * m_stride + run + c]


@jit
def first_wrong_scale(
    marlin: Flat, m_base: int, m_stride: int, size_n: int, groups: int, order: Order, source: Flat, s_base: int, s_stride: int
) -> int:
    """Unpack and compare with `source`: -1 where all agree, else n * groups + group of a scale that differs."""
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
