"""Sources to plan for: small sparse checkpoints with something wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from checkpoints import SMALL, Form, make_config, plan_files
from checkpoints.config import write_small_files
from checkpoints.names import Tensor
from checkpoints.writer import write_checkpoint
from marlin_convert.checkpoint.source import Source, open_source

Files = list[list[Tensor]]


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
