"""Which value each thread of the kernel takes from which bits: index tables, built lane by lane.

Nothing here is derived from a layout; everything is what one warp (32 lanes) of the kernel does with one tile
of 16 inputs (k) by 64 outputs (n), the unit in which weights are stored:

- A lane loads consecutive 32-bit words a tile: 4 of 4-bit weights, 8 of 8-bit ones. The tile's words lie in
  lane order.
- They feed four 16-column blocks in turn, each as two B operands of `mma.m16n8k16` (8 columns each).
- The PTX ISA ("Matrix fragments for mma.m16n8k16", B of .f16/.bf16) gives lane l of the warp column l / 4 of
  an operand, and in register r, half e, row 2 (l % 4) + 8 r + e.
- How a word becomes registers is the dequantisation: 4-bit words are masked with 0x000f000f, so register r
  holds nibbles r (low half) and r + 4 (high half); the second operand is the word shifted right by 8. Of
  8-bit words there is one an operand, whose byte order in the registers is 0, 2 | 1, 3.

Plain numpy, so that this module loads without torch.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt

IndexTable = npt.NDArray[np.int64]

LANES = 32
TILE_K = 16
TILE_N = 64
BLOCK_N = 16
OPERAND_N = 8
#: columns over which a channel-wise scale or a bias is permuted
SINGLE_RUN = 32


def operand_place(lane: int, register: int, half: int) -> tuple[int, int]:
    """(k, n) within a 16 x 8 B operand of mma.m16n8k16 that this half register of this lane holds."""
    return 2 * (lane % 4) + 8 * register + half, lane // 4


def code_in_registers(num_bits: int, register: int, half: int) -> int:
    """Which code of a dequantised word ends up in this half of this register, codes counted from the lowest
    bits.
    """
    if num_bits == 4:
        return register + 4 * half
    return (0, 2, 1, 3)[2 * register + half]


@cache
def tile_reads(num_bits: int) -> IndexTable:
    """[16, 64]: for (k, n) of a tile, the index of its code in the tile's stream of words.

    Codes are counted from the lowest bits of the first word. A 4-bit tile is 128 words of 8 codes, an 8-bit
    tile 256 words of 4.
    """
    if num_bits not in (4, 8):
        raise ValueError(f"weights have 4 or 8 bits, not {num_bits}")
    pack_factor = 32 // num_bits
    table = np.full((TILE_K, TILE_N), -1, np.int64)
    words_a_lane = TILE_K * TILE_N // LANES // pack_factor
    for lane in range(LANES):
        for block in range(TILE_N // BLOCK_N):
            for operand in range(2):
                for register in range(2):
                    for half in range(2):
                        code = code_in_registers(num_bits, register, half)
                        if num_bits == 4:
                            word, code = words_a_lane * lane + block, code + 2 * operand
                        else:
                            word = words_a_lane * lane + 2 * block + operand
                        k, n = operand_place(lane, register, half)
                        table[k, BLOCK_N * block + OPERAND_N * operand + n] = word * pack_factor + code
    return table


@cache
def grouped_scale_reads() -> IndexTable:
    """[64]: for a column of a 64-wide run, where its scale lies in the stored run, for scales of groups of
    inputs.

    They are applied to the B operands: a lane needs the one scale of its column in each of the tile's 8
    operands, and loads them as one vector of 8 values; the four lanes of a column load the same vector.
    """
    table = np.full(TILE_N, -1, np.int64)
    for lane in range(LANES):
        for operand in range(TILE_N // OPERAND_N):
            _, column = operand_place(lane, 0, 0)
            table[OPERAND_N * operand + column] = OPERAND_N * (lane // 4) + operand
    return table


@cache
def channel_reads() -> IndexTable:
    """[32]: for a column of a 32-wide run, where its value lies in the stored run, for channel-wise scales
    and biases.

    They are applied to the results: in the accumulator of mma.m16n8k16 a lane holds columns 2 (l % 4) and the
    next of an operand, so it loads the pairs of the run's 4 operands as one vector of 8 values.
    """
    table = np.full(SINGLE_RUN, -1, np.int64)
    for in_group in range(4):
        for operand in range(SINGLE_RUN // OPERAND_N):
            for half in range(2):
                table[OPERAND_N * operand + 2 * in_group + half] = 8 * in_group + 2 * operand + half
    return table


@cache
def zero_point_reads() -> IndexTable:
    """[64]: for a column of a 64-wide run, which of the run's 64 packed 4-bit zero points it takes.

    A lane loads one word, the zero points of its column in the tile's 8 operands, and sends it through the
    same dequantisation as weights; register pairs come out in operand order.
    """
    table = np.full(TILE_N, -1, np.int64)
    for lane in range(LANES):
        _, column = operand_place(lane, 0, 0)
        for block in range(TILE_N // BLOCK_N):
            # The word's first pair of registers serves blocks 0 and 1, the second (shifted right by 8) blocks
            # 2 and 3.
            shift, register = divmod(block, 2)
            for operand in range(2):
                code = code_in_registers(4, register, operand) + 2 * shift
                table[BLOCK_N * block + OPERAND_N * operand + column] = 8 * (lane // 4) + code
    return table


@cache
def tile_repack(num_bits: int) -> IndexTable:
    """[words, codes]: for each code of a repacked tile's words, k * 64 + n of the code the repack kernel puts
    there.

    Modelled on the threads of the repack kernel, apart from `tile_reads`: warp w of 4 works on columns 16 w
    to 16 w + 15; its thread t gathers inputs 2 (t % 4) + {0, 1, 8, 9} of column t / 4 and of the column 8
    further on, and stores 4-bit codes as word 4 t + w in the order 0 2 4 6 1 3 5 7, 8-bit codes as words 8 t
    + 2 w and the next in the order 0 2 1 3.
    """
    if num_bits not in (4, 8):
        raise ValueError(f"weights have 4 or 8 bits, not {num_bits}")
    pack_factor = 32 // num_bits
    table = np.full((TILE_K * TILE_N // pack_factor, pack_factor), -1, np.int64)
    for warp in range(4):
        for thread in range(32):
            row, column = 2 * (thread % 4), 16 * warp + thread // 4
            gathered = [(row + k) * TILE_N + column + n for n in (0, 8) for k in (0, 1, 8, 9)]
            if num_bits == 4:
                table[4 * thread + warp] = [gathered[i] for i in (0, 2, 4, 6, 1, 3, 5, 7)]
            else:
                for column_half in range(2):
                    table[8 * thread + 2 * warp + column_half] = [
                        gathered[4 * column_half + i] for i in (0, 2, 1, 3)
                    ]
    return table
