"""`marlin-convert bench load`."""

from __future__ import annotations

from pathlib import Path

import click

from marlin_convert.cli import output
from marlin_convert.cli.by_file import examples
from marlin_convert.cli.options import FOLDER, json_option, rank_option, rounds_option


@click.command(
    "load",
    short_help="One rank to the GPU, each way.",
    epilog=examples(
        "bench load out-tp8 --rank 0 --rounds 3",
    ),
)
@click.argument("out", type=FOLDER)
@click.option(
    "--source", help="The published checkpoint: also load it as engines do today, repacking on the GPU."
)
@rank_option("Whose shards.")
@rounds_option(9, "Warm rounds, and as many cold ones; of the engine's way a third as many.")
@click.option(
    "--threads",
    type=click.IntRange(1),
    help="Threads that read. [default: load_rank's own; for limits and engine the cores, at most 16]",
)
@json_option
def command(
    out: Path, source: str | None, rank: int, rounds: int, threads: int | None, as_json: bool
) -> None:
    """One rank to the GPU, warm and cold, against the machine's limits and against what engines do today.
    Needs a GPU.
    """
    from marlin_convert.bench.load import bench_load

    report = bench_load(out, source, rank=rank, rounds=rounds, threads=threads, say=output.message)
    if as_json:
        output.document(report)
        return
    output.result(
        f"rank {rank} of {report.tp} (ep {report.ep}): {report.bytes / 1e9:.2f} GB, {report.threads} threads"
    )
    output.table(("limit", "GB/s"), [(name, f"{rate:.1f}") for name, rate in report.limits.items()])
    rows = []
    for row in report.rows:
        steps = ", ".join(f"{step} {seconds:.3f}" for step, seconds in row.steps.items())
        if row.first is not None:
            steps += f"; the first time {row.first['total']:.3f}"
        limit = "-" if row.of_limit is None else f"{row.of_limit:.2f} of {row.limit}"
        rows.append((row.name, row.temperature, f"{row.seconds:.3f}", f"{row.gb_per_s:.1f}", limit, steps))
    output.table(("way", "files", "seconds", "GB/s", "of its limit", "steps"), rows)
