"""The fused MoE around the kernel: alignment, w13, silu, w2, the sum over a token's experts; all in plain
torch.

The steps are public, so that a bench can time one alone. None of them waits for the GPU: every shape follows
from the shapes of the inputs, so the whole, alignment included, can be captured in a CUDA graph. The order of
additions is fixed. M tokens, E local experts, H hidden size, I = the rank's (padded) slice of the experts'
intermediate size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from marlin_convert.kernels.gemm_call import (
    BLOCK_SIZES,
    REPEATABLE,
    Alignment,
    GemmCall,
    Matrix,
    ReduceFlags,
)
from marlin_convert.kernels.providers import Provider

#: A block may be this full on average before the next size is taken: the rule of SGLang's fused_marlin_moe.
BLOCK_FILL = 0.9
#: The kernel runs at most this many thread blocks per multiprocessor, and needs one lock for each.
BLOCKS_PER_MULTIPROCESSOR = 4


@dataclass(frozen=True)
class Experts:
    """The routed experts of a rank: w13 (gate, then up) [E, H -> 2I] and w2 [E, I -> H].

    expert_map: int32 [all experts], local number or -1, where the rank has some of them only; see
    `contiguous_expert_map`.
    """

    w13: Matrix
    w2: Matrix
    expert_map: Tensor | None = None


@dataclass(frozen=True)
class Routing:
    """Each token's experts: ids [M, top_k] of any integer type and their weights, float32 [M, top_k].

    Ids are local, or any with an expert map. alignment: that of these ids, if it is already there.
    """

    weights: Tensor
    ids: Tensor
    alignment: Alignment | None = None


def choose_block_size(num_tokens: int, top_k: int, num_experts: int) -> int:
    """moe_block_size: the first that an average expert's tokens fill to less than `BLOCK_FILL`, else the
    largest.
    """
    share = num_tokens * top_k / num_experts
    return next((size for size in BLOCK_SIZES if share / size < BLOCK_FILL), BLOCK_SIZES[-1])


def contiguous_expert_map(
    num_experts: int, start: int, stop: int, device: torch.device | str = "cpu"
) -> Tensor:
    """int32 [num_experts] for the owner of experts start to stop - 1: each one's local number, -1 for
    others.
    """
    if not 0 <= start <= stop <= num_experts:
        raise ValueError(f"experts {start}:{stop} are not a range of {num_experts}")
    experts = torch.arange(num_experts, dtype=torch.int32, device=device)
    return torch.where((experts >= start) & (experts < stop), experts - start, -1).to(torch.int32)


def align(
    topk_ids: Tensor,
    num_experts: int,
    block_size: int,
    expert_map: Tensor | None = None,
    keep_foreign: bool = False,
) -> Alignment:
    """Sort the choices `topk_ids` [M, top_k] by expert, each expert padded to whole blocks; stable, without
    host syncs.

    topk_ids: any integer type. num_experts: E, local ones. expert_map: int32 [all experts], local number or
    -1; choices that map to -1 belong to other ranks. They are left out; with `keep_foreign` they follow in
    blocks of expert -1, as an engine's own alignment leaves them (needs is_ep in the call).
    """
    flat = topk_ids.reshape(-1).long()
    device, count = flat.device, flat.numel()
    local = flat if expert_map is None else expert_map.long()[flat]
    bucket = torch.where(local < 0, num_experts, local)
    sizes = torch.zeros(num_experts + 1, dtype=torch.long, device=device).scatter_add_(
        0, bucket, torch.ones_like(bucket)
    )
    blocks = (sizes + block_size - 1) // block_size
    blocks_end = blocks.cumsum(0)
    in_order, order = torch.sort(bucket, stable=True)
    rank_in_bucket = torch.arange(count, device=device) - (sizes.cumsum(0) - sizes)[in_order]
    place = (blocks_end - blocks)[in_order] * block_size + rank_in_bucket
    # Enough for any routing: each expert that is named at all wastes at most block_size - 1 places.
    capacity = count * block_size if count < num_experts + 1 else count + (num_experts + 1) * (block_size - 1)
    sorted_ids = torch.full((capacity,), count, dtype=torch.int32, device=device)
    sorted_ids.scatter_(0, place, order.to(torch.int32))
    numbers = torch.arange(-(-capacity // block_size), device=device)
    owner = torch.searchsorted(blocks_end, numbers, right=True)
    expert_ids = torch.where(owner < num_experts, owner, -1 if keep_foreign else 0).to(torch.int32)
    listed = blocks_end[-1:] if keep_foreign else blocks_end[-2:-1]
    return Alignment(sorted_ids, expert_ids, (listed * block_size).to(torch.int32), block_size, keep_foreign)


def make_workspace(device: torch.device | str) -> Tensor:
    """The kernel's locks: int32 zeros, enough for any call on this device, zero again after it. One for each
    stream.
    """
    device = torch.device(device)
    count = 1
    if device.type == "cuda":
        count = torch.cuda.get_device_properties(device).multi_processor_count
    return torch.zeros(BLOCKS_PER_MULTIPROCESSOR * count, dtype=torch.int32, device=device)


def silu_and_mul(c1: Tensor) -> Tensor:
    """[R, 2I] to [R, I]: silu of the first I columns (gate) times the last I (up), in float32, rounded
    once.
    """
    gate, up = c1.chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate.float()) * up.float()).to(c1.dtype)


def sum_experts(c3: Tensor, top_k: int) -> Tensor:
    """[M * top_k, H] to [M, H]: the sum over each token's experts, in float32, rounded once."""
    return c3.reshape(-1, top_k, c3.shape[-1]).float().sum(dim=1).to(c3.dtype)


def route(
    logits: Tensor,
    correction_bias: Tensor,
    top_k: int = 8,
    routed_scaling_factor: float = 1.0,
    normalize: bool = True,
) -> Routing:
    """K2's routing of `logits` [M, experts]: each token's `top_k` experts (int32), the best first.

    Scores are sigmoids. `correction_bias` [experts] (e_score_correction_bias) takes part in the choice only;
    the weights are the plain scores of the chosen, divided by their sum, times `routed_scaling_factor` (2.827
    in K2.6; leave 1 if it is applied to the sum of experts).
    """
    scores = torch.sigmoid(logits.float())
    chosen = torch.topk(scores + correction_bias.float(), top_k, dim=-1).indices
    weights = scores.gather(-1, chosen)
    if normalize:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return Routing(weights * routed_scaling_factor, chosen.to(torch.int32))


def fused_moe(
    provider: Provider,
    x: Tensor,
    experts: Experts,
    routing: Routing,
    *,
    workspace: Tensor | None = None,
    flags: ReduceFlags = REPEATABLE,
) -> Tensor:
    """The routed experts' output [M, H] for `x` [M, H]; on a rank with a part of them or of I, its share of
    the sum.

    x and the experts' scales are of one dtype, bfloat16 or float16.
    """
    top_k, alignment = routing.ids.shape[1], routing.alignment
    if alignment is None:
        block_size = choose_block_size(x.shape[0], top_k, experts.w13.num_experts)
        alignment = align(routing.ids, experts.w13.num_experts, block_size, experts.expert_map)
    workspace = make_workspace(x.device) if workspace is None else workspace
    c1 = provider.gemm(GemmCall(x, experts.w13, alignment, workspace, top_k, flags=flags))
    c2 = silu_and_mul(c1)
    # Choices that belong to other ranks are in no block: their rows must be zero for the sum.
    c3 = None if experts.expert_map is None else x.new_zeros((c2.shape[0], experts.w2.size_n))
    c3 = provider.gemm(
        GemmCall(c2, experts.w2, alignment, workspace, 1, topk_weights=routing.weights, c=c3, flags=flags)
    )
    return sum_experts(c3, top_k)
