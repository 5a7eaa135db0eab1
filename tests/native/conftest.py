"""Builds the C++ programs once a session and makes converted folders for them to read."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from checkpoints import make_small
from damage import flip
from native_programs import Programs
from once import once

HERE = Path(__file__).parent


def _missing() -> str:
    """What the build needs and is not here; empty if nothing."""
    for program in ("cmake", "g++"):
        if shutil.which(program) is None:
            return f"{program} is not installed"
    for header, package in (("nlohmann/json.hpp", "nlohmann-json3-dev"), ("xxhash.h", "libxxhash-dev")):
        probe = subprocess.run(
            ["g++", "-E", "-x", "c++", "-"],
            input=f"#include <{header}>",
            capture_output=True,
            text=True,
            check=False,
        )
        if probe.returncode:
            return f"{header} (Debian's {package}) is not installed"
    return ""


def _build(folder: Path) -> None:
    # Line tables are all that a sanitizer's report needs.
    options = ["-DMARLIN_SANITIZE=ON", "-DCMAKE_BUILD_TYPE=Debug", "-DCMAKE_CXX_FLAGS_DEBUG=-O0 -g1"]
    for command in (
        ["cmake", "-S", str(HERE), "-B", str(folder), *options],
        ["cmake", "--build", str(folder), "--parallel", "2"],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Programs:
    if problem := _missing():
        pytest.skip(problem)
    return Programs(once(tmp_path_factory, "native", _build))


@pytest.fixture(scope="session")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, int, int], Path]:
    """A converted folder for (tp, ep, source); made once and not to be changed. Source 1 is 0 but for one
    bit, where identity looks.
    """
    from marlin_convert.pipeline.run import convert

    folder = tmp_path_factory.mktemp("converted")

    def make(tp: int, ep: int, number: int = 0) -> Path:
        out = folder / f"tp{tp}-ep{ep}-{number}"
        if not out.exists():
            source = folder / f"source-{number}"
            if not source.exists():
                make_small(source)
                if number == 1:
                    file = source / "model-00002-of-000006.safetensors"
                    flip(file, 8 + int.from_bytes(file.read_bytes()[:8], "little"))
            convert(str(source), out, tp=tp, ep=ep)
        return out

    return make


@pytest.fixture
def copied(outputs: Callable[[int, int, int], Path], tmp_path: Path) -> Path:
    """A copy of the folder for tp 8, ep 1, to be damaged."""
    out = tmp_path / "out"
    shutil.copytree(outputs(8, 1, 0), out)
    return out
