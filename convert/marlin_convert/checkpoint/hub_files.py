"""Files of a hub repository: parts of them and small ones into memory, others to the disk, and both compared
with what the hub publishes.

Ranges are read here because the client's readers (HfFileSystem, parse_safetensors_file_metadata) take
whatever a server sends: they compare neither status nor Content-Range nor length with what was asked for.
Each file is compared here when it comes; verify_repo_checksums does it for whole folders and lists the
repository again.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from marlin_convert.checkpoint.compared import difference
from marlin_convert.checkpoint.fetcher import stamp
from marlin_convert.checkpoint.hub_errors import AGAIN, hub_errors
from marlin_convert.checkpoint.staging import Received
from marlin_convert.errors import MachineError, SourceError
from marlin_convert.storage.files import open_regular

#: requests for the same bytes, where the answer breaks off
ATTEMPTS = 4


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


@dataclass(frozen=True)
class HubFile:
    """A file as listed: `sha256` for large ones, `blob` is git's digest."""

    name: str
    size: int
    sha256: str | None
    blob: str

    @property
    def published(self) -> str:
        """The digest that is published of it; small files have git's only."""
        return self.sha256 or self.blob

    def difference_on_disk(self, path: Path) -> str | None:
        """How a file on the disk differs: size, then digest while its pages are still in memory."""
        try:
            if (size := path.stat().st_size) != self.size:
                return f"{size} bytes, expected {self.size}"
            with os.fdopen(open_regular(path), "rb") as opened:
                before = stamp(os.fstat(opened.fileno()))
                found = difference(self.published, opened)
            return found if stamp(path.stat()) == before else "it was changed while it was being compared"
        except OSError as error:
            raise MachineError(
                f"{path}: cannot be read ({error.strerror}); check the disk, then {AGAIN}"
            ) from error


@dataclass(frozen=True)
class HubFiles:
    """Reads and fetches files of one commit of a repository, through the hub's own client."""

    repo: str
    commit: str
    options: HubOptions

    def read(self, file: HubFile, part: range | None = None) -> bytes:
        """Bytes `part` of a file, or all of it, asked for again where an answer breaks off.

        Raises SourceError for a server that sends anything but that, MachineError.
        """
        for attempt in range(ATTEMPTS):
            try:
                with hub_errors(f"reading {file.name}", self.repo):
                    return self._read_once(file, part)
            except MachineError as error:
                # after an answer of the server's the client has waited for a better one already
                if attempt == ATTEMPTS - 1 or hasattr(error.__cause__, "response"):
                    raise
                time.sleep(attempt + 0.5)
        raise AssertionError

    def _read_once(self, file: HubFile, part: range | None) -> bytes:
        from huggingface_hub import constants, hf_hub_url
        from huggingface_hub.utils import (  # type: ignore[attr-defined, unused-ignore]  # computed __all__
            build_hf_headers,
            hf_raise_for_status,
            http_stream_backoff,
        )

        url = hf_hub_url(self.repo, file.name, revision=self.commit)
        headers = build_hf_headers(token=self.options.token) | {"Accept-Encoding": "identity"}
        if part is not None:
            headers["Range"] = f"bytes={part.start}-{part.stop - 1}"
        timeout, data = constants.HF_HUB_DOWNLOAD_TIMEOUT, bytearray()
        length = file.size if part is None else len(part)
        with http_stream_backoff(
            "GET", url, headers=headers, timeout=timeout, retry_on_exceptions=()
        ) as response:
            hf_raise_for_status(response)
            _refuse_other_answer(file, part, response)
            for piece in response.iter_bytes():
                data += piece
                if len(data) > length:
                    break
        if len(data) != length:
            raise MachineError(f"{file.name}: {len(data)} bytes came where {length} should have; {AGAIN}")
        return bytes(data)

    def download(self, file: HubFile, folder: Path | None, received: Received) -> Path:
        """Fetch a file to `folder`, the chosen folder or the cache; its content is not compared yet. Raises
        SourceError, MachineError.
        """
        from huggingface_hub import hf_hub_download
        from tqdm import tqdm

        bars: list[Any] = []

        class Bar(tqdm):  # type: ignore[type-arg, misc, unused-ignore]  # has no types; in its stubs generic
            """Shows nothing, passes bytes on. Xet has two bars, of what has come and of what is written."""

            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__(*args, **(kwargs | {"disable": True}))
                bars.append(self)

            def update(self, n: float | None = 1) -> None:
                self.n += n or 0
                received(max(int(bar.n) for bar in bars))

        with hub_errors(f"fetching {file.name}", self.repo):
            path = hf_hub_download(
                self.repo,
                file.name,
                revision=self.commit,
                token=self.options.token,
                cache_dir=self.options.cache_dir,
                local_dir=folder or self.options.local_dir,
                tqdm_class=Bar,
            )
        return Path(path)


def remove_fetched(path: Path) -> None:
    """Remove a fetched file; in the cache, the link and what it leads to."""
    for each in {path, path.resolve()}:
        with suppress(FileNotFoundError):
            each.unlink()


def _refuse_other_answer(file: HubFile, part: range | None, response: Any) -> None:
    """Raise SourceError for an answer that is not the file, or not that part of it."""
    status = 200 if part is None else 206
    if response.status_code != status:
        ranges = (
            "; it ignores range requests, which the headers need: use another endpoint, or `marlin-convert"
            " download` and the folder"
        )
        raise SourceError(
            f"{file.name}: the server answers {response.status_code} where {status} is needed"
            f"{'' if part is None else ranges}"
        )
    if part is not None:
        asked, found = f"{part.start}-{part.stop - 1}", response.headers.get("content-range")
        if found != f"bytes {asked}/{file.size}":
            raise SourceError(
                f"{file.name}: asked for bytes {asked} of {file.size}, the server says it sends {found}; the"
                " file has changed, or a proxy is in the way"
            )
