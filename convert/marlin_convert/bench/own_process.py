"""A command of this program in a process of its own, to be measured."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from marlin_convert.bench.peak_memory import PeakMemory
from marlin_convert.documents.codec import read
from marlin_convert.errors import MachineError

T = TypeVar("T")


@dataclass(frozen=True)
class Measured(Generic[T]):
    """What a command printed, its seconds with the start of the interpreter, and its peak of anonymous memory
    in bytes, with the processes below it.
    """

    document: T
    wall: float
    peak_anonymous: int


def run_command(verb: str, arguments: Sequence[str], kind: type[T]) -> Measured[T]:
    """Run `marlin-convert VERB --json`, which prints a `kind`. Raises MachineError where it fails."""
    command = [sys.executable, "-m", "marlin_convert", verb, "--json", *arguments]
    begin = time.perf_counter()
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.PIPE)
        peak = PeakMemory(process.pid)
        _, errors = process.communicate()
        wall = time.perf_counter() - begin
        memory = peak.stop()
        if process.returncode:
            raise MachineError(
                f"{verb} failed with exit code {process.returncode}:"
                f" {errors.decode(errors='replace').strip()[-500:] or 'it says why where it is run alone'}"
            )
        output.seek(0)
        return Measured(read(output.read(), kind, f"{verb} --json printed something else"), wall, memory)
