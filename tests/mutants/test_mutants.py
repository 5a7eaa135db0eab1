"""All mutants die, and each is still what it says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from mutants import MUTANTS, Mutant, occurrences

SCRIPT = Path(__file__).with_name("mutants.py")


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_its_text_stands_once(mutant: Mutant) -> None:
    """Else it has rotted: change it along with the code."""
    assert occurrences(mutant) == 1
    assert mutant.old != mutant.new


def test_there_are_enough() -> None:
    assert len(MUTANTS) >= 20
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="runs tests in forks")
def test_all_of_them_die(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(tmp_path)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    outcomes = {outcome["name"]: outcome for outcome in map(json.loads, done.stdout.splitlines())}
    assert outcomes.keys() == {"untouched", *(mutant.name for mutant in MUTANTS)}, done.stderr
    for outcome in outcomes.values():
        assert Path(outcome["imported"]).is_relative_to(tmp_path), (
            f"{outcome['name']} ran against {outcome['imported']}: {outcome['output']}"
        )
    assert outcomes["untouched"]["code"] == 0, outcomes.pop("untouched")["output"]
    del outcomes["untouched"]
    alive = {
        name: outcome["output"]
        for name, outcome in outcomes.items()
        if outcome["code"] != 1 or not outcome["killer"]
    }
    assert not alive
    assert done.returncode == 0
