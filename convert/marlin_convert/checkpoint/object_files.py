"""A weight file fetched from an object store by parts, several at a time, into a staging folder.

Beside it the digest of each part that has come is noted. What a run that was cut off has fetched is compared
with that and used, so only what is missing, or is not what was written, comes again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

import xxhash

from marlin_convert.checkpoint.staging import PARTS, Received
from marlin_convert.documents.bounds import JOB
from marlin_convert.storage.files import digest, machine_errors, read_small, write_all, write_atomic
from marlin_convert.storage.objects import Objects, StoredObject
from marlin_convert.storage.reads import ShortFileError, read_exactly
from marlin_convert.storage.writer import PARTIAL
from marlin_convert.threads import Workers

#: bytes of a part, and parts of a file that are fetched at a time
PART = 16 << 20
PARALLEL = 8


@dataclass(frozen=True)
class StagedFile:
    """An object as a file in `folder`."""

    objects: Objects
    wanted: StoredObject
    folder: Path

    @property
    def path(self) -> Path:
        """Its place once it is whole."""
        return self.folder / self.wanted.name

    @property
    def _partial(self) -> Path:
        return self.folder / f"{self.wanted.name}{PARTIAL}"

    @property
    def _notes(self) -> Path:
        return self.folder / f"{self.wanted.name}{PARTS}"

    @property
    def _parts(self) -> list[range]:
        size = self.wanted.size
        return [range(at, min(at + PART, size)) for at in range(0, size, PART)]

    def fetch(self, received: Received) -> Path:
        """Have it on the disk whole. `received` gets the bytes that are there, from any thread, and may raise
        to stop. Raises SourceError where the object was changed, MachineError.
        """
        with machine_errors(f"fetching {self.objects.location}/{self.wanted.name} to {self.folder}"):
            self.folder.mkdir(parents=True, exist_ok=True)
            with suppress(FileNotFoundError):  # what is whole may have been damaged since
                os.replace(self.path, self._partial)
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            with os.fdopen(os.open(self._partial, flags, 0o666), "r+b", buffering=0) as file:
                os.ftruncate(file.fileno(), self.wanted.size)
                self._fill(file.fileno(), received)
            os.replace(self._partial, self.path)
        return self.path

    def _fill(self, descriptor: int, received: Received) -> None:
        """Bring the parts that are missing."""
        parts, good = self._parts, self._good(descriptor)
        # the notes of this object alone, and of what is really there
        first = json.dumps([self.wanted.etag, self.wanted.size, PART])
        write_atomic(self._notes, "".join(f"{line}\n" for line in (first, *good.values())).encode())
        got, lock = sum(len(parts[number]) for number in good), Lock()
        received(got)

        def count(size: int) -> None:
            nonlocal got
            with lock:
                got += size
                received(got)

        with self._notes.open("ab", buffering=0) as notes, Workers(PARALLEL) as workers:

            def bring(number: int) -> None:
                noted = self._bring(parts[number], descriptor, count)
                notes.write(f"{json.dumps([number, noted])}\n".encode())

            for _ in workers.map(bring, (number for number in range(len(parts)) if number not in good)):
                pass

    def _bring(self, part: range, descriptor: int, count: Callable[[int], None]) -> str:
        """Fetch a part; returns its xxh3-128, hex."""
        hasher, at = xxhash.xxh3_128(), part.start
        for piece in self.objects.stream(self.wanted, part):
            write_all(descriptor, memoryview(piece), at)
            hasher.update(piece)
            at += len(piece)
            count(len(piece))
        return hasher.hexdigest()

    def _good(self, descriptor: int) -> dict[int, str]:
        """The noted parts that are what was noted, with the lines that say so."""
        noted, parts = self._noted(), self._parts

        def holds(number: int) -> bool:
            part = parts[number]
            try:
                data = read_exactly(descriptor, part.start, len(part), self._partial)
            except ShortFileError:
                return False
            return digest(data).hex() == noted[number]

        return {number: json.dumps([number, noted[number]]) for number in sorted(noted) if holds(number)}

    def _noted(self) -> dict[int, str]:
        """Digests of parts, as noted of this object and no other; a last line may be cut off."""
        try:
            first, *lines = read_small(self._notes, JOB).decode().splitlines()
            if json.loads(first) != [self.wanted.etag, self.wanted.size, PART]:
                return {}
        except (OSError, ValueError, RecursionError):
            return {}
        noted = dict[int, str]()
        for line in lines:
            try:
                number, value = json.loads(line)
            except (ValueError, TypeError, RecursionError):
                continue
            if isinstance(number, int) and 0 <= number < len(self._parts) and isinstance(value, str):
                noted[number] = value
        return noted
