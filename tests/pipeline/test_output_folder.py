"""What lies in a converted folder: the files as the format page has them, and what comes with them."""

from __future__ import annotations

import gzip
import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from safetensors import safe_open

import trees
from checkpoints import Checkpoint, Form
from marlin_convert.shards.reader import open_shards

Make = Callable[..., Checkpoint]
Output = Callable[..., Path]


@dataclass(frozen=True)
class Folder:
    """A converted folder, and each of its shards: as the manifest lists it, and taken apart."""

    path: Path
    checkpoint: Checkpoint
    tp: int
    ep: int
    document: dict[str, Any]
    shards: list[tuple[dict[str, Any], trees.RawShard]]

    @property
    def experts_of_a_rank(self) -> int:
        return self.checkpoint.dims.experts // self.ep


@pytest.fixture(
    scope="module",
    params=[(form, *split) for form in get_args(Form) for split in ((2, 1), (8, 2))],
    ids=lambda given: "-".join(map(str, given)),
)
def folder(make: Make, output: Output, request: pytest.FixtureRequest) -> Folder:
    form, tp, ep = request.param
    out = output(tp, ep, form=form)
    document = trees.manifest_of(out)
    shards = [(shard, trees.read_shard(out / shard["path"])) for shard in document["shards"]]
    return Folder(out, make(form=form), tp, ep, document, shards)


# The format page's promises.


def test_the_manifest_lists_every_shard_and_tensor(folder: Folder) -> None:
    files = sorted(str(path.relative_to(folder.path)) for path in folder.path.rglob("*.safetensors"))
    assert sorted(shard["path"] for shard, _ in folder.shards) == files
    for shard, raw in folder.shards:
        assert shard["size"] == len(raw.data)
        assert [list(entry) for entry in raw.entries] == [
            [t["name"], t["dtype"], t["shape"], t["offset"], t["size"]] for t in shard["tensors"]
        ]


def test_tensors_lie_close_in_whole_pages_the_large_ones_first(folder: Folder) -> None:
    for shard, raw in folder.shards:
        assert raw.start % 4096 == len(raw.data) % 4096 == 0
        assert raw.data[8 : raw.start].rstrip(b" ").endswith(b"}")
        position = raw.start
        followers = {name for view in shard["fused"] for name in view["members"][1:]}
        for name, _, shape, offset, size in raw.entries:
            assert offset == position
            position += size
            assert size >= 1
            assert len(shape) <= 4
            assert len(name) < 128
            assert size < 4096 or offset % 4096 == 0 or name in followers
        assert position == len(raw.data)
        large = [
            size >= 4096
            for name, _, _, _, size in raw.entries
            if not name.startswith("__pad__.") and name not in followers
        ]
        assert large == sorted(large, reverse=True)


def test_headers_say_what_the_file_is_of(folder: Folder) -> None:
    moe_tp, local = folder.tp // folder.ep, folder.experts_of_a_rank
    for shard, raw in folder.shards:
        where, file = shard["path"].split("/")
        unit = file.removesuffix(".safetensors")
        layer = str(int(unit[6:])) if unit.startswith("layer-") else unit
        rank = "common" if where == "common" else str(int(where.split("-")[1]))
        first = 0 if rank == "common" else int(rank) // moe_tp * local
        routed = layer.isdigit() and int(layer) >= folder.checkpoint.dims.first_k_dense
        assert raw.metadata == {
            "format": "marlin-convert",
            "format_version": "1",
            "layout": "moe_wna16_marlin.u4b8",
            "source": folder.document["source"]["id"],
            "tp": str(folder.tp),
            "ep": str(folder.ep),
            "rank": rank,
            "layer": layer,
            "expert_range": f"{first}:{first + local}" if routed else "0:0",
        }


def test_members_of_a_fused_view_follow_each_other(folder: Folder) -> None:
    for shard, raw in folder.shards:
        for view in shard["fused"]:
            members = [next(entry for entry in raw.entries if entry[0] == name) for name in view["members"]]
            assert view["offset"] == members[0][3]
            assert all(before[3] + before[4] == after[3] for before, after in itertools.pairwise(members))
            assert view["shape"] == [sum(member[2][0] for member in members), *members[0][2][1:]]
            assert {member[1] for member in members} == {view["dtype"]}


def test_digests_are_those_of_the_bytes(folder: Folder) -> None:
    blob, local = (folder.path / "digests.bin").read_bytes(), folder.experts_of_a_rank
    for shard, raw in folder.shards:
        assert trees.digest(raw.data[: raw.start]) == shard["header"]
        for entry in shard["tensors"]:
            stored = raw.data[entry["offset"] : entry["offset"] + entry["size"]]
            if "experts" in entry:
                one = entry["size"] // local
                parts = b"".join(
                    bytes.fromhex(trees.digest(stored[i * one : (i + 1) * one])) for i in range(local)
                )
                assert blob[entry["experts"] : entry["experts"] + 16 * local] == parts
                stored = parts
            assert trees.digest(stored) == entry["digest"]
        joined = shard["header"] + "".join(tensor["digest"] for tensor in shard["tensors"])
        assert trees.digest(bytes.fromhex(joined)) == shard["digest"]


# What an engine finds in it, and what comes with it.


def test_fused_views_are_those_of_the_engine(output: Output) -> None:
    out = output(2)
    views = {
        view["name"].removeprefix("language_model.model.layers."): view["shape"]
        for s in trees.manifest_of(out)["shards"]
        if s["rank"] == 1
        for view in s["fused"]
    }
    assert views == {
        "0.self_attn.fused_qkv_a_proj_with_mqa.weight": [64 + 80, 256],
        "0.mlp.gate_up_proj.weight": [512, 256],
        "1.self_attn.fused_qkv_a_proj_with_mqa.weight": [64 + 80, 256],
        "1.mlp.shared_experts.gate_up_proj.weight": [512, 256],
    }
    with open_shards(out, 1) as shards:
        for name in shards.fused_names():
            view = shards[name]
            base = name.rpartition("self_attn.fused" if "fused" in name else "gate_up")[0]
            members = (
                ("self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa")
                if "fused" in name
                else ("gate_proj", "up_proj")
            )
            np.testing.assert_array_equal(
                view, np.concatenate([shards[f"{base}{member}.weight"] for member in members])
            )


def test_indexes_list_what_is_beside_them(output: Output) -> None:
    out = output(4)
    for folder in (*out.glob("rank-*"), out / "common"):
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        sizes, places = 0, {}
        for path in folder.glob("*.safetensors"):
            for name, _, _, _, size in trees.read_shard(path).entries:
                if not name.startswith("__pad__."):
                    sizes += size
                    places[name] = path.name
        assert index == {"metadata": {"total_size": sizes}, "weight_map": places}


def test_all_files_open_with_the_library(output: Output) -> None:
    torch = pytest.importorskip("torch", reason="numpy has no bf16 for the library to read")
    opened = 0
    for path in output(4, 2).rglob("*.safetensors"):
        raw = trees.read_shard(path)
        with safe_open(path, "pt") as file:
            assert file.metadata() == raw.metadata
            assert sorted(file.keys()) == sorted(entry[0] for entry in raw.entries)
            for name, dtype, shape, _, _ in raw.entries:
                tensor = file.get_tensor(name)
                assert list(tensor.shape) == shape
                bits = tensor.view(torch.int16).numpy().view(np.uint16) if dtype == "BF16" else tensor.numpy()
                np.testing.assert_array_equal(bits, raw.array(name))
                opened += 1
    assert opened > 4 * 40


def test_same_offsets_on_all_ranks(output: Output) -> None:
    for unit in ("layer-000", "layer-001", "top"):
        shards = [trees.read_shard(path) for path in sorted(output(8, 2).glob(f"rank-*/{unit}.safetensors"))]
        assert len(shards) == 8
        assert all(shard.entries == shards[0].entries for shard in shards)


def test_small_files(make: Make, output: Output) -> None:
    checkpoint, out = make(), output(2)
    source = checkpoint.folder
    for name in (
        "LICENSE",
        "chat_template.jinja",
        "configuration_kimi_k25.py",
        "tiktoken.model",
        "generation_config.json",
        "tokenizer_config.json",
    ):
        assert (out / name).read_bytes() == (source / name).read_bytes()
    assert (out / "README.md").read_bytes() != (source / "README.md").read_bytes()  # a card of its own
    for name in ("README.md", "config.json", "model.safetensors.index.json"):
        assert (out / "source" / name).read_bytes() == (source / name).read_bytes()
    for name in checkpoint.files:
        data = (source / name).read_bytes()
        kept = gzip.decompress((out / "source" / "headers" / f"{name}.gz").read_bytes())
        assert kept == data[8 : 8 + int.from_bytes(data[:8], "little")]
    given, made = (json.loads((folder / "config.json").read_text()) for folder in (source, out))
    given["text_config"]["quantization_config"] = {
        "quant_method": "marlin-convert",
        "format": "moe_wna16_marlin.u4b8",
        "format_version": 1,
        "bits": 4,
        "group_size": 32,
        "symmetric": True,
        "modules": "routed_experts",
    }
    assert made == given
    assert trees.manifest_of(out)["source"]["quantization_config_at"] == "text_config"


def test_digests_of_the_source_are_kept(make: Make, output: Output) -> None:
    checkpoint, out = make(order="shuffled"), output(2, order="shuffled")
    kept = (out / "source" / "digests.bin").read_bytes()
    expected = b""
    for name in sorted(checkpoint.files):
        raw = trees.read_shard(checkpoint.folder / name)
        expected += b"".join(
            bytes.fromhex(trees.digest(raw.data[offset : offset + size]))
            for _, _, _, offset, size in raw.entries
        )
    assert kept == expected


def test_manifest_says_nothing_of_when_and_where(make: Make, output: Output) -> None:
    checkpoint, out = make(), output(2)
    text = (out / "manifest.json").read_text()
    assert str(out) not in text
    assert str(checkpoint.folder) not in text
    document = json.loads(text)
    assert document["digest"] == trees.digest(text.replace(document["digest"], "0" * 32, 1).encode())
    assert document["model"]["softmax_scale"] == pytest.approx(
        (32 + 16) ** -0.5 * (0.1 * np.log(64) + 1) ** 2
    )
