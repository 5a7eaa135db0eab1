"""How far a conversion has come."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock

from marlin_convert.pipeline.target import Target
from marlin_convert.planning.needs import source_tensors
from marlin_convert.planning.output_plan import OutputUnit
from marlin_convert.progress import Point, Progress


class Counter:
    """Adds up the source bytes of the units that are made and tells `progress`."""

    def __init__(self, target: Target, left: Sequence[OutputUnit], progress: Progress | None) -> None:
        self._progress, self._lock, self._done = progress, Lock(), 0
        self._numbers = {unit.name: number for number, unit in enumerate(target.plan.units, 1)}
        tensors = target.source.tensors
        self._total = sum(
            tensors[name].entry.size for unit in left for name in source_tensors(target.plan, unit)
        )
        #: the one that was begun last
        self._unit = min(left, key=lambda unit: self._numbers[unit.name]).name if left else ""

    def begin(self) -> None:
        """Nothing is done yet."""
        self._tell("converting")

    def count(self, unit: OutputUnit, size: int) -> None:
        """Some bytes of a unit are done with; from any thread."""
        with self._lock:
            self._done += size
            self._unit = max(self._unit, unit.name, key=self._numbers.__getitem__)
            self._tell("converting")

    def finish(self) -> None:
        """The shards are made: what is left are the documents."""
        self._unit = ""
        self._tell("writing manifest and documents")

    def _tell(self, stage: str) -> None:
        if self._progress is not None:
            number = self._numbers.get(self._unit, 0)
            units = len(self._numbers) if number else 0
            self._progress(Point(stage, self._done, self._total, self._unit, number, units))
