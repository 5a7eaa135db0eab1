"""Files to a GPU through a few pinned buffers: threads, each with two of them and a stream of its own, read into one while the other copies."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import cycle
from threading import Event, Thread

import torch
from torch import Tensor

from convert.errors import MachineError
from convert.reads import OpenFile

#: bytes of a buffer for reads from the page cache, and for reads from the disk
CACHED, DIRECT = 8 << 20, 16 << 20


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

    def parts(self, file: OpenFile, offset: int, target: Tensor) -> list[Part]:
        """A stretch of a file in parts that fit a buffer; `target` is flat bytes."""
        return [Part(file, offset + at, target[at : at + self.size]) for at in range(0, target.numel(), self.size)]

    def copy(self, parts: Iterable[Part]) -> None:
        """Copy all, to one device, and wait for it. Raises MachineError where a file ends early or cannot be read, RuntimeError where CUDA fails.

        Per part the interpreter's lock is let go of for the read and for the copy only: with many threads, each time costs more than the calls do.
        """
        left, failures = deque(parts), list[BaseException]()
        if not left:
            return
        device = left[0].target.device
        # what the caller's stream still does with this memory comes first: it may have belonged to another tensor a moment ago
        ready = torch.cuda.current_stream(device).record_event()
        buffers = self._memory.split(self.size)

        def work(first: int, ended: Event) -> None:
            try:
                _work(left, buffers[first : first + 2], device, ready)
            except BaseException as error:
                failures.append(error)
                left.clear()
            finally:
                ended.set()

        begun: list[Event] = []
        try:
            for i in range(min(self.threads, len(left))):
                ended = Event()
                Thread(target=work, args=(2 * i, ended), daemon=True).start()
                begun.append(ended)
            for ended in begun:
                ended.wait()
        finally:  # after an interrupt too: files and memory are in use until the threads have ended and the copies are done
            left.clear()
            for ended in begun:
                ended.wait()
            try:
                torch.cuda.synchronize(device)
            except RuntimeError as error:
                failures.append(error)
        if failures:
            raise failures[0]


def _work(left: deque[Part], buffers: Sequence[Tensor], device: torch.device, ready: torch.cuda.Event) -> None:
    """One thread. Device, stream and inference mode are a thread's own."""
    torch.cuda.set_device(device)
    stream = torch.cuda.Stream(device)
    stream.wait_event(ready)
    torch.cuda.set_stream(stream)
    slots = cycle([(buffer, buffer.numpy().data, torch.cuda.Event()) for buffer in buffers])
    # a target made in inference mode may be written to only there; others may be anywhere
    with torch.inference_mode():
        while (part := _taken(left)) is not None:
            buffer, view, free = next(slots)
            if not free.query():
                free.synchronize()
            length = part.target.numel()
            if (got := part.file.fill(view[:length], part.offset, length)) < length:
                raise MachineError(f"{part.file.path} ended at byte {part.offset + got} while it was being read; run verify")
            part.target.copy_(buffer[:length], non_blocking=True)
            free.record()


def _taken(left: deque[Part]) -> Part | None:
    try:
        return left.popleft()
    except IndexError:
        return None
