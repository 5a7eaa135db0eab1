"""What the kernel check measured, expert by expert."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from marlin_convert.checks.report import Finding


@dataclass(frozen=True)
class Verdict:
    """One expert's matrix on one rank. `wrong` counts weights that the kernel reads differently; errors are
    of random activations, relative.
    """

    layer: int
    rank: int
    expert: int
    projection: str
    wrong: int | None
    relative_error: float | None
    max_error: float | None
    ok: bool


@dataclass(frozen=True)
class FusedVerdict:
    """The whole routed MoE of a layer, summed over ranks, for one number of tokens."""

    layer: int
    tokens: int
    relative_error: float
    tolerance: float
    ok: bool


@dataclass
class KernelReport:
    """All verdicts; `environment` says what ran."""

    environment: dict[str, Any] = field(default_factory=dict)
    verdicts: list[Verdict] = field(default_factory=list)
    fused: list[FusedVerdict] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    weights_read_back: int = 0
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether everything that ran was right."""
        return not self.findings

    def as_json(self, every_expert: bool = True) -> dict[str, Any]:
        """The report; its schema is schemas/kernel-report.schema.json."""
        return {
            "ok": self.ok,
            "environment": self.environment,
            "weights_read_back": self.weights_read_back,
            "seconds": {stage: round(seconds, 3) for stage, seconds in self.seconds.items()},
            "experts": [asdict(verdict) for verdict in self.verdicts] if every_expert else [],
            "fused": [asdict(verdict) for verdict in self.fused],
            "skipped": self.skipped,
            "findings": [asdict(finding) | {"message": str(finding)} for finding in self.findings],
        }
