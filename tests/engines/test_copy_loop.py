"""The compiled loop of the loader, with functions of this test in the place of CUDA's driver: copies happen
as late as the driver is allowed to.
"""

import os
from itertools import pairwise
from pathlib import Path
from threading import Thread

import numpy as np
import numpy.typing as npt
import pytest

from late_driver import SIZE, LateDriver
from marlin_convert.engines.copy_loop import Lane, read_and_copy

File = tuple[Path, npt.NDArray[np.uint8]]


@pytest.fixture
def file(tmp_path: Path) -> File:
    """Every eight bytes say where they lie."""
    data = np.arange(64 * SIZE // 8, dtype=np.uint64).view(np.uint8)[:-100]
    data.tofile(tmp_path / "data")
    return tmp_path / "data", data


class Loads:
    """One file, in parts of SIZE bytes, to memory of this process."""

    def __init__(self, path: Path, size: int, driver: LateDriver) -> None:
        self.descriptor = os.open(path, os.O_RDONLY)
        self.target = np.zeros(size, np.uint8)
        self.table = np.array(
            [
                (self.descriptor, at, self.target.ctypes.data + at, min(SIZE, size - at))
                for at in range(0, size, SIZE)
            ],
            np.int64,
        )
        self.taken, self.driver = np.zeros(1, np.int64), driver
        self.memory = [np.zeros((2, SIZE), np.uint8) for _ in range(4)]

    def run(self, thread: int = 0, turn: int = 0) -> tuple[int, int]:
        buffers = self.memory[thread].ctypes.data + SIZE * np.arange(2)
        events = np.array([10 * thread + 1, 10 * thread + 2])
        lane = Lane(buffers, events, thread)
        part, turn = read_and_copy(self.table, self.taken.ctypes.data, lane, turn, self.driver.functions)
        return part, turn


@pytest.mark.parametrize("most", [SIZE, 1000])
@pytest.mark.parametrize("threads", [1, 4])
def test_every_byte_arrives_once_and_no_buffer_is_filled_before_it_was_copied(
    file: File, threads: int, most: int
) -> None:
    path, data = file
    driver = LateDriver(most=most)
    loads, ends = Loads(path, data.size, driver), list[tuple[int, int]]()
    running = [Thread(target=lambda i=i: ends.append(loads.run(i))) for i in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    driver.all_arrive()
    np.testing.assert_array_equal(loads.target, data)
    assert [part for part, _ in ends] == [-1] * threads
    assert sum(turn for _, turn in ends) == len(loads.table) == driver.calls["copy"]
    for used in driver.buffers.values():
        assert all(a != b for a, b in pairwise(used)), (
            "a part was read into the buffer that was just being copied, and had to wait"
        )


def test_a_part_that_cannot_be_read_whole_is_the_callers(file: File) -> None:
    path, data = file
    driver = LateDriver()
    loads = Loads(path, data.size + 2 * SIZE, driver)
    last = len(loads.table) - 3  # the one in which the file ends; none of the two after it has a byte
    assert loads.run() == (last, last)
    assert loads.run(turn=last) == (last + 1, last)
    driver.all_arrive()
    np.testing.assert_array_equal(loads.target[: last * SIZE], data[: last * SIZE])
    assert not loads.target[last * SIZE :].any(), "part of a part was sent"


@pytest.mark.parametrize("call", ["wait", "copy", "record"])
def test_a_part_of_which_a_call_fails_is_the_callers_and_the_rest_goes_on(file: File, call: str) -> None:
    path, data = file
    driver = LateDriver(fails=(call, 5))
    loads = Loads(path, data.size, driver)
    assert loads.run() == (5, 5)
    driver.all_arrive()  # as the caller has it: it waits for the buffer, fills it and sends it
    loads.target[5 * SIZE : 6 * SIZE] = data[5 * SIZE : 6 * SIZE]
    assert loads.run(turn=6) == (-1, len(loads.table))
    driver.all_arrive()
    np.testing.assert_array_equal(loads.target, data)


def test_beyond_four_gigabytes(tmp_path: Path) -> None:
    at, data = (5 << 30) + 12345, np.arange(SIZE, dtype=np.uint16).view(np.uint8)[:SIZE]
    with (tmp_path / "sparse").open("wb") as sparse:
        sparse.seek(at)
        sparse.write(data.tobytes())
    loads = Loads(tmp_path / "sparse", SIZE, LateDriver())
    loads.table[0, 1] = at
    assert loads.run() == (-1, 1)
    loads.driver.all_arrive()
    np.testing.assert_array_equal(loads.target, data)


def test_stopping(file: File) -> None:
    path, data = file
    loads = Loads(path, data.size, LateDriver())
    loads.taken[0] = len(loads.table)
    assert loads.run() == (-1, 0)
    assert not loads.driver.calls
