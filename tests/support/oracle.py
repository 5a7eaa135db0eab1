"""What a GPU thread makes of Marlin words and scales: an oracle that knows neither the layout code nor its
slicing.

It follows the reading side. A warp of 32 lanes works on a tile of 16 inputs (k) by 64 outputs (n) of a weight
matrix and feeds it to the tensor core instruction mma.m16n8k16, which takes a B operand of 16 (k) by 8 (n)
values:

1. Tiles lie k-tile by k-tile, in a k-tile from left to right. Of a tile each lane loads one vector of four
words.
2. Each word of the vector is two B operands side by side: 16 of the tile's 64 columns.
3. A lane unpacks a word to four packed pairs of values, and a pair is one register of an operand.
4. The instruction says which (k, n) of the operand each lane's registers stand for.

Everything is indexed by these four facts; no permutation is written down.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

LANES = 32
TILE_K = 16
TILE_N = 64
VECTOR_WORDS = 4
OPERAND_N = 8
PADDED_TO = 64

Codes = NDArray[np.uint8]
Scales = NDArray[Any]


def operand_place(lane: int, register: int, half: int) -> tuple[int, int]:
    """The (k, n) in a 16 x 8 B operand of mma.m16n8k16 that half a register of a lane stands for.

    From the instruction's definition: lanes form 8 groups of 4, the group is the column; within a group each
    lane has two neighbouring rows in its first register and the rows 8 further down in its second.
    """
    group, in_group = divmod(lane, 4)
    return 2 * in_group + half + 8 * register, group


def unpacked_nibble(operand: int, register: int, half: int) -> int:
    """Which nibble of a word lands in half a register of its first or second B operand.

    The unpacking masks the word with 0x000f000f, so the low nibble of either 16-bit half makes the first
    register's pair; shifted right by 4 it makes the second register's. The second operand is the same of the
    word shifted by 8.
    """
    shift = 8 * operand + 4 * register + 16 * half
    return shift // 4


def published_codes(words: NDArray[np.int32]) -> Codes:
    """Codes [N, K] of packed words as published, [N, K/8]: element k is at bits 4 (k % 8) of word k // 8."""
    rows, width = words.shape
    codes = np.zeros((rows, 8 * width), np.uint8)
    for nibble in range(8):
        codes[:, nibble::8] = words.view(np.uint32) >> np.uint32(4 * nibble) & np.uint32(15)
    return codes


def read_weights(marlin_words: NDArray[np.int32]) -> Codes:
    """Reads all weights of a matrix as the warps would: words [K/16, 2N] to 4-bit codes [K, N]."""
    k_tiles, width = marlin_words.shape
    n_tiles = width // (LANES * VECTOR_WORDS)
    assert width == n_tiles * LANES * VECTOR_WORDS, f"{width} words in a row are not whole tiles"
    vectors = marlin_words.view(np.uint32).reshape(k_tiles, n_tiles, LANES, VECTOR_WORDS)
    tiles = np.full((k_tiles, n_tiles, TILE_K, TILE_N), 255, dtype=np.uint8)
    for lane in range(LANES):
        for block in range(VECTOR_WORDS):
            word = vectors[:, :, lane, block]
            for operand in range(2):
                for register in range(2):
                    for half in range(2):
                        k, column = operand_place(lane, register, half)
                        n = block * 2 * OPERAND_N + operand * OPERAND_N + column
                        nibble = unpacked_nibble(operand, register, half)
                        tiles[:, :, k, n] = (word >> np.uint32(4 * nibble)) & np.uint32(15)
    assert tiles.max(initial=0) < 16, "some weight was read by no lane"
    return tiles.transpose(0, 2, 1, 3).reshape(k_tiles * TILE_K, n_tiles * TILE_N)


def read_scales(marlin_scales: Scales, group_size: int, size_k: int) -> Scales:
    """Reads the scales as the warps would: stored [G, N] to [G, N] with a column for each output.

    With several groups along k the scales multiply B operands before the instruction; with one group they
    multiply its results, which lanes hold in another arrangement.
    """
    groups, size_n = marlin_scales.shape
    one_group = group_size == -1 or group_size >= size_k
    assert groups == (1 if one_group else size_k // group_size), f"{groups} groups for k = {size_k}"
    # A warp's 64 scales of a group are 8 vectors of 8.
    vectors = marlin_scales.reshape(groups, size_n // TILE_N, 8, 8)
    read = np.zeros((groups, size_n // TILE_N, TILE_N), dtype=marlin_scales.dtype)
    owners = np.zeros(TILE_N, dtype=int)
    for lane in range(LANES):
        for column, vector, element in _result_scales(lane) if one_group else _operand_scales(lane):
            read[:, :, column] = vectors[:, :, vector, element]
            owners[column] += 1
    # Lanes that share a column load the same scale.
    assert np.all(owners == (8 if one_group else 4)), "some column has no scale, or too many"
    return read.reshape(groups, size_n)


def _operand_scales(lane: int) -> list[tuple[int, int, int]]:
    """(column, vector, element) of each scale a lane puts on its B operands: one vector, an element per
    operand.
    """
    places = []
    for block in range(VECTOR_WORDS):
        for operand in range(2):
            _, column = operand_place(lane, 0, 0)
            n = block * 2 * OPERAND_N + operand * OPERAND_N + column
            places.append((n, lane // 4, 2 * block + operand))
    return places


def _result_scales(lane: int) -> list[tuple[int, int, int]]:
    """(column, vector, element) of each scale a lane puts on its results.

    Of a 16 x 8 result a lane has two neighbouring columns, at twice its place in its group of 4. It loads two
    vectors, 4 apart; the first serves the first two of the warp's four blocks of 16 columns. A pair serves an
    operand's result.
    """
    places = []
    in_group = lane % 4
    for block in range(VECTOR_WORDS):
        for operand in range(2):
            for neighbour in range(2):
                n = block * 2 * OPERAND_N + operand * OPERAND_N + 2 * in_group + neighbour
                pair = 2 * (block % 2) + operand
                places.append((n, in_group + 4 * (block // 2), 2 * pair + neighbour))
    return places


@dataclass(frozen=True)
class Matrix:
    """A matrix as published: codes [outputs, inputs] and scales [outputs, inputs / group]."""

    codes: Codes
    scales: Scales


@dataclass(frozen=True)
class RankExpert:
    """What one rank's shard of one expert must read back as; inputs run down, outputs run across."""

    w13_codes: Codes
    w13_scales: Scales
    w2_codes: Codes
    w2_scales: Scales


def oracle_experts(rank: int, tp: int, ep: int, experts: int) -> list[int]:
    """The experts of a rank in the order it stores them: contiguous runs, the same run for `tp / ep` ranks in
    a row.
    """
    assert tp % ep == 0
    assert experts % ep == 0
    run = experts // ep
    ep_rank = rank // (tp // ep)
    return [ep_rank * run + local for local in range(run)]


def oracle_rank_slices(
    gate: Matrix, up: Matrix, down: Matrix, *, rank: int, tp: int, ep: int = 1
) -> RankExpert:
    """What a rank must hold of an expert, by definition: a share of the intermediate channels, the same of
    all three.

    Channel c of the expert is row c of gate and of up and column c of down. A rank's w13 has its channels'
    gates, then its channels' ups; its w2 has its channels as inputs. Codes 0 and scales 0 make the channels a
    multiple of 64.
    """
    moe_tp = tp // ep
    intermediate, hidden = gate.codes.shape
    group = hidden // gate.scales.shape[1]
    share = intermediate // moe_tp
    assert share * moe_tp == intermediate, f"{intermediate} channels cannot be shared by {moe_tp}"
    assert share % group == 0, f"a share of {share} channels cuts through a group of {group}"
    padded = -(-share // PADDED_TO) * PADDED_TO
    first = (rank % moe_tp) * share
    made = RankExpert(
        np.zeros((hidden, 2 * padded), np.uint8),
        np.zeros((gate.scales.shape[1], 2 * padded), gate.scales.dtype),
        np.zeros((padded, hidden), np.uint8),
        np.zeros((-(-padded // group), hidden), down.scales.dtype),
    )
    for local in range(share):
        channel = first + local
        for matrix, at in ((gate, local), (up, padded + local)):
            made.w13_codes[:, at] = matrix.codes[channel]
            made.w13_scales[:, at] = matrix.scales[channel]
        made.w2_codes[local] = down.codes[:, channel]
        made.w2_scales[local // group] = down.scales[:, channel // group]
    return made
