"""What a run shows on stderr: a bar in a terminal, a line now and then in a log, JSON for machines."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from checkpoints import Checkpoint
from marlin_convert.cli import display
from marlin_convert.progress import Point, compiling

Command = Callable[..., tuple[int, str, str]]
SCHEMA = json.loads((Path(__file__).parents[2] / "schemas" / "log.schema.json").read_text())
GB = 10**9


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What time it is, for the display."""
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def said(capsys: pytest.CaptureFixture[str], clock: list[float], unit: float, piece: float) -> list[str]:
    """What is said of four units of 100 GB of `unit` seconds each, with a point every `piece` seconds."""
    points = round(unit / piece)
    with display.progress() as progress:
        progress(Point("converting", 0, 400 * GB, "layer-000", 1, 4))
        for i in range(4):
            for j in range(points):
                clock[0] += piece
                done = round((i + (j + 1) / points) * 100 * GB)
                progress(Point("converting", done, 400 * GB, f"layer-{i:03d}", i + 1, 4))
    return capsys.readouterr().err.splitlines()


def test_a_log_has_a_line_for_each_unit_that_takes_long(
    capsys: pytest.CaptureFixture[str], clock: list[float]
) -> None:
    assert said(capsys, clock, unit=1000, piece=10) == [
        "converting layer-000 (1 of 4): 3.0 GB of 400.0 GB, 0.10 GB/s, 66 min left",
        "converting layer-001 (2 of 4): 101.0 GB of 400.0 GB, 0.10 GB/s, 50 min left",
        "converting layer-002 (3 of 4): 201.0 GB of 400.0 GB, 0.10 GB/s, 33 min left",
        "converting layer-003 (4 of 4): 301.0 GB of 400.0 GB, 0.10 GB/s, 16 min left",
    ]


def test_and_a_line_every_half_minute_where_units_are_quick(
    capsys: pytest.CaptureFixture[str], clock: list[float]
) -> None:
    assert said(capsys, clock, unit=20, piece=10) == [
        "converting layer-001 (2 of 4): 150.0 GB of 400.0 GB, 5.00 GB/s, 50 s left",
        "converting layer-002 (3 of 4): 300.0 GB of 400.0 GB, 5.00 GB/s, 20 s left",
    ]


def test_what_takes_less_than_that_says_nothing(
    capsys: pytest.CaptureFixture[str], clock: list[float]
) -> None:
    assert said(capsys, clock, unit=4, piece=2) == []


def test_a_stage_without_units(capsys: pytest.CaptureFixture[str], clock: list[float]) -> None:
    with display.progress() as progress:
        for seconds in range(0, 100, 10):
            clock[0] = 1000.0 + seconds
            progress(Point("downloading", seconds * GB, 90 * GB))
    assert capsys.readouterr().err.splitlines() == [
        "downloading: 30.0 GB of 90.0 GB, 1.00 GB/s, 60 s left",
        "downloading: 60.0 GB of 90.0 GB, 1.00 GB/s, 30 s left",
        "downloading: 90.0 GB of 90.0 GB, 1.00 GB/s, 0 s left",
    ]


def lines(stderr: str) -> list[dict[str, Any]]:
    """JSON lines, each as the schema says."""
    found = [json.loads(line) for line in stderr.splitlines()]
    for line in found:
        Draft202012Validator(SCHEMA).validate(line)
    return found


def test_json_lines_of_a_conversion_and_its_proof(tiny: Checkpoint, tmp_path: Path, command: Command) -> None:
    code, stdout, stderr = command("convert", tiny.folder, tmp_path / "out", "--tp", 2, "--log-json")
    assert code == 0
    assert stdout.startswith(f"{tmp_path / 'out'}: 5 units made, ")
    told = [line for line in lines(stderr) if line["event"] == "progress"]
    first, last = told[0], told[-1]
    assert (first["stage"], first["done"], first["total"]) == ("converting", 0, tiny.nbytes)
    assert (first["unit"], first["number"], first["units"]) == ("layer-000", 1, 5)
    assert (last["stage"], last["done"]) == ("writing manifest and documents", tiny.nbytes)
    assert "unit" not in last
    code, _, stderr = command("verify", tmp_path / "out", "--log-json")
    last = lines(stderr)[-1]
    assert (code, last["stage"], last["done"]) == (0, "verifying", last["total"])
    stored = sum(path.stat().st_size for path in (tmp_path / "out").rglob("*.safetensors"))
    assert 0.9 * stored < last["total"] <= stored


@pytest.mark.parametrize(
    ("arguments", "code", "begin"),
    [
        (("--nonsense",), 2, "Usage: marlin-convert convert"),
        (("--ranks", "7"), 2, "--ranks: there is no rank 7"),
        (("--layers", "9"), 2, "--layers: there is no layer 9"),
    ],
)
def test_errors_are_json_too(
    tiny: Checkpoint, tmp_path: Path, command: Command, arguments: tuple[str, ...], code: int, begin: str
) -> None:
    found, _, stderr = command("convert", tiny.folder, tmp_path / "out", "--tp", 2, "--log-json", *arguments)
    (line,) = lines(stderr)
    assert (found, line["event"]) == (code, "error")
    assert line["text"].startswith(begin)
    assert "Usage" in command("convert", "--nonsense")[2]  # the next one speaks to people again


def test_compiling_is_told_to_who_watches(capsys: pytest.CaptureFixture[str], command: Command) -> None:
    seen = list[bool]()
    with compiling.watched(seen.append):
        compiling.tell(begun=True)
        compiling.tell(begun=False)
    compiling.tell(begun=True)
    assert seen == [True, False]


def test_a_bar_says_something_at_once_and_has_its_total_from_the_first_point_on(
    capsys: pytest.CaptureFixture[str],
) -> None:
    bar = display.Bar()
    assert capsys.readouterr().err.rstrip() == "starting"
    bar.compiling(begun=True)
    assert capsys.readouterr().err == "compiling, once on this machine\r"
    bar.compiling(begun=False)
    assert capsys.readouterr().err.rstrip() == "starting"
    bar.show(Point("verifying", 0, 4 * GB, "layer-000", 1, 5))
    drawn = [line for line in capsys.readouterr().err.split("\r") if line.strip()]
    assert all(line.startswith("verifying layer-000 (1 of 5):   0%|") for line in drawn)
    assert all(" 0.00/4.00G [" in line for line in drawn)
    assert drawn
    bar.close()


def test_nothing_stays_of_the_word_where_there_is_no_bar(capsys: pytest.CaptureFixture[str]) -> None:
    display.Bar().close()
    assert capsys.readouterr().err.rpartition("starting")[2].strip() == ""


def on_a_terminal(columns: int, *arguments: object, env: dict[str, str] | None = None) -> str:
    """What a command shows on a terminal that is its stderr."""
    parent, child = os.openpty()
    termios.tcsetwinsize(child, (24, columns))
    line = [sys.executable, "-m", "marlin_convert", *map(str, arguments)]
    with subprocess.Popen(
        line, stdout=subprocess.DEVNULL, stderr=child, env=os.environ | (env or {})
    ) as process:
        os.close(child)
        shown = b""
        try:
            while piece := os.read(parent, 4096):
                shown += piece
        except OSError:  # the other end is closed
            pass
        os.close(parent)
    assert process.returncode == 0
    return shown.decode()


@pytest.mark.slow
def test_the_bar_says_stage_and_layer_within_the_terminal(tiny: Checkpoint, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shown = on_a_terminal(80, "convert", tiny.folder, out, "--tp", 2, "--threads", 1)
    for number, unit in enumerate(("layer-000", "layer-001", "layer-002", "top", "common"), 1):
        assert f"converting {unit} ({number} of 5): " in shown
    assert "writing manifest and documents: 100%" in shown
    shown += on_a_terminal(80, "verify", out)
    assert "verifying layer-002 (3 of 5): " in shown
    assert max(len(line) for line in re.split(r"[\r\n]", shown)) <= 80


@pytest.mark.slow
def test_the_bar_says_that_code_is_compiled(tiny: Checkpoint, tmp_path: Path) -> None:
    """The first time on a machine."""
    line = ("convert", tiny.folder, tmp_path / "out", "--tp", 2, "--layers", 1)
    home = {"NUMBA_CACHE_DIR": str(tmp_path / "compiled")}
    assert "compiling, once on this machine: " in on_a_terminal(80, *line, env=home)
    assert "compiling" not in on_a_terminal(80, *line[:2], tmp_path / "again", *line[3:], env=home)
