"""The identity of a source: digests of its content, since two releases of this family have identical headers
and different weights.

A folder is identified by a sample of each file, a repository by its commit and the sha256 that the hub
publishes of each file; a folder that is said to be of a commit by all of these. An
object has its ETag. All have the digests of the header and of the first bytes of data, and the id is made of
these alone: the same bytes give the same shards, whichever way they came.
"""

from __future__ import annotations

from collections.abc import Iterable

import xxhash

from marlin_convert.checkpoint.fetcher import stamp
from marlin_convert.checkpoint.header import Header
from marlin_convert.checkpoint.source import Source
from marlin_convert.checkpoint.store import open_file
from marlin_convert.documents.identity import FileIdentity, SourceIdentity
from marlin_convert.errors import SourceError
from marlin_convert.storage.files import PAGE, advise
from marlin_convert.storage.reads import read_exactly
from marlin_convert.threads import Workers

#: a sample has at least this many pages of a file that has as many, and less than twice as many
SAMPLES = 256
#: files that are looked at together
AT_A_TIME = 8


def identify(source: Source, sampled: bool = True) -> SourceIdentity:
    """Identify an opened source. Of a folder this reads a sample of each weight file, unless it is only to be
    looked at; of a repository nothing more than came with the headers.
    """
    if source.store.known is not None:
        return source.store.known.identity
    with Workers(AT_A_TIME) as workers:
        files = tuple(workers.map(lambda header: _identify_file(source, header, sampled), source.headers))
    repo, revision = source.store.hub_commit or (None, None)
    config = xxhash.xxh3_128_hexdigest(source.config_bytes)
    return SourceIdentity(repo=repo, revision=revision, files=files, config=config)


def _identify_file(source: Source, header: Header, sampled: bool) -> FileIdentity:
    start, sha256 = xxhash.xxh3_128_hexdigest(source.store.start(header)), source.store.sha256(header.file)
    sample = _sample(source, header) if sampled and source.folder is not None else None
    return FileIdentity(
        name=header.file,
        size=header.size,
        header=xxhash.xxh3_128_hexdigest(header.raw),
        start=start,
        sample=sample,
        sha256=sha256,
        etag=source.store.etag(header.file),
    )


def _sample(source: Source, header: Header) -> str:
    """xxh3-128 of pages of 4096 bytes one after the other; the first begins where the data begins, the last
    may be shorter. Of n pages (one if there is no data) these are every max(n // 256, 1)-th from page 0, then
    page n - 1, even where it was among them.
    """
    data, pages = header.data_start, max(-(-(header.size - header.data_start) // PAGE), 1)
    sampled = [*range(0, pages, max(pages // SAMPLES, 1)), pages - 1]
    hasher = xxhash.xxh3_128()
    with open_file(source.path(header.file)) as descriptor:
        # ask for all pages at once: the disk takes them in its own order
        advise(descriptor, 0, 0, "RANDOM")
        for page in sampled:
            advise(descriptor, data + page * PAGE, PAGE, "WILLNEED")
        for page in sampled:
            at = data + page * PAGE
            hasher.update(read_exactly(descriptor, at, min(PAGE, header.size - at), header.file))
    return hasher.hexdigest()


def stamps(source: Source, files: Iterable[str]) -> dict[str, list[int]]:
    """Size, modification and change time (ns) of files: a change between two looks means that they were
    touched.
    """
    result = {}
    for name in files:
        try:
            status = source.path(name).stat()
        except OSError as error:
            raise SourceError(f"{name} has gone from the source: {error.strerror}") from error
        result[name] = stamp(status)
    return result
