"""Files to a GPU through a few pinned buffers: threads, each with two of them and a stream of its own, read
into one while the other copies.

Where the bytes go is the caller's: into memory of its own, or into tensors that exist already, such as an
engine's parameters. Any contiguous tensor is a target as flat bytes:

    target = parameter.detach().view(-1).view(torch.uint8)
    ring.copy(ring.parts(OpenFile(path, direct=False), offset, target))
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from threading import Condition

import numpy as np
import torch
from torch import Tensor

from marlin_convert.engines.copy_loop import Lane, Words, functions, read_and_copy
from marlin_convert.errors import MachineError
from marlin_convert.storage.reads import OpenFile, ShortFileError
from marlin_convert.threads import make_do, start

#: bytes of a buffer for reads from the page cache and for reads from the disk, as measured fastest on an H200
#: machine. Of the former all together fit its third cache
CACHED, DIRECT = 4 << 20, 16 << 20


@dataclass(frozen=True)
class Part:
    """Bytes from `offset` of a file to `target`, flat uint8 on a GPU, at most a buffer of them. Where the
    file is read directly, `offset` is a whole page, as that of every tensor of a page or more is.
    """

    file: OpenFile
    offset: int
    target: Tensor


class PinnedRing:
    """Two buffers of `size` bytes for each thread."""

    def __init__(self, threads: int, size: int = CACHED) -> None:
        self.threads = threads
        self.size = size
        self._memory = _pinned(2 * threads * size)
        none = np.zeros(2, np.int64)
        # compiles the loop, or fetches it from the cache, before the threads need it
        _Job([]).loop(Lane(none, none, 0), 0)

    def parts(self, file: OpenFile, offset: int, target: Tensor) -> list[Part]:
        """As much of a file, from `offset` on, as `target` (flat uint8) takes, in parts that fit a buffer."""
        return [
            Part(file, offset + at, target[at : at + self.size]) for at in range(0, target.numel(), self.size)
        ]

    def copy(self, parts: Iterable[Part]) -> None:
        """Copy all, to one device, after what the current stream still does there, and wait for it. Raises
        MachineError where a file ends early or cannot be read, RuntimeError where CUDA fails.
        """
        job = _Job(list(parts))
        if not job.parts:
            return
        device = job.parts[0].target.device
        # what the caller's stream still does with this memory comes first: it may have belonged to another
        # tensor a moment ago
        ready = torch.cuda.current_stream(device).record_event()
        buffers = self._memory.split(self.size)
        try:
            wanted, begun = min(self.threads, len(job.parts)), 0
            while begun < wanted and start(
                partial(job.work, buffers[2 * begun : 2 * begun + 2], device, ready), f"load-{begun}"
            ):
                begun += 1
            make_do(begun, wanted)
            job.wait()
        except BaseException as error:
            job.fail(error)
        job.wait_until_unused()
        if job.failures:
            raise job.failures[0]


def _pinned(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)


class _Job:
    """Parts as the compiled loop takes them, shared by the threads, and how many threads are still at
    work.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = parts
        self.failures: list[BaseException] = []
        rows = [
            (part.file.descriptor, part.offset, part.target.data_ptr(), part.target.numel()) for part in parts
        ]
        self._table: Words = np.array(rows, np.int64).reshape(-1, 4)
        self._taken = np.zeros(1, np.int64)
        self._working = 0
        self._changed = Condition()

    def loop(self, lane: Lane, turn: int) -> tuple[int, int]:
        """See `read_and_copy`."""
        return read_and_copy(self._table, self._taken.ctypes.data, lane, turn, functions())

    def fail(self, error: BaseException) -> None:
        """Keep the error; no thread begins another part."""
        self.failures.append(error)
        self._taken[0] = len(self.parts)

    def wait(self) -> None:
        """Wait until every part was taken and no thread works. A thread that only comes later finds nothing
        to do.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._taken[0] >= len(self.parts) and not self._working)

    def wait_until_unused(self) -> None:
        """The same, whatever interrupts: until then files and memory are in use."""
        while True:
            try:
                return self.wait()
            except BaseException as error:
                self.fail(error)

    def work(self, buffers: Sequence[Tensor], device: torch.device, ready: torch.cuda.Event) -> None:
        """One thread. Device, stream and inference mode are a thread's own."""
        with self._changed:
            self._working += 1
        try:
            torch.cuda.set_device(device)
            stream = torch.cuda.Stream(device)
            try:
                stream.wait_event(ready)
                self._copy(buffers, stream)
            finally:
                stream.synchronize()
        except BaseException as error:
            self.fail(error)
        finally:
            with self._changed:
                self._working -= 1
                self._changed.notify_all()

    def _copy(self, buffers: Sequence[Tensor], stream: torch.cuda.Stream) -> None:
        torch.cuda.set_stream(stream)
        events = [stream.record_event() for _ in buffers]
        lane = Lane(
            np.array([buffer.data_ptr() for buffer in buffers]),
            np.array([event.cuda_event for event in events]),
            stream.cuda_stream,
        )
        turn = 0
        while True:
            i, turn = self.loop(lane, turn)
            if i < 0:
                return
            slot = turn % len(buffers)
            _again(self.parts[i], buffers[slot], events[slot])
            turn += 1


def _again(part: Part, buffer: Tensor, free: torch.cuda.Event) -> None:
    """Do a part in Python that the compiled loop could not do: it succeeds, or the error says why not."""
    free.synchronize()
    length = part.target.numel()
    try:
        part.file.fill(buffer[:length].numpy().data, part.offset, length)
    except ShortFileError as error:
        raise MachineError(
            f"{part.file.path} ended at byte {error.end} while it was being read; run verify"
        ) from error
    # a target made in inference mode may be written to only there; others may be anywhere
    with torch.inference_mode():
        part.target.copy_(buffer[:length], non_blocking=True)
    free.record()
