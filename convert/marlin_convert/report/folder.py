"""Where a report goes: known to be writable before hours of work, and never one of an earlier run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from msgspec import Struct

from marlin_convert.documents.codec import write
from marlin_convert.errors import ConvertError, UsageError
from marlin_convert.pipeline.work_folder import is_ours
from marlin_convert.report.page import GENERATOR, About, Page, unfinished
from marlin_convert.storage.files import machine_errors, open_regular, write_atomic


@dataclass(frozen=True)
class ReportFolder:
    """Writes `name`.json and `name`.html in a folder."""

    folder: Path
    name: str
    about: About

    @contextmanager
    def working(self) -> Iterator[None]:
        """The work between: until it ends the page says that it has not, in place of an earlier report; where
        it ends with an error, it says that.

        Raises MachineError where nothing can be written there, UsageError where that would be within the
        folder that is looked at, both before anything is done.
        """
        here = self.folder.resolve()
        for place in (here, *here.parents):
            if place == Path(self.about.out).resolve() or is_ours(place):
                raise UsageError(
                    f"--report {self.folder} lies within {place}, where the next verify would take it for"
                    " damage; give a folder elsewhere"
                )
        self._refuse_others()
        with machine_errors(f"creating {self.folder}"):
            self.folder.mkdir(parents=True, exist_ok=True)
        with self._writing():
            self._path("json").unlink(missing_ok=True)
            self._write(unfinished(self.about))
        try:
            yield
        except ConvertError as error:
            with suppress(ConvertError), self._writing():
                self._write(unfinished(self.about, str(error)))
            raise

    def finish(self, document: Struct, page: Page) -> Path:
        """Put the report there; returns where the page is. Raises MachineError."""
        with self._writing():
            write_atomic(self._path("json"), write(document) + b"\n")
            self._write(page)
        return self._path("html")

    def _refuse_others(self) -> None:
        """Raise UsageError where what would be replaced is not the page of an earlier report, or the JSON
        beside one.
        """
        page = self._path("html")
        for path in (page, self._path("json")):
            if os.path.lexists(path) and not _is_page(page):
                raise UsageError(
                    f"{path} would be replaced and is not of a report of this program; move it away, or give"
                    " another folder"
                )

    def _writing(self) -> AbstractContextManager[None]:
        return machine_errors(f"writing the report into {self.folder}")

    def _write(self, page: Page) -> None:
        write_atomic(self._path("html"), page.encoded())

    def _path(self, ending: str) -> Path:
        return self.folder / f"{self.name}.{ending}"


def _is_page(path: Path) -> bool:
    """Whether a file is a page of ours; a link is none."""
    try:
        with os.fdopen(open_regular(path, os.O_NOFOLLOW), "rb") as file:
            return str(GENERATOR).encode() in file.read(512)
    except OSError:
        return False
