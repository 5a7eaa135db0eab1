"""Pages as a reader without eyes sees them."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

#: elements that have no end
VOID = frozenset({"meta", "img", "br"})
#: attributes that make a browser fetch or run something
REACHING = frozenset({"src", "href", "action", "srcset", "data", "poster"})


class Reading(HTMLParser):
    """Takes a page apart. Raises AssertionError where its elements do not close in order."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.words: list[str] = []
        self.titles: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """A begin."""
        self.tags.append(tag)
        self.attributes += [(tag, key, value or "") for key, value in attrs]
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        """An end."""
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        """Text."""
        if self._open and self._open[-1] == "title" and "svg" in self._open:
            self.titles.append(data)
        elif self._open and self._open[-1] != "style":
            self.words.append(data)

    @property
    def text(self) -> str:
        """All that is to be read, without the names in pictures."""
        return " ".join(" ".join(self.words).split())


def read_page(path: Path) -> Reading:
    """A page, of which is certain that it fetches and runs nothing."""
    reading = Reading(path.read_text("utf-8"))
    assert {"script", "iframe", "object", "embed", "link", "form", "base"}.isdisjoint(reading.tags)
    for tag, key, value in reading.attributes:
        assert not key.startswith("on"), (tag, key)
        assert key not in REACHING or value.startswith("data:image/png;base64,"), (tag, key, value)
    assert "@import" not in path.read_text("utf-8")
    return reading
