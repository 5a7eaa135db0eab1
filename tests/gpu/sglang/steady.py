"""A plugin for the runs: the kernel sums without atomics. With them it sums in any order, and not even a
repeat of the same request is equal.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

KERNEL = "sglang.srt.layers.moe.fused_moe_triton.fused_marlin_moe.moe_wna16_marlin_gemm"


def register() -> None:
    """The entry point `sglang.srt.plugins`."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(KERNEL, without_atomics, HookType.AROUND)


def without_atomics(kernel: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Around the kernel's call."""
    return kernel(*args, **{**kwargs, "use_atomic_add": False})
