"""What was looked at of each unit, and how each of its files stands."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from marlin_convert.checks.findings import STRAY, Finding, Verification
from marlin_convert.checks.values import Counted, ValueCounts
from marlin_convert.documents.checks import CheckedShard, CheckedUnit, ReportedFinding, ShardState
from marlin_convert.documents.manifest import Shard, Unit


@dataclass(kw_only=True)
class UnitVerification(Verification):
    """What was found of one unit; `whole` gets all of it, too. `read` is False where none of its data was
    read, because a file of it is unsound.
    """

    whole: Verification
    unit: Unit
    shards: Sequence[Shard]
    read: bool = True
    busy: float = 0.0
    values: ValueCounts = field(default_factory=ValueCounts)

    def __post_init__(self) -> None:
        self.whole.units[self.unit.name] = self

    def add(self, *findings: Finding) -> None:
        """Add findings."""
        super().add(*findings)
        self.whole.add(*findings)

    def count(self, *, files: int = 0, size: int = 0, proven: int = 0, unproven: int = 0) -> None:
        """Count what was looked at."""
        super().count(files=files, size=size, proven=proven, unproven=unproven)
        self.whole.count(files=files, size=size, proven=proven, unproven=unproven)

    def count_values(self, counted: dict[str, Counted]) -> None:
        """Count codes and scales of an expert."""
        with self._lock:
            self.values.add(counted)

    def timed(self, task: Callable[[], None]) -> None:
        """Do a part of the work on the unit."""
        begin = time.perf_counter()
        task()
        seconds = time.perf_counter() - begin
        with self._lock:
            self.busy += seconds

    def summed_up(self, blame: Blame) -> CheckedUnit:
        """For reports."""
        return CheckedUnit(
            unit=self.unit.name,
            layer=self.unit.layer,
            bytes=self.bytes,
            seconds=round(self.busy, 3),
            tensors_proven=self.proven,
            tensors_unproven=self.unproven,
            shards=tuple(CheckedShard(shard.rank, self._state(shard, blame)) for shard in self.shards),
            values=self.values.document(),
        )

    def _state(self, shard: Shard, blame: Blame) -> ShardState:
        if blame.names(shard):
            return "wrong"
        if blame.may_mean(self.unit):
            return "suspect"
        if not self.read:
            return "unread"
        return "sound" if self.unproven else "exact"


class Blame:
    """Whom findings name, for many questions. What lies in OUT and does not belong there is no shard's
    fault, whatever its name.
    """

    def __init__(self, findings: Iterable[Finding | ReportedFinding]) -> None:
        every = [finding for finding in findings if STRAY not in finding.what]
        self._named = {finding.path for finding in every}
        self._layers = {finding.layer for finding in every if finding.rank is None} - {None}

    def names(self, shard: Shard) -> bool:
        """Whether a finding is about this file."""
        return shard.path in self._named

    def names_unit(self, name: str) -> bool:
        """Whether a finding is about a file of this unit, of which rank is not known."""
        return any(path.endswith(f"rank-*/{name}.safetensors") for path in self._named)

    def may_mean(self, unit: Unit) -> bool:
        """Whether a finding is about this unit, of which rank is not known."""
        return self.names_unit(unit.name) or unit.layer in self._layers
