"""Kimi-K2 checkpoints to ready-to-mmap per-GPU shards in the Marlin MoE layout.

The command line's verbs as functions: `plan`, `download`, `convert`, `verify`, and `open_shards` to read the
result; `HubOptions` says how a repository of the hub is read. They are loaded when first used, so that
`import marlin_convert` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from marlin_convert.checkpoint.download import download
    from marlin_convert.checkpoint.hub_files import HubOptions
    from marlin_convert.checks.verify import verify
    from marlin_convert.pipeline.convert import convert
    from marlin_convert.planning.report import plan
    from marlin_convert.shards.reader import open_shards

__all__ = ["HubOptions", "convert", "download", "open_shards", "plan", "verify"]

_HOMES = {
    "HubOptions": "marlin_convert.checkpoint.hub_files",
    "convert": "marlin_convert.pipeline.convert",
    "download": "marlin_convert.checkpoint.download",
    "open_shards": "marlin_convert.shards.reader",
    "plan": "marlin_convert.planning.report",
    "verify": "marlin_convert.checks.verify",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'marlin_convert' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
