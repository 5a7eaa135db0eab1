"""A file of a repository on the disk: which one is used, which is replaced, how often it is fetched."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from marlin_convert.checkpoint.hub import TRIES, HubStore
from marlin_convert.checkpoint.hub_files import HubFile, HubFiles, HubOptions
from marlin_convert.errors import MachineError, SourceError

NAME, RIGHT, WRONG = "a.safetensors", b"what is published", b"what is something"


class Files(HubFiles):
    """Fetches what it is given, in order: bytes that come, or an error."""

    answers: list[bytes | MachineError]

    def download(self, file: HubFile, folder: Path | None, received: Callable[[int], None]) -> Path:
        answer = self.answers.pop(0)
        if isinstance(answer, MachineError):
            received(3)
            raise answer
        path = (folder or Path(self.options.local_dir or "")) / file.name
        path.write_bytes(answer)
        received(len(answer))
        return path


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    for name in ("kept", "staging"):
        (tmp_path / name).mkdir()
    return tmp_path


def store(folder: Path, *answers: bytes | MachineError, free: bool = True) -> HubStore:
    files = Files(
        "org/name",
        "c0ffee",
        HubOptions(cache_dir=str(folder / "cache"), local_dir=str(folder / "kept"), free_source=free),
    )
    object.__setattr__(files, "answers", list(answers))
    published = HubFile(NAME, len(RIGHT), hashlib.sha256(RIGHT).hexdigest(), "")
    return HubStore(files, {NAME: published}, ())


@pytest.mark.parametrize("free", [True, False])
def test_it_goes_to_staging_or_is_kept(folder: Path, free: bool) -> None:
    received: list[int] = []
    path = store(folder, RIGHT, free=free).fetch(NAME, folder / "staging", received.append)
    assert path == folder / ("staging" if free else "kept") / NAME
    assert received[-1] == len(RIGHT)


def test_a_right_file_is_used(folder: Path) -> None:
    (folder / "kept" / NAME).write_bytes(RIGHT)
    received: list[int] = []
    assert store(folder).fetch(NAME, folder / "staging", received.append) == folder / "kept" / NAME
    assert received == [len(RIGHT)]


def test_a_wrong_file_of_the_user_stays(folder: Path) -> None:
    (folder / "kept" / NAME).write_bytes(WRONG)
    with pytest.raises(SourceError, match=r"sha256 .*, expected .*; move it away"):
        store(folder, RIGHT).fetch(NAME, folder / "staging", lambda size: None)
    assert (folder / "kept" / NAME).read_bytes() == WRONG


def test_a_wrong_staged_file_is_replaced(folder: Path) -> None:
    (folder / "staging" / NAME).write_bytes(WRONG[:-1])
    answers = [*[WRONG] * (TRIES - 1), RIGHT]
    path = store(folder, *answers).fetch(NAME, folder / "staging", lambda size: None)
    assert path == folder / "staging" / NAME
    assert path.read_bytes() == RIGHT


def test_it_is_fetched_three_times_and_no_more(folder: Path) -> None:
    wrong = store(folder, *[WRONG] * TRIES, RIGHT)
    with pytest.raises(SourceError, match="3 times: what comes is not what org/name@c0ffee publishes"):
        wrong.fetch(NAME, folder / "staging", lambda size: None)
    assert not (folder / "staging" / NAME).exists()
    broken = store(folder, *[MachineError("it broke off")] * TRIES, RIGHT)
    with pytest.raises(MachineError, match="it broke off"):
        broken.fetch(NAME, folder / "staging", lambda size: None)


def test_a_full_disk_is_no_reason_to_try_again(folder: Path) -> None:
    error = MachineError("full")
    error.__cause__ = OSError(28, "No space left on device")
    with pytest.raises(MachineError, match="full"):
        store(folder, error, RIGHT).fetch(NAME, folder / "staging", lambda size: None)


def test_a_pipe_in_place_of_a_file_is_refused_without_waiting(folder: Path) -> None:
    os.mkfifo(folder / "pipe")
    with pytest.raises(MachineError, match=r"pipe: cannot be read \(it is not a regular file\)"):
        HubFile("pipe", 0, None, "").difference_on_disk(folder / "pipe")
