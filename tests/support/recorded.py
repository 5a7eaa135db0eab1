"""Folders that are said to be of a commit: what `download` leaves beside the files."""

from __future__ import annotations

import hashlib
from pathlib import Path

from marlin_convert.checkpoint.store import RECORD
from marlin_convert.documents.codec import write
from marlin_convert.documents.records import DownloadRecord

REPO, COMMIT = "org/name", "c0ffee" + "0" * 34


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def blob_id(path: Path) -> str:
    """As `git hash-object` prints it."""
    data = path.read_bytes()
    return hashlib.sha1(f"blob {len(data)}\0".encode() + data).hexdigest()


def record(folder: Path, without: str = "") -> None:
    """What `download` leaves beside the files."""
    files = {
        path.name: (
            path.stat().st_size,
            None
            if path.name == without
            else sha256(path)
            if path.suffix == ".safetensors"
            else blob_id(path),
        )
        for path in folder.iterdir()
        if path.name != RECORD
    }
    (folder / RECORD).write_bytes(write(DownloadRecord(REPO, COMMIT, files)))
