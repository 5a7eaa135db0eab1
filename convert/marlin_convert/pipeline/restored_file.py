"""Whether a file on the disk is the published one: by what OUT keeps of that."""

from __future__ import annotations

import hashlib
import os
import struct
from pathlib import Path

from marlin_convert.checkpoint.header import Header
from marlin_convert.documents.restore import RestoredFile
from marlin_convert.pipeline.recheck import tensor_digest
from marlin_convert.pipeline.restore_plan import RestorePlan
from marlin_convert.storage.files import CHUNK, advise, digest, machine_errors, open_regular
from marlin_convert.storage.reads import read_exactly

#: bytes that are asked for ahead of what is hashed
AHEAD = 4 * CHUNK


def file_head(header: Header) -> bytes:
    """The bytes of a file before its data."""
    return struct.pack("<Q", len(header.raw)) + header.raw


def sha256_of(path: Path) -> str:
    """The digest that a hub publishes, in hex. Raises OSError."""
    hasher, at = hashlib.sha256(), 0
    with os.fdopen(open_regular(path), "rb", buffering=0) as file:
        advise(file.fileno(), 0, AHEAD, "WILLNEED")
        while piece := file.read(CHUNK):
            at += len(piece)
            advise(file.fileno(), at + AHEAD - CHUNK, CHUNK, "WILLNEED")  # while this piece is hashed
            hasher.update(piece)
    return hasher.hexdigest()


def restored(plan: RestorePlan, header: Header) -> RestoredFile:
    """The record of a file that was proven."""
    proof = "digests" if plan.sha256(header.file) is None else "sha256"
    return RestoredFile(header.file, header.size, digest(header.raw).hex(), proof)


def has_head(path: Path, header: Header) -> bool:
    """Whether a file has the size and the header of a published one; its data is not looked at. Raises
    MachineError.
    """
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            return _has_head(file.fileno(), header)
    except OSError:
        return False


def _has_head(descriptor: int, header: Header) -> bool:
    head = file_head(header)
    return (
        os.fstat(descriptor).st_size == header.size
        and read_exactly(descriptor, 0, len(head), header.file) == head
    )


def is_published(path: Path, header: Header, plan: RestorePlan) -> bool:
    """Whether a file is the published one, to the last byte. Raises MachineError."""
    if not has_head(path, header):
        return False
    with machine_errors(f"reading {path}"):
        if (published := plan.sha256(header.file)) is not None:
            return sha256_of(path) == published
        with os.fdopen(open_regular(path), "rb") as file:
            return all(
                tensor_digest(file.fileno(), entry, header.file) == plan.kept.digests[entry.name]
                for entry in header.tensors
            )
