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

from marlin_convert.kernels.providers import Provider
from marlin_convert.kernels.quant_types import UINT4B8, QuantType

BLOCK_SIZES = (8, 16, 32, 48, 64)
#: A block may be this full on average before the next size is taken: the rule of SGLang's fused_marlin_moe.
BLOCK_FILL = 0.9
#: The kernel runs at most this many thread blocks per multiprocessor, and needs one lock for each.
BLOCKS_PER_MULTIPROCESSOR = 4


@dataclass(frozen=True)
class ReduceFlags:
    """How thread blocks that share an output add up. The default is repeatable; engines may add
    atomically.
    """

    use_atomic_add: bool = False
    use_fp32_reduce: bool = True


REPEATABLE = ReduceFlags()


@dataclass(frozen=True)
class Alignment:
    """Tokens sorted by expert in blocks of `block_size`, as the kernel wants them; all int32.

    sorted_token_ids [capacity]: entry t * top_k + j is the j-th choice of token t; the padding value is M *
    top_k. expert_ids [capacity / block_size rounded up]: each block's expert, -1 for others' ones.
    num_tokens_post_padded [1]: how much of the above counts.
    """

    sorted_token_ids: Tensor
    expert_ids: Tensor
    num_tokens_post_padded: Tensor
    block_size: int
    is_ep: bool


@dataclass(frozen=True)
class Matrix:
    """One projection of all local experts in Marlin form.

    words int32 [E, K/16, N*bits/2], scales [E, G, N] and bias [E, N] of the activations' dtype, zeros int32
    [E, G, N*bits/32].
    """

    words: Tensor
    scales: Tensor
    kind: QuantType = UINT4B8
    bias: Tensor | None = None
    zeros: Tensor | None = None

    @property
    def size_k(self) -> int:
        """Inputs."""
        return 16 * self.words.shape[1]

    @property
    def size_n(self) -> int:
        """Outputs."""
        return self.words.shape[2] * 2 // self.kind.num_bits


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


def grouped_gemm(
    provider: Provider,
    x: Tensor,
    matrix: Matrix,
    alignment: Alignment,
    topk_weights: Tensor,
    *,
    workspace: Tensor,
    top_k: int,
    mul_topk_weights: bool,
    out: Tensor | None = None,
    flags: ReduceFlags = REPEATABLE,
) -> Tensor:
    """One call of the kernel: row r of the result [R * top_k, N] is row r // top_k of `x` [R, K] times its
    expert.

    topk_weights: float32 [M, top_k], read only with `mul_topk_weights`. `out` is filled if given; rows of no
    listed block stay as they are.
    """
    return provider.gemm(
        x,
        out,
        matrix.words,
        matrix.bias,
        matrix.scales,
        None,
        matrix.zeros,
        None,
        None,
        workspace,
        alignment.sorted_token_ids,
        alignment.expert_ids,
        alignment.num_tokens_post_padded,
        topk_weights,
        moe_block_size=alignment.block_size,
        top_k=top_k,
        mul_topk_weights=mul_topk_weights,
        is_ep=alignment.is_ep,
        b_q_type_id=matrix.kind.id,
        size_m=x.shape[0],
        size_n=matrix.size_n,
        size_k=matrix.size_k,
        is_k_full=True,
        use_atomic_add=flags.use_atomic_add,
        use_fp32_reduce=flags.use_fp32_reduce,
        is_zp_float=False,
    )


def silu_and_mul(c1: Tensor) -> Tensor:
    """[R, 2I] to [R, I]: silu of the first I columns (gate) times the last I (up), in float32, rounded
    once.
    """
    gate, up = c1.chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate.float()) * up.float()).to(c1.dtype)


def sum_experts(c3: Tensor, top_k: int, routed_scaling_factor: float = 1.0) -> Tensor:
    """[M * top_k, H] to [M, H]: the sum over each token's experts, in float32, scaled and rounded once."""
    total = c3.reshape(-1, top_k, c3.shape[-1]).float().sum(dim=1)
    return (total * routed_scaling_factor).to(c3.dtype)


def route(
    logits: Tensor,
    correction_bias: Tensor,
    top_k: int = 8,
    routed_scaling_factor: float = 1.0,
    normalize: bool = True,
) -> tuple[Tensor, Tensor]:
    """K2's routing of `logits` [M, experts]: weights float32 [M, top_k] and experts int32 [M, top_k], the
    best first.

    Scores are sigmoids. `correction_bias` [experts] (e_score_correction_bias) takes part in the choice only;
    the weights are the plain scores of the chosen, divided by their sum, times `routed_scaling_factor` (2.827
    in K2.6; leave 1 if it is applied to the sum of experts).
    """
    scores = torch.sigmoid(logits.float())
    chosen = torch.topk(scores + correction_bias.float(), top_k, dim=-1).indices
    weights = scores.gather(-1, chosen)
    if normalize:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return weights * routed_scaling_factor, chosen.to(torch.int32)


def fused_moe(
    provider: Provider,
    x: Tensor,
    w13: Tensor,
    w13_scale: Tensor,
    w2: Tensor,
    w2_scale: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    *,
    kind: QuantType = UINT4B8,
    expert_map: Tensor | None = None,
    alignment: Alignment | None = None,
    workspace: Tensor | None = None,
    routed_scaling_factor: float = 1.0,
    flags: ReduceFlags = REPEATABLE,
) -> Tensor:
    """The routed experts' output [M, H] for `x` [M, H]; on a rank with a part of them or of I, its share of
    the sum.

    w13 int32 [E, H/16, 4I] and w13_scale [E, H/g, 2I] (gate, then up), w2 int32 [E, I/16, 2H], w2_scale [E,
    I/g, H], for 4 bit; scales and x of one dtype, bfloat16 or float16. topk_weights float32 and topk_ids [M,
    top_k]; ids are local, or any with `expert_map`, see `contiguous_expert_map`. alignment: that of these
    ids, if it is already there.
    """
    num_experts, top_k = w13.shape[0], topk_ids.shape[1]
    if alignment is None:
        block_size = choose_block_size(x.shape[0], top_k, num_experts)
        alignment = align(topk_ids, num_experts, block_size, expert_map)
    workspace = make_workspace(x.device) if workspace is None else workspace
    first, second = Matrix(w13, w13_scale, kind), Matrix(w2, w2_scale, kind)
    c1 = grouped_gemm(
        provider,
        x,
        first,
        alignment,
        topk_weights,
        workspace=workspace,
        top_k=top_k,
        mul_topk_weights=False,
        flags=flags,
    )
    c2 = silu_and_mul(c1)
    # Choices that belong to other ranks are in no block: their rows must be zero for the sum.
    c3 = None if expert_map is None else x.new_zeros((c2.shape[0], second.size_n))
    c3 = grouped_gemm(
        provider,
        c2,
        second,
        alignment,
        topk_weights,
        workspace=workspace,
        top_k=1,
        mul_topk_weights=True,
        out=c3,
        flags=flags,
    )
    return sum_experts(c3, top_k, routed_scaling_factor)
