"""A folder whose files are said to be those of a commit: the sha256 that is published of each weight file is
compared before any unit that reads the file counts.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

from marlin_convert.checkpoint.fetcher import AheadFetcher, Needed, stamp
from marlin_convert.errors import SourceError
from marlin_convert.storage.files import CHUNK, machine_error


class ComparedFiles(AheadFetcher):
    """The weight files of such a folder, hashed a little ahead of the units; nothing is removed.

    `published` has the sha256 of each, `where` is the repository and commit, for people.
    """

    cached = True

    def __init__(self, folder: Path, published: Mapping[str, str], where: str, needed: Needed) -> None:
        super().__init__(needed)
        self._folder, self._published, self._where = folder, published, where

    def _path(self, file: str) -> Path:
        return self._folder / file

    def _bring(self, file: str) -> Path:
        path, hasher = self._path(file), hashlib.sha256()
        try:
            with path.open("rb", buffering=0) as opened:
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
            raise SourceError(
                f"{path} is not the file that {self._where} publishes: sha256 {found}, expected"
                f" {self._published[file]}; fetch it again, then run the same command (a copy of the folder"
                " without the record of where it came from is converted as it is, and names no repository)"
            )
        return path
