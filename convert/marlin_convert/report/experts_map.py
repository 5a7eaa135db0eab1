"""The picture of the kernel's error: a row for a layer, a column for an expert."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from marlin_convert.checks.outcome import error_text
from marlin_convert.documents.checks import KernelCheck, KernelLayer
from marlin_convert.report.html import Html, behind, html, table, tag
from marlin_convert.report.page import MARKS, sentence
from marlin_convert.report.png import Color, data_uri, png

#: of a row, in the units of the drawing
HIGH, MARGIN, RIGHT, TOP = 12, 64, 60, 20
#: of the cells of all experts together, about
WIDE = 1100
#: low to high
_RAMP = ((68, 92, 160), (42, 130, 148), (60, 165, 120), (125, 195, 85), (215, 205, 60), (245, 150, 40))
_WRONG: Color = (214, 30, 50, 255)
#: not run: what lies behind shows
PALETTE: tuple[Color, ...] = ((0, 0, 0, 0), *((*color, 255) for color in _RAMP), _WRONG)


class Line(NamedTuple):
    """A layer: the experts that ran in some layer, their errors (NaN: not in this one), which are wrong."""

    layer: int
    ran: Sequence[int]
    errors: npt.NDArray[np.float64]
    wrong: npt.NDArray[np.bool_]

    def in_words(self) -> tuple[int, str, str, str]:
        """How many experts ran, the largest error, of which expert, and which are wrong."""
        count = int((~np.isnan(self.errors)).sum())
        wrong = _some([self.ran[at] for at in np.flatnonzero(self.wrong).tolist()])
        if not count:
            return 0, "", "", wrong
        at = int(np.nanargmax(self.errors))
        return count, error_text(float(self.errors[at])), str(self.ran[at]), wrong


def experts_map(found: KernelCheck) -> Html:
    """The largest relative error of each expert, over its matrices and ranks; wrong ones are framed."""
    wrong = {(each.layer, each.expert) for each in found.findings if each.expert is not None}
    ran = sorted({e for layer in found.layers for rank in layer.ranks for e in rank.experts})
    if not ran:
        return sentence("No expert ran.")
    errors = np.full((len(found.layers), len(ran)), np.nan)
    for row, layer in enumerate(found.layers):
        _fill(errors[row], layer, ran)
    cells = _cells(errors, found.tolerance)
    for row, layer in enumerate(found.layers):
        cells[row, [(layer.layer, expert) in wrong for expert in ran]] = len(PALETTE) - 1
    side = min(max(WIDE / len(ran), 1.0), 40.0)
    width, height = MARGIN + side * len(ran) + RIGHT, TOP + HIGH * len(found.layers) + 2
    caption = f"Relative error of each expert with random activations; {len(wrong):,} wrong"
    lines = [
        Line(layer.layer, ran, errors[row], cells[row] == len(PALETTE) - 1)
        for row, layer in enumerate(found.layers)
    ]
    image = tag(
        "image",
        href=data_uri(png(cells, PALETTE)),
        x=MARGIN,
        y=TOP,
        width=side * len(ran),
        height=HIGH * len(found.layers),
        preserveAspectRatio="none",
        style="image-rendering:pixelated",
    )
    drawing = tag(
        "svg",
        tag("title", caption),
        *_axis(ran, side),
        image,
        *(_row(TOP + HIGH * row, line, side) for row, line in enumerate(lines)),
        viewBox=f"0 0 {width:g} {height}",
        role="img",
        style=f"min-width:{min(width, 640):.0f}px;max-width:{width * 1.1:.0f}px",
    )
    rows = [(str(line.layer), *line.in_words()) for line in lines]
    header = ("layer", "experts that ran", "largest error", "at expert", "wrong experts")
    return html(
        (
            tag("div", drawing, class_="wide", tabindex="0", role="region", aria_label=caption),
            _legend(found.tolerance),
            behind("the same as a table", table(caption, header, rows)),
        )
    )


def _fill(row: npt.NDArray[np.float64], layer: KernelLayer, ran: Sequence[int]) -> None:
    for rank in layer.ranks:
        at = np.searchsorted(ran, rank.experts)
        for matrix in rank.matrices:
            given = [np.inf if error is None else error for error in matrix.relative_errors]
            row[at] = np.fmax(row[at], given)


def _cells(errors: npt.NDArray[np.float64], tolerance: float) -> npt.NDArray[np.uint8]:
    steps = np.nan_to_num(errors / tolerance * len(_RAMP), nan=0.0, posinf=1e9)
    cells = np.minimum(steps.astype(np.int64), len(_RAMP) - 1) + 1
    cells[errors > tolerance] = len(PALETTE) - 1
    cells[np.isnan(errors)] = 0
    return cells.astype(np.uint8)


def _axis(ran: Sequence[int], side: float) -> Iterator[Html]:
    yield tag("text", "expert", x=0, y=13)
    step = next((s for s in (1, 2, 4, 8, 16, 32, 64, 128) if s * side >= 40), len(ran))
    for at in range(0, len(ran), step):
        yield tag("text", str(ran[at]), x=MARGIN + side * (at + 0.5), y=13, text_anchor="middle")


def _row(y: int, line: Line, side: float) -> Html:
    wide, bad = side * len(line.ran), np.flatnonzero(line.wrong).tolist()
    count, largest, at, wrong = line.in_words()
    said = f"layer {line.layer}: {count} experts, largest error {largest} at expert {at}"
    frames = (
        tag("rect", x=MARGIN + side * e - 1, y=y, width=side + 2, height=HIGH, class_="frame") for e in bad
    )
    mark = (
        tag("text", f"{MARKS['bad']} {len(bad)}", x=MARGIN + wide + 6, y=y + 10, class_="loud")
        if bad
        else None
    )
    name = tag("text", f"layer {line.layer}", x=0, y=y + 10, class_="loud" if bad else None)
    title = tag("title", f"{said}; wrong: {wrong or 'none'}")
    return tag(
        "g", name, *frames, mark, tag("rect", title, x=MARGIN, y=y, width=wide, height=HIGH, class_="over")
    )


def _some(experts: Sequence[int]) -> str:
    return ", ".join(map(str, experts[:12])) + (f" and {len(experts) - 12} more" if len(experts) > 12 else "")


def _legend(tolerance: float) -> Html:
    step = tolerance / len(_RAMP)
    named = [(f"{i * step:.1e} to {(i + 1) * step:.1e}", color) for i, color in enumerate(_RAMP)]
    named.append((f"{MARKS['bad']} wrong, or more than the tolerance {tolerance:.1e}; framed", _WRONG[:3]))
    swatches = (
        (
            tag("svg", tag("rect", width=18, height=18, fill=f"rgb{color}"), viewBox="0 0 18 18"),
            tag("span", name),
        )
        for name, color in named
    )
    return tag("ul", *(tag("li", each) for each in swatches), tag("li", "empty: not run"), class_="legend")
