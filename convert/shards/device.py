"""One rank's shards as torch tensors on a device: whole files in large copies, each tensor a view of the device's memory.

Two ways. `ring`: threads read into a few pinned buffers and copy from there; past the page cache (`direct`) for files that are not in it.
`mapped`: the read-only mapping of a file is registered with CUDA piece by piece on other threads while earlier pieces copy.
Needs torch; on "cpu" the tensors are views of the mapping and nothing is copied.
"""

from __future__ import annotations

import mmap
import os
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import local

import torch
from torch import Tensor

from convert.errors import MachineError, UsageError
from convert.files import PAGE, open_direct
from convert.shards.manifest import FusedTensor, Shard, StoredTensor
from convert.shards.reader import Shards, open_shards

PATHS = ("mapped", "ring", "direct")
TORCH = {
    "BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64, "I32": torch.int32, "I64": torch.int64,
    "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "BOOL": torch.bool,
}  # fmt: skip
#: cudaHostRegisterReadOnly: registers pages of a read-only mapping; not every driver has it
READ_ONLY = 8
REGISTER = 256 << 20
RING_BUFFER = 16 << 20


@dataclass
class LoadedRank:
    """Tensors and fused views by name, the bytes copied, and seconds per step (`register` is summed over threads)."""

    tensors: dict[str, Tensor]
    path: str
    bytes: int = 0
    seconds: dict[str, float] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]


def host_tensors(shards: Shards, units: Sequence[str] | None = None) -> dict[str, Tensor]:
    """Zero-copy torch tensors over the mapping, fused views included. They are read-only memory: writing to one ends the process."""
    chosen = [shard for shard in shards.shards() if units is None or shard.unit in units]
    return {name: tensor for shard in chosen for name, tensor in _views(shard, _flat(shards.mapping(shard))).items()}


def load_rank(
    out: str | os.PathLike[str], rank: int, *, device: str = "cuda", units: Sequence[str] | None = None, path: str = "ring",
    threads: int | None = None,
) -> LoadedRank:  # fmt: skip
    """Open a rank and bring it to a device; see `load_shards`."""
    return load_shards(open_shards(out, rank), device=device, units=units, path=path, threads=threads)


def load_shards(
    shards: Shards, *, device: str = "cuda", units: Sequence[str] | None = None, path: str = "ring", threads: int | None = None
) -> LoadedRank:
    """Bring a rank (or some units of it, such as `layer-001`) to a device.

    `path` is one of PATHS; `ring` is the fastest measured (H200, from the page cache) and works everywhere. Raises OutputError for damaged files,
    UsageError for an unknown rank, unit or path, MachineError where CUDA fails.
    """
    chosen = [shard for shard in shards.shards() if units is None or shard.unit in units]
    if units is not None and len(chosen) != len(set(units)):
        raise UsageError(f"{shards.out} has no {sorted(set(units) - {shard.unit for shard in chosen})[0]} on rank {shards.rank}")
    if path not in PATHS:
        raise UsageError(f"path {path}: choose one of {', '.join(PATHS)}")
    threads = threads or min(os.cpu_count() or 1, 16)
    begin = time.perf_counter()
    if torch.device(device).type == "cpu":
        return LoadedRank(host_tensors(shards, units), "host")
    loaded = LoadedRank({}, path)
    for shard in chosen:
        shards.mapping(shard)  # checks size and identity before anything is copied
    targets = {shard.path: torch.empty(shard.size, dtype=torch.uint8, device=device) for shard in chosen}
    loaded.seconds["open"] = time.perf_counter() - begin
    if path == "mapped":
        _copy_mapped(shards, chosen, targets, threads, loaded)
    else:
        _copy_ring(shards, chosen, targets, threads, loaded)
    for shard in chosen:
        loaded.tensors |= _views(shard, targets[shard.path])
    loaded.bytes = sum(shard.size for shard in chosen)
    loaded.seconds["total"] = time.perf_counter() - begin
    return loaded


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


def _flat(mapped: mmap.mmap) -> Tensor:
    with warnings.catch_warnings():  # torch warns that it cannot keep anyone from writing
        warnings.simplefilter("ignore", UserWarning)
        return torch.frombuffer(mapped, dtype=torch.uint8)


def _copy_mapped(shards: Shards, chosen: Sequence[Shard], targets: dict[str, Tensor], threads: int, loaded: LoadedRank) -> None:
    """Register and copy, piece by piece. Raises MachineError where the driver cannot register a read-only mapping."""
    cudart = torch.cuda.cudart()
    pieces = [(shard, at, min(REGISTER, shard.size - at)) for shard in chosen for at in range(0, shard.size, REGISTER)]
    flats = {shard.path: _flat(shards.mapping(shard)) for shard in chosen}

    def register(piece: tuple[Shard, int, int]) -> float:
        shard, at, length = piece
        begin = time.perf_counter()
        code = int(cudart.cudaHostRegister(flats[shard.path].data_ptr() + at, length, READ_ONLY))
        return time.perf_counter() - begin if code == 0 else -1.0

    registered: list[tuple[Shard, int, int]] = []
    waited = 0.0
    begin = time.perf_counter()
    try:
        with ThreadPoolExecutor(threads) as workers:
            for piece, seconds in zip(pieces, workers.map(register, pieces), strict=True):
                if seconds < 0:
                    raise MachineError("this driver cannot register a read-only mapping (cudaHostRegisterReadOnly); use the path ring")
                waited += seconds
                registered.append(piece)
                shard, at, length = piece
                targets[shard.path][at : at + length].copy_(flats[shard.path][at : at + length], non_blocking=True)
            torch.cuda.synchronize()
            loaded.seconds |= {"register": waited, "copy": time.perf_counter() - begin}
    finally:
        begin = time.perf_counter()
        torch.cuda.synchronize()
        for shard, at, _ in registered:
            cudart.cudaHostUnregister(flats[shard.path].data_ptr() + at)
        loaded.seconds["unregister"] = time.perf_counter() - begin


def _copy_ring(shards: Shards, chosen: Sequence[Shard], targets: dict[str, Tensor], threads: int, loaded: LoadedRank) -> None:
    """Threads, each with two pinned buffers and a stream of its own: read one while the other copies."""
    begin = time.perf_counter()
    pinned = torch.empty(2 * threads * RING_BUFFER, dtype=torch.uint8, pin_memory=True)
    loaded.seconds["pin"] = time.perf_counter() - begin
    begin = time.perf_counter()
    files = {}
    for shard in chosen:
        where = shards.out / shard.path
        descriptor = open_direct(where, os.O_RDONLY) if loaded.path == "direct" else None
        files[shard.path] = os.open(where, os.O_RDONLY) if descriptor is None else descriptor
    mine, taken = local(), iter(range(threads))

    def copy(piece: tuple[Shard, int, int]) -> None:
        shard, at, length = piece
        if not hasattr(mine, "slots"):
            first = next(taken) * 2
            mine.slots = [(pinned[(first + i) * RING_BUFFER : (first + i + 1) * RING_BUFFER], torch.cuda.Event()) for i in (0, 1)]
            mine.stream, mine.turn = torch.cuda.Stream(), 0
        buffer, free = mine.slots[mine.turn % 2]
        mine.turn += 1
        free.synchronize()
        _read(files[shard.path], buffer, at, length, shard.path)
        with torch.cuda.stream(mine.stream):
            targets[shard.path][at : at + length].copy_(buffer[:length], non_blocking=True)
            free.record()

    pieces = [(shard, at, min(RING_BUFFER, shard.size - at)) for shard in chosen for at in range(0, shard.size, RING_BUFFER)]
    try:
        _run(copy, pieces, threads)
        torch.cuda.synchronize()
    finally:
        for descriptor in files.values():
            os.close(descriptor)
    loaded.seconds["copy"] = time.perf_counter() - begin


def _run(work: Callable[[tuple[Shard, int, int]], None], pieces: Sequence[tuple[Shard, int, int]], threads: int) -> None:
    with ThreadPoolExecutor(threads) as workers:
        for _ in workers.map(work, pieces):
            pass


def _read(descriptor: int, buffer: Tensor, at: int, length: int, name: str) -> None:
    """Fill a pinned buffer; file sizes and offsets are whole pages, so this serves direct reads too."""
    assert length % PAGE == 0
    view, done = buffer.numpy().data, 0
    while done < length:
        got = os.preadv(descriptor, [view[done:length]], at + done)
        if got <= 0:
            raise MachineError(f"{name} ended at byte {at + done} while it was being read; run verify")
        done += got
