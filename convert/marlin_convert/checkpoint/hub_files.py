"""Whole files of a hub repository on the disk: fetched by the hub's client, compared with what the hub
publishes, removed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from marlin_convert.checkpoint.hub_errors import AGAIN, hub_errors
from marlin_convert.checkpoint.hub_reader import HubFile, wrong_bytes
from marlin_convert.errors import MachineError

Count = Callable[[int], None]


@dataclass(frozen=True)
class HubOptions:
    """How a repository is read; None means what the hub's client does by default (HF_TOKEN, HF_HOME and so
    on).
    """

    revision: str | None = None
    token: str | None = None
    cache_dir: str | None = None
    local_dir: str | None = None
    free_source: bool = False
    max_workers: int | None = None


def download_file(
    repo: str, commit: str, file: HubFile, options: HubOptions, folder: Path | None, count: Count
) -> Path:
    """Fetch a file to `folder`, the chosen folder or the cache. `count` gets bytes as they come, and all of
    them back where it fails.

    Raises SourceError, MachineError. The content is not compared yet.
    """
    from huggingface_hub import hf_hub_download

    counted = 0

    def forward(size: int) -> None:
        nonlocal counted
        counted += size
        count(size)

    with hub_errors(f"fetching {file.name}", repo):
        try:
            path = hf_hub_download(
                repo,
                file.name,
                revision=commit,
                token=options.token,
                cache_dir=options.cache_dir,
                local_dir=folder or options.local_dir,
                tqdm_class=_forwarding_bar(forward),
            )
        except BaseException:
            count(-counted)
            raise
    count(file.size - counted)
    return Path(path)


def wrong_file(path: Path, file: HubFile) -> str | None:
    """What is wrong with a file on the disk, or None: size, then sha256 while its pages are still in
    memory.
    """
    try:
        if (size := path.stat().st_size) != file.size:
            return f"{size} bytes, expected {file.size}"
        if file.sha256 is None:
            return wrong_bytes(file, path.read_bytes())
        with path.open("rb") as opened:
            value = hashlib.file_digest(opened, "sha256").hexdigest()
    except OSError as error:
        raise MachineError(
            f"{path}: cannot be read ({error.strerror}); check the disk, then {AGAIN}"
        ) from error
    return None if value == file.sha256 else f"sha256 {value}, expected {file.sha256}"


def remove_fetched(path: Path) -> None:
    """Remove a fetched file; in the cache, the link and what it leads to."""
    blob = path.resolve()
    for each in {path, blob}:
        with suppress(FileNotFoundError):
            each.unlink()


def _forwarding_bar(count: Count) -> type[Any]:
    """A progress bar class for the hub's client that shows nothing and passes bytes on."""
    from tqdm import tqdm

    # tqdm has no types of its own
    class Bar(tqdm):  # type: ignore[type-arg, misc, unused-ignore]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **(kwargs | {"disable": True}))

        def update(self, n: float | None = 1) -> None:
            count(int(n or 0))

    return Bar
