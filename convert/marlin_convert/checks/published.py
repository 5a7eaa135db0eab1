"""What the published checkpoint holds, as far as a check can know it: the digests that OUT keeps, and the
files themselves where they are given.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import xxhash

from marlin_convert.checkpoint.identify import identify
from marlin_convert.checkpoint.source import Source, open_source
from marlin_convert.checks.findings import SOURCE_DAMAGED, Finding, Verification
from marlin_convert.documents.manifest import Manifest
from marlin_convert.errors import SourceError
from marlin_convert.shards.kept_source import ZEROS, KeptSource
from marlin_convert.storage.buffers import Bytes
from marlin_convert.storage.files import digest

#: a tensor up to this size is read whole to be hashed; expert matrices are, and then compared
WHOLE = 64 << 20
CHUNK = 8 << 20


def open_same(source: str, manifest: Manifest) -> Source:
    """The source that a folder was made from. Raises SourceError where `source` is another one."""
    opened = open_source(source)
    if (difference := manifest.source.identity.difference(identify(opened))) is not None:
        raise SourceError(f"{source} is not what this output was made from: {difference}")
    return opened


class Published:
    """Digests and bytes of source tensors. `kept_is_sound`: source/digests.bin is what the manifest lists."""

    def __init__(
        self, kept: KeptSource, source: Source | None, kept_is_sound: bool, report: Verification
    ) -> None:
        self._kept, self._source, self._sound, self._report = kept, source, kept_is_sound, report
        self.whole = lru_cache(maxsize=16)(self._whole)

    @property
    def has_files(self) -> bool:
        """Whether the published files are at hand."""
        return self._source is not None

    def digest(self, name: str) -> bytes | None:
        """The digest a source tensor must have; None where nothing tells. With files it is taken of them, and
        the kept digest is checked against it on the way.
        """
        kept = self._kept.digests.get(name, ZEROS)
        if self._source is None:
            return None if kept == ZEROS else kept
        size = self._source.tensors[name].entry.size
        value = digest(self.whole(name)) if size < WHOLE else self._stream(name)
        if kept not in (ZEROS, value):
            file = self._source.tensors[name].file
            what = f"the kept digest of {name} is not that in {file}"
            self._report.add(Finding("source/digests.bin", what))
        return value

    def hint(self, name: str, found: bytes) -> str:
        """The end of a finding: what data of the digest `found`, in the place of a source tensor, may be."""
        if self._source is not None and self._sound and self._kept.digests.get(name) == found:
            file = self._source.tensors[name].file
            return f", but not from the digest that OUT keeps of it: {file} {SOURCE_DAMAGED}"
        holders = self._kept.holders(found)
        return f": it holds the data of {holders[0]}" if holders else ""

    def rows(self, name: str, begin: int, end: int) -> Bytes:
        """Rows of a source tensor, [rows, bytes of a row], from the files."""
        assert self._source is not None
        entry = self._source.tensors[name].entry
        row = entry.size // entry.shape[0]
        data = self._read(name, entry.offset + begin * row, (end - begin) * row)
        return data.reshape(end - begin, row)

    def _whole(self, name: str) -> Bytes:
        """All bytes of a source tensor, from the files."""
        assert self._source is not None
        entry = self._source.tensors[name].entry
        return self._read(name, entry.offset, entry.size)

    def _stream(self, name: str) -> bytes:
        assert self._source is not None
        entry, hasher = self._source.tensors[name].entry, xxhash.xxh3_128()
        rows = entry.shape[0]
        step = max(rows * CHUNK // entry.size, 1)
        for begin in range(0, rows, step):
            hasher.update(self.rows(name, begin, min(begin + step, rows)).data)
        return hasher.digest()

    def _read(self, name: str, offset: int, size: int) -> Bytes:
        """Plain reads, tensor by tensor: on purpose not the way the conversion reads."""
        assert self._source is not None
        return np.frombuffer(self._source.part(self._source.tensors[name].file, offset, size), np.uint8)
