"""The kernel check where a map places experts: every slot is read back, copies too, and all ranks together
give the layer's result.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

import trees
from checkpoints import Checkpoint
from marlin_convert.checks.kernel.verify_kernel import verify_kernel
from marlin_convert.pipeline.kernel_check import kernel_check
from marlin_convert.pipeline.run import convert

#: four experts in six slots; expert 2 is in three of them, two of which are of one rank
ROW = [2, 1, 2, 0, 3, 2]
EXPERTS = "language_model.model.layers.1.mlp.experts"

Placed = Callable[[int, int], Path]


@pytest.fixture(scope="module")
def placed(small: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Placed:
    """Converted folders by tp and ep. Not to be changed: copy them."""
    place = tmp_path_factory.mktemp("placed")
    (place / "map.json").write_text(json.dumps({"physical_to_logical_map": [ROW]}))

    def made(tp: int, ep: int) -> Path:
        out = place / f"{tp}-{ep}"
        if not out.exists():
            convert(small.folder, out, tp=tp, ep=ep, expert_map=place / "map.json")
        return out

    return made


@pytest.mark.parametrize("split", [(1, 1), (2, 2), (4, 2)], ids=str)
@pytest.mark.parametrize("with_source", [False, True])
def test_every_slot_is_read_back(
    placed: Placed, small: Checkpoint, split: tuple[int, int], with_source: bool
) -> None:
    (tp, ep), source = split, small.folder if with_source else None
    report = verify_kernel(placed(tp, ep), source, device="cpu", tokens=(5,))
    assert report.findings == []
    # w13 and w2 of each slot, on each of its ranks
    assert len(report.verdicts) == 2 * len(ROW) * tp // ep
    (fused,) = report.fused
    assert fused.ok
    experts = [rank.experts for layer in report.document().layers for rank in layer.ranks]
    local = len(ROW) // ep
    groups = [tuple(sorted(set(ROW[i : i + local]))) for i in range(0, len(ROW), local)]
    assert experts == [groups[rank // (tp // ep)] for rank in range(tp)]
    for layer in report.document().layers:
        for rank in layer.ranks:
            assert {len(matrix.relative_errors) for matrix in rank.matrices} == {len(rank.experts)}


def test_some_experts(placed: Placed) -> None:
    """All copies of them."""
    report = verify_kernel(placed(2, 2), device="cpu", experts=[2], tokens=())
    assert report.findings == []
    assert sorted((v.rank, v.expert) for v in report.verdicts if v.projection == "w2") == [
        (0, 2),
        (0, 2),
        (1, 2),
    ]


@pytest.mark.parametrize("with_source", [False, True])
def test_an_expert_in_a_wrong_slot_is_named(
    placed: Placed, small: Checkpoint, tmp_path: Path, with_source: bool
) -> None:
    """Slot 1, of expert 1, has what slot 0 has; of the digests all fit."""
    out = shutil.copytree(placed(2, 2), tmp_path / "out")
    path = out / "rank-00-of-02" / "layer-001.safetensors"
    data = bytearray(path.read_bytes())
    for name, _, _, at, size in trees.read_shard(path).entries:
        if name.startswith(EXPERTS):
            one = size // 3
            data[at + one : at + 2 * one] = data[at : at + one]
    path.write_bytes(data)
    trees.reseal(out)
    report = verify_kernel(out, small.folder if with_source else None, device="cpu", tokens=())
    assert {(finding.rank, finding.expert) for finding in report.findings} <= {(0, 1), (None, 1)}
    assert not report.ok
    if with_source:
        assert all("it looks as if it is expert 2" in finding.what for finding in report.findings)


def test_convert_runs_it_too(
    placed: Placed, small: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the kernel's model in place of the kernel; the files are those that it writes without."""
    on_the_cpu = partial(kernel_check, device="cpu")
    monkeypatch.setattr("marlin_convert.pipeline.conversion.kernel_check", on_the_cpu)
    file = placed(4, 2).parent / "map.json"
    convert(small.folder, tmp_path / "out", tp=4, ep=2, expert_map=file, verify="kernel")
    shards = {
        path.relative_to(tmp_path / "out"): path.read_bytes() for path in tmp_path.rglob("*.safetensors")
    }
    assert shards == {path: (placed(4, 2) / path).read_bytes() for path in shards}
    assert trees.manifest_of(tmp_path / "out")["checks"] == "kernel"
