"""Sources to plan for: the stand-in of the published model, and small sparse checkpoints with something
wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from checkpoints import SMALL, Form, make_config, make_standin, plan_files
from checkpoints.config import write_small_files
from checkpoints.names import Tensor
from checkpoints.writer import write_checkpoint
from marlin_convert.checkpoint.source import Source, open_source
from marlin_convert.planning.output import Options, OutputPlan, plan_output

Files = list[list[Tensor]]


@pytest.fixture(scope="session")
def standin(tmp_path_factory: pytest.TempPathFactory) -> Source:
    """Kimi-K2.6 at full size, without data."""
    return open_source(str(make_standin(tmp_path_factory.mktemp("standin") / "k26").folder))


@pytest.fixture(scope="session")
def full_plan(standin: Source) -> Callable[[int, int], OutputPlan]:
    """Plans of it by tp and ep."""
    return cache(lambda tp, ep: plan_output(standin, Options(tp, ep)))


@pytest.fixture
def sparse(tmp_path: Path) -> Callable[..., Source]:
    """Opens a small checkpoint without data, after changes to its tensors and its config."""

    def make(
        form: Form = "k26",
        *,
        tensors: Callable[[Files], object] = lambda files: None,
        config: Callable[[Any], object] = lambda config: None,
        **dims: int,
    ) -> Source:
        chosen = replace(SMALL, **dims)
        files = plan_files(chosen, form)
        tensors(files)
        document = make_config(chosen, form)
        config(document)
        folder = tmp_path / f"source{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        write_small_files(folder, document, form)
        write_checkpoint(folder, files, None, "reference")
        return open_source(str(folder))

    return make
