"""`restore` cut off at every one of its calls, by a kill, a signal or the disk: no file is ever there in
part, and the same command continues to the same tree.
"""

from __future__ import annotations

import json
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
from forks import CHANGING, EVERY, Done, Forks
from marlin_convert.errors import MachineError
from marlin_convert.pipeline import restore as pipeline

COMMAND = [sys.executable, "-m", "marlin_convert", "restore"]
#: said at once, and at the end
STOPPING = "stopping: finishing what is being written"
CONTINUE = "interrupted; run the same command again to continue"


@dataclass(frozen=True)
class Trial:
    """A restoration of `out` in `back` that is broken at a chosen call; `counts` says how often each is made,
    and `published` what it must come to.
    """

    forks: Forks
    out: Path
    back: Path
    counts: dict[str, int]
    published: dict[str, bytes]

    def run(self, *options: object, fault: dict[str, Any] | None = None) -> Done:
        """With one thread: the calls come in the same order each time."""
        return self.forks.run("restore", self.out, self.back, "--threads", 1, *options, fault=fault)

    def broken(self, call: str, number: int, action: str, **more: Any) -> Done:
        """Restore, broken at a call."""
        return self.run(fault={"call": call, "number": number, "action": action, **more})

    def assert_files_are_whole(self) -> None:
        """Whatever has the name of a file is all of it, and nothing else is there but in the work folder."""
        for name, data in trees.tree(self.back, without=()).items():
            assert name.startswith(".work/") or data == self.published[name], name

    def assert_continues(self) -> None:
        """The same command, undisturbed now: what has its name is not made again."""
        there = {path: path.stat().st_ino for path in self.back.glob("*.safetensors")}
        done = self.run("--json")
        assert (done.code, done.stderr) == (0, "")
        said = json.loads(done.stdout)
        assert (said["files_made"], said["files_found"]) == (6 - len(there), len(there))
        assert trees.tree(self.back, without=()) == self.published
        assert list(self.back.glob(".work")) == []
        assert there == {path: path.stat().st_ino for path in there}


@pytest.fixture(scope="module")
def counts(forks: Forks, tiny_tp2: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    """How often each call is made in all."""
    back = tmp_path_factory.mktemp("counts") / "back"
    done = forks.run("restore", tiny_tp2, back, "--threads", 1)
    assert (done.code, done.stderr) == (0, "")
    return done.counts


@pytest.fixture
def trial(forks: Forks, tiny: Checkpoint, tiny_tp2: Path, tmp_path: Path, counts: dict[str, int]) -> Trial:
    return Trial(forks, tiny_tp2, tmp_path / "back", counts, trees.tree(tiny.folder, without=()))


@pytest.mark.parametrize(
    ("action", "step"),
    [
        ("SIGKILL", 40),
        pytest.param("SIGKILL", 7, marks=pytest.mark.slow),
        pytest.param("ENOSPC", 7, marks=pytest.mark.slow),
        pytest.param("SIGKILL", 1, marks=pytest.mark.campaign),
        pytest.param("ENOSPC", 1, marks=pytest.mark.campaign),
        pytest.param("EIO", 1, marks=pytest.mark.campaign),
    ],
)
def test_cut_at_each_call(trial: Trial, action: str, step: int) -> None:
    places = [(call, number) for call in CHANGING for number in range(trial.counts[call])]
    assert len(places) > 100
    for call, number in places[::step]:
        shutil.rmtree(trial.back, ignore_errors=True)
        done = trial.broken(call, number, action)
        if action == "SIGKILL":
            assert done.code == -signal.SIGKILL, (call, number)
        else:
            assert done.code in (0, 4), (call, number, done.stderr)
            assert done.code == 0 or "then run the same command again" in done.stderr
        if trial.back.exists():
            trial.assert_files_are_whole()
        trial.assert_continues()


@pytest.mark.slow
def test_killed_again_and_again(trial: Trial) -> None:
    """Each time a little further; what comes after the weights cannot be cut in pieces."""
    for runs in range(1, 12):
        done = trial.broken("fsync", trial.counts["fsync"] // 6 * runs, "SIGKILL")
        trial.assert_files_are_whole()
        if done.code == 0:
            break
        assert done.code == -signal.SIGKILL
    assert 3 < runs < 11
    assert trees.tree(trial.back, without=()) == trial.published


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
@pytest.mark.parametrize(("call", "share"), [("pwrite", 0.4), ("fsync", 0.5), ("replace", 0.9)])
def test_interrupted(trial: Trial, call: str, share: float, name: str, code: int) -> None:
    done = trial.broken(call, int(trial.counts[call] * share), name)
    assert (done.code, done.stdout) == (code, "")
    assert done.stderr.splitlines() == [STOPPING, CONTINUE]
    assert list(trial.back.rglob("*.partial")) == []
    trial.assert_files_are_whole()
    trial.assert_continues()


@pytest.mark.parametrize("call", ["unlink", "pwrite", "fsync"])
def test_interrupted_again_while_it_cleans_up(trial: Trial, call: str) -> None:
    """The second signal does not break into what removes the half-made file."""
    second = {"call": call, "number": EVERY, "action": "SIGTERM"}
    done = trial.broken("pwrite", 7, "SIGINT", then=second)
    assert (done.code, done.stdout) == (130, "")
    assert done.stderr.splitlines() == [STOPPING, CONTINUE]
    assert list(trial.back.rglob("*.partial")) == []
    trial.assert_files_are_whole()
    trial.assert_continues()


@pytest.mark.parametrize("direct", ["--direct", "--no-direct"])
@pytest.mark.parametrize("call", ["pread", "preadv"])
def test_reads_that_bring_less_than_asked_for(trial: Trial, call: str, direct: str) -> None:
    done = trial.run(direct, fault={"call": call, "number": EVERY, "action": "short"})
    assert (done.code, done.stderr) == (0, "")
    assert trees.tree(trial.back, without=()) == trial.published


def test_second_process_is_refused(trial: Trial, tmp_path: Path) -> None:
    result = tmp_path / "result"
    second = [*COMMAND, str(trial.out), str(trial.back)]
    half = trial.counts["fsync"] // 2
    done = trial.broken("fsync", half, "run", command=second, result=str(result))
    assert done.code == 0
    code, stdout, stderr = json.loads(result.read_text())
    assert (code, stdout) == (4, "")
    assert stderr == f"error: {trial.back} is being written by another process; wait for it, or stop it\n"
    assert trees.tree(trial.back, without=()) == trial.published


@pytest.mark.slow
def test_real_process_interrupted(trial: Trial) -> None:
    """The whole command, from outside, when its first file appears."""
    line = [*COMMAND, str(trial.out), str(trial.back), "--threads", "1"]
    process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    while process.poll() is None and not any(trial.back.glob(".work/made/*.partial")):
        time.sleep(0.001)
    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate(timeout=120)
    assert process.returncode in (0, 143)
    assert b"Traceback" not in stderr
    trial.assert_files_are_whole()
    trial.assert_continues()


def test_small_disk_is_refused_before_any_file_is_written(trial: Trial, small_disk: Path) -> None:
    done = replace(trial, back=small_disk / "back").run()
    assert done.code == 4
    assert "are still to be written but only" in done.stderr
    assert list((small_disk / "back").rglob("*.safetensors*")) == []


def test_disk_that_fills_up(trial: Trial, small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody else takes the space after the check; later there is some again."""
    trial = replace(trial, back=small_disk / "back")
    monkeypatch.setattr(pipeline, "refuse_short", lambda *arguments: None)
    with pytest.raises(MachineError, match=r"No space left on device; free some space, then run the same"):
        pipeline.restore(trial.out, trial.back, threads=1)
    assert list(trial.back.rglob("*.partial")) == []
    trial.assert_files_are_whole()
    subprocess.run(["mount", "-o", "remount,size=100m", str(small_disk)], check=True)
    trial.assert_continues()
