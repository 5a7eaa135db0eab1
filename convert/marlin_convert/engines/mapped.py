"""Files to a GPU through their mappings: a piece of the read-only mapping is registered with CUDA while
earlier pieces copy.
"""

from __future__ import annotations

import mmap
import time
import warnings
from collections.abc import Iterable, Sequence
from contextlib import suppress

import torch
from torch import Tensor

from marlin_convert.errors import MachineError

#: cudaHostRegisterReadOnly: registers pages of a read-only mapping; not every driver has it
READ_ONLY = 8
#: bytes registered at a time
REGISTER = 128 << 20


def flat_bytes(mapped: mmap.mmap) -> Tensor:
    """A mapping as a flat uint8 tensor, nothing copied. Writing to it ends the process."""
    with warnings.catch_warnings():  # torch warns that it cannot keep anyone from writing
        warnings.simplefilter("ignore", UserWarning)
        return torch.frombuffer(mapped, dtype=torch.uint8)


def copy_mapped(files: Iterable[tuple[mmap.mmap, Tensor]]) -> dict[str, float]:
    """Copy each mapping to its target, flat bytes on the current device, and wait for it. Register a piece,
    start its copy, register the next.

    Returns seconds per step; `register` is part of `register and copy`. Raises MachineError where the driver
    cannot register a read-only mapping. On one thread: the driver takes one range at a time, and more threads
    only wait for each other.
    """
    registered: list[int] = []
    seconds = {"register": 0.0}
    begin = time.perf_counter()
    try:
        for mapped, target in files:
            for i, part in enumerate(flat_bytes(mapped).split(REGISTER)):
                seconds["register"] += host_register(part)
                registered.append(part.data_ptr())
                target[i * REGISTER : (i + 1) * REGISTER].copy_(part, non_blocking=True)
        torch.cuda.synchronize()
        seconds["register and copy"] = time.perf_counter() - begin
    finally:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        host_unregister(registered)
        seconds["unregister"] = time.perf_counter() - begin
    return seconds


def host_register(part: Tensor) -> float:
    """Make the GPU able to copy straight from (part of) a read-only mapping; returns the seconds. Raises
    MachineError where the driver cannot.
    """
    begin = time.perf_counter()
    if int(torch.cuda.cudart().cudaHostRegister(part.data_ptr(), part.numel(), READ_ONLY)):
        with suppress(RuntimeError):  # the next kernel would report this failure as its own
            torch.zeros(1, device="cuda")
        raise MachineError(
            "this driver cannot register a read-only mapping (cudaHostRegisterReadOnly); use the path ring"
        )
    return time.perf_counter() - begin


def host_unregister(addresses: Sequence[int]) -> None:
    """Undo `host_register`, once nothing copies any more."""
    for address in addresses:
        torch.cuda.cudart().cudaHostUnregister(address)
