"""The files of a source that is somewhere else: fetched ahead of the units, and those that are staged removed
once no unit needs them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Protocol

from marlin_convert.checkpoint.fetcher import LOOK_AHEAD, AheadFetcher, Needed, most_at_once
from marlin_convert.errors import SourceError
from marlin_convert.progress import Point, Progress
from marlin_convert.storage.writer import PARTIAL

#: called with the bytes of a file that have come so far; fewer than before where it begins again
Received = Callable[[int], None]
#: the end of the name of what is noted beside a file of the parts of it that have come
PARTS = ".parts"


class RemoteFile(Protocol):
    """A file as listed."""

    @property
    def size(self) -> int:
        """Bytes."""


class RemoteStore(Protocol):
    """A source whose files are fetched."""

    @property
    def files(self) -> Mapping[str, RemoteFile]:
        """Its files by name."""

    @property
    def max_workers(self) -> int | None:
        """Files that are fetched at a time; None: as many as usual."""

    @property
    def place(self) -> Path | None:
        """Where fetched files are kept; None where they are staged only."""

    def stages(self, staging: Path | None) -> bool:
        """Whether fetched files go to `staging`, and are removed when no unit needs them."""

    def path(self, name: str) -> Path:
        """Where a fetched file lies."""

    def find(self, name: str, staging: Path | None) -> Path | None:
        """Where a file lies already, as far as can be told without reading it."""

    def fetch(self, name: str, staging: Path | None, received: Received) -> Path:
        """Have a file on the disk, seen to be the right one."""

    def forget(self, name: str) -> None:
        """Take note that a file was removed."""


class RemoteFetcher(AheadFetcher):
    """Brings the files of a `RemoteStore`. Those that lie in `staging` are removed when no unit needs them
    any more; others are never touched.
    """

    def __init__(
        self,
        store: RemoteStore,
        needed: Needed,
        staging: Path | None,
        progress: Progress | None,
        look_ahead: int = LOOK_AHEAD,
    ) -> None:
        super().__init__(needed, store.max_workers, look_ahead)
        self._store, self._staging, self._progress = store, staging, progress
        self._sizes = {file: store.files[file].size for file in self._queue}
        self._got = dict.fromkeys(self._queue, 0)
        self.place = None if store.stages(staging) else store.place
        self.room = self._room()

    def start(self) -> None:
        """Remove what no unit needs from an earlier run's staging, then begin to fetch."""
        if self._staging is not None:
            sweep(self._staging, set(self._queue))
        self._tell()
        super().start()

    def _path(self, file: str) -> Path:
        return self._store.path(file)

    def _bring(self, file: str) -> Path:
        return self._store.fetch(file, self._staging, partial(self._received, file))

    def _let_go(self, file: str) -> None:
        path = self._path(file)
        if path.parent == self._staging:
            path.unlink(missing_ok=True)
            path.with_name(path.name + PARTS).unlink(missing_ok=True)
        self._store.forget(file)

    def _room(self) -> int:
        """Bytes that files still to be fetched take on the disk: all of them, or the most at a time."""
        store, staging, sizes = self._store, self._staging, self._sizes
        if self.place is not None or staging is None:
            return sum(size for file, size in sizes.items() if store.find(file, staging) is None)
        to_stage = {file: 0 if store.find(file, None) else size for file, size in sizes.items()}
        staged = sum(
            min(status.st_size, status.st_blocks * 512)
            for status in (path.stat() for path in staging.glob("*") if _whose(path.name) in sizes)
        )
        return max(most_at_once(self._needed, to_stage, self._look_ahead) - staged, 0)

    def _received(self, file: str, size: int) -> None:
        with self._change:
            self._go_on()
            self._got[file] = min(size, self._sizes[file])
            self._tell()

    def _tell(self) -> None:
        if self._progress is not None:
            self._progress(Point("downloading", sum(self._got.values()), sum(self._sizes.values())))


def _whose(name: str) -> str:
    """The source file that something in a staging folder is of, by their names."""
    return name.removesuffix(PARTIAL).removesuffix(PARTS)


def sweep(staging: Path, wanted: set[str]) -> None:
    """Remove from a staging folder all but the wanted files: other files, and what a killed download left
    half-done. Raises SourceError where a link leads elsewhere.
    """
    if staging.is_symlink():
        raise SourceError(f"{staging} is a link: what it leads to is not ours to remove; move the link away")
    if not staging.is_dir():
        return
    for path in staging.iterdir():
        whose = _whose(path.name)
        if path.is_file() and whose.endswith(".safetensors") and whose not in wanted:
            path.unlink()
    parts = staging / ".cache" / "huggingface" / "download"
    if parts.resolve() == staging.resolve() / parts.relative_to(staging):  # behind no link
        for path in parts.glob("*.incomplete"):
            with suppress(OSError):
                path.unlink()
