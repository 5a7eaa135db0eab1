"""The inner loop of loading, compiled: read a part of a file into a pinned buffer, start its copy to the
GPU, take the next part.

In Python each part held the interpreter's lock for 0.15 ms (16 threads, an H200 machine): half the time of
loading a rank from the page cache. Compiled, threads share a counter only, and parts can be small
enough to stay in the processor's cache.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any, NamedTuple

import numba
import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from marlin_convert.errors import MachineError
from marlin_convert.layout.jit import jit

Words = npt.NDArray[np.int64]
WORD = ir.IntType(64)
#: what of a result a C `int` takes
INT = 0xFFFFFFFF


class Functions(NamedTuple):
    """Addresses of C functions: pread, and of CUDA's driver cuMemcpyHtoDAsync, cuEventRecord and
    cuEventSynchronize.
    """

    read: int
    copy: int
    record: int
    wait: int


class Lane(NamedTuple):
    """What one thread copies with: addresses of its buffers, handles of an event for each and of its
    stream.
    """

    buffers: Words
    events: Words
    stream: int


@cache
def functions() -> Functions:
    """Those of this machine. Raises MachineError where there is no CUDA driver or NUMBA_DISABLE_JIT is
    set.
    """
    if numba.config.DISABLE_JIT:  # type: ignore[attr-defined]  # numba sets it at run time
        raise MachineError(
            "NUMBA_DISABLE_JIT is set: what loads through pinned memory only runs compiled; unset it, or load"
            " by the path mapped"
        )
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        wanted = (
            ctypes.CDLL(None).pread,
            driver.cuMemcpyHtoDAsync_v2,
            driver.cuEventRecord,
            driver.cuEventSynchronize,
        )
    except (OSError, AttributeError) as error:
        raise MachineError(f"the CUDA driver cannot be used: {error}") from error
    return Functions(*(address_of(function) for function in wanted))


def address_of(function: Any) -> int:
    """The address of a ctypes function."""
    return int(ctypes.cast(function, ctypes.c_void_p).value or 0)


@intrinsic
def _call(typing: Any, address: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    """Call the C function at an address with up to four integers or pointers (those it does not take are not
    looked at); its result in 64 bits.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        function = builder.inttoptr(arguments[0], ir.FunctionType(WORD, [WORD] * 4).as_pointer())
        return builder.call(function, arguments[1:])

    return types.int64(*[types.int64] * 5), generate


@intrinsic
def _take(typing: Any, counter: Any) -> Any:
    """Atomically add one to the int64 at an address; returns its value from before."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.atomic_rmw(
            "add", builder.inttoptr(arguments[0], WORD.as_pointer()), ir.Constant(WORD, 1), "monotonic"
        )

    return types.int64(types.int64), generate


@jit
def read_and_copy(parts: Words, taken: int, lane: Lane, turn: int, calls: Functions) -> tuple[int, int]:
    """Take parts until none is left, from as many threads as like.

    `parts[i]` is the descriptor, the offset, the address on the GPU and the bytes of part i. `taken` is the
    address of the number of parts taken so far; a thread that wants all to stop sets it to `len(parts)`.
    `lane` is of this thread alone, its events have been recorded. `turn` counts the buffers used so far.

    Returns (part, turn): a part that the caller is to do, in buffer `turn % len(lane.buffers)`, because a
    call for it failed or the file ended early; or (-1, turn) at the end.
    """
    buffers, events, stream = lane
    while True:
        i: int = _take(taken)  # type: ignore[call-arg]  # the first argument is numba's to give
        if i >= len(parts):
            return -1, turn
        slot = turn % len(buffers)
        size, done = parts[i, 3], 0
        if _call(calls.wait, events[slot], 0, 0, 0) & INT:
            return i, turn
        while done < size:
            got = _call(calls.read, parts[i, 0], buffers[slot] + done, size - done, parts[i, 1] + done)
            if got <= 0:
                return i, turn
            done += got
        if _call(calls.copy, parts[i, 2], buffers[slot], size, stream) & INT:
            return i, turn
        if _call(calls.record, events[slot], stream, 0, 0) & INT:
            return i, turn
        turn += 1
