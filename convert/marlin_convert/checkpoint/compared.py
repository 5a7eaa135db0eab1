"""A folder whose files are said to be those of a commit: the sha256 that is published of each weight file is
compared before any unit that reads the file counts, and small files when they are read.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from io import BufferedReader, BytesIO
from pathlib import Path

from marlin_convert.checkpoint.fetcher import AheadFetcher, Needed, stamp
from marlin_convert.errors import SourceError
from marlin_convert.storage.files import CHUNK, machine_error, open_regular


def difference(published: str, content: BytesIO | BufferedReader) -> str | None:
    """How the digest of a file's content differs from the one that the hub publishes of it: sha256, or git's,
    which is all there is of small files, and has 40 digits.
    """
    if len(published) != 40:
        kind, found = "sha256", hashlib.file_digest(content, "sha256").hexdigest()
    else:
        data = content.read()
        kind, found = (
            "git's digest",
            hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest(),
        )
    return None if found == published else f"{kind} {found}, expected {published}"


def not_published(path: Path, where: str, problem: str) -> SourceError:
    """What is said of a file that is not the one of the commit that its folder is said to be of."""
    return SourceError(
        f"{path} is not the file that {where} publishes: {problem}; fetch it again, then run the same command"
        " (a copy of the folder without the record of where it came from is converted as it is, and names no"
        " repository)"
    )


class ComparedFiles(AheadFetcher):
    """The weight files of such a folder, hashed a little ahead of the units; nothing is removed.

    `published` has the sha256 of each, `where` is the repository and commit, for people.
    """

    def __init__(self, folder: Path, published: Mapping[str, str], where: str, needed: Needed) -> None:
        super().__init__(needed)
        self._folder, self._published, self._where = folder, published, where

    def _path(self, file: str) -> Path:
        return self._folder / file

    def _bring(self, file: str) -> Path:
        path, hasher = self._path(file), hashlib.sha256()
        try:
            with os.fdopen(open_regular(path), "rb", buffering=0) as opened:
                before = stamp(os.fstat(opened.fileno()))
                while piece := opened.read(CHUNK):
                    hasher.update(piece)
                    self._go_on()
            after = stamp(path.stat())
        except InterruptedError:
            raise
        except OSError as error:
            raise machine_error(f"reading {path}", error) from error
        if after != before:
            raise SourceError(f"{path} was changed while it was being compared; run the same command again")
        if (found := hasher.hexdigest()) != self._published[file]:
            raise not_published(path, self._where, f"sha256 {found}, expected {self._published[file]}")
        return path
