"""Bytes of files in a hub repository, into memory: ranges for headers, small files whole. Never more or other
bytes than were asked for.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from marlin_convert.checkpoint.hub_errors import AGAIN, hub_errors
from marlin_convert.errors import MachineError, SourceError

#: requests for the same bytes, where the answer breaks off
ATTEMPTS = 4


@dataclass(frozen=True)
class HubFile:
    """A file as listed: `sha256` for large ones, `blob` is git's digest."""

    name: str
    size: int
    sha256: str | None
    blob: str


@dataclass(frozen=True)
class HubReader:
    """Reads one commit of a repository."""

    repo: str
    commit: str
    token: str | None

    def whole(self, file: HubFile) -> bytes:
        """All bytes of a file. Raises SourceError, MachineError."""
        return self._get(file, {}, lambda response: _expect(file.name, response, 200), file.size)

    def range(self, file: HubFile, offset: int, length: int) -> bytes:
        """Bytes of a file. Raises SourceError for a server that answers with anything but that range."""

        def check(response: Any) -> None:
            _expect(file.name, response, 206)
            span = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+)", response.headers.get("content-range", ""))
            if span is None or tuple(map(int, span.groups())) != (offset, offset + length - 1, file.size):
                found = response.headers.get("content-range")
                raise SourceError(
                    f"{file.name}: asked for bytes {offset}-{offset + length - 1} of {file.size}, the server"
                    f" says it sends {found}; the file has changed, or a proxy is in the way"
                )

        return self._get(file, {"Range": f"bytes={offset}-{offset + length - 1}"}, check, length)

    def _get(self, file: HubFile, extra: dict[str, str], check: Callable[[Any], None], length: int) -> bytes:
        """A checked answer of exactly `length` bytes; asked for again where it breaks off."""
        for attempt in range(ATTEMPTS):
            try:
                with hub_errors(f"reading {file.name}", self.repo):
                    return b"".join(self._stream(file, extra, check, length))
            except MachineError as error:
                if attempt == ATTEMPTS - 1 or hasattr(
                    error.__cause__, "response"
                ):  # the client has waited for a better answer already
                    raise
                time.sleep(attempt + 0.5)
        raise AssertionError

    def _stream(
        self, file: HubFile, extra: dict[str, str], check: Callable[[Any], None], length: int
    ) -> Iterator[bytes]:
        from huggingface_hub import constants, hf_hub_url

        # public: it is in an __all__ that is computed, which mypy does not follow
        from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_stream_backoff  # type: ignore[attr-defined, unused-ignore]

        url = hf_hub_url(self.repo, file.name, revision=self.commit)
        headers = build_hf_headers(token=self.token) | {"Accept-Encoding": "identity"} | extra
        timeout, got = constants.HF_HUB_DOWNLOAD_TIMEOUT, 0
        with http_stream_backoff(
            "GET", url, headers=headers, timeout=timeout, retry_on_exceptions=()
        ) as response:
            hf_raise_for_status(response)
            check(response)
            for piece in response.iter_bytes():
                got += len(piece)
                if got > length:
                    break
                yield piece
        if got != length:
            raise MachineError(f"{file.name}: {got} bytes came where {length} should have; {AGAIN}")


def wrong_bytes(file: HubFile, data: bytes) -> str | None:
    """The same for bytes in memory; small files have git's digest only."""
    if file.sha256 is not None:
        value, expected = hashlib.sha256(data).hexdigest(), file.sha256
    else:
        value, expected = (
            hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest(),
            file.blob,
        )
    return None if value == expected else f"digest {value}, expected {expected}"


def _expect(name: str, response: Any, status: int) -> None:
    if response.status_code != status:
        ranges = (
            "; it ignores range requests, which the headers need: use another endpoint, or `marlin-convert"
            " download` and the folder"
        )
        raise SourceError(
            f"{name}: the server answers {response.status_code} where {status} is"
            f" needed{ranges if status == 206 else ''}"
        )
