"""How far a run has come, on stderr: a bar in a terminal, a line now and then in a log, JSON for machines."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from threading import Lock
from typing import Any, Protocol

from marlin_convert.cli import streams
from marlin_convert.cli.interrupts import announced
from marlin_convert.progress import Point, Progress, compiling
from marlin_convert.words import duration, gigabytes

#: seconds between two lines of a log, at the least; where units take longer, there is a line for each
EVERY = 30.0
#: the same for machines
EVERY_JSON = 1.0
COMPILING = "compiling, once on this machine"
STARTING = "starting"


class Display(Protocol):
    """Shows points as they come, one at a time."""

    def show(self, point: Point) -> None:
        """Where the run is now."""

    def compiling(self, begun: bool) -> None:
        """Something begins to be compiled, or that is done."""

    def close(self) -> None:
        """There are no more."""


@contextmanager
def progress(stopping: str = "", hub: bool = False) -> Iterator[Progress]:
    """Yields what a verb tells its points to. `stopping` is said at once at an interrupt, where the verb does
    not end at once. Nothing is shown of the hub where its own bars are turned off.
    """
    display: Display = _Nothing() if hub and _hub_bars_off() else _display()
    lock = Lock()

    def show(point: Point) -> None:
        with lock, suppress(OSError):  # a terminal that has gone
            display.show(point)

    def compile_(begun: bool) -> None:
        with lock, suppress(OSError):
            display.compiling(begun)

    with ExitStack() as stack:
        if not hub:  # of two displays one says what is of the whole run
            stack.enter_context(compiling.watched(compile_))
            stack.enter_context(announced(stopping))
            stack.enter_context(streams.aside())
        try:
            yield show
        finally:
            with lock, suppress(OSError):
                display.close()


def _display() -> Display:
    if streams.json_lines():
        return JsonLines()
    return Bar() if sys.stderr.isatty() else Log()


class _Nothing:
    """Shows nothing."""

    def show(self, point: Point) -> None: ...

    def compiling(self, begun: bool) -> None: ...

    def close(self) -> None: ...


class Pace:
    """The mean rate of a stage since its first point."""

    def __init__(self) -> None:
        self._stage, self._begin, self._first = "", 0.0, 0

    def at(self, point: Point) -> tuple[float, float | None]:
        """Bytes a second, and the seconds that are left at that rate."""
        now = time.monotonic()
        if point.stage != self._stage:
            self._stage, self._begin, self._first = point.stage, now, point.done
        rate = (point.done - self._first) / max(now - self._begin, 1e-3)
        return rate, (point.total - point.done) / rate if rate > 0 else None


def place(point: Point) -> str:
    """The stage, and the unit it is at."""
    return f"{point.stage} {point.unit} ({point.number} of {point.units})" if point.unit else point.stage


class Bar:
    """One bar, from the first point on. Before it a word, since headers and manifests take seconds; whatever
    is said meanwhile comes in its place.
    """

    def __init__(self) -> None:
        self._bar: Any = None
        self._said = ""
        self._before(STARTING)

    def show(self, point: Point) -> None:
        """See `Display`."""
        if self._bar is None:
            from tqdm import tqdm

            self._before("")
            self._bar = tqdm(
                desc=place(point),
                total=point.total,
                unit="B",
                unit_scale=True,
                file=sys.stderr,
                dynamic_ncols=True,
            )
        self._bar.total = point.total
        self._say(place(point))
        self._bar.update(point.done - self._bar.n)

    def compiling(self, begun: bool) -> None:
        """See `Display`."""
        if self._bar is None:
            self._before(COMPILING if begun else STARTING)
        else:
            self._bar.set_description(COMPILING if begun else self._said)

    @staticmethod
    def _before(text: str) -> None:
        """Say it where no bar is yet, in the line's place of what was said so before."""
        with suppress(OSError):  # a terminal that has gone
            print(text.ljust(len(COMPILING)), end="\r", file=sys.stderr, flush=True)

    def _say(self, text: str) -> None:
        if text != self._said:
            self._said = text
            self._bar.set_description(text)

    def close(self) -> None:
        """See `Display`."""
        if self._bar is None:
            self._before("")
        else:
            self._bar.close()


class Log:
    """A line for each unit or every 30 seconds, whichever is rarer."""

    def __init__(self) -> None:
        self._pace, self._last, self._unit = Pace(), time.monotonic(), ""

    def show(self, point: Point) -> None:
        """See `Display`."""
        rate, left = self._pace.at(point)
        now = time.monotonic()
        if now - self._last < EVERY or (point.unit and point.unit == self._unit):
            return
        self._last, self._unit = now, point.unit
        ends = "" if left is None else f", {duration(left)} left"
        size = f"{gigabytes(point.done)} of {gigabytes(point.total)}"
        streams.say(f"{place(point)}: {size}, {rate / 1e9:.2f} GB/s{ends}")

    def compiling(self, begun: bool) -> None:
        """See `Display`."""

    def close(self) -> None:
        """See `Display`."""


class JsonLines:
    """JSON lines, at most one a second but for the ends of stages."""

    def __init__(self) -> None:
        self._pace, self._last = Pace(), 0.0

    def show(self, point: Point) -> None:
        """See `Display`."""
        from marlin_convert.documents.log import LogProgress

        rate, left = self._pace.at(point)
        now = time.monotonic()
        if now - self._last < EVERY_JSON and point.done < point.total:
            return
        self._last = now
        unit = (point.unit, point.number, point.units) if point.unit else ()
        so_far = (point.stage, point.done, point.total, rate, left)
        streams.say_json(LogProgress("progress", streams.now(), *so_far, *unit))

    def compiling(self, begun: bool) -> None:
        """See `Display`."""
        from marlin_convert.documents.log import LogCompiling

        streams.say_json(LogCompiling("compiling", streams.now(), begun))

    def close(self) -> None:
        """See `Display`."""


def _hub_bars_off() -> bool:
    from huggingface_hub.constants import HF_HUB_DISABLE_PROGRESS_BARS

    return HF_HUB_DISABLE_PROGRESS_BARS is True
