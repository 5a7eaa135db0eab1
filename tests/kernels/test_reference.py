"""The CPU model of the kernel against what the real one computed on a GPU, and against mutants of itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernel_vectors import (
    GEMM_KINDS,
    REPACK_FAMILIES,
    call_of,
    family,
    family_names,
    published_weights,
    relative_error,
    repack_golden,
    run_gemm,
)
from marlin_convert.kernels import fragments
from marlin_convert.kernels.quant_types import UINT4B8, UINT8B128, QuantType
from marlin_convert.kernels.reference import (
    ReferenceProvider,
    decode_scales,
    decode_weight,
    decode_zero_points,
)

REFERENCE = ReferenceProvider()
#: The goldens' own tolerance is 1e-2; this model rounds where the kernel does and differs by the order of
#: float32 sums.
TIGHT = 2e-4


def test_every_golden_family_of_the_kernel_is_looked_at() -> None:
    kernel_families = {name for name in family_names() if name.startswith(("gemm.", "repack", "moe_"))}
    assert kernel_families == {*GEMM_KINDS, *REPACK_FAMILIES, "moe_m5"}


@pytest.mark.parametrize("name", GEMM_KINDS)
def test_gemm_equals_the_kernels_output(name: str) -> None:
    tensors = family(name)
    out = run_gemm(REFERENCE, tensors, GEMM_KINDS[name])
    assert out.dtype == torch.bfloat16
    assert relative_error(out, tensors["out"]) <= TIGHT


@pytest.mark.parametrize("name", REPACK_FAMILIES)
def test_repack_equals_the_kernels_output(name: str) -> None:
    tensors = family(name)
    assert repack_golden(REFERENCE, tensors, int(name.split(".w")[1][0])).equal(tensors["marlin"])


@pytest.mark.parametrize(
    ("group", "channelwise"), [("32", False), ("64", False), ("128", False), ("-1", True)]
)
def test_scales_are_read_in_column_order(group: str, channelwise: bool) -> None:
    tensors = family(f"scales.g{group}")
    assert decode_scales(tensors["marlin"], channelwise).equal(tensors["ct"].t())
    assert not decode_scales(tensors["marlin"], not channelwise).equal(tensors["ct"].t())


def test_zero_points_are_read_in_column_order() -> None:
    tensors = family("zp.w4")
    assert decode_zero_points(tensors["marlin"]).equal(tensors["values"].to(torch.uint8))


@pytest.mark.parametrize("num_bits", [4, 8])
def test_each_code_of_a_tile_is_read_exactly_once(num_bits: int) -> None:
    reads = fragments.tile_reads(num_bits)
    assert sorted(reads.flat) == list(range(1024))
    # The repack kernel puts at each place what the GEMM takes from there; the two tables are written
    # independently.
    assert (fragments.tile_repack(num_bits).flat[reads.ravel()] == range(1024)).all()
    for table in (fragments.grouped_scale_reads(), fragments.channel_reads(), fragments.zero_point_reads()):
        assert sorted(table) == list(range(table.size))


@settings(max_examples=20)
@given(
    k_tiles=st.integers(1, 5),
    n_tiles=st.integers(1, 3),
    num_bits=st.sampled_from([4, 8]),
    seed=st.integers(0, 2**31),
    act_order=st.booleans(),
)
def test_decoding_undoes_repacking(
    k_tiles: int, n_tiles: int, num_bits: int, seed: int, act_order: bool
) -> None:
    generator = np.random.default_rng(seed)
    size_k, size_n, count = 16 * k_tiles, 64 * n_tiles, 32 // num_bits
    codes = generator.integers(0, 2**num_bits, (size_k, size_n), dtype=np.uint32)
    shifts = (num_bits * np.arange(count, dtype=np.uint32))[None, :, None]
    words = (codes.reshape(size_k // count, count, size_n) << shifts).sum(axis=1, dtype=np.uint32)
    perm = generator.permutation(size_k) if act_order else np.arange(size_k)
    packed = REFERENCE.repack(
        torch.from_numpy(words.view(np.int32)),
        torch.from_numpy(perm.astype(np.int32)) if act_order else None,
        size_k,
        size_n,
        num_bits,
    )
    assert packed.dtype == torch.int32
    assert packed.shape == (k_tiles, size_n * num_bits // 2)
    decoded = decode_weight(packed, num_bits, size_k, size_n)
    assert decoded.equal(torch.from_numpy(codes[perm].astype(np.uint8)))


CODE_IN_REGISTERS = fragments.code_in_registers


def _swap_registers(num_bits: int, register: int, half: int) -> int:
    return CODE_IN_REGISTERS(num_bits, half, register)


def _plain_nibbles(num_bits: int, register: int, half: int) -> int:
    return 2 * register + half


def _column_major(lane: int, register: int, half: int) -> tuple[int, int]:
    k, n = 2 * (lane // 8) + 8 * register + half, lane % 8
    return k, n


def _rows_apart(lane: int, register: int, half: int) -> tuple[int, int]:
    return lane % 4 + 4 * register + 8 * half, lane // 4


@pytest.mark.parametrize(
    ("target", "mutant", "table"),
    [
        ("code_in_registers", _swap_registers, "tile_reads"),
        ("code_in_registers", _plain_nibbles, "tile_reads"),
        ("code_in_registers", _swap_registers, "zero_point_reads"),
        ("operand_place", _column_major, "tile_reads"),
        ("operand_place", _rows_apart, "tile_reads"),
        ("grouped_scale_reads", lambda: np.arange(64), None),
        ("grouped_scale_reads", fragments.channel_reads, None),
        ("channel_reads", fragments.grouped_scale_reads, None),
        ("zero_point_reads", fragments.grouped_scale_reads, None),
    ],
)
def test_a_wrong_thread_order_is_noticed(
    monkeypatch: pytest.MonkeyPatch, target: str, mutant: Callable[..., object], table: str | None
) -> None:
    """Mutants of the model: with any of them at least one golden GEMM is far off."""
    # tables are kept once they are made: none is to be made of a mutant and kept for the tests after this one
    for kept in (fragments.grouped_scale_reads, fragments.channel_reads, fragments.zero_point_reads):
        kept()
    for num_bits in (4, 8):
        fragments.tile_reads(num_bits)
    if table is not None:
        monkeypatch.setattr(fragments, table, getattr(fragments, table).__wrapped__)
    monkeypatch.setattr(fragments, target, mutant)
    errors = []
    for name, kind in GEMM_KINDS.items():
        tensors = family(name)
        errors.append(relative_error(run_gemm(REFERENCE, tensors, kind), tensors["out"]))
    assert max(errors) > 5e-2


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("marlin_w", lambda t: t ^ (1 << 12)),
        ("marlin_s", lambda t: t.roll(1, -1)),
        ("marlin_s", lambda t: t.flip(1)),
        ("marlin_zp", lambda t: t ^ (1 << 5)),
        ("expert_ids", lambda t: torch.tensor([1, 0, 0, 0], dtype=torch.int32)),
    ],
)
def test_a_changed_input_changes_the_output(
    name: str, change: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    tensors = family("gemm.u4zp_g64")
    tensors[name] = change(tensors[name]).contiguous()
    assert relative_error(run_gemm(REFERENCE, tensors, GEMM_KINDS["gemm.u4zp_g64"]), tensors["out"]) > 2e-2


def test_act_order_follows_perm_and_for_a_part_of_k_the_group_of_each_row() -> None:
    tensors = family("gemm.u4b8_g32_actorder")
    without = {name: tensor for name, tensor in tensors.items() if name not in ("g_idx_sorted", "perm")}
    assert relative_error(run_gemm(REFERENCE, without, UINT4B8), tensors["out"]) > 0.5
    # Groups of 32 rows in order: naming each row's group says the same as counting rows.
    out = _call(tensors, is_k_full=False)
    assert out.equal(_call(tensors))
    assert not _call(
        {**tensors, "g_idx_sorted": tensors["g_idx_sorted"].flip(1).contiguous()}, is_k_full=False
    ).equal(out)


def _call(
    tensors: dict[str, torch.Tensor],
    *,
    kind: QuantType = UINT4B8,
    block_size: int = 8,
    is_ep: bool = False,
    is_k_full: bool = True,
) -> torch.Tensor:
    """run_gemm for uint4b8, in `c` of the tensors if that is there, with something about the call changed."""
    call = call_of(tensors, kind)
    return REFERENCE.gemm(
        replace(
            call,
            c=tensors.get("c"),
            matrix=replace(call.matrix, is_k_full=is_k_full),
            alignment=replace(call.alignment, block_size=block_size, is_ep=is_ep),
        )
    )


def test_bias_and_topk_weights_are_applied_in_the_activations_dtype() -> None:
    tensors = family("gemm.u4b8_g128")
    plain = tensors["out"]
    column = torch.arange(128).to(torch.bfloat16)
    # Stored like channel-wise scales: in a run of 32, place 8 i + 2 j + e holds column 8 j + 2 i + e.
    stored = torch.empty(128, dtype=torch.bfloat16)
    for run in range(0, 128, 32):
        for i in range(4):
            for j in range(4):
                for e in range(2):
                    stored[run + 8 * i + 2 * j + e] = column[run + 8 * j + 2 * i + e]
    bias = torch.stack([stored, -stored])
    expert = tensors["topk_ids"].reshape(-1, 1).long()
    with_bias = plain + torch.where(expert == 0, column, -column)
    assert _call({**tensors, "bias": bias}).equal(with_bias)
    weights = torch.linspace(0.1, 1.0, 10).reshape(5, 2)
    weighted = _call({**tensors, "bias": bias, "topk_weights": weights})
    assert weighted.equal(with_bias * weights.to(torch.bfloat16).reshape(-1, 1))


def test_eight_bit_channelwise_scales_the_sum_before_it_is_rounded() -> None:
    tensors = family("gemm.u8b128_g32")
    scales = torch.linspace(0.01, 0.02, 256).reshape(2, 1, 128).to(torch.bfloat16)
    out = _call({**tensors, "marlin_s": scales}, kind=UINT8B128)
    ones = torch.ones(2, 128, 4, dtype=torch.bfloat16)
    for row in range(10):
        expert = int(tensors["topk_ids"].reshape(-1)[row])
        weights = published_weights(tensors["ct"][expert], ones[expert], 8).double()
        total = tensors["x"][row // 2].double() @ weights
        expected = (total * decode_scales(scales[expert], True)[0].double()).to(torch.bfloat16)
        assert out[row].equal(expected)


def test_given_output_is_filled_and_blocks_of_other_ranks_leave_it_alone() -> None:
    tensors = family("gemm.u4b8_g128")
    tensors["expert_ids"] = torch.tensor([-1, 1, -1, -1], dtype=torch.int32)
    c = torch.full((10, 128), 7.0, dtype=torch.bfloat16)
    out = _call({**tensors, "c": c}, is_ep=True)
    assert out.data_ptr() == c.data_ptr()
    own = tensors["topk_ids"].reshape(-1) == 1
    assert out[own].equal(tensors["out"][own])
    assert out[~own].eq(7.0).all()
    assert _call(tensors, is_ep=True)[~own].isnan().all()


@pytest.mark.parametrize(
    ("changed", "arguments", "message"),
    [
        (
            {
                "marlin_w": torch.zeros(2, 16, 128, dtype=torch.int32),
                "marlin_s": torch.zeros(2, 2, 64, dtype=torch.bfloat16),
            },
            {},
            "size_n = 64 must be a multiple of 128",
        ),
        (
            {
                "x": torch.zeros(5, 96, dtype=torch.bfloat16),
                "marlin_w": torch.zeros(2, 6, 256, dtype=torch.int32),
            },
            {},
            "size_k = 96 one of 64",
        ),
        ({"x": torch.zeros(6, 128, dtype=torch.bfloat16)}, {}, "a has shape (6, 128), expected (6, 256)"),
        ({}, {"kind": UINT8B128}, "b_q_weight has shape (2, 16, 256), expected (2, 16, 512)"),
        ({}, {"block_size": 12}, "unsupported moe_block_size=12"),
        ({"expert_ids": torch.tensor([0, -1], dtype=torch.int32)}, {}, "has -1 but is_ep is False"),
        ({"expert_ids": torch.tensor([0, 2], dtype=torch.int32)}, {}, "beyond the 2"),
        ({"expert_ids": torch.tensor([0, 1])}, {}, "expert_ids is torch.int64"),
        ({"num_tokens_post_padded": torch.tensor([40], dtype=torch.int32)}, {}, "5 blocks are more than"),
        (
            {"sorted_token_ids": torch.tensor([10, *range(10), *[10] * 5], dtype=torch.int32)},
            {},
            "padding before a token",
        ),
        ({"marlin_s": torch.zeros(2, 2, 128)}, {}, "b_scales is torch.float32"),
        ({"marlin_s": torch.zeros(2, 16, 128, dtype=torch.bfloat16)}, {}, "group size 16 is none of"),
        ({"marlin_zp": torch.zeros(2, 2, 16, dtype=torch.int32)}, {}, "zero points must be given for uint4"),
        ({"perm": torch.zeros(2, 256, dtype=torch.int32)}, {}, "both g_idx and perm"),
        ({"topk_weights": torch.empty(0)}, {}, "0 topk_weights for 10 rows"),
        ({"c": torch.zeros(5, 128, dtype=torch.bfloat16)}, {}, "c has shape (5, 128)"),
    ],
)
def test_what_the_kernel_does_not_take_is_refused(
    changed: dict[str, torch.Tensor], arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=r"\w") as caught:
        _call({**family("gemm.u4b8_g128"), **changed}, **arguments)
    assert message in str(caught.value)


@pytest.mark.parametrize(("size_k", "size_n", "message"), [(24, 64, "size_k = 24"), (16, 96, "size_n = 96")])
def test_repack_refuses_what_the_kernel_does_not_take(size_k: int, size_n: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        REFERENCE.repack(torch.zeros(size_k // 8, size_n, dtype=torch.int32), None, size_k, size_n, 4)
