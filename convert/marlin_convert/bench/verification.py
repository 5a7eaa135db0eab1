"""`bench verify`: checking a converted folder against plain parallel reads of the same files, both from the
disk, in turn.
"""

from __future__ import annotations

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
from marlin_convert.storage.buffers import aligned_buffer
from marlin_convert.storage.files import lies_in_memory

#: threads of the plain reads, at least: with fewer a fast disk is not busy
READERS = 4


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
    slots = aligned_buffer(max(usable_cores(), READERS) * CHUNK)
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
                size, seconds = read_whole(files, slots, True)
                if size != (wanted := sum(path.stat().st_size for path in files)):
                    raise MachineError(f"reading the shards brought {size} bytes of {wanted}; run it again")
            else:
                ran = run_command("verify", arguments, VerifyReport)
                size, seconds = ran.document.bytes, ran.document.seconds["total"]
                verify.walls.append(ran.wall)
                verify.peaks.append(ran.peak_anonymous)
            runs.size = size
            runs.seconds.append(seconds)
            rate = size / seconds / 1e9
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
        machine=this_machine(),
        ways=(plain.way(), verify.way()),
        of_plain=statistics.median(ratios),
        of_plain_all=tuple(ratios),
    )


class _Runs:
    """One way, and what its rounds took; plain reads have no `walls` and no `peaks`."""

    def __init__(self, name: str) -> None:
        self.name, self.size = name, 0
        self.seconds: list[float] = []
        self.resident: list[float] = []
        self.walls: list[float] = []
        self.peaks: list[int] = []

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
