"""Page-aligned buffers under a budget, reused so that each page is zeroed by the kernel once, not once per
job.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Condition

import numpy as np
import numpy.typing as npt

from marlin_convert.storage.files import PAGE

#: memory as its bytes
Bytes = npt.NDArray[np.uint8]

#: from this size on, huge pages are asked for: repacking walks 64 rows at a time, more pages than a TLB holds
HUGE = 4 << 20


def aligned_buffer(size: int) -> Bytes:
    """A page-aligned uint8 array of private memory."""
    memory = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if size >= HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages: slower, nothing else
            memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)[:size]


class BufferPool:
    """Hands out buffers; all that were handed out or kept are at most `budget` bytes together."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self._kept: list[Bytes] = []
        self._held = 0
        self._change = Condition()
        self._stopped = False

    @contextmanager
    def take(self, size: int) -> Iterator[Bytes]:
        """A buffer of at least `size` bytes, waiting until the budget has room. A job takes all it needs at
        once, so none waits for another while holding memory itself.

        Raises ValueError where `size` can never fit, InterruptedError once the pool was stopped.
        """
        size = max(-(-size // PAGE) * PAGE, PAGE)
        if size > self.budget:
            raise ValueError(f"a job needs {size} bytes, the budget is {self.budget}")
        buffer = self._acquire(size)
        try:
            yield buffer
        finally:
            with self._change:
                self._kept.append(buffer)
                self._change.notify_all()

    def _acquire(self, size: int) -> Bytes:
        with self._change:
            while True:
                if self._stopped:
                    raise InterruptedError
                fits = [i for i, kept in enumerate(self._kept) if size <= kept.size <= 2 * size]
                if fits:
                    return self._kept.pop(min(fits, key=lambda i: self._kept[i].size))
                while self._held + size > self.budget and self._kept:
                    self._held -= self._kept.pop(0).size  # unmapped when the array goes
                if self._held + size <= self.budget:
                    self._held += size
                    return aligned_buffer(size)
                self._change.wait()

    def stop(self) -> None:
        """Wake all who wait; they and later callers get InterruptedError."""
        with self._change:
            self._stopped = True
            self._change.notify_all()
