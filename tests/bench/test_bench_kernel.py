"""bench kernel on a CPU: the code path and the report, not the times; and the statistics."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import jsonschema
import pytest
import torch

from any_document import plain
from checkpoints import make_small
from marlin_convert.bench.kernel import KernelSettings, bench_kernel
from marlin_convert.bench.loaded_layer import load_layer
from marlin_convert.bench.stats import Summary, summarize
from marlin_convert.errors import UsageError
from marlin_convert.extras import installed
from marlin_convert.pipeline.run import convert

SCHEMA = json.loads((Path(__file__).parents[2] / "schemas" / "bench-kernel.schema.json").read_text())

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def outs(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """A small checkpoint converted for tp 2, by ep."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("bench")
    made = make_small(
        folder / "checkpoint",
        hidden=128,
        intermediate=128,
        moe_intermediate=128,
        experts=8,
        layers=2,
        vocab=64,
        vt_layers=1,
    )
    for ep in (1, 2):
        convert(str(made.folder), folder / str(ep), tp=2, ep=ep, threads=2)
    return {ep: folder / str(ep) for ep in (1, 2)}


def test_loaded_layer(outs: dict[int, Path]) -> None:
    whole = load_layer(outs[1], 1, 1, "cpu")
    assert (whole.owned, whole.experts.expert_map, whole.top_k) == (range(8), None, 4)
    assert whole.expert_bytes == (3 * 128 * 64) // 2 + 3 * 128 * 64 // 32 * 2
    half = load_layer(outs[2], 1, 1, "cpu")
    assert half.owned == range(4, 8)
    assert half.experts.expert_map is not None
    assert half.experts.expert_map.tolist() == [-1, -1, -1, -1, 0, 1, 2, 3]
    with pytest.raises(UsageError, match="no routed experts of layer 0"):
        load_layer(outs[1], 0, 0, "cpu")
    with pytest.raises(UsageError, match="has no rank 2"):
        load_layer(outs[1], 1, 2, "cpu")


@pytest.mark.parametrize("ep", [1, 2])
def test_report(outs: dict[int, Path], ep: int) -> None:
    report = bench_kernel(outs[ep], KernelSettings(1, 1, tokens=(1, 9), rounds=1, device="cpu"))
    jsonschema.validate(plain(report), SCHEMA)
    assert [(row.tokens, row.routing, row.use_atomic_add) for row in report.rows] == [
        (tokens, routing, atomic)
        for tokens in (1, 9)
        for routing in ("uniform", "skewed")
        for atomic in (False, True)
    ]
    for row in report.rows:
        assert row.experts_hit <= report.local_experts == 8 // ep
        assert row.bytes == row.experts_hit * report.expert_bytes
        assert row.error == 0
    if ep == 1:
        assert report.rows[0].experts_hit == 4
    assert any("times mean nothing" in note for note in report.notes)


def test_on_the_command_line(outs: dict[int, Path], command: Command, tmp_path: Path) -> None:
    arguments = ("bench", "kernel", outs[1], "--layer", 1, "--tokens", "1", "--rounds", 1, "--device", "cpu")
    code, said, messages = command(*arguments)
    assert code == 0
    assert "layer 1, rank 0, tp 2, ep 1: 8 of 8 experts" in said
    assert "times mean nothing" in said
    assert "1 tokens, skewed routing" in messages
    code, said, _ = command(*arguments, "--json")
    assert code == 0
    jsonschema.validate(json.loads(said), SCHEMA)
    assert command("bench", "kernel", outs[1], "--layer", 1, "--tokens", "0", "--device", "cpu")[0] == 2
    if not torch.cuda.is_available():
        assert command("bench", "kernel", outs[1], "--layer", 1)[0] == 4
    code, _, messages = command(*arguments, "--plot", tmp_path / "plot.png")
    if installed("matplotlib"):
        assert code == 0
        assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    else:
        assert code == 2
        assert "pip install '.[report]'" in messages


def test_summaries() -> None:
    assert summarize([3.0, 1.0, 2.0]) == Summary(2.0, 1.0, 3.0, 3)
    assert summarize([1.0, 3.0, 2.0]).spread == 1.0
    assert summarize([0.0]).spread == 0.0
    with pytest.raises(ValueError, match="nothing"):
        summarize([])
