"""What of a file is in the page cache."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt


@cache
def _mincore() -> Callable[[int, int, int], int] | None:
    """The system's call, where there is one."""
    function = getattr(ctypes.CDLL(None, use_errno=True), "mincore", None)
    if function is not None:
        function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    return function


def can_tell(path: Path) -> bool:
    """Whether the system says what of a file is in the page cache: Linux tells only its owner and who may
    write to it, and reports
    to others that all of it is.
    """
    return _mincore() is not None and (os.stat(path).st_uid == os.geteuid() or os.access(path, os.W_OK))


def resident_pages(mapped: mmap.mmap, offset: int, size: int) -> npt.NDArray[np.bool_]:
    """Which of the pages of a mapped file from `offset` (of a page) are in the page cache, by mincore; for
    files of which it can be told.
    """
    mincore, part = _mincore(), np.frombuffer(mapped, np.uint8)[offset : offset + size]
    flags = np.zeros(-(-part.size // mmap.PAGESIZE), np.uint8)
    failed = mincore is None or mincore(part.ctypes.data, part.size, flags.ctypes.data)
    del part  # a mapping cannot be closed while it is in use
    if failed:
        raise OSError(ctypes.get_errno(), "mincore")
    return (flags & 1).astype(np.bool_)
