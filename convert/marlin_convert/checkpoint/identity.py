"""Who a source is: by content, since two releases of this family have identical headers and different
weights.

A folder is known by samples of its files, a repository by its commit and what the hub publishes of each file.
Both have the digests of the header and of the first bytes of data, and the id is made of these alone: the
same bytes give the same shards, whichever way they came.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import xxhash

from marlin_convert.checkpoint.header import Header
from marlin_convert.checkpoint.source import Source
from marlin_convert.errors import SourceError

#: pages sampled of each file, evenly spread over its data
SAMPLES = 256
_PAGE = 4096


@dataclass(frozen=True)
class FileIdentity:
    """One weight file: bytes, and xxh3-128 of its header, of the start of its data, and of a sample of all of
    it (folder), or the hub's sha256.
    """

    name: str
    size: int
    header: str
    start: str
    sample: str | None = None
    sha256: str | None = None

    def difference(self, other: FileIdentity) -> str | None:
        """What differs of that which both know, in one word."""
        for what in ("size", "header", "start", "sample", "sha256"):
            mine, its = getattr(self, what), getattr(other, what)
            if None not in (mine, its) and mine != its:
                return what if what in ("size", "header") else "content"
        return None


@dataclass(frozen=True)
class SourceIdentity:
    """All weight files and config.json; repository and commit where they are known."""

    files: tuple[FileIdentity, ...]
    config: str
    repo: str | None = None
    revision: str | None = None

    @property
    def id(self) -> str:
        """32 hex digits that stand for the whole; they go into every shard's header."""
        common = {
            "config": self.config,
            "files": [[file.name, file.size, file.header, file.start] for file in self.files],
        }
        return xxhash.xxh3_128_hexdigest(json.dumps(common, sort_keys=True, separators=(",", ":")).encode())

    @property
    def from_hub(self) -> bool:
        """Whether it is the hub's word that stands for the content."""
        return any(file.sha256 is not None for file in self.files)

    def as_json(self) -> dict[str, Any]:
        """For records and manifest; what is not known is left out."""
        files = [
            {key: value for key, value in asdict(file).items() if value is not None} for file in self.files
        ]
        origin = {} if self.repo is None else {"repo": self.repo, "revision": self.revision}
        return {**origin, "files": files, "config": self.config}

    def continued_by(self, other: SourceIdentity) -> str | None:
        """What forbids to continue with another look at the source, in words; None where nothing does."""
        if self.revision is not None and other.revision is not None and self.revision != other.revision:
            return (
                f"it was commit {self.revision} of {self.repo}, now it is {other.revision}; give --revision"
                f" {self.revision} to continue"
            )
        if self.from_hub != other.from_hub:
            mine, its = (f"{look.repo} on the hub" if look.from_hub else "a folder" for look in (self, other))
            return f"before it was {mine}, now it is {its}"
        return self.difference(other)

    def difference(self, other: SourceIdentity) -> str | None:
        """What differs in content, in words; None where nothing that both know does."""
        if self.config != other.config:
            return "config.json differs"
        if [file.name for file in self.files] != [file.name for file in other.files]:
            return "the weight files have other names"
        for mine, its in zip(self.files, other.files, strict=True):
            if (what := mine.difference(its)) is not None:
                return f"the {what} of {mine.name} differs"
        return None


def identity_from_json(document: dict[str, Any]) -> SourceIdentity:
    """Inverse of `SourceIdentity.as_json`."""
    files = tuple(FileIdentity(**file) for file in document["files"])
    return SourceIdentity(files, document["config"], document.get("repo"), document.get("revision"))


def identify(source: Source, threads: int = 8) -> SourceIdentity:
    """Look at all weight files: 256 pages of each in a folder; nothing more than the headers brought in a
    repository.
    """
    with ThreadPoolExecutor(threads) as workers:
        files = tuple(workers.map(lambda header: _identify_file(source, header), source.headers))
    repo, revision = source.store.origin or (None, None)
    return SourceIdentity(files, xxhash.xxh3_128_hexdigest(source.config_bytes), repo, revision)


def _identify_file(source: Source, header: Header) -> FileIdentity:
    start, sha256 = xxhash.xxh3_128_hexdigest(source.store.start(header)), source.store.sha256(header.file)
    sample = _sample(source, header) if sha256 is None else None
    return FileIdentity(
        header.file, header.size, xxhash.xxh3_128_hexdigest(header.raw), start, sample, sha256
    )


def _sample(source: Source, header: Header) -> str:
    hasher = xxhash.xxh3_128()
    data, pages = header.data_start, max(-(-(header.size - header.data_start) // _PAGE), 1)
    step = max(pages // SAMPLES, 1)
    try:
        with source.path(header.file).open("rb") as file:
            sampled = [*range(0, pages, step), pages - 1]
            if hasattr(
                os, "posix_fadvise"
            ):  # ask for all pages at once: the disk takes them in its own order
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
                for page in sampled:
                    os.posix_fadvise(file.fileno(), data + page * _PAGE, _PAGE, os.POSIX_FADV_WILLNEED)
            for page in sampled:
                hasher.update(os.pread(file.fileno(), _PAGE, data + page * _PAGE))
    except OSError as error:
        raise SourceError(f"{header.file}: cannot be read ({error.strerror})") from error
    return hasher.hexdigest()


def stamps(source: Source, files: Iterable[str]) -> dict[str, list[int]]:
    """Size and modification time (ns) of files: a change between two looks means that they were touched."""
    result = {}
    for name in files:
        try:
            status = source.path(name).stat()
        except OSError as error:
            raise SourceError(f"{name} has gone from the source: {error.strerror}") from error
        result[name] = [status.st_size, status.st_mtime_ns]
    return result
