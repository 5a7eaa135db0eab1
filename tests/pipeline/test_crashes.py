"""Conversions, of a checkpoint and of a converted folder, that are killed, interrupted or refused by the disk
at any place: the same command continues, and the result is the same bytes.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

import trees
from checkpoints import Checkpoint
from forks import EVERY, Done, Forks
from marlin_convert import convert, reshard, verify

#: where runs are broken: (call, how far into all calls of that name)
KILLS = [
    ("mkdir", 0.0),
    ("mkdir", 0.99),
    ("replace", 0.0),
    ("posix_fallocate", 0.3),
    ("posix_fallocate", 0.99),
    ("preadv", 0.5),
    ("pwrite", 0.0),
    ("pwrite", 0.4),
    ("pwrite", 0.99),
    ("fsync", 0.0),
    ("fsync", 0.2),
    ("fsync", 0.6),
    ("fsync", 0.99),
    ("replace", 0.3),
    ("replace", 0.6),
    ("replace", 0.9),
    ("replace", 0.999),
    ("unlink", 0.0),
    ("rmdir", 0.99),
]
INTERRUPTS = [
    ("preadv", 0.0),
    ("pwrite", 0.5),
    ("fsync", 0.3),
    ("replace", 0.55),
    ("fsync", 0.7),
    ("fsync", 0.97),
    ("replace", 0.9),
]
REFUSALS = [
    ("posix_fallocate", 0.0),
    ("posix_fallocate", 0.7),
    ("pwrite", 0.5),
    ("fsync", 0.1),
    ("fsync", 0.5),
    ("fsync", 0.9),
    ("replace", 0.9),
]
COMMAND = [sys.executable, "-m", "marlin_convert"]
#: said at once
STOPPING = "stopping: finishing what is being written"


def places(of: list[tuple[str, float]], *, quick: list[tuple[str, float]]) -> list[object]:
    """All of them; those that are not `quick` are left out of the fast lane."""
    return [pytest.param(*place, marks=() if place in quick else pytest.mark.slow) for place in of]


@dataclass(frozen=True)
class Trial:
    """A conversion of `source` to `out`, by `convert` or `reshard`, that is broken at a chosen call; `counts`
    says how often each is made in all, and `undisturbed` what the conversion must come to.
    """

    forks: Forks
    verb: str
    source: Path
    out: Path
    counts: dict[str, int]
    undisturbed: dict[str, bytes]

    def run(self, *options: object, fault: dict[str, Any] | None = None, threads: int = 2) -> Done:
        """Convert, with a fault if one is wanted."""
        return self.forks.run(*self.line, "--threads", threads, *options, fault=fault)

    @property
    def line(self) -> list[str]:
        """The command line."""
        return [self.verb, str(self.source), str(self.out), "--tp", "2"]

    def broken(self, call: str, share: float, action: str, *options: object) -> Done:
        """Convert, broken so far into all calls of a name."""
        number = min(int(self.counts[call] * share), self.counts[call] - 1)
        return self.run(*options, fault={"call": call, "number": number, "action": action})

    def partials(self) -> list[Path]:
        """Files that are half-written, or would be taken for that."""
        return list(self.out.rglob("*.partial"))

    def assert_as_undisturbed(self) -> None:
        """The same bytes."""
        assert trees.tree(self.out) == self.undisturbed

    def assert_continues(self, *options: object) -> None:
        """The same command, undisturbed now: what was there is not made again, and the bytes are the same."""
        there = {path.stem for path in (self.out / ".work" / "units").glob("*.json")}
        over = (self.out / "manifest.json").exists()
        inodes = {p: p.stat().st_ino for unit in there for p in self.out.glob(f"*/{unit}.safetensors")}
        done = self.run("--json", *options)
        assert (done.code, done.stderr) == (0, "")
        made = json.loads(done.stdout)
        expected = (0, 5) if over else (5 - len(there), len(there))
        assert (made["units_made"], made["units_found"]) == expected
        self.assert_as_undisturbed()
        assert inodes == {path: path.stat().st_ino for path in inodes}
        assert verify(self.out, threads=2).ok


@pytest.fixture(scope="module")
def undisturbed(tiny_tp2: Path) -> dict[str, bytes]:
    """What it must come to."""
    return trees.tree(tiny_tp2)


@pytest.fixture(scope="module", params=["convert", pytest.param("reshard", marks=pytest.mark.slow)])
def whole(
    request: pytest.FixtureRequest,
    forks: Forks,
    tiny: Checkpoint,
    undisturbed: dict[str, bytes],
    tmp_path_factory: pytest.TempPathFactory,
) -> Trial:
    """One that nothing breaks, of a checkpoint, and of a folder of another split."""
    place, source = tmp_path_factory.mktemp("whole"), tiny.folder
    if request.param == "reshard":
        source = place / "converted"
        convert(tiny.folder, source, tp=4, ep=2, attn_tp=1)
    trial = Trial(forks, request.param, source, place / "out", {}, undisturbed)
    done = trial.run()
    assert (done.code, done.stderr) == (0, "")
    assert min(count for call, count in done.counts.items() if call != "pread") > 0
    return replace(trial, counts=done.counts)


@pytest.fixture
def counts(whole: Trial) -> dict[str, int]:
    """How often each call is made in all."""
    return whole.counts


@pytest.fixture
def trial(whole: Trial, tmp_path: Path) -> Trial:
    return replace(whole, out=tmp_path / "out")


@pytest.mark.parametrize(("call", "share"), places(KILLS, quick=KILLS[::4]))
def test_killed(trial: Trial, call: str, share: float) -> None:
    assert trial.broken(call, share, "SIGKILL").code == -signal.SIGKILL
    trial.assert_continues()


@pytest.mark.slow
def test_killed_again_and_again(trial: Trial) -> None:
    """Each time a little further, until it is done; what comes after the units cannot be cut in pieces, so
    the last run needs the most.
    """
    runs = 0
    while True:
        fault = {"call": "fsync", "number": trial.counts["fsync"] // 6 * (runs + 1), "action": "SIGKILL"}
        done = trial.run(fault=fault, threads=1)
        runs += 1
        if done.code == 0:
            break
        assert done.code == -signal.SIGKILL
        assert runs < 12
    assert runs > 3
    trial.assert_as_undisturbed()


def test_killed_while_overwriting(trial: Trial, copied: Path) -> None:
    """Half of the old is gone: it is no longer taken for a finished conversion."""
    assert copied == trial.out
    fault = {"call": "unlink", "number": 5, "action": "SIGKILL"}
    done = trial.run("--layers", 1, "--overwrite", "--yes", fault=fault)
    assert done.code == -signal.SIGKILL
    assert not (copied / "manifest.json").exists()
    done = trial.forks.run("verify", copied)
    assert done.code == 1
    assert "run the same convert command again" in done.stderr
    done = trial.run("--overwrite", "--yes")
    assert done.code == 0
    trial.assert_as_undisturbed()


@pytest.mark.parametrize(("call", "share"), places(INTERRUPTS, quick=INTERRUPTS[::3]))
@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_interrupted(trial: Trial, call: str, share: float, name: str, code: int) -> None:
    done = trial.broken(call, share, name)
    assert done.code == code
    assert done.stderr.splitlines() == [STOPPING, "interrupted; run the same command again to continue"]
    assert done.stdout == ""
    assert trial.partials() == []
    trial.assert_continues()


def test_interrupted_with_overwrite_the_same_command_continues(trial: Trial) -> None:
    """What it has made itself is not what it was to replace."""
    done = trial.broken("replace", 0.5, "SIGINT", "--overwrite", "--yes")
    assert done.code == 130
    assert done.stderr.endswith("interrupted; run the same command again to continue\n")
    assert list((trial.out / ".work" / "units").glob("*.json"))
    trial.assert_continues("--overwrite", "--yes")


@pytest.mark.parametrize(("first", "second"), [("SIGINT", "SIGINT"), ("SIGTERM", "SIGINT")])
@pytest.mark.parametrize("call", ["unlink", "pwrite", "fsync"])
def test_interrupted_again_while_it_cleans_up(trial: Trial, call: str, first: str, second: str) -> None:
    """The second signal does not break into what removes the half-made files. Of two that are pending
    together either may be seen first.
    """
    number = trial.counts["pwrite"] // 2
    then = {"call": call, "number": EVERY, "action": second}
    done = trial.run(fault={"call": "pwrite", "number": number, "action": first, "then": then})
    assert done.code in {{"SIGINT": 130, "SIGTERM": 143}[name] for name in (first, second)}
    assert done.stdout == ""
    assert done.stderr.splitlines() == [STOPPING, "interrupted; run the same command again to continue"]
    assert trial.partials() == []
    trial.assert_continues()


def test_interrupted_a_third_time(trial: Trial) -> None:
    """It ends at once, as if it had been killed, with the code of the first signal."""
    third = {"call": "unlink", "number": EVERY, "action": "SIGTERM"}
    second = {"call": "unlink", "number": EVERY, "action": "SIGINT", "then": third}
    done = trial.run(fault={"call": "pwrite", "number": 20, "action": "SIGINT", "then": second})
    assert (done.code, done.stdout, done.stderr) == (130, "", f"{STOPPING}\n")
    trial.assert_continues()


def _handles(process: int, number: int) -> bool:
    """Whether a process has a handler for a signal."""
    status = Path(f"/proc/{process}/status").read_text()
    (caught,) = [line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")]
    return bool(int(caught, 16) >> (number - 1) & 1)


@pytest.mark.slow
@pytest.mark.parametrize("pause", [0.0, 0.001, 0.01, 0.1])
@pytest.mark.parametrize("verify_it", [False, True], ids=["made", "verified"])
def test_real_process_interrupted_twice(trial: Trial, tiny_tp2: Path, pause: float, verify_it: bool) -> None:
    """At whatever place it is, from outside."""
    line = ["verify", str(tiny_tp2)] if verify_it else trial.line
    for wait in (0.0, 0.1, 0.3, 0.6, 1.2):
        process = subprocess.Popen([*COMMAND, *line], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        while not _handles(process.pid, signal.SIGTERM):
            time.sleep(0.002)
        time.sleep(wait)
        for number in (signal.SIGINT, signal.SIGTERM):
            process.send_signal(number)
            time.sleep(pause)
        _, stderr = process.communicate(timeout=120)
        assert b"Traceback" not in stderr
        assert process.returncode in (0, 130, 143)
        assert trial.partials() == []
    if not verify_it:
        trial.assert_continues()


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_interrupted_where_python_drops_it(name: str, code: int) -> None:
    """An exception out of a destructor is printed and forgotten, and the run would go on."""
    program = f"""
import os, signal
from marlin_convert.cli.interrupts import Interrupts

class Object:
    def __del__(self):
        os.kill(os.getpid(), signal.{name})
        for _ in range(1000):
            pass

signal.signal(signal.SIGINT, signal.default_int_handler)
Interrupts().install()
Object()
print("it goes on")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (code, "", "")


@pytest.mark.parametrize("number", ["ENOSPC", "EIO", "EDQUOT"])
@pytest.mark.parametrize(("call", "share"), places(REFUSALS, quick=REFUSALS[1::3]))
def test_refused_by_the_disk(trial: Trial, call: str, share: float, number: str) -> None:
    done = trial.broken(call, share, number)
    assert done.code == 4
    assert done.stderr.startswith("error: ")
    assert {
        "ENOSPC": "No space left on device; free some space",
        "EIO": "check the disk",
        "EDQUOT": "free some of your quota",
    }[number] in done.stderr
    assert "then run the same command again" in done.stderr
    assert not (trial.out / "manifest.json").exists()
    assert trial.partials() == []
    trial.assert_continues()


@pytest.mark.parametrize("call", ["mkdir", "preadv"])
def test_other_calls_refused(trial: Trial, call: str) -> None:
    done = trial.broken(call, 0.5, "EIO", "--no-direct")
    assert done.code == 4
    assert done.stderr.startswith("error: ")
    assert "run the same command again" in done.stderr
    assert trial.partials() == []
    trial.assert_continues()


def needs(trial: Trial, call: str) -> None:
    """Skip where it is never called: only of a checkpoint's files a sample is read."""
    if not trial.counts[call]:
        pytest.skip(f"{trial.verb} makes no call of {call}")


def test_unreadable_once_directly(trial: Trial) -> None:
    """Direct reads that fail where ordinary ones do not are no error."""
    assert trial.broken("preadv", 0.5, "EINVAL").code == 0
    trial.assert_as_undisturbed()


@pytest.mark.parametrize("direct", ["--direct", "--no-direct"])
@pytest.mark.parametrize("call", ["pread", "preadv"])
def test_reads_that_always_bring_less_than_asked_for(
    trial: Trial, tiny: Checkpoint, call: str, direct: str
) -> None:
    """File systems of the network and of user space may: the source's id and every byte are the same."""
    needs(trial, call)
    fault = {"call": call, "number": EVERY, "action": "short"}
    done = trial.run(direct, fault=fault)
    assert (done.code, done.stderr) == (0, "")
    assert done.counts[call] > 2 * trial.counts[call]
    trial.assert_as_undisturbed()
    done = trial.forks.run("verify", trial.out, "--source", tiny.folder, fault=fault)
    assert (done.code, done.stderr) == (0, "")


@pytest.mark.parametrize(("call", "share"), [("pread", 0.0), ("pread", 0.1), ("pread", 0.6), ("preadv", 0.5)])
def test_one_read_that_brings_less_than_asked_for(trial: Trial, call: str, share: float) -> None:
    """The length of a header, the header, the start of the data or a page of the sample."""
    needs(trial, call)
    done = trial.broken(call, share, "short")
    assert (done.code, done.stderr) == (0, "")
    trial.assert_as_undisturbed()


# Two at a time.


def test_second_process_is_refused(trial: Trial, tmp_path: Path) -> None:
    result = tmp_path / "result"
    second = [*COMMAND, *trial.line]
    half = trial.counts["fsync"] // 2
    fault = {"call": "fsync", "number": half, "action": "run", "command": second, "result": str(result)}
    done = trial.run(fault=fault, threads=1)
    assert done.code == 0
    code, stdout, stderr = json.loads(result.read_text())
    assert (code, stdout) == (4, "")
    assert stderr == f"error: {trial.out} is being written by another process; wait for it, or stop it\n"
    trial.assert_as_undisturbed()


@pytest.mark.parametrize("overwrite", [(), ("--overwrite", "--yes")])
def test_locked_folder_is_left_alone(trial: Trial, copied: Path, overwrite: tuple[str, ...]) -> None:
    before = trees.tree(copied, without=())
    descriptor = os.open(copied, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    done = trial.run(*overwrite)
    os.close(descriptor)
    assert done.code == 4
    assert "is being written by another process" in done.stderr
    assert trees.tree(copied, without=()) == before


# Real signals, real system errors.


@pytest.mark.slow
def test_real_process_interrupted(trial: Trial) -> None:
    """The whole command, from outside, at whatever place it is when its first file appears."""
    process = subprocess.Popen(
        [*COMMAND, *trial.line, "--threads", "1"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    while process.poll() is None and not any(trial.out.glob("rank-*/*.partial")):
        time.sleep(0.002)
    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 143
    assert stderr.decode().endswith("interrupted; run the same command again to continue\n")
    assert trial.partials() == []
    trial.assert_continues()


def strace(*options: str) -> list[str]:
    """A prefix that injects failures into system calls."""
    program = shutil.which("strace")
    if program is None:
        pytest.skip("strace is not installed")
    prefix = [program, "-f", "-o", os.devnull, *options]
    probing = [program, "-f", "-o", os.devnull, "-e", "inject=fallocate:error=ENOSPC", "true"]
    probe = subprocess.run(probing, capture_output=True, text=True, check=False)
    if probe.returncode != 0:
        pytest.skip(f"strace does not work here: {probe.stderr.strip()}")
    return prefix


@pytest.mark.slow
@pytest.mark.parametrize(
    ("injected", "said"),
    [
        ("fallocate:error=ENOSPC:when=4", "No space left on device; free some space"),
        ("pwrite64:error=ENOSPC:when=30", "No space left on device; free some space"),
        ("fsync:error=EIO:when=12", "Input/output error; check the disk"),
    ],
)
def test_system_refuses(trial: Trial, injected: str, said: str) -> None:
    prefix = strace("-e", f"trace={injected.partition(':')[0]}", "-e", f"inject={injected}")
    line = [*prefix, *COMMAND, *trial.line]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == 4
    assert said in done.stderr
    assert not (trial.out / "manifest.json").exists()
    assert trial.partials() == []
    trial.assert_continues()


def test_small_disk_is_refused_before_anything_is_written(trial: Trial, small_disk: Path) -> None:
    done = replace(trial, out=small_disk / "out").run()
    assert done.code == 4
    assert re.search(
        r": [\d.]+ MB, [\d.]+ [kM]B of documents among them, are still to be written but only [\d.]+ MB are"
        r" free: [\d.]+ MB too little",
        done.stderr,
    )
    assert list((small_disk / "out").rglob("*.safetensors*")) == []


def test_disk_that_fills_up(trial: Trial, small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody else takes the space after the check; later there is some again."""
    from marlin_convert.errors import MachineError
    from marlin_convert.pipeline import conversion as pipeline

    trial = replace(trial, out=small_disk / "out")
    monkeypatch.setattr(pipeline, "refuse_full_disk", lambda *arguments: None)
    with pytest.raises(
        MachineError,
        match=r"No space left on device; free some space, then run the same command again",
    ):
        (convert if trial.verb == "convert" else reshard)(trial.source, trial.out, tp=2, threads=1)
    assert trial.partials() == []
    subprocess.run(["mount", "-o", "remount,size=100m", str(small_disk)], check=True)
    trial.assert_continues()
