"""What the kernel check measured, expert by expert."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter
from typing import Any

from marlin_convert.checks.findings import Finding, reported, rounded
from marlin_convert.documents.checks import (
    FusedVerdict,
    KernelCheck,
    KernelLayer,
    KernelRank,
    MatrixErrors,
)

#: Each output is rounded to bf16 once: at most 2^-9 of it. Sums are float32, so K <= 7168 terms add less than
#: a tenth of that; twice the bound.
GEMM_TOLERANCE = 2.0**-8


@dataclass(frozen=True)
class Verdict:
    """One expert's matrix (w13 or w2) on one rank: weights that the kernel reads differently, and the errors
    of random activations: relative in norm, and the largest of one output.
    """

    layer: int
    rank: int
    expert: int
    projection: str
    wrong: int
    relative_error: float
    max_error: float
    ok: bool


@dataclass(repr=False)
class KernelReport:
    """All verdicts; `environment` says what ran, `model` that it was the model on the CPU, no kernel."""

    model: bool = False
    environment: dict[str, Any] = field(default_factory=dict)
    verdicts: list[Verdict] = field(default_factory=list)
    fused: list[FusedVerdict] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    weights_read_back: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    layer_seconds: dict[int, float] = field(default_factory=dict)
    #: told of each matrix of an expert on a rank that is done
    step: Callable[[], None] = field(default=lambda: None, repr=False)

    @property
    def reader(self) -> str:
        """Who read the weights."""
        return "the model on the CPU, not the kernel," if self.model else "the kernel"

    @property
    def ok(self) -> bool:
        """Whether everything that ran was right."""
        return not self.findings

    def __bool__(self) -> bool:
        return self.ok

    def __repr__(self) -> str:
        return (
            f"KernelReport(ok={self.ok}, model={self.model}, findings={len(self.findings)}, matrices="
            f"{len(self.verdicts)}, weights_read_back={self.weights_read_back})"
        )

    def document(self, every_expert: bool = True) -> KernelCheck:
        """For `--json`."""
        return KernelCheck(
            ok=self.ok,
            model=self.model,
            environment=self.environment,
            tolerance=GEMM_TOLERANCE,
            weights_read_back=self.weights_read_back,
            seconds=rounded(self.seconds),
            matrices=len(self.verdicts),
            layers=tuple(self._layers(every_expert)),
            fused=tuple(self.fused),
            skipped=tuple(self.skipped),
            findings=reported(self.findings),
        )

    def _layers(self, every_expert: bool) -> Iterator[KernelLayer]:
        for layer, verdicts in _by(self.verdicts, "layer"):
            ranks = tuple(_of_rank(rank, some, every_expert) for rank, some in _by(verdicts, "rank"))
            yield KernelLayer(layer, round(self.layer_seconds.get(layer, 0.0), 3), ranks)


def _of_rank(rank: int, verdicts: Sequence[Verdict], every_expert: bool) -> KernelRank:
    experts = sorted({verdict.expert for verdict in verdicts}) if every_expert else ()
    matrices = []
    for projection, some in _by(verdicts, "projection"):
        errors = [_largest((v.relative_error for v in each), digits=3) for _, each in _by(some, "expert")]
        matrices.append(
            MatrixErrors(
                projection=projection,
                wrong=sum(verdict.wrong for verdict in some),
                relative_error=_largest(verdict.relative_error for verdict in some),
                max_error=_largest(verdict.max_error for verdict in some),
                relative_errors=tuple(errors) if every_expert else (),
            )
        )
    return KernelRank(rank, all(verdict.ok for verdict in verdicts), tuple(experts), tuple(matrices))


def _by(verdicts: Iterable[Verdict], key: str) -> Iterator[tuple[Any, list[Verdict]]]:
    """Verdicts by one of their coordinates, in its order."""
    for value, some in groupby(sorted(verdicts, key=attrgetter(key)), attrgetter(key)):
        yield value, list(some)


def _largest(values: Iterable[float], digits: int = 6) -> float | None:
    """None where one is not finite: none of the others is the largest then."""
    every = list(values)
    return _share(max(every), digits) if all(map(math.isfinite, every)) else None


def _share(value: float, digits: int = 6) -> float | None:
    return float(f"{value:.{digits - 1}e}") if math.isfinite(value) else None
