"""What all jobs share, and how long each stage takes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Lock

from marlin_convert.checkpoint.fetcher import Fetcher
from marlin_convert.documents.provenance import Stage
from marlin_convert.storage.buffers import BufferPool
from marlin_convert.storage.source_reader import SourceReader

#: `repack` includes the exact check, where it is on: what was made is inverted and compared piece by piece,
#: while it is in the cache
STAGES = ("read", "repack", "hash", "write")


@dataclass
class Stages:
    """Seconds and bytes per stage, summed over threads."""

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))
    bytes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(STAGES, 0))
    _lock: Lock = field(default_factory=Lock)

    @contextmanager
    def time(self, stage: str, size: int) -> Iterator[None]:
        """Count a block of work."""
        begin = time.perf_counter()
        yield
        elapsed = time.perf_counter() - begin
        with self._lock:
            self.seconds[stage] += elapsed
            self.bytes[stage] += size

    def add(self, times: Mapping[str, Stage]) -> None:
        """Count what another process has done."""
        with self._lock:
            for stage, time_ in times.items():
                self.seconds[stage] += time_.seconds
                self.bytes[stage] += time_.bytes

    def times(self, digits: int | None = None) -> dict[str, Stage]:
        """As documents have them; seconds rounded where `digits` says so."""
        return {
            stage: Stage(seconds if digits is None else round(seconds, digits), self.bytes[stage])
            for stage, seconds in self.seconds.items()
        }


@dataclass(frozen=True)
class Tools:
    """Shared by all jobs of a run. `check` is whether to invert each buffer and compare before it is
    written; `progress` is told of source bytes that a unit, by its name, has done with.
    """

    fetcher: Fetcher
    reader: SourceReader
    pool: BufferPool
    stages: Stages
    check: bool
    progress: Callable[[str, int], None]
