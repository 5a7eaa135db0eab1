"""Routed experts placed in slots by a map, redundant ones too: each value at its place, proven slot by slot,
and no mistake of it passes.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import trees
from checkpoints import Checkpoint
from marlin_convert import convert, diff, open_shards, plan, reshard, restore, verify
from marlin_convert.documents.bounds import EXPERT_MAP
from marlin_convert.documents.expert_places import EXPERTS_NAME
from marlin_convert.engines.serving import Options, Served, open_served
from marlin_convert.errors import OutputError, SourceError, UsageError
from marlin_convert.pipeline.unit_work import UnitWork
from marlin_convert.progress import Point
from marlin_convert.shards.inspect import describe_folder
from whole import assert_as_the_oracle_says

Make = Callable[..., Checkpoint]
#: eight experts in ten slots: 0 and 3 twice
ROW = [3, 0, 7, 1, 2, 5, 4, 6, 0, 3]
#: the dense layer's row says nothing
ROWS = [[5] * 10, ROW]
EXPERTS = "language_model.model.layers.1.mlp.experts"
UNIT = "layer-001"


def map_file(place: Path, rows: Sequence[Sequence[int]] = ROWS) -> Path:
    path = place / "map.json"
    path.write_text(json.dumps({"physical_to_logical_map": rows}))
    return path


@pytest.fixture(scope="module")
def placed(make: Make, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two ranks, each with five slots of whole experts. Not to be changed: copy it."""
    place = tmp_path_factory.mktemp("placed")
    convert(make().folder, place / "out", tp=2, ep=2, expert_map=map_file(place))
    return place / "out"


@pytest.mark.parametrize("form", ["k26", "k2-thinking"])
@pytest.mark.parametrize("split", [(1, 1, None, 1), (2, 1, None, 1), (4, 2, 2, 1), (2, 2, None, 2)], ids=str)
def test_every_value_is_at_its_place_and_proven(
    make: Make, tmp_path: Path, split: tuple[int, int, int | None, int], form: str
) -> None:
    (tp, ep, attn_tp, pp), out, source = split, tmp_path / "out", make(form=form)
    points: list[Point] = []
    convert(
        source.folder,
        out,
        tp=tp,
        ep=ep,
        attn_tp=attn_tp,
        pp=pp,
        expert_map=map_file(tmp_path),
        progress=points.append,
    )
    assert {point.total for point in points if point.stage == "converting"} == {
        max(point.done for point in points if point.stage == "converting")
    }  # what is read twice counts once
    for against in (None, source.folder):
        proof = verify(out, against)
        assert proof.findings == []
        assert (proof.proven, proof.unproven) == (len(source.tensors), 0)
    if pp == 1:
        assert_as_the_oracle_says(out, source, tp, ep, attn_tp, ROWS)


def test_more_slots_than_experts_may_fit_what_experts_do_not(make: Make, tmp_path: Path) -> None:
    """Six experts cannot be shared by four groups, eight slots can."""
    source, rows = make(experts=6), [[0, 1, 2, 3, 4, 5, 5, 0]]
    with pytest.raises(UsageError, match="--ep 4 does not divide the 6 routed experts"):
        plan(source.folder, tp=4, ep=4)
    convert(source.folder, tmp_path / "out", tp=4, ep=4, expert_map=map_file(tmp_path, rows))
    assert verify(tmp_path / "out").ok
    assert_as_the_oracle_says(tmp_path / "out", source, 4, 4, placed=[[], *rows])


def test_what_is_said_of_it(placed: Path) -> None:
    manifest = trees.manifest_of(placed)
    assert (manifest["format_version"], manifest["parallel"]["slots"]) == (2, 10)
    assert {unit["name"]: unit.get("slots") for unit in manifest["units"]} == {
        "layer-000": None,
        UNIT: ROW,
        "top": None,
        "common": None,
    }
    for rank, slots in ((0, "3,0,7,1,2"), (1, "5,4,6,0,3")):
        folder = placed / f"rank-{rank:02d}-of-02"
        metadata = trees.read_shard(folder / f"{UNIT}.safetensors").metadata
        assert (metadata["format_version"], metadata["expert_slots"]) == ("2", slots)
        assert "expert_range" not in metadata
        assert trees.read_shard(folder / "layer-000.safetensors").metadata["expert_range"] == "0:0"
        places = json.loads((folder / EXPERTS_NAME).read_text())["units"][0]["experts"]
        assert ",".join(str(place["expert"]) for place in places) == slots
    assert "its experts placed by a map in 10 slots a layer" in (placed / "README.md").read_text()
    assert describe_folder(placed).slots == 10


def test_a_row_for_each_moe_layer_is_enough(make: Make, placed: Path, tmp_path: Path) -> None:
    convert(make().folder, tmp_path / "out", tp=2, ep=2, expert_map=map_file(tmp_path, [ROW]))
    assert trees.tree(tmp_path / "out") == trees.tree(placed)


def test_every_expert_in_the_slot_of_its_number_is_what_it_was(make: Make, tmp_path: Path) -> None:
    convert(make().folder, tmp_path / "with", tp=2, expert_map=map_file(tmp_path, [list(range(8))]))
    convert(make().folder, tmp_path / "without", tp=2)
    assert trees.tree(tmp_path / "with") == trees.tree(tmp_path / "without")
    assert trees.manifest_of(tmp_path / "with")["format_version"] == 1


BAD = {
    "rows of two lengths": ({"physical_to_logical_map": [ROW, ROW[:8]]}, "row 1 has 8 slots, row 0 has 10"),
    "slots that no group gets": ({"physical_to_logical_map": [ROW[:9]]}, "9 slots are not a multiple of"),
    "an expert that is not there": (
        {"physical_to_logical_map": [[*range(8), 8, 0]]},
        "layer 1 has expert 8 in slot 8; they run from 0 to 7",
    ),
    "a number below": ({"physical_to_logical_map": [[*range(8), -1, 0]]}, "is no expert map"),
    "a number with a fraction": ({"physical_to_logical_map": [[*range(8), 0.5, 0]]}, "is no expert map"),
    "an expert in no slot": (
        {"physical_to_logical_map": [[0, 1, 2, 3, 4, 5, 6, 6, 0, 1]]},
        "layer 1 has expert 7 in no slot",
    ),
    "another number of layers": ({"physical_to_logical_map": [ROW] * 3}, "3 rows, the model has 2 layers"),
    "no rows": ({"physical_to_logical_map": []}, "is no expert map"),
    "a load": ({"logical_count": [[1] * 8]}, "a load and not yet a placement"),
    "a dump of passes": ({"last_physical_to_logical_map": [ROW]}, "write its rows under the key"),
    "something else": ([ROW], "has no physical_to_logical_map"),
}


@pytest.mark.parametrize("bad", BAD)
def test_what_cannot_be_is_refused(make: Make, tmp_path: Path, bad: str) -> None:
    document, said = BAD[bad]
    (tmp_path / "map.json").write_text(json.dumps(document))
    with pytest.raises(UsageError, match=said):
        convert(make().folder, tmp_path / "out", tp=2, ep=2, expert_map=tmp_path / "map.json")
    assert not (tmp_path / "out").exists()


def test_what_is_no_file_of_a_map_is_refused(make: Make, tmp_path: Path) -> None:
    torch_file, large = tmp_path / "map.pt", tmp_path / "large.json"
    torch_file.write_bytes(b"PK\x03\x04\xff")
    with large.open("wb") as file:
        file.truncate(EXPERT_MAP + 1)
    for path, said in (
        (tmp_path / "none.json", "cannot be read as an expert map"),
        (large, f"it has {EXPERT_MAP + 1} bytes, at most {EXPERT_MAP}"),
        (torch_file, "its lists are then written as JSON"),
    ):
        with pytest.raises(UsageError, match=said):
            plan(make().folder, tp=2, expert_map=path)


def test_another_map_does_not_continue(make: Make, placed: Path, tmp_path: Path) -> None:
    """The same one does, and makes again what is lost."""
    out, source = shutil.copytree(placed, tmp_path / "out"), make().folder
    other = map_file(tmp_path, [[0, 3, *ROW[2:8], 3, 0]])
    for file in (other, None):
        with pytest.raises(UsageError, match="expert_map"):
            convert(source, out, tp=2, ep=2, expert_map=file)
    assert trees.tree(out) == trees.tree(placed)
    (out / "rank-01-of-02" / f"{UNIT}.safetensors").unlink()
    assert convert(source, out, tp=2, ep=2, expert_map=map_file(tmp_path)).action == "repair"
    assert trees.tree(out) == trees.tree(placed)
    assert convert(source, out, tp=2, ep=2, expert_map=map_file(tmp_path)).action == "done"


def test_a_run_that_broke_off_goes_on_with_its_own_map(make: Make, placed: Path, tmp_path: Path) -> None:
    out, source = tmp_path / "out", make().folder

    def stop(point: Point) -> None:
        if point.number == 3:
            raise RuntimeError("stop here")

    with pytest.raises(RuntimeError, match="stop here"):
        convert(source, out, tp=2, ep=2, expert_map=map_file(tmp_path), threads=1, progress=stop)
    assert not (out / "manifest.json").exists()
    other = map_file(tmp_path, [[0, 3, *ROW[2:8], 3, 0]])
    with pytest.raises(UsageError, match="was begun with expert_map"):
        convert(source, out, tp=2, ep=2, expert_map=other)
    assert convert(source, out, tp=2, ep=2, expert_map=map_file(tmp_path)).action == "continue"
    assert trees.tree(out) == trees.tree(placed)


@pytest.mark.parametrize("part", [{"layers": [0]}, {"layers": [1]}, {"ranks": [1]}], ids=str)
def test_shards_of_a_part_are_those_of_the_whole(
    make: Make, placed: Path, tmp_path: Path, part: dict[str, Any]
) -> None:
    """That of a dense layer, which has no experts to place, too."""
    out = tmp_path / "out"
    convert(make().folder, out, tp=2, ep=2, expert_map=map_file(tmp_path), **part)
    assert verify(out).ok
    assert verify(out, make().folder).ok
    shards = {path: data for path, data in trees.tree(out).items() if path.endswith(".safetensors")}
    whole = trees.tree(placed)
    assert shards == {path: whole[path] for path in shards}
    assert trees.manifest_of(out)["format_version"] == 2


def test_a_tensor_that_reads_in_two_ways_is_refused() -> None:
    """One of an expert in several slots is read for each."""
    work = UnitWork.__new__(UnitWork)
    work.source_digests = {}
    work.note_source("a", b"1")
    work.note_source("a", b"1")
    with pytest.raises(SourceError, match="a was read twice and was not the same"):
        work.note_source("a", b"2")


def test_experts_are_read_by_their_numbers(placed: Path) -> None:
    name = f"{EXPERTS}.w2_weight_packed"
    first, second = open_shards(placed, 0), open_shards(placed, 1)
    np.testing.assert_array_equal(first.expert(name, 0), first[name][1])
    np.testing.assert_array_equal(second.expert(name, 0), second[name][3])
    np.testing.assert_array_equal(first.expert(name, 0), second.expert(name, 0))
    with pytest.raises(UsageError, match="rank 1 owns the experts 0,3-6, not 7"):
        second.expert(name, 7)


def test_a_source_comes_back(make: Make, placed: Path, tmp_path: Path) -> None:
    published = trees.tree(make().folder)
    restore(placed, tmp_path / "back")
    for name in trees.manifest_of(placed)["source"]["not_copied"]:
        published.pop(name)
    assert trees.tree(tmp_path / "back") == published


def test_it_is_cut_in_another_way_and_back(make: Make, placed: Path, tmp_path: Path) -> None:
    """Out of the shards alone, whatever the placement."""
    convert(make().folder, tmp_path / "plain", tp=4, ep=2)
    reshard(placed, tmp_path / "out", tp=4, ep=2)
    reshard(tmp_path / "plain", tmp_path / "back", tp=2, ep=2, expert_map=map_file(tmp_path))
    assert trees.tree(tmp_path / "out") == trees.tree(tmp_path / "plain")
    assert trees.tree(tmp_path / "back") == trees.tree(placed)


def test_what_differs_is_named_by_its_number(make: Make, placed: Path, tmp_path: Path) -> None:
    """And another placement is another split."""
    out = shutil.copytree(placed, tmp_path / "changed")
    flip(out, 8)
    trees.reseal(out)
    parts = diff(placed, out).parts
    assert {part.experts for part in parts if part.tensor} == {(0,)}
    assert {part.path for part in parts if part.tensor} == {f"rank-01-of-02/{UNIT}.safetensors"}
    convert(make().folder, tmp_path / "other", tp=2, ep=2, expert_map=map_file(tmp_path, [ROW[::-1]]))
    found = diff(placed, tmp_path / "other")
    assert (found.by, found.same) == ("source tensors", True)


def test_no_engine_takes_it(placed: Path) -> None:
    with pytest.raises(UsageError, match="its experts placed by a map in 10 slots"):
        open_served(Options(str(placed)), str(placed), Served(2, 2, 0), lambda tp, ep: "")


def test_a_part_is_proven_as_far_as_it_goes(make: Make, placed: Path) -> None:
    """Expert 0 is on both ranks, expert 1 on the first alone."""
    source = make()
    alone, against = verify(placed, ranks=[0]), verify(placed, source.folder, ranks=[0])
    assert (alone.findings, against.findings) == ([], [])
    assert against.unproven == 0
    assert against.proven == alone.proven + alone.unproven


def test_the_command(make: Make, tmp_path: Path, command: Callable[..., tuple[int, str, str]]) -> None:
    out, source, file = tmp_path / "out", make().folder, map_file(tmp_path)
    line = (source, out, "--tp", 2, "--ep", 2, "--expert-map", file)
    code, stdout, _ = command("plan", *line, "--json")
    assert (code, json.loads(stdout)["slots"]) == (0, 10)
    assert "8 routed experts in 10 slots of each layer" in command("plan", *line)[1]
    assert command("convert", *line)[0] == 0
    assert command("verify", out)[0] == 0
    assert "slots: 10" in command("inspect", out)[1]


# Mistakes, with every digest made to fit.


def pieces(out: Path, slot: int) -> tuple[Path, list[tuple[int, int]]]:
    """The file that a slot is in, and the place and size of its part of each stacked tensor."""
    path = out / f"rank-{slot // 5:02d}-of-02" / f"{UNIT}.safetensors"
    stacked = [entry for entry in trees.read_shard(path).entries if entry[0].startswith(EXPERTS)]
    assert len(stacked) == 4
    return path, [(at + slot % 5 * (size // 5), size // 5) for _, _, _, at, size in stacked]


def take(out: Path, slot: int) -> list[bytes]:
    """What is in a slot."""
    path, places = pieces(out, slot)
    data = path.read_bytes()
    return [data[at : at + size] for at, size in places]


def put(out: Path, slot: int, parts: Sequence[bytes]) -> None:
    """Write something into a slot."""
    path, places = pieces(out, slot)
    data = bytearray(path.read_bytes())
    for (at, size), part in zip(places, parts, strict=True):
        data[at : at + size] = part
    path.write_bytes(data)


def flip(out: Path, slot: int) -> None:
    """Another bit in each stacked tensor of a slot."""
    put(out, slot, [bytes([part[0] ^ 1]) + part[1:] for part in take(out, slot)])


def exchange(out: Path, one: int, other: int) -> None:
    """Two slots' data."""
    parts = take(out, one), take(out, other)
    put(out, one, parts[1])
    put(out, other, parts[0])


def say(out: Path, row: Sequence[int], *where: str) -> None:
    """Write another row where slots are named: in the manifest, the headers, the lists of experts."""
    for rank in (0, 1):
        own, folder = list(row[5 * rank : 5 * rank + 5]), out / f"rank-{rank:02d}-of-02"
        if "header" in where:
            trees.rewrite_header(folder / f"{UNIT}.safetensors", partial(say_in_header, own=own))
        if "list" in where:
            document = json.loads((folder / EXPERTS_NAME).read_text())
            for place, expert in zip(document["units"][0]["experts"], own, strict=True):
                place["expert"] = expert
            (folder / EXPERTS_NAME).write_text(json.dumps(document, separators=(",", ":")))
    if "manifest" in where:
        trees.reseal(out, partial(say_in_manifest, row=row))
    else:
        trees.reseal(out)


def say_in_header(document: trees.Document, own: Sequence[int]) -> None:
    document["__metadata__"]["expert_slots"] = ",".join(map(str, own))


def say_in_manifest(document: trees.Document, row: Sequence[int]) -> None:
    next(unit for unit in document["units"] if unit["name"] == UNIT)["slots"] = list(row)


EVERYWHERE = ("manifest", "header", "list")
#: what ROW is with the experts of slots 1 and 6, on two ranks, exchanged
EXCHANGED = [3, 4, 7, 1, 2, 5, 0, 6, 0, 3]


@pytest.fixture
def copied(placed: Path, tmp_path: Path) -> Path:
    return shutil.copytree(placed, tmp_path / "out")


@pytest.mark.parametrize("with_source", [False, True])
def test_two_slots_exchanged_in_data(copied: Path, make: Make, with_source: bool) -> None:
    exchange(copied, 1, 6)
    trees.reseal(copied)
    found = verify(copied, make().folder if with_source else None).findings
    assert {(finding.rank, finding.expert) for finding in found} == {(0, 0), (1, 4)}
    for finding in found:
        slot, other = (1, 4) if finding.rank == 0 else (6, 0)
        assert finding.what.startswith(f"slot {slot}: weight_")
        assert f"differs from the source: it holds the data of {EXPERTS}.{other}." in finding.what


@pytest.mark.parametrize("where", ["manifest", "header"])
def test_two_slots_exchanged_in_what_is_said(copied: Path, where: str) -> None:
    say(copied, EXCHANGED, where)
    found = [str(finding) for finding in verify(copied).findings]
    said, is_so = ("3,0,7,1,2", "3,4,7,1,2") if where == "manifest" else ("3,4,7,1,2", "3,0,7,1,2")
    what = f"its header says expert_slots {said}, in this place it must be {is_so}"
    assert any("rank-00-of-02" in line and what in line for line in found)
    assert any("rank-01-of-02" in line and "expert_slots" in line for line in found)


def test_two_slots_exchanged_where_they_are_listed(copied: Path) -> None:
    say(copied, EXCHANGED, "list")
    found = verify(copied).findings
    assert {finding.path for finding in found} == {f"rank-{rank:02d}-of-02/{EXPERTS_NAME}" for rank in (0, 1)}
    assert all("lists other experts" in finding.what for finding in found)


def test_two_slots_said_to_be_exchanged_everywhere_but_in_data(copied: Path) -> None:
    say(copied, EXCHANGED, *EVERYWHERE)
    found = verify(copied).findings
    assert {(finding.rank, finding.expert) for finding in found} == {(0, 4), (1, 0)}
    assert all("it holds the data of" in finding.what for finding in found)


def test_two_slots_exchanged_in_everything_is_another_conversion(
    copied: Path, make: Make, tmp_path: Path
) -> None:
    """Nothing is wrong with it: it is, byte for byte, what that map gives. That another one was asked for
    `convert` knows.
    """
    exchange(copied, 1, 6)
    say(copied, EXCHANGED, *EVERYWHERE)
    assert verify(copied, make().folder).findings == []
    other = tmp_path / "other"
    convert(make().folder, other, tp=2, ep=2, expert_map=map_file(tmp_path, [EXCHANGED]))
    of_all = ("README.md", "manifest.json", "provenance.json", "digests.bin")
    found, expected = (
        {path: data for path, data in trees.tree(out).items() if not path.endswith(of_all)}
        for out in (copied, other)
    )
    assert found == expected
    assert (copied / "digests.bin").read_bytes() == (other / "digests.bin").read_bytes()
    with pytest.raises(UsageError, match="expert_map"):
        convert(make().folder, copied, tp=2, ep=2, expert_map=map_file(tmp_path))


@pytest.mark.parametrize("with_source", [False, True])
def test_a_doubled_expert_with_another_lost(copied: Path, make: Make, with_source: bool) -> None:
    """Expert 7 is in slot 2 alone; in its place expert 3 once more, and all that is said fits."""
    put(copied, 2, take(copied, 0))
    source = make().folder if with_source else None
    trees.reseal(copied)
    found = verify(copied, source).findings
    assert {(finding.rank, finding.expert) for finding in found} == {(0, 7)}
    assert all("slot 2: weight_" in finding.what for finding in found)
    assert all(f"it holds the data of {EXPERTS}.3." in finding.what for finding in found)
    say(copied, [3, 0, 3, *ROW[3:]], *EVERYWHERE)
    (only,) = verify(copied, source).findings
    said = f"manifest.json: layer 1: says of {UNIT} that expert 7 is in none of its slots"
    assert str(only) == said


@pytest.mark.parametrize(("stale", "rank"), [(1, 0), (8, 1)])
def test_a_stale_copy_is_found(copied: Path, make: Make, stale: int, rank: int) -> None:
    """Expert 0 is in the slots 1 and 8: whichever is stale is named, the other one is not."""
    flip(copied, stale)
    trees.reseal(copied)
    for source in (None, make().folder):
        proof = verify(copied, source)
        assert {(finding.rank, finding.expert) for finding in proof.findings} == {(rank, 0)}
        assert all(finding.what.startswith(f"slot {stale}: weight_") for finding in proof.findings)
        assert proof.proven < len(make().tensors)


def test_a_copy_as_the_digests_do_not_have_it(copied: Path) -> None:
    put(copied, 8, take(copied, 9))
    found = verify(copied).findings
    assert {(finding.rank, finding.expert) for finding in found} == {(1, 0)}
    assert all(f"holds the data of {EXPERTS}.3." in finding.what for finding in found)


def slots_of(document: trees.Document) -> list[int]:
    found: list[int] = next(unit for unit in document["units"] if unit["name"] == UNIT)["slots"]
    return found


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda d: d.update(format_version=1), "format_version 1 for"),
        (lambda d: d["parallel"].update(slots=12), "layer-001 has 10 slots, of parallel.slots 12"),
        (lambda d: d["parallel"].update(slots=9), "ep 2 does not divide the 9 slots"),
        (lambda d: d["parallel"].pop("slots"), "layer-001 has 10 slots, of parallel.slots None"),
        (lambda d: slots_of(d).append(0), "layer-001 has 11 slots, of parallel.slots 10"),
        (lambda d: d["units"][0].update(slots=ROW), "layer-000 has 10 slots"),
        (lambda d: slots_of(d).__setitem__(9, 8), "slot 9 has expert 8; they run to 7"),
        (lambda d: slots_of(d).__setitem__(2, 3), "expert 7 is in none of its slots"),
        (
            lambda d: (d["parallel"].update(slots=8), slots_of(d).pop(), slots_of(d).pop()),
            "has a tensor of other than 4 experts",
        ),
        (
            lambda d: d["shards"][0]["tensors"][0].update(experts=0),
            "layer-000.safetensors has a tensor of other than 5 experts",
        ),
    ],
)
def test_a_manifest_that_says_otherwise_is_found(
    copied: Path, make: Make, change: Callable[[trees.Document], object], said: str
) -> None:
    trees.reseal(copied, change)
    try:
        found = [str(finding) for finding in verify(copied, make().folder).findings]
    except OutputError as error:
        found = [str(error)]
    assert any(said in line for line in found)


def test_a_placement_as_without_a_map_is_found(make: Make, tmp_path: Path) -> None:
    """The lowest version that describes a folder is its own."""
    out, row = tmp_path / "out", list(range(8))
    convert(make().folder, out, tp=1, expert_map=map_file(tmp_path, [row[::-1]]))
    (path,) = out.glob(f"rank-*/{UNIT}.safetensors")
    trees.rewrite_header(path, partial(say_in_header, own=row))
    trees.reseal(out, partial(say_in_manifest, row=row))
    found = [str(finding) for finding in verify(out).findings]
    assert any("every expert is in the slot of its number" in line for line in found)
