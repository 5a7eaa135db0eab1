"""A converted folder as a source: what it was made from, read out of its shards, so that `convert`'s own
pipeline makes another conversion of it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from marlin_convert.checkpoint.fetcher import Fetcher, LocalFiles, Needed
from marlin_convert.checkpoint.header import Header
from marlin_convert.checkpoint.index import INDEX_NAME, SourceTensor, collect_tensors, parse_index
from marlin_convert.checkpoint.source import HANDLED, Source
from marlin_convert.checkpoint.store import Known
from marlin_convert.documents.manifest import Manifest, read_manifest
from marlin_convert.errors import OutputError
from marlin_convert.progress import Progress
from marlin_convert.shards.assembled import AssembledReader
from marlin_convert.shards.kept_source import KeptSource, listed_bytes, read_sound_source
from marlin_convert.shards.stored_index import StoredIndex


@dataclass(frozen=True)
class ConvertedStore:
    """See `Store`: the files that the conversion in `out` was made from, which are not there as files. Only
    what is asked of a source that is converted is answered.
    """

    out: Path
    manifest: Manifest
    kept: KeptSource
    index: StoredIndex
    folder: None = None

    @staticmethod
    def open(out: str | os.PathLike[str]) -> ConvertedStore:
        """Of a converted folder; no shard is read yet. Raises OutputError where it is not finished, or what
        it keeps of its source is damaged; UsageError where it is no converted folder.
        """
        folder = Path(out)
        manifest = read_manifest(folder)
        kept = read_sound_source(folder, manifest)
        if manifest.source.identity.id != manifest.source_id:
            raise OutputError(f"{folder}/manifest.json: source.id is not that of its files; run verify")
        return ConvertedStore(folder, manifest, kept, StoredIndex.of(manifest, kept))

    def source(self) -> Source:
        """The source that the folder was made from. Raises OutputError."""
        listed = {file.path for file in self.manifest.files}
        index_bytes, readme = (
            self.read(path) if path in listed else None
            for path in (f"source/{INDEX_NAME}", "source/README.md")
        )
        weight_map = parse_index(index_bytes) if index_bytes is not None else None
        source = Source(
            label=os.fspath(self.out),
            store=self,
            names=self.names(),
            headers=self.kept.headers,
            tensors=collect_tensors(self.kept.headers, weight_map),
            config_bytes=self.kept.config_bytes,
            index_bytes=index_bytes,
            readme=readme,
            model=self.kept.model,
            notes=(),
            large=frozenset(name for name in self.manifest.source.not_copied if not name.endswith("/")),
        )
        for name in source.auxiliary:  # they are written last: what is wrong with them is said first
            self.read(name)
        return source

    @property
    def where(self) -> str:
        """The converted folder's full path."""
        return str(self.out.resolve())

    @property
    def hub_commit(self) -> tuple[str, str] | None:
        """What the conversion says of it."""
        source = self.manifest.source
        return None if source.repo is None or source.revision is None else (source.repo, source.revision)

    @property
    def known(self) -> Known:
        """What it was made from."""
        return Known(self.manifest.source.identity, self.kept.digests, len(self.manifest.ranks))

    def names(self) -> dict[str, bool]:
        """What lay beside config.json: what was copied, and what was not."""
        own = {file.path for file in self.manifest.files if "/" not in file.path} - {*HANDLED, "digests.bin"}
        left = self.manifest.source.not_copied
        return dict(
            sorted((dict.fromkeys(own, True) | {n.rstrip("/"): not n.endswith("/") for n in left}).items())
        )

    def size(self, name: str) -> int:
        """Bytes of a small file, as listed."""
        return next(file.size for file in self.manifest.files if file.path == name)

    def read(self, name: str) -> bytes:
        """A small file as it was copied. Raises OutputError where it is not any more what it was."""
        return listed_bytes(self.out, self.manifest, name)

    def header(self, name: str) -> Header:
        """A kept header."""
        return next(header for header in self.kept.headers if header.file == name)

    def start(self, header: Header) -> bytes:
        """Not needed: what it was made from is `known`."""
        raise NotImplementedError

    def sha256(self, name: str) -> str | None:
        """What was known to be published."""
        return next(file.sha256 for file in self.manifest.source.files if file.name == name)

    def etag(self, name: str) -> str | None:
        """What it was in an object store."""
        return next(file.etag for file in self.manifest.source.files if file.name == name)

    def part(self, name: str, offset: int, size: int) -> bytes:
        """There are no such files."""
        raise NotImplementedError

    def path(self, name: str) -> Path:
        """There are no such files."""
        raise NotImplementedError

    def places(self) -> set[Path]:
        """The converted folder, and where its links lead."""
        paths = [each.path for each in self.manifest.files] + [each.path for each in self.manifest.shards]
        return {self.out.resolve(), *((self.out / path).resolve().parent for path in paths)}

    def fetcher(self, needed: Needed, staging: Path, progress: Progress | None) -> Fetcher:
        """All is here."""
        return LocalFiles()

    def reader(self, tensors: Mapping[str, SourceTensor], direct: bool) -> AssembledReader:
        """Out of the shards."""
        return AssembledReader(self.out, self.index, direct)
