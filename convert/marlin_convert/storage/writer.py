"""Writing the shard files of a unit: preallocated, at any offset from any thread, and visible under their
names only when whole.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import numpy.typing as npt

from marlin_convert.storage.files import (
    PAGE,
    UNSUPPORTED,
    drop_cache,
    lies_in_memory,
    machine_error,
    open_direct,
    sync_folder,
    write_all,
)

PARTIAL = ".partial"


def partial_of(path: Path, attempt: str = "") -> Path:
    """Where a file is until it is whole. Where several processes may make the same file, each has an
    `attempt` of its own: who comes back when he was thought dead gives only his own file its name.
    """
    return path.with_name(path.name + (attempt and f".{attempt}") + PARTIAL)


@dataclass
class ShardFile:
    """One output file while it is written; `writers` is how many threads are writing to it."""

    path: Path
    size: int
    direct_io: bool
    attempt: str = ""
    plain: int = -1
    direct: int | None = None
    writers: int = 0
    made: os.stat_result | None = None
    lock: Lock = field(default_factory=Lock)

    @property
    def partial(self) -> Path:
        """Where it is until it is whole."""
        return partial_of(self.path, self.attempt)

    def open(self, head: bytes) -> None:
        """Create it anew with all its space and its header. What a broken run left is removed first, since
        fillers must be zero.
        """
        try:
            self.partial.unlink(missing_ok=True)
            self.plain = os.open(self.partial, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
            self.made = os.fstat(self.plain)
            _reserve(self.plain, self.size)
            self.direct = open_direct(self.partial, os.O_WRONLY) if self.direct_io else None
            write_all(self.plain, memoryview(head), 0)
        except OSError as error:
            raise machine_error(f"creating {self.partial}", error) from error

    def write(self, data: npt.NDArray[Any], offset: int) -> None:
        """Write a contiguous array at `offset`. The pages that it fills go past the page cache, where it lies
        in memory as in the file; nobody else ever touches those. What shares a page with other data does not.
        """
        view = data.reshape(-1).view(np.uint8).data
        head = -offset % PAGE
        whole = (len(view) - head) // PAGE * PAGE
        fits = whole > 0 and (data.ctypes.data - offset) % PAGE == 0
        self._count(1)
        try:
            if fits and self._write_direct(view[head : head + whole], offset + head):
                write_all(self.plain, view[:head], offset)
                write_all(self.plain, view[head + whole :], offset + head + whole)
            else:
                write_all(self.plain, view, offset)
        except OSError as error:
            raise machine_error(f"writing {self.partial}", error) from error
        finally:
            self._count(-1)

    def _write_direct(self, view: memoryview, offset: int) -> bool:
        """Write whole pages past the page cache; whether that could be done."""
        if not self.direct_io or self.direct is None:
            return False
        try:
            write_all(self.direct, view, offset)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            # opened but not usable here: from now on the ordinary way; others may be using the descriptor
            self.direct_io = False
        return self.direct_io

    def _count(self, change: int) -> None:
        with self.lock:
            self.writers += change

    def finish(self) -> None:
        """Make the content durable and give the file its name. A failure here ends the use of the
        file: a second fsync may succeed although data was lost.
        """
        try:
            os.fsync(self.plain)
            drop_cache(self.plain, 0, self.size)
            if not self._is_mine():
                raise OSError(errno.ESTALE, "it was moved or replaced meanwhile, as by another process")
            self.close()
            self.partial.replace(self.path)
        except OSError as error:
            raise machine_error(f"finishing {self.path}", error) from error

    def close(self) -> None:
        """Close without finishing."""
        for descriptor in (self.plain, self.direct):
            if descriptor is not None and descriptor >= 0:
                os.close(descriptor)
        self.plain, self.direct = -1, None

    def discard(self) -> None:
        """Close and remove what was written so far."""
        self.close()
        if self._is_mine():
            self.partial.unlink(missing_ok=True)

    def _is_mine(self) -> bool:
        """Whether what has the name is what was written. Where OUT was moved away meanwhile, or cannot be
        locked, it may be what another process has begun there.
        """
        try:
            return self.made is not None and os.path.samestat(self.made, self.partial.lstat())
        except (FileNotFoundError, NotADirectoryError):
            return False


def _reserve(descriptor: int, size: int) -> None:
    """Take the space now: a full disk shows at once, and blocks lie together. The file reads as zeros.

    A file system in memory would fill every page with zeros here, on one thread, before any is written.
    """
    if lies_in_memory(os.fstat(descriptor).st_dev):
        os.ftruncate(descriptor, size)
        return
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
        os.ftruncate(descriptor, size)


def finish_files(files: Sequence[ShardFile]) -> None:
    """Finish all files of a unit, then make their names durable."""
    for file in files:
        file.finish()
    for folder in {file.path.parent for file in files}:
        sync_folder(folder)
