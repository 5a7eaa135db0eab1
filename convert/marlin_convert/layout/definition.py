"""The Marlin layout of one matrix in plain lines: where each nibble and each scale goes, one at a time.

This is the definition to read; `qweight.py` and `scales.py` do the same at memory speed, and a test holds
them equal. It restates what the kernel `gptq_marlin_repack` writes and `moe_wna16_marlin_gemm` reads (see
schemas/README.md).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

#: nibble j of a word is value NIBBLES[j] of the thread that stores it
NIBBLES = (0, 2, 4, 6, 1, 3, 5, 7)


def repack(codes: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint32]:
    """4-bit codes [N, K] -> Marlin words [K/16, 2N]. Tiles are 16 inputs (k) by 64 outputs (n)."""
    n_size, k_size = codes.shape
    words = np.zeros((k_size // 16, 2 * n_size), np.uint32)
    for k_tile in range(k_size // 16):
        for n_tile in range(n_size // 64):
            for warp in range(4):
                for thread in range(32):
                    n, k = 64 * n_tile + 16 * warp + thread // 4, 16 * k_tile + 2 * (thread % 4)
                    values = [codes[n + dn, k + dk] for dn in (0, 8) for dk in (0, 1, 8, 9)]
                    word = sum(int(values[NIBBLES[j]]) << 4 * j for j in range(8))
                    words[k_tile, 128 * n_tile + 4 * thread + warp] = word
    return words


def permute_scales(scales: npt.NDArray[np.uint16], group_size: int, size_k: int) -> npt.NDArray[np.uint16]:
    """Scales [N, G] -> Marlin [G, N]: new column 8i + j of each run of 64 is old column i + 8j; with a single
    group for all of K, runs of 32 in another order.
    """
    grouped = [i + 8 * j for i in range(8) for j in range(8)]
    single = [2 * i + j for i in range(4) for j in (0, 1, 8, 9, 16, 17, 24, 25)]
    order = grouped if 0 < group_size < size_k else single
    return scales.T.reshape(scales.shape[1], -1, len(order))[:, :, order].reshape(scales.shape[::-1])
