"""The functions that the loader's loop calls, with a GPU that copies as late as it may: to memory of this
process.
"""

from __future__ import annotations

import ctypes
import os
from collections import Counter, defaultdict
from collections.abc import Callable

from marlin_convert.engines.copy_loop import Functions, address_of

WORD = ctypes.c_int64
SIZE = 4096


class LateDriver:
    """A copy happens only when somebody waits for an event recorded after it: a buffer that is filled too
    early is seen in what arrives.

    `fails` is which call fails, as (copy, record or wait, its number). A read brings `most` bytes.
    """

    def __init__(self, fails: tuple[str, int] = ("", 0), most: int = SIZE) -> None:
        self.copies: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
        self.recorded: dict[int, tuple[int, int]] = {}
        self.buffers: dict[int, list[int]] = defaultdict(list)
        self.calls, self.fails, self.most = Counter[str](), fails, most
        calls: list[tuple[Callable[..., int], type[ctypes._SimpleCData[int]], int]] = [
            (self._read, WORD, 4),
            (self._copy, ctypes.c_int, 4),
            (self._record, ctypes.c_int, 2),
            (self._wait, ctypes.c_int, 1),
        ]
        self._kept = [
            ctypes.CFUNCTYPE(result, *[WORD] * count)(function) for function, result, count in calls
        ]
        self.functions = Functions(*(address_of(function) for function in self._kept))

    def _fails(self, name: str) -> bool:
        self.calls[name] += 1
        return self.fails == (name, self.calls[name] - 1)

    def _read(self, descriptor: int, buffer: int, size: int, offset: int) -> int:
        try:
            data = os.pread(descriptor, min(size, self.most), offset)
        except OSError:
            return -1
        ctypes.memmove(buffer, data, len(data))
        return len(data)

    def _copy(self, target: int, buffer: int, size: int, stream: int) -> int:
        if self._fails("copy"):
            return 700
        self.buffers[stream].append(buffer)
        self.copies[stream].append((target, buffer, size))
        return 0

    def _record(self, event: int, stream: int) -> int:
        if self._fails("record"):
            return 700
        self.recorded[event] = stream, len(self.copies[stream])
        return 0

    def _wait(self, event: int) -> int:
        if self._fails("wait"):
            return 700
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
        for stream, copies in list(self.copies.items()):
            self.arrive(stream, len(copies))
