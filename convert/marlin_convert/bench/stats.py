"""Medians with their spread: shared machines have outliers, so no mean."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from marlin_convert.documents.bench import BenchMachine


@dataclass(frozen=True)
class Summary:
    """Some measurements of one thing."""

    median: float
    least: float
    most: float
    count: int

    @property
    def spread(self) -> float:
        """Largest less smallest, as a share of the median; 0 where the median is."""
        return (self.most - self.least) / self.median if self.median else 0.0


def summarize(values: Sequence[float]) -> Summary:
    """The summary of at least one value; ValueError for none."""
    if not values:
        raise ValueError("there is nothing to summarize")
    return Summary(statistics.median(values), min(values), max(values), len(values))


def this_machine() -> BenchMachine:
    """Where a bench runs, for its report."""
    return BenchMachine(os.cpu_count(), platform.machine(), f"{platform.system()} {platform.release()}")
