"""manifest.json and experts.json in the folder of a rank: what they say, who reads them, and that they are
derived again by `verify`, remade where they are lost, and never taken for anything else.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import trees
from checkpoints import Checkpoint
from marlin_convert import convert, open_shards, verify
from marlin_convert.documents.manifest import Manifest, read_manifest
from marlin_convert.errors import OutputError, UsageError
from marlin_convert.shards.compare import diff
from oracle import oracle_experts

RANKS = range(4)
FOLDERS = [f"rank-{rank:02d}-of-04" for rank in RANKS]
OURS = ("manifest.json", "experts.json")


@pytest.fixture(scope="module")
def made(tiny: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`tiny` converted for tp 4 ep 2. Not to be changed: copy it."""
    out = tmp_path_factory.mktemp("ranks") / "out"
    convert(tiny.folder, out, tp=4, ep=2, threads=2)
    return out


@pytest.fixture
def out(made: Path, tmp_path: Path) -> Path:
    """A copy to spoil."""
    return Path(shutil.copytree(made, tmp_path / "out"))


def older(out: Path) -> None:
    """Make a folder what the releases before wrote."""
    for path in (out / folder / name for folder in FOLDERS for name in OURS):
        path.unlink()
    trees.reseal(
        out,
        lambda document: document.update(
            files=[file for file in document["files"] if not file["path"].endswith(OURS)]
        ),
    )


def loaded(path: Path) -> dict[str, Any]:
    """A document as plain JSON."""
    document: dict[str, Any] = json.loads(path.read_bytes())
    return document


def test_the_manifest_of_a_rank_is_what_the_whole_one_says_of_it(made: Path) -> None:
    whole = trees.manifest_of(made)
    for rank, folder in enumerate(FOLDERS):
        own = loaded(made / folder / "manifest.json")
        raw = (made / folder / "manifest.json").read_bytes()
        assert trees.seal(dict(own)) == raw
        assert own.keys() == whole.keys()
        same = own.keys() - {"digest", "ranks", "complete", "shards", "files"}
        assert {key: own[key] for key in same} == {key: whole[key] for key in same}
        assert (own["ranks"], own["complete"]) == ([rank], False)
        assert own["shards"] == [shard for shard in whole["shards"] if shard["rank"] in (rank, None)]
        assert [file["path"] for file in own["files"]] == [
            file["path"]
            for file in whole["files"]
            if not file["path"].startswith("rank-")
            or file["path"] in (f"{folder}/experts.json", f"{folder}/model.safetensors.index.json")
        ]


def test_the_manifest_of_the_only_rank_is_complete(tiny: Checkpoint, tmp_path: Path) -> None:
    convert(tiny.folder, tmp_path / "one", tp=1, threads=2)
    own = loaded(tmp_path / "one" / "rank-00-of-01" / "manifest.json")
    assert (own["ranks"], own["complete"]) == ([0], True)


def test_the_bytes_in_the_ranges_are_the_experts(made: Path) -> None:
    """Read by the format page alone: offset and size, no arithmetic."""
    for rank, folder in enumerate(FOLDERS):
        document = loaded(made / folder / "experts.json")
        assert document["source"] == trees.manifest_of(made)["source"]["id"]
        assert [unit["unit"] for unit in document["units"]] == ["layer-001", "layer-002"]
        for unit in document["units"]:
            shard = trees.read_shard(made / folder / unit["file"])
            assert shard.metadata["layer"] == str(int(unit["unit"][-3:]))
            assert [place["expert"] for place in unit["experts"]] == list(oracle_experts(rank, 4, 2, 4))
            assert len(unit["tensors"]) == 4
            for slot, place in enumerate(unit["experts"]):
                for name, (offset, size) in zip(unit["tensors"], place["ranges"], strict=True):
                    assert shard.data[offset : offset + size] == shard.array(name)[slot].tobytes()


def test_a_rank_is_opened_by_its_own_manifest(made: Path) -> None:
    for rank in RANKS:
        shards, by_whole = open_shards(made, rank), open_shards(made, rank, read_manifest(made))
        assert (shards.manifest.ranks, by_whole.manifest.ranks) == ((rank,), (0, 1, 2, 3))
        assert shards.names() == by_whole.names()
        assert all(shards[name].tobytes() == by_whole[name].tobytes() for name in shards)
    assert open_shards(made, None).manifest.ranks == (0, 1, 2, 3)


def damage(path: Path) -> None:
    """Another digit of a shard's digest, sealed again: whole in itself, and not what is listed."""
    document = loaded(path)
    document["shards"][0]["digest"] = "0" * 32
    path.write_bytes(trees.seal(document))


@pytest.mark.parametrize("spoil", [Path.unlink, lambda path: path.write_bytes(b"{}"), damage])
def test_only_the_one_that_is_listed_is_read(out: Path, spoil: Callable[[Path], object]) -> None:
    spoil(out / "rank-01-of-04" / "manifest.json")
    shards = open_shards(out, 1)
    assert shards.manifest.ranks == (0, 1, 2, 3)
    assert shards.shards() == open_shards(out, 1, read_manifest(out)).shards()


@pytest.mark.parametrize("key", ["name", "dtype", "shape", "offset"])
def test_a_tensor_that_is_said_to_lie_elsewhere_is_not_read(out: Path, key: str) -> None:
    """Every digest fits, and the rank's own manifest says of one tensor what the shard's header does not."""
    path = "rank-01-of-04/manifest.json"

    def change(document: dict[str, Any]) -> None:
        stored = document["shards"][0]["tensors"][0]
        other = {
            "name": "x",
            "dtype": "F16",
            "shape": stored["shape"][::-1],
            "offset": stored["offset"] + 4096,
        }
        stored[key] = other[key]

    assert forged(out, path, change)
    shards = open_shards(out, 1)
    assert shards.manifest.ranks == (1,)
    with pytest.raises(OutputError, match="its header lists other tensors than the manifest"):
        dict(shards.items())


def test_a_rank_that_is_not_there_is_named_with_those_that_are(out: Path) -> None:
    with pytest.raises(UsageError, match="has no rank 5; it has 0, 1, 2, 3"):
        open_shards(out, 5)


def test_nothing_is_opened_without_the_whole_manifest(out: Path) -> None:
    """While OUT is mended the ranks' manifests stay, and stand for nothing."""
    (out / "manifest.json").unlink()
    with pytest.raises(OutputError, match=r"has no manifest\.json"):
        open_shards(out, 1)


def test_the_folder_of_a_rank_is_not_taken_for_a_conversion(out: Path) -> None:
    folder = out / "rank-01-of-04"
    for verb in (verify, read_manifest, lambda folder: diff(folder, out)):
        with pytest.raises(UsageError, match=r"rank-01-of-04 is one folder of the conversion .*; give that"):
            verb(folder)


def test_a_conversion_may_be_called_like_a_folder_of_one(tiny: Checkpoint, tmp_path: Path) -> None:
    out = tmp_path / "common"
    convert(tiny.folder, out, tp=1, threads=2)
    assert read_manifest(out).complete


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("with_shard", [False, True])
def test_a_lost_one_is_made_again(
    tiny: Checkpoint, made: Path, out: Path, name: str, with_shard: bool
) -> None:
    (out / "rank-02-of-04" / name).unlink()
    if with_shard:
        (out / "rank-02-of-04" / "layer-001.safetensors").unlink()
    report = convert(tiny.folder, out, tp=4, ep=2)
    assert (report.action, report.made) == ("repair", int(with_shard))
    assert trees.tree(out) == trees.tree(made)


@pytest.mark.parametrize("name", OURS)
def test_an_edited_one_is_named_and_not_replaced(
    tiny: Checkpoint, out: Path, tmp_path: Path, name: str
) -> None:
    path = out / "rank-02-of-04" / name
    path.write_bytes(path.read_bytes() + b"\n")
    before = trees.tree(out, without=())
    for tp, overwrite in ((4, False), (4, True), (1, True)):
        with pytest.raises(UsageError, match=rf"rank-02-of-04/{name} was edited or damaged .* move it away"):
            convert(tiny.folder, out, tp=tp, ep=2 if tp == 4 else 1, overwrite=overwrite)
    assert trees.tree(out, without=()) == before


def test_an_older_folder_stays_as_it_is(tiny: Checkpoint, made: Path, out: Path) -> None:
    older(out)
    before = trees.tree(out, without=())
    assert [str(finding) for finding in verify(out, tiny.folder).findings] == []
    assert convert(tiny.folder, out, tp=4, ep=2).action == "done"
    assert open_shards(out, 1).manifest.ranks == (0, 1, 2, 3)
    assert diff(out, made).same
    assert trees.tree(out, without=()) == before


def test_an_older_folder_that_is_mended_gets_them(tiny: Checkpoint, made: Path, out: Path) -> None:
    older(out)
    (out / "rank-00-of-04" / "layer-002.safetensors").unlink()
    assert convert(tiny.folder, out, tp=4, ep=2).made == 1
    assert trees.tree(out) == trees.tree(made)


def test_what_a_user_put_in_their_place_is_not_replaced(tiny: Checkpoint, out: Path) -> None:
    older(out)
    path = out / "rank-01-of-04" / "experts.json"
    path.write_text("mine")
    (out / "rank-00-of-04" / "layer-002.safetensors").unlink()
    with pytest.raises(UsageError, match=r"rank-01-of-04/experts\.json was edited or damaged"):
        convert(tiny.folder, out, tp=4, ep=2)
    assert path.read_text() == "mine"


def test_they_are_removed_with_what_is_left_of_a_conversion(
    tiny: Checkpoint, out: Path, tmp_path: Path
) -> None:
    (out / "manifest.json").unlink()
    convert(tiny.folder, out, tp=1, overwrite=True, threads=2)
    assert not any((out / folder).exists() for folder in FOLDERS)


def test_all_but_shards_are_equal_for_ranks_with_the_same_experts(made: Path) -> None:
    bodies = [(made / folder / "experts.json").read_bytes() for folder in FOLDERS]
    assert bodies[0] == bodies[1]
    assert bodies[2] == bodies[3]
    assert bodies[0] != bodies[2]


def forged(out: Path, path: str, change: Callable[[dict[str, Any]], object]) -> list[str]:
    """What verify finds where a document of a rank was changed, and every digest made to fit."""
    document = loaded(out / path)
    change(document)
    sealed = path.endswith("manifest.json")
    (out / path).write_bytes(trees.seal(document) if sealed else json.dumps(document).encode())
    if sealed:  # `reseal` would make it anew
        whole = trees.manifest_of(out)
        listed = next(file for file in whole["files"] if file["path"] == path)
        data = (out / path).read_bytes()
        listed.update(size=len(data), digest=trees.digest(data))
        (out / "manifest.json").write_bytes(trees.seal(whole))
    else:
        trees.reseal(out)
    return [str(finding) for finding in verify(out).findings]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda d: d.update(ranks=[2]), "its ranks"),
        (lambda d: d.update(complete=True), "its complete"),
        (lambda d: d.update(checks="kernel"), "its checks"),
        (lambda d: d["parallel"].update(ep=1), "its parallel"),
        (lambda d: d["model"].update(hidden_size=512), "its model"),
        (lambda d: d["shards"][1].update(digest="0" * 32), "its shards"),
        (lambda d: d["shards"].pop(), "its shards"),
        (lambda d: d["files"].pop(), "its files"),
        (lambda d: d["units"].reverse(), "its units"),
        (lambda d: d["source"].update(id="0" * 32), "its source"),
    ],
)
def test_a_forged_manifest_of_a_rank_is_named(
    out: Path, change: Callable[[dict[str, Any]], object], said: str
) -> None:
    (found,) = forged(out, "rank-01-of-04/manifest.json", change)
    assert found.startswith("rank-01-of-04/manifest.json")
    assert f"{said} are not what the whole manifest says of this rank" in found


def exchanged(document: dict[str, Any]) -> None:
    """Two experts under each other's number."""
    one, other = document["units"][0]["experts"][:2]
    one["expert"], other["expert"] = other["expert"], one["expert"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (exchanged, "lists other experts of layer-001 than the rank has, or in another order"),
        (lambda d: d["units"][0]["experts"].reverse(), "lists other experts of layer-001"),
        (lambda d: d["units"][0]["experts"].pop(), "lists other experts of layer-001"),
        (
            lambda d: d["units"][1]["experts"][1]["ranges"].reverse(),
            "says that expert 1 of layer-002 is where it is not",
        ),
        (
            lambda d: d["units"][1]["experts"][0]["ranges"][0].__setitem__(1, 4096),
            "says that expert 0 of layer-002 is where it is not",
        ),
        (lambda d: d["units"][0]["tensors"].reverse(), "says that the experts of layer-001 are in layer-001"),
        (
            lambda d: d["units"][0].update(file="layer-002.safetensors"),
            "says that the experts of layer-001 are in layer-002",
        ),
        (lambda d: d["units"].pop(), "has the units ['layer-001'], which are not those"),
        (lambda d: d["units"].append(d["units"][0]), "which are not those that have experts here"),
        (lambda d: d.update(source="0" * 32), "is of another conversion"),
        (lambda d: d.update(units=7), "not of this format"),
    ],
)
def test_forged_places_of_experts_are_named(
    out: Path, change: Callable[[dict[str, Any]], object], said: str
) -> None:
    (found,) = forged(out, "rank-01-of-04/experts.json", change)
    assert found.startswith("rank-01-of-04/experts.json")
    assert said in found


def test_a_rank_that_is_not_there_has_no_documents(out: Path) -> None:
    path = "rank-09-of-04/experts.json"
    (out / path).parent.mkdir()
    shutil.copy(out / FOLDERS[0] / "experts.json", out / path)
    trees.reseal(
        out, lambda document: document["files"].append({"path": path, "size": 1, "digest": "0" * 32})
    )
    found = {finding.path: finding.what for finding in verify(out).findings}
    assert found[path] == "is in the folder of a rank that is not there"


def test_a_part_is_checked_by_the_documents_it_has(out: Path) -> None:
    shutil.rmtree(out / "rank-03-of-04")
    assert [str(finding) for finding in verify(out, ranks=[0, 1, 2]).findings] == []
    manifest: Manifest = open_shards(out, 2).manifest
    assert manifest.ranks == (2,)


@pytest.mark.parametrize("name", OURS)
def test_documents_that_one_rank_has_not_are_missed(out: Path, name: str) -> None:
    """Taken off the disk and out of the list, with all digests made to fit."""
    lost = f"{FOLDERS[2]}/{name}"
    (out / lost).unlink()
    trees.reseal(
        out,
        lambda document: document.update(files=[file for file in document["files"] if file["path"] != lost]),
    )
    said = {finding.path: finding.what for finding in verify(out).findings}
    assert said[lost] == "is not listed, and those of other ranks are"


def test_experts_that_are_said_to_be_cut_like_others_are_named(out: Path) -> None:
    def forge(document: dict[str, Any]) -> None:
        unit = next(unit for unit in document["units"] if unit["name"] == "layer-001")
        next(each for each in unit["tensors"] if each["rule"] == "experts")["rule"] = "row"

    trees.reseal(out, forge)
    found = verify(out)
    assert "layer-001" in str(found.findings)
    assert found.unproven > 0
