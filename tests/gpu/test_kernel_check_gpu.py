"""The kernel check with the real kernel: what is right passes, every usual mistake is caught and named, at
small and at full K2.6 width.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from checkpoints import Checkpoint, make_layers, make_small
from marlin_convert.checks.kernel.verify_kernel import verify_kernel
from marlin_convert.kernels.providers import probe
from marlin_convert.pipeline.run import convert
from mistakes import mistakes, plant

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason=f"torch {torch.__version__} sees no CUDA GPU"),
]

#: name -> (MoE layer, tp, the rank and the expert that mistakes are planted in)
CASES = {"small": (1, 4, 2, 1), "full width": (0, 8, 5, 2)}


@pytest.fixture(scope="module", autouse=True)
def provider() -> None:
    reports = probe()
    if not any(report.available for report in reports):
        pytest.skip("; ".join(f"{report.name}: {report.reason}" for report in reports))


@pytest.fixture(scope="module", params=list(CASES))
def case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Checkpoint, Path]]:
    """A name of `CASES`, a checkpoint and that converted."""
    folder = tmp_path_factory.mktemp("gpu")
    if request.param == "small":
        made = make_small(
            folder / "checkpoint",
            hidden=128,
            intermediate=128,
            moe_intermediate=256,
            experts=4,
            layers=2,
            vocab=64,
            vt_layers=1,
        )
    else:
        made = make_layers(folder / "checkpoint", experts=8)
    convert(str(made.folder), folder / "out", tp=CASES[request.param][1])
    yield request.param, made, folder / "out"
    shutil.rmtree(folder)


def test_what_was_converted_passes(case: tuple[str, Checkpoint, Path]) -> None:
    name, checkpoint, out = case
    for source in (str(checkpoint.folder), None):
        report = verify_kernel(out, source)
        assert report.findings == []
        assert len(report.verdicts) == CASES[name][1] * checkpoint.dims.experts * 2
        assert [verdict.tokens for verdict in report.fused] == [1, 9, 90, 330]
        assert report.skipped == []


@pytest.mark.parametrize("matrix", ["w13", "w2"])
def test_every_mistake_is_caught_and_named(
    case: tuple[str, Checkpoint, Path], tmp_path: Path, matrix: str
) -> None:
    name, checkpoint, whole = case
    layer, tp, rank, expert = CASES[name]
    for mistake in mistakes(matrix, tp):
        out = shutil.copytree(whole, tmp_path / "out")
        planted = plant(out, mistake, layer, rank, expert, matrix)
        report = verify_kernel(out, str(checkpoint.folder), tokens=())
        found = {finding.expert: finding for finding in report.findings}
        assert set(found) == set(planted.experts), mistake
        assert {(f.layer, f.projection, f.rank) for f in report.findings} == {
            (layer, planted.projection, rank)
        }, mistake
        said = found[expert].what
        assert planted.looks in said, mistake
        assert ("looks as if" in said) == bool(planted.looks), mistake
        if planted.wrong is not None:
            wrong = [verdict.wrong or 0 for verdict in report.verdicts if not verdict.ok]
            assert len(wrong) == 1, mistake
            assert 1 <= wrong[0] <= planted.wrong, mistake
        shutil.rmtree(out)


def test_experts_placed_by_a_map(tmp_path: Path) -> None:
    """At full width, eight experts in twelve slots: one of them three times, two of them on one rank. The
    fused MoE over all ranks sends tokens to every copy.
    """
    made, row = make_layers(tmp_path / "checkpoint", experts=8), [3, 0, 3, 7, 1, 2, 5, 4, 6, 0, 3, 7]
    (tmp_path / "map.json").write_text(json.dumps({"physical_to_logical_map": [row]}))
    for ep in (1, 4):
        out = tmp_path / str(ep)
        convert(str(made.folder), out, tp=4, ep=ep, expert_map=tmp_path / "map.json")
        for source in (str(made.folder), None):
            report = verify_kernel(out, source)
            assert report.findings == []
            assert len(report.verdicts) == 4 // ep * len(row) * 2
            assert {verdict.wrong for verdict in report.verdicts} == {0}
            assert [verdict.tokens for verdict in report.fused] == [1, 9, 90, 330]
            assert all(verdict.ok for verdict in report.fused)


def test_a_padded_rank_passes(tmp_path: Path) -> None:
    """tp 64 leaves 32 channels of an expert, which are padded to 64: at full width, the first and the last
    rank.
    """
    made, ranks = make_layers(tmp_path / "checkpoint", experts=8), (0, 63)
    out = tmp_path / "out"
    convert(str(made.folder), out, tp=64, ranks=ranks)
    report = verify_kernel(out, str(made.folder))
    assert report.findings == []
    assert len(report.verdicts) == len(ranks) * made.dims.experts * 2
    assert {verdict.wrong for verdict in report.verdicts} == {0}


def test_placed_experts_in_stages_pass(tmp_path: Path) -> None:
    """Experts in slots of a map, one of them twice, on two stages, with attention cut apart: each slot goes
    through the kernel against the original it is said to hold.
    """
    made = make_small(
        tmp_path / "checkpoint",
        hidden=128,
        intermediate=128,
        moe_intermediate=256,
        experts=4,
        layers=3,
        vocab=64,
        vt_layers=1,
    )
    rows = {"physical_to_logical_map": [[2, 0, 3, 1, 0, 2], [2, 0, 3, 1, 0, 2], [3, 1, 1, 0, 2, 3]]}
    (tmp_path / "map.json").write_text(json.dumps(rows))
    out = tmp_path / "out"
    convert(made.folder, out, tp=4, ep=2, attn_tp=2, pp=2, expert_map=tmp_path / "map.json")
    report = verify_kernel(out, str(made.folder))
    assert report.findings == []
    # w13 and w2 of six slots, each in two slices, of two layers
    assert len(report.verdicts) == 2 * 6 * 2 * 2
    assert {verdict.wrong for verdict in report.verdicts} == {0}
