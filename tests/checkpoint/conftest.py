"""A very small checkpoint, and copies of it to spoil."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from checkpoints import Checkpoint, make_small


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """Not to be changed."""
    folder = tmp_path_factory.mktemp("source") / "made"
    return make_small(folder, experts=2, moe_intermediate=64, layers=2, vt_layers=1, hidden=128)


@pytest.fixture
def folder(made: Checkpoint, tmp_path: Path) -> Path:
    """A copy."""
    return Path(shutil.copytree(made.folder, tmp_path / "copy"))
