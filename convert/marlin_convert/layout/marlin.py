"""The Marlin layout of one 4-bit matrix: pure functions on arrays, each with its inverse.

Shapes, with K = inputs and N = outputs: `weight_packed` int32 [N, K/8], `weight_scale` 16-bit [N,
K/group_size]; Marlin int32 [K/16, 2N] and 16-bit [K/group_size, N]. Scales are carried as uint16: their bits
are moved, never computed with. The `_view` functions do the same for matrices anywhere in memory, weights as
64-bit words ([N, K/16] and [K/16, N] of them).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from marlin_convert.layout import qweight, scales
from marlin_convert.layout.rows import RowView

Int32 = npt.NDArray[np.int32]
Bits16 = npt.NDArray[np.uint16]

#: The Marlin tile: outputs and inputs that a slice may not cut.
TILE_N = 64
TILE_K = 16


def pack_weight_view(source: RowView, marlin: RowView) -> None:
    """Repack: source [N, K/16] -> marlin [K/16, N]. Raises ValueError where the shapes do not fit the
    tile.
    """
    check_shapes(source, marlin, TILE_N)
    qweight.pack_qweight(source, marlin)


def unpack_weight_view(marlin: RowView, source: RowView) -> None:
    """Inverse of `pack_weight_view`."""
    check_shapes(source, marlin, TILE_N)
    qweight.unpack_qweight(source, marlin)


def weight_differs(marlin: RowView, source: RowView) -> bool:
    """Whether the inverse of `marlin` is something else than `source`."""
    check_shapes(source, marlin, TILE_N)
    return bool(qweight.qweight_differs(source, marlin))


def pack_scale_view(source: RowView, marlin: RowView, group_size: int, size_k: int) -> None:
    """Permute scales: source [N, G] -> marlin [G, N]; size_k is the K the GEMM is called with (after
    padding).
    """
    order = scales.column_order(group_size, size_k)
    check_shapes(source, marlin, order.size)
    if order is scales.GROUPED and in_fours(source, marlin):
        scales.pack_scale_words(source.in_words(), marlin.in_words())
    else:
        scales.pack_scales(source, marlin, order)


def unpack_scale_view(marlin: RowView, source: RowView, group_size: int, size_k: int) -> None:
    """Inverse of `pack_scale_view`."""
    order = scales.column_order(group_size, size_k)
    check_shapes(source, marlin, order.size)
    scales.unpack_scales(source, marlin, order)


def scale_differs(marlin: RowView, source: RowView, group_size: int, size_k: int) -> bool:
    """Whether the inverse of `marlin` is something else than `source`."""
    order = scales.column_order(group_size, size_k)
    check_shapes(source, marlin, order.size)
    if order is scales.GROUPED and in_fours(source, marlin):
        return bool(scales.scale_words_differ(source.in_words(), marlin.in_words()))
    back = RowView.of(np.empty((source.rows, source.cols), np.uint16))
    scales.unpack_scales(back, marlin, order)
    return not np.array_equal(back.array(), source.array())


def in_fours(source: RowView, marlin: RowView) -> bool:
    """Whether all of both sides falls on whole aligned 64-bit words."""
    return not any(
        rows.base % 4 or rows.stride % 4 or rows.cols % 4 or rows.flat.ctypes.data % 8
        for rows in (source, marlin)
    )


def check_shapes(source: RowView, marlin: RowView, unit: int) -> None:
    """Raise ValueError unless `marlin` is the transpose of `source` in shape and the outputs come in
    multiples of `unit`.
    """
    if source.rows % unit or (marlin.rows, marlin.cols) != (source.cols, source.rows):
        raise ValueError(
            f"source of {source.rows} x {source.cols} needs a Marlin side of {source.cols} x {source.rows}"
            f" and rows in multiples of {unit}, got {marlin.rows} x {marlin.cols}"
        )


def _words(array: Int32) -> RowView:
    """int32 rows as 64-bit words; the number of columns must be even."""
    return RowView.of(array.view(np.uint64))


def pack_weight(packed: Int32) -> Int32:
    """`weight_packed` int32 [N, K/8] -> Marlin int32 [K/16, 2N]; N in multiples of 64, K of 16, else
    ValueError.
    """
    n, k8 = packed.shape
    if k8 % 2:
        raise ValueError(f"K must be a multiple of {TILE_K}, got {k8 * 8}")
    out = np.empty((k8 // 2, 2 * n), np.int32)
    pack_weight_view(_words(packed), _words(out))
    return out


def unpack_weight(marlin: Int32) -> Int32:
    """Inverse of `pack_weight`: Marlin int32 [K/16, 2N] -> `weight_packed` int32 [N, K/8]."""
    k_tiles, n2 = marlin.shape
    out = np.empty((n2 // 2, 2 * k_tiles), np.int32)
    unpack_weight_view(_words(marlin), _words(out))
    return out


def pack_scale(scale: Bits16, group_size: int, size_k: int) -> Bits16:
    """`weight_scale` [N, G] -> Marlin [G, N] (16-bit values as uint16)."""
    out = np.empty(scale.shape[::-1], np.uint16)
    pack_scale_view(RowView.of(scale), RowView.of(out), group_size, size_k)
    return out


def unpack_scale(marlin: Bits16, group_size: int, size_k: int) -> Bits16:
    """Inverse of `pack_scale`: Marlin [G, N] -> `weight_scale` [N, G]."""
    out = np.empty(marlin.shape[::-1], np.uint16)
    unpack_scale_view(RowView.of(marlin), RowView.of(out), group_size, size_k)
    return out
