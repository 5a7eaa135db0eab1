"""`download`: the files a conversion needs, each compared with what the hub publishes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from marlin_convert.arguments import refuse_odd
from marlin_convert.checkpoint.hub import HubStore, open_hub
from marlin_convert.checkpoint.hub_errors import AGAIN, hub_errors
from marlin_convert.checkpoint.hub_files import HubOptions
from marlin_convert.checkpoint.index import INDEX_NAME, weight_names
from marlin_convert.checkpoint.source import auxiliary_files, is_repository
from marlin_convert.checkpoint.staging import RemoteFetcher
from marlin_convert.checkpoint.store import RECORD
from marlin_convert.documents.codec import write
from marlin_convert.documents.records import DownloadRecord
from marlin_convert.documents.results import DownloadResult
from marlin_convert.errors import MachineError, SourceError, UsageError
from marlin_convert.progress import Progress
from marlin_convert.storage.files import free_space, machine_errors, make_path, write_atomic

#: files at a time, where the options do not say
WORKERS = 8


@dataclass(frozen=True)
class Downloaded:
    """What lies in `folder` now: files with their sizes."""

    repo: str
    commit: str
    folder: Path
    files: dict[str, int]

    def document(self) -> DownloadResult:
        """For `--json`."""
        return DownloadResult(self.repo, self.commit, str(self.folder), self.files)


def download(
    repo: str,
    folder: str | os.PathLike[str] | None = None,
    *,
    hub: HubOptions | None = None,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    progress: Progress | None = None,
) -> Downloaded:
    """Fetch the files that a conversion needs of `repo` (org/name), of these those that match `include` and
    not `exclude`, into `folder` or the hub's cache, and compare each with what the hub publishes. `hub` says
    how the repository is read.

    Raises UsageError, SourceError for a file that is not what the hub publishes, MachineError where network
    or disk fail.
    """
    refuse_odd(places={"folder": folder})
    options = hub or HubOptions()
    if folder is not None:
        options = replace(options, local_dir=os.fspath(folder))
    if not isinstance(repo, str) or not is_repository(repo):
        raise UsageError(f"{repo} is not the id of a hub repository; give org/name")
    store = open_hub(repo, replace(options, max_workers=options.max_workers or WORKERS))
    files = needed_files(store, include, exclude)
    fetcher = RemoteFetcher(store, {repo: files}, None, progress)
    _refuse_full_disk(store.place, fetcher.room)
    if options.local_dir is None:
        place = _pin_revision(store)
    else:
        place = Path(options.local_dir)
        with machine_errors(f"creating {place}"):
            make_path(place)
    fetcher.start()
    try:
        fetcher.wait(files)
    finally:
        fetcher.stop()
        fetcher.join()
    if options.local_dir is not None:
        published: dict[str, tuple[int, str | None]] = {
            name: (store.files[name].size, store.files[name].published) for name in files
        }
        with machine_errors(f"writing {place / RECORD}"):
            write_atomic(place / RECORD, write(DownloadRecord(repo, store.hub.commit, published), indent=1))
    return Downloaded(repo, store.hub.commit, place, {name: store.files[name].size for name in files})


def needed_files(store: HubStore, include: Sequence[str], exclude: Sequence[str]) -> list[str]:
    """Weights, index, configuration and the small files that are copied; of these, those that the patterns
    choose. Raises SourceError for none.
    """
    from huggingface_hub.utils import (  # type: ignore[attr-defined, unused-ignore]  # computed __all__
        filter_repo_objects,
    )

    small = [name for name in ("config.json", INDEX_NAME, "README.md") if name in store.files]
    every = [*small, *auxiliary_files(store.names())[0], *weight_names(store.files)]
    chosen = list(
        filter_repo_objects(
            every, allow_patterns=list(include) or None, ignore_patterns=list(exclude) or None
        )
    )
    if not chosen:
        raise SourceError(
            f"{store.where} has no file to fetch; it has {', '.join(list(store.files)[:5]) or 'none at all'}"
        )
    return chosen


def _pin_revision(store: HubStore) -> Path:
    """Let the cache know which commit the revision is, so that it is found without network, too. Returns the
    snapshot's folder.
    """
    from huggingface_hub import hf_hub_download

    revision, options = store.options.revision or "main", store.options
    name = "config.json" if "config.json" in store.files else next(iter(store.files))
    with hub_errors(f"fetching {name}", store.hub.repo):
        path = hf_hub_download(
            store.hub.repo, name, revision=revision, token=options.token, cache_dir=options.cache_dir
        )
    folder = Path(path).parent
    if folder.name != store.hub.commit:
        raise MachineError(
            f"{revision} of {store.hub.repo} moved from {store.hub.commit} to {folder.name} just now; {AGAIN}"
        )
    return folder


def _refuse_full_disk(place: Path, needed: int) -> None:
    """Raise MachineError before anything is fetched where not all fits."""
    if needed > (free := free_space(place)):
        raise MachineError(
            f"{place}: {needed / 1e9:.1f} GB are to be fetched but only {free / 1e9:.1f} GB are free; free"
            " some space, or let `marlin-convert convert --free-source` keep only a few files at a time"
        )
