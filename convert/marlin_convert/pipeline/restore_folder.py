"""DIR while published files are being restored in it: what is done, so that the next run continues. All that
is ours is in DIR/.work, and is gone when all is done.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path

from msgspec.structs import replace

from marlin_convert.documents.bounds import JOB
from marlin_convert.documents.codec import read, write
from marlin_convert.documents.records import LOCK, WORK
from marlin_convert.documents.restore import RestoredFile, RestoreJob
from marlin_convert.errors import OutputError, UsageError
from marlin_convert.pipeline.work_folder import RESTORE, is_marked
from marlin_convert.storage.files import (
    machine_errors,
    make_folder,
    read_small,
    refuse_in_place_of,
    sync_folder,
    write_atomic,
    write_documents,
)
from marlin_convert.storage.shard_file import FORMAT
from marlin_convert.storage.writer import PARTIAL

#: in the work folder: records of files, files until they are proven, small files until all are written
RECORDS, MADE, DOCUMENTS = "records", "made", "documents"


class RestoreFolder:
    """One DIR."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.work = folder / WORK

    @property
    def is_begun(self) -> bool:
        """Whether something is being restored there."""
        return is_marked(self.work / RESTORE)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is there, or nothing but what beginning and ending leave when they break off."""
        inside = {path.relative_to(self.folder).as_posix() for path in self.folder.rglob("*")}
        return inside <= {WORK, f"{WORK}/{LOCK}", f"{WORK}/{RESTORE}{PARTIAL}", *self._folders}

    @property
    def _folders(self) -> tuple[str, ...]:
        return tuple(f"{WORK}/{name}" for name in (RECORDS, MADE, DOCUMENTS))

    def job(self) -> RestoreJob:
        """What was begun here. Raises UsageError where that cannot be read."""
        path = self.work / RESTORE
        try:
            return read(read_small(path, JOB), RestoreJob, f"{path} is damaged")
        except (OSError, OutputError) as error:
            raise UsageError(
                f"{path} is damaged, so {self.folder} cannot be continued; remove that folder, or choose"
                " another"
            ) from error

    def refuse_links(self) -> None:
        """Raise UsageError where a link or something else is in place of a folder of ours."""
        for name in (WORK, *self._folders):
            refuse_in_place_of(self.folder / name)

    def begin(self, source: str) -> None:
        """Record what is being restored: the mark of the folder, which is there before any file is."""
        for name in (WORK, *self._folders):
            make_folder(self.folder / name)
        self._write_job(RestoreJob(FORMAT, source))

    def _write_job(self, job: RestoreJob) -> None:
        write_atomic(self.work / RESTORE, write(job, indent=1))
        sync_folder(self.folder)

    def made(self, name: str) -> Path:
        """Where a file is until it is proven."""
        return self.work / MADE / name

    def record(self, name: str) -> RestoredFile | None:
        """What was recorded of a file; None where nothing was, or not whole."""
        path = self._record(name)
        try:
            return read(read_small(path, JOB), RestoredFile, str(path))
        except (OSError, OutputError):
            return None

    def _record(self, name: str) -> Path:
        return self.work / RECORDS / f"{name}.json"

    def write_record(self, file: RestoredFile) -> None:
        """Record a file, which must be durable under its name."""
        write_atomic(self._record(file.name), write(file))

    def publish(self, file: RestoredFile) -> None:
        """Give a file that is durable in the work folder its name, and record it. Raises UsageError where
        something has that name.
        """
        self.refuse_in_place_of(file.name)
        with machine_errors(f"finishing {self.folder / file.name}"):
            os.replace(self.made(file.name), self.folder / file.name)
            sync_folder(self.folder)
            self.write_record(file)

    def refuse_in_place_of(self, name: str) -> None:
        """Raise UsageError where something is in place of a file that is to be made: nothing is replaced."""
        if os.path.lexists(self.folder / name):
            raise UsageError(
                f"{self.folder / name} is there and is not what would be restored; nothing is written over:"
                " move it away, then run the same command again"
            )

    def write_small(self, files: Mapping[str, bytes]) -> None:
        """Write the files beside the weights, each whole or not at all. Raises UsageError where another file
        is in the place of one.
        """
        left = {name: data for name, data in files.items() if not self.holds(name, data)}
        for name in left:
            self.refuse_in_place_of(name)
        write_documents(self.folder, left, self.work / DOCUMENTS)

    def holds(self, name: str, data: bytes) -> bool:
        """Whether a small file is there, with these bytes."""
        with suppress(OSError):
            return read_small(self.folder / name, len(data)) == data
        return False

    def remove_made(self, names: Collection[str]) -> None:
        """Remove what a run that broke off left of these files before they got their names."""
        for path in self._made(names):
            path.unlink(missing_ok=True)

    def _made(self, names: Collection[str]) -> list[Path]:
        return [path for name in names for path in _and_partial(self.made(name))]

    def end(self, names: Collection[str]) -> None:
        """All is there: what is ours is removed, that of the weight files `names`, too, and the mark last.
        What cannot be removed stays, and the mark with it, so that the next run tries again.
        """
        try:
            self.refuse_links()
        except UsageError:
            return
        if self.is_begun:
            if not (job := self.job()).finished:
                self._write_job(replace(job, finished=True))
            self._remove_files(names)
        for name in (*self._folders, WORK):
            with suppress(OSError):
                (self.folder / name).rmdir()

    def _remove_files(self, names: Collection[str]) -> None:
        records = [path for name in names for path in _and_partial(self._record(name))]
        documents = [path for path in (self.work / DOCUMENTS).glob("*") if path.name.isdecimal()]
        with suppress(OSError):
            for path in (*self._made(names), *records, *documents, *_and_partial(self.work / RESTORE)[::-1]):
                path.unlink(missing_ok=True)


def _and_partial(path: Path) -> list[Path]:
    return [path, path.with_name(path.name + PARTIAL)]
