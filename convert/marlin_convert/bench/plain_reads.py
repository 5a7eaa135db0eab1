"""Plain reads of whole files by several threads: what a disk, or the page cache, gives."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from marlin_convert.storage.buffers import Bytes
from marlin_convert.storage.files import open_direct, open_regular

CHUNK = 16 << 20


def read_whole(files: Sequence[Path], slots: Bytes, direct: bool) -> tuple[int, float]:
    """Read files by as many threads as `slots` has chunks, `direct` past the page cache where the file system
    can. Returns bytes and seconds. Raises OSError.
    """
    threads = slots.size // CHUNK
    free = list(range(threads))
    descriptors = {path: open_direct(path, os.O_RDONLY) if direct else None for path in files}
    opened = {
        path: open_regular(path) if descriptor is None else descriptor
        for path, descriptor in descriptors.items()
    }
    pieces = [(path, at) for path in files for at in range(0, path.stat().st_size, CHUNK)]

    def read(piece: tuple[Path, int]) -> int:
        slot = free.pop()
        view = slots[slot * CHUNK : (slot + 1) * CHUNK].data
        got = os.preadv(opened[piece[0]], [view], piece[1])
        free.append(slot)
        return got

    try:
        begin = time.perf_counter()
        with ThreadPoolExecutor(threads) as workers:
            total = sum(workers.map(read, pieces))
        return total, time.perf_counter() - begin
    finally:
        for descriptor in opened.values():
            os.close(descriptor)
