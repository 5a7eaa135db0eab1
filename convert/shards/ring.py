"""Files to a GPU through a few pinned buffers: threads, each with two of them and a stream of its own, read into one while the other copies."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from threading import Event, Thread

import numpy as np
import torch
from torch import Tensor

from convert.errors import MachineError
from convert.reads import OpenFile
from convert.shards.copy_loop import Functions, Words, functions, read_and_copy

#: bytes of a buffer for reads from the page cache (all of them should fit the processor's cache), and for reads from the disk
CACHED, DIRECT = 4 << 20, 16 << 20


@dataclass(frozen=True)
class Part:
    """Bytes from `offset` of a file to `target`, at most a buffer of them. Where the file is read directly, offset and size are whole pages."""

    file: OpenFile
    offset: int
    target: Tensor


class PinnedRing:
    """Two buffers of `size` bytes for each thread."""

    def __init__(self, threads: int, size: int = CACHED) -> None:
        self.threads = threads
        self.size = size
        self._memory = torch.empty(2 * threads * size, dtype=torch.uint8, pin_memory=True)
        self._functions = functions()
        none = np.zeros(2, np.int64)
        _Job([], self._functions).loop(none, none, 0, 0)  # compiles the loop, or fetches it from the cache, before the threads need it

    def parts(self, file: OpenFile, offset: int, target: Tensor) -> list[Part]:
        """A stretch of a file in parts that fit a buffer; `target` is flat bytes."""
        return [Part(file, offset + at, target[at : at + self.size]) for at in range(0, target.numel(), self.size)]

    def copy(self, parts: Iterable[Part]) -> None:
        """Copy all, to one device, and wait for it. Raises MachineError where a file ends early or cannot be read, RuntimeError where CUDA fails."""
        job, failures = _Job(list(parts), self._functions), list[BaseException]()
        if not job.parts:
            return
        device = job.parts[0].target.device
        # what the caller's stream still does with this memory comes first: it may have belonged to another tensor a moment ago
        ready = torch.cuda.current_stream(device).record_event()
        buffers = self._memory.split(self.size)

        def work(first: int, ended: Event) -> None:
            try:
                _work(job, buffers[first : first + 2], device, ready)
            except BaseException as error:
                failures.append(error)
                job.stop()
            finally:
                ended.set()

        begun: list[Event] = []
        try:
            for i in range(min(self.threads, len(job.parts))):
                ended = Event()
                Thread(target=work, args=(2 * i, ended), daemon=True).start()
                begun.append(ended)
            for ended in begun:
                ended.wait()
        finally:  # after an interrupt too: files and memory are in use until the threads have ended and the copies are done
            job.stop()
            for ended in begun:
                ended.wait()
            try:
                torch.cuda.synchronize(device)
            except RuntimeError as error:
                failures.append(error)
        if failures:
            raise failures[0]


class _Job:
    """Parts as the compiled loop takes them, shared by the threads."""

    def __init__(self, parts: Sequence[Part], functions: Functions) -> None:
        self.parts = parts
        self._functions = functions
        rows = [(part.file.descriptor, part.offset, part.target.data_ptr(), part.target.numel()) for part in parts]
        self._table: Words = np.array(rows, np.int64).reshape(-1, 4)
        self._taken = np.zeros(1, np.int64)

    def stop(self) -> None:
        """No thread begins another part."""
        self._taken[0] = len(self.parts)

    def loop(self, buffers: Words, events: Words, stream: int, turn: int) -> tuple[int, int]:
        """See `read_and_copy`."""
        part, turn = read_and_copy(self._table, self._taken.ctypes.data, buffers, events, stream, turn, self._functions)
        return part, turn


def _work(job: _Job, buffers: Sequence[Tensor], device: torch.device, ready: torch.cuda.Event) -> None:
    """One thread. Device, stream and inference mode are a thread's own."""
    torch.cuda.set_device(device)
    stream = torch.cuda.Stream(device)
    stream.wait_event(ready)
    torch.cuda.set_stream(stream)
    events = [stream.record_event() for _ in buffers]
    addresses = np.array([buffer.data_ptr() for buffer in buffers]), np.array([event.cuda_event for event in events])
    turn = 0
    while True:
        i, turn = job.loop(*addresses, stream.cuda_stream, turn)
        if i < 0:
            return
        slot = turn % len(buffers)
        _again(job.parts[i], buffers[slot], events[slot])
        turn += 1


def _again(part: Part, buffer: Tensor, free: torch.cuda.Event) -> None:
    """A part that the compiled loop did not manage, so that it succeeds another way or says why it cannot."""
    free.synchronize()
    length = part.target.numel()
    if (got := part.file.fill(buffer[:length].numpy().data, part.offset, length)) < length:
        raise MachineError(f"{part.file.path} ended at byte {part.offset + got} while it was being read; run verify")
    # a target made in inference mode may be written to only there; others may be anywhere
    with torch.inference_mode():
        part.target.copy_(buffer[:length], non_blocking=True)
    free.record()
