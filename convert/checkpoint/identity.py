"""Who a source is: by content, since two releases of this family have identical headers and different weights."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import xxhash

from convert.checkpoint.header import Header
from convert.checkpoint.source import Source
from convert.errors import SourceError

#: pages sampled of each file, evenly spread over its data
SAMPLES = 256
_PAGE = 4096


@dataclass(frozen=True)
class FileIdentity:
    """One weight file: bytes, and xxh3-128 of its header and of a sample of its data."""

    name: str
    size: int
    header: str
    sample: str


@dataclass(frozen=True)
class SourceIdentity:
    """All weight files and config.json."""

    files: tuple[FileIdentity, ...]
    config: str

    @property
    def id(self) -> str:
        """32 hex digits that stand for the whole; they go into every shard's header."""
        return xxhash.xxh3_128_hexdigest(json.dumps(self.as_json(), sort_keys=True, separators=(",", ":")).encode())

    def as_json(self) -> dict[str, Any]:
        """For records and manifest."""
        return {"files": [asdict(file) for file in self.files], "config": self.config}

    def difference(self, other: SourceIdentity) -> str | None:
        """What differs, in words; None where nothing does."""
        if self.config != other.config:
            return "config.json differs"
        if [file.name for file in self.files] != [file.name for file in other.files]:
            return "the weight files have other names"
        for mine, its in zip(self.files, other.files, strict=True):
            if mine != its:
                what = "size" if mine.size != its.size else "header" if mine.header != its.header else "content"
                return f"the {what} of {mine.name} differs"
        return None


def identity_from_json(document: dict[str, Any]) -> SourceIdentity:
    """Inverse of `SourceIdentity.as_json`."""
    return SourceIdentity(tuple(FileIdentity(**file) for file in document["files"]), document["config"])


def identify(source: Source, threads: int = 8) -> SourceIdentity:
    """Sample all weight files (256 pages each)."""
    with ThreadPoolExecutor(threads) as workers:
        files = tuple(workers.map(lambda header: _identify_file(source, header), source.headers))
    return SourceIdentity(files, xxhash.xxh3_128_hexdigest(source.config_bytes))


def _identify_file(source: Source, header: Header) -> FileIdentity:
    hasher = xxhash.xxh3_128()
    data, pages = header.data_start, max(-(-(header.size - header.data_start) // _PAGE), 1)
    step = max(pages // SAMPLES, 1)
    try:
        with source.path(header.file).open("rb") as file:
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
            for page in [*range(0, pages, step), pages - 1]:
                hasher.update(os.pread(file.fileno(), _PAGE, data + page * _PAGE))
    except OSError as error:
        raise SourceError(f"{header.file}: cannot be read ({error.strerror})") from error
    return FileIdentity(header.file, header.size, xxhash.xxh3_128_hexdigest(header.raw), hasher.hexdigest())


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
