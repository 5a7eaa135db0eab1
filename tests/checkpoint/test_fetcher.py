"""Fetching for a conversion: what is fetched when, how much at once, and what is removed when."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from marlin_convert.checkpoint.hub_files import HubOptions
from marlin_convert.checkpoint.staging import RemoteFetcher, RemoteStore, sweep
from marlin_convert.errors import MachineError, SourceError

SECONDS = 10


class Store:
    """A store whose files come at once."""

    def __init__(self, names: str) -> None:
        self.options, self.place = HubOptions(free_source=True), Path()
        self.files = {name: SimpleNamespace(size=1) for name in names}
        self.fetched: list[str] = []
        self.paths: dict[str, Path] = {}
        self.broken: set[str] = set()

    @property
    def max_workers(self) -> int | None:
        return self.options.max_workers

    def stages(self, staging: Path | None) -> bool:
        return staging is not None and self.options.free_source

    def find(self, name: str, staging: Path | None) -> None:
        return None

    def fetch(self, name: str, staging: Path, received: Callable[[int], None]) -> Path:
        self.fetched.append(name)
        if name in self.broken:
            raise MachineError(f"no {name}")
        staging.mkdir(exist_ok=True)
        self.paths[name] = staging / name
        self.paths[name].write_bytes(b"x")
        received(1)
        return self.paths[name]

    def path(self, name: str) -> Path:
        return self.paths[name]

    def forget(self, name: str) -> None:
        del self.paths[name]


def hub_fetcher(
    store: Store, needed: dict[str, str], folder: Path, look_ahead: int = 2, progress: Any = None
) -> RemoteFetcher:
    # the store is a stand-in with the few methods that are used
    files = {unit: tuple(files) for unit, files in needed.items()}
    return RemoteFetcher(cast(RemoteStore, store), files, folder / "staging", progress, look_ahead)


def until(true: Callable[[], bool]) -> None:
    """Wait until something holds."""
    for _ in range(SECONDS * 100):
        if true():
            return
        time.sleep(0.01)
    raise AssertionError("it never came to that")


def test_looks_ahead_and_lets_go(tmp_path: Path) -> None:
    store, told = Store("abcdef"), []
    fetcher = hub_fetcher(
        store,
        {"1": "a", "2": "b", "3": "cd", "4": "ae", "5": "f"},
        tmp_path,
        progress=lambda point: told.append((point.done, point.total)),
    )
    fetcher.start()
    fetcher.wait("a")
    until(lambda: len(store.fetched) == 3)
    time.sleep(0.1)
    assert sorted(store.fetched) == ["a", "b", "c"]
    fetcher.release("1")  # a is needed again by 4
    time.sleep(0.1)
    assert sorted(store.fetched) == ["a", "b", "c"]
    fetcher.release("2")
    fetcher.wait("cd")
    assert sorted(path.name for path in (tmp_path / "staging").iterdir()) == ["a", "c", "d"]
    fetcher.check("3")
    fetcher.release("3")
    fetcher.wait("ae")
    fetcher.release("4")
    fetcher.wait("f")
    fetcher.release("5")
    assert list((tmp_path / "staging").iterdir()) == []
    assert told[0] == (0, 6)
    assert told[-1] == (6, 6)


def test_a_unit_that_needs_more_than_is_looked_ahead(tmp_path: Path) -> None:
    store = Store("abcde")
    fetcher = hub_fetcher(store, {"1": "abcd", "2": "e"}, tmp_path, look_ahead=0)
    fetcher.start()
    fetcher.wait("abcd")
    assert sorted(store.fetched) == ["a", "b", "c", "d"]
    fetcher.release("1")
    fetcher.wait("e")


def test_units_that_are_made_out_of_order(tmp_path: Path) -> None:
    fetcher = hub_fetcher(Store("abcd"), {"1": "a", "2": "b", "3": "c", "4": "d"}, tmp_path)
    fetcher.start()
    fetcher.wait("abc")
    fetcher.release("3")
    fetcher.release("2")
    fetcher.wait("d")
    assert sorted(path.name for path in (tmp_path / "staging").iterdir()) == ["a", "d"]


def test_a_failure_reaches_who_waits(tmp_path: Path) -> None:
    store = Store("abcd")
    store.broken.add("b")
    fetcher = hub_fetcher(store, {"1": "a", "2": "b", "3": "c", "4": "d"}, tmp_path)
    fetcher.start()
    with pytest.raises(MachineError, match="no b"):
        fetcher.wait("b")


def test_stopping_wakes_who_waits(tmp_path: Path) -> None:
    store, woken = Store("abcd"), threading.Event()
    fetcher = hub_fetcher(store, {"1": "a", "2": "b", "3": "c", "4": "d"}, tmp_path)
    fetcher.start()

    def wait() -> None:
        with pytest.raises(InterruptedError):
            fetcher.wait("d")
        woken.set()

    threading.Thread(target=wait, daemon=True).start()
    fetcher.stop()
    assert woken.wait(SECONDS)
    assert "d" not in store.fetched


def test_a_file_that_is_touched(tmp_path: Path) -> None:
    store = Store("a")
    fetcher = hub_fetcher(store, {"1": "a"}, tmp_path)
    fetcher.start()
    fetcher.wait("a")
    store.path("a").write_bytes(b"xy")
    with pytest.raises(SourceError, match="a was changed"):
        fetcher.check("1")
    store.path("a").unlink()
    with pytest.raises(SourceError, match="a has gone"):
        fetcher.check("1")


def test_progress_of_a_download_that_begins_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, told = Store("ab"), []

    def fetch(name: str, staging: Path, received: Callable[[int], None]) -> Path:
        for size in (3, 7, 2, 12, 10):  # broken after 7; the server sends two bytes too many
            received(size)
        return tmp_path

    monkeypatch.setattr(store, "fetch", fetch)
    store.options = HubOptions(free_source=True, max_workers=1)
    for file in store.files.values():
        file.size = 10
    fetcher = hub_fetcher(
        store, {"1": "ab"}, tmp_path, progress=lambda point: told.append((point.done, point.total))
    )
    fetcher.start()
    fetcher.wait("ab")
    assert told == [(0, 20)] + [(done, 20) for done in (3, 7, 2, 10, 10, 13, 17, 12, 20, 20)]


def test_sweeping(tmp_path: Path) -> None:
    sweep(tmp_path / "none", set())
    below = tmp_path / ".cache" / "huggingface" / "download"
    below.mkdir(parents=True)
    wanted, mine = "wanted.safetensors", "mine.txt"
    noted = {f"{wanted}.parts", f"{wanted}.partial"}
    begun = ("done.safetensors.parts", "done.safetensors.partial", "done.safetensors.parts.partial")
    for name in (wanted, "done.safetensors", mine, *noted, *begun):
        (tmp_path / name).write_bytes(b"")
    for path in (below / "x.incomplete", below / "wanted.metadata"):
        path.write_bytes(b"")
    sweep(tmp_path, {wanted})
    left = {path.name for path in tmp_path.rglob("*") if path.is_file()}
    assert left == {wanted, mine, "wanted.metadata", *noted}


def test_what_lies_behind_a_link_in_a_staging_folder_is_not_swept(tmp_path: Path) -> None:
    mine = tmp_path / "mine" / "huggingface" / "download" / "x.incomplete"
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    (tmp_path / "staging").mkdir()
    (tmp_path / "staging" / ".cache").symlink_to(tmp_path / "mine")
    sweep(tmp_path / "staging", set())
    assert mine.read_text() == "mine"


def test_a_staging_folder_that_is_a_link_is_not_swept(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("mine")
    (tmp_path / "staging").symlink_to("mine")
    with pytest.raises(SourceError, match="staging is a link"):
        sweep(tmp_path / "staging", set())
    assert (tmp_path / "mine" / "thesis.tex").read_text() == "mine"
