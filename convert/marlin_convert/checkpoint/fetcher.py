"""The source files that units of the output read: at hand in a folder, or fetched a little
ahead of the units and removed once the last unit that reads them is recorded.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Condition, Thread
from typing import Protocol

from marlin_convert.errors import SourceError
from marlin_convert.threads import make_do

#: downloads at a time: while one is hashed the other keeps the link busy, and little is under way at the end
WORKERS = 2
#: files that are fetched beyond the one that is needed now
LOOK_AHEAD = 2
#: the files that each unit reads, units in the order in which they are made, files in the order of need
Needed = Mapping[str, Sequence[str]]


class Fetcher(Protocol):
    """Brings source files to the disk. It takes `room` more bytes at `place`, or with its staging folder
    where `place` is None.
    """

    place: Path | None = None
    room: int = 0

    def start(self) -> None:
        """Begin to fetch."""

    def wait(self, files: Collection[str]) -> None:
        """Return once these files can be read. Raises SourceError, MachineError; InterruptedError after
        `stop`.
        """

    def check(self, unit: str) -> None:
        """Compare a unit's files with what they were when they came. Raises SourceError."""

    def release(self, unit: str) -> None:
        """A unit is made and recorded: files that no other unit needs may be removed."""

    def stop(self) -> None:
        """Fetch nothing more; every `wait` ends."""


class LocalFiles(Fetcher):
    """The files of a folder: nothing to fetch, nothing to remove; the conversion checks the whole folder."""

    def start(self) -> None: ...

    def wait(self, files: Collection[str]) -> None: ...

    def check(self, unit: str) -> None: ...

    def release(self, unit: str) -> None: ...

    def stop(self) -> None: ...


class AheadFetcher(Fetcher):
    """Brings files on threads of its own, in the order in which units need them.

    At most `look_ahead` + 1 files are held, under way or there, unless the oldest unit that is not released
    needs more than that.
    """

    def __init__(self, needed: Needed, workers: int | None = None, look_ahead: int = LOOK_AHEAD) -> None:
        self._needed, self._queue, self._look_ahead = dict(needed), fetch_order(needed), look_ahead
        self._held: set[str] = set()
        self._ready: dict[str, os.stat_result] = {}
        self._failure: BaseException | None = None
        self._stopped = False
        self._change = Condition()
        self._threads = [
            Thread(target=self._work, name=f"fetch-{i}", daemon=True) for i in range(workers or WORKERS)
        ]

    def _path(self, file: str) -> Path:
        """Where a file that was brought lies."""
        raise NotImplementedError

    def _bring(self, file: str) -> Path:
        """Have a file on the disk, seen to be the right one."""
        raise NotImplementedError

    def _let_go(self, file: str) -> None:
        """No unit needs a file any more."""

    def start(self) -> None:
        """See `Fetcher`."""
        wanted, self._threads = self._threads, []
        for thread in wanted:
            with suppress(RuntimeError):  # a limit of processes
                thread.start()
                self._threads.append(thread)
        make_do(len(self._threads), len(wanted))

    def wait(self, files: Collection[str]) -> None:
        """See `Fetcher`."""
        with self._change:
            while not all(file in self._ready for file in files):
                if self._failure is not None:
                    raise self._failure
                if self._stopped:
                    raise InterruptedError
                self._change.wait()

    def check(self, unit: str) -> None:
        """See `Fetcher`."""
        for file in self._needed[unit]:
            before = self._ready[file]
            try:
                now = self._path(file).stat()
            except OSError as error:
                raise SourceError(
                    f"{file} has gone while {unit} was being converted: {error.strerror}; run the same"
                    " command again"
                ) from error
            if stamp(now) != stamp(before):
                raise SourceError(
                    f"{file} was changed while {unit} was being converted; run the same command again"
                )

    def release(self, unit: str) -> None:
        """See `Fetcher`."""
        with self._change:
            done = self._needed.pop(unit)
            for file in set(done).difference(*self._needed.values()):
                self._let_go(file)
                self._held.discard(file)
            self._change.notify_all()

    def stop(self) -> None:
        """See `Fetcher`. What is under way breaks off at its next piece."""
        with self._change:
            self._stopped = True
            self._change.notify_all()

    def join(self) -> None:
        """Wait until nothing is under way, so that no download leaves a part of a file behind."""
        for thread in self._threads:
            thread.join()

    def _go_on(self) -> None:
        """Raise InterruptedError after `stop`."""
        if self._stopped:
            raise InterruptedError

    def _work(self) -> None:
        try:
            while (file := self._next()) is not None:
                status = self._bring(file).stat()
                with self._change:
                    self._ready[file] = status
                    self._change.notify_all()
        except BaseException as error:
            with self._change:
                self._failure = self._failure or error
                self.stop()

    def _next(self) -> str | None:
        """The next file, once it may be fetched; None when there is none or it is over."""
        with self._change:
            while self._queue and not self._stopped:
                oldest = next(iter(self._needed.values()), ())
                if len(self._held) <= self._look_ahead or self._queue[0] in oldest:
                    self._held.add(self._queue[0])
                    return self._queue.pop(0)
                self._change.wait()
            return None


def stamp(status: os.stat_result) -> list[int]:
    """Size, modification and change time (ns): whatever is written to a file or put in its place changes the
    last, which nobody can set.
    """
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns]


def fetch_order(needed: Needed) -> list[str]:
    """Every file once, in the order in which it is first needed."""
    return list(dict.fromkeys(file for files in needed.values() for file in files))


def most_at_once(needed: Needed, sizes: Mapping[str, int], look_ahead: int = LOOK_AHEAD) -> int:
    """The most bytes of source files on the disk together, where each is removed as soon as the last unit
    that needs it is made.

    While a unit is made these are its files, earlier ones that later units need again, and the next ones up
    to `look_ahead` + 1 in all.
    """
    order, units = fetch_order(needed), list(needed.values())
    last = {file: i for i, files in enumerate(units) for file in files}
    fetched: set[str] = set()
    most = 0
    for i, files in enumerate(units):
        fetched |= set(files)
        held = {file for file in fetched if last[file] >= i}
        for file in order:
            if len(held) > look_ahead:
                break
            if file not in fetched:
                fetched.add(file)
                held.add(file)
        most = max(most, sum(sizes[file] for file in held))
    return most
