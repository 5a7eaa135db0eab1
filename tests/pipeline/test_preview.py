"""`plan` with OUT is `convert --dry-run`: the same numbers, refusals and exit codes, and nothing is changed.
And what a disk must hold is neither more nor less than what is written.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import trees
from checkpoints import Checkpoint, make_small
from forks import Forks
from marlin_convert.checkpoint.source import Source, open_source
from marlin_convert.pipeline import space
from marlin_convert.pipeline.preview import plan
from marlin_convert.pipeline.run import convert
from marlin_convert.pipeline.space import documents_bytes
from marlin_convert.planning.output_plan import Options, OutputPlan, plan_output
from marlin_convert.words import gigabytes

Command = Callable[..., tuple[int, str, str]]


def document(command: Command, *arguments: object) -> dict[str, Any]:
    """What a command prints with --json, without what is measured anew each time."""
    code, stdout, stderr = command(*arguments, "--json")
    assert (code, stderr) == (0, "")
    found: dict[str, Any] = json.loads(stdout)
    for key in ("read_rate", "write_rate", "seconds", "free"):
        found["convert"].pop(key)
    return found


def test_it_is_what_convert_does(tiny: Checkpoint, tmp_path: Path, command: Command) -> None:
    line = (tiny.folder, tmp_path / "out", "--tp", 2)
    planned = document(command, "plan", *line)
    assert planned == document(command, "convert", *line, "--dry-run")
    assert list(tmp_path.iterdir()) == []
    assert planned["refusal"] is None
    assert planned["convert"]["action"] == "new"
    assert (planned["convert"]["units"], planned["convert"]["read"]) == (5, tiny.nbytes)
    made = json.loads(command("convert", *line, "--json")[1])
    assert planned["convert"]["written"] == made["made_bytes"] == planned["bytes"]["output"]
    assert planned["convert"]["units"] == made["units_made"]
    done = document(command, "plan", *line)["convert"]
    assert done == {"action": "done", "units": 0, "read": 0, "written": 0, "needed": 0}


def test_what_is_left_of_a_conversion(copied: Path, tiny: Checkpoint, command: Command) -> None:
    line = (tiny.folder, copied, "--tp", 2)
    lost = copied / "rank-01-of-02" / "layer-001.safetensors"
    size = lost.stat().st_size
    lost.unlink()
    found = document(command, "plan", *line)["convert"]
    read = sum(t.nbytes for name, t in tiny.tensors.items() if ".layers.1." in name)
    assert (found["action"], found["units"], found["written"]) == ("repair", 1, 2 * size)
    assert found["read"] == read
    found = document(command, "convert", *line[:2], "--tp", 1, "--overwrite", "--dry-run")["convert"]
    assert (found["action"], found["units"]) == ("replace", 5)
    code, stdout, _ = command("convert", *line, "--json")
    made = json.loads(stdout)
    assert (code, made["units_made"], made["units_found"], made["made_bytes"]) == (0, 1, 4, 2 * size)
    lost.unlink()
    said = command("convert", *line)[1]
    there = "(4 of 5 were there and were not read again)"
    assert said.startswith(f"{copied}: 1 unit made {there}, {gigabytes(2 * size)} in ")


def _foreign(out: Path) -> None:
    shutil.rmtree(out)
    out.mkdir()
    (out / "thesis.tex").write_text("mine")


def _file(out: Path) -> None:
    shutil.rmtree(out)
    out.write_text("mine")


def _damaged(out: Path) -> None:
    (out / "manifest.json").write_text('{"format": "marlin-convert"')


def _digests(out: Path) -> None:
    (out / "digests.bin").unlink()


@pytest.mark.parametrize(
    ("spoil", "options", "code"),
    [
        (lambda out: None, ("--tp", "4"), 2),
        (lambda out: None, ("--tp", "2", "--layers", "1"), 2),
        (lambda out: None, ("--tp", "2", "--verify", "kernel"), 2),
        (lambda out: None, ("--tp", "2", "--memory", "100k"), 2),
        (_foreign, ("--tp", "2"), 2),
        (_foreign, ("--tp", "2", "--overwrite", "--yes"), 2),
        (_file, ("--tp", "2"), 2),
        (_damaged, ("--tp", "2"), 1),
        (_digests, ("--tp", "2"), 1),
        (shutil.rmtree, ("--tp", "3"), 3),
        (shutil.rmtree, ("--tp", "2", "--ranks", "2"), 2),
    ],
)
def test_it_refuses_what_convert_refuses(
    tiny: Checkpoint,
    copied: Path,
    command: Command,
    spoil: Callable[[Path], object],
    options: tuple[str, ...],
    code: int,
) -> None:
    spoil(copied)
    line = ("convert", tiny.folder, copied, *options)
    before = trees.tree(copied, without=()) if copied.is_dir() else None
    found = command(*line, "--dry-run")
    assert before == (trees.tree(copied, without=()) if copied.is_dir() else None)
    refused = command(*line)
    assert (found[0], found[2]) == (refused[0], refused[2])
    assert refused[0] in (code, 2)
    if not {"--verify", "--memory", "--overwrite"} & set(options):
        planned = command("plan", *line[1:])
        assert (planned[0], planned[2]) == (refused[0], refused[2])


def test_other_places_it_refuses(
    tiny: Checkpoint, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within the source, where nothing can be written, full, held by another process, of another source."""
    other = make_small(tmp_path / "other", experts=4, moe_intermediate=256, vt_layers=1, layers=2)
    made = tmp_path / "made"
    assert command("convert", other.folder, made, "--tp", 2)[0] == 0
    places = {tiny.folder / "out": 2, made / "inside": 2, Path("/proc/out"): 4, made: 3}
    for place, code in places.items():
        planned, refused = (command(verb, tiny.folder, place, "--tp", 2) for verb in ("plan", "convert"))
        assert (planned[0], planned[2]) == (refused[0], refused[2])
        assert planned[0] == code, place
    held = tmp_path / "held"
    held.mkdir()
    descriptor = os.open(held, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    planned, refused = (command(verb, tiny.folder, held, "--tp", 2) for verb in ("plan", "convert"))
    os.close(descriptor)
    assert (planned[0], planned[2]) == (refused[0], refused[2])
    assert (planned[0], "another process" in planned[2]) == (4, True)
    monkeypatch.setattr(space, "free_space", lambda folder: 10_000_000)
    planned, refused = (command(verb, tiny.folder, held, "--tp", 1) for verb in ("plan", "convert"))
    assert planned[0] == 0
    monkeypatch.setattr(space, "free_space", lambda folder: 1_000_000)
    planned, refused = (command(v, tiny.folder, tmp_path / "new", "--tp", 2) for v in ("plan", "convert"))
    assert (planned[0], planned[2]) == (refused[0], refused[2])
    assert (planned[0], "are still to be written" in planned[2]) == (4, True)
    assert "space: " in planned[1]


def test_yes_without_overwrite(tiny: Checkpoint, tmp_path: Path, command: Command) -> None:
    code, _, stderr = command("convert", tiny.folder, tmp_path / "out", "--tp", 2, "--yes")
    assert code == 2
    assert "--yes goes with --overwrite" in stderr


def test_in_python(tiny: Checkpoint, tmp_path: Path) -> None:
    report = plan(tiny.folder, tmp_path / "out", tp=2)
    assert report.refusal is None
    assert repr(report).startswith(f"PlanReport({str(tiny.folder)!r}, tp=2, ep=1, attn_tp=2, units=5, bytes=")
    assert len(repr(report)) < 300
    assert plan(tiny.folder, tmp_path, tp=2, verify="exact").refusal is None
    assert plan(tiny.folder, tiny.folder, tp=2).refusal is not None


# What the disk must hold.


def occupied(folder: Path) -> int:
    """Bytes of all files, in blocks of a disk, and of the folders."""
    sizes = [4096 if path.is_dir() else -(-path.stat().st_size // 4096) * 4096 for path in folder.rglob("*")]
    return 4096 + sum(sizes)


@pytest.mark.parametrize(("tp", "ep"), [(2, 1), (8, 2)])
def test_documents_take_what_is_set_aside_for_them(
    tiny: Checkpoint, tmp_path: Path, forks: Forks, tp: int, ep: int
) -> None:
    """At the moment when there are most of them, before the manifest gets its name."""
    line = ("convert", tiny.folder, tmp_path / "count", "--tp", tp, "--ep", ep, "--threads", 1)
    last = forks.run(*line).counts["replace"] - 1
    line = (*line[:2], tmp_path / "out", *line[3:])
    assert forks.run(*line, fault={"call": "replace", "number": last, "action": "SIGKILL"}).code == -9
    assert (tmp_path / "out" / ".work" / "manifest.json").exists()
    shards = sum(path.stat().st_size for path in (tmp_path / "out").rglob("*.safetensors"))
    opened = open_source(tiny.folder)
    aside = documents_bytes(opened, plan_output(opened, Options(tp, ep)))
    taken = occupied(tmp_path / "out") - shards
    assert taken <= aside < 3 * taken


def test_of_all_of_k26(full_size: Source, full_plan: Callable[[int, int], OutputPlan]) -> None:
    assert 50e6 < documents_bytes(full_size, full_plan(8, 1)) < 200e6


def test_files_without_a_record_make_room_for_those_that_replace_them(
    tiny: Checkpoint, tiny_tp2: Path, tmp_path: Path, forks: Forks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run broke off between names and record of a unit, and the disk holds one conversion and no more."""
    out = tmp_path / "out"
    line = ("convert", tiny.folder, out, "--tp", 2, "--threads", 1)
    unrecorded: list[Path] = []
    for number in range(3, 20):
        shutil.rmtree(out, ignore_errors=True)
        forks.run(*line, fault={"call": "replace", "number": number, "action": "SIGKILL"})
        recorded = {path.stem for path in (out / ".work" / "units").glob("*.json")}
        unrecorded = [path for path in out.glob("rank-*/*.safetensors") if path.stem not in recorded]
        if len(unrecorded) == 2:
            break
    assert len(unrecorded) == 2
    opened = open_source(tiny.folder)
    output = plan_output(opened, Options(2))
    capacity = output.total_bytes + documents_bytes(opened, output)
    monkeypatch.setattr(
        space,
        "free_space",
        lambda folder: capacity - sum(path.stat().st_size for path in out.rglob("*.safetensors")),
    )
    assert plan(tiny.folder, out, tp=2).refusal is None
    assert all(path.exists() for path in unrecorded)
    convert(tiny.folder, out, tp=2, threads=1)
    assert trees.tree(out) == trees.tree(tiny_tp2)
