"""A short measurement of a disk leaves nothing behind and says nothing where there is nothing to measure."""

from __future__ import annotations

from pathlib import Path

import pytest

from marlin_convert.storage.disk_rate import LEAST, PIECE, read_rate, write_rate


def test_writing(tmp_path: Path) -> None:
    rate = write_rate(tmp_path, 2 * PIECE)
    assert rate is not None
    assert rate > 0
    assert list(tmp_path.iterdir()) == []


def test_a_place_with_little_room_is_left_alone(tmp_path: Path) -> None:
    assert write_rate(tmp_path, PIECE - 1) is None
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written() -> None:
    with pytest.raises(OSError):  # noqa: PT011  # which one, the file system decides
        write_rate(Path("/proc"))


def test_reading(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(4 * LEAST))
    assert (read_rate(path) or 0) > 0
    path.write_bytes(bytes(LEAST))
    assert read_rate(path) is None
