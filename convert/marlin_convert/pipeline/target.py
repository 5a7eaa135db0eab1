"""What a conversion makes: of which source, by which plan, where."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from marlin_convert.checkpoint.source import Source
from marlin_convert.documents.identity import SourceIdentity
from marlin_convert.planning.output_plan import OutputPlan


@dataclass(frozen=True)
class Target:
    """What one conversion makes; the same in every run of it."""

    source: Source
    identity: SourceIdentity
    plan: OutputPlan
    out: Path
