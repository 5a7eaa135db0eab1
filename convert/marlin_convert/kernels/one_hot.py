"""Every weight as the kernel reads it: the identity matrix as activations.

Row k of the identity picks input k, so the kernel's output [K, N] is the matrix it sees: bf16((q - bias) *
scale), which is exact in float32 sums of one non-zero term. One wrong nibble or scale shows as itself, at its
place.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from marlin_convert.kernels.fused_moe import align, make_workspace
from marlin_convert.kernels.gemm_call import REPEATABLE, Alignment, GemmCall, Matrix, ReduceFlags
from marlin_convert.kernels.providers import Provider

BLOCK_SIZE = 64


def identity_alignment(
    size_k: int, num_experts: int, device: torch.device, block_size: int = BLOCK_SIZE
) -> Alignment:
    """Every one of K rows goes to every expert, which is choice number e of each row."""
    experts = torch.arange(num_experts, device=device).expand(size_k, num_experts)
    return align(experts, num_experts, block_size)


def read_back(
    provider: Provider,
    matrix: Matrix,
    *,
    experts_a_call: int = 1,
    block_size: int = BLOCK_SIZE,
    flags: ReduceFlags = REPEATABLE,
) -> Iterator[tuple[int, Tensor]]:
    """Yield (first expert, weights [n, K, N] as the kernel multiplies with them) for runs of `experts_a_call`
    experts.

    An output takes n * K * N * 2 bytes. One expert a call is the fastest on an H200 too: 0.26 ms for 7168 x
    512, while 32 in one call take 22 ms. A bias of the matrix would be in every row; it is left out.
    """
    device, size_k = matrix.qweight.device, matrix.size_k
    identity = torch.eye(size_k, dtype=matrix.scales.dtype, device=device)
    workspace = make_workspace(device)
    alignment: Alignment | None = None
    listed = 0
    for start in range(0, matrix.num_experts, experts_a_call):
        run = replace(matrix[start : start + experts_a_call], bias=None)
        count = run.num_experts
        if alignment is None or count != listed:
            alignment, listed = identity_alignment(size_k, count, device, block_size), count
        out = provider.gemm(GemmCall(identity, run, alignment, workspace, count, flags=flags))
        yield start, out.reshape(size_k, count, -1).transpose(0, 1)
