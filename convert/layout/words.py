"""The 4-bit Marlin words: `weight_packed` [N, K/8] <-> Marlin [K/16, 2N], and nothing else.

A tile is 16 inputs (k) by 64 outputs (n). In the source, the 16 inputs of one output are 8 consecutive bytes, so a tile row is one
64-bit word, and the whole repack is: take rows n and n+8, split nibbles, transpose bytes, store 16 words. With b0 = byte 8kt+j and
b1 = byte 8kt+4+j of row n = 64 nt + 16 warp + col, and b2, b3 the same bytes of row n+8, the word [kt, 128 nt + 4 (4 col + j) + warp]
has the bytes, lowest first,

    lo(b0) | lo(b1)<<4,  lo(b2) | lo(b3)<<4,  hi(b0) | hi(b1)<<4,  hi(b2) | hi(b3)<<4

This restates the tile and nibble order that the kernels `gptq_marlin_repack` and `moe_wna16_marlin_gemm` use; it is bit-exact against
the real op. The arithmetic is on 64-bit words over a run of k-tiles, so that LLVM makes vector code of it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from convert.layout.jit import inline, jit

Flat = npt.NDArray[np.uint64]

#: k-tiles handled together: 512 bytes of a row; the block of words in between (32 KiB) stays in the first cache levels.
RUN = 64

_NIBBLES = np.uint64(0x0F0F0F0F0F0F0F0F)
_EVEN_BYTES = np.uint64(0x00FF00FF00FF00FF)
_ODD_BYTES = np.uint64(0xFF00FF00FF00FF00)
_LOW32 = np.uint64(0x00000000FFFFFFFF)
_BYTES01 = np.uint64(0x000000000000FFFF)
_BYTES23 = np.uint64(0x00000000FFFF0000)
_BYTES45 = np.uint64(0x0000FFFF00000000)
_BYTES67 = np.uint64(0xFFFF000000000000)
_4, _8, _16, _28, _32 = (np.uint64(n) for n in (4, 8, 16, 28, 32))


@inline
def _fold(row: Any) -> Any:
    """A source word's nibbles as the bytes `lo(b0)|lo(b1)<<4` for j = 0..3, then `hi(b0)|hi(b1)<<4` for j = 0..3."""
    low = row & _NIBBLES
    high = (row >> _4) & _NIBBLES
    return ((low | (low >> _28)) & _LOW32) | ((high | (high >> _28)) << _32)


@inline
def _unfold(folded: Any) -> Any:
    """Inverse of `_fold`."""
    low = (folded & _LOW32) | ((folded & _LOW32) << _28)
    high = (folded >> _32) | ((folded >> _32) << _28)
    return (low & _NIBBLES) | ((high & _NIBBLES) << _4)


@inline
def _block_to_words(source: Any, base: int, stride: int, run: int, words: Any) -> None:
    """64 source rows by `run` k-tiles at source[base] -> words[i, k]: the i-th pair of Marlin words (of 64) of k-tile k."""
    for col in range(8):
        for half in range(2):  # warps 2*half and 2*half + 1 share a 64-bit word
            row = base + (32 * half + col) * stride
            row8, row16, row24 = row + 8 * stride, row + 16 * stride, row + 24 * stride
            i = 8 * col + half
            for k in range(run):
                n0 = _fold(source[row + k])
                n8 = _fold(source[row8 + k])
                even0 = (n0 & _EVEN_BYTES) | ((n8 & _EVEN_BYTES) << _8)  # j = 0, 2 of lo, then of hi
                odd0 = ((n0 >> _8) & _EVEN_BYTES) | (n8 & _ODD_BYTES)  # j = 1, 3
                n0 = _fold(source[row16 + k])
                n8 = _fold(source[row24 + k])
                even1 = (n0 & _EVEN_BYTES) | ((n8 & _EVEN_BYTES) << _8)
                odd1 = ((n0 >> _8) & _EVEN_BYTES) | (n8 & _ODD_BYTES)
                # j = 0, 1, 2, 3: the lower warp's word in the low half, the next warp's in the high half
                words[i, k] = (even0 & _BYTES01) | ((even0 >> _16) & _BYTES23) | ((even1 & _BYTES01) << _32) | ((even1 << _16) & _BYTES67)
                words[i + 2, k] = (odd0 & _BYTES01) | ((odd0 >> _16) & _BYTES23) | ((odd1 & _BYTES01) << _32) | ((odd1 << _16) & _BYTES67)
                words[i + 4, k] = ((even0 >> _16) & _BYTES01) | ((even0 >> _32) & _BYTES23) | ((even1 << _16) & _BYTES45) | (even1 & _BYTES67)
                words[i + 6, k] = ((odd0 >> _16) & _BYTES01) | ((odd0 >> _32) & _BYTES23) | ((odd1 << _16) & _BYTES45) | (odd1 & _BYTES67)


@inline
def _words_to_block(words: Any, run: int, rows: Any) -> None:
    """Inverse of `_block_to_words`: words[i, k] -> rows[n, k], 64 rows."""
    for col in range(8):
        for half in range(2):
            row = 32 * half + col
            i = 8 * col + half
            for k in range(run):
                j0, j1, j2, j3 = words[i, k], words[i + 2, k], words[i + 4, k], words[i + 6, k]
                even = (j0 & _BYTES01) | ((j0 & _BYTES23) << _16) | ((j2 & _BYTES01) << _16) | ((j2 & _BYTES23) << _32)
                odd = (j1 & _BYTES01) | ((j1 & _BYTES23) << _16) | ((j3 & _BYTES01) << _16) | ((j3 & _BYTES23) << _32)
                rows[row, k] = _unfold((even & _EVEN_BYTES) | ((odd & _EVEN_BYTES) << _8))
                rows[row + 8, k] = _unfold(((even >> _8) & _EVEN_BYTES) | (odd & _ODD_BYTES))
                even = ((j0 >> _32) & _BYTES01) | ((j0 >> _16) & _BYTES45) | ((j2 >> _16) & _BYTES23) | (j2 & _BYTES67)
                odd = ((j1 >> _32) & _BYTES01) | ((j1 >> _16) & _BYTES45) | ((j3 >> _16) & _BYTES23) | (j3 & _BYTES67)
                rows[row + 16, k] = _unfold((even & _EVEN_BYTES) | ((odd & _EVEN_BYTES) << _8))
                rows[row + 24, k] = _unfold(((even >> _8) & _EVEN_BYTES) | (odd & _ODD_BYTES))


@inline
def _load_words(marlin: Any, base: int, stride: int, run: int, words: Any) -> None:
    """Transpose `run` runs of 64 word pairs at marlin[base] into words[i, k]."""
    for k in range(run):
        for i in range(64):
            words[i, k] = marlin[base + k * stride + i]


@jit
def pack_words(source: Flat, s_base: int, s_stride: int, size_n: int, k_tiles: int, marlin: Flat, m_base: int, m_stride: int) -> None:
    """Fill Marlin words (uint64 pairs, [k_tiles, size_n]) from `weight_packed` rows (uint64, [size_n, k_tiles]).

    size_n must be a multiple of 64; source and destination must not overlap.
    """
    words = np.empty((64, RUN + 2), np.uint64)  # the 2 keep the rows off each other's cache sets
    for block in range(0, size_n, 64):
        for first in range(0, k_tiles, RUN):
            run = min(RUN, k_tiles - first)
            _block_to_words(source, s_base + block * s_stride + first, s_stride, run, words)
            for k in range(run):
                row = m_base + (first + k) * m_stride + block
                for i in range(64):
                    marlin[row + i] = words[i, k]


@jit
def unpack_words(marlin: Flat, m_base: int, m_stride: int, size_n: int, k_tiles: int, source: Flat, s_base: int, s_stride: int) -> None:
    """Inverse of `pack_words`."""
    words = np.empty((64, RUN + 2), np.uint64)
    rows = np.empty((64, RUN + 2), np.uint64)
    for block in range(0, size_n, 64):
        for first in range(0, k_tiles, RUN):
            run = min(RUN, k_tiles - first)
            _load_words(marlin, m_base + first * m_stride + block, m_stride, run, words)
            _words_to_block(words, run, rows)
            for n in range(64):
                row = s_base + (block + n) * s_stride + first
                for k in range(run):
                    source[row + k] = rows[n, k]


@jit
def first_wrong_word(marlin: Flat, m_base: int, m_stride: int, size_n: int, k_tiles: int, source: Flat, s_base: int, s_stride: int) -> int:
    """Unpack and compare with `source`: -1 where all agree, else n * k_tiles + kt of a row word that differs."""
    words = np.empty((64, RUN + 2), np.uint64)
    rows = np.empty((64, RUN + 2), np.uint64)
    for block in range(0, size_n, 64):
        for first in range(0, k_tiles, RUN):
            run = min(RUN, k_tiles - first)
            _load_words(marlin, m_base + first * m_stride + block, m_stride, run, words)
            _words_to_block(words, run, rows)
            for n in range(64):
                row = s_base + (block + n) * s_stride + first
                differ = np.uint64(0)
                for k in range(run):
                    differ |= source[row + k] ^ rows[n, k]
                if differ != np.uint64(0):
                    for k in range(run):
                        if source[row + k] != rows[n, k]:
                            return (block + n) * k_tiles + first + k
    return -1
