"""The README's commands do what they say: those that need neither GPU nor hub are run, in order, on a small
checkpoint in the place of K2.6.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from checkpoints import make_small
from marlin_convert.cli import cli, run
from marlin_convert.planning.output_plan import OutputPlan

README = Path(__file__).resolve().parents[1] / "README.md"


def commands() -> list[list[str]]:
    """The marlin-convert lines of the section on the job, without their comments."""
    section = README.read_text().split("## The job")[1].split("##")[0]
    lines = re.findall(r"^    (marlin-convert .*)$", section, re.MULTILINE)
    return [shlex.split(line, comments=True)[1:] for line in lines]


def test_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_small(tmp_path / "Kimi-K2.6", layers=2, experts=4)
    monkeypatch.chdir(tmp_path)
    run_lines = commands()
    assert [line[0] for line in run_lines] == ["doctor", "plan", "convert", "verify", "verify", "inspect"]
    for line in run_lines:
        assert run(line) == 0, line
    assert (tmp_path / "k26-tp8" / "rank-07-of-08" / "top.safetensors").exists()


def test_every_command_named_anywhere_exists() -> None:
    words = re.findall(r"marlin-convert ([a-z]+)(?: ([a-z]+))?", README.read_text())
    known = set(cli.list_commands(None))  # type: ignore[arg-type]
    assert {verb for verb, _ in words} <= known
    benches = {name for verb, name in words if verb == "bench" and name}
    assert benches <= {"layout", "convert", "kernel", "load"}


def test_the_numbers_of_full_size(full_plan: Callable[[int, int], OutputPlan]) -> None:
    """What the README says of K2.6 is what is planned for the stand-in."""
    text = README.read_text()
    for tp, ep, row in (
        (8, 1, "`--tp 8`"),
        (8, 8, "`--tp 8 --ep 8`"),
        (16, 1, "`--tp 16`"),
        (32, 1, "`--tp 32`"),
    ):
        output = full_plan(tp, ep)
        line = next(line for line in text.splitlines() if line.startswith(f"| {row} |"))
        assert f"{output.rank_bytes() / 1e9:.1f} GB" in line
        assert f"{output.total_bytes / 1e9:.0f} GB" in line
        if (tp, ep) == (8, 1):
            assert f"{sum(len(unit.ranks) for unit in output.units)} shard files" in text
