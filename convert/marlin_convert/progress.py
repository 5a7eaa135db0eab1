"""How a run tells how far it has come: `progress(point)`, which may be called from any thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock


@dataclass(frozen=True)
class Point:
    """Where a run is: `done` of `total` bytes of a stage such as "converting". Where the stage goes through
    units, `unit` is the one that was begun last, the `number`th of `units`.
    """

    stage: str
    done: int
    total: int
    unit: str = ""
    number: int = 0
    units: int = 0


Progress = Callable[[Point], None]


class Tally:
    """Adds up the bytes of a stage that goes through `units`, of `total` in all, and tells `progress`; from
    any thread.
    """

    def __init__(self, stage: str, total: int, units: Sequence[str], progress: Progress | None) -> None:
        self._stage, self._total, self._progress = stage, total, progress
        self._numbers = {name: number for number, name in enumerate(units, 1)}
        self._lock, self._done, self._unit = Lock(), 0, ""

    def count(self, unit: str, size: int = 0) -> None:
        """A unit was begun, or so many bytes of it are done with."""
        with self._lock:
            self._done += size
            self._unit = max(self._unit, unit, key=lambda name: self._numbers.get(name, 0))
            self._tell(self._stage, self._unit)

    def then(self, stage: str) -> None:
        """All units are done, and another stage comes."""
        with self._lock:
            self._tell(stage, "")

    def _tell(self, stage: str, unit: str) -> None:
        if self._progress is not None:
            units = len(self._numbers) if unit else 0
            number = self._numbers.get(unit, 0)
            self._progress(Point(stage, self._done, self._total, unit, number, units))


class Compiling:
    """Told by what compiles, once on a machine, that it begins and that it is done; tells who watches."""

    def __init__(self) -> None:
        self._watchers: list[Callable[[bool], None]] = []

    def tell(self, begun: bool) -> None:
        """Something begins to be compiled, or that is done."""
        for watcher in list(self._watchers):
            watcher(begun)

    @contextmanager
    def watched(self, watcher: Callable[[bool], None]) -> Iterator[None]:
        """Within this block `watcher(begun)` is called, from any thread."""
        self._watchers.append(watcher)
        try:
            yield
        finally:
            self._watchers.remove(watcher)


compiling = Compiling()
