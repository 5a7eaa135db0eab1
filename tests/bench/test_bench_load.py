"""bench load without a GPU: what is missing is said before anything is measured."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from checkpoints import Checkpoint
from marlin_convert.bench import load
from marlin_convert.errors import MachineError, SourceError
from marlin_convert.kernels.providers import KernelUnavailableError


def test_what_an_engine_would_need_is_asked_for_first(
    tiny: Checkpoint, tiny_tp2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The source, and a package that repacks; neither after minutes of rounds."""

    def none() -> None:
        raise KernelUnavailableError("the Marlin MoE kernel does not load here")

    said = list[str]()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(load, "load_provider", none)
    for source, error in ((tiny.folder, MachineError), (tmp_path, SourceError)):
        with pytest.raises(error):
            load.bench_load(tiny_tp2, str(source), rank=0, rounds=9, threads=1, say=said.append)
    assert said == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu(tiny_tp2: Path) -> None:
    with pytest.raises(MachineError, match="no CUDA GPU: loading cannot be measured here"):
        load.bench_load(tiny_tp2, None, rank=0, rounds=1, threads=1, say=print)
