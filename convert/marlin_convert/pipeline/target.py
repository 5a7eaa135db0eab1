"""What a conversion makes: of which source, by which plan, where."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from marlin_convert.checkpoint.source import Source
from marlin_convert.documents.identity import SourceIdentity
from marlin_convert.planning.output_plan import OutputPlan
from marlin_convert.storage.source_reader import SourceReader


@dataclass(frozen=True)
class Target:
    """What one conversion makes; the same in every run of it. With `direct_io` it is read and written past
    the page cache where that works. `attempt` as in `ShardFile`.
    """

    source: Source
    identity: SourceIdentity
    plan: OutputPlan
    out: Path
    direct_io: bool = True
    attempt: str = ""

    @cached_property
    def reader(self) -> SourceReader:
        """What brings the source's tensors."""
        return self.source.store.reader(self.source.tensors, self.direct_io)
