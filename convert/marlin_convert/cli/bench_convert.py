"""`marlin-convert bench convert`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from marlin_convert.cli import output
from marlin_convert.cli.by_file import examples
from marlin_convert.cli.options import FOLDER, json_option, rounds_option

if TYPE_CHECKING:
    from marlin_convert.documents.provenance import Stage


@click.command(
    "convert",
    short_help="Conversion against cp on the same disk.",
    epilog=examples(
        "bench convert --dir /data --rounds 3",
        "bench convert --dir /data --rounds 3 --verb restore --variants all",
    ),
)
@click.option(
    "--verb",
    type=click.Choice(["convert", "restore", "reshard"]),
    default="convert",
    show_default=True,
    help="What is measured; restore and reshard of a folder that is converted first.",
)
@click.option(
    "--dir",
    "folder",
    type=FOLDER,
    default=".",
    show_default=True,
    help="Where some GB are written, and removed: a folder on the disk to measure.",
)
@click.option("--source", type=FOLDER, help="A checkpoint to use instead of making one.")
@click.option(
    "--layers",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="MoE layers of full K2.6 width to make.",
)
@click.option(
    "--experts",
    type=click.IntRange(8),
    default=96,
    show_default=True,
    help="Experts of each (384 in K2.6; 25 MB each).",
)
@rounds_option(9)
@click.option("--tp", type=click.IntRange(1), default=8, show_default=True, help="Ranks in all.")
@click.option(
    "--ep", type=click.IntRange(1), default=1, show_default=True, help="Groups the experts are split over."
)
@click.option("--to-tp", type=click.IntRange(1), help="What reshard makes [default: --tp].")
@click.option("--to-ep", type=click.IntRange(1), help="The same [default: tp where --ep is 1, else 1].")
@click.option("--threads", type=click.IntRange(1), help="Passed on.")
@click.option("--memory", help="Passed on.")
@click.option(
    "--variants",
    default="none,exact,restore",
    show_default=True,
    help="Of none, exact, restore; the same with ', ordinary I/O' behind; or all.",
)
@json_option
def command(
    folder: Path,
    source: Path | None,
    variants: str,
    threads: int | None,
    memory: str | None,
    as_json: bool,
    **settings: Any,
) -> None:
    """Conversion against `cp` of the checkpoint on the same disk, both cold and with fsync, rounds
    interleaved. With --verb the way back, or to another split.
    """
    from marlin_convert.bench.conversion import VERBS, bench_conversion
    from marlin_convert.documents.bench import ConversionSettings

    known = [variant.name for variant in VERBS[settings["verb"]].variants]
    names = known if variants == "all" else [name for name in known if name in variants.split(",")]
    if not names:
        raise click.UsageError("--variants names none of: " + "; ".join(known))
    options = ["--threads", str(threads)] if threads else []
    options += ["--memory", memory] if memory else []
    report = bench_conversion(
        folder,
        ConversionSettings(**settings),
        source=source,
        variants=names,
        options=options,
        say=output.message,
    )
    if as_json:
        output.document(report)
        return
    output.result(f"{report.bytes / 1e9:.2f} GB, {report.settings.rounds} rounds, medians")
    rows = [
        (
            entry.name,
            f"{entry.median:.2f}",
            f"{entry.least:.2f}-{entry.most:.2f}",
            f"{entry.gb_per_s:.2f}",
            f"{entry.ratio_to_cp:.2f}",
            "-" if entry.peak_anonymous is None else f"{entry.peak_anonymous / 2**30:.2f}",
        )
        for entry in report.variants
    ]
    output.table(("variant", "seconds", "spread", "GB/s", "of cp", "peak GiB"), rows)
    for entry in report.variants:
        if entry.stages is not None:
            stages = (
                f"{stage} {work.seconds:.1f} s ({_rate(work)})"
                for stage, work in entry.stages.items()
                if work.bytes
            )
            output.result(f"{entry.name}: summed over threads: " + ", ".join(stages))


def _rate(work: Stage) -> str:
    return f"{work.bytes / max(work.seconds, 1e-9) / 1e9:.1f} GB/s"
