"""`bench load`: one rank to the GPU, cold and warm, against what engines do today and against the limits of
the machine, in one run.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from marlin_convert.bench.cold import make_cold
from marlin_convert.bench.engine_load import engine_load
from marlin_convert.bench.load_limits import (
    CACHE,
    DISK,
    PINNED,
    REGISTERING,
    can_register,
    disk_rate,
    register_rate,
    warm,
    warm_limits,
)
from marlin_convert.checkpoint.source import Source, open_source
from marlin_convert.documents.bench import LoadBench, LoadRow
from marlin_convert.engines.torch_loader import DIRECT_THREADS, load_rank
from marlin_convert.errors import MachineError, UsageError
from marlin_convert.kernels.providers import Provider
from marlin_convert.kernels.providers import load as load_provider
from marlin_convert.limits import usable_cores
from marlin_convert.shards.reader import Shards, open_shards
from marlin_convert.slicing import Topology

#: what each path can at most reach: the least of these, measured in the same rounds
LIMITS = {
    ("auto", "warm"): (PINNED, CACHE),
    ("mapped", "warm"): (PINNED, REGISTERING),
    ("auto", "cold"): (DISK,),
    ("ring", "cold"): (DISK,),
    ("mapped", "cold"): (DISK,),
}

#: files into the page cache, or out of it
PREPARE = {"warm": warm, "cold": make_cold}
#: rounds before those that count: the first load of a process compiles
WARM_UPS = {"warm": 1, "cold": 0}


@dataclass
class _Way:
    """One way to load: the bytes it reads, and its seconds by step in each round, warm-ups included."""

    name: str
    temperature: str
    bytes: int = 0
    seconds: list[dict[str, float]] = field(default_factory=list)

    def row(self, limit: str | None, rates: Mapping[str, float]) -> LoadRow:
        """For the report: medians, and the rate as a share of the limit's."""
        warm_ups = WARM_UPS[self.temperature]
        rounds = self.seconds[warm_ups:]
        median = statistics.median(seconds["total"] for seconds in rounds)
        rate = self.bytes / median / 1e9
        steps = {step: statistics.median(seconds.get(step, 0.0) for seconds in rounds) for step in rounds[0]}
        return LoadRow(
            name=self.name,
            temperature=self.temperature,
            bytes=self.bytes,
            seconds=median,
            gb_per_s=rate,
            steps=steps,
            first=self.seconds[0] if warm_ups else None,
            all=tuple(seconds["total"] for seconds in rounds),
            limit=limit,
            of_limit=None if limit is None else rate / rates[limit],
        )


def bench_load(
    out: Path, source: str | None, *, rank: int, rounds: int, threads: int | None, say: Callable[[str], None]
) -> LoadBench:
    """Load a rank each way, `rounds` times warm and cold, with the limits measured in each round. Returns the
    report.

    Raises MachineError without a GPU, and where no kernel loads for `source`; UsageError where an engine
    would load other experts.
    """
    if not torch.cuda.is_available():
        raise MachineError("no CUDA GPU: loading cannot be measured here")
    # before anything is measured: is what repacks there, and the source?
    engine = None if source is None else (open_source(source), load_provider())
    readers = threads or min(usable_cores(), 16)
    shards = open_shards(out, rank)
    if engine is not None and shards.manifest.parallel.slots is not None:
        raise UsageError(f"{out} has its experts placed by a map; an engine's way is timed without one")
    files = [out / shard.path for shard in shards.shards()]
    size = sum(path.stat().st_size for path in files)
    mapped = can_register(shards)
    ways = {
        (path, temperature): _Way(f"ours, {path}", temperature, size)
        for path, temperature in LIMITS
        if path != "mapped" or mapped
    }
    limits: dict[str, list[float]] = defaultdict(list)
    for temperature, warm_ups in WARM_UPS.items():
        say(f"{temperature}: {rounds} rounds")
        for i in range(warm_ups + rounds):
            if temperature == "cold":
                found = {DISK: disk_rate(files, min(readers, DIRECT_THREADS))}
            else:
                found = warm_limits(files, readers)
                found |= {REGISTERING: register_rate(shards)} if mapped else {}
            for (path, when), way in ways.items():
                if when == temperature:
                    PREPARE[temperature](files)
                    way.seconds.append(_seconds(out, rank, path, threads))
            for name, rate in found.items() if i >= warm_ups else ():
                limits[name].append(rate)
    rates = {name: statistics.median(found) for name, found in limits.items()}
    rows = [way.row(min(LIMITS[key], key=rates.__getitem__), rates) for key, way in ways.items()]
    if engine is not None:
        for way in _engine(*engine, shards, max(rounds // 3, 1), readers):
            rows.append(way.row(None, rates))
            say(f"{way.name}, {way.temperature}: {rows[-1].seconds:.3f} s")
    return LoadBench(
        rank=rank,
        tp=shards.manifest.tp,
        ep=shards.manifest.ep,
        bytes=size,
        threads=readers,
        rounds=rounds,
        limits=rates,
        limits_all={name: tuple(found) for name, found in limits.items()},
        rows=tuple(rows),
    )


def _seconds(out: Path, rank: int, path: str, threads: int | None) -> dict[str, float]:
    """One load, by step."""
    seconds = dict(load_rank(out, rank, path=path, threads=threads).seconds)
    torch.cuda.synchronize()
    return seconds


def _engine(opened: Source, provider: Provider, shards: Shards, rounds: int, threads: int) -> list[_Way]:
    """The engine's way to load the layers of a rank, warm and cold."""
    manifest = shards.manifest
    layers = [layer for layer in manifest.layers if layer in opened.model.moe_layers]
    topology = Topology.of(manifest.tp, manifest.ep)
    files = [opened.path(header.file) for header in opened.headers]
    ways = []
    for temperature, warm_ups in WARM_UPS.items():
        way = _Way("engine: published files, repack on the GPU", temperature)
        for _ in range(warm_ups + rounds):
            PREPARE[temperature](files)
            result = engine_load(opened, layers, shards.rank or 0, topology, provider, threads)
            way.bytes = result.bytes
            way.seconds.append(result.seconds)
        ways.append(way)
    return ways
