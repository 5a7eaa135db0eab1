"""What the checks of a folder found."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from threading import Lock
from typing import TYPE_CHECKING, Any

from marlin_convert.documents.checks import ReportedFinding, VerifyReport

if TYPE_CHECKING:
    from marlin_convert.checks.units import UnitVerification

#: what a finding says where the output is what it was made to be and the source is not
SOURCE_DAMAGED = "of the source may be damaged; fetch it again first"

#: what it says of a file that no conversion wrote
STRAY = "is not in the manifest"


@dataclass(frozen=True, order=True)
class Finding:
    """One thing that is wrong. The coordinates are None where they do not apply."""

    path: str
    what: str
    layer: int | None = None
    expert: int | None = None
    projection: str | None = None
    rank: int | None = None

    def __str__(self) -> str:
        places = (("layer", self.layer), ("expert", self.expert), ("", self.projection), ("rank", self.rank))
        where = ", ".join(f"{name} {value}".strip() for name, value in places if value is not None)
        return f"{self.path}: {where + ': ' if where else ''}{self.what}"


@dataclass(repr=False)
class Verification:
    """What `verify` found: what is wrong, and how much was read and proven. Filled from several threads.

    `units` has the same by unit, as far as it got; `with_source`: the published files were read, too;
    `of_all`: every rank and layer that is there was asked for;
    `seconds` by stage; `environment`: what ran, for reports.
    """

    findings: list[Finding] = field(default_factory=list)
    files: int = 0
    bytes: int = 0
    proven: int = 0
    unproven: int = 0
    with_source: bool = False
    of_all: bool = True
    units: dict[str, UnitVerification] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    environment: dict[str, str | None] = field(default_factory=dict)
    _lock: Lock = field(default_factory=Lock)

    def __getstate__(self) -> dict[str, Any]:
        """All but the lock, to be brought from one process to another."""
        return {name: value for name, value in self.__dict__.items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=Lock())

    def merge(self, other: Verification) -> None:
        """Add what another process has found of other units."""
        self.add(*other.findings)
        self.count(files=other.files, size=other.bytes, proven=other.proven, unproven=other.unproven)
        self.units |= other.units

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.findings

    def __bool__(self) -> bool:
        return self.ok

    def __repr__(self) -> str:
        return (
            f"Verification(ok={self.ok}, findings={len(self.findings)}, proven={self.proven},"
            f" unproven={self.unproven}, bytes={self.bytes})"
        )

    def add(self, *findings: Finding) -> None:
        """Add findings."""
        with self._lock:
            self.findings.extend(findings)

    def count(self, *, files: int = 0, size: int = 0, proven: int = 0, unproven: int = 0) -> None:
        """Count what was looked at: files, bytes read, source tensors proven and not provable from OUT
        alone.
        """
        with self._lock:
            self.files += files
            self.bytes += size
            self.proven += proven
            self.unproven += unproven

    def document(self) -> VerifyReport:
        """For `--json`."""
        from marlin_convert.checks.units import Blame

        blame = Blame(self.findings)
        return VerifyReport(
            ok=self.ok,
            against="source" if self.with_source else "digests",
            of_all=self.of_all,
            files=self.files,
            bytes=self.bytes,
            tensors_proven=self.proven,
            tensors_unproven=self.unproven,
            seconds=rounded(self.seconds),
            environment=self.environment,
            units=tuple(unit.summed_up(blame) for unit in self.units.values()),
            findings=reported(sorted(self.findings, key=str)),
        )


def on_some_rank(path: str) -> str:
    """The path of a shard where it is not known of which rank it is."""
    return re.sub(r"rank-[^/]+", "rank-*", path)


def reported(findings: Iterable[Finding]) -> tuple[ReportedFinding, ...]:
    """Findings as reports have them."""
    return tuple(
        ReportedFinding(each.path, each.what, each.layer, each.expert, each.projection, each.rank, str(each))
        for each in findings
    )


def rounded(seconds: Mapping[str, float]) -> dict[str, float]:
    """Times as reports have them, to a millisecond."""
    return {stage: round(each, 3) for stage, each in seconds.items()}
