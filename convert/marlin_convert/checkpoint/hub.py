"""A checkpoint in a hub repository: the list of its files, headers by range requests, and files fetched when
they are needed, each compared with what the hub publishes.

The hub's own client does all of the transfer; it is imported only when a repository is used.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from io import BytesIO
from pathlib import Path

from marlin_convert.checkpoint.compared import difference
from marlin_convert.checkpoint.fetcher import Fetcher, Needed
from marlin_convert.checkpoint.file_reader import FileReader
from marlin_convert.checkpoint.header import Header
from marlin_convert.checkpoint.hub_errors import AGAIN, hub_errors
from marlin_convert.checkpoint.hub_files import HubFile, HubFiles, HubOptions, remove_fetched
from marlin_convert.checkpoint.index import SourceTensor
from marlin_convert.checkpoint.ranged import header_by_ranges
from marlin_convert.checkpoint.staging import Received, RemoteFetcher
from marlin_convert.checkpoint.store import FolderStore, folder_of_commit, part_of_file
from marlin_convert.documents.bounds import bound_of
from marlin_convert.errors import MachineError, SourceError
from marlin_convert.progress import Progress
from marlin_convert.storage.source_reader import SourceReader

#: downloads of a file, where it does not come or is not what was published
TRIES = 3


@dataclass(eq=False)
class HubStore:
    """One commit of a repository; see `Store`."""

    hub: HubFiles
    files: dict[str, HubFile]
    folders: tuple[str, ...]
    folder: None = None
    known: None = None
    _starts: dict[str, bytes] = field(default_factory=dict)
    _paths: dict[str, Path] = field(default_factory=dict)

    @property
    def options(self) -> HubOptions:
        """How it is read."""
        return self.hub.options

    @property
    def where(self) -> str:
        """Repository and commit."""
        return f"{self.hub.repo}@{self.hub.commit}"

    @property
    def hub_commit(self) -> tuple[str, str]:
        """Repository and commit."""
        return self.hub.repo, self.hub.commit

    @property
    def place(self) -> Path:
        """Where fetched files go that are kept: the chosen folder or the cache."""
        from huggingface_hub import constants

        return Path(self.options.local_dir or self.options.cache_dir or constants.HF_HUB_CACHE)

    @property
    def max_workers(self) -> int | None:
        """See `RemoteStore`."""
        return self.options.max_workers

    def stages(self, staging: Path | None) -> bool:
        """See `RemoteStore`."""
        return staging is not None and self.options.free_source

    def places(self) -> set[Path]:
        """See `Store`."""
        return {self.place.resolve()}

    def names(self) -> dict[str, bool]:
        """See `Store`."""
        return dict(sorted((dict.fromkeys(self.files, True) | dict.fromkeys(self.folders, False)).items()))

    def size(self, name: str) -> int:
        """Bytes of a file, as listed."""
        return self.files[name].size

    def sha256(self, name: str) -> str | None:
        """What the hub publishes. Raises SourceError for a weight file of which it publishes none."""
        value = self.files[name].sha256
        if value is None:
            raise SourceError(
                f"{name}: {self.hub.repo} lists no sha256 for it, so it cannot be checked; fetch it yourself"
                " and give the folder"
            )
        return value

    def read(self, name: str) -> bytes:
        """A file whole, compared with its listed digest. Raises SourceError, MachineError."""
        file = self._file(name)
        if file.size > (most := bound_of(name)):
            raise SourceError(
                f"{name} of {self.where}: it has {file.size} bytes, at most {most} are expected"
            )
        data = self.hub.read(file)
        if (problem := difference(file.published, BytesIO(data))) is not None:
            raise SourceError(f"{name}: {problem}: what came is not what {self.where} publishes; {AGAIN}")
        return data

    def header(self, name: str) -> Header:
        """The checked header of a weight file, by range requests only. Raises SourceError, MachineError."""
        file = self._file(name)
        header, self._starts[name] = header_by_ranges(name, file.size, partial(self.hub.read, file))
        return header

    def start(self, header: Header) -> bytes:
        """The first START bytes of a file's data; they came with the header."""
        return self._starts[header.file]

    def etag(self, name: str) -> None:
        """Its commit says which file it is."""

    def part(self, name: str, offset: int, size: int) -> bytes:
        """See `Store`; the file is fetched."""
        return part_of_file(self.path(name), offset, size)

    def path(self, name: str) -> Path:
        """A weight file on the disk; fetched now if it was not before. Raises SourceError, MachineError."""
        return self._paths[name] if name in self._paths else self.fetch(name, None, lambda size: None)

    def fetcher(self, needed: Needed, staging: Path, progress: Progress | None) -> Fetcher:
        """Fetches into `staging` if files are to be freed, else to the chosen folder or the cache."""
        return RemoteFetcher(self, needed, staging, progress)

    def reader(self, tensors: Mapping[str, SourceTensor], direct: bool) -> SourceReader:
        """What has just been fetched and hashed is in the page cache: reading past it would read the disk."""
        return FileReader(self.path, tensors, direct=False)

    def forget(self, name: str) -> None:
        """Take note that a file was removed."""
        self._paths.pop(name, None)

    def find(self, name: str, staging: Path | None) -> Path | None:
        """Where a file lies already: in the staging folder, the chosen folder or the cache."""
        from huggingface_hub import try_to_load_from_cache

        for folder in (staging, self.options.local_dir):
            if folder is not None and (Path(folder) / name).is_file():
                return Path(folder) / name
        repo, commit = self.hub_commit
        found = try_to_load_from_cache(repo, name, cache_dir=self.options.cache_dir, revision=commit)
        return Path(found) if isinstance(found, str) else None

    def fetch(self, name: str, staging: Path | None, received: Received) -> Path:
        """Have a file on the disk, in size and sha256 what the hub publishes; see `Received`.

        It is looked for in `staging`, too, and goes there if files are to be freed, else to the chosen folder
        or the cache. What was there before this run is used if it is right and never removed, but for the
        staging folder, which is ours; what came now and is wrong is removed again. Raises SourceError,
        MachineError.
        """
        file, found = self._file(name), self.find(name, staging)
        tries = TRIES if found is None else TRIES + 1
        for attempt in range(tries):
            try:
                path = found or self.hub.download(
                    file, staging if self.options.free_source else None, received
                )
            except MachineError as error:
                # the client goes on by itself after most failures of the network, but not after all of them
                if attempt == tries - 1 or getattr(error.__cause__, "errno", None):
                    raise
                time.sleep(1 + 2 * attempt)
                continue
            if (problem := file.difference_on_disk(path)) is None:
                received(file.size)
                self._paths[name] = path
                return path
            if found is not None and (staging is None or found.parent != staging):
                raise SourceError(
                    f"{found} is not the file that {self.where} publishes: {problem}; move it away, then"
                    f" {AGAIN}"
                )
            remove_fetched(path)
            found = None
        raise SourceError(
            f"{name}: {problem}, {TRIES} times: what comes is not what {self.where} publishes; nothing of it"
            f" was kept, {AGAIN}"
        )

    def _file(self, name: str) -> HubFile:
        if name not in self.files:
            raise SourceError(
                f"{name} is missing in {self.where}; is this the repository of a published checkpoint?"
            )
        return self.files[name]


def open_repository(repo: str, options: HubOptions) -> tuple[HubStore | FolderStore, tuple[str, ...]]:
    """A repository, and notes for people; with HF_HUB_OFFLINE the snapshot of it that lies in the cache, as a
    folder. Raises SourceError, MachineError, UsageError.
    """
    from huggingface_hub import constants, try_to_load_from_cache

    if not constants.HF_HUB_OFFLINE:
        return open_hub(repo, options), ()
    if options.local_dir is not None:
        return FolderStore(Path(options.local_dir)), ()
    revision = options.revision or "main"
    with hub_errors(f"looking for {repo} in the cache", repo):
        config = try_to_load_from_cache(repo, "config.json", cache_dir=options.cache_dir, revision=revision)
    if not isinstance(config, str):
        raise MachineError(
            f"HF_HUB_OFFLINE is set and the cache has no {repo} at {revision}; fetch it before,"
            f" without that: marlin-convert download {repo}"
        )
    snapshot = Path(config).parent
    # a snapshot's files are links to blobs, which have the names of their digests
    published = {path.name: path.readlink().name for path in snapshot.iterdir() if path.is_symlink()}
    return folder_of_commit(snapshot, (repo, snapshot.name), published)


def open_hub(repo: str, options: HubOptions) -> HubStore:
    """List a repository at the commit that the revision stands for now. Raises SourceError, MachineError,
    UsageError.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import RepoFile

    api, revision = HfApi(token=options.token), options.revision or "main"
    with hub_errors(f"opening {repo}" + (f" at {options.revision}" if options.revision else ""), repo):
        commit = api.model_info(repo, revision=revision).sha
        if not commit:
            raise MachineError(f"the hub does not say which commit {revision} of {repo} is; {AGAIN}")
        entries = sorted(api.list_repo_tree(repo, revision=commit), key=lambda entry: entry.path)
    files = {
        entry.path: HubFile(entry.path, entry.size, entry.lfs.sha256 if entry.lfs else None, entry.blob_id)
        for entry in entries
        if isinstance(entry, RepoFile)
    }
    folders = tuple(entry.path for entry in entries if entry.path not in files)
    return HubStore(HubFiles(repo, commit, options), files, folders)
