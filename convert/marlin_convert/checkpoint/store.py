"""Where a checkpoint's files are: what its reader asks of any such place, and the answers of a folder;
`hub.py` has those of a repository, `object_store.py` those of a prefix in an object store.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Protocol

from marlin_convert.checkpoint.compared import ComparedFiles, difference, not_published
from marlin_convert.checkpoint.fetcher import Fetcher, LocalFiles, Needed
from marlin_convert.checkpoint.file_reader import FileReader
from marlin_convert.checkpoint.header import Header, read_header
from marlin_convert.checkpoint.index import INDEX_NAME, SourceTensor, weight_names
from marlin_convert.documents.bounds import JOB, bound_of
from marlin_convert.documents.codec import read
from marlin_convert.documents.identity import SourceIdentity
from marlin_convert.documents.records import DownloadRecord
from marlin_convert.errors import OutputError, SourceError
from marlin_convert.progress import Progress
from marlin_convert.storage.files import open_regular, read_small, reading
from marlin_convert.storage.reads import read_exactly
from marlin_convert.storage.source_reader import SourceReader

#: written by `download` beside the files: where they come from
RECORD = ".marlin-convert-source.json"
#: bytes behind the header that a source's id is made of; few, since they also come over the wire
START = 16 << 10
SHA256 = re.compile(r"[0-9a-f]{64}")
#: of small files git's digest is published
DIGEST = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


@dataclass(frozen=True)
class Known:
    """What is known of a source whose files are not there: its identity, what each of its tensors must hash
    to, and how many files are read together for one of them.
    """

    identity: SourceIdentity
    digests: Mapping[str, bytes]
    files: int

    def whose(self, digest: bytes) -> str:
        """Whose data has this digest, for people."""
        return next((f": it is {name}'s data" for name, known in self.digests.items() if known == digest), "")


class Store(Protocol):
    """The files of one checkpoint, by name. Reading any of them may raise SourceError, or MachineError where
    disk or network fail.
    """

    @property
    def where(self) -> str:
        """For people: a path, or a repository and its commit."""

    @property
    def folder(self) -> Path | None:
        """The folder, where all files lie in one that is the user's own."""

    @property
    def hub_commit(self) -> tuple[str, str] | None:
        """(repository, commit) where that is known for certain."""

    @property
    def known(self) -> Known | None:
        """What the source must be, where it is not read out of its own files; else None."""

    def names(self) -> dict[str, bool]:
        """All names on the top level; the value says whether it is a file."""

    def size(self, name: str) -> int:
        """Bytes of a file."""

    def read(self, name: str) -> bytes:
        """A small file whole."""

    def header(self, name: str) -> Header:
        """The checked header of a weight file."""

    def start(self, header: Header) -> bytes:
        """The first START bytes of its data."""

    def sha256(self, name: str) -> str | None:
        """What the hub publishes as the digest of a file."""

    def etag(self, name: str) -> str | None:
        """What an object store has as the mark of a file's content."""

    def part(self, name: str, offset: int, size: int) -> bytes:
        """Some bytes of a weight file."""

    def path(self, name: str) -> Path:
        """A weight file on the disk, whole; of an object store only while it is fetched for a conversion."""

    def places(self) -> set[Path]:
        """Real paths of the folders in which the user's own source files are."""

    def fetcher(self, needed: Needed, staging: Path, progress: Progress | None) -> Fetcher:
        """What brings the files that units need, in their order; nothing is fetched yet."""

    def reader(self, tensors: Mapping[str, SourceTensor], direct: bool) -> SourceReader:
        """What reads the tensors; past the page cache with `direct`, unless their files have all just gone
        through it.
        """


@dataclass(frozen=True)
class FolderStore:
    """A local folder."""

    folder: Path
    hub_commit: tuple[str, str] | None = None
    #: digests of its files, where `hub_commit` is claimed
    published: Mapping[str, str] = field(default_factory=dict)
    known: None = None

    @property
    def where(self) -> str:
        """The folder's full path."""
        return str(self.folder.resolve())

    def names(self) -> dict[str, bool]:
        """What lies in the folder."""
        with _source_errors(self.folder):
            return {path.name: path.is_file() for path in sorted(self.folder.iterdir())}

    def size(self, name: str) -> int:
        """Bytes of a file. Raises SourceError."""
        with _source_errors(self.path(name)):
            return self.path(name).stat().st_size

    def read(self, name: str) -> bytes:
        """A file whole, compared with what is published of it. Raises SourceError."""
        with _source_errors(self.path(name)):
            try:
                data = read_small(self.path(name), bound_of(name))
            except FileNotFoundError:
                raise SourceError(
                    f"{name} is missing in {self.folder}; is this the folder of a published checkpoint?"
                ) from None
        if (
            name in self.published
            and (problem := difference(self.published[name], BytesIO(data))) is not None
        ):
            raise not_published(self.path(name), self._commit, problem)
        return data

    def header(self, name: str) -> Header:
        """The checked header of a file. Raises SourceError."""
        return header_of(self.path(name))

    def start(self, header: Header) -> bytes:
        """The first bytes of a file's data. Raises SourceError."""
        size = min(START, header.size - header.data_start)
        with open_file(self.path(header.file)) as descriptor:
            return read_exactly(descriptor, header.data_start, size, header.file)

    def sha256(self, name: str) -> str | None:
        """What is known to be published of a weight file of `hub_commit`."""
        return self.published.get(name)

    def etag(self, name: str) -> None:
        """No object store has it."""

    def part(self, name: str, offset: int, size: int) -> bytes:
        """See `Store`. Raises SourceError, MachineError."""
        return part_of_file(self.path(name), offset, size)

    def path(self, name: str) -> Path:
        """Where it lies."""
        return self.folder / name

    def places(self) -> set[Path]:
        """See `Store`; files may be links into other folders, as in the hub cache."""
        return {self.folder.resolve(), *(self.path(name).resolve().parent for name in self.names())}

    def fetcher(self, needed: Needed, staging: Path, progress: Progress | None) -> Fetcher:
        """All files are here; those that are said to be of a commit are compared."""
        if self.hub_commit is None:
            return LocalFiles()
        return ComparedFiles(self.folder, self.published, self._commit, needed)

    def reader(self, tensors: Mapping[str, SourceTensor], direct: bool) -> SourceReader:
        """Those that are compared are read for that, just before."""
        return FileReader(self.path, tensors, direct and self.hub_commit is None)

    @property
    def _commit(self) -> str:
        return "@".join(self.hub_commit or ())


def folder_of_commit(
    folder: Path, commit: tuple[str, str], published: Mapping[str, str | None]
) -> tuple[FolderStore, tuple[str, ...]]:
    """A folder whose files are said to be those of `commit`, (repository, commit), and notes for people.
    `published` is what is known of their digests. The commit is claimed only if those of config.json, the
    index and every weight file, of these sha256, are known; then each known file that is read is compared.
    """
    store = FolderStore(folder)
    names = store.names()
    weights = weight_names(names)
    known = {
        name: value
        for name in names
        if (SHA256 if name in weights else DIGEST).fullmatch(value := published.get(name) or "")
    }
    needed = [*weights, *(name for name in ("config.json", INDEX_NAME) if name in names)]
    if not (missing := [name for name in needed if name not in known]):
        return FolderStore(folder, commit, known), ()
    unknown = missing[0]
    said = "{} at commit {}".format(*commit)
    note = f"what {said} publishes of {unknown} is not known here, so the output will not name the repository"
    return store, (note,)


def download_record(folder: Path) -> DownloadRecord | None:
    """What `download` wrote in a folder, if all its files still have the sizes it recorded."""
    try:
        record = read(read_small(folder / RECORD, JOB), DownloadRecord, f"{folder / RECORD} is damaged")
        same = all((folder / name).stat().st_size == size for name, (size, _) in record.files.items())
    except (OSError, OutputError):
        return None
    return record if same else None


def header_of(path: Path) -> Header:
    """The checked header of a safetensors file on disk. Raises SourceError."""
    with open_file(path) as descriptor:
        size = os.fstat(descriptor).st_size
        return read_header(path.name, size, partial(read_exactly, descriptor, file=path.name))


def part_of_file(path: Path, offset: int, size: int) -> bytes:
    """Some bytes of a file on disk. Raises SourceError, MachineError."""
    with open_file(path) as descriptor:
        return read_exactly(descriptor, offset, size, path.name)


@contextmanager
def open_file(path: Path) -> Iterator[int]:
    """A descriptor to read a regular file. Raises SourceError for anything else; MachineError, also for what
    fails in its context.
    """
    with _source_errors(path), os.fdopen(open_regular(path), "rb") as file:
        yield file.fileno()


@contextmanager
def _source_errors(path: Path) -> Iterator[None]:
    """A path that is not what a source has is a SourceError; see `reading`."""
    try:
        with reading(path):
            yield
    except OSError as error:
        raise SourceError(f"{path}: cannot be read ({error.strerror})") from error
