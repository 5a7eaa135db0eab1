"""`marlin-convert bench`: one bench a file, `marlin_convert/cli/bench_<name>.py`."""

from __future__ import annotations

import click

from marlin_convert.cli.by_file import CommandsByFile


@click.group(
    "bench",
    cls=CommandsByFile,
    names=("layout", "convert", "kernel", "load"),
    place="marlin_convert.cli.bench_",
)
def command() -> None:
    """Measure this machine: medians, and ratios within one run."""
