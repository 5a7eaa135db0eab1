"""What a run of `restore` did."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from marlin_convert.documents.restore import MissingFile, RestoreResult
from marlin_convert.pipeline.stages import Stages


@dataclass(frozen=True)
class Restored:
    """What a run did: how it went on in `folder` (`new`, `continue`, or `done` where nothing was to do);
    weight files made now, their bytes, and those found; how many of these were compared with the sha256 that
    is published, too; weight files that are not wholly in OUT, and what no conversion keeps; seconds and
    bytes per stage, summed over threads.
    """

    folder: Path
    action: str
    made: int
    made_bytes: int
    found: int
    by_sha256: int
    missing: tuple[MissingFile, ...]
    not_kept: tuple[str, ...]
    stages: Stages

    def document(self, seconds: float) -> RestoreResult:
        """As --json prints it."""
        times = {stage: time for stage, time in self.stages.times().items() if time.bytes}
        return RestoreResult(
            folder=str(self.folder),
            action=self.action,
            complete=not self.missing,
            files_made=self.made,
            made_bytes=self.made_bytes,
            files_found=self.found,
            by_sha256=self.by_sha256,
            missing=self.missing,
            not_kept=self.not_kept,
            seconds=seconds,
            stages=times,
        )
