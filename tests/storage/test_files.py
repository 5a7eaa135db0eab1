"""Files that are read whole: of a bounded size, regular, and complete or not at all."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path

import pytest

from marlin_convert.errors import MachineError
from marlin_convert.storage.files import file_digest, open_direct, open_regular, read_small


def test_a_file_is_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "small"
    path.write_bytes(b"abc")
    assert read_small(path, 3) == b"abc"


def test_a_longer_file_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "sparse"
    path.touch()
    os.truncate(path, 1 << 40)
    with pytest.raises(OSError, match=f"it has {1 << 40} bytes, at most 100 are expected") as caught:
        read_small(path, 100)
    assert caught.value.filename == str(path)


def test_a_file_that_brings_fewer_bytes_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, whole = tmp_path / "short", os.fstat
    path.write_bytes(b"abc")

    def longer(descriptor: int) -> os.stat_result:
        status = list(whole(descriptor))
        status[6] += 2  # st_size: as if the file had been cut after this look
        return os.stat_result(status)

    monkeypatch.setattr("marlin_convert.storage.files.os.fstat", longer)
    with pytest.raises(MachineError, match="it brought 3 bytes of 5"):
        read_small(path, 100)


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EMFILE, errno.ENOMEM])
def test_where_the_machine_fails_the_file_is_not_blamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def fails(path: Path, flags: int) -> int:
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr("marlin_convert.storage.files.os.open", fails)
    for read in (open_regular, lambda path: file_digest(path, 1), lambda path: read_small(path, 1)):
        with pytest.raises(MachineError, match=f"^reading {tmp_path}/x: {os.strerror(number)}; "):
            read(tmp_path / "x")


def test_what_is_no_regular_file_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("/dev/zero")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "socket"))
        for name in ("pipe", "folder", "link", "socket"):
            for read in (open_regular, lambda path: file_digest(path, 1), lambda path: read_small(path, 1)):
                with pytest.raises(OSError, match=r"regular file|directory|No such device or address"):
                    read(tmp_path / name)


def test_a_pipe_is_not_opened_for_direct_reads(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert open_direct(tmp_path / "pipe", os.O_RDONLY) is None
