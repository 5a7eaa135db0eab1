"""What loading is made of, each part alone: the limits of a machine that `bench load` compares with."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from marlin_convert.bench.cold import evict, resident
from marlin_convert.bench.plain_reads import CHUNK, read_whole
from marlin_convert.engines.mapped import REGISTER, flat_bytes, host_register, host_unregister
from marlin_convert.errors import MachineError
from marlin_convert.shards.reader import Shards, open_shards
from marlin_convert.storage.buffers import aligned_buffer
from marlin_convert.storage.files import open_regular
from marlin_convert.storage.page_cache import can_tell

PINNED, CACHE, REGISTERING, DISK = (
    "pinned memory to the GPU",
    "page cache to pinned memory",
    "registering and unregistering the mapping",
    "disk",
)


def warm(files: Sequence[Path]) -> None:
    """Bring files into the page cache, unless every page is there."""
    if all(can_tell(path) for path in files) and resident(files) == 1:
        return
    buffer = aligned_buffer(CHUNK)
    for path in files:
        with os.fdopen(open_regular(path), "rb", buffering=0) as file:
            while file.readinto(buffer.data):
                pass


def warm_limits(files: Sequence[Path], threads: int) -> dict[str, float]:
    """GB/s of what a load from the page cache is made of."""
    size = 1 << 30
    host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(size, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    begin = time.perf_counter()
    device.copy_(host, non_blocking=True)
    torch.cuda.synchronize()
    copy = time.perf_counter() - begin
    warm(files)
    return {PINNED: size / copy / 1e9, CACHE: _read_rate(files, threads, False)}


def register_rate(shards: Shards) -> float:
    """One thread, in pieces as `load_rank` does it, nothing copied; a new mapping, since registering also
    makes its page tables. Raises MachineError where the driver cannot.
    """
    registered: list[int] = []
    with open_shards(shards.out, shards.rank) as fresh:
        flats = [flat_bytes(fresh.mapping(shard)) for shard in fresh.shards()]
        parts = [part for flat in flats for part in flat.split(REGISTER)]
        begin = time.perf_counter()
        try:
            for part in parts:
                host_register(part)
                registered.append(part.data_ptr())
        finally:
            host_unregister(registered)
        return sum(flat.numel() for flat in flats) / (time.perf_counter() - begin) / 1e9


def can_register(shards: Shards) -> bool:
    """Whether this driver can register a read-only mapping."""
    try:
        return register_rate(shards) > 0
    except MachineError:
        return False


def disk_rate(files: Sequence[Path], threads: int) -> float:
    """Direct reads of what is not in the page cache."""
    evict(files)
    return _read_rate(files, threads, True)


def _read_rate(files: Sequence[Path], threads: int, direct: bool) -> float:
    slots = torch.empty(threads * CHUNK, dtype=torch.uint8, pin_memory=True)
    total, seconds = read_whole(files, slots.numpy(), direct)
    return total / seconds / 1e9
