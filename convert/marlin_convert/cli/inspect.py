"""`marlin-convert inspect`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from msgspec import Struct, to_builtins

from marlin_convert.cli import output
from marlin_convert.cli.options import json_option, rank_option
from marlin_convert.cli.report import report_option, reporter
from marlin_convert.words import gigabytes


@click.command("inspect")
@click.argument("path", type=click.Path(exists=True, path_type=Path))
@click.option(
    "--tensor", help="Show one tensor: values, and for packed experts the histogram of their 16 codes."
)
@rank_option("Whose tensor, where PATH is a converted folder.")
@report_option
@json_option
def command(path: Path, tensor: str | None, rank: int, report: Path | None, as_json: bool) -> None:
    """Show what is in a converted folder or in one .safetensors file."""
    from marlin_convert.report.inspect_page import inspect_page
    from marlin_convert.shards import inspect

    if report is not None and (tensor or not path.is_dir()):
        raise click.UsageError("--report is for a converted folder as a whole")
    found: Struct
    if path.is_dir():
        if rank and not tensor:
            raise click.UsageError("--rank goes with --tensor: without it the whole folder is shown")
        written = reporter(report, "inspect", str(path))
        with written.working():
            found = (
                inspect.describe_tensor_of(path, rank, tensor) if tensor else inspect.describe_folder(path)
            )
        written.finish(found, inspect_page)
    else:
        found = inspect.describe_tensor_in(path, tensor) if tensor else inspect.describe_file(path)
    if as_json:
        output.document(found)
    else:
        _print(to_builtins(found))


def _print(found: dict[str, Any]) -> None:
    for key, given in found.items():
        value = list(given) if isinstance(given, tuple) else given
        if isinstance(value, list) and value and isinstance(value[0], dict):
            output.result(f"{key}:")
            output.table(
                ["  " + str(k) if i == 0 else str(k) for i, k in enumerate(value[0])],
                [["  " + str(v) if i == 0 else v for i, v in enumerate(row.values())] for row in value],
            )
        elif isinstance(value, dict):
            output.result(f"{key}: " + ", ".join(f"{k} {v}" for k, v in value.items()))
        elif key.endswith("bytes") and isinstance(value, int):
            output.result(f"{key}: {value:,} ({gigabytes(value)})")
        else:
            output.result(f"{key}: {value}")
