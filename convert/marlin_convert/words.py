"""How values are put before people: sizes, and text out of files that may be hostile."""

from __future__ import annotations


def gigabytes(size: float) -> str:
    """Bytes for people."""
    if size < 1000:
        return f"{size:.0f} B"
    for unit in ("kB", "MB"):
        size /= 1000
        if size < 1000:
            return f"{size:.1f} {unit}"
    return f"{size / 1000:.1f} GB"


def printable(text: str, keep: str = "") -> str:
    """Text with what a reader would obey instead of show, as names out of a file may have it, written out:
    control characters, marks of direction, halves of surrogates.
    """
    return "".join(
        char if char.isprintable() or char in keep else char.encode("unicode_escape").decode()
        for char in text
    )
