"""Whole conversions of every form, order and split, against an oracle that shares no code with the
converter.
"""

from __future__ import annotations

import base64
import gzip
import itertools
import json
import shutil
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from safetensors import safe_open

import trees
from checkpoints import Checkpoint, Form, Order, expected_plain, make_small
from marlin_convert.checks.verify import verify
from marlin_convert.errors import OutputError
from marlin_convert.pipeline.convert import Report, convert
from marlin_convert.shards.reader import open_shards

SPLITS = [(1, 1), (2, 1), (4, 1), (8, 1), (8, 2), (8, 8)]
DIMS = {"layers": 2, "experts": 8, "vt_layers": 1}
PREFIX = {"k26": "language_model.", "k2-thinking": ""}
SPECIAL: dict[str, dict[str, Any]] = {
    "split": {"split_layer": True},
    "split shuffled": {"split_layer": True, "order": "shuffled", "form": "k2-thinking"},
    "I64": {"shape_dtype": "I64"},
    "padded": {"moe_intermediate": 256},
}


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Checkpoints by their options, each made once."""
    made: dict[str, Checkpoint] = {}

    def maker(**options: Any) -> Checkpoint:
        key = repr(sorted(options.items()))
        if key not in made:
            made[key] = make_small(tmp_path_factory.mktemp("made") / "checkpoint", **(DIMS | options))
        return made[key]

    return maker


def converted(checkpoint: Checkpoint, out: Path, tp: int, ep: int = 1, **options: Any) -> Report:
    return convert(str(checkpoint.folder), out, tp=tp, ep=ep, **({"threads": 2} | options))


def assert_proven(out: Path, checkpoint: Checkpoint) -> None:
    for source in (None, str(checkpoint.folder)):
        report = verify(out, source, threads=2)
        assert report.findings == []
        assert (report.proven, report.unproven) == (len(checkpoint.tensors), 0)


def assert_as_the_oracle_says(out: Path, checkpoint: Checkpoint, tp: int, ep: int) -> None:
    """Every value of every tensor of every rank, and that nothing else is there."""
    dims, prefix = checkpoint.dims, PREFIX[checkpoint.form]
    plain = {tensor.name: tensor for tensor in checkpoint.tensors.values() if tensor.expert < 0}
    for rank in range(tp):
        folder, stored = out / f"rank-{rank:02d}-of-{tp:02d}", set()
        for path in sorted(folder.glob("*.safetensors")):
            shard = trees.read_shard(path)
            for name, dtype, shape, _, size in shard.entries:
                if name.startswith("__pad__."):
                    assert (dtype, shape) == ("U8", [size])
                    assert not shard.array(name).any()
                elif ".mlp.experts." not in name:
                    expected = trees.cut(
                        expected_plain(name, plain[name].dtype, plain[name].shape), name, rank, tp
                    )
                    assert dtype == plain[name].dtype
                    np.testing.assert_array_equal(shard.array(name), expected)
                    stored.add(name)
        for layer in range(dims.first_k_dense, dims.layers):
            shard = trees.read_shard(folder / f"layer-{layer:03d}.safetensors")
            read = trees.read_experts(shard, f"{prefix}model.layers.{layer}", dims.group)
            for found, wanted in zip(read, trees.slices_of(checkpoint, layer, rank, tp, ep), strict=True):
                np.testing.assert_array_equal(found.w13_codes, wanted.w13_codes)
                np.testing.assert_array_equal(found.w13_scales, wanted.w13_scales)
                np.testing.assert_array_equal(found.w2_codes, wanted.w2_codes)
                np.testing.assert_array_equal(found.w2_scales, wanted.w2_scales)
        assert stored == {
            name for name in plain if name.startswith(f"{prefix}model.") or name == f"{prefix}lm_head.weight"
        }
    common = out / "common" / "common.safetensors"
    if checkpoint.form == "k26":
        shard = trees.read_shard(common)
        names = [entry[0] for entry in shard.entries if not entry[0].startswith("__pad__.")]
        assert sorted(names) == sorted(name for name in plain if not name.startswith(prefix))
        for name in names:
            np.testing.assert_array_equal(
                shard.array(name), expected_plain(name, plain[name].dtype, plain[name].shape)
            )
    else:
        assert not common.exists()


# Each one twice proven.


@pytest.mark.parametrize(("tp", "ep"), SPLITS)
@pytest.mark.parametrize("order", get_args(Order))
@pytest.mark.parametrize("form", get_args(Form))
def test_converts_and_is_proven(
    make: Any, tmp_path: Path, form: Form, order: Order, tp: int, ep: int
) -> None:
    checkpoint = make(form=form, order=order)
    report = converted(checkpoint, tmp_path / "out", tp, ep)
    assert (report.made, report.found) == (4 if form == "k26" else 3, 0)
    assert_proven(tmp_path / "out", checkpoint)
    if order == ("reference" if form == "k26" else "shuffled"):
        assert_as_the_oracle_says(tmp_path / "out", checkpoint, tp, ep)


@pytest.mark.parametrize("special", SPECIAL)
@pytest.mark.parametrize(("tp", "ep"), [(2, 1), (8, 1), (8, 8)])
def test_converts_special_checkpoints(make: Any, tmp_path: Path, special: str, tp: int, ep: int) -> None:
    checkpoint = make(**SPECIAL[special])
    converted(checkpoint, tmp_path / "out", tp, ep)
    assert_proven(tmp_path / "out", checkpoint)
    assert_as_the_oracle_says(tmp_path / "out", checkpoint, tp, ep)
    padding = trees.manifest_of(tmp_path / "out")["parallel"]["padding"]
    assert padding == (
        {"moe_intermediate": 32, "padded": 64} if special == "padded" and (tp, ep) == (8, 1) else None
    )


def test_order_of_the_source_changes_no_tensor(make: Any, tmp_path: Path) -> None:
    """Only what names the source differs: its id in every header, and what is kept of it."""
    found = []
    for order in get_args(Order):
        converted(make(order=order), tmp_path / order, 4)
        shards = [trees.read_shard(path) for path in sorted((tmp_path / order).glob("*/*.safetensors"))]
        found.append([(shard.entries, shard.data[shard.start :]) for shard in shards])
    assert found[0] == found[1] == found[2]


# The format's promises.


@pytest.mark.parametrize("form", get_args(Form))
@pytest.mark.parametrize(("tp", "ep"), [(2, 1), (8, 2)])
def test_files_are_as_the_format_page_says(make: Any, tmp_path: Path, form: Form, tp: int, ep: int) -> None:
    checkpoint, out = make(form=form), tmp_path / "out"
    converted(checkpoint, out, tp, ep)
    document = trees.manifest_of(out)
    moe_tp, local = tp // ep, checkpoint.dims.experts // ep
    listed = {shard["path"]: shard for shard in document["shards"]}
    assert sorted(listed) == sorted(str(path.relative_to(out)) for path in out.rglob("*.safetensors"))
    blob = (out / "digests.bin").read_bytes()
    for path, shard in listed.items():
        raw = trees.read_shard(out / path)
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
        assert position == len(raw.data) == shard["size"]
        assert [list(entry) for entry in raw.entries] == [
            [t["name"], t["dtype"], t["shape"], t["offset"], t["size"]] for t in shard["tensors"]
        ]
        real = [
            (size % 4096 == 0, size >= 4096)
            for name, _, _, _, size in raw.entries
            if not name.startswith("__pad__.") and name not in followers
        ]
        small = [large for _, large in real]
        assert small == sorted(small, reverse=True)
        folder, file = path.split("/")
        unit = file.removesuffix(".safetensors")
        layer = str(int(unit[6:])) if unit.startswith("layer-") else unit
        rank = "common" if folder == "common" else str(int(folder.split("-")[1]))
        first = 0 if rank == "common" else int(rank) // moe_tp * local
        routed = layer.isdigit() and int(layer) >= checkpoint.dims.first_k_dense
        assert raw.metadata == {
            "format": "marlin-convert",
            "format_version": "1",
            "layout": "moe_wna16_marlin.u4b8",
            "source": document["source"]["id"],
            "tp": str(tp),
            "ep": str(ep),
            "rank": rank,
            "layer": layer,
            "expert_range": f"{first}:{first + local}" if routed else "0:0",
        }
        for view in shard["fused"]:
            members = [next(entry for entry in raw.entries if entry[0] == name) for name in view["members"]]
            assert view["offset"] == members[0][3]
            assert all(before[3] + before[4] == after[3] for before, after in itertools.pairwise(members))
            assert view["shape"] == [sum(member[2][0] for member in members), *members[0][2][1:]]
            assert {member[1] for member in members} == {view["dtype"]}
        assert trees.digest(raw.data[: raw.start]) == shard["header"]
        for entry in shard["tensors"]:
            stored = raw.data[entry["offset"] : entry["offset"] + entry["size"]]
            if "experts" in entry:
                one = entry["size"] // local
                parts = b"".join(
                    bytes.fromhex(trees.digest(stored[i * one : (i + 1) * one])) for i in range(local)
                )
                assert blob[entry["experts"] : entry["experts"] + 16 * local] == parts
                assert trees.digest(parts) == entry["digest"]
            else:
                assert trees.digest(stored) == entry["digest"]
        assert (
            trees.digest(bytes.fromhex(shard["header"] + "".join(t["digest"] for t in shard["tensors"])))
            == shard["digest"]
        )


def test_fused_views_are_those_of_the_engine(make: Any, tmp_path: Path) -> None:
    converted(make(), tmp_path / "out", 2)
    views = {
        view["name"].removeprefix("language_model.model.layers."): view["shape"]
        for s in trees.manifest_of(tmp_path / "out")["shards"]
        if s["rank"] == 1
        for view in s["fused"]
    }
    assert views == {
        "0.self_attn.fused_qkv_a_proj_with_mqa.weight": [64 + 80, 256],
        "0.mlp.gate_up_proj.weight": [512, 256],
        "1.self_attn.fused_qkv_a_proj_with_mqa.weight": [64 + 80, 256],
        "1.mlp.shared_experts.gate_up_proj.weight": [512, 256],
    }
    with open_shards(tmp_path / "out", 1) as shards:
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


def test_indexes_list_what_is_beside_them(make: Any, tmp_path: Path) -> None:
    out = tmp_path / "out"
    converted(make(), out, 4)
    for folder in (*out.glob("rank-*"), out / "common"):
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        sizes, places = 0, {}
        for path in folder.glob("*.safetensors"):
            for name, _, _, _, size in trees.read_shard(path).entries:
                if not name.startswith("__pad__."):
                    sizes += size
                    places[name] = path.name
        assert index == {"metadata": {"total_size": sizes}, "weight_map": places}


def test_all_files_open_with_the_library(make: Any, tmp_path: Path) -> None:
    converted(make(), tmp_path / "out", 4, 2)
    torch = pytest.importorskip("torch", reason="numpy has no bf16 for the library to read")
    opened = 0
    for path in (tmp_path / "out").rglob("*.safetensors"):
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


def test_same_offsets_on_all_ranks(make: Any, tmp_path: Path) -> None:
    converted(make(), tmp_path / "out", 8, 2)
    for unit in ("layer-000", "layer-001", "top"):
        shards = [
            trees.read_shard(path) for path in sorted((tmp_path / "out").glob(f"rank-*/{unit}.safetensors"))
        ]
        assert len(shards) == 8
        assert all(shard.entries == shards[0].entries for shard in shards)


def test_small_files(make: Any, tmp_path: Path) -> None:
    checkpoint, out = make(), tmp_path / "out"
    converted(checkpoint, out, 2)
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


def test_digests_of_the_source_are_kept(make: Any, tmp_path: Path) -> None:
    checkpoint, out = make(order="shuffled"), tmp_path / "out"
    converted(checkpoint, out, 2)
    kept = (out / "source" / "digests.bin").read_bytes()
    expected = b""
    for name in sorted(checkpoint.files):
        raw = trees.read_shard(checkpoint.folder / name)
        expected += b"".join(
            bytes.fromhex(trees.digest(raw.data[offset : offset + size]))
            for _, _, _, offset, size in raw.entries
        )
    assert kept == expected


def test_manifest_says_nothing_of_when_and_where(make: Any, tmp_path: Path) -> None:
    checkpoint = make()
    converted(checkpoint, tmp_path / "out", 2)
    text = (tmp_path / "out" / "manifest.json").read_text()
    assert str(tmp_path) not in text
    assert str(checkpoint.folder) not in text
    document = json.loads(text)
    assert document["digest"] == trees.digest(text.replace(document["digest"], "0" * 32, 1).encode())
    assert document["model"]["softmax_scale"] == pytest.approx(
        (32 + 16) ** -0.5 * (0.1 * np.log(64) + 1) ** 2
    )


# The same bytes, however they are made.

WAYS: dict[str, dict[str, Any]] = {
    "one thread": {"threads": 1},
    "five threads": {"threads": 5},
    "little memory": {"threads": 3, "memory": 3 << 20},
    "buffered": {"direct_io": False},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("special", ["plain", "split shuffled", "padded"])
def test_same_bytes_whatever_the_machine(make: Any, tmp_path: Path, way: str, special: str) -> None:
    checkpoint = make(**SPECIAL.get(special, {}))
    converted(checkpoint, tmp_path / "usual", 8)
    converted(checkpoint, tmp_path / "other", 8, **WAYS[way])
    assert trees.tree(tmp_path / "usual") == trees.tree(tmp_path / "other")


def test_unchecked_conversion_differs_only_in_saying_so(make: Any, tmp_path: Path) -> None:
    for verify_option in ("exact", "none"):
        converted(make(), tmp_path / verify_option, 2, verify=verify_option)
    exact, none = (trees.tree(tmp_path / option) for option in ("exact", "none"))
    card, changed = none["README.md"], json.loads(none["manifest.json"])
    assert changed["checks"] == "none"
    assert b"compared with the source" not in card
    assert {path for path in exact if exact[path] != none[path]} == {"README.md", "manifest.json"}
    shutil.copy(tmp_path / "exact" / "README.md", tmp_path / "none" / "README.md")
    trees.reseal(tmp_path / "none", lambda document: document.update(checks="exact"))
    assert trees.tree(tmp_path / "none") == exact


def test_a_copied_source_gives_the_same(make: Any, tmp_path: Path) -> None:
    checkpoint = make()
    shutil.copytree(checkpoint.folder, tmp_path / "copy")
    converted(checkpoint, tmp_path / "one", 2)
    convert(str(tmp_path / "copy"), tmp_path / "two", tp=2)
    assert trees.tree(tmp_path / "one") == trees.tree(tmp_path / "two")


# Parts of a conversion.


def test_some_layers(make: Any, tmp_path: Path) -> None:
    checkpoint, out = make(layers=3), tmp_path / "out"
    report = converted(checkpoint, out, 2, layers=[2, 0])
    assert report.made == 2
    document = trees.manifest_of(out)
    assert (document["layers"], document["ranks"], document["complete"]) == ([0, 2], [0, 1], False)
    assert sorted(path.name for path in (out / "rank-00-of-02").iterdir()) == [
        "layer-000.safetensors",
        "layer-002.safetensors",
        "model.safetensors.index.json",
    ]
    for source in (None, str(checkpoint.folder)):
        found = verify(out, source)
        assert found.findings == []
        assert (found.proven, found.unproven) == (
            sum(tensor.layer in (0, 2) for tensor in checkpoint.tensors.values()),
            0,
        )
    kept, at = (out / "source" / "digests.bin").read_bytes(), 0
    for name in sorted(checkpoint.files):
        for tensor in checkpoint.files[name]:
            assert (kept[at : at + 16] == bytes(16)) == (tensor.layer not in (0, 2))
            at += 16


def test_some_ranks(make: Any, tmp_path: Path) -> None:
    """Slices of ranks that are not there cannot be proven without the source; with it they are."""
    checkpoint, out = make(), tmp_path / "out"
    converted(checkpoint, out, 4, ranks=[1, 2])
    converted(checkpoint, tmp_path / "all", 4)
    document = trees.manifest_of(out)
    assert (document["ranks"], document["complete"]) == ([1, 2], False)
    whole, part = trees.tree(tmp_path / "all"), trees.tree(out)
    shards = [path for path in part if path.endswith(".safetensors")]
    assert {path.split("/")[0] for path in shards} == {"rank-01-of-04", "rank-02-of-04", "common"}
    assert all(part[path] == whole[path] for path in shards)
    alone, against = verify(out), verify(out, str(checkpoint.folder))
    assert alone.findings == against.findings == []
    cut = sum(
        tensor.expert >= 0 or tensor.name.endswith(trees.ROWS + trees.COLUMNS)
        for tensor in checkpoint.tensors.values()
    )
    assert (alone.proven, alone.unproven) == (len(checkpoint.tensors) - cut, cut)
    assert (against.proven, against.unproven) == (len(checkpoint.tensors), 0)


def test_ranks_of_one_expert_group_prove_their_experts_alone(make: Any, tmp_path: Path) -> None:
    checkpoint, out = make(), tmp_path / "out"
    converted(checkpoint, out, 8, 4, ranks=[2, 3])
    report = verify(out)
    assert report.findings == []
    assert report.proven >= 2 * 9
    stored = trees.read_experts(
        trees.read_shard(out / "rank-03-of-08" / "layer-001.safetensors"), "language_model.model.layers.1", 32
    )
    for found, wanted in zip(stored, trees.slices_of(checkpoint, 1, 3, 8, 4), strict=True):
        np.testing.assert_array_equal(found.w13_codes, wanted.w13_codes)
        np.testing.assert_array_equal(found.w2_scales, wanted.w2_scales)


# Continuing.


def test_running_again_makes_nothing(make: Any, tmp_path: Path) -> None:
    checkpoint, out = make(), tmp_path / "out"
    converted(checkpoint, out, 2)
    before = {path: (path.stat().st_mtime_ns, path.stat().st_ino) for path in out.rglob("*")}
    report = converted(checkpoint, out, 2)
    assert (report.made, report.found) == (0, 4)
    assert before == {path: (path.stat().st_mtime_ns, path.stat().st_ino) for path in out.rglob("*")}


def test_progress_ends_at_its_total(make: Any, tmp_path: Path) -> None:
    checkpoint, seen = make(), []
    converted(checkpoint, tmp_path / "out", 2, progress=lambda done, total: seen.append((done, total)))
    assert {total for _, total in seen} == {checkpoint.nbytes}
    assert seen[0][0] == 0
    assert max(done for done, _ in seen) == checkpoint.nbytes
    assert all(done <= total for done, total in seen)


def test_overwrite_leaves_nothing_of_the_old(make: Any, tmp_path: Path) -> None:
    checkpoint, out = make(), tmp_path / "out"
    converted(checkpoint, out, 8)
    converted(checkpoint, out, 2, overwrite=True)
    converted(checkpoint, tmp_path / "fresh", 2)
    assert trees.tree(out) == trees.tree(tmp_path / "fresh")
    assert {path.name for path in out.iterdir() if path.is_dir()} == {
        "common",
        "source",
        "rank-00-of-02",
        "rank-01-of-02",
    }


def test_a_rank_that_is_not_there_cannot_be_opened(make: Any, tmp_path: Path) -> None:
    converted(make(), tmp_path / "out", 2)
    (tmp_path / "out" / "rank-01-of-02" / "top.safetensors").unlink()
    with (
        open_shards(tmp_path / "out", 1) as shards,
        pytest.raises(OutputError, match=r"rank-01-of-02/top.safetensors"),
    ):
        shards["language_model.lm_head.weight"]


def test_records_hold_what_the_manifest_merges(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record of a unit, before it goes: digests that are those of the files."""
    from marlin_convert.pipeline.records import WorkFolder

    kept = tmp_path / "kept"
    monkeypatch.setattr(WorkFolder, "remove", lambda self: shutil.move(self.folder, kept))
    out = tmp_path / "out"
    converted(make(), out, 2)
    assert sorted(path.name for path in (kept / "units").iterdir()) == [
        "common.json",
        "layer-000.json",
        "layer-001.json",
        "top.json",
    ]
    outer = json.loads((kept / "units" / "layer-001.json").read_text())
    assert outer["digest"] == trees.digest(outer["unit"].encode())
    unit = json.loads(outer["unit"])
    shards = {
        shard["rank"]: shard for shard in trees.manifest_of(out)["shards"] if shard["unit"] == "layer-001"
    }
    assert {file["rank"]: file["tensors"] for file in unit["files"]} == {
        rank: {tensor["name"]: tensor["digest"] for tensor in shard["tensors"]}
        for rank, shard in shards.items()
    }
    blob = (out / "digests.bin").read_bytes()
    for rank, name, data in unit["experts"]:
        at = next(tensor["experts"] for tensor in shards[rank]["tensors"] if tensor["name"] == name)
        assert base64.b64decode(data) == blob[at : at + 16 * 8]
