"""`bench load`: one rank to the GPU, cold and warm, against what engines do today and against the limits of the machine, in one run."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from convert.bench.cold import evict, resident
from convert.bench.engine_load import engine_load
from convert.buffers import aligned_buffer
from convert.checkpoint.source import open_source
from convert.errors import MachineError
from convert.files import open_direct
from convert.kernels.providers import load as load_provider
from convert.planning.topology import Topology
from convert.shards.device import PATHS, load_rank
from convert.shards.reader import open_shards

CHUNK = 16 << 20


def bench_load(out: Path, source: str | None, *, rank: int, rounds: int, threads: int | None, say: Callable[[str], None]) -> dict[str, Any]:
    """Load a rank each way, `rounds` times warm and once or more cold. Returns the report. Raises MachineError without a GPU."""
    if not torch.cuda.is_available():
        raise MachineError("no CUDA GPU: loading cannot be measured here")
    threads = threads or min(os.cpu_count() or 1, 16)
    shards = open_shards(out, rank)
    files = [out / shard.path for shard in shards.shards()]
    size = sum(path.stat().st_size for path in files)
    rows = []
    say("limits of this machine")
    limits = _limits(files, threads)
    for temperature, count in (("warm", rounds), ("cold", max(rounds // 3, 1))):
        for path in PATHS:
            results = [_one(out, rank, path, threads, files, temperature) for _ in range(count + (temperature == "warm"))]
            results = results[1:] if temperature == "warm" else results
            rows.append(_row(f"ours, {path}", temperature, size, results))
            say(f"{rows[-1]['name']}, {temperature}: {rows[-1]['seconds']:.3f} s, {rows[-1]['gb_per_s']:.1f} GB/s")
    if source is not None:
        rows += _engine(source, out, rank, rounds, threads, say)
    return {"rank": rank, "tp": shards.manifest.tp, "ep": shards.manifest.ep, "bytes": size, "threads": threads, "limits": limits, "rows": rows}


def _one(out: Path, rank: int, path: str, threads: int, files: Sequence[Path], temperature: str) -> dict[str, float]:
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


def _engine(source: str, out: Path, rank: int, rounds: int, threads: int, say: Callable[[str], None]) -> list[dict[str, Any]]:
    opened, manifest = open_source(source), open_shards(out, rank).manifest
    layers = [layer for layer in manifest.layers if layer in opened.model.moe_layers]
    topology, provider = Topology.of(manifest.tp, manifest.ep), load_provider()
    files = [opened.path(header.file) for header in opened.headers]
    rows = []
    for temperature, count in (("warm", rounds), ("cold", max(rounds // 3, 1))):
        results, size = [], 0
        for i in range(count + (temperature == "warm")):
            if temperature == "cold":
                evict(files)
            else:
                _warm(files)
            result = engine_load(opened, layers, rank, topology, provider, threads)
            size = result.bytes
            if i or temperature == "cold":
                results.append(result.seconds)
        rows.append(_row("engine: published files, repack on the GPU", temperature, size, results))
        say(f"{rows[-1]['name']}, {temperature}: {rows[-1]['seconds']:.3f} s")
    return rows


def _row(name: str, temperature: str, size: int, results: Sequence[dict[str, float]]) -> dict[str, Any]:
    median = statistics.median(result["total"] for result in results)
    steps = {step: statistics.median(result.get(step, 0.0) for result in results) for step in results[0]}
    return {
        "name": name, "temperature": temperature, "bytes": size, "seconds": median, "gb_per_s": size / median / 1e9, "steps": steps,
        "all": [result["total"] for result in results],
    }  # fmt: skip


def _warm(files: Sequence[Path]) -> None:
    buffer = aligned_buffer(CHUNK)
    for path in files:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer.data):
                pass


def _limits(files: Sequence[Path], threads: int) -> dict[str, float]:
    """GB/s: pinned host to device; parallel reads from the page cache into pinned memory; direct reads of the disk by 1 and by all threads."""
    size = 1 << 30
    host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(size, dtype=torch.uint8, device="cuda")
    copies = []
    for _ in range(4):
        begin = time.perf_counter()
        device.copy_(host, non_blocking=True)
        torch.cuda.synchronize()
        copies.append(time.perf_counter() - begin)
    _warm(files)
    limits = {"host to device, pinned": size / min(copies) / 1e9, "page cache to pinned memory": _read_rate(files, threads, False)}
    evict(files)
    limits["disk, direct, 1 thread"] = _read_rate(files, 1, True)
    for count in (4, threads):
        limits[f"disk, direct, {count} threads"] = _read_rate(files, count, True)
    return limits


def _read_rate(files: Sequence[Path], threads: int, direct: bool) -> float:
    slots = torch.empty(threads * CHUNK, dtype=torch.uint8, pin_memory=True)
    free = list(range(threads))
    descriptors = {path: (open_direct(path, os.O_RDONLY) if direct else None) for path in files}
    opened = {path: os.open(path, os.O_RDONLY) if descriptor is None else descriptor for path, descriptor in descriptors.items()}
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
