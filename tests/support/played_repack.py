"""`gptq_marlin_moe_repack` by its definition, in the place of an engine's op."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor


def played_repack(packed: Tensor, perm: Tensor, size_k: int, size_n: int, bits: int) -> Tensor:
    """`gptq_marlin_moe_repack` by its definition: codes [K, N] of each expert to mma fragments."""
    assert (bits, perm.numel()) == (4, 0)
    found = np.empty((packed.shape[0], size_k // 16, 2 * size_n), np.uint32)
    words = packed.numpy().view(np.uint32)
    for expert, matrix in enumerate(words):
        codes = np.empty((size_k, size_n), np.uint32)
        for nibble in range(8):
            codes[nibble::8] = matrix >> np.uint32(4 * nibble) & 15
        found[expert] = fragments(codes)
    return torch.from_numpy(found.view(np.int32))


def fragments(codes: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Words as the 32 threads of a warp read them: thread t of warp w has rows 2(t%4) + {0, 1, 8, 9} and
    columns 16 w + t//4 + {0, 8} of a tile of 16 x 64.
    """
    size_k, size_n = codes.shape
    words = np.zeros((size_k // 16, 2 * size_n), np.uint32)
    for thread in range(32):
        for warp in range(4):
            row, column = 2 * (thread % 4), 16 * warp + thread // 4
            places = [(row + down, column + right) for right in (0, 8) for down in (0, 1, 8, 9)]
            for nibble, place in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
                k, n = places[place]
                words[:, 4 * thread + warp :: 128] |= codes[k::16, n::64] << np.uint32(4 * nibble)
    return words
