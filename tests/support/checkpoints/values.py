"""Values that tell where they belong: each is a hash of the tensor and of its place there.

Whatever a converter swaps (layers, experts, projections, rows, columns, halves, ranks), the bytes come out
wrong.
"""

from __future__ import annotations

import hashlib
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .names import SMALL, TEXT_PREFIX, Dims, Tensor

# Positive bf16 numbers from 2**-8 up: the last nine bits vary, four powers of two, as the scales of a real
# model do.
BF16_BASE = 0x3B80


def expected_codes(
    layer: int, expert: int, projection: str, rows: int, columns: int, *, group: int = 32
) -> NDArray[np.uint8]:
    """The stored 4-bit codes (value + 8) of a routed expert's matrix, [rows, columns].

    As in the published weights no code is 0, and each group of a row has one of the two largest, 1 or 15.
    """
    name = _matrix(layer, expert, projection, "codes")
    spread = _hash_grid(name, rows, columns)
    codes = (1 + ((spread >> np.uint32(16)) * np.uint32(15) >> np.uint32(16))).astype(np.uint8)
    pick = _hash_grid(name + "/peak", rows, columns // group)
    place = np.arange(columns // group, dtype=np.uint32) * np.uint32(group) + (
        pick >> np.uint32(8)
    ) % np.uint32(group)
    np.put_along_axis(codes, place.astype(np.int64), np.where(pick & 1, 15, 1).astype(np.uint8), axis=1)
    return codes


def expected_packed(
    layer: int, expert: int, projection: str, rows: int, columns: int, *, group: int = 32
) -> NDArray[np.int32]:
    """`weight_packed` of a routed expert's matrix, [rows, columns / 8]."""
    return pack_codes(expected_codes(layer, expert, projection, rows, columns, group=group))


def expected_scales(layer: int, expert: int, projection: str, rows: int, groups: int) -> NDArray[np.uint16]:
    """`weight_scale` of a routed expert's matrix as the bits of bf16 numbers, [rows, groups]. All are
    positive.
    """
    spread = _hash_grid(_matrix(layer, expert, projection, "scales"), rows, groups)
    return (BF16_BASE + (spread >> np.uint32(23))).astype(np.uint16)


def expected_plain(name: str, dtype: str, shape: tuple[int, ...]) -> NDArray[Any]:
    """Any other tensor: F32 as numbers, BF16 as bits. A text prefix before the name makes no difference."""
    name = name.removeprefix(TEXT_PREFIX["k26"])
    spread = _hash_grid(name, prod(shape[:-1]), shape[-1]).reshape(shape)
    if dtype == "F32":
        # All 23 bits of the fraction vary, so that a detour over bf16 shows.
        return (np.uint32(0x3F000000) | (spread >> np.uint32(9))).view(np.float32)
    if len(shape) == 1:
        # A vector has no row to tell its values apart: no two of up to 1,024 neighbours may be equal.
        start, step = _seeds(name)
        spread = (start + np.arange(shape[0], dtype=np.uint32) * (step | np.uint32(1))) << np.uint32(22)
    sign = (spread >> np.uint32(31)) << np.uint32(15)
    return (sign | (BF16_BASE + (spread >> np.uint32(22) & np.uint32(0x1FF)))).astype(np.uint16)


def expected_tensor(tensor: Tensor, dims: Dims = SMALL) -> NDArray[Any]:
    """What a checkpoint of `dims` must hold for `tensor`; BF16 as uint16 bits."""
    of = (tensor.layer, tensor.expert, tensor.projection)
    if tensor.name.endswith(".weight_shape"):
        return np.array(dims.expert_shape(tensor.projection), "<i4" if tensor.dtype == "I32" else "<i8")
    if tensor.name.endswith(".weight_packed"):
        rows, words = tensor.shape
        return expected_packed(*of, rows, words * 8, group=dims.group)
    if tensor.name.endswith(".weight_scale"):
        rows, groups = tensor.shape
        return expected_scales(*of, rows, groups)
    return expected_plain(tensor.name, tensor.dtype, tensor.shape)


def pack_codes(codes: NDArray[np.uint8]) -> NDArray[np.int32]:
    """Eight codes a word along the last axis, the first in the lowest bits."""
    pairs = codes[..., 0::2] | (codes[..., 1::2] << np.uint8(4))
    return pairs.view("<i4")


def _matrix(layer: int, expert: int, projection: str, what: str) -> str:
    return f"layers.{layer}.experts.{expert}.{projection}.{what}"


def _seeds(name: str) -> tuple[np.uint32, np.uint32]:
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    first, second = np.frombuffer(digest, dtype="<u4")
    return np.uint32(first), np.uint32(second)


def _hash_grid(name: str, rows: int, columns: int) -> NDArray[np.uint32]:
    """A 32-bit hash of (name, row, column) for each place of a matrix."""
    row_seed, column_seed = _seeds(name)
    by_row = _mix(np.arange(rows, dtype=np.uint32) + row_seed)
    by_column = _mix(np.arange(columns, dtype=np.uint32) + column_seed)
    return _mix(by_row[:, None] ^ by_column[None, :])


def _mix(value: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Spreads each number over all 32 bits, one to one, in place."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        value ^= value >> np.uint32(shift)
        value *= np.uint32(factor)
    value ^= value >> np.uint32(16)
    return value
