"""What of a file is in the page cache."""

from __future__ import annotations

import ctypes
import mmap

import numpy as np
import numpy.typing as npt

from convert.files import PAGE


def resident_pages(mapped: mmap.mmap, offset: int, size: int) -> npt.NDArray[np.bool_]:
    """Which of the pages of a mapped file from `offset` (of a page) are in the page cache, by mincore; all of them where there is no such call."""
    part = np.frombuffer(mapped, np.uint8)[offset : offset + size]
    flags = np.ones(-(-part.size // PAGE), np.uint8)
    mincore = getattr(ctypes.CDLL(None, use_errno=True), "mincore", None)
    if mincore is not None and mincore(ctypes.c_void_p(part.ctypes.data), ctypes.c_size_t(part.size), flags.ctypes.data_as(ctypes.c_void_p)):
        raise OSError(ctypes.get_errno(), "mincore")
    return (flags & 1).astype(np.bool_)
