"""The fused MoE around the kernel, with the CPU model in its place, against what the real kernels
computed.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernel_vectors import experts_of, family, relative_error, routing_of
from marlin_convert.kernels.fused_moe import (
    Experts,
    Routing,
    align,
    choose_block_size,
    contiguous_expert_map,
    fused_moe,
    make_workspace,
    route,
    silu_and_mul,
    sum_experts,
)
from marlin_convert.kernels.gemm_call import GemmCall, Matrix
from marlin_convert.kernels.quant_types import UINT4
from marlin_convert.kernels.reference import ReferenceProvider

REFERENCE = ReferenceProvider()
#: As in test_reference: everything but the order of float32 sums is modelled.
TIGHT = 2e-4


def test_every_stage_equals_what_the_kernels_computed() -> None:
    golden = family("moe_m5")
    workspace = make_workspace("cpu")
    alignment = align(golden["topk_ids"], 4, 8)
    for name in ("sorted_token_ids", "expert_ids", "num_tokens_post_padded"):
        assert getattr(alignment, name).equal(golden[name]), name
    first = Matrix(golden["w13_marlin"], golden["s13_marlin"])
    second = Matrix(golden["w2_marlin"], golden["s2_marlin"])
    assert (first.size_k, first.size_n, second.size_k, second.size_n) == (256, 256, 128, 256)
    c1 = REFERENCE.gemm(GemmCall(golden["x"], first, alignment, workspace, top_k=2))
    assert relative_error(c1, golden["c1"]) <= TIGHT
    c2 = silu_and_mul(golden["c1"])
    assert relative_error(c2, golden["c2"]) <= TIGHT
    c3 = REFERENCE.gemm(GemmCall(golden["c2"], second, alignment, workspace, 1, golden["topk_weights"]))
    assert relative_error(c3, golden["c3"]) <= TIGHT
    assert relative_error(sum_experts(golden["c3"], 2), golden["out"]) <= TIGHT


def test_the_whole_equals_what_the_kernels_computed() -> None:
    golden = family("moe_m5")
    out = fused_moe(REFERENCE, golden["x"], experts_of(golden), routing_of(golden))
    assert relative_error(out, golden["out"]) <= TIGHT
    assert 4e-3 < relative_error(out, golden["ref"]) < 6e-3
    twice = Routing(2 * golden["topk_weights"], golden["topk_ids"])
    assert (
        relative_error(fused_moe(REFERENCE, golden["x"], experts_of(golden), twice), 2 * golden["out"])
        <= TIGHT
    )


def test_a_matrix_hands_on_its_bias_and_zero_points() -> None:
    golden = family("gemm.u4zp_g64")
    bias = torch.full((2, 128), 0.5, dtype=torch.bfloat16)
    matrix = Matrix(golden["marlin_w"], golden["marlin_s"], UINT4, bias, golden["marlin_zp"])
    alignment = align(golden["topk_ids"], 2, 8)
    out = REFERENCE.gemm(GemmCall(golden["x"], matrix, alignment, make_workspace("cpu"), top_k=2))
    assert relative_error(out, golden["out"] + 0.5) <= TIGHT


def test_swapped_halves_and_swapped_experts_are_noticed() -> None:
    golden = family("moe_m5")
    whole = experts_of(golden)
    for change in (lambda t: t.roll(t.shape[-1] // 2, -1), lambda t: t.roll(1, 0)):
        changed = Experts(whole.w13.map(change), whole.w2)
        out = fused_moe(REFERENCE, golden["x"], changed, routing_of(golden))
        assert relative_error(out, golden["out"]) > 0.5


@pytest.mark.parametrize("keep_foreign", [False, True])
def test_the_ranks_of_expert_parallelism_sum_to_the_whole(keep_foreign: bool) -> None:
    golden = family("moe_m5")
    total = torch.zeros(5, 256)
    for start, stop in ((0, 1), (1, 4)):
        expert_map = contiguous_expert_map(4, start, stop)
        alignment = align(golden["topk_ids"], stop - start, 8, expert_map, keep_foreign)
        assert alignment.is_ep is keep_foreign
        experts = experts_of(golden, slice(start, stop), expert_map)
        share = fused_moe(REFERENCE, golden["x"], experts, replace(routing_of(golden), alignment=alignment))
        assert share.isfinite().all()
        total += share.float()
    # Two roundings of a share instead of one of the sum.
    assert relative_error(total, golden["out"]) < 4e-3


def test_expert_map_numbers_the_own_experts_from_zero() -> None:
    assert contiguous_expert_map(6, 2, 5).tolist() == [-1, -1, 0, 1, 2, -1]
    with pytest.raises(ValueError, match="experts 4:7 are not a range of 6"):
        contiguous_expert_map(6, 4, 7)


@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "size"),
    [
        (1, 384, 8),
        (330, 384, 8),
        (345, 384, 8),
        (346, 384, 16),
        (1382, 384, 32),
        (1383, 384, 48),
        (100_000, 384, 64),
        (64, 8, 64),
    ],
)
def test_block_size_is_the_first_that_is_not_full(num_tokens: int, num_experts: int, size: int) -> None:
    assert choose_block_size(num_tokens, 8, num_experts) == size


@settings(max_examples=60)
@given(data=st.data(), block_size=st.sampled_from([8, 16, 64]), keep_foreign=st.booleans())
def test_alignment_lists_each_own_choice_once_under_its_expert(
    data: st.DataObject, block_size: int, keep_foreign: bool
) -> None:
    experts = data.draw(st.integers(1, 12), "experts")
    start = data.draw(st.integers(0, experts - 1), "start")
    stop = data.draw(st.integers(start + 1, experts), "stop")
    top_k = data.draw(st.integers(1, experts), "top_k")
    rows = data.draw(st.lists(st.permutations(range(experts)), min_size=1, max_size=20), "rows")
    topk_ids = torch.tensor([row[:top_k] for row in rows], dtype=torch.int32)
    found = align(
        topk_ids, stop - start, block_size, contiguous_expert_map(experts, start, stop), keep_foreign
    )
    flat = topk_ids.reshape(-1).tolist()
    own = [e - start if start <= e < stop else -1 for e in flat]
    listed = int(found.num_tokens_post_padded) // block_size
    seen: list[tuple[int, int]] = []
    for number in range(listed):
        block = found.sorted_token_ids[number * block_size : (number + 1) * block_size].tolist()
        tokens = [token for token in block if token < len(flat)]
        assert tokens, "no block is empty"
        assert block == tokens + [len(flat)] * (block_size - len(tokens))
        seen += [(int(found.expert_ids[number]), token) for token in tokens]
    order = [*range(stop - start), *([-1] if keep_foreign else [])]
    assert seen == [(e, token) for e in order for token, owner in enumerate(own) if owner == e]
    count, local = len(flat), stop - start
    capacity = count * block_size if count < local + 1 else count + (local + 1) * (block_size - 1)
    assert found.sorted_token_ids.numel() == capacity
    assert found.expert_ids.numel() == -(-capacity // block_size)


def test_routing_chooses_with_the_bias_and_weighs_without_it() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0], [0.0, 0.0, 3.0, 1.0]])
    bias = torch.tensor([-1.0, 0.0, 0.0, 0.5])
    routing = route(logits, bias, top_k=2, routed_scaling_factor=2.0)
    assert routing.ids.dtype == torch.int32
    assert routing.ids.tolist() == [[3, 1], [3, 2]]
    scores = torch.sigmoid(logits)
    chosen = torch.stack([scores[0, [3, 1]], scores[1, [3, 2]]])
    assert torch.allclose(routing.weights, 2.0 * chosen / chosen.sum(dim=1, keepdim=True), rtol=1e-6)
    assert route(logits, bias, top_k=2, normalize=False).weights.equal(chosen)


def test_silu_rounds_once_and_gate_comes_first() -> None:
    c1 = torch.tensor([[1.0, -2.0, 3.0, 0.5]], dtype=torch.bfloat16)
    gate, up = c1[:, :2].double(), c1[:, 2:].double()
    expected = (gate / (1 + torch.exp(-gate)) * up).to(torch.bfloat16)
    assert silu_and_mul(c1).equal(expected)
    assert not silu_and_mul(c1).equal(silu_and_mul(c1.roll(2, 1)))
