"""What the kernel check measured, expert by expert."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from marlin_convert.checks.findings import Finding, reported
from marlin_convert.documents.checks import FusedVerdict, KernelCheck, Verdict


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

    def document(self, every_expert: bool = True) -> KernelCheck:
        """For `--json`."""
        return KernelCheck(
            ok=self.ok,
            environment=self.environment,
            weights_read_back=self.weights_read_back,
            seconds={stage: round(seconds, 3) for stage, seconds in self.seconds.items()},
            experts=tuple(self.verdicts) if every_expert else (),
            fused=tuple(self.fused),
            skipped=tuple(self.skipped),
            findings=reported(self.findings),
        )
