"""`marlin-convert bench`: one bench a file, `marlin_convert/cli/bench_<name>.py`."""

from __future__ import annotations

from importlib import import_module

import click

BENCHES = ("layout", "convert", "kernel", "load")


class Benches(click.Group):
    """Finds benches by file name, so that one costs only its own imports."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The benches."""
        return list(BENCHES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of `marlin_convert/cli/bench_<name>.py`."""
        if cmd_name not in BENCHES:
            return None
        command = import_module(f"marlin_convert.cli.bench_{cmd_name}").command
        assert isinstance(command, click.Command)
        return command


@click.group("bench", cls=Benches)
def command() -> None:
    """Measure this machine: medians, and ratios within one run."""
