"""Bars, as SVG with a table behind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from marlin_convert.report.html import Html, behind, html, table, tag

#: of a chart, in its own units
WIDTH, HEIGHT, BELOW = 320, 120, 18


class Bar(NamedTuple):
    """Its name, what is written below it (may be nothing), its height, and that in words."""

    name: str
    below: str
    value: float
    said: str


def bars(caption: str, every: Sequence[Bar], wide: int = WIDTH) -> Html:
    """A figure, `wide` in its own units; the highest bar fills it. Needs at least one bar."""
    highest = max(bar.value for bar in every) or 1.0
    step = wide / len(every)
    shapes = []
    for at, bar in enumerate(every):
        height = HEIGHT * bar.value / highest
        title = tag("title", f"{bar.name}: {bar.said}")
        x, width = at * step, step - min(2.0, step / 5)
        shapes += [
            tag("rect", x=x, y=HEIGHT - height, width=width, height=height, class_="bar"),
            tag("rect", title, x=x, y=0, width=step, height=HEIGHT, class_="over"),
        ]
        if bar.below:
            shapes.append(tag("text", bar.below, x=x + width / 2, y=HEIGHT + 13, text_anchor="middle"))
    drawing = tag(
        "svg",
        tag("title", caption),
        *shapes,
        tag("line", x1=0, x2=wide, y1=HEIGHT, y2=HEIGHT, class_="axis"),
        viewBox=f"-16 0 {wide + 32} {HEIGHT + BELOW}",
        role="img",
    )
    return tag("figure", tag("figcaption", caption), drawing)


def charts(*figures: tuple[str, Sequence[Bar]]) -> Html:
    """Figures side by side, and their numbers in a table each."""
    drawn = [(caption, every) for caption, every in figures if every]
    if not drawn:
        return Html()
    tables = (
        table(
            caption,
            (
                "",
                "",
            ),
            [(bar.name, bar.said) for bar in every],
        )
        for caption, every in drawn
    )
    return html(
        (
            tag("div", *(bars(caption, every) for caption, every in drawn), class_="charts"),
            behind("the numbers", *tables),
        )
    )
