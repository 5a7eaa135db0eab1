"""A second family, whose module is in the tests: converted, proven and looked at, with nothing else edited.
Its heads of keys and values are fewer than the ranks, so that some ranks hold the same ones.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import trees
from checkpoints import Checkpoint, expected_tensor
from gqa import HEAD, make_config, make_gqa, registered
from marlin_convert.checkpoint.source import open_source
from marlin_convert.checks.verify import verify
from marlin_convert.errors import SourceError, UsageError
from marlin_convert.models.family import parse_config
from marlin_convert.pipeline.run import convert
from marlin_convert.planning.output_plan import Options, plan_output
from marlin_convert.shards.reader import open_shards

ROOT = Path(__file__).parents[2]
#: the head of keys and values of each rank, of two
KV_HEADS: dict[int, list[tuple[int, ...]]] = {
    1: [(0, 1)],
    2: [(0,), (1,)],
    8: [(0,), (0,), (0,), (0,), (1,), (1,), (1,), (1,)],
}
#: how many of the eight heads of queries a rank has
Q_HEADS = {1: 8, 2: 4, 8: 1}
SPLITS = [(1, 1), (2, 1), (2, 2), (8, 1), (8, 2)]
K = "model.layers.1.self_attn.k_proj.weight"
V = "model.layers.0.self_attn.v_proj.weight"


@pytest.fixture(autouse=True, scope="module")
def second_family() -> Iterator[None]:
    with registered():
        yield


@pytest.fixture(scope="module")
def grouped(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """Eight heads, two of keys and values, four experts. Not to be changed: copy it."""
    return make_gqa(tmp_path_factory.mktemp("grouped") / "checkpoint")


@pytest.fixture(scope="module")
def converted(grouped: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, int], Path]:
    """Conversions of it by tp and ep. Not to be changed: copy them."""
    made: dict[tuple[int, int], Path] = {}

    def get(tp: int, ep: int) -> Path:
        if (tp, ep) not in made:
            made[tp, ep] = tmp_path_factory.mktemp("out") / f"tp{tp}-ep{ep}"
            convert(str(grouped.folder), made[tp, ep], tp=tp, ep=ep, threads=2)
        return made[tp, ep]

    return get


@pytest.fixture
def copied(converted: Callable[[int, int], Path], tmp_path: Path) -> Path:
    """A copy of the one for tp 8, to spoil."""
    return Path(shutil.copytree(converted(8, 1), tmp_path / "out"))


def heads(array: NDArray[Any], wanted: tuple[int, ...]) -> NDArray[Any]:
    """The rows of some heads."""
    return np.concatenate([array[HEAD * head : HEAD * (head + 1)] for head in wanted])


def share_of(name: str, whole: NDArray[Any], rank: int, tp: int) -> NDArray[Any]:
    """What a rank must hold, head by head."""
    queries = tuple(range(rank * Q_HEADS[tp], (rank + 1) * Q_HEADS[tp]))
    if name.endswith((".k_proj.weight", ".v_proj.weight")):
        return heads(whole, KV_HEADS[tp][rank])
    if name.endswith(".q_proj.weight"):
        return heads(whole, queries)
    if name.endswith(".o_proj.weight"):
        return heads(whole.T, queries).T
    return trees.cut(whole, name, rank, tp)


@pytest.mark.parametrize(("tp", "ep"), SPLITS)
def test_every_value_is_where_its_head_and_its_expert_are(
    converted: Callable[[int, int], Path], grouped: Checkpoint, tp: int, ep: int
) -> None:
    plain = {tensor.name: tensor for tensor in grouped.tensors.values() if tensor.expert < 0}
    for rank in range(tp):
        folder, stored = converted(tp, ep) / f"rank-{rank:02d}-of-{tp:02d}", set()
        for path in sorted(folder.glob("*.safetensors")):
            shard = trees.read_shard(path)
            for name, dtype, _, _, _ in shard.entries:
                if name.startswith("__pad__.") or ".mlp.experts." in name:
                    continue
                whole = expected_tensor(plain[name], grouped.dims)
                assert dtype == "BF16"
                np.testing.assert_array_equal(
                    shard.array(name), share_of(name, whole, rank, tp), err_msg=name
                )
                stored.add(name)
        assert stored == plain.keys()
        read = trees.read_experts(trees.read_shard(folder / "layer-001.safetensors"), "model.layers.1", 32)
        for found, wanted in zip(read, trees.slices_of(grouped, 1, rank, tp, ep), strict=True):
            np.testing.assert_array_equal(found.w13_codes, wanted.w13_codes)
            np.testing.assert_array_equal(found.w13_scales, wanted.w13_scales)
            np.testing.assert_array_equal(found.w2_codes, wanted.w2_codes)
            np.testing.assert_array_equal(found.w2_scales, wanted.w2_scales)


@pytest.mark.parametrize(("tp", "ep"), SPLITS)
def test_it_is_proven_with_and_without_the_source(
    converted: Callable[[int, int], Path], grouped: Checkpoint, tp: int, ep: int
) -> None:
    for source in (None, str(grouped.folder)):
        report = verify(converted(tp, ep), source, threads=2)
        assert [str(finding) for finding in report.findings] == []
        assert report.unproven == 0
        assert report.proven == len(grouped.tensors)


def test_the_manifest_says_on_how_many_ranks_a_slice_is(converted: Callable[[int, int], Path]) -> None:
    for tp, replicas in ((1, None), (2, None), (8, 4)):
        document = trees.manifest_of(converted(tp, 1))
        origins = {origin["tensor"]: origin for unit in document["units"] for origin in unit["tensors"]}
        expected = {"tensor": K, "rule": "column", "axis": 0, "parts": "tp", "from": [K]}
        assert origins[K] == expected | ({} if replicas is None else {"replicas": replicas})
        several = {name.split(".")[-2] for name, origin in origins.items() if "replicas" in origin}
        assert several == (set() if replicas is None else {"k_proj", "v_proj"})
        assert document["model"]["softmax_scale"] == pytest.approx(32**-0.5)
        assert document["model"]["num_key_value_heads"] == 2
        assert not any(unit["name"] == "common" for unit in document["units"])


def test_the_digest_of_the_rules_is_as_the_format_page_says(
    converted: Callable[[int, int], Path],
) -> None:
    rules = [
        {
            "dtype": list(rule.dtype),
            "fuse": rule.fuse,
            "kind": rule.kind,
            "name": rule.name,
            "optional": rule.optional,
            "scope": rule.scope,
            "shape": None if rule.shape is None else list(rule.shape),
            "shared": rule.shared,
            "unit": rule.unit,
        }
        for rule in parse_config(make_config()).rules
    ]
    raw = json.dumps(rules, separators=(",", ":")).encode("ascii")
    assert trees.manifest_of(converted(2, 1))["parallel"]["rules"] == trees.digest(raw)


def test_the_manifest_fits_its_schema(converted: Callable[[int, int], Path]) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads((ROOT / "schemas" / "manifest.schema.json").read_text())
    jsonschema.Draft202012Validator(schema).validate(trees.manifest_of(converted(8, 2)))


@pytest.mark.parametrize(("tp", "rows"), [(1, 256 + 64 + 64), (2, 128 + 32 + 32), (8, 32 + 32 + 32)])
def test_queries_keys_and_values_are_one_view(
    converted: Callable[[int, int], Path], grouped: Checkpoint, tp: int, rows: int
) -> None:
    rank = tp - 1
    shards = open_shards(converted(tp, 1), rank=rank)
    view = shards["model.layers.1.self_attn.qkv_proj.weight"]
    assert view.shape == (rows, 256)
    names = [f"model.layers.1.self_attn.{which}_proj.weight" for which in "qkv"]
    parts = [share_of(name, expected_tensor(grouped.tensors[name], grouped.dims), rank, tp) for name in names]
    np.testing.assert_array_equal(view, np.concatenate(parts))


def test_inspect_and_card(
    converted: Callable[[int, int], Path], command: Callable[..., tuple[int, str, str]]
) -> None:
    out = converted(8, 1)
    code, said, _ = command("inspect", out)
    assert code == 0
    assert "layer-001" in said
    code, said, _ = command("inspect", out, "--rank", 3, "--tensor", K)
    assert code == 0
    assert "shape: 32x256" in said
    assert "# Grouped for 8 GPUs, Marlin layout" in (out / "README.md").read_text()


def test_shards_that_are_gone_are_made_again(converted: Callable[[int, int], Path], copied: Path) -> None:
    for rank in (2, 5):
        (copied / f"rank-{rank:02d}-of-08" / "layer-001.safetensors").unlink()
    source = copied.parent / "checkpoint"
    make_gqa(source)
    convert(str(source), copied, tp=8, threads=2)
    assert trees.tree(copied) == trees.tree(converted(8, 1))


# Mistakes that are made on purpose; digests fit what is there.


def edit(out: Path, name: str, change: Callable[[dict[int, NDArray[Any]]], None]) -> None:
    """Change a tensor's slices, by rank, in all shards, and make every digest fit."""
    document, slices, places = trees.manifest_of(out), {}, {}
    for shard in document["shards"]:
        for tensor in shard["tensors"]:
            if tensor["name"] == name:
                data = np.fromfile(out / shard["path"], np.uint8)
                slices[shard["rank"]] = data[tensor["offset"] : tensor["offset"] + tensor["size"]]
                places[shard["rank"]] = (out / shard["path"], data)
    change(slices)
    for path, data in places.values():
        data.tofile(path)
    trees.reseal(out)


def exchange(*pairs: tuple[int, int]) -> Callable[[dict[int, NDArray[Any]]], None]:
    """Exchange the slices of ranks."""

    def change(slices: dict[int, NDArray[Any]]) -> None:
        for one, two in pairs:
            slices[one][:], slices[two][:] = slices[two].copy(), slices[one].copy()

    return change


def flip(*ranks: int) -> Callable[[dict[int, NDArray[Any]]], None]:
    """Change one bit of the slices of ranks."""

    def change(slices: dict[int, NDArray[Any]]) -> None:
        for rank in ranks:
            slices[rank][777] ^= 1

    return change


def wrong(out: Path, source: Checkpoint | None = None) -> list[str]:
    """What verify says."""
    report = verify(out, None if source is None else str(source.folder), threads=2)
    return [str(finding) for finding in report.findings]


def ranks_named(said: list[str]) -> set[int]:
    """Ranks that findings name."""
    return {int(found) for line in said for found in re.findall(r"rank[ -](\d+)", line.split(": ")[0])}


@pytest.mark.parametrize("name", [K, V])
@pytest.mark.parametrize("pairs", [((0, 4),), ((1, 5),), ((0, 4), (1, 5), (2, 6), (3, 7))])
def test_heads_exchanged_between_ranks(
    copied: Path, grouped: Checkpoint, name: str, pairs: tuple[tuple[int, int], ...]
) -> None:
    """Found by the digests alone, and with the source each rank is named."""
    edit(copied, name, exchange(*pairs))
    said = wrong(copied)
    assert said
    assert all(name in line for line in said)
    said = wrong(copied, grouped)
    assert ranks_named(said) == {rank for pair in pairs for rank in pair}


@pytest.mark.parametrize("rank", [0, 2, 3, 4, 7])
def test_one_rank_that_differs_from_those_with_the_same_slice(
    copied: Path, grouped: Checkpoint, rank: int
) -> None:
    edit(copied, K, flip(rank))
    said = wrong(copied)
    first = rank // 4 * 4
    if rank == first:
        assert any("put together from all ranks, differs from the source" in line for line in said)
        assert ranks_named([line for line in said if "the same slice" in line]) >= {
            first + 1,
            first + 2,
            first + 3,
        }
    else:
        assert len(said) == 1
        assert f"differs from what rank {first} has, and must be the same slice" in said[0]
        assert ranks_named(said) == {rank}
    assert ranks_named(wrong(copied, grouped)) == {rank}


def test_the_same_mistake_on_all_ranks_of_a_slice(copied: Path, grouped: Checkpoint) -> None:
    """No rank differs from another, but the source does; also where its kept digest is forged."""
    edit(copied, K, flip(4, 5, 6, 7))
    assert any("put together from all ranks, differs from the source" in line for line in wrong(copied))
    trees.reseal(copied)
    assert ranks_named(wrong(copied, grouped)) == {4, 5, 6, 7}


def test_damage_without_new_digests(copied: Path) -> None:
    (shard,) = [s for s in trees.manifest_of(copied)["shards"] if s["rank"] == 6 and s["unit"] == "layer-001"]
    (tensor,) = [tensor for tensor in shard["tensors"] if tensor["name"] == K]
    with (copied / shard["path"]).open("r+b") as file:
        file.seek(tensor["offset"] + 100)
        byte = file.read(1)
        file.seek(tensor["offset"] + 100)
        file.write(bytes([byte[0] ^ 1]))
    (line,) = wrong(copied)
    assert K in line
    assert "do not match their digest" in line
    assert "rank 6" in line


@pytest.mark.parametrize(
    "change",
    [
        {"replicas": 2},
        {"replicas": 8},
        {"replicas": 1},
        {"rule": "replicate", "axis": None, "parts": None},
    ],
)
def test_a_manifest_that_says_otherwise(copied: Path, change: dict[str, Any]) -> None:
    def forge(document: dict[str, Any]) -> None:
        for unit in document["units"]:
            for origin in unit["tensors"]:
                if origin["tensor"] == K:
                    origin.update(change)

    trees.reseal(copied, forge)
    assert any(f"says of {K} what the format does not" in line for line in wrong(copied))


# Parts, refusals, and the rest of the package.


def test_a_part_with_one_rank_of_each_head_is_proven_as_far_as_it_goes(
    grouped: Checkpoint, tmp_path: Path
) -> None:
    out = tmp_path / "part"
    convert(str(grouped.folder), out, tp=8, ranks=[1, 6], layers=[0], threads=2)
    report = verify(out, threads=2)
    assert [str(finding) for finding in report.findings] == []
    # norms, and keys and values, of which both slices are here; not queries, output, gate, up and down
    assert (report.proven, report.unproven) == (4 + 2, 2 + 3)
    edit(out, V, exchange((1, 6)))
    assert wrong(out)


@pytest.mark.parametrize(
    ("numbers", "tp", "message"),
    [
        (
            {"heads": 12, "kv_heads": 4, "experts": 6},
            6,
            "--tp 6 does not divide model.layers.0.self_attn.k_proj.weight: 4 heads of 32; choose a tp that"
            " does, or a multiple of 4; with --ep 1, --tp 1, 2, 4 would do",
        ),
        (
            {"heads": 8, "kv_heads": 2, "experts": 16},
            16,
            "--tp 16 does not divide model.layers.0.self_attn.q_proj.weight: 8 heads of 32; choose a tp that"
            " does; with --tp 16 --ep 16, --attn-tp 1, 2, 4, 8 would do",
        ),
    ],
)
def test_heads_that_cannot_be_shared_out(
    tmp_path: Path, numbers: dict[str, int], tp: int, message: str
) -> None:
    source = open_source(str(make_gqa(tmp_path / "source", **numbers).folder))
    with pytest.raises(UsageError) as caught:
        plan_output(source, Options(tp, tp))
    assert str(caught.value) == message


@pytest.mark.parametrize("name", [K, "model.layers.0.self_attn.q_norm.weight", "model.norm.weight"])
def test_a_missing_tensor_is_refused(grouped: Checkpoint, tmp_path: Path, name: str) -> None:
    folder = Path(shutil.copytree(grouped.folder, tmp_path / "source"))
    index, other = folder / "model.safetensors.index.json", name.replace("weight", "weighs")
    document = json.loads(index.read_text())
    document["weight_map"][other] = document["weight_map"].pop(name)
    index.write_text(json.dumps(document))
    path = folder / document["weight_map"][other]
    path.write_bytes(path.read_bytes().replace(name.encode(), other.encode(), 1))
    with pytest.raises(SourceError, match=f"{re.escape(name)} is missing"):
        plan_output(open_source(str(folder)), Options(1))


def test_an_unknown_architecture_lists_those_that_are_known() -> None:
    with pytest.raises(SourceError) as caught:
        parse_config(make_config() | {"architectures": ["LlamaForCausalLM"]})
    assert str(caught.value) == (
        "config.json: architectures ['LlamaForCausalLM'] is none of KimiK25ForConditionalGeneration,"
        " DeepseekV3ForCausalLM, Qwen3MoeForCausalLM; only the Kimi-K2 and Grouped families are converted"
    )


def test_a_family_cannot_take_anothers_architecture() -> None:
    from gqa import FAMILY
    from marlin_convert.models.family import register

    with pytest.raises(ValueError, match="Qwen3MoeForCausalLM is an architecture of Grouped"):
        register(FAMILY)


def test_nothing_outside_models_knows_a_family() -> None:
    """But for two sentences that say what the program is for."""
    sentences = {"__init__.py", "cli/__init__.py"}
    package = ROOT / "convert" / "marlin_convert"
    for path in package.rglob("*.py"):
        place = path.relative_to(package)
        if place.parts[0] == "models":
            continue
        for line in path.read_text().splitlines():
            if str(place) in sentences and line.strip().startswith('"""Kimi-K2 '):
                continue
            assert not re.search(
                r"q_lora|kv_a|KimiK25|Kimi|self_attn|(?<!fused_)shared_experts|vision_tower", line
            ), f"{place}: {line}"
