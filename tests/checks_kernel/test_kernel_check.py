"""The kernel check on a CPU, with the model of the kernel: what is right passes, and every usual mistake is
caught and named.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch

import trees
from any_document import plain
from checkpoints import Checkpoint
from html_pages import read_page
from marlin_convert.checkpoint.source import open_source as opened_source
from marlin_convert.checks.kernel import layer_check
from marlin_convert.checks.kernel.kernel_report import KernelReport
from marlin_convert.checks.kernel.verify_kernel import verify_kernel
from marlin_convert.checks.verify import verify
from marlin_convert.errors import MachineError, SourceError, UsageError
from marlin_convert.kernels.providers import KernelUnavailableError
from marlin_convert.kernels.reference import ReferenceProvider
from marlin_convert.pipeline.kernel_check import kernel_check
from marlin_convert.pipeline.run import convert
from marlin_convert.progress import Point
from mistakes import Planted, _open, mistakes, plant

SPLITS = [(1, 1), (2, 1), (4, 1), (2, 2), (4, 2), (4, 4)]
LAYER = 1
EXPERTS = "language_model.model.layers.1.mlp.experts"
SCHEMA = json.loads((Path(__file__).parents[2] / "schemas" / "kernel-report.schema.json").read_text())

Converted = Callable[..., Path]
Command = Callable[..., tuple[int, str, str]]


def check(out: Path, source: Checkpoint | None = None, **scope: Any) -> KernelReport:
    folder = None if source is None else str(source.folder)
    return verify_kernel(out, folder, device="cpu", **({"tokens": ()} | scope))


def assert_named(report: KernelReport, planted: Planted) -> None:
    """Exactly the planted mistake is found: where it is, and what it looks like."""
    assert not report.ok
    found = {finding.expert: finding for finding in report.findings}
    assert set(found) == set(planted.experts)
    assert len(report.findings) == len(planted.experts)
    for finding in report.findings:
        assert (finding.layer, finding.projection, finding.rank) == (
            planted.layer,
            planted.projection,
            planted.rank,
        )
        assert finding.path == f"rank-{planted.rank:02d}-of-04/layer-{planted.layer:03d}.safetensors"
    said = found[planted.expert].what
    assert said.startswith(f"{planted.matrix}: the model on the CPU, not the kernel, reads ")
    assert planted.looks in said
    assert ("looks as if" in said) == bool(planted.looks)
    bad = [verdict for verdict in report.verdicts if not verdict.ok]
    assert {(v.rank, v.expert, v.projection) for v in bad} == {
        (planted.rank, expert, planted.matrix) for expert in planted.experts
    }
    if planted.wrong is not None:
        assert [1 <= (verdict.wrong or 0) <= planted.wrong for verdict in bad] == [True]


@pytest.mark.parametrize(("tp", "ep"), SPLITS)
@pytest.mark.parametrize("padded", [False, True])
def test_what_was_converted_passes(
    converted: Converted, small: Checkpoint, narrow: Checkpoint, tp: int, ep: int, padded: bool
) -> None:
    out, checkpoint = converted(tp, ep, padded), narrow if padded else small
    for source in (checkpoint, None):
        report = check(out, source, tokens=(1, 9))
        assert report.findings == []
        owned = {
            rank: range(rank // (tp // ep) * 4 // ep, (rank // (tp // ep) + 1) * 4 // ep)
            for rank in range(tp)
        }
        expected = {
            (rank, expert, name) for rank in range(tp) for expert in owned[rank] for name in ("w13", "w2")
        }
        assert {(verdict.rank, verdict.expert, verdict.projection) for verdict in report.verdicts} == expected
        assert all(verdict.ok and verdict.wrong == 0 for verdict in report.verdicts)
        assert [(verdict.tokens, verdict.ok) for verdict in report.fused] == [(1, True), (9, True)]
        local = max(checkpoint.dims.moe_intermediate * ep // tp, 64)
        assert report.weights_read_back == tp * 4 // ep * 3 * 128 * local
        assert not report.skipped


@pytest.mark.parametrize("matrix", ["w13", "w2"])
@pytest.mark.parametrize(("ep", "rank", "expert"), [(1, 2, 1), (2, 3, 2)])
def test_every_mistake_is_caught_and_named(
    converted: Converted, small: Checkpoint, tmp_path: Path, matrix: str, ep: int, rank: int, expert: int
) -> None:
    whole = converted(4, ep)
    for i, mistake in enumerate(mistakes(matrix, 4 // ep)):
        out = shutil.copytree(whole, tmp_path / str(i))
        planted = plant(out, mistake, LAYER, rank, expert, matrix)
        assert_named(check(out, small), planted)


@pytest.mark.parametrize("matrix", ["w13", "w2"])
def test_every_mistake_is_caught_when_the_source_is_gone(
    converted: Converted, small: Checkpoint, tmp_path: Path, matrix: str
) -> None:
    """The originals are then restored from the spoiled bytes, so it is the kept digests that tell."""
    whole = converted(4)
    for i, mistake in enumerate(mistakes(matrix, 4)):
        out = shutil.copytree(whole, tmp_path / str(i))
        planted = plant(out, mistake, LAYER, 2, 1, matrix)
        report = check(out, ranks=(2,))
        assert {finding.expert for finding in report.findings} == set(planted.experts), mistake
        assert {finding.layer for finding in report.findings} == {LAYER}
        allowed = {"gate_proj", "up_proj"} if matrix == "w13" else {"down_proj"}
        assert {finding.projection for finding in report.findings} <= allowed, mistake
        assert all(
            f.what.endswith(
                " is not what the source had; on which rank, `verify` tells, and in any case"
                " `verify --source`"
            )
            for f in report.findings
        )
        assert {(f.path, f.rank) for f in report.findings} == {
            (f"rank-*/layer-{LAYER:03d}.safetensors", None)
        }
        # as it is said: of bytes without their digest, and with the source where that was made anew
        for given in (None, str(small.folder)):
            assert {f.rank for f in verify(out, given).findings if f.expert is not None} == {2}, mistake
            trees.reseal(out)


def test_where_one_rank_has_an_expert_it_is_named_when_the_source_is_gone(
    converted: Converted, tmp_path: Path
) -> None:
    out = shutil.copytree(converted(4, 4), tmp_path / "out")
    plant(out, "one nibble", LAYER, 2, 2)
    (finding,) = check(out).findings
    assert (finding.path, finding.rank) == (f"rank-02-of-04/layer-{LAYER:03d}.safetensors", 2)
    assert finding.what.endswith(" is not what the source had")


@pytest.mark.parametrize("matrix", ["w13", "w2"])
def test_experts_exchanged_across_the_layer(
    converted: Converted, small: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, matrix: str
) -> None:
    """Neither of a batch nor neighbours: both are named, and both halves of w13."""
    monkeypatch.setattr(layer_check, "BATCH", 1)
    out = shutil.copytree(converted(4), tmp_path / "out")
    document = json.loads((out / "manifest.json").read_bytes())
    for view in _open(out, document, LAYER, 2, matrix):
        view[[0, 3]] = view[[3, 0]]
        view.flush()
    found = {finding.expert: finding for finding in check(out, small).findings}
    assert set(found) == {0, 3}
    assert found[0].what.endswith("; it looks as if it is expert 3")
    assert found[3].what.endswith("; it looks as if it is expert 0")
    assert (" of gate_proj and of up_proj," in found[0].what) == (matrix == "w13")
    assert {finding.projection for finding in found.values()} == {None if matrix == "w13" else "down_proj"}


#: of expert 1: projection, row, group and the bits there; row 70 of gate and up is row 6 of rank 1's slice of
#: 64, group 5 of down is group 1 of rank 2's
ODD = [("up_proj", 70, 2, 0x7FC1), ("down_proj", 9, 5, 0xFF80)]


@pytest.fixture
def odd(small: Checkpoint, tmp_path: Path) -> tuple[Path, Path]:
    """A source with a NaN and an infinite scale, and what was made of it."""
    folder = shutil.copytree(small.folder, tmp_path / "odd")
    source = opened_source(str(folder))
    for projection, row, group, bits in ODD:
        place = source.tensors[f"{EXPERTS}.1.{projection}.weight_scale"]
        shape = tuple(place.entry.shape)
        np.memmap(source.path(place.file), np.uint16, "r+", place.entry.offset, shape)[row, group] = bits
    convert(str(folder), tmp_path / "out", tp=4, threads=2)
    return folder, tmp_path / "out"


def test_odd_scales_of_the_source_are_named_and_are_no_mistake(odd: tuple[Path, Path]) -> None:
    source, out = odd
    assert verify(out, str(source)).ok
    for given in (str(source), None):
        report = verify_kernel(out, given, device="cpu", tokens=(9,))
        assert report.findings == []
        assert all(verdict.ok and verdict.wrong == 0 for verdict in report.verdicts)
        assert [verdict.ok for verdict in report.fused] == [True]
        said = [note.partition(";")[0] for note in report.skipped]
        assert said == [
            f"layer 1, expert 1, {projection}: one scale of the source is not finite, the first at row {row},"
            f" group {group}: {value} (0x{bits:04x})"
            for (projection, row, group, bits), value in zip(ODD, ("nan", "-inf"), strict=True)
        ]


def test_convert_says_them_too(
    odd: tuple[Path, Path], tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A note a layer, in the midst of the run; the kernel's model stands in for the kernel."""
    on_the_cpu = partial(kernel_check, device="cpu")
    monkeypatch.setattr("marlin_convert.pipeline.conversion.kernel_check", on_the_cpu)
    code, _, said = command("convert", odd[0], tmp_path / "again", "--tp", 4, "--verify", "kernel")
    assert code == 0
    (note,) = [line for line in said.splitlines() if line.startswith("note: layer 1, ")]
    assert note.startswith("note: layer 1, expert 1, up_proj: one scale of the source is not finite, ")
    assert note.endswith(" (1 more such line by `verify --kernel`)")


def test_a_kernel_that_does_not_run_stops_convert_before_it_writes(
    small: Checkpoint, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gemm(*arguments: object) -> None:
        raise KernelUnavailableError("the kernel could not be compiled: there is no nvcc")

    monkeypatch.setattr(ReferenceProvider, "gemm", gemm)
    on_the_cpu = partial(kernel_check, device="cpu")
    monkeypatch.setattr("marlin_convert.pipeline.conversion.kernel_check", on_the_cpu)
    code, stdout, said = command("convert", small.folder, tmp_path / "out", "--tp", 4, "--verify", "kernel")
    assert (code, stdout) == (4, "")
    assert "error: the kernel could not be compiled: there is no nvcc" in said
    assert list(tmp_path.rglob("*.safetensors*")) == []


@pytest.mark.parametrize("bits", [0x3C80, 0x7FC0])
def test_an_odd_scale_that_was_changed_is_found(odd: tuple[Path, Path], bits: int) -> None:
    """To a number that the stand-in equals, or to another NaN."""
    source, out = odd
    _, scales = _open(out, json.loads((out / "manifest.json").read_bytes()), LAYER, 1, "w13")
    (at,) = np.argwhere(scales[1] == 0x7FC1)
    scales[1, at[0], at[1]] = bits
    scales.flush()
    (finding,) = verify_kernel(out, str(source), device="cpu", tokens=()).findings
    assert (finding.layer, finding.expert, finding.projection, finding.rank) == (1, 1, "up_proj", 1)
    value = {0x3C80: "0.015625", 0x7FC0: "nan"}[bits]
    assert finding.what == (
        "w13: one stored scale is not as in the source, the first at row 6 of the slice, group 2 (inputs 64"
        f" to 95): {value} (0x{bits:04x}) where the original is nan (0x7fc1)"
    )


def test_a_planted_nan_is_named_at_its_place(converted: Converted, small: Checkpoint, tmp_path: Path) -> None:
    out = shutil.copytree(converted(4), tmp_path / "out")
    _, scales = _open(out, json.loads((out / "manifest.json").read_bytes()), LAYER, 2, "w13")
    scales[3, 1, 1] = 0x7FC0
    scales.flush()
    report = check(out, small)
    (finding,) = report.findings
    assert (finding.expert, finding.projection, finding.rank) == (3, "gate_proj", 2)
    start = (
        "w13: one stored scale is not as in the source, the first at row 8 of the slice, group 1 (inputs 32"
    )
    assert finding.what.startswith(f"{start} to 63): nan (0x7fc0) where the original is ")
    assert [verdict.wrong for verdict in report.verdicts if not verdict.ok] == [32]


@pytest.mark.parametrize("matrix", ["w13", "w2"])
def test_mistakes_are_caught_beside_padding(
    converted: Converted, narrow: Checkpoint, tmp_path: Path, matrix: str
) -> None:
    for i, mistake in enumerate(
        ("another rank's slice", "experts shifted by one", "one nibble", "one last bit of one scale")
    ):
        out = shutil.copytree(converted(4, 1, True), tmp_path / str(i))
        planted = plant(out, mistake, LAYER, 3, 2, matrix)
        assert_named(check(out, narrow), planted)


def test_what_is_in_the_padding_must_be_nothing(
    converted: Converted, narrow: Checkpoint, tmp_path: Path
) -> None:
    out = shutil.copytree(converted(4, 1, True), tmp_path / "out")
    _, scales = _open(out, json.loads((out / "manifest.json").read_bytes()), LAYER, 0, "w2")
    assert not scales[1, -1].any()
    scales[1, -1, 5] = 0x3C00
    finding = check(out, narrow).findings[0]
    assert (finding.expert, finding.projection, finding.rank) == (1, "down_proj", 0)


def test_a_mistake_shows_in_the_fused_sum_too(
    converted: Converted, small: Checkpoint, tmp_path: Path
) -> None:
    out = shutil.copytree(converted(2), tmp_path / "out")
    plant(out, "another rank's slice", LAYER, 0, 1)
    report = check(out, small, tokens=(9,))
    assert [verdict.ok for verdict in report.fused] == [False]
    assert any("fused MoE over all ranks" in finding.what for finding in report.findings)


def test_scope(converted: Converted, small: Checkpoint, tmp_path: Path) -> None:
    out = shutil.copytree(converted(4), tmp_path / "out")
    plant(out, "one nibble", LAYER, 1, 2)
    assert not check(out, small).ok
    outside: list[dict[str, Any]] = [{"experts": [0, 1, 3]}, {"ranks": [0, 2, 3]}, {"sample": 2}]
    for scope in outside:
        report = check(out, small, tokens=(1,), **scope)
        assert report.ok, scope
        assert report.fused == []
        assert report.skipped == ["layer 1: the fused MoE needs all ranks and all experts"]
    assert {verdict.expert for verdict in check(out, small, sample=2).verdicts} == {0, 3}
    assert {(v.expert, v.rank) for v in check(out, small, experts=[2], ranks=[1, 3]).verdicts} == {
        (2, 1),
        (2, 3),
    }
    assert not check(out, small, experts=[2], ranks=[1]).ok
    for wrong in ({"layers": [0]}, {"ranks": [4]}, {"experts": [4]}):
        with pytest.raises(UsageError, match="there is no"):
            check(out, small, **wrong)


def test_some_ranks_only(converted: Converted, small: Checkpoint) -> None:
    out = converted(4, 1, False, (1, 2))
    report = check(out, small, tokens=(1,))
    assert report.ok
    assert {verdict.rank for verdict in report.verdicts} == {1, 2}
    assert report.skipped == ["layer 1: the fused MoE needs all ranks and all experts"]
    with pytest.raises(UsageError, match="give --source"):
        check(out)


def test_another_source_is_refused(converted: Converted, narrow: Checkpoint) -> None:
    with pytest.raises(SourceError, match="is not what this output was made from"):
        check(converted(2), narrow)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu(converted: Converted, command: Callable[..., tuple[int, str, str]]) -> None:
    with pytest.raises(MachineError, match="sees no CUDA GPU"):
        verify_kernel(converted(2))
    code, _, said = command("verify", converted(2), "--kernel")
    assert code == 4
    assert "sees no CUDA GPU" in said


def test_the_reference_is_no_gpu_provider(converted: Converted) -> None:
    with pytest.raises(UsageError, match="no provider is called"):
        check(converted(2), provider="nonsense")
    with pytest.raises(UsageError, match="works on cpu, not on cuda"):
        verify_kernel(converted(2), device="cuda", provider="reference")


def test_report(converted: Converted, small: Checkpoint, tmp_path: Path) -> None:
    good = plain(check(converted(2), small, tokens=(1,)).document())
    jsonschema.validate(good, SCHEMA)
    (layer,) = good["layers"]
    assert [(rank["rank"], rank["experts"]) for rank in layer["ranks"]] == [
        (0, [0, 1, 2, 3]),
        (1, [0, 1, 2, 3]),
    ]
    matrices = [matrix for rank in layer["ranks"] for matrix in rank["matrices"]]
    assert [(each["projection"], each["wrong"]) for each in matrices] == [("w13", 0), ("w2", 0)] * 2
    assert all(max(each["relative_errors"]) == float(f"{each['relative_error']:.2e}") for each in matrices)
    assert (good["matrices"], good["model"], good["environment"]["provider"]) == (16, True, "reference")
    out = shutil.copytree(converted(2), tmp_path / "out")
    plant(out, "missing -8", LAYER, 0, 3, "w2")
    bad = plain(check(out, small, tokens=(1,)).document())
    jsonschema.validate(bad, SCHEMA)
    assert not bad["ok"]
    short = check(out, small, sample=1, tokens=(1,)).document(every_expert=False)
    jsonschema.validate(plain(short), SCHEMA)
    assert [rank["experts"] for layer in plain(short)["layers"] for rank in layer["ranks"]] == [[], []]


def test_on_the_command_line(
    converted: Converted, small: Checkpoint, command: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    arguments = ("--kernel", "--device", "cpu", "--tokens", "1", "--source", small.folder)
    code, said, _ = command("verify", converted(2), *arguments, "--report", tmp_path / "report")
    assert code == 0, said
    jsonschema.validate(json.loads((tmp_path / "report" / "kernel-report.json").read_text()), SCHEMA)
    page = read_page(tmp_path / "report" / "kernel-report.html")
    assert "! A MODEL READS EXACT, NOT THE KERNEL" in page.text
    assert "rank 0, layer 1: read right, every weight that ran was read as the source has it" in page.titles
    assert said.splitlines()[-1].startswith("model-exact: the model on the CPU, not the kernel, read back ")
    assert "kernel-exact" not in said
    out = shutil.copytree(converted(2), tmp_path / "out")
    plant(out, "gate and up swapped", LAYER, 1, 3)
    code, said, _ = command("verify", out, *arguments)
    assert code == 1
    assert "layer 1, expert 3, rank 1" in said
    code, said, _ = command("verify", out, *arguments, "--report", tmp_path / "report")
    page = read_page(tmp_path / "report" / "kernel-report.html")
    assert "✕ NOT OK" in page.text
    assert f"rm -f -- {out}/rank-01-of-02/layer-001.safetensors" in page.text
    assert "✕ wrong: rank 1, layer 1." in page.text
    (title,) = [title for title in page.titles if title.startswith("layer 1: 4 experts")]
    assert title.endswith("wrong: 3")
    assert "gate and up are swapped" in said


def test_how_far_it_is_is_told_in_bytes(converted: Converted, small: Checkpoint) -> None:
    """Of the matrices that are asked for."""
    seen = list[Point]()
    check(converted(2), small, layers=[LAYER], ranks=[1], experts=[0, 3], tokens=(), progress=seen.append)
    shards = trees.manifest_of(converted(2))["shards"]
    (shard,) = (each for each in shards if (each["unit"], each["rank"]) == (f"layer-{LAYER:03d}", 1))
    stacked = [tensor for tensor in shard["tensors"] if "experts" in tensor]
    total = sum(2 * tensor["size"] // tensor["shape"][0] for tensor in stacked)
    unit = ("running the kernel's model", f"layer-{LAYER:03d}", 1, 1)
    assert {(point.stage, point.unit, point.number, point.units) for point in seen} == {unit}
    assert [(point.done, point.total) for point in seen] == [(total * i // 4, total) for i in range(5)]


def test_without_torch_the_kernel_is_not_promised_by_torch_alone(
    converted: Converted, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("marlin_convert.extras.installed", lambda module: False)
    code, _, said = command("verify", converted(2), "--kernel")
    assert code == 2
    assert "pip install '.[sglang]' for CUDA 13, or '.[sgl-kernel]' for CUDA 12" in said
    code, _, said = command("verify", converted(2), "--kernel", "--device", "cpu")
    assert (code, said) == (2, "error: this needs torch: pip install '.[torch]' in the project's folder\n")
