"""Plants one realistic mistake at a time in a copy of the package and sees that the tests notice.

python tests/mutants/run.py           all of mutants.toml; writes RESULTS.md
python tests/mutants/run.py WORD      those with WORD in their name or file; writes nothing
python tests/mutants/run.py --check   only whether each one's text still stands once in its file

Each mutant gets a copy of the package of its own, which is what the tests then import. They run in a fork of
this process, so that what all of them need is imported only once, and without compiling, which the same
source does as well. A mutant is dead when a test that the untouched package passes fails: an error while
importing or collecting does not count. Exit code 1 if any survived, was not run, or no longer fits its file.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PACKAGE = ROOT / "convert" / "marlin_convert"
RESULTS = HERE / "RESULTS.md"


@dataclass(frozen=True)
class Mutant:
    """A row of mutants.toml; without `file` it is the untouched package."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def problem(self) -> str:
        """Why it cannot be planted, empty if it can."""
        path = PACKAGE / self.file
        if not path.is_file():
            return "there is no such file"
        if self.old == self.new:
            return "it changes nothing"
        count = path.read_text().count(self.old)
        return "" if count == 1 else f"its text stands there {count} times"


@dataclass(frozen=True)
class Outcome:
    """Of one run: pytest's exit code, the first test that failed, and what was imported."""

    mutant: Mutant
    code: int
    killer: str
    imported: str
    output: str

    @property
    def dead(self) -> bool:
        """Whether a test's body failed."""
        return self.code == 1 and bool(self.killer)


class _Recorder:
    """Remembers the first test that failed in its body, where an error elsewhere proves nothing."""

    killer = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Called by pytest."""
        if report.failed and report.when == "call" and not self.killer:
            self.killer = report.nodeid


def read_table() -> list[Mutant]:
    """mutants.toml."""
    document = tomllib.loads((HERE / "mutants.toml").read_text())
    groups = document["groups"]
    rows = [
        Mutant(
            **row | {"tests": tuple(groups[row["tests"]] if isinstance(row["tests"], str) else row["tests"])}
        )
        for row in document["mutant"]
    ]
    names = [row.name for row in rows]
    if repeated := {name for name in names if names.count(name) > 1}:
        raise SystemExit(f"two mutants of one name: {', '.join(sorted(repeated))}")
    return rows


def run_all(mutants: Sequence[Mutant], folder: Path, workers: int) -> Iterator[Outcome]:
    """The untouched package with all tests that any mutant names, then each mutant; in no order."""
    everything = tuple(dict.fromkeys(test for mutant in mutants for test in mutant.tests))
    waiting = [Mutant("the untouched package", "", "", "", everything), *mutants]
    running: dict[int, tuple[Mutant, Path]] = {}
    while waiting or running:
        while waiting and len(running) < workers:
            mutant = waiting.pop(0)
            own = _planted(mutant, folder / str(len(waiting)))
            sys.stdout.flush()
            process = os.fork()
            if not process:
                _child(own, mutant.tests)
            running[process] = mutant, own
        process, status = os.wait()
        mutant, own = running.pop(process)
        report = own / "report.json"
        killer, imported = json.loads(report.read_text()) if report.exists() else ("", "")
        output = (own / "output.txt").read_text()
        yield Outcome(mutant, os.waitstatus_to_exitcode(status), killer, imported, output)
        shutil.rmtree(own)


def _planted(mutant: Mutant, folder: Path) -> Path:
    """A copy of the package in `folder`, with the mistake."""
    copy = folder / "marlin_convert"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    if mutant.file:
        path = copy / mutant.file
        path.write_text(path.read_text().replace(mutant.old, mutant.new))
    return folder


def _child(own: Path, tests: tuple[str, ...]) -> None:
    """Run tests on the copy; never returns."""
    code = 99
    try:
        output = os.open(own / "output.txt", os.O_CREAT | os.O_WRONLY)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.chdir(own)
        os.environ["NUMBA_CACHE_DIR"] = str(own / "cache")
        sys.path.insert(0, str(own))
        recorder = _Recorder()
        options = ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT), "-x", "-q", "--tb=short"]
        options += [
            f"--basetemp={own / 'tmp'}",
            *(f"-pno:{name}" for name in ("cacheprovider", "xdist", "warnings")),
        ]
        code = pytest.main([*options, *(str(ROOT / "tests" / test) for test in tests)], [recorder])
        sys.stdout.flush()
        imported = str(importlib.import_module("marlin_convert").__file__)
        (own / "report.json").write_text(json.dumps([recorder.killer, imported]))
    finally:
        os._exit(int(code))


def _write_results(outcomes: list[Outcome], seconds: float) -> None:
    killers = {
        outcome.mutant: outcome.killer.removeprefix("tests/").partition("[")[0]
        for outcome in outcomes
        if outcome.dead
    }
    lines = [
        "# What the mutants came to",
        "",
        f"`make mutants`, {date.today()}: {len(killers)} mutants planted one at a time, all noticed"
        f" ({seconds / 60:.0f} minutes on {os.cpu_count()} cores). The test is the first that failed.",
        "",
        "| mistake | in | noticed by |",
        "|---|---|---|",
        *(f"| {mutant.name} | `{mutant.file}` | `{killers[mutant]}` |" for mutant in read_table()),
    ]
    RESULTS.write_text("\n".join(lines) + "\n")


def _plant(mutants: Sequence[Mutant]) -> list[Outcome] | None:
    """Run them and print how each ended; None if any ended otherwise than it should."""
    for needed in ("numpy", "numba", "hypothesis", "safetensors", "xxhash", "tqdm"):
        importlib.import_module(needed)
    outcomes, failed = [], False
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary).resolve()
        for outcome in run_all(mutants, folder, os.cpu_count() or 1):
            ours = bool(outcome.imported) and Path(outcome.imported).is_relative_to(folder)
            good = ours and (outcome.dead if outcome.mutant.file else outcome.code == 0)
            failed |= not good
            outcomes.append(outcome)
            print(
                f"{'ok  ' if good else 'FAIL'} {outcome.mutant.name}: {outcome.killer or outcome.code}",
                flush=True,
            )
            if not good:
                print(f"imported {outcome.imported or 'nothing'}\n{outcome.output}")
    return None if failed else outcomes


def main(arguments: Sequence[str]) -> int:
    """See above."""
    words = [argument for argument in arguments if argument != "--check"]
    wanted = [m for m in read_table() if not words or any(word in f"{m.name} {m.file}" for word in words)]
    stale = [mutant for mutant in wanted if mutant.problem()]
    for mutant in stale:
        print(f"STALE {mutant.name} ({mutant.file}): {mutant.problem()}: {mutant.old!r}")
    print(f"{len(wanted) - len(stale)} of {len(wanted)} mutants can be planted")
    if "--check" in arguments:
        return 1 if stale else 0
    begin = time.monotonic()
    outcomes = _plant([mutant for mutant in wanted if mutant not in stale])
    if outcomes is None or stale:
        return 1
    if not words:
        _write_results(outcomes, time.monotonic() - begin)
        print(f"{RESULTS} is written")
    return 0


if __name__ == "__main__":
    os.environ["NUMBA_DISABLE_JIT"] = "1"
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    sys.exit(main(sys.argv[1:]))
