"""`--verify exact` keeps a wrong buffer from being written: one that differs by a bit ends the conversion, by
name, and nothing of it is kept.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from checkpoints import make_small
from marlin_convert import convert
from marlin_convert.errors import ConvertError
from marlin_convert.layout import qweight, scales
from marlin_convert.layout.batch import Column
from marlin_convert.layout.rows import RowView
from marlin_convert.pipeline import tensor_job


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exact") / "source"
    make_small(folder, layers=2)
    return folder


def damage(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """Let one bit of each batch go wrong between packing and checking."""
    module, name, differs = {
        "weight_packed": (qweight, "pack_qweight_parts", qweight.qweight_differs),
        "weight_scale": (scales, "pack_scale_parts", scales.scale_words_differ),
    }[what]
    pack_parts, lines = getattr(module, name), 4 if module is scales else 1

    def damaged(memory: Any, target: Any, parts: Any, check: bool) -> int:
        pack_parts(memory, target, parts, False)
        target[parts[-1, Column.MARLIN]] ^= np.uint64(1)
        for i, (s_base, s_stride, rows, cols, m_base, m_stride, *_) in enumerate(parts if check else ()):
            source = RowView(memory, s_base, s_stride, rows, cols)
            if differs(source, RowView(target, m_base, m_stride, lines * cols, rows // lines)):
                return i
        return -1

    monkeypatch.setattr(module, name, damaged)


@pytest.mark.parametrize("what", ["weight_packed", "weight_scale"])
def test_a_wrong_bit_of_an_expert(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    damage(monkeypatch, what)
    with pytest.raises(
        ConvertError,
        match=(
            rf"layer-001, expert \d+, up_proj, rank 1: the repacked buffer does not invert .* {what} differs"
            r" at row"
        ),
    ):
        convert(str(source), tmp_path / "out", tp=2, threads=1)
    assert not list((tmp_path / "out").rglob("layer-001.safetensors*"))
    assert not (tmp_path / "out" / "manifest.json").exists()
    convert(str(source), tmp_path / "unproven", tp=2, verify="none")
    assert (tmp_path / "unproven" / "manifest.json").exists()
    monkeypatch.undo()
    convert(str(source), tmp_path / "out", tp=2)
    right, wrong = (
        (tmp_path / out / "rank-01-of-02" / "layer-001.safetensors").read_bytes()
        for out in ("out", "unproven")
    )
    assert len(right) == len(wrong)
    assert right != wrong


class Damaging:
    """numpy, with a copy that errs in one byte."""

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    def copyto(self, target: Any, source: Any) -> None:
        np.copyto(target, source)
        target[-1, -1] ^= 1


def test_a_wrong_byte_of_another_tensor(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_job, "np", Damaging())
    with pytest.raises(
        ConvertError, match=r", rank \d: a copied slice differs from the source; faulty memory is likely"
    ):
        convert(str(source), tmp_path / "out", tp=2)
    assert not (tmp_path / "out" / "manifest.json").exists()
    convert(str(source), tmp_path / "unproven", tp=2, verify="none")
    assert (tmp_path / "unproven" / "manifest.json").exists()
