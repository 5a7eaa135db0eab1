"""One call of the kernel, `moe_wna16_marlin_gemm`: what it multiplies, and its 26 arguments spelled once.

Loads without torch. E experts, K inputs, N outputs, G scale groups; R rows of activations.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from marlin_convert.kernels.quant_types import UINT4B8, QuantType

if TYPE_CHECKING:
    from torch import Tensor

#: those the kernel was compiled for
BLOCK_SIZES = (8, 16, 32, 48, 64)


@dataclass(frozen=True)
class Matrix:
    """One projection of all local experts in Marlin form.

    qweight int32 [E, K/16, N*bits/2], scales [E, G, N] of the activations' dtype. What few matrices have:
    bias [E, N] of the same dtype, in runs of 32 in the order of channel-wise scales; zeros int32
    [E, G, N*bits/32]; g_idx and perm int32 [E, K] (act-order, g_idx sorted). is_k_full: False only for a part
    of the inputs of an act-order matrix.
    """

    qweight: Tensor
    scales: Tensor
    kind: QuantType = UINT4B8
    bias: Tensor | None = None
    zeros: Tensor | None = None
    g_idx: Tensor | None = None
    perm: Tensor | None = None
    is_k_full: bool = True

    @property
    def num_experts(self) -> int:
        """E, the local experts."""
        return self.qweight.shape[0]

    @property
    def size_k(self) -> int:
        """K, the inputs."""
        return 16 * self.qweight.shape[1]

    @property
    def size_n(self) -> int:
        """N, the outputs."""
        return self.scales.shape[2]

    def map(self, change: Callable[[Tensor], Tensor]) -> Matrix:
        """The same with every tensor changed, such as brought to a device."""

        def changed(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else change(tensor)

        return replace(
            self,
            qweight=change(self.qweight),
            scales=change(self.scales),
            bias=changed(self.bias),
            zeros=changed(self.zeros),
            g_idx=changed(self.g_idx),
            perm=changed(self.perm),
        )

    def __getitem__(self, experts: slice) -> Matrix:
        """Some of the experts, nothing copied."""
        return self.map(lambda tensor: tensor[experts])


@dataclass(frozen=True)
class Alignment:
    """Rows sorted by expert in blocks of `block_size`, as the kernel wants them; all int32.

    sorted_token_ids [capacity]: entry t * top_k + j is the j-th choice of token t; the padding value is M *
    top_k for M tokens. expert_ids [capacity / block_size rounded up]: each block's expert, -1 for others'
    ones (only with is_ep). num_tokens_post_padded [1]: how much of the above counts.
    """

    sorted_token_ids: Tensor
    expert_ids: Tensor
    num_tokens_post_padded: Tensor
    block_size: int
    is_ep: bool = False


@dataclass(frozen=True)
class ReduceFlags:
    """How thread blocks that share an output add up. The default is repeatable; engines may add
    atomically.
    """

    use_atomic_add: bool = False
    use_fp32_reduce: bool = True


REPEATABLE = ReduceFlags()


@dataclass(frozen=True)
class GemmCall:
    """Row r of the result [R * top_k, N] is row r // top_k of `a` [R, K] times the matrix of its expert.

    a: bfloat16 or float16. workspace: int32 zeros, see `fused_moe.make_workspace`. topk_weights: float32
    [R * top_k], with which each row of the result is multiplied; None to leave that out. c: the result, if it
    is there already; rows that no block covers, or only a block of expert -1, are left as they were.
    """

    a: Tensor
    matrix: Matrix
    alignment: Alignment
    workspace: Tensor
    top_k: int
    topk_weights: Tensor | None = None
    c: Tensor | None = None
    flags: ReduceFlags = REPEATABLE

    def arguments(self) -> dict[str, object]:
        """All 26 by the kernel's names and in the kernel's order, as its flat op takes them."""
        import torch

        matrix, alignment, weights = self.matrix, self.alignment, self.topk_weights
        return {
            "a": self.a,
            "c_or_none": self.c,
            "b_q_weight": matrix.qweight,
            "b_bias_or_none": matrix.bias,
            "b_scales": matrix.scales,
            "global_scale_or_none": None,
            "b_zeros_or_none": matrix.zeros,
            "g_idx_or_none": matrix.g_idx,
            "perm_or_none": matrix.perm,
            "workspace": self.workspace,
            "sorted_token_ids": alignment.sorted_token_ids,
            "expert_ids": alignment.expert_ids,
            "num_tokens_post_padded": alignment.num_tokens_post_padded,
            "topk_weights": self.a.new_empty(0, dtype=torch.float32) if weights is None else weights,
            "moe_block_size": alignment.block_size,
            "top_k": self.top_k,
            "mul_topk_weights": weights is not None,
            "is_ep": alignment.is_ep,
            "b_q_type_id": matrix.kind.id,
            "size_m": self.a.shape[0],
            "size_n": matrix.size_n,
            "size_k": matrix.size_k,
            "is_k_full": matrix.is_k_full,
            "use_atomic_add": self.flags.use_atomic_add,
            "use_fp32_reduce": self.flags.use_fp32_reduce,
            "is_zp_float": False,
        }

    def positional(self) -> tuple[object, ...]:
        """For the flat op, which takes all of them by position."""
        return tuple(self.arguments().values())

    def with_keywords(self) -> tuple[tuple[object, ...], dict[str, object]]:
        """For the form that is compiled at first use: what goes by position and what by keyword.

        It takes the type as `b_q_type`, an object with `.id`. From there on its defaults are others, and
        newer versions have more parameters after these, so all of that goes by keyword.
        """
        keywords = self.arguments()
        leading = []
        for name in tuple(keywords):
            if name == "b_q_type_id":
                break
            leading.append(keywords.pop(name))
        del keywords["b_q_type_id"]
        return tuple(leading), {"b_q_type": self.matrix.kind, **keywords}
