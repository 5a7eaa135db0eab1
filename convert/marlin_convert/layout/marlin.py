"""The Marlin layout of one 4-bit matrix: pure functions on arrays, each with its inverse.

Shapes, with K = inputs and N = outputs: `weight_packed` int32 [N, K/8], `weight_scale` 16-bit [N,
K/group_size]; Marlin int32 [K/16, 2N] and 16-bit [K/group_size, N]. Scales are carried as uint16: their bits
are moved, never computed with.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from marlin_convert.layout import scales, words
from marlin_convert.layout.rows import Rows

Int32 = npt.NDArray[np.int32]
Bits16 = npt.NDArray[np.uint16]

#: The Marlin tile: outputs and inputs that a slice may not cut.
TILE_N = 64
TILE_K = 16


def _as_words(array: Int32) -> Rows:
    """int32 rows as 8-byte words; the number of columns must be even."""
    return Rows.of(array.view(np.uint64))


def pack_rows(source: Rows, marlin: Rows) -> None:
    """Repack 8-byte words: source [N, K/16] -> marlin [K/16, N]. Raises ValueError where the shapes do not
    fit the tile.
    """
    check_shapes(source, marlin, TILE_N)
    words.pack_words(
        source.flat,
        source.base,
        source.stride,
        source.rows,
        source.cols,
        marlin.flat,
        marlin.base,
        marlin.stride,
    )


def unpack_rows(marlin: Rows, source: Rows) -> None:
    """Inverse of `pack_rows`."""
    check_shapes(source, marlin, TILE_N)
    words.unpack_words(
        marlin.flat,
        marlin.base,
        marlin.stride,
        source.rows,
        source.cols,
        source.flat,
        source.base,
        source.stride,
    )


def wrong_row(marlin: Rows, source: Rows) -> tuple[int, int] | None:
    """The (n, k) of the first 16 inputs at which the inverse of `marlin` is not `source`, or None."""
    check_shapes(source, marlin, TILE_N)
    at = words.first_wrong_word(
        marlin.flat,
        marlin.base,
        marlin.stride,
        source.rows,
        source.cols,
        source.flat,
        source.base,
        source.stride,
    )
    return None if at < 0 else (at // source.cols, at % source.cols * TILE_K)


def pack_scale_rows(source: Rows, marlin: Rows, group_size: int, size_k: int) -> None:
    """Permute scales: source [N, G] -> marlin [G, N]; size_k is the K the GEMM is called with (after
    padding).
    """
    order = scales.column_order(group_size, size_k)
    check_shapes(source, marlin, order.size)
    if order is scales.GROUPED and (wide := _in_fours(source, marlin)) is not None:
        scales.pack_scale_words(*wide)
    else:
        scales.pack_scales(
            source.flat,
            source.base,
            source.stride,
            source.rows,
            source.cols,
            order,
            marlin.flat,
            marlin.base,
            marlin.stride,
        )


def unpack_scale_rows(marlin: Rows, source: Rows, group_size: int, size_k: int) -> None:
    """Inverse of `pack_scale_rows`."""
    order = scales.column_order(group_size, size_k)
    check_shapes(source, marlin, order.size)
    scales.unpack_scales(
        marlin.flat,
        marlin.base,
        marlin.stride,
        source.rows,
        source.cols,
        order,
        source.flat,
        source.base,
        source.stride,
    )


def wrong_scale(marlin: Rows, source: Rows, group_size: int, size_k: int) -> tuple[int, int] | None:
    """The (n, group) of the first scale at which the inverse of `marlin` is not `source`, or None."""
    order = scales.column_order(group_size, size_k)
    check_shapes(source, marlin, order.size)
    if (
        order is scales.GROUPED
        and (wide := _in_fours(source, marlin)) is not None
        and not scales.scale_words_differ(*wide)
    ):
        return None
    at = scales.first_wrong_scale(
        marlin.flat,
        marlin.base,
        marlin.stride,
        source.rows,
        source.cols,
        order,
        source.flat,
        source.base,
        source.stride,
    )
    return None if at < 0 else (at // source.cols, at % source.cols)


def _in_fours(
    source: Rows, marlin: Rows
) -> tuple[npt.NDArray[np.uint64], int, int, int, int, npt.NDArray[np.uint64], int, int] | None:
    """The arguments of the 64-bit way, where all of both sides falls on whole aligned words."""
    if any(
        rows.base % 4 or rows.stride % 4 or rows.cols % 4 or rows.flat.ctypes.data % 8
        for rows in (source, marlin)
    ):
        return None
    s, m = source.in_words(), marlin.in_words()
    return s.flat, s.base, s.stride, s.rows, s.cols, m.flat, m.base, m.stride


def check_shapes(source: Rows, marlin: Rows, unit: int) -> None:
    """Raise ValueError unless `marlin` is the transpose of `source` in shape and the outputs come in
    multiples of `unit`.
    """
    if source.rows % unit or (marlin.rows, marlin.cols) != (source.cols, source.rows):
        raise ValueError(
            f"source of {source.rows} x {source.cols} needs a Marlin side of {source.cols} x {source.rows}"
            f" and rows in multiples of {unit}, got {marlin.rows} x {marlin.cols}"
        )


def pack_weight(packed: Int32, out: Int32 | None = None) -> Int32:
    """`weight_packed` int32 [N, K/8] -> Marlin int32 [K/16, 2N]; N in multiples of 64, K of 16, else
    ValueError.
    """
    n, k8 = packed.shape
    if k8 % 2:
        raise ValueError(f"K must be a multiple of {TILE_K}, got {k8 * 8}")
    out = np.empty((k8 // 2, 2 * n), np.int32) if out is None else out
    pack_rows(_as_words(packed), _as_words(out))
    return out


def unpack_weight(marlin: Int32, out: Int32 | None = None) -> Int32:
    """Inverse of `pack_weight`: Marlin int32 [K/16, 2N] -> `weight_packed` int32 [N, K/8]."""
    k_tiles, n2 = marlin.shape
    out = np.empty((n2 // 2, 2 * k_tiles), np.int32) if out is None else out
    unpack_rows(_as_words(marlin), _as_words(out))
    return out


def pack_scale(scale: Bits16, group_size: int, size_k: int, out: Bits16 | None = None) -> Bits16:
    """`weight_scale` [N, G] -> Marlin [G, N] (16-bit values as uint16)."""
    out = np.empty(scale.shape[::-1], np.uint16) if out is None else out
    pack_scale_rows(Rows.of(scale), Rows.of(out), group_size, size_k)
    return out


def unpack_scale(marlin: Bits16, group_size: int, size_k: int, out: Bits16 | None = None) -> Bits16:
    """Inverse of `pack_scale`: Marlin [G, N] -> `weight_scale` [N, G]."""
    out = np.empty(marlin.shape[::-1], np.uint16) if out is None else out
    unpack_scale_rows(Rows.of(marlin), Rows.of(out), group_size, size_k)
    return out
