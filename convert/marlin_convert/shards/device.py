"""One rank's shards as torch tensors on a device: whole files in large copies, each tensor a view of the
device's memory.

Two ways. `ring`: threads read into a few pinned buffers and copy from there; past the page cache (`direct`)
for files that are not in it. `auto` is `ring`, or `direct` for files that are not in the page cache.
`mapped`: the read-only mapping of a file is registered with CUDA piece by piece while earlier pieces copy.
Needs torch; on "cpu" the tensors are views of the mapping and nothing is copied.
"""

from __future__ import annotations

import mmap
import os
import time
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from marlin_convert.errors import MachineError, UsageError
from marlin_convert.files import PAGE
from marlin_convert.page_cache import can_tell, resident_pages
from marlin_convert.reads import OpenFile
from marlin_convert.shards.manifest import FusedTensor, Shard, StoredTensor
from marlin_convert.shards.reader import Shards, open_shards

PATHS = ("auto", "ring", "direct", "mapped")
TORCH = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "I32": torch.int32,
    "I64": torch.int64,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "BOOL": torch.bool,
}
#: cudaHostRegisterReadOnly: registers pages of a read-only mapping; not every driver has it
READ_ONLY = 8
#: bytes registered at a time
REGISTER = 128 << 20
#: how far the pages lie apart that are looked at to see whether a file is in the page cache
SAMPLE = 64 << 20
#: threads that read at most, from the page cache and from a disk: an H200 machine of 16 cores was fastest so
THREADS = 16
DIRECT_THREADS = 8


@dataclass
class LoadedRank:
    """Tensors and fused views by name, the bytes copied, and seconds per step; `register` is part of
    `register and copy`.
    """

    tensors: dict[str, Tensor]
    path: str
    threads: int = 1
    bytes: int = 0
    seconds: dict[str, float] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]


def host_tensors(shards: Shards, units: Sequence[str] | None = None) -> dict[str, Tensor]:
    """Zero-copy torch tensors over the mapping, fused views included. They are read-only memory: writing to
    one ends the process.
    """
    chosen = [shard for shard in shards.shards() if units is None or shard.unit in units]
    return {
        name: tensor
        for shard in chosen
        for name, tensor in _views(shard, flat_bytes(shards.mapping(shard))).items()
    }


def load_rank(
    out: str | os.PathLike[str],
    rank: int,
    *,
    device: str = "cuda",
    units: Sequence[str] | None = None,
    path: str = "auto",
    threads: int | None = None,
) -> LoadedRank:
    """Open a rank and bring it to a device; see `load_shards`."""
    return load_shards(open_shards(out, rank), device=device, units=units, path=path, threads=threads)


def load_shards(
    shards: Shards,
    *,
    device: str = "cuda",
    units: Sequence[str] | None = None,
    path: str = "auto",
    threads: int | None = None,
) -> LoadedRank:
    """Bring a rank (or some units of it, such as `layer-001`) to a device.

    `path` is one of PATHS, `threads` how many read for ring and direct. On return all is there, whatever the
    stream. Raises OutputError for damaged files, UsageError for an unknown rank, unit or path, MachineError
    where CUDA or the disk fails.
    """
    if isinstance(units, str):
        raise UsageError(f'units is a list, such as ["{units}"]')
    chosen = [shard for shard in shards.shards() if units is None or shard.unit in units]
    if units is not None and len(chosen) != len(set(units)):
        raise UsageError(
            f"{shards.out} has no {sorted(set(units) - {shard.unit for shard in chosen})[0]} on rank"
            f" {shards.rank}"
        )
    if path not in PATHS:
        raise UsageError(f"path {path}: choose one of {', '.join(PATHS)}")
    begin = time.perf_counter()
    if torch.device(device).type == "cpu":
        return LoadedRank(host_tensors(shards, units), "host")
    if not torch.cuda.is_available():
        raise MachineError(
            f"no CUDA GPU to load to (torch {torch.__version__}); the device cpu gives the tensors where"
            " they are"
        )
    for shard in chosen:
        shards.mapping(shard)  # checks size and identity before anything is copied
    if path == "auto":
        path = "ring" if _cached(shards, chosen) else "direct"
    best = {"ring": THREADS, "direct": DIRECT_THREADS, "mapped": 1}[path]
    loaded = LoadedRank({}, path, 1 if path == "mapped" else threads or min(os.cpu_count() or 1, best))
    try:
        with torch.cuda.device(device):
            targets = {
                shard.path: torch.empty(shard.size, dtype=torch.uint8, device="cuda") for shard in chosen
            }
            loaded.seconds["open"] = time.perf_counter() - begin
            (_copy_mapped if path == "mapped" else _copy_ring)(shards, chosen, targets, loaded)
    except RuntimeError as error:
        raise MachineError(f"CUDA failed while rank {shards.rank} was being loaded: {error}") from error
    for shard in chosen:
        loaded.tensors |= _views(shard, targets[shard.path])
    loaded.bytes = sum(shard.size for shard in chosen)
    loaded.seconds["total"] = time.perf_counter() - begin
    return loaded


def _cached(shards: Shards, chosen: Sequence[Shard]) -> bool:
    """Whether most of the files lies in the page cache, by a sample of their pages; True where the system
    does not tell. Not the first pages of a file: they have just been read for its header.
    """
    if not all(can_tell(shards.out / shard.path) for shard in chosen):
        return True
    places = [
        (shard, at)
        for shard in chosen
        for at in range(min(SAMPLE, shard.size) // 2 // PAGE * PAGE, shard.size, SAMPLE)
    ]
    sample = [resident_pages(shards.mapping(shard), at, 4 * PAGE) for shard, at in places]
    return bool(np.concatenate(sample).mean() > 0.5) if sample else True


def _views(shard: Shard, data: Tensor) -> dict[str, Tensor]:
    """Tensors and fused views of a file whose bytes are `data`."""
    views = {}
    parts: list[StoredTensor | FusedTensor] = [*shard.tensors, *shard.fused]
    for part in parts:
        if part.name.startswith("__pad__."):
            continue
        dtype = TORCH[part.dtype]
        size = dtype.itemsize
        for extent in part.shape:
            size *= extent
        views[part.name] = data[part.offset : part.offset + size].view(dtype).reshape(part.shape)
    return views


def flat_bytes(mapped: mmap.mmap) -> Tensor:
    """A mapping as a flat uint8 tensor, nothing copied. Writing to it ends the process."""
    with warnings.catch_warnings():  # torch warns that it cannot keep anyone from writing
        warnings.simplefilter("ignore", UserWarning)
        return torch.frombuffer(mapped, dtype=torch.uint8)


def _copy_mapped(
    shards: Shards, chosen: Sequence[Shard], targets: dict[str, Tensor], loaded: LoadedRank
) -> None:
    """Register a piece, set its copy going, register the next. Raises MachineError where the driver cannot
    register a read-only mapping.

    On one thread: the driver takes one range at a time, and more threads only wait for each other.
    """
    registered: list[int] = []
    spent, begin = 0.0, time.perf_counter()
    try:
        for shard in chosen:
            target = targets[shard.path]
            for i, part in enumerate(flat_bytes(shards.mapping(shard)).split(REGISTER)):
                spent += register(part)
                registered.append(part.data_ptr())
                target[i * REGISTER : (i + 1) * REGISTER].copy_(part, non_blocking=True)
        torch.cuda.synchronize()
        loaded.seconds |= {"register": spent, "register and copy": time.perf_counter() - begin}
    finally:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        unregister(registered)
        loaded.seconds["unregister"] = time.perf_counter() - begin


def register(part: Tensor) -> float:
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


def unregister(addresses: Sequence[int]) -> None:
    """Undo `register`, once nothing copies any more."""
    for address in addresses:
        torch.cuda.cudart().cudaHostUnregister(address)


def _copy_ring(
    shards: Shards, chosen: Sequence[Shard], targets: dict[str, Tensor], loaded: LoadedRank
) -> None:
    from marlin_convert.shards.ring import (
        CACHED,
        DIRECT,
        Part,
        PinnedRing,
    )  # and numba, which the other ways do without

    begin = time.perf_counter()
    direct = loaded.path == "direct"
    ring = PinnedRing(loaded.threads, DIRECT if direct else CACHED)
    loaded.seconds["pin"] = time.perf_counter() - begin
    begin = time.perf_counter()
    files: list[OpenFile] = []
    parts: list[Part] = []
    try:
        for shard in chosen:
            files.append(OpenFile(shards.out / shard.path, direct))
            parts += ring.parts(files[-1], 0, targets[shard.path])
        ring.copy(parts)
    finally:
        for file in files:
            file.close()
    loaded.seconds["copy"] = time.perf_counter() - begin
