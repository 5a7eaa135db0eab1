"""The usual mistakes of a converter, planted in a converted folder: what each looks like to the kernel is
what its check must say.

`plant` edits the shard files in place; digests are left as they were.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from marlin_convert.layout import marlin
from marlin_convert.layout.scales import SINGLE

Words = NDArray[np.int32]
Bits = NDArray[np.uint16]

#: a column of the first run that is not padding even in a slice of 32: rows 19 and 27 of the slice
_WORD = 4 * (4 * 3 + 2) + 1
#: place 1 of a run of 64 scales is row 8
_SCALE = 1


@dataclass(frozen=True)
class Planted:
    """What was planted where. `projection` and `looks` are what a finding must name; `experts` those with a
    finding each.

    `wrong` is the largest number of weights that may differ, None for a mistake that spoils a whole matrix.
    """

    mistake: str
    layer: int
    rank: int
    expert: int
    matrix: str
    projection: str | None
    looks: str
    experts: tuple[int, ...]
    wrong: int | None = None


@dataclass(frozen=True)
class _Stacks:
    """Writable views of a rank's stacked tensors of one matrix, which of the experts, and how to open the
    next slice's rank.
    """

    words: Words
    scales: Bits
    group: int
    index: int
    other: Callable[[], tuple[Words, Bits]]

    @property
    def size_k(self) -> int:
        """The K that the GEMM is called with."""
        return int(16 * self.words.shape[1])


def _swap_halves(stacks: _Stacks) -> None:
    for tensor in (stacks.words, stacks.scales):
        half = tensor.shape[-1] // 2
        tensor[stacks.index] = np.concatenate(
            (tensor[stacks.index][:, half:], tensor[stacks.index][:, :half]), axis=1
        )


def _published_scales(stacks: _Stacks) -> Bits:
    return marlin.unpack_scale(stacks.scales[stacks.index].copy(), stacks.group, stacks.size_k)


def _plain_scales(stacks: _Stacks) -> None:
    stacks.scales[stacks.index] = _published_scales(stacks).T


def _wrong_width(stacks: _Stacks) -> None:
    plain = _published_scales(stacks).T
    stacks.scales[stacks.index] = plain.reshape(plain.shape[0], -1, 32)[:, :, SINGLE].reshape(plain.shape)


def _other_slice(stacks: _Stacks) -> None:
    words, scales = stacks.other()
    stacks.words[stacks.index], stacks.scales[stacks.index] = words[stacks.index], scales[stacks.index]


def _no_offset(stacks: _Stacks) -> None:
    stacks.words[stacks.index] ^= np.uint32(0x88888888).view(np.int32)


def _change_published(change: Callable[[NDArray[np.uint8]], NDArray[np.uint8]]) -> Callable[[_Stacks], None]:
    def spoil(stacks: _Stacks) -> None:
        packed = marlin.unpack_weight(stacks.words[stacks.index].copy())
        changed = np.ascontiguousarray(change(packed.view(np.uint8)))
        stacks.words[stacks.index] = marlin.pack_weight(changed.view(np.int32).reshape(packed.shape))

    return spoil


def _swap_nibbles(data: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return ((data >> 4) | (data << 4)).astype(np.uint8)


def _reverse_words(data: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return _swap_nibbles(data).reshape(data.shape[0], -1, 4)[:, :, ::-1].reshape(data.shape)


def _shift_experts(stacks: _Stacks) -> None:
    first = stacks.words[stacks.index].copy(), stacks.scales[stacks.index].copy()
    for i in range(stacks.index, len(stacks.words) - 1):
        stacks.words[i], stacks.scales[i] = stacks.words[i + 1], stacks.scales[i + 1]
    stacks.words[-1], stacks.scales[-1] = first


def _swap_scale_halves(stacks: _Stacks) -> None:
    scales = stacks.scales[stacks.index]
    scales[:] = np.roll(scales, scales.shape[-1] // 2, axis=-1)


def _swap_code_halves(stacks: _Stacks) -> None:
    words = stacks.words[stacks.index]
    words[:] = np.roll(words, words.shape[-1] // 2, axis=-1)


def _swap_scale_columns(stacks: _Stacks) -> None:
    scales = stacks.scales[stacks.index]
    scales[:, [0, _SCALE]] = scales[:, [_SCALE, 0]]


def _swap_scale_groups(stacks: _Stacks) -> None:
    scales = stacks.scales[stacks.index]
    scales[[0, 1]] = scales[[1, 0]]


def _one_nibble(stacks: _Stacks) -> None:
    # down's inputs may be padding from 32 on, so the first tile; w13's are never padding
    tile = 0 if stacks.words.shape[1] < stacks.words.shape[2] // 4 else stacks.words.shape[1] // 2
    stacks.words[stacks.index, tile, _WORD] ^= np.int32(1 << 20)


def _one_scale(stacks: _Stacks) -> None:
    stacks.scales[stacks.index, 0, _SCALE] ^= 1


#: mistake -> how to make it, and what the check must say of it ("" where only the place can be told)
MISTAKES: dict[str, tuple[Callable[[_Stacks], None], str]] = {
    "gate and up swapped": (_swap_halves, "gate and up are swapped"),
    "gate and up scales swapped": (_swap_scale_halves, "the scales of gate and up are swapped"),
    "gate and up codes swapped": (_swap_code_halves, "the codes of gate and up are swapped"),
    "one scale column swapped": (_swap_scale_columns, "the scales of rows 0 and 8 are exchanged"),
    "scale groups swapped": (_swap_scale_groups, "the scales of groups 0 and 1 are exchanged"),
    "scales not permuted": (_plain_scales, "the scales are not permuted"),
    "scales permuted with the wrong width": (
        _wrong_width,
        "the scales are permuted in the order of 32 columns, not of 64",
    ),
    "another rank's slice": (_other_slice, "it is the slice of rank {other_rank}"),
    "missing -8": (_no_offset, "the codes lack the offset of 8"),
    "nibbles swapped": (_change_published(_swap_nibbles), "the two nibbles of each byte are swapped"),
    "nibbles reversed": (_change_published(_reverse_words), "the nibbles of each word are in reverse order"),
    "experts shifted by one": (_shift_experts, "it is expert {next_expert}"),
    "one nibble": (_one_nibble, ""),
    "one last bit of one scale": (
        _one_scale,
        "the codes are right and one scale is not, the first at row 8, group 0: ",
    ),
}


def mistakes(matrix: str, moe_tp: int) -> list[str]:
    """Those that make sense for a matrix (`w13` or `w2`) cut into `moe_tp` slices."""
    out = "" if matrix == "w13" else "gate and up "
    return [
        name
        for name in MISTAKES
        if not (out and name.startswith(out)) and (moe_tp > 1 or name != "another rank's slice")
    ]


def plant(out: Path, mistake: str, layer: int, rank: int, expert: int, matrix: str = "w13") -> Planted:
    """Make a mistake in one matrix of one expert on one rank ("experts shifted by one": of it and all after
    it).
    """
    document = json.loads((out / "manifest.json").read_bytes())
    moe_tp = document["parallel"]["moe_tp"]
    local = document["model"]["n_routed_experts"] // document["parallel"]["ep"]
    other_rank = rank - rank % moe_tp + (rank + 1) % moe_tp
    if not rank // moe_tp * local <= expert < (rank // moe_tp + 1) * local:
        raise ValueError(f"rank {rank} does not own expert {expert}")
    last, shifted = (rank // moe_tp + 1) * local - 1, mistake == "experts shifted by one"
    if shifted and expert == last:
        raise ValueError("there is no expert after this one")
    spoil, looks = MISTAKES[mistake]
    words, scales = _open(out, document, layer, rank, matrix)
    index = expert % local
    before = words[index].copy(), scales[index].copy()
    spoil(
        _Stacks(
            words,
            scales,
            document["layout"]["group_size"],
            index,
            lambda: _open(out, document, layer, other_rank, matrix),
        )
    )
    if (before[0] == words[index]).all() and (before[1] == scales[index]).all():
        raise ValueError(f"{mistake} changes nothing here")
    words.flush()
    scales.flush()
    return Planted(
        mistake,
        layer,
        rank,
        expert,
        matrix,
        projection="down_proj" if matrix == "w2" else "gate_proj" if mistake.startswith("one ") else None,
        looks=looks.format(other_rank=other_rank, next_expert=expert + 1),
        experts=tuple(range(expert, last + 1)) if shifted else (expert,),
        wrong={"one nibble": 1, "one last bit of one scale": document["layout"]["group_size"]}.get(mistake),
    )


def _open(
    out: Path, document: dict[str, Any], layer: int, rank: int, matrix: str
) -> tuple[np.memmap[Any, np.dtype[np.int32]], np.memmap[Any, np.dtype[np.uint16]]]:
    """Writable views of a rank's stacked words and scales of `matrix`."""
    shard = next(s for s in document["shards"] if s["rank"] == rank and s["unit"] == f"layer-{layer:03d}")
    views: list[Any] = []
    for kind, dtype in (("packed", np.int32), ("scale", np.uint16)):
        tensor = next(
            t for t in shard["tensors"] if t["name"].endswith(f".mlp.experts.{matrix}_weight_{kind}")
        )
        views.append(np.memmap(out / shard["path"], dtype, "r+", tensor["offset"], tuple(tensor["shape"])))
    return views[0], views[1]
