"""Conversions that are killed, interrupted or refused by the disk at any place: the same command continues,
and the result is the same bytes.
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
from collections.abc import Iterator
from pathlib import Path

import pytest

import trees
from checkpoints import Checkpoint
from forks import Forks
from marlin_convert.checks.verify import verify

#: (call, how far into all calls of that name)
PLACES = [
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
COMMAND = [sys.executable, "-m", "marlin_convert"]


@pytest.fixture(scope="module")
def undisturbed(tiny_tp2: Path) -> dict[str, bytes]:
    """What it must come to."""
    return trees.tree(tiny_tp2)


@pytest.fixture(scope="module")
def counts(forks: Forks, tiny: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    """How often each call is made in all."""
    done = forks.run(
        "convert", tiny.folder, tmp_path_factory.mktemp("counts") / "out", "--tp", 2, "--threads", 2
    )
    assert (done.code, done.stderr) == (0, "")
    assert min(done.counts.values()) > 0
    return done.counts


def partials(out: Path) -> list[Path]:
    """Files that are half-written, or would be taken for that."""
    return list(out.rglob("*.partial"))


def finished_units(out: Path) -> set[str]:
    """Names of the units that have a record."""
    return {path.stem for path in (out / ".work" / "units").glob("*.json")}


def assert_continues(forks: Forks, tiny: Checkpoint, out: Path, undisturbed: dict[str, bytes]) -> None:
    """The same command, undisturbed now: what was there is not made again, and the bytes are the same."""
    there = finished_units(out)
    over = (out / "manifest.json").exists()
    inodes = {path: path.stat().st_ino for unit in there for path in out.glob(f"*/{unit}.safetensors")}
    done = forks.run("convert", tiny.folder, out, "--tp", 2, "--threads", 2, "--json")
    assert (done.code, done.stderr) == (0, "")
    made = json.loads(done.stdout)
    assert (made["units_made"], made["units_found"]) == ((0, 5) if over else (5 - len(there), len(there)))
    assert trees.tree(out) == undisturbed
    assert inodes == {path: path.stat().st_ino for path in inodes}
    assert verify(out, threads=2).ok


@pytest.mark.parametrize(("call", "share"), PLACES)
def test_killed(
    forks: Forks,
    counts: dict[str, int],
    tiny: Checkpoint,
    tmp_path: Path,
    undisturbed: dict[str, bytes],
    call: str,
    share: float,
) -> None:
    fault = {"call": call, "number": min(int(counts[call] * share), counts[call] - 1), "action": "SIGKILL"}
    out = tmp_path / "out"
    done = forks.run("convert", tiny.folder, out, "--tp", 2, "--threads", 2, fault=fault)
    assert done.code == -signal.SIGKILL
    assert_continues(forks, tiny, out, undisturbed)


def test_killed_again_and_again(
    forks: Forks, counts: dict[str, int], tiny: Checkpoint, tmp_path: Path, undisturbed: dict[str, bytes]
) -> None:
    """Each time a little further, until it is done; what comes after the units cannot be cut in pieces, so
    the last run needs the most.
    """
    out, runs = tmp_path / "out", 0
    while True:
        fault = {"call": "fsync", "number": counts["fsync"] // 6 * (runs + 1), "action": "SIGKILL"}
        done = forks.run("convert", tiny.folder, out, "--tp", 2, "--threads", 1, fault=fault)
        runs += 1
        if done.code == 0:
            break
        assert done.code == -signal.SIGKILL
        assert runs < 12
    assert runs > 3
    assert trees.tree(out) == undisturbed


def test_killed_while_overwriting(
    forks: Forks, tiny: Checkpoint, copied: Path, undisturbed: dict[str, bytes]
) -> None:
    """Half of the old is gone: it is no longer taken for a finished conversion."""
    fault = {"call": "unlink", "number": 5, "action": "SIGKILL"}
    done = forks.run("convert", tiny.folder, copied, "--tp", 2, "--overwrite", fault=fault)
    assert done.code == -signal.SIGKILL
    assert not (copied / "manifest.json").exists()
    done = forks.run("verify", copied)
    assert done.code == 1
    assert "run the same convert command again" in done.stderr
    done = forks.run("convert", tiny.folder, copied, "--tp", 2, "--overwrite")
    assert done.code == 0
    assert trees.tree(copied) == undisturbed


@pytest.mark.parametrize(
    ("call", "share"),
    [
        ("preadv", 0.0),
        ("pwrite", 0.5),
        ("fsync", 0.3),
        ("replace", 0.55),
        ("fsync", 0.7),
        ("fsync", 0.97),
        ("replace", 0.9),
    ],
)
@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_interrupted(
    forks: Forks,
    counts: dict[str, int],
    tiny: Checkpoint,
    tmp_path: Path,
    undisturbed: dict[str, bytes],
    call: str,
    share: float,
    name: str,
    code: int,
) -> None:
    out = tmp_path / "out"
    fault = {"call": call, "number": int(counts[call] * share), "action": name}
    done = forks.run("convert", tiny.folder, out, "--tp", 2, "--threads", 2, fault=fault)
    assert done.code == code
    assert done.stderr.strip() == "interrupted; run the same command again to continue"
    assert done.stdout == ""
    assert partials(out) == []
    assert_continues(forks, tiny, out, undisturbed)


@pytest.mark.parametrize("number", ["ENOSPC", "EIO", "EDQUOT"])
@pytest.mark.parametrize(
    ("call", "share"),
    [
        ("posix_fallocate", 0.0),
        ("posix_fallocate", 0.7),
        ("pwrite", 0.5),
        ("fsync", 0.1),
        ("fsync", 0.5),
        ("fsync", 0.9),
        ("replace", 0.9),
    ],
)
def test_refused_by_the_disk(
    forks: Forks,
    counts: dict[str, int],
    tiny: Checkpoint,
    tmp_path: Path,
    undisturbed: dict[str, bytes],
    call: str,
    share: float,
    number: str,
) -> None:
    out = tmp_path / "out"
    fault = {"call": call, "number": int(counts[call] * share), "action": number}
    done = forks.run("convert", tiny.folder, out, "--tp", 2, "--threads", 2, fault=fault)
    assert done.code == 4
    assert done.stderr.startswith("error: ")
    assert {
        "ENOSPC": "No space left on device; free some space",
        "EIO": "check the disk",
        "EDQUOT": "free some of your quota",
    }[number] in done.stderr
    assert "run the same command again to continue" in done.stderr
    assert not (out / "manifest.json").exists()
    assert partials(out) == []
    assert_continues(forks, tiny, out, undisturbed)


@pytest.mark.parametrize("call", ["mkdir", "preadv"])
def test_other_calls_refused(
    forks: Forks,
    counts: dict[str, int],
    tiny: Checkpoint,
    tmp_path: Path,
    undisturbed: dict[str, bytes],
    call: str,
) -> None:
    out = tmp_path / "out"
    arguments = ("convert", tiny.folder, out, "--tp", 2, "--threads", 2, "--no-direct")
    done = forks.run(*arguments, fault={"call": call, "number": counts[call] // 2, "action": "EIO"})
    assert done.code == 4
    assert done.stderr.startswith("error: ")
    assert "run the same command again" in done.stderr
    assert partials(out) == []
    assert_continues(forks, tiny, out, undisturbed)


def test_unreadable_once_directly(
    forks: Forks, counts: dict[str, int], tiny: Checkpoint, tmp_path: Path, undisturbed: dict[str, bytes]
) -> None:
    """Direct reads that fail where ordinary ones do not are no error."""
    fault = {"call": "preadv", "number": counts["preadv"] // 2, "action": "EINVAL"}
    done = forks.run("convert", tiny.folder, tmp_path / "out", "--tp", 2, "--threads", 2, fault=fault)
    assert done.code == 0
    assert trees.tree(tmp_path / "out") == undisturbed


# Two at a time.


def test_second_process_is_refused(
    forks: Forks, counts: dict[str, int], tiny: Checkpoint, tmp_path: Path, undisturbed: dict[str, bytes]
) -> None:
    out, result = tmp_path / "out", tmp_path / "result"
    second = [*COMMAND, "convert", str(tiny.folder), str(out), "--tp", "2"]
    fault = {
        "call": "fsync",
        "number": counts["fsync"] // 2,
        "action": "run",
        "command": second,
        "result": str(result),
    }
    done = forks.run("convert", tiny.folder, out, "--tp", 2, "--threads", 1, fault=fault)
    assert done.code == 0
    code, stdout, stderr = json.loads(result.read_text())
    assert (code, stdout) == (4, "")
    assert stderr == f"error: {out} is being written by another process; wait for it, or stop it\n"
    assert trees.tree(out) == undisturbed


@pytest.mark.parametrize("overwrite", [(), ("--overwrite",)])
def test_locked_folder_is_left_alone(
    forks: Forks, tiny: Checkpoint, copied: Path, overwrite: tuple[str, ...]
) -> None:
    before = trees.tree(copied, without=())
    descriptor = os.open(copied, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    done = forks.run("convert", tiny.folder, copied, "--tp", 2, *overwrite)
    os.close(descriptor)
    assert done.code == 4
    assert "is being written by another process" in done.stderr
    assert trees.tree(copied, without=()) == before


# Real signals, real system errors.


def test_real_process_interrupted(
    tiny: Checkpoint, tmp_path: Path, forks: Forks, undisturbed: dict[str, bytes]
) -> None:
    """The whole command, from outside, at whatever place it is when its first file appears."""
    out = tmp_path / "out"
    command = [*COMMAND, "convert", str(tiny.folder), str(out), "--tp", "2", "--threads", "1"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    while process.poll() is None and not any(out.glob("rank-*/*.partial")):
        time.sleep(0.002)
    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 143
    assert stderr.decode().endswith("interrupted; run the same command again to continue\n")
    assert partials(out) == []
    assert_continues(forks, tiny, out, undisturbed)


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


@pytest.mark.parametrize(
    ("injected", "said"),
    [
        ("fallocate:error=ENOSPC:when=4", "No space left on device; free some space"),
        ("pwrite64:error=ENOSPC:when=30", "No space left on device; free some space"),
        ("fsync:error=EIO:when=12", "Input/output error; check the disk"),
    ],
)
def test_system_refuses(
    tiny: Checkpoint, tmp_path: Path, forks: Forks, undisturbed: dict[str, bytes], injected: str, said: str
) -> None:
    out = tmp_path / "out"
    prefix = strace("-e", f"trace={injected.partition(':')[0]}", "-e", f"inject={injected}")
    done = subprocess.run(
        [*prefix, *COMMAND, "convert", str(tiny.folder), str(out), "--tp", "2"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 4
    assert said in done.stderr
    assert not (out / "manifest.json").exists()
    assert partials(out) == []
    assert_continues(forks, tiny, out, undisturbed)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own with room for about half of the output."""
    place = tmp_path / "disk"
    place.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(place)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        pytest.skip(f"a file system cannot be mounted here: {done.stderr.strip()}")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_small_disk_is_refused_before_anything_is_written(
    forks: Forks, tiny: Checkpoint, small_disk: Path
) -> None:
    done = forks.run("convert", tiny.folder, small_disk / "out", "--tp", 2)
    assert done.code == 4
    assert re.search(r": \d+ MB are still to be written but only \d+ MB are free", done.stderr)
    assert list((small_disk / "out").rglob("*.safetensors*")) == []


def test_disk_that_fills_up(
    forks: Forks,
    tiny: Checkpoint,
    tmp_path: Path,
    small_disk: Path,
    undisturbed: dict[str, bytes],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Somebody else takes the space after the check; later there is some again."""
    from marlin_convert.errors import MachineError
    from marlin_convert.pipeline import convert as pipeline

    out = small_disk / "out"
    monkeypatch.setattr(pipeline, "refuse_full_disk", lambda *arguments: None)
    with pytest.raises(
        MachineError,
        match=r"No space left on device; free some space, then run the same command again to continue",
    ):
        pipeline.convert(str(tiny.folder), out, tp=2, threads=1)
    assert partials(out) == []
    subprocess.run(["mount", "-o", "remount,size=100m", str(small_disk)], check=True)
    assert_continues(forks, tiny, out, undisturbed)
