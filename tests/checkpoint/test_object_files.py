"""A file that comes by parts into a staging folder: what lies there already is used where it is right."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest
import xxhash

from marlin_convert.checkpoint import object_files
from marlin_convert.checkpoint.object_files import StagedFile
from marlin_convert.errors import MachineError
from marlin_convert.storage.objects import Location, Objects, StoredObject

PART = 1000
#: bytes that tell where they stand, three and a half parts of them
DATA = b"".join(i.to_bytes(4, "big") for i in range(875))
NAME, FIRST = "w.safetensors", ['"tag"', len(DATA), PART]


class Store:
    """Objects whose bytes come in pieces of 300."""

    location = Location("bucket", "x")

    def __init__(self) -> None:
        self.asked: list[int] = []

    def stream(self, wanted: StoredObject, part: range) -> Iterator[bytes]:
        self.asked.append(part.start // PART)
        for at in range(part.start, part.stop, 300):
            yield DATA[at : min(at + 300, part.stop)]


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_files, "PART", PART)


def fetch(folder: Path) -> tuple[list[int], list[int]]:
    """Fetch it; returns the numbers of the parts that were asked for, and what was told on the way."""
    store, told = Store(), list[int]()
    # a stand-in with the one method that is used
    wanted = StoredObject(NAME, len(DATA), '"tag"')
    staged = StagedFile(cast(Objects, store), wanted, folder)
    assert staged.fetch(told.append) == folder / NAME
    assert (folder / NAME).read_bytes() == DATA
    assert {path.name for path in folder.iterdir()} == {NAME, f"{NAME}.parts"}
    return sorted(store.asked), told


def noted(*numbers: int, first: object = FIRST) -> bytes:
    """Notes of these parts, as they are written."""
    parts = {number: DATA[number * PART : (number + 1) * PART] for number in numbers}
    lines = [first, *([number, xxhash.xxh3_128_hexdigest(part)] for number, part in parts.items())]
    return "".join(f"{json.dumps(line)}\n" for line in lines).encode()


def test_all_of_it_comes_and_is_noted(tmp_path: Path) -> None:
    asked, told = fetch(tmp_path / "a" / "b")
    assert asked == [0, 1, 2, 3]
    assert (told[0], told[-1]) == (0, len(DATA))
    assert told == sorted(told)
    first, *lines = (tmp_path / "a" / "b" / f"{NAME}.parts").read_bytes().splitlines(keepends=True)
    assert first + b"".join(sorted(lines)) == noted(0, 1, 2, 3)
    assert fetch(tmp_path / "a" / "b") == ([], [len(DATA)])


def test_what_was_noted_is_not_asked_for(tmp_path: Path) -> None:
    (tmp_path / f"{NAME}.parts").write_bytes(noted(0, 3))
    (tmp_path / f"{NAME}.partial").write_bytes(DATA)
    asked, told = fetch(tmp_path)
    assert (asked, told[0]) == ([1, 2], 1500)


def test_a_whole_file_that_was_damaged(tmp_path: Path) -> None:
    fetch(tmp_path)
    damaged = bytearray(DATA)
    damaged[2500] ^= 1
    (tmp_path / NAME).write_bytes(damaged)
    assert fetch(tmp_path)[0] == [2]


def test_a_file_that_was_cut(tmp_path: Path) -> None:
    (tmp_path / f"{NAME}.parts").write_bytes(noted(0, 1, 2, 3))
    (tmp_path / f"{NAME}.partial").write_bytes(DATA[:1700])
    assert fetch(tmp_path)[0] == [1, 2, 3]


@pytest.mark.parametrize(
    "notes",
    [
        None,
        b"",
        b"\xff\xfe",
        b"[" * 100_000,
        b"null\n[0, 1]\n",
        noted(0, 1, first=['"other"', len(DATA), PART]),
        noted(0, 1, first=['"tag"', len(DATA) + 1, PART]),
        noted(0, 1, first=['"tag"', len(DATA), PART + 1]),
    ],
)
def test_notes_of_something_else(tmp_path: Path, notes: bytes | None) -> None:
    if notes is not None:
        (tmp_path / f"{NAME}.parts").write_bytes(notes)
    (tmp_path / f"{NAME}.partial").write_bytes(DATA)
    assert fetch(tmp_path)[0] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "more", [b'[1, "ab', b"[1]\n", b'[99, "00"]\n[-1, "00"]\n', b'["1", "00"]\n', b"[2, 3]\n7\n"]
)
def test_lines_that_say_nothing(tmp_path: Path, more: bytes) -> None:
    (tmp_path / f"{NAME}.parts").write_bytes(noted(0) + more)
    (tmp_path / f"{NAME}.partial").write_bytes(DATA)
    assert fetch(tmp_path)[0] == [1, 2, 3]


def test_a_link_in_its_place_is_not_followed(tmp_path: Path) -> None:
    mine, folder = tmp_path / "mine", tmp_path / "staging"
    mine.write_text("mine")
    folder.mkdir()
    (folder / f"{NAME}.partial").symlink_to(mine)
    with pytest.raises(MachineError, match=rf"fetching s3://bucket/x/{NAME} to"):
        fetch(folder)
    assert mine.read_text() == "mine"


def test_it_stops_when_it_is_told(tmp_path: Path) -> None:
    def stop(size: int) -> None:
        if size:
            raise InterruptedError

    staged = StagedFile(cast(Objects, Store()), StoredObject(NAME, len(DATA), '"tag"'), tmp_path)
    with pytest.raises(InterruptedError):
        staged.fetch(stop)
    assert not (tmp_path / NAME).exists()
