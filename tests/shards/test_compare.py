"""What differs between two conversions, to the expert: planted differences are named, and nothing else."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

from checkpoints import Checkpoint, make_small
from marlin_convert import convert, diff
from marlin_convert.checkpoint.source import open_source
from marlin_convert.documents.results import DifferingPart
from marlin_convert.documents.schemas import schema
from marlin_convert.errors import OutputError, UsageError

EXPERTS = "language_model.model.layers.1.mlp.experts"
NORM = "language_model.model.norm.weight"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return make_small(tmp_path_factory.mktemp("compare") / "checkpoint", layers=2, experts=4)


@pytest.fixture(scope="module")
def whole(source: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, int], Path]:
    place = tmp_path_factory.mktemp("whole")

    def made(tp: int, ep: int) -> Path:
        out = place / f"{tp}-{ep}"
        if not out.exists():
            convert(source.folder, out, tp=tp, ep=ep)
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


def test_the_same(whole: Callable[[int, int], Path], tmp_path: Path) -> None:
    """A copy, and another split of the same source."""
    copy = shutil.copytree(whole(2, 1), tmp_path / "copy")
    found = diff(whole(2, 1), copy)
    assert (bool(found), found.by, found.parts) == (True, "shards", ())
    found = diff(whole(2, 1), whole(2, 2))
    assert (bool(found), found.by, found.parts) == (True, "source tensors", ())


@pytest.mark.parametrize("ep", [1, 2])
def test_each_differing_expert_and_tensor_is_named(
    source: Checkpoint, whole: Callable[[int, int], Path], tmp_path: Path, ep: int
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
    assert {part.path for part in parts} - {part.path for part in shards} <= {"README.md", "manifest.json"}


def test_other_splits_are_compared_by_their_sources(
    source: Checkpoint, whole: Callable[[int, int], Path], tmp_path: Path
) -> None:
    name = f"{EXPERTS}.1.down_proj.weight_packed"
    out = tmp_path / "out"
    convert(changed(source, tmp_path, name), out, tp=1)
    found = diff(whole(2, 1), out)
    assert (found.by, found.parts) == ("source tensors", (DifferingPart("source", "differs", name),))
    assert found.compared == len(source.tensors)


def test_parts_of_one_split(source: Checkpoint, whole: Callable[[int, int], Path], tmp_path: Path) -> None:
    """What only one has is named, in both directions."""
    out = tmp_path / "out"
    convert(source.folder, out, tp=2, ranks=[1])
    missing = {f"rank-00-of-02/{name}.safetensors" for name in ("layer-000", "layer-001", "top")}
    for one, other, what in ((whole(2, 1), out, "first"), (out, whole(2, 1), "second")):
        parts = diff(one, other).parts
        only = {part.path for part in parts if part.what == f"only in the {what}"}
        assert {path for path in only if path.endswith(".safetensors")} == missing


def test_what_cannot_be_compared(whole: Callable[[int, int], Path], tmp_path: Path) -> None:
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
    whole: Callable[[int, int], Path],
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
    code, stdout, _ = command("diff", whole(2, 1), out, "--json")
    assert code == 1
    Draft202012Validator(schema("diff")).validate(json.loads(stdout))
