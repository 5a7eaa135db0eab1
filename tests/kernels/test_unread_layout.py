"""A stored layout that the kernel does not read: it is converted and proven all the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from checkpoints import Checkpoint
from marlin_convert.kernels import quant_types

Command = Callable[..., tuple[int, str, str]]


def test_it_is_converted_and_verified_and_the_kernel_is_refused(
    tiny: Checkpoint, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quant_types, "_OF_LAYOUT", {})
    out = tmp_path / "out"
    assert command("convert", tiny.folder, out, "--tp", 2)[0] == 0
    stored = json.loads((out / "manifest.json").read_text())["layout"]
    assert stored == {
        "id": "moe_wna16_marlin.u4b8",
        "num_bits": 4,
        "group_size": 32,
        "symmetric": True,
    }
    assert command("verify", out)[0] == 0
    for refused in (
        ("verify", out, "--kernel", "--device", "cpu"),
        ("convert", tiny.folder, tmp_path / "other", "--tp", 2, "--verify", "kernel"),
        ("bench", "kernel", out, "--layer", 1, "--device", "cpu"),
    ):
        code, _, said = command(*refused)
        assert code == 2, refused
        assert "the kernel does not read the layout moe_wna16_marlin.u4b8" in said, refused
    assert not (tmp_path / "other").exists()
