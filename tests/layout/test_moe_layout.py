"""What each rank holds of an expert, against the oracle; padding, both scale orders, refusals, and where a
difference is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from checkpoints import expected_codes, expected_scales, pack_codes
from experts import empty_stack, mismatch, shape_of, slice_of
from marlin_convert.errors import UsageError
from marlin_convert.kernels.quant_types import kernel_type
from marlin_convert.layout import get_layout, known_layouts
from marlin_convert.layout.marlin_moe import MarlinU4B8
from marlin_convert.layout.protocol import PROJECTIONS, ExpertShape, ExpertSlice, Role
from marlin_convert.slicing import Topology
from oracle import Matrix, oracle_experts, oracle_rank_slices, published_codes, read_scales, read_weights

LAYOUT = MarlinU4B8()


@dataclass(frozen=True)
class Expert:
    """An expert as published, and as the oracle takes it."""

    shape: ExpertShape
    packed: dict[str, NDArray[np.int32]]
    scale: dict[str, NDArray[np.uint16]]

    @property
    def oracle(self) -> tuple[Matrix, Matrix, Matrix]:
        gate, up, down = (Matrix(published_codes(self.packed[p]), self.scale[p]) for p in PROJECTIONS)
        return gate, up, down


def make_expert(hidden: int, intermediate: int, group: int, moe_tp: int, expert: int = 0) -> Expert:
    shape = shape_of(hidden, intermediate, group, moe_tp)
    packed, scale = {}, {}
    for projection in PROJECTIONS:
        out, inputs = shape.matrix(projection)
        short = projection.removesuffix("_proj")
        packed[projection] = pack_codes(expected_codes(1, expert, short, out, inputs, group=group))
        scale[projection] = expected_scales(1, expert, short, out, inputs // group)
    return Expert(shape, packed, scale)


def matrices(expert: Expert) -> dict[tuple[str, Role], NDArray[Any]]:
    """The source matrices by projection and role."""
    both = ((Role.WEIGHT, expert.packed), (Role.SCALE, expert.scale))
    return {(projection, role): arrays[projection] for projection in PROJECTIONS for role, arrays in both}


def pack_rank(expert: Expert, index: int) -> dict[str, NDArray[Any]]:
    """The stacked tensors of one expert, made in memory that was not zero."""
    made = empty_stack(LAYOUT, expert.shape)
    assert LAYOUT.batch(expert.shape, [places(expert, index, made)]).pack(check=True) is None
    return made


def places(expert: Expert, index: int, made: dict[str, NDArray[Any]]) -> ExpertSlice:
    return slice_of(LAYOUT, expert.shape, matrices(expert), made, index)


def where(expert: Expert, index: int, made: dict[str, NDArray[Any]]) -> tuple[str, str] | None:
    """Projection and place of the first difference between slice `index` of an expert and what was made."""
    found = mismatch(LAYOUT, expert.shape, [places(expert, index, made)])
    return None if found is None else (found.projection, found.where)


def assert_is_the_oracles(expert: Expert, made: dict[str, NDArray[Any]], rank: int, tp: int, ep: int) -> None:
    expected = oracle_rank_slices(*expert.oracle, rank=rank, tp=tp, ep=ep)
    group, hidden = expert.shape.scheme.group_size, expert.shape.hidden
    np.testing.assert_array_equal(read_weights(made["w13_weight_packed"]), expected.w13_codes)
    np.testing.assert_array_equal(read_scales(made["w13_weight_scale"], group, hidden), expected.w13_scales)
    np.testing.assert_array_equal(read_weights(made["w2_weight_packed"]), expected.w2_codes)
    np.testing.assert_array_equal(
        read_scales(made["w2_weight_scale"], group, expected.w2_codes.shape[0]), expected.w2_scales
    )


@pytest.mark.parametrize(
    ("tp", "ep"),
    [
        (1, 1),
        (2, 1),
        (4, 1),
        (8, 1),
        (16, 1),
        (32, 1),
        (64, 1),
        (2, 2),
        (8, 2),
        (8, 4),
        (8, 8),
        (16, 2),
        (64, 2),
        (64, 64),
        (128, 2),
    ],
)
def test_every_rank_holds_what_the_oracle_says(tp: int, ep: int) -> None:
    topology = Topology.of(tp, ep)
    expert = make_expert(128, 2048, 32, topology.moe_tp)
    for rank in range(tp):
        assert list(topology.expert_range(rank, 128)) == oracle_experts(rank, tp, ep, 128)
        if (
            rank < topology.moe_tp or rank % 7 == 0
        ):  # all slices, and some of them again on ranks of other groups
            assert_is_the_oracles(expert, pack_rank(expert, topology.moe_tp_rank(rank)), rank, tp, ep)


@pytest.mark.parametrize(
    ("hidden", "intermediate", "group", "moe_tp"),
    [
        (256, 512, 32, 8),
        (256, 512, 64, 4),
        (256, 512, 64, 8),
        (256, 512, 128, 2),
        (256, 512, 128, 4),
        (128, 512, 128, 2),
        (256, 96, 32, 1),
        (256, 288, 32, 3),
    ],
)
def test_other_sizes_and_groups(hidden: int, intermediate: int, group: int, moe_tp: int) -> None:
    expert = make_expert(hidden, intermediate, group, moe_tp)
    assert LAYOUT.validate(expert.shape) is None
    for rank in range(moe_tp):
        assert_is_the_oracles(expert, pack_rank(expert, rank), rank, moe_tp, 1)


def test_the_scale_order_follows_from_the_k_of_each_gemm() -> None:
    """Group 64: w2 of a slice of 64 has one group for its whole K, w13 has four for its 256."""
    made = pack_rank(make_expert(256, 512, 64, 8), 3)
    scale = expected_scales(1, 0, "down", 256, 8)[:, 3]
    assert made["w2_weight_scale"].shape == (1, 256)
    assert made["w2_weight_scale"][0, :6].tolist() == scale[[0, 1, 8, 9, 16, 17]].tolist()
    assert (
        made["w13_weight_scale"][0, :3].tolist()
        == expected_scales(1, 0, "gate", 512, 4)[[192, 200, 208], 0].tolist()
    )


def test_k_counts_with_its_padding() -> None:
    """tp 64: a slice of 32 with group 32 is stored as 64, and K = 64 is more than a group."""
    made = pack_rank(make_expert(128, 2048, 32, 64), 5)
    scale = expected_scales(1, 0, "down", 128, 64)[:, 5]
    assert made["w2_weight_scale"].shape == (2, 128)
    assert made["w2_weight_scale"][0, :4].tolist() == scale[[0, 8, 16, 24]].tolist()
    assert not made["w2_weight_scale"][1].any()


def test_padding_is_zero_words_and_zero_scales_at_the_end_of_each_half() -> None:
    made = pack_rank(make_expert(128, 2048, 32, 64), 0)
    gate, up = (
        read_weights(made["w13_weight_packed"])[:, :64],
        read_weights(made["w13_weight_packed"])[:, 64:],
    )
    gate_scale, up_scale = np.split(read_scales(made["w13_weight_scale"], 32, 128), 2, axis=1)
    for half in (gate, up, gate_scale, up_scale):
        assert half[:, :32].all()  # no code and no scale of the examples is 0
        assert not half[:, 32:].any()
    down = read_weights(made["w2_weight_packed"])
    assert down[:32].all()
    assert not down[32:].any()


@pytest.mark.parametrize(("moe_tp", "padded"), [(1, 2048), (8, 256), (16, 128), (32, 64), (64, 64)])
def test_stored_shapes_of_the_published_model(moe_tp: int, padded: int) -> None:
    shape = shape_of(7168, 2048, 32, moe_tp)
    assert LAYOUT.padded(shape) == padded
    assert [(t.name, t.dtype, t.shape) for t in LAYOUT.stacked(shape)] == [
        ("w13_weight_packed", "I32", (448, 4 * padded)),
        ("w13_weight_scale", "BF16", (224, 2 * padded)),
        ("w2_weight_packed", "I32", (padded // 16, 14336)),
        ("w2_weight_scale", "BF16", (padded // 32, 7168)),
    ]


def test_what_the_layout_says_of_itself() -> None:
    assert get_layout("moe_wna16_marlin.u4b8") == LAYOUT
    assert known_layouts() == ("moe_wna16_marlin.u4b8",)
    with pytest.raises(UsageError, match=r"no layout marlin; known are moe_wna16_marlin\.u4b8"):
        get_layout("marlin")
    kernel = kernel_type(LAYOUT.id)
    assert kernel is not None
    assert (kernel.name, kernel.id, kernel.num_bits) == ("uint4b8", 1125899907892224, 4)
    assert [(t.name, t.role, t.projections) for t in LAYOUT.stacked(shape_of(7168, 2048, 32, 8))] == [
        ("w13_weight_packed", Role.WEIGHT, ("gate_proj", "up_proj")),
        ("w13_weight_scale", Role.SCALE, ("gate_proj", "up_proj")),
        ("w2_weight_packed", Role.WEIGHT, ("down_proj",)),
        ("w2_weight_scale", Role.SCALE, ("down_proj",)),
    ]


@pytest.mark.parametrize(
    ("intermediate", "group", "moe_tp"), [(512, 32, 4), (512, 64, 8), (512, 32, 16), (288, 32, 3)]
)
def test_the_ranks_together_give_the_source_back(intermediate: int, group: int, moe_tp: int) -> None:
    expert = make_expert(256, intermediate, group, moe_tp)
    back = Expert(
        expert.shape,
        {p: np.full_like(a, -1) for p, a in expert.packed.items()},
        {p: np.full_like(a, 0xFFFF) for p, a in expert.scale.items()},
    )
    for index in range(moe_tp):
        made = pack_rank(expert, index)
        assert LAYOUT.unpack(expert.shape, places(back, index, made)) == ()
    for projection in PROJECTIONS:
        np.testing.assert_array_equal(back.packed[projection], expert.packed[projection])
        np.testing.assert_array_equal(back.scale[projection], expert.scale[projection])


@pytest.mark.parametrize(
    "name", ["w13_weight_packed", "w13_weight_scale", "w2_weight_packed", "w2_weight_scale"]
)
def test_padding_that_is_not_zero_is_found(name: str) -> None:
    expert = make_expert(128, 2048, 32, 64)
    made = pack_rank(expert, 2)
    zeros = np.argwhere(made[name] == 0)
    assert len(zeros) >= made[name].size // 2
    made[name][tuple(zeros[-1])] = 1
    projection = "down_proj" if name.startswith("w2") else "up_proj"
    back = Expert(
        expert.shape,
        {p: np.full_like(a, -1) for p, a in expert.packed.items()},
        {p: np.full_like(a, 0xFFFF) for p, a in expert.scale.items()},
    )
    assert LAYOUT.unpack(expert.shape, places(back, 2, made)) == (projection,)
    found = where(expert, 2, made)
    assert found is not None
    assert found[0] == projection
    assert found[1].startswith("weight_scale" if name.endswith("scale") else "weight_packed")


@pytest.mark.parametrize("moe_tp", [1, 4, 16])
@pytest.mark.parametrize("projection", PROJECTIONS)
def test_any_flipped_bit_is_found_at_its_place(moe_tp: int, projection: str) -> None:
    random = np.random.default_rng(PROJECTIONS.index(projection) + 10 * moe_tp)
    expert = make_expert(128, 512, 32, moe_tp)
    index = int(random.integers(moe_tp))
    made = pack_rank(expert, index)
    assert where(expert, index, made) is None
    out, inputs = expert.shape.matrix(projection)
    rows, cols = (out, inputs // moe_tp) if projection == "down_proj" else (out // moe_tp, inputs)
    first_row, first_col = (0, index * cols) if projection == "down_proj" else (index * rows, 0)
    for _ in range(40):
        row, col = int(random.integers(rows)), int(random.integers(cols))
        changed = expert.packed[projection].copy()
        expert.packed[projection].view(np.uint32)[first_row + row, (first_col + col) // 8] ^= np.uint32(
            1 << 4 * (col % 8)
        )
        expected = (
            f"weight_packed differs at row {row} of the slice, inputs {col // 16 * 16} to"
            f" {col // 16 * 16 + 15}"
        )
        assert where(expert, index, made) == (projection, expected)
        expert.packed[projection][:] = changed
        expert.scale[projection][first_row + row, (first_col + col) // 32] ^= 1
        expected = f"weight_scale differs at row {row} of the slice, group {col // 32}"
        assert where(expert, index, made) == (projection, expected)
        expert.scale[projection][first_row + row, (first_col + col) // 32] ^= 1


def test_what_another_slice_half_or_expert_holds_is_a_mismatch() -> None:
    expert, other = make_expert(128, 512, 32, 4), make_expert(128, 512, 32, 4, expert=1)
    made = pack_rank(expert, 1)
    for (projection, role), matrix in matrices(expert).items():
        for wrong, index in ((expert, 2), (other, 1)):
            # everything is what it should be but for one matrix
            mixed = dict(matrices(expert)) | {(projection, role): matrices(wrong)[projection, role]}
            source = slice_of(LAYOUT, expert.shape, mixed, made, 1).source
            strange = slice_of(LAYOUT, expert.shape, mixed, made, index).source
            part = ExpertSlice(
                dict(source) | {(projection, role): strange[projection, role]}, places(expert, 1, made).stored
            )
            found = mismatch(LAYOUT, expert.shape, [part])
            assert found is not None
            assert found.projection == projection
            assert found.where.startswith(str(role))
        assert matrix is matrices(expert)[projection, role]
    swapped = {
        name: np.roll(a, a.shape[1] // 2, axis=1) if name.startswith("w13") else a for name, a in made.items()
    }
    found = mismatch(LAYOUT, expert.shape, [places(expert, 1, swapped)])
    assert found is not None
    assert found.projection == "gate_proj"


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        ((7168, 2048, 32, 8), None),
        ((7168, 2048, 32, 64), None),
        ((7168, 2048, 64, 32), None),
        ((7168, 2048, 128, 16), None),
        ((7232, 2048, 32, 8), "hidden size 7232 is not a multiple of 128, which the kernel needs"),
        ((7168, 2048, 32, 3), "the experts' intermediate size 2048 is not divisible by tp / ep = 3"),
        ((7168, 2048, 16, 8), "group size 16 is not one the kernel has (32, 64, 128)"),
        ((7168, 2048, 0, 8), "group size 0 is not one the kernel has (32, 64, 128)"),
        ((7168, 2048, 7168, 8), "group size 7168 is not one the kernel has (32, 64, 128)"),
        (
            (7168, 2048, 64, 64),
            "a slice of 32 of the experts' intermediate size 2048 at tp / ep = 64 would cut a group of 64",
        ),
        (
            (7168, 2048, 128, 32),
            "a slice of 64 of the experts' intermediate size 2048 at tp / ep = 32 would cut a group of 128",
        ),
        (
            (7168, 1040, 32, 1),
            "a slice of 1040 of the experts' intermediate size 1040 at tp / ep = 1 would cut a group of 32",
        ),
    ],
)
def test_what_the_kernel_cannot_run(shape: tuple[int, int, int, int], reason: str | None) -> None:
    assert LAYOUT.validate(shape_of(*shape)) == reason
