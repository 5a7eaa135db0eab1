"""`marlin-convert bench`: one bench a file, `marlin_convert/cli/bench_<name>.py`."""

from __future__ import annotations

import click

from marlin_convert.cli.by_file import CommandsByFile, examples


@click.group(
    "bench",
    cls=CommandsByFile,
    names=("layout", "convert", "verify", "kernel", "load"),
    place="marlin_convert.cli.bench_",
    short_help="Measure this machine.",
    epilog=examples(
        "bench layout", "bench convert --dir /data", "bench verify out-tp8", "bench load out-tp8 --rank 0"
    ),
)
def command() -> None:
    """Measure this machine: medians, and ratios within one run."""
