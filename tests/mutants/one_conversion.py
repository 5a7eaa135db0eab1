"""The smallest whole conversion, held to the oracle: what the mutants of slicing must not survive. Run by
run.py, not collected.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from checkpoints import Checkpoint, make_small
from marlin_convert.pipeline.run import convert
from whole import assert_as_the_oracle_says


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return make_small(
        tmp_path_factory.mktemp("one") / "checkpoint",
        order="shuffled",
        hidden=128,
        experts=4,
        moe_intermediate=128,
        layers=2,
        intermediate=128,
        vocab=128,
        vt_layers=1,
    )


@pytest.mark.parametrize(("tp", "ep"), [(4, 2), (2, 1), (4, 1)])
def test_every_rank(made: Checkpoint, tmp_path: Path, tp: int, ep: int) -> None:
    convert(str(made.folder), tmp_path / "out", tp=tp, ep=ep, threads=1, verify="none")
    assert_as_the_oracle_says(tmp_path / "out", made, tp, ep)
