"""The place to convert to: room, and which kind of writing works there, by writing."""

from __future__ import annotations

import os
from pathlib import Path

from marlin_convert.documents.doctor import Place
from marlin_convert.limits import text_of
from marlin_convert.storage.buffers import aligned_buffer
from marlin_convert.storage.disk_rate import open_nameless
from marlin_convert.storage.files import PAGE, existing, free_space, write_all

PROBE_BYTES = 16 * PAGE
NO_DIRECT = "the file system has no direct I/O; ordinary I/O is used, which is slower for large files"


def find_place(path: Path) -> Place:
    """Writes a temporary file there and reads it back, past the page cache too where that works."""
    folder = existing(path)
    folder = folder if folder.is_dir() else folder.parent
    writable, direct = _probe(folder)
    return Place(
        path=str(path),
        exists=path.exists(),
        probed=str(folder),
        file_system=_file_system(folder),
        free_bytes=_free(folder),
        writable=not writable,
        writable_reason=writable,
        direct_io=not direct,
        direct_io_reason=direct,
    )


def _free(folder: Path) -> int | None:
    try:
        return free_space(folder)
    except OSError:
        return None


def _file_system(folder: Path) -> str | None:
    """Its type, by the longest mount point above the folder."""
    real, best = str(folder.resolve()), ("", "")
    for line in text_of(Path("/proc/mounts")).splitlines():
        fields = line.split()
        if len(fields) > 2:
            point = fields[1].replace("\\040", " ")
            inside = real == point or real.startswith(point.rstrip("/") + "/")
            if inside and len(point) >= len(best[0]):
                best = (point, fields[2])
    return best[1] or None


def _probe(folder: Path) -> tuple[str, str]:
    """What is wrong with ordinary and with direct writing and reading."""
    try:
        descriptor, direct = open_nameless(folder)
    except OSError as error:
        problem = f"no file can be made there ({error.strerror})"
        return problem, problem
    return _round_trip(descriptor), _round_trip(direct)


def _round_trip(descriptor: int | None) -> str:
    """Aligned write, flush, aligned read, compare: what goes wrong. Closes it."""
    if descriptor is None:
        return NO_DIRECT
    try:
        written, back = aligned_buffer(PROBE_BYTES), aligned_buffer(PROBE_BYTES)
        written[:] = [i * 31 % 251 for i in range(PROBE_BYTES)]
        write_all(descriptor, written.data, 0)
        os.fsync(descriptor)
        size = 0
        while size < PROBE_BYTES and (got := os.preadv(descriptor, [back.data[size:]], size)):
            size += got
        if size != PROBE_BYTES:
            return f"only {size} of {PROBE_BYTES} bytes came back"
        return "" if (written == back).all() else "what was read back is not what was written"
    except OSError as error:
        return f"{error.strerror} while writing and reading back"
    finally:
        os.close(descriptor)
