"""Layers of full size, with random values made faster than a disk takes them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from .names import FULL, SMALL, Dims, Tensor
from .values import BF16_BASE, expected_tensor
from .writer import Content

# Bytes of random numbers that tensors are cut from.
_BLOCK = 16 << 20

_STEP = 648059
_PROJECTIONS = ("gate", "up", "down")

# What a layer's shapes follow from.
_WIDTHS = ("hidden", "intermediate", "moe_intermediate", "heads", "nope", "rope", "v", "q_lora", "kv_lora")


def layers_dims(layers: int, experts: int, *, dense: bool = False) -> Dims:
    """The numbers of a checkpoint with MoE layers of full width, and all else small."""
    return replace(
        SMALL,
        **{name: getattr(FULL, name) for name in _WIDTHS},
        layers=layers + dense,
        first_k_dense=int(dense),
        experts=experts,
        top_k=FULL.top_k,
        vocab=1024,
    )


def random_content(dims: Dims, seed: int) -> Content:
    """Cuts each tensor from a block of random numbers, at a place of its own.

    Hashing every value would be slower than the disk.
    """
    random = np.random.default_rng(seed)
    length = _BLOCK + 16
    codes = _random_codes(random, length)
    scales = (BF16_BASE + random.integers(0, 512, length // 2)).astype("<u2")
    plain = scales | (random.integers(0, 2, length // 2).astype("<u2") << 15)

    def content(tensor: Tensor) -> Iterator[memoryview]:
        if tensor.dtype == "F32" or tensor.name.endswith(".weight_shape"):
            yield expected_tensor(tensor, dims).data.cast("B")
            return
        block = codes if tensor.dtype == "I32" else scales if tensor.expert >= 0 else plain
        pieces = block.data.cast("B")
        start = _place(tensor, dims, length // 16) * 16
        left = tensor.nbytes
        while left:
            piece = pieces[start : start + left]
            yield piece
            left -= len(piece)
            start = 0

    return content


def _place(tensor: Tensor, dims: Dims, places: int) -> int:
    """Where in the block a tensor starts, in groups of codes."""
    if tensor.expert < 0:
        return crc32(tensor.name.encode()) % places
    number = (tensor.layer * dims.experts + tensor.expert) * len(_PROJECTIONS) + _PROJECTIONS.index(
        tensor.projection
    )
    # Steps of about the golden ratio, and with no factor of `places`, come to every place before any twice.
    return number * _STEP % places


def _random_codes(random: np.random.Generator, length: int) -> NDArray[np.uint8]:
    """Bytes of two codes each, never 0, with a 1 or a 15 in every 16 bytes (a group of 32)."""
    codes: NDArray[np.uint8] = random.integers(1, 16, (length // 16, 32), dtype=np.uint8)
    peaks = random.choice(np.array([1, 15], dtype=np.uint8), length // 16)
    codes[np.arange(length // 16), random.integers(0, 32, length // 16)] = peaks
    return (codes[:, 0::2] | codes[:, 1::2] << np.uint8(4)).reshape(-1)
