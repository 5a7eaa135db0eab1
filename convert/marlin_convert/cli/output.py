"""What verbs print: results on stdout, progress and messages on stderr."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from marlin_convert.cli import streams
from marlin_convert.documents.codec import write
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
