"""A second layout goes through plan, convert, verify and inspect; nothing of the package is edited for it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import trees
from checkpoints import Checkpoint, expected_codes, pack_codes
from marlin_convert import convert, layout, verify
from marlin_convert.errors import UsageError
from toy_layout import Toy

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def toy(monkeypatch: pytest.MonkeyPatch) -> Toy:
    """The toy layout, registered for one test."""
    monkeypatch.setattr(layout, "_LAYOUTS", dict(layout._LAYOUTS))
    made = Toy()
    layout.register(made)
    return made


@pytest.mark.parametrize(("tp", "ep"), [(1, 1), (4, 2)])
def test_converts_and_is_proven(tiny: Checkpoint, tmp_path: Path, command: Command, tp: int, ep: int) -> None:
    out = tmp_path / "out"
    options = ("--tp", tp, "--ep", ep, "--layout", "toy.n_major")
    code, said, _ = command("plan", tiny.folder, out, *options, "--json")
    assert (code, json.loads(said)["layout"]) == (0, "toy.n_major")
    assert command("convert", tiny.folder, out, *options)[0] == 0
    for source in (None, str(tiny.folder)):
        report = verify(out, source, threads=2)
        assert report.findings == []
        assert (report.proven, report.unproven) == (len(tiny.tensors), 0)
    code, said, _ = command("inspect", out, "--json")
    assert (code, json.loads(said)["layout"]) == (0, "toy.n_major")
    document = trees.manifest_of(out)
    assert "b_q_type" not in document["layout"]
    config = json.loads((out / "config.json").read_bytes())
    assert config["text_config"]["quantization_config"]["format"] == "toy.n_major"


def test_every_slice_is_where_the_layout_says(tiny: Checkpoint, tmp_path: Path) -> None:
    convert(str(tiny.folder), tmp_path / "out", tp=4, ep=2, layout="toy.n_major", threads=2)
    dims = tiny.dims
    for rank in range(4):
        shard = trees.read_shard(tmp_path / "out" / f"rank-{rank:02d}-of-04" / "layer-001.safetensors")
        prefix = "language_model.model.layers.1.mlp.experts."
        w13, w2 = (shard.array(f"{prefix}{name}_weight_packed") for name in ("w13", "w2"))
        assert w13.shape == (dims.experts // 2, dims.moe_intermediate, dims.hidden // 8)
        for local in range(dims.experts // 2):
            expert, half = rank // 2 * dims.experts // 2 + local, dims.moe_intermediate // 2
            published = {
                name: pack_codes(expected_codes(1, expert, name, *dims.expert_shape(name), group=dims.group))
                for name in ("gate", "up", "down")
            }
            rows = slice(rank % 2 * half, (rank % 2 + 1) * half)
            np.testing.assert_array_equal(w13[local][:half], published["gate"][rows])
            np.testing.assert_array_equal(w13[local][half:], published["up"][rows])
            words = slice(rows.start // 8, rows.stop // 8)
            np.testing.assert_array_equal(w2[local], published["down"][:, words])


def test_a_wrong_byte_is_found(tiny: Checkpoint, tmp_path: Path) -> None:
    convert(str(tiny.folder), tmp_path / "out", tp=2, layout="toy.n_major", threads=2)
    path = tmp_path / "out" / "rank-01-of-02" / "layer-002.safetensors"
    data = bytearray(path.read_bytes())
    shard = trees.read_shard(path)
    _, _, shape, offset, size = next(entry for entry in shard.entries if "w13_weight_packed" in entry[0])
    data[offset + size // shape[0] + 5] ^= 0x10
    path.write_bytes(data)
    report = verify(tmp_path / "out", threads=2)
    (finding,) = report.findings
    assert (finding.layer, finding.expert, finding.projection, finding.rank) == (2, 1, "gate_proj", 1)
    trees.reseal(tmp_path / "out")
    (finding,) = verify(tmp_path / "out", str(tiny.folder), threads=2).findings
    assert (finding.layer, finding.expert, finding.projection, finding.rank) == (2, 1, "gate_proj", 1)


def test_the_kernel_is_not_asked_to_read_it(tiny: Checkpoint, tmp_path: Path, command: Command) -> None:
    out = tmp_path / "out"
    convert(str(tiny.folder), out, tp=2, layout="toy.n_major", threads=2)
    code, _, said = command("verify", out, "--kernel", "--device", "cpu")
    assert code == 2
    assert "toy.n_major" in said
    with pytest.raises(UsageError, match=r"toy\.n_major"):
        convert(str(tiny.folder), tmp_path / "again", tp=2, layout="toy.n_major", verify="kernel")
    assert not (tmp_path / "again").exists()


def test_another_layout_does_not_continue(tiny: Checkpoint, tmp_path: Path) -> None:
    convert(str(tiny.folder), tmp_path / "out", tp=2, layout="toy.n_major", threads=2)
    with pytest.raises(
        UsageError, match=r"was made with layout toy\.n_major, now asked for layout moe_wna16_marlin"
    ):
        convert(str(tiny.folder), tmp_path / "out", tp=2, threads=2)


def test_a_folder_of_a_layout_that_is_not_known_is_refused(
    tiny: Checkpoint, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert(str(tiny.folder), tmp_path / "out", tp=2, layout="toy.n_major", threads=2)
    monkeypatch.setattr(
        layout, "_LAYOUTS", {"moe_wna16_marlin.u4b8": layout.get_layout("moe_wna16_marlin.u4b8")}
    )
    code, _, said = command("verify", tmp_path / "out")
    assert code == 1
    assert "the layout toy.n_major is not one this program knows" in said
    code, _, said = command("plan", tiny.folder, "--tp", 2, "--layout", "toy.n_major")
    assert code == 2
    assert "there is no layout toy.n_major; known are moe_wna16_marlin.u4b8" in said
