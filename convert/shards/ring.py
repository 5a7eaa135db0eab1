"""Files to a GPU through a few pinned buffers: threads, each with two of them and a stream of its own, read into one while the other copies."""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import local

import torch
from torch import Tensor

from convert.errors import MachineError

#: bytes of one buffer; smaller ones were slower on an H200 (4 MiB: a third of the speed)
RING_BUFFER = 16 << 20


@dataclass(frozen=True)
class Part:
    """Bytes from `offset` of an open file to `target`, at most RING_BUFFER of them; `name` is for messages. Where the file was opened for direct
    reads, offset and size are whole pages."""

    descriptor: int
    offset: int
    target: Tensor
    name: str


class PinnedRing:
    """The buffers and their threads."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._memory = torch.empty(2 * threads * RING_BUFFER, dtype=torch.uint8, pin_memory=True)

    def copy(self, parts: Iterable[Part]) -> None:
        """Copy all and wait for it. Raises MachineError where a file ends early, OSError where it cannot be read."""
        mine, buffers = local(), iter(self._memory.split(RING_BUFFER))

        def begin() -> None:
            mine.slots = [(next(buffers), torch.cuda.Event()) for _ in range(2)]
            mine.stream, mine.turn = torch.cuda.Stream(), 0

        def run(part: Part) -> None:
            buffer, free = mine.slots[mine.turn % 2]
            mine.turn += 1
            free.synchronize()
            length = part.target.numel()
            _fill(buffer.numpy().data[:length], part)
            with torch.cuda.stream(mine.stream):
                part.target.copy_(buffer[:length], non_blocking=True)
                free.record()

        with ThreadPoolExecutor(self.threads, initializer=begin) as workers:
            for _ in workers.map(run, parts):
                pass
        torch.cuda.synchronize()


def parts_of(descriptor: int, offset: int, target: Tensor, name: str) -> list[Part]:
    """A stretch of a file in parts that fit a buffer; `target` is flat bytes."""
    sizes = range(0, target.numel(), RING_BUFFER)
    return [Part(descriptor, offset + at, target[at : at + RING_BUFFER], name) for at in sizes]


def _fill(view: memoryview, part: Part) -> None:
    done = 0
    while done < len(view):
        got = os.preadv(part.descriptor, [view[done:]], part.offset + done)
        if got <= 0:
            raise MachineError(f"{part.name} ended at byte {part.offset + done} while it was being read; run verify")
        done += got
