"""`bench convert`: conversion, and with --verb the way back or to another split, against `cp` of the
checkpoint on the same disk, cold, with fsync on both sides, rounds interleaved.
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
from marlin_convert.documents.restore import RestoreResult
from marlin_convert.documents.results import ConvertResult
from marlin_convert.storage.files import lies_in_memory


@dataclass(frozen=True)
class Variant:
    """One way to do it."""

    name: str
    arguments: tuple[str, ...]


@dataclass(frozen=True)
class _Run:
    """What one run took; of `cp` only the seconds."""

    seconds: float
    wall: float = 0.0
    peak_anonymous: int = 0
    stages: Mapping[str, Stage] = field(default_factory=dict)


@dataclass(frozen=True)
class Verb:
    """What is measured: a command that reads a folder and writes one, what it prints, and ways to do it."""

    name: str
    kind: type[ConvertResult | RestoreResult]
    variants: tuple[Variant, ...]


_ORDINARY = ", ordinary I/O"
_CHECKED = tuple(
    Variant(check + name, ("--verify", check, *direct))
    for name, direct in (("", ()), (_ORDINARY, ("--no-direct",)))
    for check in ("none", "exact")
)
_PLAIN = (Variant("restore", ()), Variant("restore" + _ORDINARY, ("--no-direct",)))
VERBS = {
    verb.name: verb
    for verb in (
        Verb("convert", ConvertResult, _CHECKED),
        Verb("restore", RestoreResult, _PLAIN),
        Verb("reshard", ConvertResult, _CHECKED),
    )
}


def bench_conversion(
    folder: Path,
    settings: ConversionSettings,
    *,
    source: Path | None,
    variants: Sequence[str],
    options: Sequence[str],
    say: Callable[[str], None],
) -> ConversionBench:
    """Run all variants and `cp` in turn, `rounds` times; needs about twice the checkpoint's size in `folder`,
    three times where it is not conversion that is measured. Returns the report.

    Without `source` a checkpoint is made. `options` go to each run as they are.
    """
    place = Path(tempfile.mkdtemp(prefix="marlin-convert-bench-", dir=folder))
    try:
        if source is None:
            source = place / "source"
            say(f"making {settings.layers} layers of {settings.experts} experts")
            make_layers(source, settings.layers, settings.experts)
        files = _files(source)
        verb, read, extra = VERBS[settings.verb], source, ["--tp", str(settings.tp), "--ep", str(settings.ep)]
        if verb.name != "convert":
            read = place / "converted"
            say("converting it once")
            run_command("convert", [str(source), str(read), *extra, "--verify", "none"], ConvertResult)
            extra = _split_of(settings) if verb.name == "reshard" else []
        todo = _Todo(verb, read, place / "out", [*extra, *options])
        chosen = [variant for variant in verb.variants if variant.name in variants]
        say("one run to compile and warm up")
        todo.run(chosen[0])
        steps: list[tuple[str, Callable[[], _Run]]] = [("cp", partial(_copy, files, place / "copy"))]
        steps += [(variant.name, partial(todo.run, variant)) for variant in chosen]
        runs = _rounds(steps, [*files, *_files(read)], settings.rounds, say)
        return _report(sum(path.stat().st_size for path in files), runs, settings)
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _split_of(settings: ConversionSettings) -> list[str]:
    """The options of another split: unless one is said, the experts whole where they are cut, and else
    cut.
    """
    tp = settings.to_tp or settings.tp
    return ["--tp", str(tp), "--ep", str(settings.to_ep or (tp if settings.ep == 1 else 1))]


def _rounds(
    steps: Sequence[tuple[str, Callable[[], _Run]]],
    files: Sequence[Path],
    rounds: int,
    say: Callable[[str], None],
) -> dict[str, list[_Run]]:
    """Run all of them in turn, each from the same state: `files` out of the cache, no output there."""
    in_memory = lies_in_memory(files[0].stat().st_dev)
    if in_memory:
        say("this is a file system in memory: nothing is cold here")
    runs: dict[str, list[_Run]] = {name: [] for name, _ in steps}
    for number in range(rounds):
        # no variant always comes after the same other one, whose last writes a shared disk may still be at
        order = [*steps[number % len(steps) :], *steps[: number % len(steps)]]
        for name, run in order if number % 2 == 0 else reversed(order):
            if not in_memory:
                make_cold(files)
            runs[name].append(run())
            say(f"round {number + 1} of {rounds}: {name} {runs[name][-1].seconds:.2f} s")
    return runs


@dataclass(frozen=True)
class _Todo:
    """What is measured, of which folder."""

    verb: Verb
    read: Path
    out: Path
    options: Sequence[str]

    def run(self, variant: Variant) -> _Run:
        """Do it in a process of its own; its own clock (without interpreter start-up), its peak anonymous
        memory, its stages.
        """
        shutil.rmtree(self.out, ignore_errors=True)
        line = [str(self.read), str(self.out), *self.options, *variant.arguments]
        ran = run_command(self.verb.name, line, self.verb.kind)
        shutil.rmtree(self.out)
        os.sync()
        return _Run(ran.document.seconds, ran.wall, ran.peak_anonymous, ran.document.stages)


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
