"""Fixtures that many tests share."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

from checkpoints import Checkpoint, make_small, make_standin
from forks import Forks
from once import once

if TYPE_CHECKING:
    from marlin_convert.checkpoint.source import Source
    from marlin_convert.planning.output_plan import OutputPlan

# how long an example takes says nothing where other work shares the cores
settings.register_profile(
    "tests", parent=settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("tests")

#: a checkpoint with all there is (dense layer, two MoE layers, vision) in 3 MB
TINY: dict[str, Any] = {"experts": 4, "moe_intermediate": 256, "vt_layers": 1}


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """A small checkpoint. Not to be changed: copy it."""
    return make_small(tmp_path_factory.mktemp("tiny") / "checkpoint", **TINY)


@pytest.fixture(scope="session")
def tiny_tp2(tiny: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`tiny` converted for tp 2. Not to be changed: copy it."""
    from marlin_convert.pipeline.run import convert

    out = tmp_path_factory.mktemp("tiny_tp2") / "out"
    convert(str(tiny.folder), out, tp=2, threads=2)
    return out


@pytest.fixture(scope="session")
def standin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Kimi-K2.6 at full size, without data."""
    return once(tmp_path_factory, "standin", make_standin)


@pytest.fixture(scope="session")
def full_size(standin: Path) -> Source:
    """The same, opened."""
    from marlin_convert.checkpoint.source import open_source

    return open_source(str(standin))


@pytest.fixture(scope="session")
def full_plan(full_size: Source) -> Callable[[int, int], OutputPlan]:
    """Plans of it by tp and ep."""
    from marlin_convert.planning.output_plan import Options, plan_output

    return cache(lambda tp, ep: plan_output(full_size, Options(tp, ep)))


@pytest.fixture
def copied(tiny_tp2: Path, tmp_path: Path) -> Path:
    """A copy of `tiny_tp2` to spoil."""
    out: Path = shutil.copytree(tiny_tp2, tmp_path / "out")
    return out


@pytest.fixture
def copied_source(tiny: Checkpoint, tmp_path: Path) -> Path:
    """A copy of `tiny` to spoil."""
    folder: Path = shutil.copytree(tiny.folder, tmp_path / "source")
    return folder


@pytest.fixture(scope="session")
def forks(tiny: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks]:
    """Runs command lines in forks, with faults where wanted."""
    with Forks(tmp_path_factory.mktemp("forks"), tiny.folder) as running:
        yield running


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Runs a command line in this process; returns exit code, stdout and stderr."""
    from marlin_convert.cli import run

    def call(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code = run([str(argument) for argument in arguments])
        said = capsys.readouterr()
        return code, said.out, said.err

    return call
