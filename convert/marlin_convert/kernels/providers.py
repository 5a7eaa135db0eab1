"""Where the kernel can be had: one interface over the packages that ship it, and a report of what loads here.

The kernel is `moe_wna16_marlin_gemm` of SGLang with its `gptq_marlin_repack`. Its home has moved;
`CANDIDATES` lists the places, newest first. They are found by importing, never by version. Importing `sglang`
runs that package's own start-up, which takes seconds, so nothing is imported before a GPU is seen. torch is
imported inside functions: this module loads without it.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from marlin_convert.errors import MachineError, UsageError
from marlin_convert.kernels.quant_types import quant_type

if TYPE_CHECKING:
    from torch import Tensor

#: The kernel's code is empty for older GPUs.
MIN_CAPABILITY = (8, 0)


class KernelUnavailableError(MachineError):
    """No provider of the kernel loads here; the message says why for each, and what to install."""


class Provider(Protocol):
    """The two operations, for tensors on `device`. E experts, K = size_k inputs, N = size_n outputs, G scale
    groups.
    """

    @property
    def name(self) -> str:
        """Name of the provider, as in `probe()`."""

    @property
    def device(self) -> str:
        """torch device type that tensors must be on: `cuda`, or `cpu` for the reference."""

    def repack(self, q: Tensor, perm: Tensor | None, size_k: int, size_n: int, num_bits: int) -> Tensor:
        """GPTQ words int32 [K * bits / 32, N] to Marlin words int32 [K / 16, N * bits / 2].

        perm: int32 [K], input k of the result is input perm[k] of q (act-order); empty or None for none. K %
        16 == 0, N % 64 == 0.
        """

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
        """`a` [size_m, K] times the expert of each row: [size_m * top_k, N] in a's dtype, in `c_or_none` if
        given.

        b_q_weight int32 [E, K/16, N*bits/2]; b_bias [E, N], in runs of 32 in the order of channel-wise
        scales; b_scales [E, G, N] of a's dtype; b_zeros int32 [E, G, N*bits/32]; g_idx and perm int32 [E, K];
        workspace int32 zeros; sorted_token_ids, expert_ids and num_tokens_post_padded int32 as
        `fused_moe.align` makes them; topk_weights float32 [size_m * top_k]. Row r of the result is row r //
        top_k of `a`. Rows that no block covers, or only a block of expert -1 (is_ep), are left as they were.
        Errors: ValueError or RuntimeError for shapes the kernel does not take; it needs N % 128 == 0 and K %
        64 == 0.
        """


@dataclass(frozen=True)
class OpProvider:
    """A provider made of two callables found in a package.

    type_as_object: the gemm takes the weight type as `b_q_type`, an object with `.id`, instead of a number.
    That form has other defaults and, in newer versions, more trailing parameters, so everything from the type
    on goes by keyword. The flat op gets all 26 by position.
    """

    name: str
    repack_op: Callable[..., Any]
    gemm_op: Callable[..., Any]
    type_as_object: bool
    device: str = "cuda"

    def repack(self, q: Tensor, perm: Tensor | None, size_k: int, size_n: int, num_bits: int) -> Tensor:
        """See `Provider.repack`."""
        import torch

        if perm is None:
            perm = torch.empty(0, dtype=torch.int32, device=q.device)
        packed: Tensor = self.repack_op(q, perm, size_k, size_n, num_bits)
        return packed

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
        """See `Provider.gemm`."""
        leading = (
            a,
            c_or_none,
            b_q_weight,
            b_bias_or_none,
            b_scales,
            global_scale_or_none,
            b_zeros_or_none,
            g_idx_or_none,
            perm_or_none,
            workspace,
            sorted_token_ids,
            expert_ids,
            num_tokens_post_padded,
            topk_weights,
            moe_block_size,
            top_k,
            mul_topk_weights,
            is_ep,
        )
        trailing: dict[str, object] = {
            "size_m": size_m,
            "size_n": size_n,
            "size_k": size_k,
            "is_k_full": is_k_full,
            "use_atomic_add": use_atomic_add,
            "use_fp32_reduce": use_fp32_reduce,
            "is_zp_float": is_zp_float,
        }
        out: Tensor
        if self.type_as_object:
            out = self.gemm_op(*leading, b_q_type=quant_type(b_q_type_id), **trailing)
        else:
            out = self.gemm_op(*leading, b_q_type_id, *trailing.values())
        return out


@dataclass(frozen=True)
class Candidate:
    """A place where a package keeps the operations; without `repack_module`, those of
    `torch.ops.<gemm_module>`.
    """

    name: str
    package: str
    gemm_module: str
    repack_module: str | None
    install: str


CANDIDATES = (
    Candidate(
        "sglang.kernels",
        "sglang",
        "sglang.kernels.ops.moe.moe_wna16_marlin",
        "sglang.kernels.ops.quantization.gptq_marlin_repack",
        "CUDA 13: pip install '.[sglang]'; it compiles at first use and needs nvcc (CUDA_HOME set), g++ with"
        " C++20 and ninja",
    ),
    Candidate(
        "sglang.jit_kernel",
        "sglang",
        "sglang.jit_kernel.moe_wna16_marlin",
        "sglang.jit_kernel.gptq_marlin_repack",
        "the place in sglang versions before sglang.kernels; nothing to install if that one loads",
    ),
    Candidate(
        "sgl_kernel",
        "sgl_kernel",
        "sgl_kernel",
        None,
        "CUDA 12: pip install '.[sgl-kernel]', compiled, 535 MB",
    ),
)


@dataclass(frozen=True)
class ProviderReport:
    """What `probe` found: `reason` says why it does not load (empty if it does), `install` what would
    help.
    """

    name: str
    available: bool
    reason: str
    install: str
    version: str | None = None


def _gpu_problem() -> str:
    """Why no GPU serves here; empty if one does."""
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed"
    import torch

    if not torch.cuda.is_available():
        return f"torch {torch.__version__} sees no CUDA GPU"
    capability = torch.cuda.get_device_capability()
    if capability < MIN_CAPABILITY:
        found = f"{capability[0]}.{capability[1]}"
        return f"{torch.cuda.get_device_name()} has compute capability {found}, the kernel needs 8.0"
    return ""


def _version(package: str) -> str | None:
    for distribution in importlib.metadata.packages_distributions().get(package, ()):
        return importlib.metadata.version(distribution)
    return None


def _load(candidate: Candidate) -> OpProvider:
    """Import the operations of a candidate; ImportError with a readable sentence if one is not there."""
    gemm_module = importlib.import_module(candidate.gemm_module)
    if candidate.repack_module is not None:
        repack_module = importlib.import_module(candidate.repack_module)
        return OpProvider(
            candidate.name, repack_module.gptq_marlin_repack, gemm_module.moe_wna16_marlin_gemm, True
        )
    import torch

    ops = getattr(torch.ops, candidate.gemm_module)
    if not (hasattr(ops, "moe_wna16_marlin_gemm") and hasattr(ops, "gptq_marlin_repack")):
        raise ImportError(
            f"this {candidate.package} no longer has the kernel (versions after 0.3 left it to sglang)"
        )
    return OpProvider(candidate.name, ops.gptq_marlin_repack, ops.moe_wna16_marlin_gemm, False)


def _try(candidate: Candidate, gpu_problem: str) -> tuple[ProviderReport, OpProvider | None]:
    """Report on one candidate, and the provider if it loads."""
    version = None
    problems = []
    if importlib.util.find_spec(candidate.package) is None:
        problems.append(f"the package {candidate.package} is not installed")
    else:
        version = _version(candidate.package)
    if gpu_problem:
        problems.append(gpu_problem)
    provider = None
    if not problems:
        try:
            provider = _load(candidate)
        except Exception as error:  # whatever a foreign package's import raises is a reason, not a crash
            problems.append(f"{candidate.gemm_module} does not load: {_one_line(error)}")
    report = ProviderReport(
        candidate.name, provider is not None, " and ".join(problems), candidate.install, version
    )
    return report, provider


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:300]


def probe() -> tuple[ProviderReport, ...]:
    """Try every place the kernel may be in, in the order of `load`; imports packages only if a GPU is
    there.
    """
    gpu_problem = _gpu_problem()
    return tuple(_try(candidate, gpu_problem)[0] for candidate in CANDIDATES)


def load(name: str | None = None) -> Provider:
    """The first provider that loads, or the one called `name`.

    `name`: one of `CANDIDATES`, or `reference`, the CPU model, which is never chosen by itself.
    Errors: ValueError for an unknown name; KernelUnavailableError if none loads.
    """
    if name == "reference":
        from marlin_convert.kernels.reference import ReferenceProvider

        return ReferenceProvider()
    wanted = [candidate for candidate in CANDIDATES if name in (None, candidate.name)]
    if not wanted:
        known = ", ".join(candidate.name for candidate in CANDIDATES)
        raise ValueError(f"no provider is called {name!r}: {known} or reference")
    gpu_problem = _gpu_problem()
    reasons = []
    for candidate in wanted:
        report, provider = _try(candidate, gpu_problem)
        if provider is not None:
            return provider
        reasons.append(f"  {report.name}: {report.reason}. {report.install}")
    raise KernelUnavailableError("the Marlin MoE kernel does not load here\n" + "\n".join(reasons))


def load_for(device: str, name: str | None = None) -> Provider:
    """The provider for a torch device: the one called `name`, else the first that loads for `cuda`, the CPU
    model for `cpu`.

    Errors: UsageError for an unknown device or name, or one that works on another device; MachineError where
    there is no GPU or no provider loads.
    """
    import torch

    try:
        kind = torch.device(device).type
        if kind == "cuda" and not torch.cuda.is_available() and name != "reference":
            raise MachineError(
                f"torch {torch.__version__} sees no CUDA GPU; run `marlin-convert doctor`, or check slowly"
                " with --device cpu"
            )
        provider = load("reference" if kind == "cpu" and name is None else name)
    except (RuntimeError, ValueError) as error:
        raise UsageError(str(error)) from error
    if provider.device != kind:
        raise UsageError(f"the provider {provider.name} works on {provider.device}, not on {device}")
    return provider
