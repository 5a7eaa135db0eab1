"""The 4-bit repack: `weight_packed` [N, K/8] <-> Marlin `qweight` [K/16, 2N], and nothing else.

A tile is 16 inputs (k) by 64 outputs (n). In the source, the 16 inputs of one output are 8 consecutive bytes,
so a tile row is one 64-bit word, and the whole repack is: take rows n and n+8, split nibbles, transpose
bytes, store 16 words. With b0 = byte 8kt+j and b1 = byte 8kt+4+j of row n = 64 nt + 16 warp + col, and b2, b3
the same bytes of row n+8, the word [kt, 128 nt + 4 (4 col + j) + warp] has the bytes, lowest first,

    lo(b0) | lo(b1)<<4,  lo(b2) | lo(b3)<<4,  hi(b0) | hi(b1)<<4,  hi(b2) | hi(b3)<<4

Seen as 64-bit words, that is a butterfly: four rounds in which two words exchange fields of 32, 4, 8 and 16
bits, each round its own inverse.

This restates the tile and nibble order that the kernels `gptq_marlin_repack` and `moe_wna16_marlin_gemm` use;
it is bit-exact against the real op. The arithmetic is on 64-bit words over a run of k-tiles, so that LLVM
makes vector code of it. `definition.py` says the same in plain lines.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from marlin_convert.layout.jit import inline, jit
from marlin_convert.layout.rows import RowView

Flat = npt.NDArray[np.uint64]
Table = npt.NDArray[np.int64]

#: k-tiles handled together: a whole row of K2.6 (7168 inputs), read as one stream; the block of words in
#: between (230 KB) stays in the second cache
RUN = 448

_NIBBLES = np.uint64(0x0F0F0F0F0F0F0F0F)
_BYTES = np.uint64(0x00FF00FF00FF00FF)
_HALVES = np.uint64(0x0000FFFF0000FFFF)
_WORDS = np.uint64(0x00000000FFFFFFFF)
_4, _8, _16, _32 = (np.uint64(n) for n in (4, 8, 16, 32))


@inline
def swap(a: Any, b: Any, mask: Any, width: Any) -> Any:
    """Transpose 2 x 2 blocks of `width` bits: the high field of each pair in `a` changes places with the low
    field in `b`. Its own inverse.
    """
    return (a & mask) | ((b & mask) << width), ((a >> width) & mask) | (b & ~mask)


@inline
def four_rows(flat: Any, at: int, stride: int, count: int) -> Any:
    """`count` elements of each of the rows 0, 8, 16 and 24 from flat[at] on."""
    return (
        flat[at : at + count],
        flat[at + 8 * stride : at + 8 * stride + count],
        flat[at + 16 * stride : at + 16 * stride + count],
        flat[at + 24 * stride : at + 24 * stride + count],
    )


@inline
def _mix(n0: Any, n8: Any, n16: Any, n24: Any) -> Any:
    """Rows n, n+8 (a warp) and n+16, n+24 (the next) of one k-tile -> the words j = 0..3, the next warp's in
    the high 32 bits.
    """
    # bytes 0..3 of both warps, bytes 4..7 of both
    n0, n16 = swap(n0, n16, _WORDS, _32)
    # lo(b0)|lo(b1)<<4 and hi(b0)|hi(b1)<<4, for j = 0..3 and both warps
    low, high = swap(n0, n16, _NIBBLES, _4)
    n8, n24 = swap(n8, n24, _WORDS, _32)
    low8, high8 = swap(n8, n24, _NIBBLES, _4)
    low_even, low_odd = swap(low, low8, _BYTES, _8)  # row n beside row n+8; even j, odd j
    high_even, high_odd = swap(high, high8, _BYTES, _8)
    j0, j2 = swap(low_even, high_even, _HALVES, _16)
    j1, j3 = swap(low_odd, high_odd, _HALVES, _16)
    return j0, j1, j2, j3


@inline
def _unmix(j0: Any, j1: Any, j2: Any, j3: Any) -> Any:
    """Inverse of `_mix`: the same exchanges in the opposite order."""
    low_even, high_even = swap(j0, j2, _HALVES, _16)
    low_odd, high_odd = swap(j1, j3, _HALVES, _16)
    low, low8 = swap(low_even, low_odd, _BYTES, _8)
    high, high8 = swap(high_even, high_odd, _BYTES, _8)
    n0, n16 = swap(low, high, _NIBBLES, _4)
    n0, n16 = swap(n0, n16, _WORDS, _32)
    n8, n24 = swap(low8, high8, _NIBBLES, _4)
    n8, n24 = swap(n8, n24, _WORDS, _32)
    return n0, n8, n16, n24


@inline
def _block_to_words(source: Any, base: int, stride: int, run: int, words: Any) -> None:
    """64 source rows by `run` k-tiles at source[base] -> words[i, k]: the i-th pair of Marlin words (of 64)
    of k-tile k.
    """
    for col in range(8):
        for half in range(2):  # warps 2*half and 2*half + 1 share a 64-bit word
            row = base + (32 * half + col) * stride
            n0, n8, n16, n24 = four_rows(source, row, stride, run)
            i = 8 * col + half
            for k in range(run):
                words[i, k], words[i + 2, k], words[i + 4, k], words[i + 6, k] = _mix(
                    n0[k], n8[k], n16[k], n24[k]
                )


@inline
def _words_to_block(words: Any, run: int, source: Any, base: int, stride: int) -> None:
    """Inverse of `_block_to_words`: words[i, k] -> 64 source rows by `run` k-tiles at source[base]."""
    for col in range(8):
        for half in range(2):
            row = base + (32 * half + col) * stride
            n0, n8, n16, n24 = four_rows(source, row, stride, run)
            i = 8 * col + half
            for k in range(run):
                n0[k], n8[k], n16[k], n24[k] = _unmix(
                    words[i, k], words[i + 2, k], words[i + 4, k], words[i + 6, k]
                )


@inline
def _load_words(marlin: Any, base: int, stride: int, run: int, words: Any) -> None:
    """Transpose `run` runs of 64 word pairs at marlin[base] into words[i, k]."""
    for k in range(run):
        row = marlin[base + k * stride : base + k * stride + 64]
        for i in range(64):
            words[i, k] = row[i]


@inline
def _block_differs(words: Any, source: Any, base: int, stride: int, run: int) -> Any:
    """All bits in which the rows that `words` unpacks to differ from 64 rows of `source`, or-ed together."""
    differ = np.uint64(0)
    for col in range(8):
        for half in range(2):
            row = base + (32 * half + col) * stride
            n0, n8, n16, n24 = four_rows(source, row, stride, run)
            i = 8 * col + half
            for k in range(run):
                m0, m8, m16, m24 = _unmix(words[i, k], words[i + 2, k], words[i + 4, k], words[i + 6, k])
                differ |= (m0 ^ n0[k]) | (m8 ^ n8[k]) | (m16 ^ n16[k]) | (m24 ^ n24[k])
    return differ


@jit
def pack_qweight(source: RowView, marlin: RowView) -> None:
    """Fill Marlin words (uint64 pairs, [k_tiles, size_n]) from `weight_packed` rows (uint64, [size_n,
    k_tiles]).

    size_n must be a multiple of 64; source and destination must not overlap.
    """
    words = np.empty((64, RUN + 2), np.uint64)  # the 2 keep the rows off each other's cache sets
    for block in range(0, source.rows, 64):
        for first in range(0, source.cols, RUN):
            run = min(RUN, source.cols - first)
            base = source.base + block * source.stride + first
            _block_to_words(source.flat, base, source.stride, run, words)
            for k in range(run):
                at = marlin.base + (first + k) * marlin.stride + block
                row = marlin.flat[at : at + 64]
                for i in range(64):
                    row[i] = words[i, k]


@jit
def unpack_qweight(source: RowView, marlin: RowView) -> None:
    """Inverse of `pack_qweight`: fills `source` from `marlin`."""
    words = np.empty((64, RUN + 2), np.uint64)
    for block in range(0, source.rows, 64):
        for first in range(0, source.cols, RUN):
            run = min(RUN, source.cols - first)
            _load_words(marlin.flat, marlin.base + first * marlin.stride + block, marlin.stride, run, words)
            base = source.base + block * source.stride + first
            _words_to_block(words, run, source.flat, base, source.stride)


@jit
def qweight_differs(source: RowView, marlin: RowView) -> bool:
    """Whether the inverse of `marlin` is something else than `source`."""
    words = np.empty((64, RUN + 2), np.uint64)
    differ = np.uint64(0)
    for block in range(0, source.rows, 64):
        for first in range(0, source.cols, RUN):
            run = min(RUN, source.cols - first)
            _load_words(marlin.flat, marlin.base + first * marlin.stride + block, marlin.stride, run, words)
            base = source.base + block * source.stride + first
            differ |= _block_differs(words, source.flat, base, source.stride, run)
    return bool(differ != np.uint64(0))


@jit
def pack_qweight_parts(source: Flat, marlin: Flat, parts: Table, check: bool) -> int:
    """`pack_qweight` for each row of a table (see `batch.Column`): one call for many slices.

    With `check`, each part is unpacked and compared with its source right after, while all of it is in the
    cache. Returns the first row that differs, or -1.
    """
    wrong = -1
    for i in range(parts.shape[0]):
        rows, cols = parts[i, 2], parts[i, 3]
        from_ = RowView(source, parts[i, 0], parts[i, 1], rows, cols)
        to = RowView(marlin, parts[i, 4], parts[i, 5], cols, rows)
        pack_qweight(from_, to)
        if check and qweight_differs(from_, to):
            wrong = i if wrong < 0 else wrong
    return wrong
