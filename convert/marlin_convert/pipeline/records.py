"""OUT/.work: what a run has finished, so that the next one continues. Each record is one atomic file."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from marlin_convert.errors import MachineError, OutputError
from marlin_convert.files import digest, machine_error, sync_folder, write_atomic
from marlin_convert.planning.output import OutputPlan, OutputUnit
from marlin_convert.shards.finished import FinishedFile, FinishedUnit
from marlin_convert.shards.writer import PARTIAL

WORK = ".work"


@contextmanager
def locked(out: Path) -> Iterator[None]:
    """Hold OUT for this process. Raises MachineError where another one has it.

    The lock is on the folder itself, so there is no lock file to go stale or to be removed under a waiter.
    """
    descriptor = os.open(out, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise MachineError(
                f"{out} is being written by another process; wait for it, or stop it"
            ) from None
        except OSError as error:
            raise machine_error(f"locking {out}", error) from error
        yield
    finally:
        os.close(descriptor)


class WorkFolder:
    """The records of one OUT."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.folder = out / WORK

    def job(self) -> dict[str, Any] | None:
        """What was begun here (source identity and options), or None."""
        path = self.folder / "job.json"
        if not path.exists():
            return None
        try:
            document = json.loads(path.read_bytes())
        except ValueError:
            document = None
        if not isinstance(document, dict):
            raise OutputError(f"{path} is damaged; start again with --overwrite")
        return document

    def begin(self, job: dict[str, Any]) -> None:
        """Record what is being done."""
        (self.folder / "units").mkdir(parents=True, exist_ok=True)
        sync_folder(self.out)
        write_atomic(self.folder / "job.json", json.dumps(job, indent=1).encode())

    def record(self, unit: FinishedUnit) -> None:
        """Record a finished unit; its files must be durable already."""
        document = {
            "name": unit.name,
            "files": [asdict(file) for file in unit.files],
            "experts": [
                [rank, name, base64.b64encode(data).decode()] for (rank, name), data in unit.experts.items()
            ],
            "source": {name: data.hex() for name, data in unit.source.items()},
        }
        body = json.dumps(document, separators=(",", ":"))
        write_atomic(
            self._path(unit.name), json.dumps({"digest": digest(body.encode()).hex(), "unit": body}).encode()
        )

    def any_finished(self) -> bool:
        """Whether there is a record of any unit."""
        return any((self.folder / "units").iterdir())

    def finished(self, plan: OutputPlan, unit: OutputUnit) -> FinishedUnit | None:
        """The record of a unit, if there is a whole one and its files are still there with their sizes and
        headers.
        """
        try:
            outer = json.loads(self._path(unit.name).read_bytes())
            if digest(outer["unit"].encode()).hex() != outer["digest"]:
                return None
            document = json.loads(outer["unit"])
            files = tuple(FinishedFile(**file) for file in document["files"])
        except (OSError, ValueError, KeyError, TypeError):
            return None
        for file in files:
            path = self.out / plan.path(unit, file.rank)
            try:
                with path.open("rb") as opened:
                    if (
                        os.fstat(opened.fileno()).st_size != file.size
                        or digest(opened.read(unit.data_start)).hex() != file.header
                    ):
                        return None
            except OSError:
                return None
        experts = {(rank, name): base64.b64decode(data) for rank, name, data in document["experts"]}
        return FinishedUnit(
            document["name"],
            files,
            experts,
            {name: bytes.fromhex(data) for name, data in document["source"].items()},
        )

    def remove_partials(self) -> None:
        """Remove what a killed run left half-written."""
        for path in self.out.glob(f"*/*{PARTIAL}"):
            path.unlink()
        for path in self.out.glob(f"*{PARTIAL}"):
            path.unlink()

    def remove(self) -> None:
        """The work is done: nothing of it stays."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _path(self, unit: str) -> Path:
        return self.folder / "units" / f"{unit}.json"
