"""`--report DIR`: a page and its JSON, written where the option is given."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from msgspec import Struct

from marlin_convert.cli import output

if TYPE_CHECKING:
    from marlin_convert.documents.manifest import Manifest
    from marlin_convert.report.folder import ReportFolder
    from marlin_convert.report.page import About, Page

F = TypeVar("F", bound=Callable[..., Any])
D = TypeVar("D", bound=Struct)


def report_option(function: F) -> F:
    """--report."""
    return click.option(
        "--report",
        type=click.Path(path_type=Path, file_okay=False),
        metavar="DIR",
        help="Write a page to look at (HTML, needs no network) and the same as JSON into this folder.",
    )(function)


@dataclass
class Reporter:
    """A report about the converted folder that is worked on; `to` None: none is wanted."""

    to: ReportFolder | None
    manifest: Manifest | None = None

    @contextmanager
    def working(self) -> Iterator[None]:
        """The work between. Raises as `ReportFolder.working` before it begins."""
        if self.to is None:
            yield
            return
        from marlin_convert.documents.manifest import read_manifest

        with self.to.working():
            self.manifest = read_manifest(Path(self.to.about.out))
            yield

    def environment(self) -> dict[str, str | None]:
        """What ran, where a report is wanted."""
        if self.to is None:
            return {}
        from marlin_convert.report.environment import describe

        return describe()

    def finish(self, document: D, page: Callable[[Manifest, D, About], Page]) -> None:
        """Write it. Raises MachineError."""
        if self.to is not None and self.manifest is not None:
            made = self.to.finish(document, page(self.manifest, document, self.to.about))
            output.message(f"report: {made}")


def reporter(folder: Path | None, name: str, out: str) -> Reporter:
    """For `name`.html and `name`.json in `folder`, of what the command line at hand does with `out`."""
    if folder is None:
        return Reporter(None)
    from marlin_convert.report.folder import ReportFolder
    from marlin_convert.report.page import About

    line = shlex.join(("marlin-convert", *click.get_current_context().obj))
    return Reporter(ReportFolder(folder, name, About.now(out, line)))
