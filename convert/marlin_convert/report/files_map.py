"""The picture of how each file stands: a row for a rank, a column for a layer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from marlin_convert.documents.manifest import Manifest
from marlin_convert.report.html import Html, behind, html, table, tag
from marlin_convert.report.page import MARKS

#: side of a cell, and room for the names of rows
SIDE, MARGIN = 18, 84
#: room for the names of columns, and for such as are longer than a cell is wide: those stand upright
HEAD, UPRIGHT = 20, 44
LONG = 4
#: states that something must be done about, the certain ones first, and how many places are named
BAD = ("wrong", "missing", "suspect")
MOST_NAMED = 8
#: the row of the file that no rank owns
COMMON = "common"
#: more than any model and any split has are not drawn
MOST_ROWS, MOST_COLUMNS = 128, 512


class Look(NamedTuple):
    """How a state is drawn, named and explained."""

    cell: str
    glyph: str
    name: str
    means: str


_CROSS, _BANG, _QUESTION = "M6 6L12 12M12 6L6 12", "M9 5V9.5M9 13V13.1", "M7 7Q9 4 11 7Q11 8.5 9 10M9 13V13.1"
_SLASH, _DASH = "M5 13L13 5", "M6 9H12"
LOOKS = {
    "exact": Look("good", "", "exact", "read from the disk and equal to the source, bit for bit"),
    "read right": Look("good", "", "read right", "every weight that ran was read as the source has it"),
    "there": Look(
        "good", "", "there", "there, with the size that the manifest has; nothing more was looked at"
    ),
    "sound": Look(
        "warn",
        _DASH,
        "sound",
        "all bytes have their digest, but with what is here not all can be put together",
    ),
    "unread": Look("idle", _SLASH, "not read", "not read, since another file of its layer is unsound"),
    "left out": Look("idle", _SLASH, "left out", "here, but not asked for"),
    "not run": Look("idle", _SLASH, "not run", "here, but not asked for, or without routed experts"),
    "suspect": Look("bad", _QUESTION, "suspect", "something is wrong in its layer; which rank is not known"),
    "wrong": Look("bad", _CROSS, "wrong", "a finding names it"),
    "missing": Look("bad", _CROSS, "missing", "not there, or not of the size that the manifest has"),
    "absent": Look("none", "", "not here", "not part of this folder"),
}


@dataclass(frozen=True)
class FilesMap:
    """States by unit and rank (None: common/), with the names of `LOOKS`; what is not there is absent."""

    manifest: Manifest
    states: Mapping[tuple[str, int | None], str]

    def picture(self, caption: str) -> Html:
        """The picture, its legend and the same as a table."""
        columns = self._columns()
        rows = list(self._rows(columns))
        known = Counter(self.states.values())
        said = ", ".join(f"{known[state]:,} {LOOKS[state].name}" for state in LOOKS if known[state])
        head = UPRIGHT if any(len(_label(unit)) >= LONG for unit in columns) else HEAD
        width, height = MARGIN + SIDE * len(columns) + 2, head + SIDE * len(rows) + 2
        drawing = tag(
            "svg",
            tag("title", f"{caption}: {said}"),
            tag("defs", *(_pattern(state, head) for state in LOOKS)),
            *_axis(columns, head),
            *(_row(head + SIDE * y, name, columns, cells) for y, (name, cells) in enumerate(rows)),
            viewBox=f"0 0 {width} {height}",
            role="img",
            style=f"min-width:{min(width * 0.75, 900):.0f}px;max-width:{width * 1.1:.0f}px",
        )
        seen = [state for state in LOOKS if known[state] or any(state in cells for _, cells in rows)]
        as_table = [
            (
                name,
                "; ".join(
                    LOOKS[state].name if name == COMMON else f"{where}: {LOOKS[state].name}"
                    for state, _, where in _runs(columns, cells)
                ),
            )
            for name, cells in rows
        ]
        return html(
            (
                tag("div", drawing, class_="wide", tabindex="0", role="region", aria_label=caption),
                tag("ul", *(_legend(state, known[state]) for state in seen), class_="legend"),
                *_bad_ones(columns, rows),
                behind("the same as a table", table(caption, ("", "units"), as_table)),
            )
        )

    def _columns(self) -> list[str]:
        layers = self.manifest.model.get("num_hidden_layers")
        here = {unit.name for unit in self.manifest.units} - {"common"}
        if isinstance(layers, int) and 0 < layers <= MOST_COLUMNS:
            here |= {f"layer-{layer:03d}" for layer in range(layers)}
        return sorted(here, key=lambda unit: (_layer(unit) is None, _layer(unit) or 0, unit))[:MOST_COLUMNS]

    def _rows(self, columns: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
        every = range(self.manifest.tp) if self.manifest.tp <= MOST_ROWS else self.manifest.ranks[:MOST_ROWS]
        for rank in every:
            yield f"rank {rank}", [self.states.get((unit, rank), "absent") for unit in columns]
        if ("common", None) in self.states:
            yield COMMON, [self.states["common", None]]


def _bad_ones(columns: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]]) -> Iterator[Html]:
    """Where what is bad is, a line for each state."""
    for bad in BAD:
        places = [
            name if name == COMMON else f"{name}, {where}"
            for name, cells in rows
            for state, _, where in _runs(columns, cells)
            if state == bad
        ]
        more = f" and {len(places) - MOST_NAMED:,} more" if len(places) > MOST_NAMED else ""
        if places:
            named = tag("strong", f"{MARKS['bad']} {LOOKS[bad].name}: ")
            yield tag("p", named, "; ".join(places[:MOST_NAMED]), more, ".")


def _axis(columns: Sequence[str], head: int) -> Iterator[Html]:
    step = 5 if len(columns) > 20 else 1
    base = head - 7
    yield tag("text", "layer", x=0, y=base)
    for at, unit in enumerate(columns):
        layer, name = _layer(unit), _label(unit)
        x = MARGIN + SIDE * (at + 0.5)
        if len(name) >= LONG:
            yield tag("text", name, transform=f"translate({x + 4:g} {head - 3}) rotate(-90)")
        elif layer is None or layer % step == 0:
            yield tag("text", name, x=x, y=base, text_anchor="middle")


def _label(unit: str) -> str:
    """What stands above a column."""
    layer = _layer(unit)
    return unit if layer is None else str(layer)


def _row(top: int, name: str, columns: Sequence[str], cells: Sequence[str]) -> Html:
    loud = "loud" if {*BAD} & {*cells} else None
    parts, x = [tag("text", name, x=0, y=top + 13, class_=loud)], MARGIN
    for state, count, where in _runs(columns, cells):
        look = LOOKS[state]
        title = tag("title", f"{name}{'' if name == COMMON else f', {where}'}: {look.name}, {look.means}")
        width = SIDE * count
        parts.append(tag("rect", title, x=x, y=top, width=width, height=SIDE, fill=f"url(#{_id(state)})"))
        x += width
    return tag("g", *parts)


def _runs(columns: Sequence[str], cells: Sequence[str]) -> Iterator[tuple[str, int, str]]:
    """Cells in a row of the same state: the state, how many, and which units."""
    at = 0
    for state, run in groupby(cells):
        count = len(list(run))
        yield state, count, _span(columns[at : at + count])
        at += count


def _pattern(state: str, head: int) -> Html:
    return tag(
        "pattern",
        *_cell(state),
        id=_id(state),
        x=MARGIN,
        y=head,
        width=SIDE,
        height=SIDE,
        patternUnits="userSpaceOnUse",
    )


def _cell(state: str) -> tuple[Html, ...]:
    look = LOOKS[state]
    shape = tag("rect", x=1.5, y=1.5, width=SIDE - 3, height=SIDE - 3, rx=3, class_=f"cell-{look.cell}")
    return (shape, tag("path", d=look.glyph, class_="glyph")) if look.glyph else (shape,)


def _legend(state: str, count: int) -> Html:
    look = LOOKS[state]
    icon = tag("svg", *_cell(state), viewBox=f"0 0 {SIDE} {SIDE}", aria_hidden="true")
    named = f"{count:,} {look.name}" if count else look.name
    return tag("li", icon, tag("span", tag("strong", named), f": {look.means}"))


def _id(state: str) -> str:
    return "s-" + state.replace(" ", "-")


def _layer(unit: str) -> int | None:
    number = unit.removeprefix("layer-")
    return int(number) if number != unit and number.isdecimal() else None


def _span(units: Sequence[str]) -> str:
    """Units in a row, in words."""
    names = [f"layer {_layer(unit)}" if _layer(unit) is not None else unit for unit in units]
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1].removeprefix('layer ')}"
