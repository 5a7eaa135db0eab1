"""The frame of every page: the verdict first, then its parts."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.resources import files
from typing import Literal

from marlin_convert.report.html import Content, Html, facts, section, tag

#: nothing is fetched and nothing runs, whatever stands in the page
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
#: by which a page is known to be ours, near its beginning
GENERATOR = tag("meta", name="generator", content="marlin-convert")
#: the sign of each tone: color alone says nothing
MARKS = {"good": "✓", "bad": "✕", "warn": "!", "idle": "·"}
Tone = Literal["good", "bad", "warn", "idle"]


@dataclass(frozen=True)
class About:
    """What a page is about: the folder and the command line, both as they were given, and when it began."""

    out: str
    command: str
    began: datetime

    @classmethod
    def now(cls, out: str, command: str) -> About:
        """Something that begins now."""
        return cls(out, command, datetime.now(UTC).replace(microsecond=0))


@dataclass(frozen=True)
class Page:
    """A whole page. `word` is the verdict in a word, `lead` what it rests on and what to do."""

    about: About
    tone: Tone
    word: str
    lead: Content
    parts: Content = ()

    def encoded(self) -> bytes:
        """The file."""
        title = f"{self.word}: {self.about.out}"
        head = tag(
            "head",
            tag("meta", charset="utf-8"),
            GENERATOR,
            tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
            tag("meta", http_equiv="Content-Security-Policy", content=POLICY),
            tag("meta", name="referrer", content="no-referrer"),
            tag("title", title),
            tag("style", Html(files(__package__).joinpath("style.css").read_text("utf-8"))),
        )
        verdict = tag(
            "div",
            tag(
                "h1", tag("span", MARKS[self.tone], class_="mark", aria_hidden="true"), tag("span", self.word)
            ),
            self.lead,
            class_=f"verdict {self.tone}",
        )
        main = tag(
            "main",
            tag("p", self.about.out, class_="path"),
            verdict,
            self.parts,
            section(
                "This report",
                facts(
                    ("command", tag("code", self.about.command)),
                    ("begun", self.about.began.isoformat(sep=" ")),
                ),
            ),
        )
        whole = "<!DOCTYPE html>\n" + tag("html", head, tag("body", main), lang="en") + "\n"
        return whole.encode("utf-8", "replace")


def sentence(*content: Content) -> Html:
    """A paragraph."""
    return tag("p", *content)


def note(tone: Tone, *content: Content) -> Html:
    """A remark that must be seen."""
    return tag("div", tag("p", *content), class_=f"note {tone}")


def commands(*lines: str) -> Html:
    """Command lines to copy."""
    return tag("pre", tag("code", "\n".join(lines)))


def unfinished(about: About, error: str = "") -> Page:
    """What stands there until there is a result, and where there is none."""
    if error:
        lead = (sentence(error), sentence(_NOTHING, " Mend what is named, then run the command again."))
        return Page(about, "bad", "COULD NOT BE CHECKED", lead)
    said = sentence("The command has not ended yet, or it was interrupted. ", _NOTHING)
    return Page(about, "warn", "NOT FINISHED", said)


_NOTHING = "Nothing is said about the folder."
