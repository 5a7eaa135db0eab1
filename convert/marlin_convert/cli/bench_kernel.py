"""`marlin-convert bench kernel`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from marlin_convert.cli import output
from marlin_convert.cli.by_file import examples
from marlin_convert.cli.options import FOLDER, json_option, kernel_options, rank_option, rounds_option
from marlin_convert.extras import require, require_for_kernel

if TYPE_CHECKING:
    from marlin_convert.documents.bench import KernelBench, KernelRow

HEADER = (
    "tokens",
    "routing",
    "atomic",
    "experts hit",
    "MB",
    "floor ms",
    "w13 ms",
    "w2 ms",
    "of bandwidth",
    "fused ms",
    "with align ms",
    "tokens/s",
)


@click.command(
    "kernel",
    short_help="The kernel on a converted layer, on a GPU.",
    epilog=examples(
        "bench kernel out-tp8 --layer 1 --tokens 1,9",
    ),
)
@click.argument("out", type=FOLDER)
@click.option("--layer", type=click.IntRange(0), required=True, help="A layer with routed experts.")
@rank_option("Whose shard.")
@kernel_options
@rounds_option(30, "Replays of which the median is taken.")
@click.option(
    "--plot",
    "plot_to",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Draw it (.png, .svg; needs matplotlib).",
)
@json_option
def command(
    out: Path,
    plot_to: Path | None,
    as_json: bool,
    **settings: Any,
) -> None:
    """Time the Marlin MoE kernel on a converted layer of one rank: w13, w2 and the fused MoE against the
    bandwidth floor.

    Each time is the median of CUDA-graph replays; successive calls hit other experts, so weights come from
    memory, not from the L2 cache.
    """
    if 0 in settings["tokens"]:
        raise click.UsageError("--tokens: a call has at least one token")
    if plot_to is not None:
        require("matplotlib")  # before minutes of measuring
    require_for_kernel(settings["device"])
    from marlin_convert.bench.kernel import KernelSettings, bench_kernel

    report = bench_kernel(out, KernelSettings(**settings), output.message)
    if plot_to is not None:
        from marlin_convert.bench.kernel_plot import plot

        plot(report, str(plot_to))
    if as_json:
        output.document(report)
        return
    show(report)


def show(report: KernelBench) -> None:
    """Print the table of a report."""
    environment = report.environment
    output.result(
        f"layer {report.layer}, rank {report.rank}, tp {report.tp}, ep {report.ep}:"
        f" {report.local_experts} of {report.experts} experts, hidden {report.hidden}, I"
        f" {report.intermediate}; {environment['provider']} on {environment['gpu'] or 'a CPU'}; memory"
        f" bandwidth {report.memory_bandwidth / 1e12:.3f} TB/s"
    )
    output.table(HEADER, [_cells(row) for row in report.rows])
    for note in report.notes:
        output.result(f"note: {note}")


def _cells(row: KernelRow) -> tuple[object, ...]:
    return (
        row.tokens,
        row.routing,
        "on" if row.use_atomic_add else "off",
        f"{row.experts_hit:.1f}",
        f"{row.bytes / 1e6:.1f}",
        f"{row.floor_ms:.3f}",
        f"{row.w13_ms:.3f}",
        f"{row.w2_ms:.3f}",
        f"{row.bandwidth_share:.0%}",
        f"{row.fused_ms:.3f}",
        f"{row.whole_ms:.3f}",
        f"{row.tokens_per_second:,.0f}",
    )
