"""The page cache: put files out of it, and show that they are out."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable
from pathlib import Path

from convert.files import PAGE


def evict(paths: Iterable[Path]) -> None:
    """Write files back and drop them from the page cache."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def resident(paths: Iterable[Path]) -> float:
    """The share of the files' pages that are in the page cache, by mincore."""
    libc = ctypes.CDLL(None, use_errno=True)
    inside, pages = 0, 0
    for path in paths:
        size = path.stat().st_size
        if not size:
            continue
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE) as mapped:
            count = -(-size // PAGE)
            flags = (ctypes.c_ubyte * count)()
            view = ctypes.c_char.from_buffer(mapped)
            try:
                if libc.mincore(ctypes.c_void_p(ctypes.addressof(view)), ctypes.c_size_t(size), flags):
                    raise OSError(ctypes.get_errno(), f"mincore of {path}")
            finally:
                del view
            inside += sum(flag & 1 for flag in bytes(flags))
            pages += count
    return inside / max(pages, 1)
