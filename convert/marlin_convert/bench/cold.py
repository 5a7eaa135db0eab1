"""The page cache: put files out of it, and show that they are out."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from marlin_convert.errors import MachineError
from marlin_convert.storage.files import open_regular
from marlin_convert.storage.page_cache import can_tell, resident_pages


def evict(paths: Iterable[Path]) -> None:
    """Write files back and drop them from the page cache."""
    for path in paths:
        descriptor = open_regular(path)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def make_cold(paths: Sequence[Path]) -> None:
    """Have files out of the page cache. Raises MachineError where they stay in it."""
    evict(paths)
    if (warm := resident(paths)) > 0.01:
        raise MachineError(
            f"{warm:.0%} of the files stay in the page cache; a cold run cannot be measured here"
        )


def resident(paths: Iterable[Path]) -> float:
    """The share of the files' pages that are in the page cache, by mincore. Raises MachineError where the
    system does not tell.
    """
    inside, pages = 0, 0
    for path in paths:
        if not can_tell(path):
            raise MachineError(
                f"{path}: what of it is in the page cache is told to its owner only; run the benchmark as"
                " that user"
            )
        if path.stat().st_size:
            with (
                os.fdopen(open_regular(path), "rb") as file,
                mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
            ):
                found = resident_pages(mapped, 0, len(mapped))
            inside += int(found.sum())
            pages += found.size
    return inside / max(pages, 1)
