"""The pinned ring with the late driver in the place of CUDA: what it does when something fails or somebody
interrupts.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from late_driver import SIZE, LateDriver
from marlin_convert.engines import ring as ring_module
from marlin_convert.engines.ring import PinnedRing
from marlin_convert.errors import MachineError
from marlin_convert.storage.reads import OpenFile


class Event:
    def __init__(self, driver: LateDriver, stream: int, number: int) -> None:
        self.driver, self.stream, self.cuda_event = driver, stream, number
        self.record()

    def record(self) -> None:
        self.driver.recorded[self.cuda_event] = self.stream, len(self.driver.copies[self.stream])

    def synchronize(self) -> None:
        self.driver.arrive(*self.driver.recorded[self.cuda_event])


class Cuda:
    """The part of torch.cuda that the ring uses."""

    def __init__(self, driver: LateDriver) -> None:
        self.driver, self.numbers = driver, itertools.count(1)
        self.synchronized: list[int] = []

    def current_stream(self, device: torch.device) -> Stream:
        return Stream(self, 0)

    def set_device(self, device: torch.device) -> None: ...

    def set_stream(self, stream: Stream) -> None: ...

    def Stream(self, device: torch.device) -> Stream:  # noqa: N802  # torch's name
        return Stream(self, next(self.numbers))

    def all_waited_for(self) -> bool:
        """Every stream that copied anything. A thread that came too late to do anything may still be about to
        end.
        """
        return {stream for stream, buffers in self.driver.buffers.items() if buffers} <= set(
            self.synchronized
        )


class Stream:
    def __init__(self, cuda: Cuda, number: int) -> None:
        self.cuda, self.cuda_stream = cuda, number

    def record_event(self) -> Event:
        return Event(self.cuda.driver, self.cuda_stream, next(self.cuda.numbers))

    def wait_event(self, event: Event) -> None:
        assert event.stream == 0, "what the caller's stream does comes first"

    def synchronize(self) -> None:
        self.cuda.driver.arrive(self.cuda_stream, len(self.cuda.driver.copies[self.cuda_stream]))
        self.cuda.synchronized.append(self.cuda_stream)


Start = Callable[[LateDriver], Cuda]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    def started(driver: LateDriver) -> Cuda:
        cuda = Cuda(driver)
        monkeypatch.setattr(torch, "cuda", cuda)
        monkeypatch.setattr(ring_module, "functions", lambda: driver.functions)
        monkeypatch.setattr(ring_module, "_pinned", lambda size: torch.empty(size, dtype=torch.uint8))
        return cuda

    before = threading.active_count()
    yield started
    for thread in threading.enumerate()[before:]:
        thread.join(10)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A hundred pages and a bit; every eight bytes say where they lie."""
    np.arange((100 * SIZE + 80) // 8, dtype=np.uint64).tofile(tmp_path / "data")
    return tmp_path / "data"


def load(path: Path, ring: PinnedRing, file: OpenFile | None = None, more: int = 0) -> torch.Tensor:
    target = torch.zeros(path.stat().st_size + more, dtype=torch.uint8)
    opened = file or OpenFile(path, direct=False)
    try:
        ring.copy(ring.parts(opened, 0, target))
    finally:
        opened.close()
    return target


@pytest.mark.parametrize("threads", [1, 3, 200])
@pytest.mark.parametrize("most", [SIZE, 1000])
def test_every_byte_arrives_by_the_compiled_loop_alone(
    path: Path, start: Start, threads: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = start(LateDriver(most=most))
    monkeypatch.setattr(ring_module, "_again", lambda *_: pytest.fail("the compiled loop left a part"))
    assert load(path, PinnedRing(threads, SIZE)).numpy().tobytes() == path.read_bytes()
    assert cuda.driver.calls["copy"] == 101


def test_existing_tensors_are_filled_where_they_are(path: Path, start: Start) -> None:
    """As an engine's parameters are: of any dtype, from any page of a file."""
    start(LateDriver())
    ring, file = PinnedRing(2, SIZE), OpenFile(path, direct=False)
    words = torch.nn.Parameter(torch.zeros((3, SIZE // 4), dtype=torch.int32), requires_grad=False)
    scales = torch.zeros((2, 700), dtype=torch.bfloat16)
    places = {SIZE: words, 7 * SIZE: scales}
    before = [tensor.data_ptr() for tensor in places.values()]
    ring.copy(
        part
        for offset, tensor in places.items()
        for part in ring.parts(file, offset, tensor.detach().view(-1).view(torch.uint8))
    )
    file.close()
    data = path.read_bytes()
    for offset, tensor in places.items():
        size = tensor.numel() * tensor.element_size()
        assert tensor.view(torch.uint8).numpy().tobytes() == data[offset : offset + size]
    assert [tensor.data_ptr() for tensor in places.values()] == before


@pytest.mark.parametrize("call", ["wait", "copy", "record"])
def test_a_part_of_which_a_call_fails_is_done_again(path: Path, start: Start, call: str) -> None:
    start(LateDriver(fails=(call, 7)))
    assert load(path, PinnedRing(2, SIZE)).numpy().tobytes() == path.read_bytes()


def test_direct_reads_that_are_refused(path: Path, start: Start) -> None:
    """Some file systems open a file for direct reads and then refuse each of them."""
    start(LateDriver())
    file = OpenFile(path, direct=False)
    file.direct = os.open(path, os.O_WRONLY)
    assert load(path, PinnedRing(3, SIZE), file).numpy().tobytes() == path.read_bytes()


def test_a_file_that_ends_early(path: Path, start: Start) -> None:
    cuda = start(LateDriver())
    with pytest.raises(
        MachineError, match=f"data ended at byte {100 * SIZE + 80} while it was being read; run verify"
    ):
        load(path, PinnedRing(2, SIZE), more=5 * SIZE)
    assert cuda.all_waited_for()


def test_the_first_failure_stops_all(path: Path, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = start(LateDriver(fails=("copy", 3)))

    def fail(*_: object) -> None:
        raise MachineError("the disk is gone")

    monkeypatch.setattr(ring_module, "_again", fail)
    with pytest.raises(MachineError, match="the disk is gone"):
        load(path, PinnedRing(2, SIZE))
    assert cuda.driver.calls["copy"] < 101
    assert cuda.all_waited_for()


def test_no_thread_reads_or_copies_after_an_interrupt(
    path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor after three: the file is closed and the memory is somebody else's by then."""
    cuda, real, interrupts = start(LateDriver()), ring_module._Job.wait, iter(range(3))
    begun = threading.Event()
    monkeypatch.setattr(cuda, "set_stream", lambda stream: begun.set())

    def interrupted(job: ring_module._Job) -> None:
        begun.wait(10)
        if next(interrupts, None) is not None:
            raise KeyboardInterrupt
        real(job)
        assert not job._working
        assert cuda.all_waited_for()

    monkeypatch.setattr(ring_module._Job, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        load(path, PinnedRing(3, SIZE))
    after = cuda.driver.calls.copy()
    for thread in threading.enumerate():
        if thread is not threading.main_thread():
            thread.join(1)
    assert cuda.driver.calls == after
    assert next(interrupts, None) is None, "it was interrupted three times"
