"""Where the kernel can be had: one interface over the packages that ship it, and a report of what loads here.

The kernel is `moe_wna16_marlin_gemm` of SGLang with its `gptq_marlin_repack`. It has moved between packages;
`CANDIDATES` lists the places, newest first. They are found by importing, never by version. Importing `sglang`
runs that package's own start-up, which takes seconds, so nothing is imported before a GPU is seen. torch is
imported inside functions: this module loads without it.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from marlin_convert.documents.doctor import ProviderReport
from marlin_convert.errors import MachineError, UsageError
from marlin_convert.extras import installed, need_device, package_version
from marlin_convert.kernels.compiled_module import refuse_cut_modules
from marlin_convert.progress import compiling

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from marlin_convert.kernels.gemm_call import GemmCall

#: The kernel's code is empty for older GPUs.
MIN_CAPABILITY = (8, 0)
#: the CPU model, which is never chosen by itself
REFERENCE = "reference"


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

        perm: int32 [K], input k of the result is input perm[k] of q (act-order). K % 16 == 0, N % 64 == 0.
        """

    def gemm(self, call: GemmCall) -> Tensor:
        """[R * top_k, N] in the dtype of `call.a`, which is `call.c` if that is given.

        Errors: ValueError or RuntimeError for shapes the kernel does not take; it needs N % 128 == 0 and K %
        64 == 0.
        """


@dataclass(frozen=True)
class OpProvider:
    """A provider made of two callables found in a package.

    type_as_object: the gemm takes `GemmCall.with_keywords`, not `GemmCall.positional`.
    """

    name: str
    repack_op: Callable[..., Any]
    gemm_op: Callable[..., Any]
    type_as_object: bool
    device: str = "cuda"
    #: operations that have run: of some packages the first call compiles, for minutes
    _ran: set[str] = field(default_factory=set)

    def repack(self, q: Tensor, perm: Tensor | None, size_k: int, size_n: int, num_bits: int) -> Tensor:
        """See `Provider.repack`."""
        import torch

        if perm is None:
            perm = torch.empty(0, dtype=torch.int32, device=q.device)
        packed: Tensor = self._call("repack", lambda: self.repack_op(q, perm, size_k, size_n, num_bits))
        return packed

    def gemm(self, call: GemmCall) -> Tensor:
        """See `Provider.gemm`."""
        arguments, keywords = call.with_keywords() if self.type_as_object else (call.positional(), {})
        out: Tensor = self._call("gemm", lambda: self.gemm_op(*arguments, **keywords))
        return out

    def _call(self, operation: str, call: Callable[[], Any]) -> Any:
        """Call an operation. Raises KernelUnavailableError where the package cannot compile it, MachineError
        where what it compiled before is not whole.
        """
        if operation in self._ran or self.name not in COMPILED_HERE:
            return call()
        refuse_cut_modules()
        compiling.tell(begun=True)
        try:
            result = call()
        except Exception as error:
            if not any(tool in str(error) for tool in TOOLS):
                raise
            raise KernelUnavailableError(
                f"the kernel of {self.name} could not be compiled: {one_line(error)}; that needs nvcc"
                " (CUDA_HOME set), g++ with C++20 and ninja; `marlin-convert doctor` says what is there"
            ) from error
        finally:
            compiling.tell(begun=False)
        self._ran.add(operation)
        return result


#: what a package that compiles says where it cannot
TOOLS = ("ninja", "nvcc", "CUDA_HOME", "compil", "g++")


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

#: of these the ones that compile at first use
COMPILED_HERE = frozenset(each.name for each in CANDIDATES if each.repack_module is not None)


def _gpu_problem() -> str:
    """Why no GPU serves here; empty if one does."""
    if not installed("torch"):
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
    if not installed(candidate.package):
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
            problems.append(f"{candidate.gemm_module} does not load: {one_line(error)}")
    report = ProviderReport(
        candidate.name, provider is not None, " and ".join(problems), candidate.install, version
    )
    return report, provider


def one_line(error: BaseException) -> str:
    """An exception as one line of at most 300 characters."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


def probe(gpu_problem: str = "") -> tuple[ProviderReport, ...]:
    """Try every place the kernel may be in, in the order of `load`; imports packages only if a GPU is
    there. `gpu_problem`: why none serves, where that is known already.
    """
    gpu_problem = gpu_problem or _gpu_problem()
    return tuple(_try(candidate, gpu_problem)[0] for candidate in CANDIDATES)


def load(name: str | None = None) -> Provider:
    """The first provider that loads, or the one called `name`.

    `name`: one of `CANDIDATES`, or `reference`, the CPU model, which is never chosen by itself.
    Errors: ValueError for an unknown name; KernelUnavailableError if none loads.
    """
    if name == REFERENCE:
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
    kind = "cuda" if name == REFERENCE and str(device).startswith("cuda") else need_device(device)
    try:
        provider = load(REFERENCE if kind == "cpu" and name is None else name)
    except (RuntimeError, ValueError) as error:
        raise UsageError(str(error)) from error
    if provider.device != kind:
        raise UsageError(f"the provider {provider.name} works on {provider.device}, not on {device}")
    return provider


def environment(provider: Provider, device: str | torch.device) -> dict[str, str | None]:
    """What runs the kernel, for reports: provider, packages and, on one, the GPU."""
    import torch

    found: dict[str, str | None] = {"provider": provider.name, "torch": str(torch.__version__)}
    for package in ("marlin-convert", "sglang", "sgl-kernel", "apache-tvm-ffi"):
        found[package] = package_version(package)
    if provider.device == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        found |= {
            "gpu": torch.cuda.get_device_name(device),
            "capability": f"{major}.{minor}",
            "cuda": torch.version.cuda,
        }
    return found
