"""`marlin-convert convert`."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from marlin_convert.cli import display, output, streams
from marlin_convert.cli.by_file import examples
from marlin_convert.cli.options import (
    hub_options,
    json_option,
    log_option,
    machine_options,
    parallel_options,
    staging_options,
)
from marlin_convert.errors import UsageError
from marlin_convert.words import count, gigabytes

if TYPE_CHECKING:
    from marlin_convert.pipeline.run import Converted

#: files named before they are removed
LISTED = 10


@click.command(
    "convert",
    short_help="Convert a checkpoint; run again, it continues.",
    epilog=examples(
        "convert checkpoint out-tp8 --tp 8",
        "convert checkpoint out-tp8 --tp 8 --ep 8 --dry-run",
        "convert org/name out-tp8 --tp 8 --free-source --log-json",
        "convert checkpoint one-layer --tp 8 --layers 1 --ranks 0",
    ),
)
@click.argument("source")
@click.argument("out")
@parallel_options
@machine_options
@click.option(
    "--verify",
    type=click.Choice(["exact", "kernel", "none"]),
    default="exact",
    show_default=True,
    help="exact: prove each buffer before it is written; kernel: also run the kernel on each layer (GPU).",
)
@hub_options
@staging_options
@click.option("--max-workers", type=click.IntRange(1), help="Files fetched at a time [default: 2].")
@click.option(
    "--overwrite",
    is_flag=True,
    help="Where OUT holds another conversion, remove it and start; what this one has made is kept.",
)
@click.option("--yes", is_flag=True, help="With --overwrite: remove without asking.")
@click.option("--dry-run", is_flag=True, help="Convert nothing: show what `plan` shows, with its exit code.")
@json_option
@log_option
def command(
    source: str,
    out: str,
    tp: int,
    ep: int,
    attn_tp: int | None,
    pp: int,
    layers: tuple[int, ...] | None,
    ranks: tuple[int, ...] | None,
    layout: str | None,
    threads: int | None,
    memory: int | None,
    verify: str,
    direct: bool,
    revision: str | None,
    token: str | None,
    cache_dir: str | None,
    local_dir: str | None,
    free_source: bool,
    max_workers: int | None,
    overwrite: bool,
    yes: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Convert the checkpoint SOURCE, a folder or a hub repository org/name, to shards for TP ranks in OUT.

    Run it again after any failure or interruption: it continues where it was. Files of a repository come
    while earlier ones are converted, and are compared with what the hub publishes.
    """
    from marlin_convert.checkpoint.hub_files import HubOptions
    from marlin_convert.documents.results import ConvertResult
    from marlin_convert.pipeline.run import convert

    if yes and not overwrite:
        raise click.UsageError("--yes goes with --overwrite: without it nothing is removed")
    begin = time.monotonic()
    hub = HubOptions(revision, token, cache_dir, local_dir, free_source, max_workers)
    what: dict[str, Any] = {
        "tp": tp,
        "ep": ep,
        "attn_tp": attn_tp,
        "pp": pp,
        "layers": layers,
        "ranks": ranks,
        "layout": layout,
        "threads": threads,
    }
    what |= {"memory": memory, "verify": verify, "overwrite": overwrite, "hub": hub}
    if dry_run:
        from marlin_convert.cli.plan import show
        from marlin_convert.pipeline.preview import plan

        show(plan(source, out, **what), every=False, as_json=as_json)
        return
    with (
        display.progress(hub=True) as fetch_progress,
        display.progress("stopping: finishing what is being written") as progress,
    ):
        report = convert(
            source,
            out,
            **what,
            direct_io=direct,
            progress=progress,
            fetch_progress=fetch_progress,
            confirm=_name if yes else _confirm,
        )
    seconds = time.monotonic() - begin
    if as_json:
        times = report.stages.times()
        output.document(
            ConvertResult(
                str(report.out),
                report.action,
                report.made,
                report.made_bytes,
                report.found,
                report.output_bytes,
                seconds,
                times,
            )
        )
        return
    _show(report, out, verify, seconds)


def _show(report: Converted, out: str, verify: str, seconds: float) -> None:
    """What was made, in words."""
    there = f"{count(report.found, 'unit')}, {gigabytes(report.output_bytes)}"
    if report.action == "done":
        output.result(
            f"{out} is finished already: {there}; what is in the shards was not looked at: marlin-convert"
            f" verify {out}"
        )
        return
    if report.made == 0:
        output.result(
            f"{out} is finished: its documents were written; {there}, were there and were not read again:"
            f" marlin-convert verify {out}"
        )
        return
    found = (
        f" ({report.found} of {report.made + report.found} were there and were not read again)"
        if report.found
        else ""
    )
    proof = {
        "none": "not proven: run verify",
        "exact": "each proven exact before it was written",
        "kernel": "each proven exact, and by the kernel",
    }[verify]
    output.result(
        f"{out}: {count(report.made, 'unit')} made{found}, {gigabytes(report.made_bytes)} in"
        f" {seconds:.1f} s, {proof}"
    )
    output.result(f"check what is on the disk:  marlin-convert verify {out}")


def _name(files: Sequence[Path]) -> bool:
    """Name what --overwrite removes."""
    size = sum(path.stat().st_size for path in files)
    output.message(f"--overwrite removes {count(len(files), 'file')}, {gigabytes(size)}:")
    for path in files[:LISTED]:
        output.message(f"  {path}")
    if len(files) > LISTED:
        output.message(f"  and {len(files) - LISTED} more")
    return True


def _confirm(files: Sequence[Path]) -> bool:
    """Name what --overwrite removes and ask. Raises UsageError where nobody can be asked."""
    _name(files)
    if streams.json_lines() or not sys.stdin.isatty():
        raise UsageError("nothing was removed, as nobody can be asked here; say so with --overwrite --yes")
    try:
        return click.confirm("Remove them?", err=True)
    except click.Abort:
        output.message("")  # the line of the question ends
        raise
    except OSError as error:
        raise UsageError(f"nothing was removed, as the question cannot be shown: {error.strerror}") from error
