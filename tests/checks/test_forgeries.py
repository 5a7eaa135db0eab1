"""Folders in which every digest fits and still something is wrong: what the manifest says is derived again,
not believed.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import trees
from checkpoints import Checkpoint
from marlin_convert.checks.verify import verify
from marlin_convert.errors import OutputError

Document = dict[str, Any]
Change = Callable[[Document], object]
PREFIX = "language_model.model.layers."


def unit(document: Document, name: str = "layer-001") -> Document:
    """A unit's entry."""
    return next(unit for unit in document["units"] if unit["name"] == name)


def origin(document: Document, ending: str) -> Document:
    """How a tensor of layer 1 came to be."""
    return next(tensor for tensor in unit(document)["tensors"] if tensor["tensor"].endswith(ending))


def shard(document: Document, path: str = "rank-01-of-02/layer-001.safetensors") -> Document:
    """A shard's entry."""
    return next(shard for shard in document["shards"] if shard["path"] == path)


def stored(document: Document, ending: str) -> Document:
    """A tensor's entry of a shard."""
    return next(tensor for tensor in shard(document)["tensors"] if tensor["name"].endswith(ending))


def exchange(entry: Document, first: Any, second: Any) -> None:
    """Exchange two values."""
    entry[first], entry[second] = entry[second], entry[first]


def exchange_units(document: Document) -> None:
    """Two layers' origins under each other's name."""
    one, two = unit(document, "layer-001"), unit(document, "layer-002")
    one["tensors"], two["tensors"] = two["tensors"], one["tensors"]


def drop_unit(document: Document) -> None:
    """A layer that is not there, nor said to be."""
    document["units"] = [unit for unit in document["units"] if unit["name"] != "layer-002"]
    document["shards"] = [shard for shard in document["shards"] if shard["unit"] != "layer-002"]


MUTANTS: dict[str, Change] = {
    "another rule": lambda d: origin(d, "o_proj.weight").update(rule="column"),
    "another axis": lambda d: origin(d, "kv_b_proj.weight").update(axis=1),
    "another axis of experts": lambda d: origin(d, "w13_weight_packed").update(axis=1),
    "other parts": lambda d: origin(d, "w2_weight_packed").update(parts="tp"),
    "no parts": lambda d: origin(d, "shared_experts.up_proj.weight").update(parts=None),
    "gate and up in the other order": lambda d: origin(d, "w13_weight_packed")["from"].reverse(),
    "scales of gate and up in the other order": lambda d: origin(d, "w13_weight_scale")["from"].reverse(),
    "from another layer": (
        lambda d: origin(d, "q_a_proj.weight").update({"from": [f"{PREFIX}2.self_attn.q_a_proj.weight"]})
    ),
    "from nowhere": (
        lambda d: origin(d, "q_a_proj.weight").update({"from": [f"{PREFIX}1.self_attn.q_z_proj.weight"]})
    ),
    "a tensor left out of a unit": lambda d: unit(d)["tensors"].pop(),
    "a tensor twice in a unit": lambda d: unit(d)["tensors"].append(unit(d)["tensors"][0]),
    "units exchanged": exchange_units,
    "a unit left out": drop_unit,
    "a unit's layer": lambda d: unit(d).update(layer=2),
    "no shapes checked": lambda d: unit(d).update(checked=[]),
    "tp": lambda d: d["parallel"].update(tp=4),
    "ep": lambda d: d["parallel"].update(ep=2),
    "moe_tp": lambda d: d["parallel"].update(moe_tp=1),
    "padding": lambda d: d["parallel"].update(padding={"moe_intermediate": 128, "padded": 192}),
    "ranks": lambda d: d.update(ranks=[0]),
    "layers": lambda d: d.update(layers=[0, 1]),
    "layers and complete": lambda d: d.update(layers=[0, 1], complete=False),
    "not complete": lambda d: d.update(complete=False),
    "layout": lambda d: d["layout"].update(id="moe_wna16_marlin.u8b128"),
    "bits": lambda d: d["layout"].update(num_bits=8),
    "group size": lambda d: d["layout"].update(group_size=64),
    "symmetric": lambda d: d["layout"].update(symmetric=False),
    "weight type": lambda d: d["layout"].update(b_q_type="uint4"),
    "weight type's number": lambda d: d["layout"].update(b_q_type_id=1),
    "source id": lambda d: d["source"].update(id="0" * 32),
    "number of source tensors": lambda d: d["source"].update(tensors=1),
    "source bytes": lambda d: d["source"].update(payload_bytes=1),
    "source config": lambda d: d["source"].update(config="0" * 32),
    "place of the quantization config": lambda d: d["source"].update(quantization_config_at=""),
    "a source file's size": lambda d: d["source"]["files"][0].update(size=1),
    "a source file's header": lambda d: d["source"]["files"][0].update(header="0" * 32),
    "a source file's start": lambda d: d["source"]["files"][0].update(start="0" * 32),
    "source files exchanged": lambda d: exchange(d["source"]["files"], 1, 2),
    "a model constant": lambda d: d["model"].update(routed_scaling_factor=1.0),
    "a model constant inside": lambda d: d["model"].update({"rope_scaling.factor": 32.0}),
    "softmax scale": lambda d: d["model"].update(softmax_scale=0.5),
    "a model constant left out": lambda d: d["model"].pop("rope_theta"),
    "a model constant made up": lambda d: d["model"].update(made_up=1),
    "a shard's offset": lambda d: stored(d, "kv_b_proj.weight").update(offset=4096),
    "a shard's shape": lambda d: stored(d, "kv_b_proj.weight").update(shape=[64, 128]),
    "a shard's dtype": lambda d: stored(d, "kv_b_proj.weight").update(dtype="F16"),
    "a shard's size": lambda d: shard(d).update(size=4096),
    "a shard's rank": lambda d: shard(d).update(rank=0),
    "a shard's unit": lambda d: shard(d).update(unit="layer-002"),
    "paths of two shards": lambda d: exchange_paths(
        d, "rank-00-of-02/layer-001.safetensors", "rank-01-of-02/layer-001.safetensors"
    ),
    "a shard left out": lambda d: d["shards"].remove(shard(d)),
    "a shard twice": lambda d: d["shards"].append(copy.deepcopy(shard(d))),
    "place of the experts' digests": (
        lambda d: stored(d, "w2_weight_packed").update(experts=stored(d, "w13_weight_scale")["experts"])
    ),
    "no place of the experts' digests": lambda d: stored(d, "w2_weight_packed").pop("experts"),
    "experts' digests of a plain tensor": lambda d: stored(d, "kv_b_proj.weight").update(experts=0),
    "a fused view's name": lambda d: shard(d)["fused"][0].update(name="another"),
    "a fused view's offset": lambda d: shard(d)["fused"][0].update(offset=8192),
    "a fused view's shape": lambda d: shard(d)["fused"][0].update(shape=[1, 256]),
    "a fused view's dtype": lambda d: shard(d)["fused"][0].update(dtype="F16"),
    "members of a fused view": lambda d: shard(d)["fused"][0]["members"].reverse(),
    "a member too many": lambda d: shard(d)["fused"][0]["members"].append("another"),
    "no fused views": lambda d: shard(d).update(fused=[]),
    "a file left out": lambda d: d["files"].pop(0),
    "a file twice": lambda d: d["files"].append({"path": "more", "size": 0, "digest": trees.digest(b"")}),
    "version": lambda d: d.update(format_version=2),
    "format": lambda d: d.update(format="another"),
    "checks": lambda d: d.update(checks="thorough"),
}


def exchange_paths(document: Document, first: str, second: str) -> None:
    """Give two shards each other's path."""
    one, two = shard(document, first), shard(document, second)
    exchange_paths_of(one, two)


def exchange_paths_of(one: Document, two: Document) -> None:
    """Exchange the paths of two entries."""
    one["path"], two["path"] = two["path"], one["path"]


def wrong(out: Path, source: Checkpoint | None = None) -> list[str]:
    """What verify says; empty where it is content."""
    try:
        report = verify(out, None if source is None else str(source.folder), threads=2)
    except OutputError as error:
        return [str(error)]
    return [str(finding) for finding in report.findings]


def test_resealing_alone_is_accepted(copied: Path) -> None:
    """Else the tests below would prove nothing."""
    before = trees.tree(copied)
    trees.reseal(copied)
    assert trees.tree(copied) == before
    assert wrong(copied) == []


@pytest.mark.parametrize("mutant", MUTANTS)
def test_manifest_that_fits_itself(copied: Path, mutant: str) -> None:
    document = trees.manifest_of(copied)
    MUTANTS[mutant](document)
    (copied / "manifest.json").write_bytes(trees.seal(document))
    assert wrong(copied)


@pytest.mark.parametrize("seed", range(3))
def test_manifest_with_anything_anywhere(copied: Path, seed: int) -> None:
    """Whatever stands in place of a value, verify ends with a report or an OutputError."""
    choose = random.Random(seed)
    original = trees.manifest_of(copied)
    accepted = []
    for _ in range(60):
        document = copy.deepcopy(original)
        path = mutate(document, choose)
        (copied / "manifest.json").write_bytes(trees.seal(document))
        if not wrong(copied):
            accepted.append(path)
    assert accepted == []


#: what no byte of the folder depends on; another rule table, check or list of what was not copied is a fact
#: of history
NOT_DERIVED = (
    {"digest"},
    {"checks"},
    {"parallel", "rules"},
    {"source", "not_copied"},
    {"sample"},
    {"repo"},
    {"revision"},
)
VALUES: tuple[Any, ...] = (None, True, -1, 0, 3, 1 << 70, 0.5, "", "x", "../x", [], [0], {}, {"x": 1})


def mutate(document: Document, choose: random.Random) -> list[Any]:
    """Replace, double or remove one value somewhere; returns where."""
    while True:
        at: Any = document
        path: list[Any] = []
        while isinstance(at, (dict, list)) and at and (not path or choose.random() < 0.8):
            parent, key = at, choose.choice(sorted(at) if isinstance(at, dict) else range(len(at)))
            path.append(key)
            at = parent[key]
        if any(names <= set(path) for names in NOT_DERIVED):
            continue
        new = choose.choice([value for value in VALUES if value != at or type(value) is not type(at)])
        if choose.random() < 0.2:
            del parent[key]
        else:
            parent[key] = new
        return [*path, new]


# Data and manifest changed together.


def test_ranks_exchanged_in_folders_and_manifest(copied: Path) -> None:
    """A loader goes by the folder's name."""
    (copied / "rank-00-of-02").rename(copied / "away")
    (copied / "rank-01-of-02").rename(copied / "rank-00-of-02")
    (copied / "away").rename(copied / "rank-01-of-02")

    def change(document: Document) -> None:
        for entry in document["shards"]:
            if entry["rank"] is not None:
                entry["path"] = f"rank-{1 - entry['rank']:02d}-of-02/{entry['unit']}.safetensors"

    trees.reseal(copied, change)
    assert wrong(copied)


@pytest.mark.parametrize("name", ["kv_b_proj.weight", "w13_weight_scale", "input_layernorm.weight"])
def test_dtype_changed_in_headers_and_manifest(copied: Path, name: str) -> None:
    """Same size, same bytes, another meaning."""

    def in_header(header: Document) -> None:
        next(value for key, value in header.items() if key.endswith(name)).update(dtype="F16")

    for rank in (0, 1):
        trees.rewrite_header(copied / f"rank-{rank:02d}-of-02" / "layer-001.safetensors", in_header)

    def in_manifest(document: Document) -> None:
        for entry in document["shards"]:
            for tensor in entry["tensors"] if entry["unit"] == "layer-001" else ():
                if tensor["name"].endswith(name):
                    tensor["dtype"] = "F16"

    trees.reseal(copied, in_manifest)
    assert any(name in line for line in wrong(copied))


def test_shape_changed_in_headers_and_manifest(copied: Path) -> None:
    name = f"{PREFIX}1.mlp.gate.weight"
    for rank in (0, 1):
        path = copied / f"rank-{rank:02d}-of-02" / "layer-001.safetensors"
        trees.rewrite_header(path, lambda header: header[name].update(shape=[8, 128]))

    def in_manifest(document: Document) -> None:
        for entry in document["shards"]:
            for tensor in entry["tensors"]:
                if tensor["name"] == name:
                    tensor["shape"] = [8, 128]

    trees.reseal(copied, in_manifest)
    assert any(name in line for line in wrong(copied))


def test_config_rewritten_otherwise(copied: Path) -> None:
    config = json.loads((copied / "config.json").read_text())
    config["text_config"]["quantization_config"]["bits"] = 8
    (copied / "config.json").write_text(json.dumps(config))
    trees.reseal(copied)
    assert any(line.startswith("config.json") for line in wrong(copied))


def test_index_rewritten(copied: Path) -> None:
    path = copied / "rank-01-of-02" / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"].popitem()
    path.write_text(json.dumps(index))
    trees.reseal(copied)
    assert any(line.startswith("rank-01-of-02/model.safetensors.index.json") for line in wrong(copied))


@pytest.mark.parametrize(
    "name", ["w13_weight_packed", "w2_weight_scale", "o_proj.weight", "q_a_proj.weight", "kv_b_proj.weight"]
)
def test_resealed_weights(copied: Path, tiny: Checkpoint, name: str) -> None:
    """The digests of the source give it away; where they are forged too, the source does."""
    path = copied / "rank-01-of-02" / "layer-001.safetensors"
    _, _, _, offset, size = next(entry for entry in trees.read_shard(path).entries if entry[0].endswith(name))
    data = bytearray(path.read_bytes())
    data[offset + size // 2] ^= 0x10
    path.write_bytes(data)
    trees.reseal(copied)
    said = wrong(copied)
    assert said
    assert all("layer 1" in line for line in said)
    if name.startswith("w"):  # of an expert: which file it may be, and how to know
        assert all(line.startswith("rank-*/layer-001.safetensors: layer 1, expert ") for line in said)
        assert all(line.endswith("; on which rank, verify --source tells") for line in said)
    assert any("rank 1" in line for line in wrong(copied, tiny))
    trees.forge_source_digests(copied, tiny)
    trees.reseal(copied)
    replicated = name == "q_a_proj.weight"
    assert (
        wrong(copied) == []
    ) != replicated  # two ranks that should hold the same cannot both be the source
    said = wrong(copied, tiny)
    assert any("layer 1" in line and "rank" in line for line in said)
    assert replicated or any("the kept digest of" in line for line in said)


def test_digests_of_the_source_taken_away(copied: Path) -> None:
    (copied / "source" / "digests.bin").write_bytes(bytes((copied / "source" / "digests.bin").stat().st_size))
    trees.reseal(copied)
    assert any("has no digest of" in line for line in wrong(copied))


def test_digests_of_the_source_taken_away_from_a_part(tiny: Checkpoint, tmp_path: Path) -> None:
    """Zeros are right only for what was never read."""
    from marlin_convert.pipeline.run import convert

    out = tmp_path / "out"
    convert(str(tiny.folder), out, tp=2, layers=[1], threads=2)
    assert wrong(out) == []
    kept = out / "source" / "digests.bin"
    kept.write_bytes(bytes(kept.stat().st_size))
    trees.reseal(out)
    assert any("has no digest of" in line for line in wrong(out))


@pytest.mark.parametrize(
    "name",
    ["tiktoken.model", "modeling_kimi_k25.py", "source/README.md", "source/model.safetensors.index.json"],
)
def test_small_files_are_compared_with_the_source(copied: Path, tiny: Checkpoint, name: str) -> None:
    (copied / name).write_bytes(b"{}")
    trees.reseal(copied)
    assert any(name in line for line in wrong(copied, tiny))


def test_small_file_taken_away(copied: Path, tiny: Checkpoint) -> None:
    (copied / "tiktoken.model").unlink()
    trees.reseal(
        copied,
        lambda document: document["files"].remove(
            next(f for f in document["files"] if f["path"] == "tiktoken.model")
        ),
    )
    assert any("tiktoken.model" in line for line in wrong(copied, tiny))
