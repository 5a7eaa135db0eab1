"""How a run tells how far it has come: `progress(point)`, which may be called from any thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


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
