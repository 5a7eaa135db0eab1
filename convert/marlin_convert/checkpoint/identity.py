"""Looking at a source to know it again: by content, since two releases of this family have identical
headers and different weights.

A folder is known by samples of its files, a repository by its commit and what the hub publishes of each file.
Both have the digests of the header and of the first bytes of data, and the id is made of these alone: the
same bytes give the same shards, whichever way they came.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import xxhash

from marlin_convert.checkpoint.header import Header
from marlin_convert.checkpoint.source import Source
from marlin_convert.documents.identity import FileIdentity, SourceIdentity
from marlin_convert.errors import SourceError

#: pages sampled of each file, evenly spread over its data
SAMPLES = 256
_PAGE = 4096


def identify(source: Source, threads: int = 8) -> SourceIdentity:
    """Look at all weight files: 256 pages of each in a folder; nothing more than the headers brought in a
    repository.
    """
    with ThreadPoolExecutor(threads) as workers:
        files = tuple(workers.map(lambda header: _identify_file(source, header), source.headers))
    repo, revision = source.store.origin or (None, None)
    config = xxhash.xxh3_128_hexdigest(source.config_bytes)
    return SourceIdentity(repo=repo, revision=revision, files=files, config=config)


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
