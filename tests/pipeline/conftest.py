"""Checkpoints of all kinds and conversions of them, each made once."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from checkpoints import Checkpoint, make_small
from marlin_convert.pipeline.run import convert

DIMS: dict[str, Any] = {"layers": 2, "experts": 8, "vt_layers": 1}

Make = Callable[..., Checkpoint]
Output = Callable[..., Path]


@pytest.fixture(scope="session")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Checkpoints by their options. Not to be changed."""
    made: dict[str, Checkpoint] = {}

    def maker(**options: Any) -> Checkpoint:
        key = repr(sorted(options.items()))
        if key not in made:
            made[key] = make_small(tmp_path_factory.mktemp("made") / "checkpoint", **(DIMS | options))
        return made[key]

    return maker


@pytest.fixture(scope="session")
def output(make: Make, tmp_path_factory: pytest.TempPathFactory) -> Output:
    """Converted folders by tp, ep and the checkpoint's options. Not to be changed."""
    made: dict[str, Path] = {}

    def maker(tp: int, ep: int = 1, **options: Any) -> Path:
        key = repr((tp, ep, sorted(options.items())))
        if key not in made:
            made[key] = tmp_path_factory.mktemp("output") / "out"
            convert(str(make(**options).folder), made[key], tp=tp, ep=ep, threads=2)
        return made[key]

    return maker


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own with room for about half of what is written there."""
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
