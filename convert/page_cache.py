"""What of a file is in the page cache."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable
from functools import cache

import numpy as np
import numpy.typing as npt

from convert.files import PAGE


@cache
def _mincore() -> Callable[[int, int, int], int] | None:
    """The system's call, where there is one."""
    function = getattr(ctypes.CDLL(None, use_errno=True), "mincore", None)
    if function is not None:
        function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    return function


def resident_pages(mapped: mmap.mmap, offset: int, size: int) -> npt.NDArray[np.bool_]:
    """Which of the pages of a mapped file from `offset` (of a page) are in the page cache, by mincore; all of them where there is no such call."""
    part = np.frombuffer(mapped, np.uint8)[offset : offset + size]
    flags = np.ones(-(-part.size // PAGE), np.uint8)
    if (mincore := _mincore()) is not None and mincore(part.ctypes.data, part.size, flags.ctypes.data):
        raise OSError(ctypes.get_errno(), "mincore")
    return (flags & 1).astype(np.bool_)
