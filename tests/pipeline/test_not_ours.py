"""What lies in OUT under a name of ours and is not ours, and what OUT's own lists say is ours."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import trees
from checkpoints import Checkpoint, make_small
from marlin_convert import convert, plan, reshard, verify
from marlin_convert.documents.records import FinishedUnit
from marlin_convert.errors import ConvertError, MachineError, UsageError
from marlin_convert.pipeline.work_folder import WorkFolder

SHARD = "rank-00-of-02/layer-000.safetensors"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_small(tmp_path_factory.mktemp("ours") / "checkpoint", layers=1, experts=2).folder


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """Another checkpoint, much larger."""
    return make_small(tmp_path_factory.mktemp("other") / "checkpoint", layers=2, experts=4)


@pytest.fixture(scope="module")
def whole(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A conversion. Not to be changed."""
    out = tmp_path_factory.mktemp("whole") / "k26"
    convert(source, out, tp=2)
    return out


@pytest.fixture
def out(whole: Path, tmp_path: Path) -> Path:
    """A conversion."""
    return shutil.copytree(whole, tmp_path / "k26")


@pytest.fixture
def begun(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One that broke off before its first record."""
    place = tmp_path / "begun"

    def refuse(*_: object) -> None:
        raise MachineError("no")

    with monkeypatch.context() as patch:
        patch.setattr(WorkFolder, "record", refuse)
        with pytest.raises(MachineError, match="no"):
            convert(source, place, tp=2, threads=1)
    return place


def everything(folder: Path) -> dict[str, bytes]:
    """All files of a folder, no matter what."""
    return trees.tree(folder, without=())


def test_a_manifest_of_another_program_is_no_mark(source: Path, tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text('{"name": "marlin-convert", "version": "1"}')
    (tmp_path / "README.md").write_text("mine")
    before = everything(tmp_path)
    with pytest.raises(UsageError, match="is not empty and is not a conversion"):
        convert(source, tmp_path, tp=2, overwrite=True)
    assert everything(tmp_path) == before


@pytest.mark.parametrize(
    "name",
    ["rank-00-of-02/layer-099.safetensors", "source/headers/notes.gz", ".work/units/mine.json"],
)
def test_a_name_of_ours_that_the_manifest_does_not_list(other: Checkpoint, out: Path, name: str) -> None:
    (out / name).parent.mkdir(parents=True, exist_ok=True)
    (out / name).write_text("mine")
    before = everything(out)
    with pytest.raises(UsageError, match=f"not of a conversion, such as {name}"):
        convert(other.folder, out, tp=2, overwrite=True)
    assert everything(out) == before


@pytest.mark.parametrize("name", ["README.md", "config.json", "provenance.json", SHARD])
def test_where_nothing_is_listed_content_tells(other: Checkpoint, begun: Path, name: str) -> None:
    (begun / name).write_text("mine, and of no use to an engine")
    before = everything(begun)
    with pytest.raises(UsageError, match=f"such as {name}"):
        convert(other.folder, begun, tp=2, overwrite=True)
    assert everything(begun) == before


@pytest.mark.parametrize("how", ["file", "folder", "link"])
@pytest.mark.parametrize("state", ["begun", "whole"])
def test_something_in_the_place_of_a_shard_is_not_replaced(
    source: Path, state: str, how: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    folder: Path = request.getfixturevalue("begun" if state == "begun" else "out")
    path = folder / SHARD
    path.unlink(missing_ok=True)
    if how == "folder":
        path.mkdir()
        (path / "mine").write_text("mine")
    else:
        there = path if how == "file" else tmp_path / "mine.txt"
        there.write_text("mine")
        if how == "link":
            path.symlink_to(there)
    before = everything(folder)
    with pytest.raises(UsageError, match="is in the place of a shard"):
        convert(source, folder, tp=2)
    assert isinstance(plan(source, folder, tp=2).refusal, UsageError)
    assert everything(folder) == before
    assert path.is_symlink() == (how == "link")


def test_half_a_shard_behind_a_link_is_left(source: Path, out: Path, tmp_path: Path) -> None:
    """common/ is no folder of a part, so nothing refuses the link."""
    (tmp_path / "mine").mkdir()
    mine = tmp_path / "mine" / "layer-000.safetensors.partial"
    mine.write_text("mine")
    part = tmp_path / "part"
    convert(source, part, tp=2, layers=[0])
    (part / "common").symlink_to(tmp_path / "mine")
    (part / SHARD).unlink()
    assert convert(source, part, tp=2, layers=[0]).made == 1
    assert mine.read_text() == "mine"


@pytest.mark.parametrize("name", ["units", "documents", "before", "staging"])
def test_a_folder_of_the_work_folder_that_is_a_link(
    source: Path, begun: Path, tmp_path: Path, name: str
) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "layer-000.json").write_text("mine")
    shutil.rmtree(begun / ".work" / name, ignore_errors=True)
    (begun / ".work" / name).symlink_to(mine)
    with pytest.raises(UsageError, match=rf"\.work/{name} is a link; move it away"):
        convert(source, begun, tp=2)
    assert everything(mine) == {"layer-000.json": b"mine"}


def test_what_somebody_put_into_the_work_folder_stays(source: Path, out: Path) -> None:
    names = [".work/staging/notes.txt", ".work/units/mine.json", ".work/documents/seven"]
    for name in names:
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text("mine")
    before = everything(out)
    assert convert(source, out, tp=2).action == "done"
    assert everything(out) == before


@pytest.mark.parametrize("lost", [(), (SHARD,)])
@pytest.mark.parametrize("overwrite", [False, True])
def test_an_edited_provenance_is_kept(
    source: Path, other: Checkpoint, out: Path, lost: tuple[str, ...], overwrite: bool
) -> None:
    document = json.loads((out / "provenance.json").read_bytes())
    (out / "provenance.json").write_text(json.dumps(document | {"host": "nobody's business"}))
    for name in lost:
        (out / name).unlink()
    before = everything(out)
    with pytest.raises(UsageError, match=r"provenance\.json was edited or damaged"):
        convert(other.folder if overwrite else source, out, tp=2, overwrite=overwrite)
    assert everything(out) == before


def test_a_document_that_the_source_has_no_more_goes_with_it(source: Path, out: Path, tmp_path: Path) -> None:
    """Mended from a source that has lost a small file: it is in the new manifest no more, nor in OUT."""
    less = shutil.copytree(source, tmp_path / "less")
    (less / "tokenizer_config.json").unlink()
    (out / SHARD).unlink()
    assert convert(less, out, tp=2).action == "repair"
    assert not (out / "tokenizer_config.json").exists()
    assert verify(out)
    clean = tmp_path / "clean"
    convert(less, clean, tp=2)
    assert trees.tree(out) == trees.tree(clean)


def test_a_removal_that_broke_off_goes_on_from_another_source(
    source: Path, other: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What lies in OUT has a small file that the new source has not: its removal keeps a list."""
    more = shutil.copytree(source, tmp_path / "more")
    (more / "special_tokens.json").write_text("{}")
    out = tmp_path / "out"
    convert(more, out, tp=2)
    _break_off(monkeypatch, [9])
    with pytest.raises(MachineError, match="clearing"):
        convert(other.folder, out, tp=2, overwrite=True)
    monkeypatch.undo()
    assert (out / "special_tokens.json").exists()
    assert not (out / "manifest.json").exists()
    convert(other.folder, out, tp=2, overwrite=True)
    assert verify(out)
    assert not (out / "special_tokens.json").exists()


def _break_off(monkeypatch: pytest.MonkeyPatch, left: list[int]) -> None:
    """The disk refuses to remove more than `left` files."""
    unlink = Path.unlink

    def counted(path: Path, *arguments: Any, **more: Any) -> None:
        left[0] -= path.suffix != ".partial"
        if not left[0]:
            raise OSError(5, "no")
        unlink(path, *arguments, **more)

    monkeypatch.setattr(Path, "unlink", counted)


def test_what_does_not_fit_does_not_remove_what_is_there(
    other: Checkpoint, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("marlin_convert.pipeline.space.free_space", lambda place: 100_000)
    before = everything(out)
    with pytest.raises(MachineError, match="are still to be written but only"):
        convert(other.folder, out, tp=2, overwrite=True)
    assert everything(out) == before


def test_the_room_of_what_is_removed_counts(source: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same checkpoint again, cut otherwise, on a disk that has next to nothing left."""
    size = sum(len(data) for data in everything(out).values())
    free = iter([500_000])
    monkeypatch.setattr("marlin_convert.pipeline.space.free_space", lambda place: next(free, 500_000 + size))
    assert convert(source, out, tp=1, overwrite=True).action == "replace"
    assert verify(out)


def test_a_folder_that_another_conversion_reads_by_a_link_is_not_cleared(out: Path, tmp_path: Path) -> None:
    """`other` has its rank 0 in `out`: to replace `out` by another cut of `other` would destroy both."""
    linked = shutil.copytree(out, tmp_path / "other")
    shutil.rmtree(linked / "rank-00-of-02")
    (linked / "rank-00-of-02").symlink_to(out / "rank-00-of-02")
    before = everything(out)
    with pytest.raises(UsageError, match="where files of the source are, lies in"):
        reshard(linked, out, tp=4, overwrite=True)
    assert everything(out) == before


def test_nothing_is_removed_for_a_conversion_that_has_lost_shards(
    whole: Path, out: Path, tmp_path: Path
) -> None:
    less = shutil.copytree(whole, tmp_path / "less")
    (less / SHARD).unlink()
    before = everything(out)
    with pytest.raises(ConvertError, match="layer-000"):
        reshard(less, out, tp=4, overwrite=True)
    assert everything(out) == before


def test_it_continues_without_the_folder_of_its_records(source: Path, begun: Path) -> None:
    shutil.rmtree(begun / ".work" / "units")
    assert convert(source, begun, tp=2).action == "continue"
    assert verify(begun)


def _a_folder(path: Path) -> None:
    path.mkdir()
    (path / "notes").write_text("mine")


def _a_pipe(path: Path) -> None:
    os.mkfifo(path)


def _a_link(path: Path) -> None:
    path.symlink_to("nowhere")


@pytest.mark.parametrize("put", [_a_folder, _a_pipe, _a_link])
@pytest.mark.parametrize("name", ["digests.bin", "source/digests.bin", "source/headers/{}.gz", "LICENSE"])
@pytest.mark.parametrize("state", ["finished", "mended", "begun"])
def test_something_of_another_kind_in_the_place_of_a_document(
    source: Path,
    out: Path,
    begun: Path,
    state: str,
    name: str,
    put: Callable[[Path], None],
) -> None:
    """It is named, and neither replaced nor the reason for an error of the system."""
    place = begun if state == "begun" else out
    undisturbed = trees.tree(out)
    path = place / name.format(min(source.glob("*.safetensors")).name)
    if state == "mended":
        (out / SHARD).unlink()
    path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    put(path)
    before = path.lstat()
    with pytest.raises(UsageError, match=rf"{re.escape(str(path))} was edited or damaged .* move it away"):
        convert(source, place, tp=2)
    assert os.path.samestat(before, path.lstat())
    path.rename(place.parent / "away")
    convert(source, place, tp=2, overwrite=state != "begun")
    assert trees.tree(place) == undisturbed


def test_a_folder_in_the_place_of_a_record_is_named(source: Path, begun: Path) -> None:
    _a_folder(place := begun / ".work" / "units" / "layer-000.json")
    with pytest.raises(MachineError, match=rf"move {re.escape(str(place))} away, then run the same"):
        convert(source, begun, tp=2)
    shutil.rmtree(place)
    convert(source, begun, tp=2)
    assert verify(begun)


@pytest.mark.parametrize("name", ["LICENSE", "rank-01-of-02/experts.json", "rank-01-of-02/manifest.json"])
@pytest.mark.parametrize("how", ["lost", "damaged", "half removed"])
def test_what_was_edited_is_not_removed_where_the_manifest_is_lost(
    source: Path, other: Checkpoint, out: Path, monkeypatch: pytest.MonkeyPatch, how: str, name: str
) -> None:
    """The manifests of ranks tell what was written, and of these their own digest."""
    if how == "half removed":
        _break_off(monkeypatch, [3])
        with pytest.raises(MachineError, match="clearing"):
            convert(other.folder, out, tp=2, overwrite=True)
        monkeypatch.undo()
        assert not (out / "manifest.json").exists()
    elif how == "lost":
        (out / "manifest.json").unlink()
    else:
        (out / "manifest.json").write_bytes((out / "manifest.json").read_bytes()[:1000])
    (out / name).write_text("mine")
    before = everything(out)
    for checkpoint in (source, other.folder):
        with pytest.raises(UsageError, match=rf"{name} was edited or damaged .* move it away"):
            convert(checkpoint, out, tp=2, overwrite=True)
        assert everything(out) == before
    (out / name).unlink()
    convert(other.folder, out, tp=2, overwrite=True)
    assert verify(out)


def test_what_is_left_beside_lost_folders_of_ranks_is_removed(source: Path, out: Path) -> None:
    """It looks like a checkpoint without weights."""
    for name in ("rank-00-of-02", "rank-01-of-02"):
        shutil.rmtree(out / name)
    (out / "manifest.json").unlink()
    with pytest.raises(UsageError, match=r"no manifest\.json; use --overwrite to make it again"):
        convert(source, out, tp=1)
    assert convert(source, out, tp=1, overwrite=True).action == "replace"
    assert verify(out)


@pytest.mark.parametrize(
    ("name", "put"),
    [
        ("rank-00-of-02/top.safetensors", "a file"),
        ("rank-00-of-02/top.safetensors", "a folder"),
        ("manifest.json", "a file"),
        ("manifest.json", "a folder"),
        ("source/digests.bin", "a folder"),
    ],
)
def test_what_came_while_it_was_made_is_not_replaced(
    source: Path, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, put: str
) -> None:
    """A name was free when the run began, and is not when it is given."""
    new, record, mine = tmp_path / "new", WorkFolder.record, tmp_path / "new" / name

    def put_it(work: WorkFolder, unit: FinishedUnit) -> None:
        if unit.name == "layer-000":
            mine.parent.mkdir(exist_ok=True)
            _a_folder(mine) if put == "a folder" else mine.write_text("mine")
        record(work, unit)

    with monkeypatch.context() as patch:
        patch.setattr(WorkFolder, "record", put_it)
        with pytest.raises(UsageError, match=rf"{re.escape(str(mine))} .*move it away, then run"):
            convert(source, new, tp=2, threads=1)
    for overwrite in (False, True):
        with pytest.raises(UsageError, match=rf"{re.escape(str(mine))} .*move it away, then run"):
            convert(source, new, tp=2, overwrite=overwrite)
    mine.rename(tmp_path / "away")
    assert convert(source, new, tp=2).action == "continue"
    assert trees.tree(new) == trees.tree(out)


@pytest.mark.parametrize("name", ["tokenizer_config.json", "source/config.json", "source/README.md"])
def test_a_file_of_the_name_of_a_copied_one_is_told_by_its_bytes(
    source: Path, begun: Path, other: Checkpoint, name: str
) -> None:
    """Nothing lists it yet; what is the same as the source's may be a run's that broke off."""
    mine = begun / name
    mine.parent.mkdir(exist_ok=True)
    mine.write_text("{}")
    for checkpoint, tp in ((source, 1), (other.folder, 2)):
        with pytest.raises(UsageError, match=rf"holds 1 file not of a conversion, such as {name}"):
            convert(checkpoint, begun, tp=tp, overwrite=True)
        assert mine.read_text() == "{}"
    mine.write_bytes((source / Path(name).name).read_bytes())
    assert convert(source, begun, tp=1, overwrite=True).action == "replace"
    assert verify(begun)


def test_copies_of_another_source_are_told_by_the_manifests_of_ranks(
    source: Path, other: Checkpoint, tmp_path: Path
) -> None:
    changed = shutil.copytree(source, tmp_path / "changed")
    (changed / "tokenizer_config.json").write_text("{}")
    convert(changed, out := tmp_path / "out", tp=2)
    (out / "manifest.json").unlink()
    assert convert(other.folder, out, tp=2, overwrite=True).action == "replace"
    assert verify(out)
