"""Attention and dense layers split apart from the experts: each value at its place, proven, and no mistake of
it passes.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import gqa
import trees
from checkpoints import Checkpoint, expected_plain
from marlin_convert import convert, open_shards, plan, verify
from marlin_convert.engines.weights import ShardWeights
from marlin_convert.errors import OutputError, UsageError
from whole import assert_as_the_oracle_says, is_of_attention

Make = Callable[..., Checkpoint]
CUT = (*trees.ROWS, *trees.COLUMNS)
SPLITS = [(4, 1, 2), (4, 4, 1), (8, 2, 4), (4, 2, 2)]


@pytest.mark.parametrize("form", ["k26", "k2-thinking"])
@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_every_value_is_at_its_place_and_proven(
    make: Make, tmp_path: Path, split: tuple[int, int, int], form: str
) -> None:
    (tp, ep, attn_tp), out, source = split, tmp_path / "out", make(form=form)
    convert(source.folder, out, tp=tp, ep=ep, attn_tp=attn_tp)
    for against in (None, source.folder):
        proof = verify(out, against)
        assert proof.findings == []
        assert (proof.proven, proof.unproven) == (len(source.tensors), 0)
    assert_as_the_oracle_says(out, source, tp, ep, attn_tp)
    manifest = trees.manifest_of(out)
    assert (manifest["format_version"], manifest["parallel"]["attn_tp"]) == (2, attn_tp)
    cuts = {
        origin["tensor"]: origin["parts"]
        for unit in manifest["units"]
        for origin in unit["tensors"]
        if origin["rule"] in ("column", "row", "vocab")
    }
    assert cuts == {name: "attn_tp" if is_of_attention(name) else "tp" for name in cuts}
    config = json.loads((out / "config.json").read_text())
    section = config.get("text_config", config)["quantization_config"]
    assert section["format_version"] == 2


def test_as_many_slices_as_ranks_is_what_it_was(make: Make, tmp_path: Path) -> None:
    for name, attn_tp in (("with", 4), ("without", None)):
        convert(make().folder, tmp_path / name, tp=4, attn_tp=attn_tp)
    assert trees.tree(tmp_path / "with") == trees.tree(tmp_path / "without")


def test_ranks_of_one_slice_hold_the_same(make: Make, tmp_path: Path) -> None:
    """And a part is proven as far as it goes."""
    out, source = tmp_path / "out", make()
    convert(source.folder, out, tp=4, attn_tp=2, ranks=[1, 3])
    name = "language_model.model.layers.1.self_attn.o_proj.weight"
    held = [np.asarray(open_shards(out, rank)[name]).view(np.uint16) for rank in (1, 3)]
    np.testing.assert_array_equal(held[0], held[1])
    assert verify(out).ok
    assert verify(out, source.folder).ok


def test_shared_heads_follow_the_attention(tmp_path: Path) -> None:
    """Two heads of keys for eight ranks in groups of four: each is on two neighbours, and then again."""
    with gqa.registered():
        source = gqa.make_gqa(tmp_path / "checkpoint", heads=8, kv_heads=2)
        out = tmp_path / "out"
        convert(source.folder, out, tp=8, attn_tp=4)
        assert verify(out).ok
        assert verify(out, source.folder).ok
        name = "model.layers.0.self_attn.k_proj.weight"
        held = [np.asarray(open_shards(out, rank)[name]).view(np.uint16) for rank in range(8)]
        for rank in range(8):
            np.testing.assert_array_equal(held[rank], held[rank // 2 % 2 * 2])
        assert not np.array_equal(held[0], held[2])


def test_a_shard_of_another_attn_tp_is_refused(apart: Path, tmp_path: Path) -> None:
    out = shutil.copytree(apart, tmp_path / "out")
    trees.rewrite_header(
        out / "rank-01-of-04" / "layer-001.safetensors",
        lambda header: header["__metadata__"].update(attn_tp="1"),
    )
    shards = open_shards(out, 1)
    with pytest.raises(OutputError, match="its header says attn_tp 1, in this place it must be 2"):
        shards[shards.names("layer-001")[0]]


@pytest.mark.parametrize("attn_tp", [3, 8, 0])
def test_what_cannot_be_is_refused(make: Make, tmp_path: Path, attn_tp: int) -> None:
    with pytest.raises(UsageError, match=r"attn.tp"):
        convert(make().folder, tmp_path / "out", tp=4, attn_tp=attn_tp)
    assert not (tmp_path / "out").exists()


def test_attention_beyond_its_heads(make: Make, tmp_path: Path) -> None:
    """tp 16 has more ranks than there are heads; with attention in eight slices it would do."""
    source = make(moe_intermediate=512, experts=8, vocab=512)
    with pytest.raises(UsageError, match="8 heads"):
        plan(source.folder, tp=16, ep=8)
    assert plan(source.folder, tp=16, ep=8, attn_tp=8).output.topology.attn_tp == 8


def test_another_split_does_not_continue(make: Make, tmp_path: Path) -> None:
    out = tmp_path / "out"
    convert(make().folder, out, tp=4, attn_tp=2)
    with pytest.raises(UsageError, match=r"attn_tp 2.*now asked for.*no attn_tp"):
        convert(make().folder, out, tp=4)
    assert convert(make().folder, out, tp=4, attn_tp=2).action == "done"


def test_an_engine_gets_every_tensor_whole(apart: Path, make: Make) -> None:
    """One that cuts attention in any way takes its slice out of it. What two ranks have is read of one."""
    device, source = torch.device("cpu"), make()
    for rank in (0, 3):
        weights = ShardWeights(open_shards(apart, rank), device, "auto", verify=True)
        found = {name: tensor.clone() for name, tensor in weights.others(whole=False)}
        for name, tensor in found.items():
            made = source.tensors[name]
            expected = expected_plain(name, made.dtype, made.shape)
            stored = tensor.view(torch.int16 if tensor.dtype == torch.bfloat16 else torch.int32)
            np.testing.assert_array_equal(stored.numpy(), expected.view(stored.numpy().dtype))
        assert {name for name in source.tensors if ".mlp.experts." not in name} == set(found)
        sizes = {name: made.nbytes for name, made in source.tensors.items() if name.endswith(CUT)}
        lacking = sum(size // 2 if is_of_attention(name) else size * 3 // 4 for name, size in sizes.items())
        assert 0 <= weights.bytes["other ranks"] - lacking < 4096 * len(sizes)


# Mistakes, with every digest made to fit.


def attention_of(path: Path) -> list[tuple[str, int, int]]:
    """Name, place and size of each tensor that follows the attention's split and is cut."""
    shard = trees.read_shard(path)
    return [
        (name, shard.start + begin, size)
        for name, _, _, begin, size in shard.entries
        if name.endswith(CUT) and is_of_attention(name)
    ]


def exchange_attention(out: Path, one: int, other: int) -> None:
    """What a rule of consecutive ranks would write: slice r // k in place of slice r % attn_tp."""
    paths = [out / f"rank-{rank:02d}-of-04" / "layer-001.safetensors" for rank in (one, other)]
    places = attention_of(paths[0])
    data = [bytearray(path.read_bytes()) for path in paths]
    assert places
    for _, at, size in places:
        end = at + size
        data[0][at:end], data[1][at:end] = data[1][at:end], data[0][at:end]
    for path, changed in zip(paths, data, strict=True):
        path.write_bytes(changed)


@pytest.fixture(scope="module")
def apart(make: Make, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("apart") / "out"
    convert(make().folder, out, tp=4, attn_tp=2)
    return out


def test_slices_of_consecutive_ranks_are_found(apart: Path, make: Make, tmp_path: Path) -> None:
    out = shutil.copytree(apart, tmp_path / "out")
    exchange_attention(out, 1, 2)
    trees.reseal(out)
    assert any("self_attn" in str(finding) for finding in verify(out).findings)
    found = verify(out, make().folder).findings
    assert {finding.rank for finding in found if "self_attn" in finding.what} == {1, 2}


def test_a_stale_copy_is_found(apart: Path, tmp_path: Path) -> None:
    out = shutil.copytree(apart, tmp_path / "out")
    path = out / "rank-03-of-04" / "layer-001.safetensors"
    name, at, _ = attention_of(path)[0]
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    trees.reseal(out)
    found = [str(finding) for finding in verify(out).findings]
    assert len(found) == 1
    assert f"{name}: differs from what rank 1 has" in found[0]


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d["parallel"].update(attn_tp=4),
        lambda d: d["parallel"].update(attn_tp=1),
        lambda d: d["parallel"].pop("attn_tp"),
        lambda d: d.update(format_version=1),
        lambda d: next(o for o in d["units"][1]["tensors"] if o["parts"] == "attn_tp").update(parts="tp"),
        lambda d: next(
            o for o in d["units"][1]["tensors"] if o["tensor"].endswith("shared_experts.up_proj.weight")
        ).update(parts="attn_tp"),
    ],
)
def test_a_manifest_that_says_otherwise_is_found(
    apart: Path, tmp_path: Path, change: Callable[[dict[str, Any]], object]
) -> None:
    out = shutil.copytree(apart, tmp_path / "out")
    document = trees.manifest_of(out)
    change(document)
    (out / "manifest.json").write_bytes(trees.seal(document))
    assert not verify(out).ok


def test_the_command(make: Make, tmp_path: Path, command: Callable[..., tuple[int, str, str]]) -> None:
    out, source = tmp_path / "out", make().folder
    line = (source, out, "--tp", 4, "--attn-tp", 2)
    code, stdout, _ = command("plan", *line, "--json")
    assert (code, json.loads(stdout)["attn_tp"]) == (0, 2)
    assert "\nattention and dense layers: 2 slices, rank r has slice r % 2\n" in command("plan", *line)[1]
    assert "attn_tp=2" in repr(plan(source, tp=4, attn_tp=2))
    assert command("convert", *line)[0] == 0
    report = tmp_path / "report"
    assert command("verify", out, "--report", report)[0] == 0
    assert "tp 4, ep 1, attn-tp 2" in (report / "verify.html").read_text()
    assert json.loads(command("inspect", out, "--json")[1])["attn_tp"] == 2
    assert "\nattn tp: 2\n" in command("inspect", out)[1]
    assert "attn-tp 2" in (out / "README.md").read_text()
