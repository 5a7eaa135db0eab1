"""A checkpoint below a prefix of an object store: headers by range requests, and files fetched when they are
needed. Objects are read as they were listed, by their ETags: one that is written again is not read on.

Fetched files are always staged, since such a store has no cache on this machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from marlin_convert.checkpoint.fetcher import Fetcher, Needed
from marlin_convert.checkpoint.file_reader import FileReader
from marlin_convert.checkpoint.header import Header
from marlin_convert.checkpoint.hub_files import HubOptions
from marlin_convert.checkpoint.index import SourceTensor
from marlin_convert.checkpoint.object_files import StagedFile
from marlin_convert.checkpoint.ranged import header_by_ranges
from marlin_convert.checkpoint.staging import Received, RemoteFetcher
from marlin_convert.documents.bounds import bound_of
from marlin_convert.errors import SourceError, UsageError
from marlin_convert.progress import Progress
from marlin_convert.storage.objects import Location, Objects, StoredObject
from marlin_convert.storage.source_reader import SourceReader


@dataclass(eq=False)
class ObjectStore:
    """The objects directly below a prefix; see `Store` and `RemoteStore`."""

    objects: Objects
    files: dict[str, StoredObject]
    folders: tuple[str, ...]
    max_workers: int | None = None
    folder: None = None
    hub_commit: None = None
    known: None = None
    place: None = None
    _starts: dict[str, bytes] = field(default_factory=dict)
    _paths: dict[str, Path] = field(default_factory=dict)

    @property
    def where(self) -> str:
        """s3://bucket/prefix."""
        return str(self.objects.location)

    def names(self) -> dict[str, bool]:
        """See `Store`."""
        return dict(sorted((dict.fromkeys(self.folders, False) | dict.fromkeys(self.files, True)).items()))

    def size(self, name: str) -> int:
        """Bytes of an object, as listed."""
        return self.files[name].size

    def sha256(self, name: str) -> None:
        """Nothing is published."""

    def etag(self, name: str) -> str:
        """As listed, without its quotation marks."""
        return self.files[name].etag.strip('"')

    def read(self, name: str) -> bytes:
        """A small object whole. Raises SourceError, MachineError."""
        if name not in self.files:
            raise SourceError(
                f"{name} is missing in {self.where}; is this the prefix of a published checkpoint?"
            )
        if (size := self.size(name)) > (most := bound_of(name)):
            raise SourceError(f"{name} of {self.where}: it has {size} bytes, at most {most} are expected")
        return self.objects.read(self.files[name])

    def header(self, name: str) -> Header:
        """The checked header of a weight file, by range requests. Raises SourceError, MachineError."""
        if name not in self.files:
            raise SourceError(f"{name} is missing in {self.where}; upload it, or fetch the index again")
        file = self.files[name]
        header, self._starts[name] = header_by_ranges(name, file.size, partial(self.objects.read, file))
        return header

    def start(self, header: Header) -> bytes:
        """The first bytes of a file's data; they came with the header."""
        return self._starts[header.file]

    def part(self, name: str, offset: int, size: int) -> bytes:
        """See `Store`: a request each."""
        return self.objects.read(self.files[name], range(offset, offset + size))

    def path(self, name: str) -> Path:
        """Where a fetched file lies."""
        return self._paths[name]

    def places(self) -> set[Path]:
        """None of this machine."""
        return set()

    def stages(self, staging: Path | None) -> bool:
        """See `RemoteStore`."""
        return True

    def find(self, name: str, staging: Path | None) -> Path | None:
        """See `RemoteStore`; what lies in `staging` is seen to be right when it is fetched."""
        return staging / name if staging is not None and (staging / name).is_file() else None

    def fetch(self, name: str, staging: Path | None, received: Received) -> Path:
        """See `RemoteStore`. Raises SourceError, MachineError."""
        assert staging is not None
        self._paths[name] = StagedFile(self.objects, self.files[name], staging).fetch(received)
        return self._paths[name]

    def forget(self, name: str) -> None:
        """See `RemoteStore`."""
        self._paths.pop(name, None)

    def fetcher(self, needed: Needed, staging: Path, progress: Progress | None) -> Fetcher:
        """Fetches into `staging`, and lets files go that no unit needs any more."""
        return RemoteFetcher(self, needed, staging, progress)

    def reader(self, tensors: Mapping[str, SourceTensor], direct: bool) -> SourceReader:
        """What has just been written is in the page cache: reading past it would read the disk."""
        return FileReader(self.path, tensors, direct=False)


def open_objects(uri: str, options: HubOptions) -> ObjectStore:
    """List s3://bucket/prefix. Raises UsageError for one that is none, options that are for repositories, or
    without boto3; SourceError where nothing is there or it may not be seen; MachineError.
    """
    location = Location.of(uri)
    if options.revision or options.token or options.cache_dir or options.local_dir:
        raise UsageError(
            f"{location} is in an object store; --revision, --token, --cache-dir and --local-dir are for"
            " repositories of the hub"
        )
    objects = Objects(location)
    files, folders = objects.list()
    if not files:
        below = f", but has {folders[0]}/" if folders else ""
        raise SourceError(f"{location} has no objects directly below it{below}; check the prefix")
    return ObjectStore(objects, files, folders, options.max_workers)
