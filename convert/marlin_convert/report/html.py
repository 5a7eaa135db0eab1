"""HTML that cannot be broken by what is put into it: whatever is not `Html` is escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from marlin_convert.words import printable

_VOID = frozenset({"meta", "img", "br"})


class Html(str):
    """Markup, to be put into a page as it is."""

    __slots__ = ()


#: what may stand in a page: markup, text, numbers; several of them; nothing
Content = Html | str | int | Iterable["Content"] | None


def html(content: Content) -> Html:
    """Content as markup. Of text, what a reader would obey instead of show is written out."""
    if content is None:
        return Html()
    if isinstance(content, Html):
        return content
    if isinstance(content, str):
        return Html(escape(printable(content, "\n")))
    if isinstance(content, int):
        return Html(f"{content:,}")
    return Html("".join(map(html, content)))


def tag(name: str, /, *content: Content, **attributes: str | float | None) -> Html:
    """An element. `class_` is `class`, other underscores are hyphens; None leaves an attribute out."""
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(printable(_text(value)))}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in _VOID:
        return Html(f"<{name}{given}>")
    return Html(f"<{name}{given}>{html(content)}</{name}>")


def _text(value: str | float) -> str:
    return value if isinstance(value, str) else f"{value:g}"


def table(
    caption: str, header: Sequence[str], rows: Iterable[Sequence[Content]], class_: str | None = None
) -> Html:
    """A table that scrolls on its own where it is wider than the page; numbers to the right."""
    every = list(rows)
    kinds = ["number" if every and isinstance(every[0][i], int) else None for i in range(len(header))]
    body = (
        tag("tr", *(tag("td", cell, class_=kind) for cell, kind in zip(row, kinds, strict=True)))
        for row in every
    )
    head = tag("tr", *(tag("th", c, scope="col", class_=kind) for c, kind in zip(header, kinds, strict=True)))
    whole = tag("table", tag("caption", caption), tag("thead", head), tag("tbody", *body), class_=class_)
    return tag("div", whole, class_="wide", tabindex="0", role="region", aria_label=caption)


def behind(summary: str, *content: Content) -> Html:
    """What is folded away until it is asked for."""
    return tag("details", tag("summary", summary), *content)


def facts(*pairs: tuple[str, Content]) -> Html:
    """Names and values."""
    return tag("dl", *(tag("div", tag("dt", name), tag("dd", value)) for name, value in pairs))


def section(title: str, *content: Content) -> Html:
    """A part of the page."""
    return tag("section", tag("h2", title), *content)
