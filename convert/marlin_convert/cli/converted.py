"""What `convert` and `reshard` have in common: how a run is made, asked about, and told of."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from marlin_convert.cli import output, streams
from marlin_convert.cli.options import spread_options
from marlin_convert.errors import UsageError
from marlin_convert.shares import Share, said
from marlin_convert.words import count, gigabytes

if TYPE_CHECKING:
    from marlin_convert.pipeline.conversion import Confirm, Converted

F = TypeVar("F", bound=Callable[..., Any])

#: files named before they are removed
LISTED = 10
PROOF = {
    "none": "not proven: run verify",
    "exact": "each proven exact before it was written",
    "kernel": "each proven exact, and by the kernel",
}


def run_options(function: F) -> F:
    """--verify --overwrite --yes, and those of `spread_options`."""
    for option in reversed(
        (
            click.option(
                "--verify",
                type=click.Choice(["exact", "kernel", "none"]),
                default="exact",
                show_default=True,
                help=(
                    "exact: prove each buffer before it is written; kernel: also run the kernel on each layer"
                    " (GPU)."
                ),
            ),
            click.option(
                "--overwrite",
                is_flag=True,
                help=(
                    "Where another conversion is in place, remove it and start; what this one has made is"
                    " kept."
                ),
            ),
            click.option("--yes", is_flag=True, help="With --overwrite: remove without asking."),
        )
    ):
        function = option(function)
    return spread_options(function)


def confirm(overwrite: bool, yes: bool) -> Confirm:
    """What is asked before --overwrite removes anything. Raises UsageError."""
    if yes and not overwrite:
        raise click.UsageError("--yes goes with --overwrite: without it nothing is removed")
    return _name if yes else _confirm


def show(report: Converted, what: Mapping[str, Any], begin: float, as_json: bool) -> None:
    """What a run did that began at `begin`, of the monotonic clock, asked for with these options."""
    seconds = time.monotonic() - begin
    if as_json:
        from marlin_convert.documents.results import ConvertResult

        output.document(
            ConvertResult(
                str(report.out),
                report.action,
                report.made,
                report.made_bytes,
                report.found,
                report.output_bytes,
                seconds,
                report.stages.times(),
                report.waiting,
            )
        )
        return
    if what["shard"] is not None and (report.waiting or report.action != "done"):
        _show_share(report, Share.of(what["shard"]), what["verify"], seconds)
    else:
        _show(report, what["verify"], seconds)


def _show_share(report: Converted, share: Share, verify: str, seconds: float) -> None:
    """What was made of a share, and whether OUT is finished with it, in words."""
    made = f"{count(report.made, 'unit')} made, {gigabytes(report.made_bytes)} in {seconds:.1f} s"
    found = f" ({report.found} of {report.made + report.found} were there)" if report.found else ""
    mine = f"{made}{found}, {PROOF[verify]}" if report.made + report.found else "no unit is in it"
    output.result(f"{report.out}, share {share}: {mine}")
    if report.waiting:
        output.result(f"not finished: units are missing of {said(report.waiting, share.count)}")
    else:
        output.result(f"all shares are made, and {report.out} is finished")
        output.result(f"check what is on the disk:  marlin-convert verify {report.out}")


def _show(report: Converted, verify: str, seconds: float) -> None:
    """What was made, in words."""
    out, there = report.out, f"{count(report.found, 'unit')}, {gigabytes(report.output_bytes)}"
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
    output.result(
        f"{out}: {count(report.made, 'unit')} made{found}, {gigabytes(report.made_bytes)} in"
        f" {seconds:.1f} s, {PROOF[verify]}"
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
