"""`marlin-convert bench layout`."""

from __future__ import annotations

import click

from marlin_convert.cli import output
from marlin_convert.cli.by_file import examples
from marlin_convert.cli.options import json_option, rounds_option


@click.command(
    "layout",
    short_help="One core: repack, inverse, scales, hashing.",
    epilog=examples(
        "bench layout --rounds 3",
    ),
)
@rounds_option(9)
@json_option
def command(rounds: int, as_json: bool) -> None:
    """GB/s of one core: repack, its inverse, scales, against memcpy and hashing in the same run."""
    from marlin_convert.bench.layout import bench_layout

    report = bench_layout(rounds)
    if as_json:
        output.document(report)
        return
    output.table(
        ("shape", "memory", "function", "GB/s", "best"),
        [
            (row.shape, row.memory, row.function, f"{row.gb_per_s:.2f}", f"{row.best_gb_per_s:.2f}")
            for row in report.rows
        ],
    )
