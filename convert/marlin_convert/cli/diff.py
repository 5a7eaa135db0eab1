"""`marlin-convert diff`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from marlin_convert.cli import output
from marlin_convert.cli.by_file import examples
from marlin_convert.cli.options import json_option
from marlin_convert.words import count, printable, ranges

if TYPE_CHECKING:
    from marlin_convert.documents.results import Differences, DifferingPart

#: differences that are printed
LISTED = 50


@click.command(
    "diff",
    short_help="Show what differs between two converted folders.",
    epilog=examples("diff old-tp8 new-tp8", "diff k26-tp8 k26-tp8-ep8 --json"),
)
@click.argument("one", type=click.Path(path_type=Path))
@click.argument("other", type=click.Path(path_type=Path))
@json_option
def command(one: Path, other: Path, as_json: bool) -> None:
    """Show which shards, tensors and experts of two converted folders differ, by their digests alone.

    Folders of different splits are compared by the source tensors that they were made from. Exit code 1 where
    anything differs. No shard is read: whether the files are as their manifests say is for `verify`.
    """
    from marlin_convert.shards.compare import diff

    found = diff(one, other)
    if as_json:
        output.document(found)
    else:
        _print(found)
    if not found.same:
        raise click.exceptions.Exit(1)


def _print(found: Differences) -> None:
    what = count(found.compared, found.by.removesuffix("s"))
    if found.same:
        output.result(f"same: {what} compared by digest; what is in the files was not read")
        return
    for part in found.parts[:LISTED]:
        output.result(_line(part))
    if len(found.parts) > LISTED:
        output.result(f"and {len(found.parts) - LISTED:,} more: --json lists all")
    output.result(
        f"different: {count(len(found.parts), 'difference')} in {what} compared by digest; what is in the"
        " files was not read"
    )


def _line(part: DifferingPart) -> str:
    tensor = f": {printable(part.tensor)}" if part.tensor else ""
    experts = ""
    if part.experts is not None:
        experts = f", {'expert' if len(part.experts) == 1 else 'experts'} {ranges(part.experts)}"
    keys = f" in {', '.join(part.keys)}" if part.keys else ""
    return f"{printable(part.path)}{tensor}{experts} {part.what}{keys}"
