"""The kernel on a CPU: the same call, computed from the Marlin tensors as the kernel's threads read them.

Decoding follows `fragments`, not the layout this project writes, so agreement between the two is evidence.
Roundings are those of the kernel: a weight times its group's scale is rounded to the activations' dtype
before it is multiplied; the sum (float64 here) is rounded to that dtype, then scaled (channel-wise 4-bit),
biased and weighted in it, each time rounded. What differs from a GPU is only the float32 order of summation.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from marlin_convert.kernels import fragments
from marlin_convert.kernels.quant_types import QuantType, quant_type

BLOCK_SIZES = (8, 16, 32, 48, 64)
GROUP_SIZES = (32, 64, 128)
MIN_N = 128
MIN_K = 64


@dataclass(frozen=True)
class _Experts:
    """The checked weight side of one call; tensors with a leading E, as in `Provider.gemm`."""

    kind: QuantType
    words: Tensor
    scales: Tensor
    zeros: Tensor | None
    g_idx: Tensor | None
    perm: Tensor | None
    bias: Tensor | None
    size_k: int
    size_n: int
    is_k_full: bool

    @property
    def channelwise(self) -> bool:
        """One scale a column: the kernel then multiplies results, not weights."""
        return self.scales.shape[1] == 1 and self.g_idx is None


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _given(tensor: Tensor | None) -> Tensor | None:
    """None for a tensor without elements: the kernel's other way to say that there is none."""
    return None if tensor is None or tensor.numel() == 0 else tensor


def _gather(values: Tensor, table: fragments.Table) -> Tensor:
    """Last axis of `values` taken in the order of a flat table."""
    return values.index_select(-1, torch.from_numpy(table.reshape(-1)))


def _codes(words: Tensor, num_bits: int) -> Tensor:
    """int32 [..., W] to its codes uint8 [..., W * 32 / bits], from the lowest bits of each word up."""
    shifts = torch.arange(0, 32, num_bits, dtype=torch.int32)
    codes = (words.unsqueeze(-1) >> shifts) & ((1 << num_bits) - 1)
    return codes.to(torch.uint8).flatten(-2)


def decode_weight(words: Tensor, num_bits: int, size_k: int, size_n: int) -> Tensor:
    """Marlin words int32 [K/16, N*bits/2] of one matrix to its codes uint8 [K, N], as the GEMM's threads take
    them.
    """
    k_tiles, n_tiles = size_k // fragments.TILE_K, size_n // fragments.TILE_N
    stream = _codes(words.reshape(k_tiles, n_tiles, -1), num_bits)
    tiles = _gather(stream, fragments.tile_reads(num_bits))
    tiles = tiles.reshape(k_tiles, n_tiles, fragments.TILE_K, fragments.TILE_N)
    return tiles.permute(0, 2, 1, 3).reshape(size_k, size_n)


def decode_scales(scales: Tensor, channelwise: bool) -> Tensor:
    """Marlin scales [G, N] to [G, N] in column order; a bias [1, N] is read like channel-wise scales."""
    table = fragments.channel_reads() if channelwise else fragments.grouped_scale_reads()
    return _gather(scales.reshape(scales.shape[0], -1, table.size), table).reshape(scales.shape)


def decode_zero_points(zeros: Tensor) -> Tensor:
    """Marlin zero points int32 [G, N/8] to uint8 [G, N] in column order."""
    codes = _codes(zeros, 4).reshape(zeros.shape[0], -1, fragments.TILE_N)
    return _gather(codes, fragments.zero_point_reads()).reshape(zeros.shape[0], -1)


def _operand(experts: _Experts, expert: int) -> Tensor:
    """What the tensor cores multiply with: [K, N] in the scales' dtype; scaled unless the scales are
    channel-wise.
    """
    dtype = experts.scales.dtype
    size_k, groups = experts.size_k, experts.scales.shape[1]
    codes = decode_weight(experts.words[expert], experts.kind.num_bits, size_k, experts.size_n).to(dtype)
    # A full K is sorted by group: rows of a group are neighbours, and g_idx is not looked at.
    g_idx = None if experts.is_k_full else experts.g_idx
    group_of = torch.arange(size_k) // (size_k // groups) if g_idx is None else g_idx[expert].long()
    zero = (
        experts.kind.bias
        if experts.zeros is None
        else decode_zero_points(experts.zeros[expert]).to(dtype)[group_of]
    )
    codes = codes - zero
    return codes if experts.channelwise else codes * decode_scales(experts.scales[expert], False)[group_of]


def _finish(total: Tensor, experts: _Experts, expert: int, row_weights: Tensor | None) -> Tensor:
    """Sums float64 [R, N] to results: channel-wise scale, bias, the rows' top-k weights, rounded after
    each.
    """
    dtype = experts.scales.dtype
    if experts.channelwise and experts.kind.num_bits == 8:
        total = total * decode_scales(experts.scales[expert], True).double()
    out = total.to(dtype)
    if experts.channelwise and experts.kind.num_bits == 4:
        out = out * decode_scales(experts.scales[expert], True)
    if experts.bias is not None:
        out = out + decode_scales(experts.bias[expert].unsqueeze(0), True)
    return out if row_weights is None else out * row_weights.to(dtype).unsqueeze(1)


def _check_topk_weights(weights: Tensor, rows: int) -> None:
    _require(weights.dtype == torch.float32, f"topk_weights is {weights.dtype}, not torch.float32")
    _require(weights.numel() == rows, f"{weights.numel()} topk_weights for {rows} rows")


def _check_weights(a: Tensor, experts: _Experts) -> None:
    """The shapes and types the kernel takes; ValueError otherwise."""
    size_k, size_n, kind = experts.size_k, experts.size_n, experts.kind
    num_experts, groups = experts.words.shape[0], experts.scales.shape[1]
    _require(a.dtype in (torch.bfloat16, torch.float16), f"a is {a.dtype}, not bfloat16 or float16")
    _require(experts.scales.dtype == a.dtype, f"b_scales is {experts.scales.dtype}, a is {a.dtype}")
    _require(
        size_n % MIN_N == 0 and size_k % MIN_K == 0,
        f"Invalid thread config: size_n = {size_n} must be a multiple of {MIN_N} and size_k = {size_k} one of"
        f" {MIN_K}",
    )
    expected: list[tuple[str, Tensor | None, tuple[int, ...], torch.dtype]] = [
        ("b_q_weight", experts.words, (num_experts, size_k // 16, size_n * kind.num_bits // 2), torch.int32),
        ("b_scales", experts.scales, (num_experts, groups, size_n), a.dtype),
        ("b_zeros", experts.zeros, (num_experts, groups, size_n // kind.pack_factor), torch.int32),
        ("g_idx", experts.g_idx, (num_experts, size_k), torch.int32),
        ("perm", experts.perm, (num_experts, size_k), torch.int32),
        ("b_bias", experts.bias, (num_experts, size_n), a.dtype),
    ]
    for name, tensor, shape, dtype in expected:
        if tensor is not None:
            _require(
                tuple(tensor.shape) == shape, f"{name} has shape {tuple(tensor.shape)}, expected {shape}"
            )
            _require(tensor.dtype == dtype, f"{name} is {tensor.dtype}, expected {dtype}")
            _require(tensor.is_contiguous(), f"{name} is not contiguous")
    _require((experts.g_idx is None) == (experts.perm is None), "act-order needs both g_idx and perm")
    matches = kind.has_zero_points == (experts.zeros is not None)
    _require(matches, f"zero points must be given for uint4 and only for it; the type is {kind.name}")
    if experts.g_idx is None or experts.is_k_full:
        _require(size_k % groups == 0, f"size_k = {size_k} is not a multiple of the {groups} groups")
        group_size = size_k // groups
        _require(
            groups == 1 or group_size in GROUP_SIZES, f"group size {group_size} is none of {GROUP_SIZES}"
        )
        _require(groups > 1 or experts.g_idx is None, "act-order needs more than one group")


def _output(a: Tensor, c_or_none: Tensor | None, shape: tuple[int, int]) -> Tensor:
    """The tensor to fill: c, or one of NaN, so that nobody relies on rows the kernel leaves undefined."""
    if c_or_none is None:
        return a.new_full(shape, float("nan"))
    _require(tuple(c_or_none.shape) == shape, f"c has shape {tuple(c_or_none.shape)}, expected {shape}")
    _require(c_or_none.dtype == a.dtype and c_or_none.is_contiguous(), f"c is not contiguous {a.dtype}")
    return c_or_none


def _blocks(
    sorted_token_ids: Tensor,
    expert_ids: Tensor,
    num_tokens_post_padded: Tensor,
    *,
    block_size: int,
    rows: int,
    is_ep: bool,
    num_experts: int,
) -> list[tuple[int, Tensor]]:
    """(expert, rows of the result) for each expert that some block names, in order of experts."""
    for name, tensor in (
        ("sorted_token_ids", sorted_token_ids),
        ("expert_ids", expert_ids),
        ("num_tokens_post_padded", num_tokens_post_padded),
    ):
        _require(tensor.dtype == torch.int32, f"{name} is {tensor.dtype}, expected torch.int32")
    _require(block_size in BLOCK_SIZES, f"unsupported moe_block_size={block_size}")
    count = int(num_tokens_post_padded[0]) // block_size
    enough = count * block_size <= sorted_token_ids.numel() and count <= expert_ids.numel()
    _require(enough, f"{count} blocks are more than sorted_token_ids or expert_ids holds")
    ids = sorted_token_ids[: count * block_size].long().reshape(count, block_size)
    experts = expert_ids[:count].long()
    valid = ids < rows
    # The kernel counts a block's valid rows and then takes that many from the front.
    _require(
        bool((valid[:, 1:] <= valid[:, :-1]).all()), "a block of sorted_token_ids has padding before a token"
    )
    _require(
        bool((experts < num_experts).all()), f"expert_ids names an expert beyond the {num_experts} given"
    )
    _require(is_ep or bool((experts >= 0).all()), "expert_ids has -1 but is_ep is False")
    return [(e, ids[experts == e][valid[experts == e]]) for e in torch.unique(experts).tolist() if e >= 0]


class ReferenceProvider:
    """The kernel's two operations on a CPU, uint4 in groups of 32 included, which some versions of it get
    wrong.
    """

    name = "reference"
    device = "cpu"

    def repack(self, q: Tensor, perm: Tensor | None, size_k: int, size_n: int, num_bits: int) -> Tensor:
        """See `Provider.repack`; ValueError for shapes the kernel does not take."""
        table = fragments.tile_repack(num_bits)
        _require(size_k % 16 == 0, f"size_k = {size_k} is not a multiple of 16")
        _require(size_n % 64 == 0, f"size_n = {size_n} is not a multiple of 64")
        expected = (size_k * num_bits // 32, size_n)
        _require(tuple(q.shape) == expected, f"q has shape {tuple(q.shape)}, expected {expected}")
        _require(q.dtype == torch.int32 and q.is_contiguous(), "q is not contiguous int32")
        codes = _codes(q.t(), num_bits).t()
        perm = _given(perm)
        if perm is not None:
            _require(perm.numel() == size_k, f"perm has {perm.numel()} entries, expected {size_k}")
            codes = codes[perm.long()]
        tiles = codes.reshape(size_k // 16, 16, size_n // 64, 64).permute(0, 2, 1, 3).flatten(-2)
        gathered = _gather(tiles, table).reshape(*tiles.shape[:2], *table.shape).to(torch.int32)
        words = torch.zeros(gathered.shape[:-1], dtype=torch.int32)
        for position in range(table.shape[1]):
            words |= gathered[..., position] << (position * num_bits)
        return words.reshape(size_k // 16, -1)

    def gemm(
        self,
        a: Tensor,
        c_or_none: Tensor | None,
        b_q_weight: Tensor,
        b_bias_or_none: Tensor | None,
        b_scales: Tensor,
        global_scale_or_none: Tensor | None,
        b_zeros_or_none: Tensor | None,
        g_idx_or_none: Tensor | None,
        perm_or_none: Tensor | None,
        workspace: Tensor,
        sorted_token_ids: Tensor,
        expert_ids: Tensor,
        num_tokens_post_padded: Tensor,
        topk_weights: Tensor,
        moe_block_size: int,
        top_k: int,
        mul_topk_weights: bool,
        is_ep: bool,
        b_q_type_id: int,
        size_m: int,
        size_n: int,
        size_k: int,
        is_k_full: bool = True,
        use_atomic_add: bool = False,
        use_fp32_reduce: bool = True,
        is_zp_float: bool = False,
    ) -> Tensor:
        """See `Provider.gemm`. Without c, rows left undefined are NaN; the two reduction flags change
        nothing.
        """
        _require(a.device.type == "cpu", f"the reference works on CPU tensors, a is on {a.device}")
        _require(not is_zp_float, "float zero points are not modelled")
        _require(_given(global_scale_or_none) is None, "a global scale goes with float4 weights only")
        experts = _Experts(
            kind=quant_type(b_q_type_id),
            words=b_q_weight,
            scales=b_scales,
            zeros=_given(b_zeros_or_none),
            g_idx=_given(g_idx_or_none),
            perm=_given(perm_or_none),
            bias=b_bias_or_none,
            size_k=size_k,
            size_n=size_n,
            is_k_full=is_k_full,
        )
        _require(
            tuple(a.shape) == (size_m, size_k), f"a has shape {tuple(a.shape)}, expected {(size_m, size_k)}"
        )
        _require(workspace.dtype == torch.int32, f"workspace is {workspace.dtype}, expected torch.int32")
        _check_weights(a, experts)
        rows = size_m * top_k
        if mul_topk_weights:
            _check_topk_weights(topk_weights, rows)
        out = _output(a, c_or_none, (rows, size_n))
        named = _blocks(
            sorted_token_ids,
            expert_ids,
            num_tokens_post_padded,
            block_size=moe_block_size,
            rows=rows,
            is_ep=is_ep,
            num_experts=experts.words.shape[0],
        )
        for expert, row_ids in named:
            if row_ids.numel():
                x = a[row_ids // top_k]
                if experts.perm is not None:
                    x = x[:, experts.perm[expert].long()]
                weights = topk_weights.reshape(-1)[row_ids] if mul_topk_weights else None
                total = x.double() @ _operand(experts, expert).double()
                out[row_ids] = _finish(total, experts, expert, weights)
        return out
