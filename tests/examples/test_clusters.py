"""The jobs for schedulers: their form is what the scheduler asks for, and what they run converts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import trees
from checkpoints import Checkpoint

FOLDER = Path(__file__).parents[2] / "examples" / "clusters"
#: options of sbatch that the job uses, as its manual has them
SBATCH = {"job-name", "array", "nodes", "ntasks", "cpus-per-task", "mem", "time", "requeue"}


@pytest.fixture
def bin_folder(tmp_path: Path) -> Path:
    """A folder for PATH in which `marlin-convert` is this one."""
    folder = tmp_path / "bin"
    folder.mkdir()
    script = folder / "marlin-convert"
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m marlin_convert "$@"\n')
    script.chmod(0o755)
    return folder


def environment(bin_folder: Path, source: Path, out: Path, **more: str) -> dict[str, str]:
    """As a scheduler starts a task with."""
    return os.environ | {
        "PATH": f"{bin_folder}:{os.environ['PATH']}",
        "SOURCE": str(source),
        "OUT": str(out),
        "TP": "2",
        **more,
    }


def test_a_slurm_array(tiny: Checkpoint, tiny_tp2: Path, tmp_path: Path, bin_folder: Path) -> None:
    script, out = FOLDER / "convert.sbatch", tmp_path / "out"
    options = [
        line.removeprefix("#SBATCH --") for line in script.read_text().splitlines() if "#SBATCH" in line
    ]
    assert {option.partition("=")[0] for option in options} == SBATCH
    assert "array=0-7" in options
    for task in range(8):
        numbers = {"SLURM_ARRAY_TASK_ID": str(task), "SLURM_ARRAY_TASK_MAX": "7"}
        started = environment(bin_folder, tiny.folder, out, **numbers)
        done = subprocess.run(["bash", str(script)], env=started, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    assert trees.tree(out) == trees.tree(tiny_tp2)


def test_a_kubernetes_job(tiny: Checkpoint, tiny_tp2: Path, tmp_path: Path, bin_folder: Path) -> None:
    validate = pytest.importorskip("kubernetes_validate")
    yaml = pytest.importorskip("yaml")
    job, out = yaml.safe_load((FOLDER / "convert-job.yaml").read_text()), tmp_path / "out"
    validate.validate(job, validate.latest_version(), strict=True)
    spec = job["spec"]
    assert spec["completions"] == spec["parallelism"] == 8
    (container,) = spec["template"]["spec"]["containers"]
    for index in range(spec["completions"]):
        started = environment(bin_folder, tiny.folder, out, JOB_COMPLETION_INDEX=str(index))
        line = [*container["command"], *container["args"]]
        done = subprocess.run(line, env=started, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    assert trees.tree(out) == trees.tree(tiny_tp2)
    assert {each["name"] for each in container["env"]} == {"SOURCE", "OUT", "TP"}
