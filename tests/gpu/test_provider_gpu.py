"""The real kernel on a GPU: the golden vectors, the CPU model, and the promises that checks and benches rely
on.

Run with `pytest -m gpu tests/gpu`; README.md here says how to bring the kernel to a machine without a
network.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kernel_vectors import (
    GEMM_KINDS,
    REPACK_FAMILIES,
    Family,
    experts_of,
    family,
    published_weights,
    relative_error,
    repack_golden,
    routing_of,
    run_gemm,
)
from marlin_convert.kernels.fused_moe import (
    Routing,
    align,
    contiguous_expert_map,
    fused_moe,
    make_workspace,
)
from marlin_convert.kernels.gemm_call import BLOCK_SIZES, REPEATABLE, GemmCall, Matrix, ReduceFlags
from marlin_convert.kernels.one_hot import read_back
from marlin_convert.kernels.providers import Provider, load, probe
from marlin_convert.kernels.quant_types import UINT4B8, UINT8B128, QuantType
from marlin_convert.kernels.reference import ReferenceProvider

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason=f"torch {torch.__version__} sees no CUDA GPU"),
]

REFERENCE = ReferenceProvider()
GOLDEN_TOLERANCE = 1e-2
#: Against the model only the order of float32 sums is left: some results round the other way, by one last bit
#: (2^-8).
MODEL_TOLERANCE = 1e-3
FLAGS = [ReduceFlags(atomic, fp32) for atomic in (False, True) for fp32 in (False, True)]


@pytest.fixture(scope="module")
def provider() -> Provider:
    reports = probe()
    if not any(report.available for report in reports):
        pytest.skip("; ".join(f"{report.name}: {report.reason}" for report in reports))
    return load()


def _random_experts(num_experts: int, size_k: int, size_n: int, kind: QuantType, group_size: int) -> Matrix:
    """Random words are random codes in any layout; scales around 1/64."""
    generator = torch.Generator().manual_seed(size_k * 7 + size_n)
    words = torch.randint(
        -(2**31), 2**31, (num_experts, size_k // 16, size_n * kind.num_bits // 2), generator=generator
    ).to(torch.int32)
    groups = 1 if group_size == -1 else size_k // group_size
    scales = (torch.rand(num_experts, groups, size_n, generator=generator) + 0.5) / 64
    return Matrix(words, scales.to(torch.bfloat16), kind)


def _on_gpu(matrix: Matrix) -> Matrix:
    return matrix.map(lambda tensor: tensor.cuda())


def _call(
    provider: Provider,
    x: Tensor,
    matrix: Matrix,
    routing: Routing,
    *,
    block: int = 8,
    flags: ReduceFlags = REPEATABLE,
) -> Tensor:
    alignment, top_k = align(routing.ids, matrix.num_experts, block), routing.ids.shape[1]
    workspace = make_workspace(x.device)
    return provider.gemm(
        GemmCall(x, matrix, alignment, workspace, top_k, topk_weights=routing.weights, flags=flags)
    )


def _fused(provider: Provider, golden: Family, workspace: Tensor | None = None) -> Tensor:
    return fused_moe(provider, golden["x"], experts_of(golden), routing_of(golden), workspace=workspace)


@pytest.mark.parametrize("name", GEMM_KINDS)
def test_golden_gemm(provider: Provider, name: str) -> None:
    tensors = family(name, "cuda")
    c = torch.full_like(tensors["out"], float("nan"))
    out = run_gemm(provider, tensors, GEMM_KINDS[name], c)
    assert out.data_ptr() == c.data_ptr()
    assert relative_error(out, tensors["out"]) <= GOLDEN_TOLERANCE
    assert run_gemm(provider, tensors, GEMM_KINDS[name]).equal(out), "repeatable, with its own output too"


@pytest.mark.parametrize("name", REPACK_FAMILIES)
def test_golden_repack(provider: Provider, name: str) -> None:
    tensors = family(name, "cuda")
    assert repack_golden(provider, tensors, int(name.split(".w")[1][0])).equal(tensors["marlin"])


def test_golden_fused_moe(provider: Provider) -> None:
    golden = family("moe_m5", "cuda")
    alignment = align(golden["topk_ids"], 4, 8)
    for name in ("sorted_token_ids", "expert_ids", "num_tokens_post_padded"):
        assert getattr(alignment, name).equal(golden[name]), name
    workspace = make_workspace("cuda")
    out = _fused(provider, golden, workspace=workspace)
    assert relative_error(out, golden["out"]) <= GOLDEN_TOLERANCE
    assert not workspace.any(), "the kernel leaves its locks at zero"


@pytest.mark.parametrize("flags", FLAGS, ids=str)
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_identity_reads_back_the_published_weights(
    provider: Provider, flags: ReduceFlags, block_size: int
) -> None:
    golden = family("moe_m5")
    for name in ("w13", "w2"):
        scale = "s" + name.removeprefix("w")
        pairs = zip(golden[f"{name}_ct"], golden[f"{scale}_ct"], strict=True)
        published = torch.stack([published_weights(ct, scales) for ct, scales in pairs])
        matrix = _on_gpu(Matrix(golden[f"{name}_marlin"], golden[f"{scale}_marlin"]))
        read = [weights for _, weights in read_back(provider, matrix, block_size=block_size, flags=flags)]
        assert torch.cat(read).cpu().equal(published)


@pytest.mark.parametrize(
    ("kind", "group_size"),
    [(UINT4B8, 32), (UINT4B8, 64), (UINT4B8, 128), (UINT4B8, -1), (UINT8B128, 32), (UINT8B128, -1)],
)
@pytest.mark.parametrize(("size_k", "size_n"), [(1024, 512), (256, 1024), (64, 128)])
def test_the_model_equals_the_kernel(
    provider: Provider, kind: QuantType, group_size: int, size_k: int, size_n: int
) -> None:
    group_size = group_size if group_size < size_k else -1
    matrix = _random_experts(6, size_k, size_n, kind, group_size)
    generator = torch.Generator().manual_seed(1)
    for num_tokens, block in ((1, 8), (9, 16), (70, 64)):
        x = torch.randn(num_tokens, size_k, generator=generator).to(torch.bfloat16)
        ids = torch.rand(num_tokens, 6, generator=generator).argsort(dim=1)[:, :3]
        weights = torch.rand(num_tokens, 3, generator=generator)
        expected = _call(REFERENCE, x, matrix, Routing(weights, ids), block=block)
        on_gpu = (x.cuda(), _on_gpu(matrix), Routing(weights.cuda(), ids.cuda()))
        for flags in FLAGS:
            out = _call(provider, *on_gpu, block=block, flags=flags).cpu()
            assert relative_error(out, expected) <= (
                MODEL_TOLERANCE if flags == REPEATABLE else GOLDEN_TOLERANCE
            )


def test_bias_is_read_as_the_model_says(provider: Provider) -> None:
    generator = torch.Generator().manual_seed(2)
    bias = torch.randn(4, 256, generator=generator).to(torch.bfloat16)
    matrix = replace(_random_experts(4, 256, 256, UINT4B8, 32), bias=bias)
    x = torch.randn(9, 256, generator=generator).to(torch.bfloat16)
    ids = torch.rand(9, 4, generator=generator).argsort(dim=1)[:, :2]
    weights = torch.rand(9, 2, generator=generator)
    expected = _call(REFERENCE, x, matrix, Routing(weights, ids))
    out = _call(provider, x.cuda(), _on_gpu(matrix), Routing(weights.cuda(), ids.cuda()))
    assert relative_error(out.cpu(), expected) <= MODEL_TOLERANCE


@pytest.mark.parametrize("keep_foreign", [False, True])
def test_ranks_of_expert_parallelism_sum_to_the_whole(provider: Provider, keep_foreign: bool) -> None:
    golden = family("moe_m5", "cuda")
    total = torch.zeros(5, 256, device="cuda")
    for start, stop in ((0, 1), (1, 4)):
        expert_map = contiguous_expert_map(4, start, stop, "cuda")
        alignment = align(golden["topk_ids"], stop - start, 8, expert_map, keep_foreign)
        experts = experts_of(golden, slice(start, stop), expert_map)
        routing = replace(routing_of(golden), alignment=alignment)
        total += fused_moe(provider, golden["x"], experts, routing).float()
    assert relative_error(total, golden["out"]) <= GOLDEN_TOLERANCE


def test_the_whole_can_be_captured_in_a_graph(provider: Provider) -> None:
    golden = family("moe_m5", "cuda")
    workspace = make_workspace("cuda")
    eager = _fused(provider, golden, workspace=workspace)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        _fused(provider, golden, workspace=workspace)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = _fused(provider, golden, workspace=workspace)
    graph.replay()
    assert captured.equal(eager)
    # Alignment is part of the graph: other experts for the same buffers must be followed.
    golden["topk_ids"].copy_((golden["topk_ids"] + 1) % 4)
    graph.replay()
    assert captured.equal(_fused(provider, golden, workspace=workspace))
    assert not captured.equal(eager)


def test_the_kernel_refuses_what_the_model_refuses(provider: Provider) -> None:
    matrix = _on_gpu(_random_experts(2, 128, 64, UINT4B8, 32))
    x = torch.zeros(4, 128, dtype=torch.bfloat16, device="cuda")
    ids = torch.zeros(4, 1, dtype=torch.int32, device="cuda")
    with pytest.raises(Exception, match="Invalid thread config"):
        _call(provider, x, matrix, Routing(torch.ones(4, 1, device="cuda"), ids))
