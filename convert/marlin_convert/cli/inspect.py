"""`marlin-convert inspect`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from msgspec import Struct, to_builtins

from marlin_convert.cli import output
from marlin_convert.cli.by_file import examples
from marlin_convert.cli.options import json_option, rank_option
from marlin_convert.cli.report import report_option, reporter
from marlin_convert.words import gigabytes, ranges, some


@click.command(
    "inspect",
    short_help="Show what is in a converted folder or a file.",
    epilog=examples(
        "inspect out-tp8",
        "inspect out-tp8/rank-03-of-08/layer-001.safetensors",
        "inspect out-tp8 --rank 3 --tensor language_model.lm_head.weight --json",
    ),
)
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
    if path.is_dir() and tensor:
        found = inspect.describe_tensor_of(path, rank, tensor)
    elif path.is_dir():
        if rank:
            raise click.UsageError("--rank goes with --tensor: without it the whole folder is shown")
        written = reporter(report, "inspect", str(path))
        with written.working():
            found = folder = inspect.describe_folder(path)
        written.finish(folder, inspect_page)
    else:
        found = inspect.describe_tensor_in(path, tensor) if tensor else inspect.describe_file(path)
    if as_json:
        output.document(found)
        return
    shown = to_builtins(found)
    if lost := shown.get("missing"):
        shown["missing"] = f"{some(lost)} (gone or of another size); marlin-convert verify {path} says more"
    else:
        shown.pop("missing", None)
    if "checks" in shown:
        shown["checks"] += " while converting"
    _print(shown)


def _print(found: dict[str, Any]) -> None:
    for key, given in found.items():
        value = list(given) if isinstance(given, tuple) else given
        if isinstance(value, list) and value and isinstance(value[0], dict):
            output.result(f"{_name(key)}:")
            header = [_name(each) for each in value[0]]
            rows = [[_cell(each, cell) for each, cell in row.items()] for row in value]
            output.table(["  " + header[0], *header[1:]], [[f"  {row[0]}", *row[1:]] for row in rows])
        elif isinstance(value, dict):
            parts = (f"{_name(each)} {_text(each, part)}" for each, part in value.items())
            output.result(f"{_name(key)}: {', '.join(parts)}")
        else:
            output.result(f"{_name(key)}: {_text(key, value)}")


def _name(key: str) -> str:
    """A key of the JSON for people."""
    return key.replace("_", " ")


def _cell(key: str, value: object) -> object:
    """What a table shows of a value: whole numbers stand to the right."""
    return value if isinstance(value, int) else _text(key, value)


def _text(key: str, value: object) -> str:
    """A value for people."""
    if key.endswith("bytes") and isinstance(value, int):
        return f"{value:,} ({gigabytes(value)})"
    if key == "share" and isinstance(value, float):
        return f"{value:.4%}"
    if key == "shape" and isinstance(value, (list, tuple)):
        return "x".join(map(str, value))
    if key in ("ranks", "layers") and isinstance(value, (list, tuple)):
        return f"{ranges(value)} ({len(value)})"
    return str(value)
