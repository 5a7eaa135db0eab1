"""Staging: what is fetched when, how much at once, and what goes when."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from marlin_convert.checkpoint.hub_files import HubOptions
from marlin_convert.checkpoint.staging import Stager, sweep
from marlin_convert.errors import MachineError, SourceError

SECONDS = 10


class Store:
    """A store whose files come at once."""

    def __init__(self, names: str) -> None:
        self.options = HubOptions()
        self.files = {name: SimpleNamespace(size=1) for name in names}
        self.fetched: list[str] = []
        self.paths: dict[str, Path] = {}
        self.broken: set[str] = set()

    def fetch(self, name: str, staging: Path, into_staging: bool, count: Callable[[int], None]) -> Path:
        self.fetched.append(name)
        if name in self.broken:
            raise MachineError(f"no {name}")
        staging.mkdir(exist_ok=True)
        self.paths[name] = staging / name
        self.paths[name].write_bytes(b"x")
        count(1)
        return self.paths[name]

    def path(self, name: str) -> Path:
        return self.paths[name]

    def forget(self, name: str) -> None:
        del self.paths[name]


def stager(
    store: Store, needed: dict[str, str], folder: Path, look_ahead: int = 2, progress: Any = None
) -> Stager:
    return Stager(
        store,  # type: ignore[arg-type]  # a stand-in with the few methods that are used
        {unit: tuple(files) for unit, files in needed.items()},
        folder / "staging",
        True,
        look_ahead,
        progress,
    )


def until(true: Callable[[], bool]) -> None:
    """Wait until something holds."""
    for _ in range(SECONDS * 100):
        if true():
            return
        time.sleep(0.01)
    raise AssertionError("it never came to that")


def test_looks_ahead_and_lets_go(tmp_path: Path) -> None:
    store, told = Store("abcdef"), []
    supply = stager(
        store,
        {"1": "a", "2": "b", "3": "cd", "4": "ae", "5": "f"},
        tmp_path,
        progress=lambda done, total: told.append((done, total)),
    )
    supply.start()
    supply.wait("a")
    until(lambda: len(store.fetched) == 3)
    time.sleep(0.1)
    assert sorted(store.fetched) == ["a", "b", "c"]
    supply.recorded("1")  # a is needed again by 4
    time.sleep(0.1)
    assert sorted(store.fetched) == ["a", "b", "c"]
    supply.recorded("2")
    supply.wait("cd")
    assert sorted(path.name for path in (tmp_path / "staging").iterdir()) == ["a", "c", "d"]
    supply.check("3")
    supply.recorded("3")
    supply.wait("ae")
    supply.recorded("4")
    supply.wait("f")
    supply.recorded("5")
    assert list((tmp_path / "staging").iterdir()) == []
    assert told[0] == (0, 6)
    assert told[-1] == (6, 6)


def test_a_unit_that_needs_more_than_is_looked_ahead(tmp_path: Path) -> None:
    store = Store("abcde")
    supply = stager(store, {"1": "abcd", "2": "e"}, tmp_path, look_ahead=0)
    supply.start()
    supply.wait("abcd")
    assert sorted(store.fetched) == ["a", "b", "c", "d"]
    supply.recorded("1")
    supply.wait("e")


def test_units_that_are_made_out_of_order(tmp_path: Path) -> None:
    supply = stager(Store("abcd"), {"1": "a", "2": "b", "3": "c", "4": "d"}, tmp_path)
    supply.start()
    supply.wait("abc")
    supply.recorded("3")
    supply.recorded("2")
    supply.wait("d")
    assert sorted(path.name for path in (tmp_path / "staging").iterdir()) == ["a", "d"]


def test_a_failure_reaches_who_waits(tmp_path: Path) -> None:
    store = Store("abcd")
    store.broken.add("b")
    supply = stager(store, {"1": "a", "2": "b", "3": "c", "4": "d"}, tmp_path)
    supply.start()
    with pytest.raises(MachineError, match="no b"):
        supply.wait("b")


def test_stopping_wakes_who_waits(tmp_path: Path) -> None:
    store, woken = Store("abcd"), threading.Event()
    supply = stager(store, {"1": "a", "2": "b", "3": "c", "4": "d"}, tmp_path)
    supply.start()

    def wait() -> None:
        with pytest.raises(InterruptedError):
            supply.wait("d")
        woken.set()

    threading.Thread(target=wait, daemon=True).start()
    supply.stop()
    assert woken.wait(SECONDS)
    assert "d" not in store.fetched


def test_a_file_that_is_touched(tmp_path: Path) -> None:
    store = Store("a")
    supply = stager(store, {"1": "a"}, tmp_path)
    supply.start()
    supply.wait("a")
    store.path("a").write_bytes(b"xy")
    with pytest.raises(SourceError, match="a was changed"):
        supply.check("1")
    store.path("a").unlink()
    with pytest.raises(SourceError, match="a has gone"):
        supply.check("1")


def test_sweeping(tmp_path: Path) -> None:
    sweep(tmp_path / "none", set())
    below = tmp_path / ".cache" / "huggingface" / "download"
    below.mkdir(parents=True)
    for path in (tmp_path / "wanted", tmp_path / "done", below / "x.incomplete", below / "wanted.metadata"):
        path.write_bytes(b"")
    sweep(tmp_path, {"wanted"})
    assert {path.name for path in tmp_path.rglob("*") if path.is_file()} == {"wanted", "wanted.metadata"}
