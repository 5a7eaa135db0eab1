"""`marlin-convert restore`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from marlin_convert.cli import display, output
from marlin_convert.cli.by_file import examples
from marlin_convert.cli.options import json_option, log_option, machine_options
from marlin_convert.words import count, gigabytes, printable

if TYPE_CHECKING:
    from marlin_convert.pipeline.restored import Restored

#: files that are named which could not be restored
LISTED = 10


@click.command(
    "restore",
    short_help="Make the published checkpoint again out of a conversion.",
    epilog=examples("restore k26-tp8 k26", "restore k26-tp8 k26 --json --log-json"),
)
@click.argument("out", type=click.Path(path_type=Path))
@click.argument("folder", type=click.Path(path_type=Path), metavar="DIR")
@machine_options
@json_option
@log_option
def command(
    out: Path, folder: Path, threads: int | None, memory: int | None, direct: bool, as_json: bool
) -> None:
    """Make the published checkpoint again in DIR, out of the converted folder OUT: every file with its name
    and its bytes.

    Run it again after any failure or interruption: it continues. Each tensor is compared with the digest that
    OUT keeps of it, and each file with the sha256 that the hub publishes, where OUT has that, before the file
    gets its name. Nothing that is in DIR is written over. Of a part the files come back that are wholly in
    it, and the others are named.
    """
    from marlin_convert.pipeline.restore import restore

    begin = time.monotonic()
    with display.progress("stopping: finishing what is being written") as progress:
        report = restore(out, folder, threads=threads, memory=memory, direct_io=direct, progress=progress)
    seconds = time.monotonic() - begin
    if as_json:
        output.document(report.document(seconds))
        return
    _show(report, seconds)


def _show(report: Restored, seconds: float) -> None:
    """What was made, in words."""
    proof = "each tensor compared with its digest before the file got its name"
    if report.by_sha256:
        proof += f", {count(report.by_sha256, 'file')} with the published sha256, too"
    found = f"{count(report.found, 'weight file')} {'was' if report.found == 1 else 'were'} there"
    if report.action == "done":
        output.result(f"{report.folder} is restored already: {found}; what is in them was not looked at")
    else:
        output.result(
            f"{report.folder}: {count(report.made, 'weight file')} made, {gigabytes(report.made_bytes)} in"
            f" {seconds:.1f} s{', ' + found if report.found else ''}, {proof}"
        )
    for file in report.missing[:LISTED]:
        output.result(f"not restored: {printable(file.name)}: OUT has not {printable(file.why)}")
    if len(report.missing) > LISTED:
        output.result(
            f"and {len(report.missing) - LISTED:,} more that could not be restored: --json lists all"
        )
    for name in report.not_kept:
        output.result(f"not kept: {printable(name)} lay beside the weights and is in no conversion")
