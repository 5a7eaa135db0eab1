"""How values are put before people: numbers, sizes, times, and text out of files that may be hostile."""

from __future__ import annotations

from collections.abc import Sequence


def count(number: int, one: str, many: str | None = None) -> str:
    """A number of things, such as `1 file` or `1,024 files`; `many` where that is not the word and an s."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def some(names: Sequence[str]) -> str:
    """The first three names, and how many there are besides."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3:,} more" if len(names) > 3 else "")


def ranges(numbers: Sequence[int]) -> str:
    """Sorted numbers as the command line takes them: 0,3-5."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ",".join("-".join(str(end) for end in run) for run in runs)


def gigabytes(size: float) -> str:
    """Bytes for people."""
    if size < 1000:
        return f"{size:.0f} B"
    for unit in ("kB", "MB"):
        size /= 1000
        if size < 1000:
            return f"{size:.1f} {unit}"
    return f"{size / 1000:.1f} GB"


def duration(seconds: float) -> str:
    """A time for people."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def printable(text: str, keep: str = "") -> str:
    """Text with what a reader would obey instead of show, as names out of a file may have it, written out:
    control characters, marks of direction, halves of surrogates.
    """
    return "".join(
        char if char.isprintable() or char in keep else char.encode("unicode_escape").decode()
        for char in text
    )
