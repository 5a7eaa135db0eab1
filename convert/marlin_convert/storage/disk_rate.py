"""How fast a disk is: a short measurement, past the page cache where that can be done."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

from marlin_convert.storage.buffers import aligned_buffer
from marlin_convert.storage.files import PAGE, drop_cache, open_direct, open_regular, write_all

#: a measurement ends after so many seconds or bytes
SECONDS, MOST = 0.5, 256 << 20
PIECE = 8 << 20
#: below so many bytes a rate means nothing
LEAST = 4 << 20


def read_rate(path: Path) -> float | None:
    """Bytes a second that a file is read with, from its middle; None where it is too short to tell. Raises
    OSError.
    """
    size = path.stat().st_size
    direct = open_direct(path, os.O_RDONLY)
    descriptor = open_regular(path) if direct is None else direct
    try:
        begin = size // 2 // PAGE * PAGE
        if direct is None:
            drop_cache(descriptor, begin, MOST)
        buffer, done, start = aligned_buffer(PIECE), 0, time.perf_counter()
        while done < MOST and time.perf_counter() - start < SECONDS:
            if not (got := os.preadv(descriptor, [buffer.data], begin + done)) or got % PAGE:
                break
            done += got
        return done / (time.perf_counter() - start) if done >= LEAST else None
    finally:
        os.close(descriptor)


def write_rate(folder: Path, most: int = MOST) -> float | None:
    """Bytes a second that a new file in a folder is written with, until it is on the disk; None where no more
    than a few bytes may be written. The file is gone afterwards. Raises OSError.
    """
    descriptor, direct = open_nameless(folder)
    try:
        try:
            buffer, done, start = aligned_buffer(PIECE), 0, time.perf_counter()
            buffer[:] = 0x5A  # zeros would cost some file systems nothing
            while done + PIECE <= most and time.perf_counter() - start < SECONDS:
                write_all(descriptor if direct is None else direct, buffer.data, done)
                done += PIECE
            os.fsync(descriptor)
            return done / (time.perf_counter() - start) if done >= LEAST else None
        finally:
            if direct is not None:
                os.close(direct)
    finally:
        os.close(descriptor)


def open_nameless(folder: Path) -> tuple[int, int | None]:
    """A new file in a folder, which goes when it is closed or this process is killed: a descriptor, and one
    past the page cache where there is such a thing. Raises OSError.
    """
    descriptor, name = tempfile.mkstemp(prefix=".marlin-convert-probe-", dir=folder)
    try:
        return descriptor, open_direct(Path(name), os.O_RDWR)
    except BaseException:
        os.close(descriptor)
        raise
    finally:
        os.unlink(name)
