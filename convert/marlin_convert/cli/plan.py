"""`marlin-convert plan`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from marlin_convert.cli import output
from marlin_convert.cli.by_file import examples
from marlin_convert.cli.options import hub_options, json_option, parallel_options, staging_options
from marlin_convert.words import count, duration, gigabytes

if TYPE_CHECKING:
    from marlin_convert.planning.output_plan import OutputPlan, OutputUnit
    from marlin_convert.planning.plan_report import PlanReport, Prospect


@click.command(
    "plan",
    short_help="Show what convert would write, and do in OUT.",
    epilog=examples(
        "plan checkpoint --tp 8",
        "plan checkpoint out-tp8 --tp 8",
        "plan org/name out-tp8 --tp 8 --free-source --json",
    ),
)
@click.argument("source")
@click.argument("out", required=False)
@parallel_options
@hub_options
@staging_options
@click.option("--all", "every", is_flag=True, help="List the tensors of common/ too.")
@json_option
def command(
    source: str,
    out: str | None,
    tp: int,
    ep: int,
    attn_tp: int | None,
    pp: int,
    expert_map: str | None,
    layers: tuple[int, ...] | None,
    ranks: tuple[int, ...] | None,
    layout: str | None,
    revision: str | None,
    token: str | None,
    cache_dir: str | None,
    local_dir: str | None,
    free_source: bool,
    every: bool,
    as_json: bool,
) -> None:
    """Show what `convert` would write, from headers alone, and what it would do in OUT. Nothing is converted.

    SOURCE is the folder of a published checkpoint, s3://bucket/prefix in an object store, or a hub repository
    org/name; of the last two only headers are fetched. With OUT this is `convert --dry-run`: it tells the
    time that the disk needs, by a short measurement that writes a file there and removes it, and ends with
    the error and the exit code that `convert` would end with before it begins.
    """
    from marlin_convert.checkpoint.hub_files import HubOptions
    from marlin_convert.pipeline.preview import plan

    hub = HubOptions(revision, token, cache_dir, local_dir, free_source)
    split: dict[str, Any] = {"tp": tp, "ep": ep, "attn_tp": attn_tp, "pp": pp, "expert_map": expert_map}
    made = plan(source, out, **split, layers=layers, ranks=ranks, layout=layout, hub=hub)
    show(made, every, as_json)


def show(report: PlanReport, every: bool, as_json: bool) -> None:
    """Print a plan. Raises what `convert` would refuse with, when all is said."""
    if as_json:
        output.document(report.document())
    else:
        for group in report.groups():
            _show_group(report.output, group, every)
        _show_totals(report)
    if report.refusal is not None:
        raise report.refusal


def _show_group(made: OutputPlan, group: Sequence[OutputUnit], every: bool) -> None:
    """Units of equal files: how many files, and their tensors."""
    from marlin_convert.planning.plan_report import rule_of
    from marlin_convert.storage.shard_file import is_filler

    first, last = group[0], group[-1]
    name = first.name if first is last else f"{first.name} .. {last.name} ({count(len(group), 'unit')})"
    output.result(
        f"{name}: {count(len(first.ranks), 'file')} of {first.file_size:,} bytes, such as"
        f" {made.path(first, first.ranks[0])}"
    )
    if first.name == "common" and not every:
        tensors = sum(not is_filler(p.spec.name) for p in first.files.tensors)
        output.result(f"  {count(tensors, 'tensor')} that every rank may use, each whole; --all lists them\n")
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
    if (slices := made.topology.attn_tp) is not None:
        output.result(f"attention and dense layers: {slices} slices, rank r has slice r % {slices}")
    if (padding := made.padding) is not None:
        output.result(
            f"padding: the experts' slice of {padding.moe_intermediate} is padded to {padding.padded} with"
            " zeros"
        )
    if (placement := made.topology.placement) is not None:
        output.result(
            f"placement: {made.experts} routed experts in {placement.slots} slots of each layer, by the map"
        )
    output.result(
        f"copied: {', '.join(report.source.auxiliary) or 'nothing'}; left out:"
        f" {', '.join(report.source.left_out) or 'nothing'}"
    )
    for note in report.notes:
        output.message(f"note: {note}")
    source_size = (
        f"{len(report.source.tensors):,} tensors, {report.source.payload_bytes:,} bytes in"
        f" {count(len(report.source.headers), 'file')}"
    )
    output.result(f"source: {source_size}")
    if report.source.store.hub_commit is not None:
        said = "" if report.source.folder is None else " (to be proven: convert compares every weight file)"
        output.result("from: {} at commit {}".format(*report.source.store.hub_commit) + said)
    if (fetched := report.fetched()) is not None:
        of_hub = report.source.store.hub_commit is not None
        output.result(
            f"to fetch: {fetched[0]:,} bytes ({gigabytes(fetched[0])}),"
            f"{' kept beside the output; with --free-source' if of_hub else ''} at most {fetched[1]:,} bytes"
            f" ({gigabytes(fetched[1])}) at a time"
        )
    whose = "each rank loads" if made.topology.pp == 1 else "a rank of the largest stage loads"
    output.result(
        f"{whose} {made.rank_bytes():,} bytes ({gigabytes(made.rank_bytes())} of GPU memory for weights)"
    )
    output.result(
        f"output: {made.total_bytes:,} bytes ({gigabytes(made.total_bytes)}) in"
        f" {count(sum(len(u.ranks) for u in made.units), 'shard file')}"
    )
    threads, memory = report.allowance.threads, report.allowance.memory
    output.result(
        f"convert would use {count(threads.value, 'thread')} (by {threads.by}) and {gigabytes(memory.value)}"
        f" for buffers (by {memory.by})"
    )
    if report.prospect is not None:
        _show_prospect(report.prospect, len(made.units), report.source.folder is None)


#: what convert would do in OUT
WORDS = {
    "new": "begin a conversion",
    "continue": "continue what was begun",
    "repair": "make the units again that have lost files",
    "replace": "remove the conversion that is there and begin",
    "done": "do nothing: it is finished already",
}


def _show_prospect(found: Prospect, units: int, fetched: bool) -> None:
    """What convert would do, what it takes on the disk, and how long."""
    output.result(
        f"there convert would {WORDS[found.action]}; {found.units} of {count(units, 'unit')} to make"
    )
    if not found.units:
        return
    more = " and fetched files" if fetched else ""
    output.result(
        f"space: {found.needed:,} bytes ({gigabytes(found.needed)}) with documents{more};"
        f" {gigabytes(found.free)} free"
    )
    rates = [
        f"{what} {gigabytes(rate)}/s"
        for what, rate in (("source", found.read_rate), ("output", found.write_rate))
        if rate is not None
    ]
    if found.seconds is not None:
        output.result(
            f"time: about {duration(found.seconds)} where the disk decides, by a short measurement"
            f" ({', '.join(rates)})"
        )
    elif rates:
        output.result(f"measured shortly: {', '.join(rates)}")
