"""`bench verify`: checking a converted folder against plain parallel reads of the same files, both from the
disk, in turn.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

from marlin_convert.bench.cold import make_cold, resident
from marlin_convert.bench.own_process import run_command
from marlin_convert.bench.plain_reads import CHUNK, read_whole
from marlin_convert.bench.stats import summarize, this_machine
from marlin_convert.checks.part import Part
from marlin_convert.documents.bench import VerifyBench, VerifyWay
from marlin_convert.documents.checks import VerifyReport
from marlin_convert.documents.manifest import read_manifest
from marlin_convert.errors import MachineError
from marlin_convert.limits import usable_cores
from marlin_convert.storage.buffers import Bytes, aligned_buffer
from marlin_convert.storage.files import lies_in_memory, open_direct

#: threads of the plain reads, at least and at most: with fewer a fast disk is not busy
READERS = (4, 16)


def bench_verification(
    out: Path,
    *,
    layers: Sequence[int] | None,
    threads: int | None,
    rounds: int,
    say: Callable[[str], None],
) -> VerifyBench:
    """Read the shards of `layers` (None: all) and verify them, `rounds` times, each time with the files out
    of the page cache. `threads` are verify's. Returns the report.

    Raises MachineError where files stay in the page cache, cannot be read whole or are not sound; UsageError
    and OutputError as `verify` does.
    """
    files = [out / shard.path for shard in Part.of(read_manifest(out), layers, None).shards]
    in_memory = lies_in_memory(out.stat().st_dev)
    if in_memory:
        say("this is a file system in memory: nothing is cold here")
    arguments = [str(out)]
    arguments += ["--layers", ",".join(map(str, layers))] if layers else []
    arguments += ["--threads", str(threads)] if threads else []
    slots = aligned_buffer(min(max(usable_cores(), READERS[0]), READERS[1]) * CHUNK)
    slots[:] = 1  # memory that is there: the first use of a page takes time
    say("one run to compile and warm up")
    run_command("verify", arguments, VerifyReport)
    plain, verify = _Runs("plain reads"), _Runs("verify")
    for number in range(rounds):
        for runs in (plain, verify) if number % 2 == 0 else (verify, plain):
            if not in_memory:
                make_cold(files)
            runs.resident.append(resident(files))
            if runs is plain:
                runs.add(*_read(files, slots))
            else:
                ran = run_command("verify", arguments, VerifyReport)
                runs.add(ran.document.bytes, ran.document.seconds["total"])
                runs.walls.append(ran.wall)
                runs.peaks.append(ran.peak_anonymous)
            seconds, rate = runs.seconds[-1], runs.size / runs.seconds[-1] / 1e9
            say(f"round {number + 1} of {rounds}: {runs.name} {seconds:.2f} s, {rate:.2f} GB/s")
    ratios = [
        (verify.size / theirs) / (plain.size / ours)
        for ours, theirs in zip(plain.seconds, verify.seconds, strict=True)
    ]
    return VerifyBench(
        files=len(files),
        rounds=rounds,
        readers=slots.size // CHUNK,
        in_memory=in_memory,
        direct=_is_direct(files[0]),
        machine=this_machine(),
        ways=(plain.way(), verify.way()),
        of_plain=statistics.median(ratios),
        of_plain_all=tuple(ratios),
    )


def _read(files: Sequence[Path], slots: Bytes) -> tuple[int, float]:
    """Bytes and seconds of plain reads."""
    size, seconds = read_whole(files, slots, True)
    if size != (wanted := sum(path.stat().st_size for path in files)):
        raise MachineError(f"reading the shards brought {size} bytes of {wanted}; run it again")
    return size, seconds


def _is_direct(file: Path) -> bool:
    descriptor = open_direct(file, os.O_RDONLY)
    if descriptor is not None:
        os.close(descriptor)
    return descriptor is not None


class _Runs:
    """One way, and what its rounds took; plain reads have no `walls` and no `peaks`."""

    def __init__(self, name: str) -> None:
        self.name, self.size = name, 0
        self.seconds: list[float] = []
        self.resident: list[float] = []
        self.walls: list[float] = []
        self.peaks: list[int] = []

    def add(self, size: int, seconds: float) -> None:
        """A round read so many bytes in so many seconds."""
        self.size = size
        self.seconds.append(seconds)

    def way(self) -> VerifyWay:
        """For the report."""
        found = summarize(self.seconds)
        return VerifyWay(
            name=self.name,
            median=found.median,
            least=found.least,
            most=found.most,
            seconds=tuple(self.seconds),
            gb_per_s=self.size / found.median / 1e9,
            bytes=self.size,
            resident=max(self.resident),
            peak_anonymous=max(self.peaks, default=None),
            wall_median=statistics.median(self.walls) if self.walls else None,
        )
