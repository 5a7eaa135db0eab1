"""`--shard I/N`: several processes, each a share, and the folder is that of one run."""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import trees
from checkpoints import Checkpoint
from forks import CHANGING, Done, Forks
from marlin_convert import UsageError, convert, reshard, verify
from marlin_convert.shares import Share, said, split_evenly

Command = Callable[..., tuple[int, str, str]]
COMMAND = [sys.executable, "-m", "marlin_convert"]
#: units of the small checkpoint
UNITS = 5
#: where a file of a unit is begun: never in a moment that is one process's alone
MIDST = {"call": "posix_fallocate", "action": "run"}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("1", "write I/N"),
        ("", "write I/N"),
        ("a/b", "write I/N"),
        ("-1/3", "write I/N"),
        ("1/3/5", "write I/N"),
        ("0/0", "1 to 100000 shares"),
        ("0/100001", "1 to 100000 shares"),
        ("3/3", "counted from 0, so the last of 3 is 2/3"),
        ("7/3", "counted from 0, so the last of 3 is 2/3"),
        ("9" * 5000 + "/1", "write I/N"),
        (3, "write I/N"),
    ],
)
def test_what_is_no_share(text: object, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        Share.of(text)


def test_what_is_said_of_shares() -> None:
    assert Share.of(" 0/4 ") == Share(0, 4)
    assert (str(Share(2, 8)), Share(2, 8).part) == ("2/8", "share-2-of-8")
    assert said([3], 4) == "--shard 3/4"
    assert said([0, 2, 3], 4) == "--shard I/4 with I = 0,2-3"


@given(sizes=st.lists(st.integers(0, 50), max_size=12), count=st.integers(1, 9))
def test_shares_follow_each_other_and_the_largest_is_as_small_as_can_be(sizes: list[int], count: int) -> None:
    shares = split_evenly(sizes, count)
    assert len(shares) == len(sizes)
    assert shares == sorted(shares)
    assert set(shares) == set(range(max(shares, default=-1) + 1))
    assert max(shares, default=0) < count
    if all(sizes):
        assert len(set(shares)) == min(len(sizes), count)  # nobody is idle where there is work
    sums = [sum(size for size, share in zip(sizes, shares, strict=True) if share == i) for i in range(count)]
    assert max(sums) == least(tuple(sizes), count)


def least(sizes: tuple[int, ...], count: int) -> int:
    """The smallest largest sum of `count` runs, by trying all places of the first cut."""
    if count == 1 or not sizes:
        return sum(sizes)
    best = sum(sizes)
    for cut in range(len(sizes) + 1):
        first = sum(sizes[:cut])
        if first >= best:
            break
        best = min(best, max(first, least(sizes[cut:], count - 1)))
    return best


@pytest.mark.parametrize("count", [1, 2, 3, UNITS, UNITS + 3])
def test_shares_in_any_order_make_the_folder_of_one_run(
    tiny: Checkpoint, tiny_tp2: Path, tmp_path: Path, count: int
) -> None:
    out, order = tmp_path / "out", list(range(count))
    random.Random(count).shuffle(order)
    made = 0
    for done, index in enumerate(order, 1):
        report = convert(tiny.folder, out, tp=2, shard=f"{index}/{count}")
        made += report.made
        assert set(report.waiting) <= set(order[done:])
        assert (out / "manifest.json").exists() == (not report.waiting)
    assert made == UNITS
    assert trees.tree(out) == trees.tree(tiny_tp2)
    assert verify(out).ok
    again = convert(tiny.folder, out, tp=2, shard=f"0/{count}")
    assert (again.action, again.made, again.waiting) == ("done", 0, ())


def test_what_it_says(tiny: Checkpoint, tmp_path: Path, command: Command) -> None:
    out = tmp_path / "out"
    code, stdout, stderr = command("convert", tiny.folder, out, "--tp", 2, "--shard", "1/3")
    assert (code, stderr) == (0, "")
    assert stdout.startswith(f"{out}, share 1/3: ")
    assert stdout.endswith("not finished: units are missing of --shard I/3 with I = 0,2\n")
    code, stdout, _ = command("convert", tiny.folder, out, "--tp", 2, "--shard", "0/3", "--json")
    assert (code, json.loads(stdout)["waiting"]) == (0, [2])
    code, stdout, _ = command("convert", tiny.folder, out, "--tp", 2, "--shard", "1/3")
    assert (code, "were there)" in stdout, "--shard 2/3" in stdout) == (0, True, True)
    code, stdout, _ = command("convert", tiny.folder, out, "--tp", 2, "--shard", "2/3")
    assert (code, f"all shares are made, and {out} is finished" in stdout) == (0, True)
    code, stdout, _ = command("convert", tiny.folder, out, "--tp", 2, "--shard", "2/3")
    assert (code, f"{out} is finished already" in stdout) == (0, True)


def test_what_does_not_go_with_it(tiny: Checkpoint, tmp_path: Path, command: Command) -> None:
    line = ("convert", tiny.folder, tmp_path / "out", "--tp", 2, "--shard", "0/2")
    code, _, stderr = command(*line, "--overwrite", "--yes")
    assert (code, "--overwrite does not go with --shard" in stderr) == (2, True)
    code, _, stderr = command(*line, "--dry-run")
    assert (code, "leave --shard and --engine away" in stderr) == (2, True)
    assert not (tmp_path / "out").exists()


def test_one_run_ends_what_shares_began_and_the_other_way_round(
    tiny: Checkpoint, tiny_tp2: Path, tmp_path: Path
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    convert(tiny.folder, first, tp=2, shard="1/2")
    report = convert(tiny.folder, first, tp=2)
    assert 0 < report.made < UNITS
    convert(tiny.folder, second, tp=2, shard="1/3")
    for shard in ("0/2", "1/2"):  # another number of shares, too
        convert(tiny.folder, second, tp=2, shard=shard)
    assert trees.tree(first) == trees.tree(second) == trees.tree(tiny_tp2)


def test_shares_mend_what_was_lost(tiny: Checkpoint, tiny_tp2: Path, copied: Path) -> None:
    """A share that has lost nothing leaves the folder as it is: finished, for who still uses the rest."""
    lost = copied / "rank-01-of-02" / "layer-002.safetensors"
    lost.unlink()
    (copied / "config.json").unlink()
    locks = {".work/lock": b"", ".work/turn": b""}
    before = trees.tree(copied, without=())
    plan = [convert(tiny.folder, copied, tp=2, shard=f"{index}/4") for index in (0, 1)]
    assert [(each.made, len(each.waiting)) for each in plan] == [(0, 1), (0, 1)]
    assert trees.tree(copied, without=()) == before | locks
    (owner,) = plan[0].waiting
    report = convert(tiny.folder, copied, tp=2, shard=f"{owner}/4")
    assert (report.action, report.made, report.waiting) == ("repair", 1, ())
    assert trees.tree(copied) == trees.tree(tiny_tp2)


def test_reshard_in_shares(tiny: Checkpoint, tiny_tp2: Path, tmp_path: Path) -> None:
    new, direct = tmp_path / "new", tmp_path / "direct"
    for index in (2, 0, 1):
        reshard(tiny_tp2, new, tp=4, ep=2, shard=f"{index}/3")
    convert(tiny.folder, direct, tp=4, ep=2)
    assert trees.tree(new) == trees.tree(direct)


def test_verify_in_shares(copied: Path, command: Command) -> None:
    """Each share has its own verdict; together they have looked at everything once."""
    whole = verify(copied)
    shares = [verify(copied, shard=f"{index}/3") for index in range(3)]
    assert [each.ok for each in shares] == [True] * 3
    assert sum(each.proven for each in shares) == whole.proven
    assert [name for each in shares for name in each.units] == list(whole.units)
    path = copied / "rank-01-of-02" / "layer-002.safetensors"
    data = bytearray(path.read_bytes())
    data[-5000] ^= 4
    path.write_bytes(data)
    found = [verify(copied, shard=f"{index}/3") for index in range(3)]
    assert sum(not each.ok for each in found) == 1
    (wrong,) = (each for each in found if not each.ok)
    assert {finding.path for finding in wrong.findings} == {"rank-01-of-02/layer-002.safetensors"}
    code, stdout, _ = command("verify", copied, "--shard", "7/8")
    assert (code, "of the part that was asked for" in stdout) == (0, True)
    code, _, stderr = command("verify", copied, "--shard", "7/8", "--kernel", "--device", "cpu")
    assert (code, "leave --shard and --engine away" in stderr) == (2, True)


def test_whole_runs_and_shares_keep_each_other_out(
    forks: Forks, tiny: Checkpoint, tiny_tp2: Path, tmp_path: Path
) -> None:
    """In the midst of the one the other is refused, and another share is not."""
    out, result = tmp_path / "out", tmp_path / "result"
    whole = ["convert", str(tiny.folder), str(out), "--tp", "2"]
    kinds = {"whole": whole, "share": [*whole, "--shard", "0/2"], "other": [*whole, "--shard", "1/2"]}
    for first, second, code in (("whole", "share", 4), ("share", "whole", 4), ("share", "other", 0)):
        shutil.rmtree(out, ignore_errors=True)
        command = [*COMMAND, *kinds[second]]
        fault = {**MIDST, "number": 3, "command": command, "result": str(result)}
        done = forks.run(*kinds[first], "--threads", 1, fault=fault)
        assert done.code == 0, done.stderr
        ended, _, stderr = json.loads(result.read_text())
        assert (ended, "is being written by another process" in stderr) == (code, code == 4)
        assert (out / "manifest.json").exists() == ((first, second) != ("share", "whole"))
        if first == "share" and second == "whole":
            assert convert(tiny.folder, out, tp=2).made < UNITS
        assert trees.tree(out) == trees.tree(tiny_tp2)


def test_who_comes_back_from_the_dead_spoils_nothing(
    forks: Forks, tiny: Checkpoint, tiny_tp2: Path, tmp_path: Path
) -> None:
    """The same share once more while the first is at work, as after a node that was thought to be gone: its
    half-made files go, and it ends; or it was past that, and both end well.
    """
    for number in range(0, 10, 3):
        out, result = tmp_path / f"out-{number}", tmp_path / "result"
        line = ["convert", str(tiny.folder), str(out), "--tp", "2", "--shard", "0/1"]
        command = [*COMMAND, *line]
        fault = {**MIDST, "number": number, "command": command, "result": str(result)}
        done = forks.run(*line, "--threads", 1, fault=fault)
        ended, _, stderr = json.loads(result.read_text())
        assert (ended, stderr) == (0, "")
        assert done.code in (0, 4), done.stderr
        assert trees.tree(out) == trees.tree(tiny_tp2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("action", "step"),
    [
        ("SIGKILL", 23),
        ("ENOSPC", 31),
        pytest.param("SIGKILL", 1, marks=pytest.mark.campaign),
        pytest.param("ENOSPC", 1, marks=pytest.mark.campaign),
    ],
)
def test_the_last_share_cut_at_each_call(
    forks: Forks, tiny: Checkpoint, tiny_tp2: Path, tmp_path: Path, action: str, step: int
) -> None:
    """From its begin to the end of the folder: run again, it comes to the same."""
    undisturbed, begun, out = trees.tree(tiny_tp2), tmp_path / "begun", tmp_path / "out"
    convert(tiny.folder, begun, tp=2, shard="0/2")

    def run(fault: dict[str, object] | None = None) -> Done:
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(begun, out)
        line = ("convert", tiny.folder, out, "--tp", 2, "--threads", 1, "--shard", "1/2")
        return forks.run(*line, fault=fault)

    counts = run().counts
    assert trees.tree(out) == undisturbed
    for call in CHANGING:
        for number in range(0, counts[call], step):
            done = run({"call": call, "number": number, "action": action})
            assert "Traceback" not in done.stderr, (call, number)
            assert done.code in ((-9,) if action == "SIGKILL" else (0, 4)), (call, number, done.stderr)
            again = forks.run("convert", tiny.folder, out, "--tp", 2, "--threads", 1, "--shard", "1/2")
            assert (again.code, again.stderr) == (0, ""), (call, number)
            assert trees.tree(out) == undisturbed, (call, number)


@pytest.mark.slow
def test_three_processes_one_of_them_killed_and_started_again(
    tiny: Checkpoint, tiny_tp2: Path, tmp_path: Path
) -> None:
    for seed in range(2):
        out = tmp_path / f"out-{seed}"
        line = [*COMMAND, "convert", str(tiny.folder), str(out), "--tp", "2"]

        def begin(index: int, line: list[str] = line) -> subprocess.Popen[bytes]:
            return subprocess.Popen([*line, "--shard", f"{index}/3"], stdout=subprocess.PIPE)

        processes = {index: begin(index) for index in range(3)}
        victim = random.Random(seed).randrange(3)
        while processes[victim].poll() is None and not list(out.glob("rank-*/*.partial")):
            time.sleep(0.005)
        processes[victim].send_signal(signal.SIGKILL)
        processes[victim].communicate()
        processes[victim] = begin(victim)
        said = {index: process.communicate(timeout=120)[0].decode() for index, process in processes.items()}
        assert [process.returncode for process in processes.values()] == [0, 0, 0], said
        assert sum("is finished" in each for each in said.values()) >= 1
        assert trees.tree(out) == trees.tree(tiny_tp2)


@pytest.mark.slow
def test_more_processes_than_units_all_at_once(tiny: Checkpoint, tiny_tp2: Path, tmp_path: Path) -> None:
    """Who meets whom is left to chance."""
    out = tmp_path / "out"
    line = [*COMMAND, "convert", str(tiny.folder), str(out), "--tp", "2"]
    processes = [
        subprocess.Popen([*line, "--shard", f"{index}/7"], stderr=subprocess.PIPE) for index in range(7)
    ]
    said = [process.communicate(timeout=300)[1] for process in processes]
    assert [process.returncode for process in processes] == [0] * 7, said
    assert trees.tree(out) == trees.tree(tiny_tp2)
