"""Reading tensors from files: pieces planned as few large page-aligned reads, past the page cache where that
works.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from marlin_convert.errors import SourceError
from marlin_convert.storage.files import PAGE, drop_cache, machine_error, open_direct, open_regular

#: a gap up to this is read through rather than skipped: one request costs more
MAX_GAP = 128 << 10


class ShortFileError(SourceError):
    """A file ends, at byte `end`, before the bytes that its header, or who wrote it, says it has."""

    def __init__(self, file: object, descriptor: int, wanted: range, came: int) -> None:
        self.end = min(wanted.start + came, os.fstat(descriptor).st_size)
        super().__init__(
            f"{file} ends at byte {self.end}, before its tensors do: it was changed while being read (bytes"
            f" {wanted.start} to {wanted.stop} were expected)"
        )


def read_exactly(descriptor: int, offset: int, size: int, file: object) -> bytes:
    """`size` bytes of a file from `offset`, however few a read brings. Raises OSError, and ShortFileError,
    which names `file`.
    """
    parts: list[bytes] = []
    done = 0
    while done < size:
        part = os.pread(descriptor, size - done, offset + done)
        if not part:
            raise ShortFileError(file, descriptor, range(offset, offset + size), done)
        parts.append(part)
        done += len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


class Piece(NamedTuple):
    """Bytes wanted: `size` at `offset` of `file`."""

    file: str
    offset: int
    size: int


class Run(NamedTuple):
    """One read: whole pages of a file into a page-aligned place of the buffer. `used` ends the last byte
    wanted.
    """

    file: str
    offset: int
    length: int
    at: int
    used: int


@dataclass(frozen=True)
class ReadPlan:
    """Runs that bring all pieces into one buffer of `size` bytes; `places[i]` is where piece i begins
    there.
    """

    runs: tuple[Run, ...]
    places: tuple[int, ...]
    size: int

    @property
    def read_bytes(self) -> int:
        """Bytes that are read, with what lies between the pieces."""
        return self.size

    @property
    def files(self) -> tuple[str, ...]:
        """The files that are read, each once."""
        return tuple(sorted({run.file for run in self.runs}))

    def fill(self, reader: PieceReader, buffer: npt.NDArray[np.uint8]) -> None:
        """Read all of it; see `PieceReader.read`."""
        reader.read(self, buffer)


def plan_reads(pieces: list[Piece]) -> ReadPlan:
    """Join neighbours, round out to pages. Pieces may come in any order and must not overlap."""
    order = sorted(range(len(pieces)), key=lambda i: pieces[i][:2])
    places = [0] * len(pieces)
    runs: list[Run] = []
    file, begin, end, at, size = "", 0, 0, 0, 0
    for i in order:
        piece = pieces[i]
        stop = piece.offset + piece.size
        if runs and piece.file == file and piece.offset - end <= MAX_GAP:
            end = max(end, stop)
        else:
            file, begin, end, at = piece.file, piece.offset // PAGE * PAGE, stop, size
            runs.append(Run("", 0, 0, 0, 0))
        length = -(-(end - begin) // PAGE) * PAGE
        runs[-1] = Run(file, begin, length, at, end)
        size = at + length
        places[i] = at + piece.offset - begin
    return ReadPlan(tuple(runs), tuple(places), size)


class OpenFile:
    """A file that is being read, from any number of threads: an ordinary descriptor, and a direct one where
    that works.
    """

    def __init__(self, path: Path, direct: bool) -> None:
        self.path = path
        try:
            self.plain = open_regular(path)
            self.direct = open_direct(path, os.O_RDONLY) if direct else None
        except FileNotFoundError as error:
            raise SourceError(f"{path} has gone while it was being read") from error
        except OSError as error:
            raise machine_error(f"opening {path}", error) from error
        self.users = 0

    @property
    def descriptor(self) -> int:
        """The one to read from: the direct one, if there is one."""
        return self.plain if self.direct is None else self.direct

    def close(self) -> None:
        """Nobody may be reading any more."""
        os.close(self.plain)
        if self.direct is not None:
            os.close(self.direct)

    def fill(self, target: memoryview, offset: int, needed: int, name: object = None) -> None:
        """Read at least `needed` bytes from `offset` into `target`. With a direct descriptor offset, `target`
        and its length are whole pages. Raises ShortFileError, which names `name` or the path; MachineError.
        """
        descriptor = self.descriptor
        done = 0
        while done < needed:
            try:
                got = os.preadv(descriptor, [target[done:]], offset + done)
            except OSError as error:
                # direct reads that open but do not work (some overlay file systems): the ordinary way does
                if descriptor != self.plain:
                    descriptor = self.plain
                    continue
                raise machine_error(f"reading {self.path}", error) from error
            if got == 0:
                raise ShortFileError(name or self.path, self.plain, range(offset, offset + needed), done)
            done += got
            if done < needed and done % PAGE:
                descriptor = self.plain  # a short direct read leaves an unaligned rest


def read_bytes(path: Path, offset: int, size: int) -> npt.NDArray[np.uint8]:
    """Some bytes of a file. Raises ShortFileError or MachineError where a mapping would end the process."""
    buffer, file = np.empty(size, np.uint8), OpenFile(path, direct=False)
    try:
        file.fill(buffer.data, offset, size)
        return buffer
    finally:
        file.close()


class PieceReader:
    """Positional reads from any number of threads. Files are open only while somebody reads them."""

    def __init__(self, path_of: Callable[[str], Path], direct: bool = True) -> None:
        self._path_of = path_of
        self._direct = direct
        self._open: dict[str, OpenFile] = {}
        self._lock = Lock()

    def open_files(self, files: Iterable[str]) -> None:
        """Keep files open until `close_files`. Where one cannot be opened, none of them is kept."""
        opened: list[str] = []
        try:
            with self._lock:
                for name in files:
                    if name not in self._open:
                        self._open[name] = OpenFile(self._path_of(name), self._direct)
                    self._open[name].users += 1
                    opened.append(name)
        except BaseException:
            self.close_files(opened)
            raise

    def close_files(self, files: Iterable[str]) -> None:
        """Undo `open_files`."""
        with self._lock:
            for name in files:
                file = self._open[name]
                file.users -= 1
                if not file.users:
                    file.close()
                    del self._open[name]

    def read(self, plan: ReadPlan, buffer: npt.NDArray[np.uint8]) -> None:
        """Fill `buffer` (page-aligned, at least plan.size bytes). Raises ShortFileError, MachineError."""
        view = buffer.data
        for run in plan.runs:
            self._read_run(run, view[run.at : run.at + run.length])

    def _read_run(self, run: Run, target: memoryview) -> None:
        file = self._open[run.file]
        file.fill(target, run.offset, run.used - run.offset, run.file)
        if file.direct is None:
            drop_cache(file.plain, run.offset, run.length)
