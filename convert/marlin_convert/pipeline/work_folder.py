"""OUT/.work: what a run has finished, so that the next one continues. Each record is one atomic file."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from marlin_convert.documents.bounds import JOB, MANIFEST, RECORD
from marlin_convert.documents.codec import begins_ours, read, write
from marlin_convert.documents.manifest import Manifest, read_manifest
from marlin_convert.documents.records import WORK, FinishedUnit, JobRecord, Removal, read_record, write_record
from marlin_convert.errors import OutputError
from marlin_convert.planning.output_plan import OutputPlan, OutputUnit
from marlin_convert.storage.files import (
    digest,
    machine_error,
    make_folder,
    open_regular,
    read_small,
    reading,
    sync_folder,
    write_atomic,
)
from marlin_convert.storage.shard_file import FORMAT
from marlin_convert.storage.writer import partial_of

#: in it while a conversion is being removed: what is left still carries our mark
REMOVING = "removing.json"
#: in it while a finished conversion is being mended: a folder with its manifest
BEFORE = "before"
#: in that of a folder that published files are being restored in
RESTORE = "restore.json"
#: by any of these a folder is known to be ours, made or begun
MARKS = ("manifest.json", f"{WORK}/job.json", f"{WORK}/{RESTORE}")
#: the folders in that of a conversion
FOLDERS = ("units", "documents", BEFORE, "staging")
#: what opening a file of ours says where there is none: nothing, a link, or something in its place or above
#: it
NOT_THERE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO, errno.EISDIR, errno.EINVAL)


def is_marked(path: Path) -> bool:
    """Whether a file is one of the documents by which a folder is known to be ours; never through a link.
    Raises MachineError where that cannot be seen.
    """
    try:
        descriptor = open_regular(path, os.O_NOFOLLOW)
    except OSError as error:
        if error.errno in NOT_THERE:
            return False
        raise machine_error(f"reading {path}", error) from error
    with os.fdopen(descriptor, "rb") as file:
        return begins_ours(file.read(64))


def is_ours(folder: Path) -> bool:
    """Whether a folder is a conversion, made or begun. Raises MachineError where that cannot be seen."""
    return any(is_marked(folder / mark) for mark in MARKS)


def staging_of(out: Path, part: str = "") -> Path:
    """Where source files are kept that are to be freed, of a run or of a `part` of one; a link there is none
    of ours.
    """
    return out.resolve() / WORK / "staging" / part


class WorkFolder:
    """The records of one OUT; `attempt` as in `ShardFile`."""

    def __init__(self, out: Path, attempt: str = "") -> None:
        self.out = out
        self.attempt = attempt
        self.folder = out / WORK

    def job(self) -> JobRecord | None:
        """What was begun here (source and options), or None. Raises OutputError for a damaged one."""
        path = self.folder / "job.json"
        if not path.exists():
            return None
        complaint = f"{path} is damaged, or of an earlier release; start again with --overwrite"
        try:
            return read(read_small(path, JOB), JobRecord, complaint)
        except OSError as error:
            raise OutputError(f"{complaint} ({error.strerror})") from error

    def begin(self, job: JobRecord) -> None:
        """Record what is being done. The job is there before any file is, as the mark of the folder, and
        after the folders, so that where it is, they are.
        """
        make_folder(self.folder)
        make_folder(self.folder / "units")
        write_atomic(self.folder / "job.json", write(job, indent=1))
        sync_folder(self.out)

    def mark_removal(self, files: Sequence[str]) -> None:
        """From now on OUT is what is left of a conversion of these files."""
        make_folder(self.folder)
        write_atomic(self.folder / REMOVING, write(Removal(FORMAT, tuple(files))))
        sync_folder(self.out)

    def removal(self) -> Removal | None:
        """What was begun to be removed. Raises OutputError where that cannot be read."""
        path = self.folder / REMOVING
        if not path.exists():
            return None
        try:
            return read(read_small(path, MANIFEST), Removal, f"{path} is damaged")
        except OSError as error:
            raise OutputError(f"{path} is damaged ({error.strerror})") from error

    def set_aside(self) -> None:
        """From now on OUT is being mended: its manifest no longer stands for what is there."""
        make_folder(self.folder / BEFORE)
        os.replace(self.out / "manifest.json", self.folder / BEFORE / "manifest.json")
        sync_folder(self.folder / BEFORE)
        sync_folder(self.out)

    def before(self) -> Manifest | None:
        """Where OUT is being mended, the manifest it had before. Raises OutputError for one that was damaged
        since.
        """
        if not (self.folder / BEFORE / "manifest.json").exists():
            return None
        return read_manifest(self.folder / BEFORE)

    def record(self, unit: FinishedUnit) -> None:
        """Record a finished unit; its files must be durable already."""
        make_folder(self.folder / "units")  # somebody may have removed it since
        path = self._path(unit.name)
        write_atomic(path, write_record(unit), partial_of(path, self.attempt))

    def look_again(self) -> None:
        """See the records that other machines have made: the client of a network file system believes for a
        while that what was not there is not there, until the folder is opened.
        """
        with suppress(OSError):
            os.listdir(self.folder / "units")

    def any_finished(self) -> bool:
        """Whether there is a record of any unit."""
        units = self.folder / "units"
        return units.is_dir() and any(units.iterdir())

    def finished(self, plan: OutputPlan, unit: OutputUnit) -> FinishedUnit | None:
        """The record of a unit, if there is a whole one and its files are still there with their sizes and
        headers. Raises MachineError where that cannot be read.
        """
        path = self._path(unit.name)
        try:
            record = read_record(read_small(path, RECORD), str(path))
        except (OSError, OutputError):
            return None
        for file in record.files:
            path = self.out / plan.path(unit, file.rank)
            try:
                with reading(path), os.fdopen(open_regular(path), "rb") as opened:
                    if (
                        os.fstat(opened.fileno()).st_size != file.size
                        or digest(opened.read(unit.data_start)).hex() != file.header
                    ):
                        return None
            except OSError:
                return None
        return record

    def _path(self, unit: str) -> Path:
        return self.folder / "units" / f"{unit}.json"
