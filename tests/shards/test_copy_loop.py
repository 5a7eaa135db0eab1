"""The compiled loop of the loader, with functions of this test in the place of CUDA's driver: copies happen as late as the driver is allowed to."""

import ctypes
import os
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from threading import Thread

import numpy as np
import numpy.typing as npt
import pytest

from convert.shards.copy_loop import Functions, address_of, read_and_copy

WORD = ctypes.c_int64
SIZE = 4096


class LateDriver:
    """A copy happens only when somebody waits for an event recorded after it: a buffer that is filled too early is seen in what arrives."""

    def __init__(self, fails: int = -1) -> None:
        self.copies: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
        self.recorded: dict[int, tuple[int, int]] = {}
        self.calls, self.fails = 0, fails
        self.buffers: dict[int, list[int]] = defaultdict(list)
        kinds = [ctypes.CFUNCTYPE(ctypes.c_int, *[WORD] * n) for n in (4, 2, 1)]
        self._kept = [kind(function) for kind, function in zip(kinds, (self._copy, self._record, self._wait), strict=True)]
        self.functions = Functions(address_of(ctypes.CDLL(None).pread), *(address_of(function) for function in self._kept))

    def _copy(self, target: int, buffer: int, size: int, stream: int) -> int:
        self.calls += 1
        if self.calls - 1 == self.fails:
            return 700
        self.buffers[stream].append(buffer)
        self.copies[stream].append((target, buffer, size))
        return 0

    def _record(self, event: int, stream: int) -> int:
        self.recorded[event] = stream, len(self.copies[stream])
        return 0

    def _wait(self, event: int) -> int:
        stream, count = self.recorded.get(event, (0, 0))
        self.arrive(stream, count)
        return 0

    def arrive(self, stream: int, count: int) -> None:
        """The first `count` copies of a stream are done, in their order."""
        for i, (target, buffer, size) in enumerate(self.copies[stream][:count]):
            if size:
                ctypes.memmove(target, buffer, size)
                self.copies[stream][i] = (0, 0, 0)

    def all_arrive(self) -> None:
        for stream, copies in self.copies.items():
            self.arrive(stream, len(copies))


@pytest.fixture
def file(tmp_path: Path) -> tuple[Path, npt.NDArray[np.uint8]]:
    """Every eight bytes say where they lie."""
    data = np.arange(64 * SIZE // 8, dtype=np.uint64).view(np.uint8)[:-100]
    data.tofile(tmp_path / "data")
    return tmp_path / "data", data


class Loads:
    """One file, in parts of SIZE bytes, to memory of this process."""

    def __init__(self, path: Path, size: int, driver: LateDriver) -> None:
        self.descriptor = os.open(path, os.O_RDONLY)
        self.target = np.zeros(size, np.uint8)
        self.table = np.array([(self.descriptor, at, self.target.ctypes.data + at, min(SIZE, size - at)) for at in range(0, size, SIZE)], np.int64)
        self.taken, self.driver = np.zeros(1, np.int64), driver
        self.memory = [np.zeros((2, SIZE), np.uint8) for _ in range(4)]

    def run(self, thread: int = 0, turn: int = 0) -> tuple[int, int]:
        buffers = self.memory[thread].ctypes.data + SIZE * np.arange(2)
        events = np.array([10 * thread + 1, 10 * thread + 2])
        part, turn = read_and_copy(self.table, self.taken.ctypes.data, buffers, events, thread, turn, self.driver.functions)
        return part, turn


@pytest.mark.parametrize("threads", [1, 4])
def test_every_byte_arrives_once_and_no_buffer_is_filled_before_it_was_copied(file: tuple[Path, npt.NDArray[np.uint8]], threads: int) -> None:
    path, data = file
    driver = LateDriver()
    loads, ends = Loads(path, data.size, driver), list[tuple[int, int]]()
    running = [Thread(target=lambda i=i: ends.append(loads.run(i))) for i in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    driver.all_arrive()
    np.testing.assert_array_equal(loads.target, data)
    assert [part for part, _ in ends] == [-1] * threads
    assert sum(turn for _, turn in ends) == len(loads.table) == driver.calls
    for used in driver.buffers.values():
        assert all(a != b for a, b in pairwise(used)), "a part was read into the buffer that was just being copied, and had to wait"


def test_a_part_that_cannot_be_read_whole_is_the_callers(file: tuple[Path, npt.NDArray[np.uint8]]) -> None:
    path, data = file
    driver = LateDriver()
    loads = Loads(path, data.size + 2 * SIZE, driver)
    last = len(loads.table) - 3  # the one in which the file ends; none of the two after it has a byte
    assert loads.run() == (last, last)
    assert loads.run(turn=last) == (last + 1, last)
    driver.all_arrive()
    np.testing.assert_array_equal(loads.target[: last * SIZE], data[: last * SIZE])
    assert not loads.target[last * SIZE :].any(), "part of a part was sent"


def test_a_copy_that_fails_is_the_callers_and_the_rest_goes_on(file: tuple[Path, npt.NDArray[np.uint8]]) -> None:
    path, data = file
    driver = LateDriver(fails=5)
    loads = Loads(path, data.size, driver)
    assert loads.run() == (5, 5)
    assert loads.run(turn=5) == (-1, len(loads.table) - 1)
    driver.all_arrive()
    missing = slice(5 * SIZE, 6 * SIZE)
    assert not loads.target[missing].any()
    loads.target[missing] = data[missing]
    np.testing.assert_array_equal(loads.target, data)


def test_stopping(file: tuple[Path, npt.NDArray[np.uint8]]) -> None:
    path, data = file
    loads = Loads(path, data.size, LateDriver())
    loads.taken[0] = len(loads.table)
    assert loads.run() == (-1, 0)
    assert loads.driver.calls == 0
