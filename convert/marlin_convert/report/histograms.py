"""Histograms of codes and scales."""

from __future__ import annotations

from collections.abc import Sequence

from marlin_convert.documents.checks import CheckedUnit, CountedValues
from marlin_convert.report.charts import Bar, charts
from marlin_convert.report.html import Html, section
from marlin_convert.report.page import note, sentence


def histograms(units: Sequence[CheckedUnit]) -> Html:
    """Histograms of codes and scales, of all layers together."""
    by_name: dict[str, list[CountedValues]] = {}
    for unit in units:
        for counted in unit.values:
            by_name.setdefault(counted.projection, []).append(counted)
    if not by_name:
        text = "No histograms: no routed expert could be put together from what is in this folder."
        return section("Codes and scales", sentence(text))
    odd = [
        f"{name}: {sum(c.negative for c in every):,} scales below zero,"
        f" {sum(c.not_finite for c in every):,} not finite."
        for name, every in by_name.items()
        if any(c.negative or c.not_finite for c in every)
    ]
    text = (
        "Of every expert's matrices some 8 rows are counted, others for each expert; a picture of the"
        " weights, not a proof. Codes look like a bell around 0; a flat or one-sided picture, or scales of"
        " many sizes, would be strange."
    )
    return section(
        "Codes and scales",
        sentence(text),
        *(note("warn", each) for each in odd),
        charts(*((f"{name}: codes, as values", _codes(every)) for name, every in by_name.items())),
        charts(*((f"{name}: sizes of scales", _scales(every)) for name, every in by_name.items())),
    )


def _codes(every: Sequence[CountedValues]) -> list[Bar]:
    counts = [sum(counted.codes[code] for counted in every) for code in range(16)]
    total = sum(counts) or 1
    return [Bar(str(c - 8), str(c - 8), n, f"{n:,} ({n / total:.2%})") for c, n in enumerate(counts)]


def _scales(every: Sequence[CountedValues]) -> list[Bar]:
    counts: dict[float, int] = {}
    for counted in every:
        for each in counted.scales:
            counts[each.begin] = counts.get(each.begin, 0) + each.count
    total, begins = sum(counts.values()) or 1, sorted(counts)
    wide = max(len(begins) // 5, 1)
    return [
        Bar(
            f"from {b:.3g}",
            f"{b:.2g}" if i % wide == 0 else "",
            counts[b],
            f"{counts[b]:,} ({counts[b] / total:.2%})",
        )
        for i, b in enumerate(begins)
    ]
