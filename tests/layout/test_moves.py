"""Many slices in one call: the same as each alone, in one buffer or many, and the wrong one is named."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from convert.layout import scales, words
from convert.layout.moe import MarlinU4B8
from convert.layout.protocol import PROJECTIONS, ExpertShape, Slice
from convert.layout.rows import Rows

LAYOUT = MarlinU4B8()
EXPERTS = 2


def batch(shape: ExpertShape, *, shift: int = 0, apart: bool = False) -> list[Slice]:
    """All slices of some experts, sources and targets behind each other in a buffer each; `shift` puts scales off their words, `apart` in many."""
    memory = np.random.default_rng(shape.group_size + shape.moe_tp).integers(0, 256, 1 << 21, dtype=np.uint8)
    targets = np.full(1 << 21, 0xEE, np.uint8)
    source_at = target_at = 0
    stacked = {tensor.name: tensor.shape for tensor in LAYOUT.stacked(shape)}
    made = []
    sources, source_words, target_words = {}, memory.view(np.uint64), targets.view(np.uint64)
    source_scales, target_scales = memory.view(np.uint16), targets.view(np.uint16)
    for expert in range(EXPERTS):
        for projection in PROJECTIONS:
            out, inputs = shape.matrix(projection)
            packed = Rows(source_words, source_at // 8, inputs // 16, out, inputs // 16)
            source_at += out * inputs // 2
            scale = Rows(source_scales, source_at // 2 + shift, inputs // shape.group_size, out, inputs // shape.group_size)
            source_at += -(-(out * inputs // shape.group_size * 2 + 2 * shift) // 8) * 8
            sources[expert, projection] = packed, scale
    for index in range(shape.moe_tp):
        for expert in range(EXPERTS):
            places = {}
            for name, (rows, cols) in stacked.items():
                wide = name.endswith("packed")
                flat, per = (target_words, 2) if wide else (target_scales, 1)
                places[name] = Rows(flat, target_at // (8 if wide else 2), cols // per, rows, cols // per)
                target_at += rows * cols * (4 if wide else 2)
            for projection in PROJECTIONS:
                w, s = (places[name] for name in LAYOUT.targets(projection))
                if apart:
                    w, s = (Rows(each.flat[:], *each[1:]) for each in (w, s))
                made.append(Slice(projection, index, *sources[expert, projection], w, s))
    assert max(source_at, target_at) < memory.size
    return made


def alone(shape: ExpertShape, each: Slice) -> tuple[NDArray[Any], NDArray[Any]]:
    """One slice packed by itself, in memory of its own."""
    w, s = (Rows.of(np.zeros((rows.rows, rows.cols), rows.flat.dtype)) for rows in (each.words, each.scales))
    LAYOUT.pack(shape, each.projection, each.index, each.packed, each.scale, w, s)
    return w.array(), s.array()


def part(projection: str, array: NDArray[Any]) -> NDArray[Any]:
    """The columns that a projection fills."""
    half = array.shape[1] // 2
    return {"gate_proj": array[:, :half], "up_proj": array[:, half:], "down_proj": array}[projection]


SHAPES = [ExpertShape(*sizes) for sizes in ((256, 512, 32, 4), (256, 512, 32, 2), (256, 512, 64, 8), (256, 256, 32, 8), (128, 96, 32, 1))]


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_batch_is_each_slice_alone(shape: ExpertShape, shift: int, apart: bool) -> None:
    slices = batch(shape, shift=shift, apart=apart)
    moves = LAYOUT.moves(shape, slices)
    moves.pack()
    for each in slices:
        w, s = alone(shape, each)
        for made, expected in ((each.words.array(), w), (each.scales.array(), s)):
            np.testing.assert_array_equal(part(each.projection, made), part(each.projection, expected))
    assert moves.mismatch() is None
    assert LAYOUT.moves(shape, slices).mismatch() is None


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_wrong_slice_is_named(shape: ExpertShape, apart: bool) -> None:
    slices = batch(shape, apart=apart)
    LAYOUT.moves(shape, slices).pack()
    for i, each in enumerate(slices):
        column = {"gate_proj": 3, "up_proj": each.words.cols // 2 + 3, "down_proj": 3}[each.projection]
        each.words.array()[0, column] ^= np.uint64(1 << 17)
        assert (found := LAYOUT.moves(shape, slices).mismatch()) is not None
        assert found[0] == i
        assert found[1].startswith("weight_packed differs at row ")
        each.words.array()[0, column] ^= np.uint64(1 << 17)
        column = {"gate_proj": 3, "up_proj": each.scales.cols // 2 + 3, "down_proj": 3}[each.projection]
        each.scales.array()[0, column] ^= np.uint16(1 << 9)
        assert (found := LAYOUT.moves(shape, slices).mismatch()) is not None
        assert found[0] == i
        assert found[1].startswith("weight_scale differs at row ")
        each.scales.array()[0, column] ^= np.uint16(1 << 9)
    assert LAYOUT.moves(shape, slices).mismatch() is None


@pytest.mark.parametrize(
    ("shape", "options", "word_table", "scale_table"),
    [
        (SHAPES[0], {}, True, True),
        (SHAPES[0], {"shift": 1}, True, False),
        (SHAPES[0], {"apart": True}, False, False),
        (SHAPES[2], {}, True, False),  # one group for all of w2's K: another order
        (SHAPES[3], {}, False, False),  # padded: copies
    ],
)
def test_which_go_in_one_call(
    monkeypatch: pytest.MonkeyPatch, shape: ExpertShape, options: dict[str, Any], word_table: bool, scale_table: bool
) -> None:
    called = []
    for module, name in ((words, "pack_table"), (scales, "pack_scale_table")):
        function = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args, name=name, function=function: (called.append(name), function(*args)))
    LAYOUT.moves(shape, batch(shape, **options)).pack()
    assert called == ["pack_table"] * word_table + ["pack_scale_table"] * scale_table


def test_nothing_to_move() -> None:
    moves = LAYOUT.moves(SHAPES[0], [])
    moves.pack()
    assert moves.mismatch() is None


def test_shapes_of_a_batch_are_checked() -> None:
    (first, *rest) = batch(SHAPES[0])
    short = replace(first, words=first.words.part(1, first.words.rows - 1, 0, first.words.cols))
    with pytest.raises(ValueError, match=r"needs a Marlin side of|could not broadcast"):
        LAYOUT.moves(SHAPES[0], [*rest, short]).pack()
