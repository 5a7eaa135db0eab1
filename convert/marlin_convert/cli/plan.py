"""`marlin-convert plan`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from marlin_convert.cli import output
from marlin_convert.cli.options import hub_options, json_option, parallel_options
from marlin_convert.words import gigabytes

if TYPE_CHECKING:
    from marlin_convert.planning.output_plan import OutputPlan, OutputUnit
    from marlin_convert.planning.plan_report import PlanReport


@click.command("plan")
@click.argument("source")
@click.argument("out", required=False)
@parallel_options
@hub_options
@click.option("--all", "every", is_flag=True, help="List the tensors of common/ too.")
@json_option
def command(
    source: str,
    out: str | None,
    tp: int,
    ep: int,
    layers: tuple[int, ...] | None,
    ranks: tuple[int, ...] | None,
    layout: str | None,
    revision: str | None,
    token: str | None,
    cache_dir: str | None,
    every: bool,
    as_json: bool,
) -> None:
    """Show what `convert` would write, from headers alone.

    SOURCE is the folder of a published checkpoint, or a hub repository org/name, of which only headers are
    fetched; with OUT the free space there is shown too. Nothing is written.
    """
    from marlin_convert.checkpoint.hub_files import HubOptions
    from marlin_convert.planning.plan_report import plan

    hub = HubOptions(revision, token, cache_dir)
    report = plan(source, out, tp=tp, ep=ep, layers=layers, ranks=ranks, layout=layout, hub=hub)
    if as_json:
        output.document(report.document())
        return
    for group in report.groups():
        _show_group(report.output, group, every)
    _show_totals(report)


def _show_group(made: OutputPlan, group: Sequence[OutputUnit], every: bool) -> None:
    """Units of equal files: how many files, and their tensors."""
    from marlin_convert.planning.plan_report import rule_of
    from marlin_convert.storage.shard_file import is_filler

    first, last = group[0], group[-1]
    name = first.name if first is last else f"{first.name} .. {last.name} ({len(group)} units)"
    output.result(
        f"{name}: {len(first.ranks)} files of {first.file_size:,} bytes each, such as"
        f" {made.path(first, first.ranks[0])}"
    )
    if first.name == "common" and not every:
        tensors = sum(not is_filler(p.spec.name) for p in first.files.tensors)
        output.result(f"  {tensors} tensors that every rank may use, each whole; --all lists them\n")
        return
    rows = [
        (
            p.spec.name,
            rule_of(first, p.spec.name),
            p.spec.dtype,
            "x".join(map(str, p.spec.shape)),
            first.offset(p.spec.name),
            p.spec.size,
        )
        for p in first.files.tensors
    ]
    output.table(
        ("  tensor", "rule", "dtype", "shape", "offset", "bytes"),
        [("  " + row[0], *row[1:]) for row in rows],
    )
    output.result("")


def _show_totals(report: PlanReport) -> None:
    """Padding, source, sizes, and what there is to note."""
    made = report.output
    if (padding := made.padding) is not None:
        output.result(
            f"padding: the experts' slice of {padding.moe_intermediate} is padded to {padding.padded} with"
            " zeros"
        )
    output.result(
        f"copied: {', '.join(report.source.auxiliary) or 'nothing'}; left out:"
        f" {', '.join(report.source.left_out) or 'nothing'}"
    )
    for note in report.notes:
        output.message(f"note: {note}")
    source_size = (
        f"{len(report.source.tensors):,} tensors, {report.source.payload_bytes:,} bytes in"
        f" {len(report.source.headers)} files"
    )
    output.result(f"source: {source_size}")
    if report.source.store.hub_commit is not None:
        said = "" if report.source.folder is None else " (to be proven: convert compares every weight file)"
        output.result("from: {} at commit {}".format(*report.source.store.hub_commit) + said)
    if (fetched := report.fetched()) is not None:
        output.result(
            f"to fetch: {fetched[0]:,} bytes ({gigabytes(fetched[0])}), kept beside the output; with"
            f" --free-source at most {fetched[1]:,} bytes ({gigabytes(fetched[1])}) at a time"
        )
    output.result(
        f"each rank loads {made.rank_bytes():,} bytes ({gigabytes(made.rank_bytes())} of GPU memory for"
        " weights)"
    )
    if report.free is not None and report.free < made.total_bytes:
        output.message(f"note: it does not fit: {gigabytes(made.total_bytes - report.free)} are missing")
    free = "" if report.free is None else f"; {gigabytes(report.free)} are free there"
    output.result(
        f"output: {made.total_bytes:,} bytes ({gigabytes(made.total_bytes)}) in"
        f" {sum(len(u.ranks) for u in made.units)} shard files{free}"
    )
    threads, memory = report.allowance.threads, report.allowance.memory
    output.result(
        f"convert would use {threads.value} threads (by {threads.by}) and {gigabytes(memory.value)} for"
        f" buffers (by {memory.by})"
    )
