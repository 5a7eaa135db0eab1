"""`bench convert`: conversion against `cp` of the same bytes on the same disk, cold, with fsync on both
sides, rounds interleaved.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from marlin_convert.bench.cold import make_cold
from marlin_convert.bench.own_process import run_command
from marlin_convert.bench.stats import summarize, this_machine
from marlin_convert.bench.synthetic import make_layers
from marlin_convert.documents.bench import (
    ConversionBench,
    ConversionSettings,
    ConversionVariant,
)
from marlin_convert.documents.provenance import Stage
from marlin_convert.documents.results import ConvertResult
from marlin_convert.storage.files import lies_in_memory


@dataclass(frozen=True)
class Variant:
    """One way to convert."""

    name: str
    arguments: tuple[str, ...]


@dataclass(frozen=True)
class _Run:
    """What one run took; of `cp` only the seconds."""

    seconds: float
    wall: float = 0.0
    peak_anonymous: int = 0
    stages: Mapping[str, Stage] = field(default_factory=dict)


VARIANTS = (
    Variant("none", ("--verify", "none")),
    Variant("exact", ("--verify", "exact")),
    Variant("none, ordinary I/O", ("--verify", "none", "--no-direct")),
    Variant("exact, ordinary I/O", ("--verify", "exact", "--no-direct")),
)


def bench_conversion(
    folder: Path,
    settings: ConversionSettings,
    *,
    source: Path | None,
    variants: Sequence[str],
    options: Sequence[str],
    say: Callable[[str], None],
) -> ConversionBench:
    """Run all variants and `cp` in turn, `rounds` times; needs about twice the checkpoint's size in `folder`.
    Returns the report.

    Without `source` a checkpoint is made. `options` go to each `convert` as they are.
    """
    layers, experts, rounds = settings.layers, settings.experts, settings.rounds
    place = Path(tempfile.mkdtemp(prefix="marlin-convert-bench-", dir=folder))
    try:
        if source is None:
            source = place / "source"
            say(f"making {layers} layers of {experts} experts")
            make_layers(source, layers, experts)
        files = sorted(path for path in source.iterdir() if path.is_file())
        in_memory = lies_in_memory(source.stat().st_dev)
        if in_memory:
            say("this is a file system in memory: nothing is cold here")
        size = sum(path.stat().st_size for path in files)
        chosen = [variant for variant in VARIANTS if variant.name in variants]
        extra = ["--tp", str(settings.tp), "--ep", str(settings.ep), *options]
        say("one run to compile and warm up")
        _convert(source, place / "out", [*extra, *chosen[0].arguments])
        runs: dict[str, list[_Run]] = {name: [] for name in ["cp", *(variant.name for variant in chosen)]}
        for number in range(rounds):
            # each starts from the same state: source out of the cache, no output there
            steps: list[tuple[str, Callable[[], _Run]]] = [("cp", partial(_copy, files, place / "copy"))]
            steps += [
                (v.name, partial(_convert, source, place / "out", [*extra, *v.arguments])) for v in chosen
            ]
            # and no variant always comes after the same other one, whose last writes a shared disk may still
            # be at
            order = steps[number % len(steps) :] + steps[: number % len(steps)]
            for name, run in order if number % 2 == 0 else reversed(order):
                if not in_memory:
                    make_cold(files)
                result = run()
                runs[name].append(result)
                say(
                    f"round {number + 1} of {rounds}: {name} {result.seconds:.2f} s,"
                    f" {size / result.seconds / 1e9:.2f} GB/s"
                )
        return _report(size, runs, settings)
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _copy(files: Sequence[Path], target: Path) -> _Run:
    target.mkdir()
    begin = time.perf_counter()
    subprocess.run(["cp", "--reflink=never", "--sparse=never", *map(str, files), str(target)], check=True)
    for path in [*target.iterdir(), target]:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    seconds = time.perf_counter() - begin
    shutil.rmtree(target)
    os.sync()
    return _Run(seconds)


def _convert(source: Path, out: Path, arguments: Sequence[str]) -> _Run:
    """Convert in a process of its own; its own clock (without interpreter start-up), its peak anonymous
    memory, its stages.
    """
    shutil.rmtree(out, ignore_errors=True)
    ran = run_command("convert", [str(source), str(out), *arguments], ConvertResult)
    shutil.rmtree(out)
    os.sync()
    return _Run(ran.document.seconds, ran.wall, ran.peak_anonymous, ran.document.stages)


def _report(size: int, runs: Mapping[str, Sequence[_Run]], settings: ConversionSettings) -> ConversionBench:
    copy = statistics.median(run.seconds for run in runs["cp"])
    variants = {name: _variant(name, size, copy, results) for name, results in runs.items()}
    return ConversionBench(size, settings, this_machine(), tuple(tell_check_apart(variants).values()))


def _variant(name: str, size: int, copy: float, results: Sequence[_Run]) -> ConversionVariant:
    seconds = tuple(run.seconds for run in results)
    found = summarize(seconds)
    variant = ConversionVariant(
        name=name,
        median=found.median,
        least=found.least,
        most=found.most,
        seconds=seconds,
        gb_per_s=size / found.median / 1e9,
        ratio_to_cp=found.median / copy,
    )
    if name == "cp":
        return variant
    return replace(
        variant,
        peak_anonymous=max(run.peak_anonymous for run in results),
        wall_median=statistics.median(run.wall for run in results),
        stages={
            stage: Stage(statistics.median(run.stages[stage].seconds for run in results), work.bytes)
            for stage, work in results[0].stages.items()
        },
    )


def tell_check_apart(variants: Mapping[str, ConversionVariant]) -> dict[str, ConversionVariant]:
    """Repacking and checking are one call, piece by piece; what the check takes of it is what `repack` takes
    longer than without.
    """
    told = dict(variants)
    for name, variant in variants.items():
        without = variants.get(name.replace("exact", "none", 1)) if name.startswith("exact") else None
        if without is None or variant.stages is None or without.stages is None:
            continue
        both, alone = variant.stages["repack"], without.stages["repack"]
        check = Stage(max(both.seconds - alone.seconds, 0.0), both.bytes)
        repack = Stage(both.seconds - check.seconds, both.bytes)
        told[name] = replace(variant, stages=variant.stages | {"check": check, "repack": repack})
    return told
