"""`bench load`: one rank to the GPU, cold and warm, against what engines do today and against the limits of
the machine, in one run.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from marlin_convert.bench.cold import evict, resident
from marlin_convert.bench.engine_load import engine_load
from marlin_convert.checkpoint.source import open_source
from marlin_convert.engines.mapped import REGISTER, flat_bytes, register, unregister
from marlin_convert.engines.torch_loader import DIRECT_THREADS, load_rank
from marlin_convert.errors import MachineError
from marlin_convert.kernels.providers import load as load_provider
from marlin_convert.shards.reader import Shards, open_shards
from marlin_convert.slicing import Topology
from marlin_convert.storage.buffers import aligned_buffer
from marlin_convert.storage.files import open_direct
from marlin_convert.storage.page_cache import can_tell

CHUNK = 16 << 20
#: what each path can at most reach: the least of these, measured in the same rounds
PINNED, CACHE, REGISTERING, DISK = (
    "pinned memory to the GPU",
    "page cache to pinned memory",
    "registering and unregistering the mapping",
    "disk",
)
LIMITS = {
    ("auto", "warm"): (PINNED, CACHE),
    ("mapped", "warm"): (PINNED, REGISTERING),
    ("auto", "cold"): (DISK,),
    ("ring", "cold"): (DISK,),
    ("mapped", "cold"): (DISK,),
}


def bench_load(
    out: Path, source: str | None, *, rank: int, rounds: int, threads: int | None, say: Callable[[str], None]
) -> dict[str, Any]:
    """Load a rank each way, `rounds` times warm and cold, with the limits measured in each round. Returns the
    report.

    Raises MachineError without a GPU.
    """
    if not torch.cuda.is_available():
        raise MachineError("no CUDA GPU: loading cannot be measured here")
    readers = threads or min(os.cpu_count() or 1, 16)
    shards = open_shards(out, rank)
    files = [out / shard.path for shard in shards.shards()]
    size = sum(path.stat().st_size for path in files)
    ways = [way for way in LIMITS if way[0] != "mapped" or _can_register(shards)]
    limits: dict[str, list[float]] = {}
    results: dict[tuple[str, str], list[dict[str, float]]] = {way: [] for way in ways}
    firsts: dict[tuple[str, str], dict[str, float]] = {}
    for temperature in ("warm", "cold"):
        say(f"{temperature}: {rounds} rounds")
        warm_ups = 1 if temperature == "warm" else 0
        for i in range(rounds + warm_ups):
            found = (
                _warm_limits(files, readers)
                if temperature == "warm"
                else {DISK: _disk_rate(files, min(readers, DIRECT_THREADS))}
            )
            if ("mapped", temperature) in ways and temperature == "warm":
                found[REGISTERING] = _register_rate(shards)
            loads = {
                way: _one(out, rank, way[0], threads, files, temperature)
                for way in ways
                if way[1] == temperature
            }
            if i < warm_ups:
                firsts |= loads
            else:
                for name, rate in found.items():
                    limits.setdefault(name, []).append(rate)
                for way, seconds in loads.items():
                    results[way].append(seconds)
    rates = {name: statistics.median(found) for name, found in limits.items()}
    rows = [
        _row(
            f"ours, {way[0]}",
            way[1],
            size,
            found,
            firsts.get(way),
            min(LIMITS[way], key=lambda name: rates[name]),
            rates,
        )
        for way, found in results.items()
    ]
    if source is not None:
        rows += _engine(source, out, rank, max(rounds // 3, 1), readers, say)
    return {
        "rank": rank,
        "tp": shards.manifest.tp,
        "ep": shards.manifest.ep,
        "bytes": size,
        "threads": readers,
        "rounds": rounds,
        "limits": rates,
        "limits_all": limits,
        "rows": rows,
    }


def _one(
    out: Path, rank: int, path: str, threads: int | None, files: Sequence[Path], temperature: str
) -> dict[str, float]:
    if temperature == "cold":
        evict(files)
        if resident(files) > 0.01:
            raise MachineError("the files stay in the page cache; a cold load cannot be measured here")
    else:
        _warm(files)
    loaded = load_rank(out, rank, path=path, threads=threads)
    seconds = dict(loaded.seconds)
    del loaded
    torch.cuda.synchronize()
    return seconds


def _engine(
    source: str, out: Path, rank: int, rounds: int, threads: int, say: Callable[[str], None]
) -> list[dict[str, Any]]:
    opened, manifest = open_source(source), open_shards(out, rank).manifest
    layers = [layer for layer in manifest.layers if layer in opened.model.moe_layers]
    topology, provider = Topology.of(manifest.tp, manifest.ep), load_provider()
    files = [opened.path(header.file) for header in opened.headers]
    rows = []
    for temperature in ("warm", "cold"):
        results, size, first = [], 0, None
        for i in range(rounds + (temperature == "warm")):
            if temperature == "cold":
                evict(files)
            else:
                _warm(files)
            result = engine_load(opened, layers, rank, topology, provider, threads)
            size = result.bytes
            if i or temperature == "cold":
                results.append(result.seconds)
            else:
                first = result.seconds
        rows.append(_row("engine: published files, repack on the GPU", temperature, size, results, first))
        say(f"{rows[-1]['name']}, {temperature}: {rows[-1]['seconds']:.3f} s")
    return rows


def _row(
    name: str,
    temperature: str,
    size: int,
    results: Sequence[dict[str, float]],
    first: dict[str, float] | None,
    limit: str | None = None,
    rates: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    median = statistics.median(result["total"] for result in results)
    steps = {step: statistics.median(result.get(step, 0.0) for result in results) for step in results[0]}
    rate = size / median / 1e9
    return {
        "name": name,
        "temperature": temperature,
        "bytes": size,
        "seconds": median,
        "gb_per_s": rate,
        "steps": steps,
        "first": first,
        "all": [result["total"] for result in results],
        "limit": limit,
        "of_limit": rate / rates[limit] if limit and rates else None,
    }


def _warm(files: Sequence[Path]) -> None:
    """Bring files into the page cache, unless every page is there."""
    if all(can_tell(path) for path in files) and resident(files) == 1:
        return
    buffer = aligned_buffer(CHUNK)
    for path in files:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer.data):
                pass


def _warm_limits(files: Sequence[Path], threads: int) -> dict[str, float]:
    """GB/s of what a load from the page cache is made of."""
    size = 1 << 30
    host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(size, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    begin = time.perf_counter()
    device.copy_(host, non_blocking=True)
    torch.cuda.synchronize()
    copy = time.perf_counter() - begin
    _warm(files)
    return {PINNED: size / copy / 1e9, CACHE: _read_rate(files, threads, False)}


def _register_rate(shards: Shards) -> float:
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
                register(part)
                registered.append(part.data_ptr())
        finally:
            unregister(registered)
        return sum(flat.numel() for flat in flats) / (time.perf_counter() - begin) / 1e9


def _can_register(shards: Shards) -> bool:
    try:
        return _register_rate(shards) > 0
    except MachineError:
        return False


def _disk_rate(files: Sequence[Path], threads: int) -> float:
    """Direct reads of what is not in the page cache."""
    evict(files)
    return _read_rate(files, threads, True)


def _read_rate(files: Sequence[Path], threads: int, direct: bool) -> float:
    slots = torch.empty(threads * CHUNK, dtype=torch.uint8, pin_memory=True)
    free = list(range(threads))
    descriptors = {path: open_direct(path, os.O_RDONLY) if direct else None for path in files}
    opened = {
        path: os.open(path, os.O_RDONLY) if descriptor is None else descriptor
        for path, descriptor in descriptors.items()
    }
    pieces = [(path, at) for path in files for at in range(0, path.stat().st_size, CHUNK)]

    def read(piece: tuple[Path, int]) -> int:
        slot = free.pop()
        view = slots[slot * CHUNK : (slot + 1) * CHUNK].numpy().data
        got = os.preadv(opened[piece[0]], [view], piece[1])
        free.append(slot)
        return got

    begin = time.perf_counter()
    with ThreadPoolExecutor(threads) as workers:
        total = sum(workers.map(read, pieces))
    seconds = time.perf_counter() - begin
    for descriptor in opened.values():
        os.close(descriptor)
    return total / seconds / 1e9
