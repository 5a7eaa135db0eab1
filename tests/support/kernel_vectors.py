"""The golden vectors of the real kernel, by family. See tests/golden/golden.json for what each tensor is."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from marlin_convert.kernels.fused_moe import Experts, Routing, make_workspace
from marlin_convert.kernels.gemm_call import Alignment, GemmCall, Matrix
from marlin_convert.kernels.providers import Provider
from marlin_convert.kernels.quant_types import UINT4, UINT4B8, UINT8B128, QuantType

GOLDEN = Path(__file__).parents[1] / "golden" / "golden.safetensors"
Family = dict[str, Tensor]

GEMM_KINDS: dict[str, QuantType] = {
    "gemm.u4b8_g32_actorder": UINT4B8,
    "gemm.u4b8_g128": UINT4B8,
    "gemm.u4b8_gchan": UINT4B8,
    "gemm.u4zp_g64": UINT4,
    "gemm.u8b128_g32": UINT8B128,
}
REPACK_FAMILIES = (
    "repack.w4.k16.n64",
    "repack.w4.k64.n64",
    "repack.w4.k128.n64",
    "repack.w4.k64.n128",
    "repack.w4.k256.n256",
    "repack.w8.k64.n64",
    "repack.w8.k128.n128",
    "repack_perm.w4.k128.n64",
    "repack_perm.w8.k128.n64",
)


@cache
def _all() -> Family:
    return load_file(GOLDEN)


def family(prefix: str, device: str = "cpu") -> Family:
    """The tensors `<prefix>.<name>` by name, copied so that a test may change them."""
    return {
        key.removeprefix(prefix + "."): tensor.clone().to(device)
        for key, tensor in _all().items()
        if key.startswith(prefix + ".")
    }


def family_names() -> set[str]:
    """All prefixes in the file, to notice one that no test looks at."""
    return {key.rsplit(".", 1)[0] for key in _all()}


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Frobenius norm of the difference over that of `expected`."""
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def matrix_of(tensors: Family, kind: QuantType) -> Matrix:
    """The matrix that a gemm.* family was run with."""
    return Matrix(
        tensors["marlin_w"],
        tensors["marlin_s"],
        kind,
        tensors.get("bias"),
        tensors.get("marlin_zp"),
        tensors.get("g_idx_sorted"),
        tensors.get("perm"),
    )


def call_of(tensors: Family, kind: QuantType) -> GemmCall:
    """The call that a gemm.* family records."""
    alignment = Alignment(
        tensors["sorted_token_ids"], tensors["expert_ids"], tensors["num_tokens_post_padded"], 8
    )
    x = tensors["x"]
    return GemmCall(
        x, matrix_of(tensors, kind), alignment, make_workspace(x.device), 2, tensors.get("topk_weights")
    )


def run_gemm(provider: Provider, tensors: Family, kind: QuantType, c: Tensor | None = None) -> Tensor:
    """Its result, in `c` if that is given."""
    return provider.gemm(replace(call_of(tensors, kind), c=c))


def experts_of(moe: Family, owned: slice = slice(None), expert_map: Tensor | None = None) -> Experts:
    """The experts of the moe_m5 family, or some of them."""
    w13 = Matrix(moe["w13_marlin"], moe["s13_marlin"])
    w2 = Matrix(moe["w2_marlin"], moe["s2_marlin"])
    return Experts(w13[owned], w2[owned], expert_map)


def routing_of(moe: Family) -> Routing:
    """The routing of the moe_m5 family."""
    return Routing(moe["topk_weights"], moe["topk_ids"])


def repack_golden(provider: Provider, tensors: Family, num_bits: int) -> Tensor:
    """The repack that a repack.* or repack_perm.* family records: from weight_packed [N, K*bits/32]."""
    size_n, words = tensors["ct"].shape
    return provider.repack(
        tensors["ct"].t().contiguous(), tensors.get("perm"), words * 32 // num_bits, size_n, num_bits
    )


def published_weights(ct: Tensor, scale_ct: Tensor, num_bits: int = 4) -> Tensor:
    """bf16((q - bias) * scale) [K, N] of one published matrix: weight_packed int32 [N, K*bits/32],
    weight_scale [N, G].

    Straight from compressed-tensors' packing (element i of a word in bits i * num_bits and up), nothing
    Marlin in it.
    """
    count = 32 // num_bits
    codes = torch.stack([(ct >> (num_bits * i)) & (2**num_bits - 1) for i in range(count)], dim=-1).flatten(
        -2
    )
    group_size = codes.shape[1] // scale_ct.shape[1]
    signed: Tensor = (codes - 2 ** (num_bits - 1)).to(scale_ct.dtype)
    return (signed * scale_ct.repeat_interleave(group_size, dim=1)).t()
