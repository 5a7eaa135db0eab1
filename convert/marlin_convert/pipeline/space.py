"""Whether the disk can hold what is still to be written."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from marlin_convert.checkpoint.fetcher import Fetcher
from marlin_convert.errors import MachineError
from marlin_convert.planning.output_plan import OutputUnit
from marlin_convert.storage.files import existing, free_space

#: room for indexes, manifest, headers of the source and other small files
SMALL_FILES = 64 << 20


def refuse_full_disk(out: Path, left: Sequence[OutputUnit], fetcher: Fetcher) -> None:
    """Raise MachineError before anything is written where the disk cannot hold the units that are left, and
    the source files that the fetcher brings.
    """
    needed = SMALL_FILES + sum(unit.file_size * len(unit.ranks) for unit in left)
    place, room = existing(fetcher.place or out), fetcher.room
    stage = (
        ""
        if place.samefile(out) or not room
        else "use --free-source to keep only a few source files at a time, or "
    )
    if place.stat().st_dev == out.stat().st_dev:
        _refuse(out, needed + room, room, stage)
    else:
        _refuse(out, needed, 0, stage)
        _refuse(place, room, room, stage)


def _refuse(folder: Path, size: int, source: int, hint: str) -> None:
    """Raise where `size` bytes, `source` of them source files, do not fit."""
    free = free_space(folder)
    if free < size:
        files = f", {_bytes(source)} of it source files," if source else ""
        raise MachineError(
            f"{folder}: {_bytes(size)}{files} are still to be written but only {_bytes(free)} are free;"
            f" {hint}free some space, then run the same command again to continue"
        )


def _bytes(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 10**9 else f"{-(-size // 10**6)} MB"
