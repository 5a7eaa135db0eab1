"""Which pages of a file are in the page cache."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest

from marlin_convert.storage.files import PAGE
from marlin_convert.storage.page_cache import resident_pages


def test_what_was_evicted_and_what_was_read(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(os.urandom(64 * PAGE + 5))
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert resident_pages(mapped, 0, len(mapped)).tolist() == [True] * 65
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if resident_pages(mapped, 0, len(mapped)).any():
            pytest.skip("this file system keeps its files in memory")
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # no reading ahead
        os.pread(file.fileno(), 1, 40 * PAGE)
        assert resident_pages(mapped, 0, len(mapped)).nonzero()[0].tolist() == [40]
        assert resident_pages(mapped, 40 * PAGE, 3 * PAGE).tolist() == [True, False, False]
        assert resident_pages(mapped, 64 * PAGE, 16 * PAGE).tolist() == [False]
