"""How far a conversion has come."""

from __future__ import annotations

from collections.abc import Sequence

from marlin_convert.pipeline.target import Target
from marlin_convert.planning.needs import source_tensors
from marlin_convert.planning.output_plan import OutputUnit
from marlin_convert.progress import Progress, Tally


class Counter:
    """Adds up the source bytes of the units that are made and tells `progress`."""

    def __init__(self, target: Target, left: Sequence[OutputUnit], progress: Progress | None) -> None:
        names, tensors = [unit.name for unit in target.plan.units], target.source.tensors
        total = sum(tensors[name].entry.size for unit in left for name in source_tensors(target.plan, unit))
        self._tally = Tally("converting", total, names, progress)
        self._first = min((unit.name for unit in left), key=names.index, default="")

    def begin(self) -> None:
        """Nothing is done yet."""
        self._tally.count(self._first)

    def count(self, unit: OutputUnit, size: int) -> None:
        """Some bytes of a unit are done with; from any thread."""
        self._tally.count(unit.name, size)

    def finish(self) -> None:
        """The shards are made: what is left are the documents."""
        self._tally.then("writing manifest and documents")
