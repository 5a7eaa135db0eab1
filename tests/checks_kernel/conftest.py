"""A small checkpoint, converted in several ways, for the kernel check on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints import Checkpoint, make_small

#: as narrow as the kernel allows at tp 4; one MoE layer, number 1
DIMS: dict[str, Any] = {
    "hidden": 128,
    "intermediate": 128,
    "experts": 4,
    "layers": 2,
    "first_k_dense": 1,
    "vocab": 64,
    "vt_layers": 1,
}

Converted = Callable[..., Path]


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Tests share their cores."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """Slices of 64 at tp 4. Not to be changed."""
    return make_small(tmp_path_factory.mktemp("kernel") / "checkpoint", moe_intermediate=256, **DIMS)


@pytest.fixture(scope="session")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """Slices of 32 at tp 4, which are padded to 64. Not to be changed."""
    return make_small(tmp_path_factory.mktemp("narrow") / "checkpoint", moe_intermediate=128, **DIMS)


@pytest.fixture(scope="session")
def converted(small: Checkpoint, narrow: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Converted:
    """Converted folders by tp, ep, whether padded and ranks, each made once. Not to be changed: copy them."""
    from marlin_convert.pipeline.run import convert

    made: dict[tuple[object, ...], Path] = {}

    def make(tp: int, ep: int = 1, padded: bool = False, ranks: tuple[int, ...] | None = None) -> Path:
        key = (tp, ep, padded, ranks)
        if key not in made:
            made[key] = tmp_path_factory.mktemp("converted") / "out"
            convert(
                str((narrow if padded else small).folder), made[key], tp=tp, ep=ep, ranks=ranks, threads=2
            )
        return made[key]

    return make
