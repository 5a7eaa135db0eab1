"""What differs between two conversions, to the expert: planted differences are named, and nothing else."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

import trees
from checkpoints import Checkpoint, make_small
from marlin_convert import convert, diff
from marlin_convert.checkpoint.source import open_source
from marlin_convert.documents.results import DifferingPart
from marlin_convert.documents.schemas import schema
from marlin_convert.errors import OutputError, UsageError

EXPERTS = "language_model.model.layers.1.mlp.experts"
NORM = "language_model.model.norm.weight"
SHARD = "rank-01-of-02/layer-001.safetensors"

Whole = Callable[..., Path]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return make_small(tmp_path_factory.mktemp("compare") / "checkpoint", layers=2, experts=4)


@pytest.fixture(scope="module")
def whole(source: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    place = tmp_path_factory.mktemp("whole")

    def made(tp: int, ep: int, attn_tp: int | None = None) -> Path:
        out = place / f"{tp}-{ep}-{attn_tp}"
        if not out.exists():
            convert(source.folder, out, tp=tp, ep=ep, attn_tp=attn_tp)
        return out

    return made


def changed(source: Checkpoint, folder: Path, *names: str) -> Path:
    """A copy of the source in which the last byte of these tensors is another."""
    copy = shutil.copytree(source.folder, folder / "changed")
    opened = open_source(copy)
    for name in names:
        file, entry = opened.tensors[name]
        data = bytearray((copy / file).read_bytes())
        data[entry.offset + entry.size - 1] ^= 1
        (copy / file).write_bytes(data)
    return copy


def test_the_same(whole: Whole, tmp_path: Path) -> None:
    """A copy, and other splits of the same source."""
    copy = shutil.copytree(whole(2, 1), tmp_path / "copy")
    found = diff(whole(2, 1), copy)
    assert (bool(found), found.by, found.parts) == (True, "shards", ())
    for other in (whole(2, 2), whole(2, 1, 1), whole(1, 1)):
        found = diff(whole(2, 1), other)
        assert (bool(found), found.by, found.parts) == (True, "source tensors", ())


@pytest.mark.parametrize("ep", [1, 2])
def test_each_differing_expert_and_tensor_is_named(
    source: Checkpoint, whole: Whole, tmp_path: Path, ep: int
) -> None:
    """The last byte of down_proj's packed words is of the last slice, a norm is on every rank."""
    names = (f"{EXPERTS}.1.down_proj.weight_packed", f"{EXPERTS}.3.down_proj.weight_packed", NORM)
    out = tmp_path / "out"
    convert(changed(source, tmp_path, *names), out, tp=2, ep=ep)
    parts = diff(whole(2, ep), out).parts
    w2, layer = f"{EXPERTS}.w2_weight_packed", "layer-001.safetensors"
    stacked = (
        [DifferingPart(f"rank-01-of-02/{layer}", "differs", w2, (1, 3))]
        if ep == 1
        else [DifferingPart(f"rank-0{e // 2}-of-02/{layer}", "differs", w2, (e,)) for e in (1, 3)]
    )
    norms = [DifferingPart(f"rank-0{rank}-of-02/top.safetensors", "differs", NORM) for rank in (0, 1)]
    shards = [part for part in parts if part.path.endswith(".safetensors")]
    assert sorted(shards, key=str) == sorted(stacked + norms, key=str)
    documents = {part.path: part.keys for part in parts if part not in shards}
    keys = documents.pop("manifest.json")
    assert keys is not None
    assert set(keys) <= {"source.id", "source.files"}
    assert {"source/digests.bin"} <= documents.keys() <= {"README.md", "source/digests.bin"}


def test_other_splits_are_compared_by_their_sources(source: Checkpoint, whole: Whole, tmp_path: Path) -> None:
    name = f"{EXPERTS}.1.down_proj.weight_packed"
    out = tmp_path / "out"
    convert(changed(source, tmp_path, name), out, tp=1)
    found = diff(whole(2, 1), out)
    assert (found.by, found.parts) == ("source tensors", (DifferingPart("source", "differs", name),))
    assert found.compared == len(source.tensors)


def test_parts_of_one_split(source: Checkpoint, whole: Whole, tmp_path: Path) -> None:
    """What only one has is named, in both directions; what both have is the same, wherever in digests.bin the
    digests of its experts are.
    """
    out = tmp_path / "out"
    convert(source.folder, out, tp=2, ranks=[1])
    missing = {f"rank-00-of-02/{name}.safetensors" for name in ("layer-000", "layer-001", "top")}
    for one, other, what in ((whole(2, 1), out, "first"), (out, whole(2, 1), "second")):
        parts = diff(one, other).parts
        only = {part.path for part in parts if part.what == f"only in the {what}"}
        assert {path for path in only if path.endswith(".safetensors")} == missing
        assert {part for part in parts if part.what == "differs"} == {
            DifferingPart("README.md", "differs"),
            DifferingPart("manifest.json", "differs", keys=("complete", "ranks")),
        }


def forged(whole: Path, out: Path, change: Callable[[Path], object]) -> Path:
    """A copy in which every digest fits what is there after the change."""
    shutil.copytree(whole, out)
    change(out)
    trees.reseal(out)
    return out


def test_what_no_tensor_shows_is_a_difference(whole: Whole, tmp_path: Path) -> None:
    """A header of another rank, and a manifest that says something else of the same tensors."""

    def other_rank(header: trees.Document) -> None:
        header["__metadata__"]["rank"] = "0"

    out = forged(whole(2, 1), tmp_path / "a", lambda out: trees.rewrite_header(out / SHARD, other_rank))
    assert diff(whole(2, 1), out).parts == (DifferingPart(SHARD, "differs"),)

    def other_facts(document: trees.Document) -> None:
        document["model"]["softmax_scale"] = document["source"]["tensors"] = 1
        document["units"][1]["tensors"][0]["rule"] = "row"

    out = forged(whole(2, 1), tmp_path / "b", lambda out: rewrite_manifest(out, other_facts))
    keys = ("model", "source.tensors", "units")
    assert diff(whole(2, 1), out).parts == (DifferingPart("manifest.json", "differs", keys=keys),)


def rewrite_manifest(out: Path, change: Callable[[trees.Document], object]) -> None:
    document = trees.manifest_of(out)
    change(document)
    (out / "manifest.json").write_bytes(trees.seal(document))


def test_a_rank_manifest_that_says_something_else_is_a_difference(whole: Whole, tmp_path: Path) -> None:
    """Loaders read it in place of the whole one."""
    name, out = "rank-01-of-02/manifest.json", shutil.copytree(whole(2, 1), tmp_path / "out")

    def another(document: trees.Document) -> None:
        next(file for file in document["files"] if file["path"] == name)["digest"] = "0" * 32

    rewrite_manifest(out, another)
    assert diff(whole(2, 1), out).parts == (DifferingPart(name, "differs"),)


def test_another_tokenizer_is_another_model(whole: Whole, tmp_path: Path) -> None:
    """In the same split and in another."""
    out = forged(whole(2, 1), tmp_path / "out", lambda out: (out / "tiktoken.model").write_bytes(b"other"))
    for base in (whole(2, 1), whole(2, 2)):
        assert diff(base, out).parts == (DifferingPart("tiktoken.model", "differs"),)


def stacked(document: trees.Document) -> trees.Document:
    """The first stacked tensor of a shard."""
    shard = next(shard for shard in document["shards"] if shard["path"] == SHARD)
    found: trees.Document = next(tensor for tensor in shard["tensors"] if "experts" in tensor)
    return found


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda d: d["shards"][0].update(digest="0" * 32), "rank-00-of-02/layer-000.safetensors"),
        (
            lambda d: d["shards"][0]["tensors"][0].update(digest="0" * 32),
            "rank-00-of-02/layer-000.safetensors",
        ),
        (lambda d: stacked(d).update(experts=0), f"{EXPERTS}.w13_weight_packed"),
        (lambda d: stacked(d).update(experts=1 << 40), f"{EXPERTS}.w13_weight_packed"),
        (lambda d: stacked(d).update(shape=[1 << 40, 1, 1]), f"{EXPERTS}.w13_weight_packed"),
        (lambda d: stacked(d).update(shape=[]), f"{EXPERTS}.w13_weight_packed"),
    ],
)
def test_digests_that_do_not_fit_each_other_prove_nothing(
    whole: Whole, tmp_path: Path, change: Callable[[trees.Document], object], name: str
) -> None:
    out = shutil.copytree(whole(2, 1), tmp_path / "out")
    rewrite_manifest(out, change)
    for pair in ((whole(2, 1), out), (out, whole(2, 1)), (out, out)):
        with pytest.raises(OutputError, match=f"its digest of {re.escape(name)} is not that of the digests"):
            diff(*pair)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda d: d["shards"].append(d["shards"][0] | {"digest": "0" * 32}), r"\S+ is listed twice"),
        (lambda d: d["files"].append(d["files"][0] | {"digest": "0" * 32}), r"\S+ is listed twice"),
        (lambda d: d["shards"][0]["tensors"].append(d["shards"][0]["tensors"][0]), "has a tensor twice"),
    ],
)
def test_what_is_listed_twice_is_no_manifest(
    whole: Whole, tmp_path: Path, change: Callable[[trees.Document], object], said: str
) -> None:
    out = shutil.copytree(whole(2, 1), tmp_path / "out")
    rewrite_manifest(out, change)
    with pytest.raises(OutputError, match=said):
        diff(whole(2, 1), out)


@pytest.mark.parametrize(
    "name", ["digests.bin", "config.json", "headers/model-00001-of-000005.safetensors.gz"]
)
def test_what_is_kept_of_a_source_must_be_as_it_was_written(whole: Whole, tmp_path: Path, name: str) -> None:
    out = shutil.copytree(whole(2, 1), tmp_path / "out")
    data = bytearray((out / "source" / name).read_bytes())
    data[10] ^= 1
    (out / "source" / name).write_bytes(data)
    with pytest.raises(OutputError, match=re.escape(f"{out}/source/{name} is damaged or missing")):
        diff(whole(2, 2), out)


def test_what_cannot_be_compared(whole: Whole, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not a folder"):
        diff(whole(2, 1), tmp_path / "nowhere")
    out = shutil.copytree(whole(2, 1), tmp_path / "out")
    (out / "digests.bin").write_bytes(b"")
    with pytest.raises(OutputError, match=re.escape(f"{out}/digests.bin is damaged or missing")):
        diff(whole(2, 1), out)
    with pytest.raises(UsageError, match="one is 3; it must be a path"):
        diff(3, out)  # type: ignore[arg-type]  # what is not a path is given on purpose


def test_the_command(
    source: Checkpoint,
    whole: Whole,
    tmp_path: Path,
    command: Callable[..., tuple[int, str, str]],
) -> None:
    out, copy = tmp_path / "out", shutil.copytree(whole(2, 1), tmp_path / "copy")
    code, stdout, stderr = command("diff", whole(2, 1), copy)
    assert (code, stderr) == (0, "")
    assert re.fullmatch(r"same: 7 shards compared by digest; .* was not read\n", stdout)
    names = [f"{EXPERTS}.{expert}.down_proj.weight_packed" for expert in (0, 2, 3)]
    convert(changed(source, tmp_path, *names), out, tp=2)
    code, stdout, _ = command("diff", whole(2, 1), out)
    assert code == 1
    assert (
        f"rank-01-of-02/layer-001.safetensors: {EXPERTS}.w2_weight_packed, experts 0,2-3 differs\n" in stdout
    )
    assert "manifest.json differs in source.files" in stdout
    code, stdout, _ = command("diff", whole(2, 1), out, "--json")
    assert code == 1
    Draft202012Validator(schema("diff")).validate(json.loads(stdout))
