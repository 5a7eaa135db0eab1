"""Kimi-K2 checkpoints to ready-to-mmap per-GPU shards in the Marlin MoE layout.

The command line's verbs as functions: `plan`, `download`, `convert`, `verify`, `verify_kernel`, `diff`,
`restore` and `reshard`. `open_shards` reads the result with numpy, `load_rank` brings a rank to a GPU with
torch. `HubOptions` says how a repository of the hub is read. What they return are `PlanReport`, `Downloaded`,
`Converted`, `Verification` (of `Finding`s; true where nothing is wrong), `Differences`, `Restored`,
`KernelReport`, `Shards` and `LoadedRank`; how far they are they tell in `Point`s. What goes wrong is a
`ConvertError`: `UsageError`, `SourceError`, `OutputError` or `MachineError`.

All of it is loaded when first used, so that `import marlin_convert` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from marlin_convert.checkpoint.download import Downloaded, download
    from marlin_convert.checkpoint.hub_files import HubOptions
    from marlin_convert.checks.findings import Finding, Verification
    from marlin_convert.checks.kernel.kernel_report import KernelReport
    from marlin_convert.checks.kernel.verify_kernel import verify_kernel
    from marlin_convert.checks.verify import verify
    from marlin_convert.documents.results import Differences
    from marlin_convert.engines.torch_loader import LoadedRank, load_rank
    from marlin_convert.errors import ConvertError, MachineError, OutputError, SourceError, UsageError
    from marlin_convert.pipeline.conversion import Converted
    from marlin_convert.pipeline.preview import plan
    from marlin_convert.pipeline.reshard import reshard
    from marlin_convert.pipeline.restore import restore
    from marlin_convert.pipeline.restored import Restored
    from marlin_convert.pipeline.run import convert
    from marlin_convert.planning.plan_report import PlanReport
    from marlin_convert.progress import Point
    from marlin_convert.shards.compare import diff
    from marlin_convert.shards.reader import Shards, open_shards

    __version__: str

__all__ = [
    "ConvertError",
    "Converted",
    "Differences",
    "Downloaded",
    "Finding",
    "HubOptions",
    "KernelReport",
    "LoadedRank",
    "MachineError",
    "OutputError",
    "PlanReport",
    "Point",
    "Restored",
    "Shards",
    "SourceError",
    "UsageError",
    "Verification",
    "convert",
    "diff",
    "download",
    "load_rank",
    "open_shards",
    "plan",
    "reshard",
    "restore",
    "verify",
    "verify_kernel",
]

_HOMES = {
    "Verification": "marlin_convert.checks.findings",
    "Shards": "marlin_convert.shards.reader",
    "Restored": "marlin_convert.pipeline.restored",
    "Point": "marlin_convert.progress",
    "PlanReport": "marlin_convert.planning.plan_report",
    "LoadedRank": "marlin_convert.engines.torch_loader",
    "KernelReport": "marlin_convert.checks.kernel.kernel_report",
    "Finding": "marlin_convert.checks.findings",
    "Downloaded": "marlin_convert.checkpoint.download",
    "Differences": "marlin_convert.documents.results",
    "Converted": "marlin_convert.pipeline.run",
    "ConvertError": "marlin_convert.errors",
    "HubOptions": "marlin_convert.checkpoint.hub_files",
    "MachineError": "marlin_convert.errors",
    "OutputError": "marlin_convert.errors",
    "SourceError": "marlin_convert.errors",
    "UsageError": "marlin_convert.errors",
    "convert": "marlin_convert.pipeline.run",
    "diff": "marlin_convert.shards.compare",
    "download": "marlin_convert.checkpoint.download",
    "load_rank": "marlin_convert.engines.torch_loader",
    "open_shards": "marlin_convert.shards.reader",
    "plan": "marlin_convert.pipeline.preview",
    "reshard": "marlin_convert.pipeline.reshard",
    "restore": "marlin_convert.pipeline.restore",
    "verify": "marlin_convert.checks.verify",
    "verify_kernel": "marlin_convert.checks.kernel.verify_kernel",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return _version()
    if name not in _HOMES:
        raise AttributeError(f"module 'marlin_convert' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])


def _version() -> str:
    """That of the installed package. AttributeError where the source tree is used without being installed."""
    from marlin_convert.extras import package_version

    if (version := package_version("marlin-convert")) is None:
        raise AttributeError("marlin-convert is not installed, so it has no version")
    return version
