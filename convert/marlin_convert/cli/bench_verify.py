"""`marlin-convert bench verify`."""

from __future__ import annotations

from pathlib import Path

import click

from marlin_convert.cli import output
from marlin_convert.cli.by_file import examples
from marlin_convert.cli.options import FOLDER, json_option, numbers, rounds_option


@click.command(
    "verify",
    short_help="verify against plain reads of the same files.",
    epilog=examples(
        "bench verify out-tp8 --rounds 3",
        "bench verify out-tp8 --layers 1",
    ),
)
@click.argument("out", type=FOLDER)
@click.option("--layers", type=numbers, help="Only these layers [default: all].")
@rounds_option(5)
@click.option("--threads", type=click.IntRange(1), help="Passed on to verify.")
@json_option
def command(
    out: Path, layers: tuple[int, ...] | None, rounds: int, threads: int | None, as_json: bool
) -> None:
    """`verify` against plain parallel reads of the same shards, in turn, each with the files out of the page
    cache, and past it where the file system can.
    """
    from marlin_convert.bench.verification import bench_verification

    report = bench_verification(out, layers=layers, threads=threads, rounds=rounds, say=output.message)
    if as_json:
        output.document(report)
        return
    past = "past" if report.direct else "through"
    output.result(
        f"{report.files} shard files, {rounds} rounds, medians; plain reads with {report.readers} threads,"
        f" {past} the page cache"
    )
    rows = [
        (
            way.name,
            f"{way.bytes / 1e9:.2f}",
            f"{way.resident:.0%}",
            f"{way.median:.2f}",
            f"{way.least:.2f}-{way.most:.2f}",
            f"{way.gb_per_s:.2f}",
            "-" if way.peak_anonymous is None else f"{way.peak_anonymous / 2**30:.2f}",
        )
        for way in report.ways
    ]
    output.table(("way", "GB", "in page cache", "seconds", "spread", "GB/s", "peak GiB"), rows)
    output.result(f"verify reaches {report.of_plain:.2f} of the rate of plain reads, median of the rounds")
