"""Files of a repository, fetched a little ahead of the units that need them, and let go when the last of
these is recorded.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Condition, Thread
from typing import Protocol

from marlin_convert.checkpoint.hub import HubStore
from marlin_convert.errors import SourceError

#: downloads at a time: while one is hashed the other keeps the link busy, and little is under way at the end
WORKERS = 2
Progress = Callable[[int, int], None]


class Supply(Protocol):
    """Whoever brings source files."""

    def start(self) -> None:
        """Begin to fetch."""

    def wait(self, files: Iterable[str]) -> None:
        """Return once these files can be read. Raises SourceError, MachineError; InterruptedError after
        `stop`.
        """

    def check(self, unit: str) -> None:
        """See that a unit's files are as they were when they were checked. Raises SourceError."""

    def recorded(self, unit: str) -> None:
        """A unit is made and recorded: what only it still needed may go."""

    def stop(self) -> None:
        """Fetch nothing more; wake all who wait."""


class AtHand:
    """The supply of a folder: all is there."""

    def start(self) -> None:
        """Nothing to fetch."""

    def wait(self, files: Iterable[str]) -> None:
        """Nothing to wait for."""

    def check(self, unit: str) -> None:
        """The conversion looks at the whole folder itself."""

    def recorded(self, unit: str) -> None:
        """Nothing goes."""

    def stop(self) -> None:
        """Nothing to stop."""


class Stager:
    """The supply of a repository: `needed` says which files each unit that is still to be made reads, in
    order.

    At most `look_ahead` + 1 files are held, under way or there, unless the oldest unit that is not recorded
    needs more than that. Files that lie in `staging` are removed when no unit needs them any more; others are
    never touched.
    """

    def __init__(
        self,
        store: HubStore,
        needed: Mapping[str, Sequence[str]],
        staging: Path,
        free: bool,
        look_ahead: int,
        progress: Progress | None,
    ) -> None:
        self._store, self._staging, self._free, self._look_ahead = store, staging, free, look_ahead
        self._needed = dict(needed)
        self._queue = list(dict.fromkeys(file for files in needed.values() for file in files))
        self._total, self._bytes, self._progress = (
            sum(store.files[file].size for file in self._queue),
            0,
            progress,
        )
        self._held: set[str] = set()
        self._ready: dict[str, os.stat_result] = {}
        self._failure: BaseException | None = None
        self._stopped = False
        self._change = Condition()

    def start(self) -> None:
        """Remove what no unit needs from an earlier run's staging, then begin to fetch."""
        sweep(self._staging, set(self._queue))
        if self._progress is not None:
            self._progress(0, self._total)
        for i in range(self._store.options.max_workers or WORKERS):
            Thread(target=self._work, name=f"fetch-{i}", daemon=True).start()

    def wait(self, files: Iterable[str]) -> None:
        """See `Supply`."""
        files = tuple(files)
        with self._change:
            while not all(file in self._ready for file in files):
                if self._failure is not None:
                    raise self._failure
                if self._stopped:
                    raise InterruptedError
                self._change.wait()

    def check(self, unit: str) -> None:
        """See `Supply`."""
        for file in self._needed[unit]:
            before = self._ready[file]
            try:
                now = self._store.path(file).stat()
            except OSError as error:
                raise SourceError(
                    f"{file} has gone while {unit} was being converted: {error.strerror}; run the same"
                    " command again"
                ) from error
            if (now.st_size, now.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
                raise SourceError(
                    f"{file} was changed while {unit} was being converted; run the same command again"
                )

    def recorded(self, unit: str) -> None:
        """See `Supply`."""
        with self._change:
            done = self._needed.pop(unit)
            wanted = {file for files in self._needed.values() for file in files}
            for file in set(done) - wanted:
                path = self._store.path(file)
                if path.parent == self._staging:
                    path.unlink(missing_ok=True)
                self._store.forget(file)
                self._held.discard(file)
            self._change.notify_all()

    def stop(self) -> None:
        """See `Supply`. A download under way breaks off at its next piece."""
        with self._change:
            self._stopped = True
            self._change.notify_all()

    def _work(self) -> None:
        try:
            while (file := self._next()) is not None:
                path = self._store.fetch(file, self._staging, self._free, self._count)
                status = path.stat()
                with self._change:
                    self._ready[file] = status
                    self._change.notify_all()
        except BaseException as error:
            with self._change:
                self._failure = self._failure or error
                self._stopped = True
                self._change.notify_all()

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

    def _count(self, size: int) -> None:
        with self._change:
            if self._stopped:
                raise InterruptedError
            self._bytes += size
            if self._progress is not None:
                self._progress(max(min(self._bytes, self._total), 0), self._total)


def sweep(staging: Path, wanted: set[str]) -> None:
    """Remove from a staging folder all but the wanted files: other files, and what a killed download left
    half-done.
    """
    if not staging.is_dir():
        return
    for path in staging.iterdir():
        if path.is_file() and path.name not in wanted:
            path.unlink()
    for path in staging.glob(".cache/huggingface/download/*.incomplete"):
        with suppress(OSError):
            path.unlink()


def remove_staging(staging: Path) -> None:
    """Remove a staging folder with all that is in it."""
    shutil.rmtree(staging, ignore_errors=True)


def still_to_fetch(store: HubStore, files: Iterable[str], staging: Path) -> int:
    """Bytes of files that are nowhere on this machine yet."""
    return sum(store.files[file].size for file in files if store.find(file, staging) is None)
