"""Files to a GPU through a few pinned buffers: threads, each with two of them and a stream of its own, read into one while the other copies."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import cycle
from threading import Thread

import torch
from torch import Tensor

from convert.errors import MachineError

#: bytes of a buffer for reads from the page cache, and for reads from the disk
CACHED, DIRECT = 8 << 20, 16 << 20


@dataclass(frozen=True)
class Part:
    """Bytes from `offset` of an open file to `target`, at most a buffer of them; `name` is for messages. Where the file was opened for direct reads,
    offset and size are whole pages."""

    descriptor: int
    offset: int
    target: Tensor
    name: str


class PinnedRing:
    """Two buffers of `size` bytes for each thread."""

    def __init__(self, threads: int, size: int = CACHED) -> None:
        self.threads = threads
        self.size = size
        self._memory = torch.empty(2 * threads * size, dtype=torch.uint8, pin_memory=True)

    def parts(self, descriptor: int, offset: int, target: Tensor, name: str) -> list[Part]:
        """A stretch of a file in parts that fit a buffer; `target` is flat bytes."""
        return [Part(descriptor, offset + at, target[at : at + self.size], name) for at in range(0, target.numel(), self.size)]

    def copy(self, parts: Iterable[Part]) -> None:
        """Copy all and wait for it. Raises MachineError where a file ends early, OSError where it cannot be read.

        Per part the interpreter's lock is let go of for the read and for the copy only: with many threads, each time costs more than the calls do.
        """
        left, failures = deque(parts), list[BaseException]()
        buffers = self._memory.split(self.size)

        def work(first: int) -> None:
            try:
                self._work(left, buffers[first : first + 2])
            except BaseException as error:
                failures.append(error)
                left.clear()

        threads = [Thread(target=work, args=(2 * i,)) for i in range(min(self.threads, len(left)))]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            left.clear()  # an interrupt ends the threads too
        torch.cuda.synchronize()
        if failures:
            raise failures[0]

    def _work(self, left: deque[Part], buffers: Sequence[Tensor]) -> None:
        torch.cuda.set_stream(torch.cuda.Stream())  # of this thread
        slots = cycle([(buffer, buffer.numpy().data, torch.cuda.Event()) for buffer in buffers])
        # the caller may be in inference mode, which is a thread's own, and then only there the targets may be written to; others may be anywhere
        with torch.inference_mode():
            while (part := _taken(left)) is not None:
                buffer, view, free = next(slots)
                if not free.query():
                    free.synchronize()
                length = part.target.numel()
                _fill(view[:length], part)
                part.target.copy_(buffer[:length], non_blocking=True)
                free.record()


def _taken(left: deque[Part]) -> Part | None:
    try:
        return left.popleft()
    except IndexError:
        return None


def _fill(view: memoryview, part: Part) -> None:
    done = 0
    while done < len(view):
        got = os.preadv(part.descriptor, [view[done:]], part.offset + done)
        if got <= 0:
            raise MachineError(f"{part.name} ended at byte {part.offset + done} while it was being read; run verify")
        done += got
