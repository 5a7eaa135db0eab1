"""What verbs print: results on stdout, progress and messages on stderr."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from msgspec import Struct

from marlin_convert.cli import streams
from marlin_convert.documents.codec import write
from marlin_convert.progress import Progress
from marlin_convert.words import printable


def result(text: str) -> None:
    """A line of the result. Raises MachineError where it cannot be written."""
    streams.print_line(text)


def document(value: Struct) -> None:
    """A result as JSON. Raises MachineError where it cannot be written."""
    streams.print_line(write(value, indent=1).decode())


def message(text: str) -> None:
    """Something to know that is not the result."""
    streams.say(text)


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Rows in columns; numbers to the right."""
    cells = [[printable(str(cell)) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in [list(header), *cells]) for i in range(len(header))]
    right = [bool(rows) and all(isinstance(row[i], (int, float)) for row in rows) for i in range(len(header))]
    for row in [list(header), *cells]:
        line = "  ".join(
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(row, widths, right, strict=True)
        )
        streams.print_line(line.rstrip())


@contextmanager
def progress_bar(what: str, unit: str = "B", hub: bool = False) -> Iterator[Progress]:
    """One bar on stderr, off where that is no terminal; yields `progress(done, total)`, with whose first call
    it appears.

    A bar for the hub is off with HF_HUB_DISABLE_PROGRESS_BARS, too.
    """
    from tqdm import tqdm

    bar: Any = None

    def progress(done: int, total: int) -> None:
        with suppress(OSError):  # a terminal that has gone
            show(done, total)

    def show(done: int, total: int) -> None:
        nonlocal bar
        if bar is None:
            off = not sys.stderr.isatty() or (hub and _hub_bars_off())
            bar = tqdm(
                desc=what, unit=unit, unit_scale=unit == "B", disable=off, file=sys.stderr, dynamic_ncols=True
            )
        if bar.total != total:
            bar.total = total
        bar.update(done - bar.n)

    try:
        yield progress
    finally:
        if bar is not None:
            with suppress(OSError):
                bar.close()


def _hub_bars_off() -> bool:
    from huggingface_hub.constants import HF_HUB_DISABLE_PROGRESS_BARS

    return HF_HUB_DISABLE_PROGRESS_BARS is True
