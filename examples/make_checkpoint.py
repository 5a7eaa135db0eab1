"""Makes Kimi-K2 checkpoints to try the converter on.

python examples/make_checkpoint.py small DIR      a few megabytes, every value known beforehand
python examples/make_checkpoint.py layers DIR     MoE layers of full size, 9.8 GB each, to measure with
python examples/make_checkpoint.py standin DIR    all of Kimi-K2.6 without its data: 64 sparse files
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import click

# the maker is what the tests are built on; this is a command line for it
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

from checkpoints import FULL, Checkpoint, Form, Order, make_layers, make_small, make_standin
from checkpoints.names import ShapeDtype

_FOLDER = click.argument("folder", type=click.Path(path_type=Path, file_okay=False))
_ORDER = click.option(
    "--order",
    type=click.Choice(get_args(Order)),
    default="reference",
    show_default=True,
    help="Order of the data.",
)
_SEED = click.option("--seed", type=int, default=0, show_default=True)


@click.group()
def main() -> None:
    """Makes Kimi-K2 checkpoints to try the converter on."""


@main.command()
@_FOLDER
@click.option("--form", type=click.Choice(get_args(Form)), default="k26", show_default=True)
@_ORDER
@click.option("--split-layer", is_flag=True, help="Put the first MoE layer in two files.")
@click.option("--shape-dtype", type=click.Choice(get_args(ShapeDtype)), default="I32", show_default=True)
@_SEED
@click.option("--experts", type=click.IntRange(1), default=16, show_default=True)
@click.option(
    "--layers", type=click.IntRange(1), default=3, show_default=True, help="The first one is dense."
)
@click.option("--moe-intermediate", type=click.IntRange(32), default=512, show_default=True)
def small(**options: Any) -> None:
    """A checkpoint of a few megabytes whose values encode their coordinates."""
    _report(make_small, **options)


@main.command()
@_FOLDER
@click.option("--layers", type=click.IntRange(1), default=1, show_default=True, help="MoE layers.")
@click.option("--experts", type=click.IntRange(1), default=FULL.experts, show_default=True)
@_ORDER
@_SEED
@click.option("--dense", is_flag=True, help="Add a dense layer before them.")
def layers(**options: Any) -> None:
    """MoE layers of full size with random values."""
    _report(make_layers, **options)


@main.command()
@_FOLDER
def standin(**options: Any) -> None:
    """All of Kimi-K2.6 as sparse files: true headers, no data."""
    _report(make_standin, **options)


def _report(make: Callable[..., Checkpoint], **options: Any) -> None:
    start = time.monotonic()
    try:
        made = make(**options)
    except FileExistsError as error:
        raise click.ClickException(f"{error}: give a new folder") from None
    seconds = time.monotonic() - start
    click.echo(
        f"{made.folder}: {len(made.files)} files, {len(made.tensors):,} tensors, {made.nbytes:,} bytes,"
        f" {seconds:.1f} s"
    )


if __name__ == "__main__":
    main()
