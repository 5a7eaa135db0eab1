"""The kernel on a CPU: the same call, computed from the Marlin tensors as the kernel's threads read them.

Decoding follows `fragments`, not the layout this project writes, so agreement between the two is evidence.
Roundings are those of the kernel: a weight times its group's scale is rounded to the activations' dtype
before it is multiplied; the sum (float64 here) is rounded to that dtype, then scaled (channel-wise 4-bit),
biased and weighted in it, each time rounded. What differs from a GPU is only the float32 order of summation.
"""

from __future__ import annotations

import torch
from torch import Tensor

from marlin_convert.kernels import fragments
from marlin_convert.kernels.gemm_call import BLOCK_SIZES, Alignment, GemmCall, Matrix

GROUP_SIZES = (32, 64, 128)
MIN_N = 128
MIN_K = 64


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _gather(values: Tensor, table: fragments.IndexTable) -> Tensor:
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


def _channelwise(matrix: Matrix) -> bool:
    """One scale a column: the kernel then multiplies results, not weights."""
    return matrix.scales.shape[1] == 1 and matrix.g_idx is None


def _operand(matrix: Matrix, expert: int) -> Tensor:
    """What the tensor cores multiply with: [K, N] in the scales' dtype; scaled unless the scales are
    channel-wise.
    """
    dtype = matrix.scales.dtype
    size_k, groups = matrix.size_k, matrix.scales.shape[1]
    codes = decode_weight(matrix.qweight[expert], matrix.kind.num_bits, size_k, matrix.size_n).to(dtype)
    # A full K is sorted by group: rows of a group are neighbours, and g_idx is not looked at.
    g_idx = None if matrix.is_k_full else matrix.g_idx
    group_of = torch.arange(size_k) // (size_k // groups) if g_idx is None else g_idx[expert].long()
    zero = (
        matrix.kind.bias
        if matrix.zeros is None
        else decode_zero_points(matrix.zeros[expert]).to(dtype)[group_of]
    )
    codes = codes - zero
    return codes if _channelwise(matrix) else codes * decode_scales(matrix.scales[expert], False)[group_of]


def _finish(total: Tensor, matrix: Matrix, expert: int, row_weights: Tensor | None) -> Tensor:
    """Sums float64 [R, N] to results: channel-wise scale, bias, the rows' top-k weights, rounded after
    each.
    """
    dtype, channelwise = matrix.scales.dtype, _channelwise(matrix)
    if channelwise and matrix.kind.num_bits == 8:
        total = total * decode_scales(matrix.scales[expert], True).double()
    out = total.to(dtype)
    if channelwise and matrix.kind.num_bits == 4:
        out = out * decode_scales(matrix.scales[expert], True)
    if matrix.bias is not None:
        out = out + decode_scales(matrix.bias[expert].unsqueeze(0), True)
    return out if row_weights is None else out * row_weights.to(dtype).unsqueeze(1)


def _check_activations(call: GemmCall) -> None:
    """ValueError for activations, workspace or top-k weights that the kernel does not take."""
    a, matrix, weights = call.a, call.matrix, call.topk_weights
    _require(a.device.type == "cpu", f"the reference works on CPU tensors, a is on {a.device}")
    expected = (a.shape[0], matrix.size_k)
    _require(tuple(a.shape) == expected, f"a has shape {tuple(a.shape)}, expected {expected}")
    _require(a.dtype in (torch.bfloat16, torch.float16), f"a is {a.dtype}, not bfloat16 or float16")
    _require(
        call.workspace.dtype == torch.int32, f"workspace is {call.workspace.dtype}, expected torch.int32"
    )
    if weights is not None:
        rows = a.shape[0] * call.top_k
        _require(weights.dtype == torch.float32, f"topk_weights is {weights.dtype}, not torch.float32")
        _require(weights.numel() == rows, f"{weights.numel()} topk_weights for {rows} rows")


def _check_matrix(matrix: Matrix, dtype: torch.dtype) -> None:
    """ValueError for a matrix that the kernel does not take for activations of this dtype."""
    size_k, size_n, kind = matrix.size_k, matrix.size_n, matrix.kind
    num_experts, groups = matrix.num_experts, matrix.scales.shape[1]
    _require(matrix.scales.dtype == dtype, f"b_scales is {matrix.scales.dtype}, a is {dtype}")
    _require(
        size_n % MIN_N == 0 and size_k % MIN_K == 0,
        f"Invalid thread config: size_n = {size_n} must be a multiple of {MIN_N} and size_k = {size_k} one of"
        f" {MIN_K}",
    )
    expected: list[tuple[str, Tensor | None, tuple[int, ...], torch.dtype]] = [
        ("b_q_weight", matrix.qweight, (num_experts, size_k // 16, size_n * kind.num_bits // 2), torch.int32),
        ("b_scales", matrix.scales, (num_experts, groups, size_n), dtype),
        ("b_zeros", matrix.zeros, (num_experts, groups, size_n // kind.pack_factor), torch.int32),
        ("g_idx", matrix.g_idx, (num_experts, size_k), torch.int32),
        ("perm", matrix.perm, (num_experts, size_k), torch.int32),
        ("b_bias", matrix.bias, (num_experts, size_n), dtype),
    ]
    for name, tensor, shape, kept_as in expected:
        if tensor is not None:
            _require(
                tuple(tensor.shape) == shape, f"{name} has shape {tuple(tensor.shape)}, expected {shape}"
            )
            _require(tensor.dtype == kept_as, f"{name} is {tensor.dtype}, expected {kept_as}")
            _require(tensor.is_contiguous(), f"{name} is not contiguous")
    _require((matrix.g_idx is None) == (matrix.perm is None), "act-order needs both g_idx and perm")
    matches = kind.has_zero_points == (matrix.zeros is not None)
    _require(matches, f"zero points must be given for uint4 and only for it; the type is {kind.name}")
    if matrix.g_idx is None or matrix.is_k_full:
        _require(size_k % groups == 0, f"size_k = {size_k} is not a multiple of the {groups} groups")
        group_size = size_k // groups
        _require(
            groups == 1 or group_size in GROUP_SIZES, f"group size {group_size} is none of {GROUP_SIZES}"
        )
        _require(groups > 1 or matrix.g_idx is None, "act-order needs more than one group")


def _output(call: GemmCall) -> Tensor:
    """The tensor to fill: c, or one of NaN, so that nobody relies on rows the kernel leaves undefined."""
    shape, dtype, c = (call.a.shape[0] * call.top_k, call.matrix.size_n), call.a.dtype, call.c
    if c is None:
        return call.a.new_full(shape, float("nan"))
    _require(tuple(c.shape) == shape, f"c has shape {tuple(c.shape)}, expected {shape}")
    _require(c.dtype == dtype and c.is_contiguous(), f"c is not contiguous {dtype}")
    return c


def _blocks(alignment: Alignment, rows: int, num_experts: int) -> list[tuple[int, Tensor]]:
    """(expert, rows of the result) for each expert that some block names, in order of experts."""
    sorted_ids, expert_ids, block_size = (
        alignment.sorted_token_ids,
        alignment.expert_ids,
        alignment.block_size,
    )
    for name in ("sorted_token_ids", "expert_ids", "num_tokens_post_padded"):
        dtype = getattr(alignment, name).dtype
        _require(dtype == torch.int32, f"{name} is {dtype}, expected torch.int32")
    _require(block_size in BLOCK_SIZES, f"unsupported moe_block_size={block_size}")
    count = int(alignment.num_tokens_post_padded[0]) // block_size
    enough = count * block_size <= sorted_ids.numel() and count <= expert_ids.numel()
    _require(enough, f"{count} blocks are more than sorted_token_ids or expert_ids holds")
    ids = sorted_ids[: count * block_size].long().reshape(count, block_size)
    experts = expert_ids[:count].long()
    valid = ids < rows
    # The kernel counts a block's valid rows and then takes that many from the front.
    _require(
        bool((valid[:, 1:] <= valid[:, :-1]).all()), "a block of sorted_token_ids has padding before a token"
    )
    _require(
        bool((experts < num_experts).all()), f"expert_ids names an expert beyond the {num_experts} given"
    )
    _require(alignment.is_ep or bool((experts >= 0).all()), "expert_ids has -1 but is_ep is False")
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
        if perm is not None:
            _require(perm.numel() == size_k, f"perm has {perm.numel()} entries, expected {size_k}")
            codes = codes[perm.long()]
        tiles = codes.reshape(size_k // 16, 16, size_n // 64, 64).permute(0, 2, 1, 3).flatten(-2)
        gathered = _gather(tiles, table).reshape(*tiles.shape[:2], *table.shape).to(torch.int32)
        words = torch.zeros(gathered.shape[:-1], dtype=torch.int32)
        for position in range(table.shape[1]):
            words |= gathered[..., position] << (position * num_bits)
        return words.reshape(size_k // 16, -1)

    def gemm(self, call: GemmCall) -> Tensor:
        """See `Provider.gemm`. Without c, rows left undefined are NaN; the two reduction flags change
        nothing.
        """
        matrix = call.matrix
        _check_activations(call)
        _check_matrix(matrix, call.a.dtype)
        out = _output(call)
        for expert, rows in _blocks(call.alignment, out.shape[0], matrix.num_experts):
            if rows.numel():
                x = call.a[rows // call.top_k]
                if matrix.perm is not None:
                    x = x[:, matrix.perm[expert].long()]
                weights = None if call.topk_weights is None else call.topk_weights.reshape(-1)[rows]
                total = x.double() @ _operand(matrix, expert).double()
                out[rows] = _finish(total, matrix, expert, weights)
        return out
