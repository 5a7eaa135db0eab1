"""Whole conversions, pairwise over form, order, split and what is special, against an oracle that shares no
code with the converter; parts of a conversion, and conversions again.
"""

from __future__ import annotations

import base64
import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, get_args

import numpy as np
import pytest

import trees
from checkpoints import Checkpoint, Form, Order
from checkpoints.names import ShapeDtype
from marlin_convert.checks.verify import verify
from marlin_convert.errors import OutputError
from marlin_convert.pipeline.conversion import Converted
from marlin_convert.pipeline.run import convert
from marlin_convert.progress import Point
from marlin_convert.shards.reader import open_shards
from whole import assert_as_the_oracle_says

Make = Callable[..., Checkpoint]
Output = Callable[..., Path]


class Case(NamedTuple):
    """A conversion: of what, into what, and whether the source is at hand when it is proven."""

    split: tuple[int, int]
    order: Order
    form: Form
    split_layer: bool
    shape_dtype: ShapeDtype
    moe_intermediate: int
    against_source: bool


#: every value of a field meets every value of every other field
CASES = [
    Case((1, 1), "reference", "k26", True, "I32", 512, True),
    Case((1, 1), "interleaved", "k2-thinking", False, "I64", 512, True),
    Case((1, 1), "shuffled", "k2-thinking", False, "I64", 256, False),
    Case((2, 1), "reference", "k2-thinking", True, "I32", 256, True),
    Case((2, 1), "interleaved", "k26", False, "I64", 512, True),
    Case((2, 1), "shuffled", "k2-thinking", False, "I64", 256, False),
    Case((4, 1), "reference", "k2-thinking", False, "I64", 512, False),
    Case((4, 1), "interleaved", "k2-thinking", True, "I32", 256, True),
    Case((4, 1), "shuffled", "k26", True, "I32", 256, True),
    Case((8, 1), "reference", "k2-thinking", False, "I32", 256, False),
    Case((8, 1), "interleaved", "k26", True, "I32", 512, True),
    Case((8, 1), "shuffled", "k2-thinking", True, "I64", 512, True),
    Case((8, 2), "reference", "k26", False, "I64", 256, True),
    Case((8, 2), "interleaved", "k2-thinking", True, "I64", 256, False),
    Case((8, 2), "shuffled", "k2-thinking", False, "I32", 512, False),
    Case((8, 8), "reference", "k2-thinking", True, "I32", 256, False),
    Case((8, 8), "interleaved", "k26", False, "I64", 512, False),
    Case((8, 8), "shuffled", "k2-thinking", False, "I32", 256, True),
]
#: what a field can be
VALUES: dict[str, tuple[object, ...]] = {
    "split": ((1, 1), (2, 1), (4, 1), (8, 1), (8, 2), (8, 8)),
    "order": get_args(Order),
    "form": get_args(Form),
    "split_layer": (False, True),
    "shape_dtype": get_args(ShapeDtype),
    "moe_intermediate": (256, 512),
    "against_source": (False, True),
}
#: of the conversions that must come out the same whatever the machine
SPECIAL: dict[str, dict[str, Any]] = {
    "plain": {},
    "split shuffled": {"split_layer": True, "order": "shuffled", "form": "k2-thinking"},
    "padded": {"moe_intermediate": 256},
}


def converted(checkpoint: Checkpoint, out: Path, tp: int, ep: int = 1, **options: Any) -> Converted:
    return convert(str(checkpoint.folder), out, tp=tp, ep=ep, **({"threads": 2} | options))


def test_the_cases_pair_every_value_with_every_other() -> None:
    assert tuple(VALUES) == Case._fields
    for one, other in itertools.combinations(Case._fields, 2):
        wanted = set(itertools.product(VALUES[one], VALUES[other]))
        assert {(getattr(case, one), getattr(case, other)) for case in CASES} == wanted


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case[0] + case[1:])))
def test_converts_and_is_proven(make: Make, tmp_path: Path, case: Case) -> None:
    (tp, ep), out = case.split, tmp_path / "out"
    checkpoint = make(
        form=case.form,
        order=case.order,
        split_layer=case.split_layer,
        shape_dtype=case.shape_dtype,
        moe_intermediate=case.moe_intermediate,
    )
    report = converted(checkpoint, out, tp, ep)
    assert (report.made, report.found) == (4 if case.form == "k26" else 3, 0)
    proof = verify(out, str(checkpoint.folder) if case.against_source else None, threads=2)
    assert proof.findings == []
    assert (proof.proven, proof.unproven) == (len(checkpoint.tensors), 0)
    assert_as_the_oracle_says(out, checkpoint, tp, ep)
    padded = case.moe_intermediate == 256 and case.split == (8, 1)
    padding = {"moe_intermediate": 32, "padded": 64} if padded else None
    assert trees.manifest_of(out)["parallel"]["padding"] == padding


def test_order_of_the_source_changes_no_tensor(output: Output) -> None:
    """Only what names the source differs: its id in every header, and what is kept of it."""
    found = []
    for order in get_args(Order):
        shards = [trees.read_shard(path) for path in sorted(output(4, order=order).glob("*/*.safetensors"))]
        found.append([(shard.entries, shard.data[shard.start :]) for shard in shards])
    assert found[0] == found[1] == found[2]


# The same bytes, however they are made.

WAYS: dict[str, dict[str, Any]] = {
    "one thread": {"threads": 1},
    "five threads": {"threads": 5},
    "little memory": {"threads": 3, "memory": 3 << 20},
    "buffered": {"direct_io": False},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("special", SPECIAL)
def test_same_bytes_whatever_the_machine(
    make: Make, output: Output, tmp_path: Path, way: str, special: str
) -> None:
    converted(make(**SPECIAL[special]), tmp_path / "other", 8, **WAYS[way])
    assert trees.tree(tmp_path / "other") == trees.tree(output(8, **SPECIAL[special]))


def test_unchecked_conversion_differs_only_in_saying_so(make: Make, tmp_path: Path) -> None:
    for verify_option in ("exact", "none"):
        converted(make(), tmp_path / verify_option, 2, verify=verify_option)
    exact, none = (trees.tree(tmp_path / option) for option in ("exact", "none"))
    card, changed = none["README.md"], json.loads(none["manifest.json"])
    assert changed["checks"] == "none"
    assert b"compared with the source" not in card
    manifests = {"manifest.json", "rank-00-of-02/manifest.json", "rank-01-of-02/manifest.json"}
    assert {path for path in exact if exact[path] != none[path]} == {"README.md", *manifests}
    shutil.copy(tmp_path / "exact" / "README.md", tmp_path / "none" / "README.md")
    trees.reseal(tmp_path / "none", lambda document: document.update(checks="exact"))
    assert trees.tree(tmp_path / "none") == exact


def test_a_copied_source_gives_the_same(make: Make, tmp_path: Path) -> None:
    checkpoint = make()
    shutil.copytree(checkpoint.folder, tmp_path / "copy")
    converted(checkpoint, tmp_path / "one", 2)
    convert(str(tmp_path / "copy"), tmp_path / "two", tp=2)
    assert trees.tree(tmp_path / "one") == trees.tree(tmp_path / "two")


# Parts of a conversion.


def test_some_layers(make: Make, tmp_path: Path) -> None:
    checkpoint, out = make(layers=3), tmp_path / "out"
    report = converted(checkpoint, out, 2, layers=[2, 0])
    assert report.made == 2
    document = trees.manifest_of(out)
    assert (document["layers"], document["ranks"], document["complete"]) == ([0, 2], [0, 1], False)
    assert sorted(path.name for path in (out / "rank-00-of-02").iterdir()) == [
        "experts.json",
        "layer-000.safetensors",
        "layer-002.safetensors",
        "manifest.json",
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


def test_some_ranks(make: Make, tmp_path: Path) -> None:
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


def test_ranks_of_one_expert_group_prove_their_experts_alone(make: Make, tmp_path: Path) -> None:
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


def test_running_again_makes_nothing(make: Make, tmp_path: Path) -> None:
    checkpoint, out = make(), tmp_path / "out"
    converted(checkpoint, out, 2)
    before = {path: (path.stat().st_mtime_ns, path.stat().st_ino) for path in out.rglob("*")}
    report = converted(checkpoint, out, 2)
    assert (report.made, report.found) == (0, 4)
    assert before == {path: (path.stat().st_mtime_ns, path.stat().st_ino) for path in out.rglob("*")}


def test_progress_ends_at_its_total(make: Make, tmp_path: Path) -> None:
    checkpoint, seen = make(), list[Point]()
    converted(checkpoint, tmp_path / "out", 2, progress=seen.append)
    assert seen[0] == Point("converting", 0, checkpoint.nbytes, "layer-000", 1, 4)
    assert seen[-1] == Point("writing manifest and documents", checkpoint.nbytes, checkpoint.nbytes)
    done = [(point.done, point.number) for point in seen[:-1]]
    assert done == sorted(done)
    assert seen[-2] == Point("converting", checkpoint.nbytes, checkpoint.nbytes, "common", 4, 4)


def test_progress_counts_what_a_part_reads(make: Make, tmp_path: Path) -> None:
    """Of expert groups of which no rank is asked for nothing is read."""
    checkpoint, seen = make(), list[Point]()
    converted(checkpoint, tmp_path / "out", 2, 2, ranks=[1], layers=[1], progress=seen.append)
    layer = {name: t.nbytes for name, t in checkpoint.tensors.items() if ".layers.1." in name}
    theirs = [name for name in layer for e in range(4) if f".experts.{e}." in name]
    assert {(point.total, point.number) for point in seen[:-1]} == {
        (sum(layer.values()) - sum(layer[name] for name in theirs), 1)
    }
    assert seen[-1].done == seen[-1].total


def test_overwrite_leaves_nothing_of_the_old(make: Make, tmp_path: Path) -> None:
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


def test_a_rank_that_is_not_there_cannot_be_opened(make: Make, tmp_path: Path) -> None:
    converted(make(), tmp_path / "out", 2)
    (tmp_path / "out" / "rank-01-of-02" / "top.safetensors").unlink()
    with (
        open_shards(tmp_path / "out", 1) as shards,
        pytest.raises(OutputError, match=r"rank-01-of-02/top.safetensors"),
    ):
        shards["language_model.lm_head.weight"]


def test_records_hold_what_the_manifest_merges(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record of a unit, before it goes: digests that are those of the files."""
    from marlin_convert.documents.records import WORK
    from marlin_convert.pipeline import conversion as pipeline

    kept = tmp_path / "kept"
    monkeypatch.setattr(pipeline, "remove_work", lambda out: shutil.move(out / WORK, kept))
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
