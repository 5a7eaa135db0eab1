"""Nothing of the user's is ever removed or written through: every way to have that happen is tried."""

from __future__ import annotations

import os
import pty
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import trees
from checkpoints import Checkpoint, make_small
from marlin_convert import convert, plan, verify
from marlin_convert.checkpoint.index import INDEX_NAME
from marlin_convert.documents.records import FinishedUnit
from marlin_convert.errors import MachineError, UsageError
from marlin_convert.pipeline.out_state import OutState, observe
from marlin_convert.pipeline.work_folder import WorkFolder
from marlin_convert.storage.writer import ShardFile, finish_files

COMMAND = [sys.executable, "-m", "marlin_convert"]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return make_small(tmp_path_factory.mktemp("safe") / "checkpoint", layers=1, experts=2)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """Another checkpoint."""
    return make_small(tmp_path_factory.mktemp("other") / "checkpoint", layers=1, experts=4)


@pytest.fixture
def out(source: Checkpoint, tmp_path: Path) -> Path:
    """A conversion."""
    convert(str(source.folder), tmp_path / "k26", tp=2)
    return tmp_path / "k26"


def everything(folder: Path) -> dict[str, bytes]:
    """All files of a folder, no matter what."""
    return trees.tree(folder, without=())


# SOURCE inside OUT.


def test_a_source_that_was_moved_into_out(source: Checkpoint, out: Path) -> None:
    shutil.rmtree(out / "source")
    shutil.copytree(source.folder, out / "source")
    before = everything(out)
    for overwrite in (False, True):
        with pytest.raises(UsageError, match=r"lies in .*choose another place for the output, or move the"):
            convert(str(out / "source"), out, tp=2, overwrite=overwrite)
    assert everything(out) == before


def test_a_source_of_links_into_out(source: Checkpoint, out: Path, tmp_path: Path) -> None:
    """As a hub cache is: a folder of links, whose files are elsewhere."""
    shutil.copytree(source.folder, out / "blobs")
    links = tmp_path / "links"
    links.mkdir()
    for path in (out / "blobs").iterdir():
        (links / path.name).symlink_to(path)
    before = everything(out)
    with pytest.raises(UsageError, match="lies in"):
        convert(str(links), out, tp=2, overwrite=True)
    (tmp_path / "out-by-a-link").symlink_to(out)
    with pytest.raises(UsageError, match="lies in"):
        convert(str(links), tmp_path / "out-by-a-link", tp=2, overwrite=True)
    assert everything(out) == before


def test_out_within_another_conversion(source: Checkpoint, out: Path) -> None:
    before = everything(out)
    with pytest.raises(UsageError, match="lies in the conversion"):
        convert(source.folder, out / "rank-00-of-02" / "new", tp=2, overwrite=True)
    assert everything(out) == before


def test_a_disk_that_is_too_small_leaves_no_mark(
    source: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing was begun, so other options may be asked for."""
    used = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr("shutil.disk_usage", lambda place: used)
    with pytest.raises(MachineError, match="are still to be written but only"):
        convert(source.folder, tmp_path / "out", tp=2)
    assert list((tmp_path / "out").iterdir()) == []


# Folders of somebody else's.


@pytest.mark.parametrize(
    "files",
    [
        {".work/notes.txt": "mine", "README.md": "mine", "config.json": "{}"},
        {".work/job.json": "{}", "source/thesis.tex": "mine"},
        {".work/units/layer-000.json": "{}", "README.md": "mine"},
        {"manifest.json": '{"format": "web-app"}', "README.md": "mine"},
        {"provenance.json": "{}", "rank-00-of-02/layer-000.safetensors": "mine"},
    ],
)
def test_a_folder_that_only_looks_like_ours(
    source: Checkpoint, tmp_path: Path, files: dict[str, str]
) -> None:
    out = tmp_path / "out"
    for name, text in files.items():
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text(text)
    for overwrite in (False, True):
        with pytest.raises(UsageError, match="is not empty and is not a conversion"):
            convert(str(source.folder), out, tp=2, overwrite=overwrite)
    assert everything(out) == {name: text.encode() for name, text in files.items()}


def test_a_mark_behind_a_link_is_none(source: Checkpoint, out: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    (mine / "rank-00-of-02").mkdir(parents=True)
    (mine / "rank-00-of-02" / "layer-000.safetensors").write_text("mine")
    (mine / "manifest.json").symlink_to(out / "manifest.json")
    before = everything(out)
    with pytest.raises(UsageError, match="is not empty and is not a conversion"):
        convert(str(source.folder), mine, tp=2, overwrite=True)
    assert (mine / "rank-00-of-02" / "layer-000.safetensors").read_text() == "mine"
    assert everything(out) == before


@pytest.mark.parametrize(
    "foreign",
    ["notes.txt", "rank-00-of-02/notes.txt", "source/notes.txt", ".work/x", "runs/model.safetensors"],
)
def test_one_strange_file_saves_all(source: Checkpoint, other: Checkpoint, out: Path, foreign: str) -> None:
    (out / foreign).parent.mkdir(exist_ok=True)
    (out / foreign).write_text("mine")
    before = everything(out)
    with pytest.raises(UsageError, match=r"files? not of a conversion.*move them away"):
        convert(str(other.folder), out, tp=2, overwrite=True)
    assert everything(out) == before


# Links in OUT.


@pytest.mark.parametrize("name", ["config.json", "README.md", "manifest.json", "source/config.json"])
def test_a_link_in_place_of_a_document_is_not_written_through(
    source: Checkpoint, out: Path, tmp_path: Path, name: str
) -> None:
    """A broken or lost document is made anew; what the link leads to is left alone."""
    undisturbed = trees.tree(out)
    target = tmp_path / "precious"
    target.write_bytes(b"precious")
    (out / name).unlink()
    (out / name).symlink_to(target)
    try:
        convert(str(source.folder), out, tp=2, overwrite=True)
    except UsageError:
        assert (out / name).is_symlink()
    else:
        assert trees.tree(out) == undisturbed
    assert target.read_bytes() == b"precious"


@pytest.mark.parametrize("lose", [False, True])
@pytest.mark.parametrize("edit", [lambda text: text + b" ", lambda text: b"x" + text[1:]])
@pytest.mark.parametrize(
    "name", ["README.md", "config.json", "LICENSE", "source/config.json", f"rank-01-of-02/{INDEX_NAME}"]
)
def test_an_edited_document_is_kept(
    source: Checkpoint, out: Path, name: str, edit: Callable[[bytes], bytes], lose: bool
) -> None:
    """Whether it keeps its size or not, whatever brings a run to it: nothing, a lost file, another split."""
    document, lost = out / name, out / "generation_config.json"
    undisturbed = trees.tree(out)
    document.write_bytes(edit(document.read_bytes()))
    if lose:
        lost.unlink()
    before = everything(out)
    for tp, overwrite in ((2, False), (2, True), (1, True)):
        with pytest.raises(UsageError, match=rf"{re.escape(name)} was edited or .* move it away"):
            convert(str(source.folder), out, tp=tp, overwrite=overwrite)
        assert str(plan(source.folder, out, tp=tp, overwrite=overwrite).refusal).endswith(
            "move it away, then run the same command again"
        )
        assert everything(out) == before
    document.unlink()
    report = convert(str(source.folder), out, tp=2)
    assert (report.made, report.action) == (0, "repair")
    assert trees.tree(out) == undisturbed


def test_all_edited_documents_are_named(source: Checkpoint, out: Path) -> None:
    for name in ("README.md", "LICENSE"):
        (out / name).write_bytes(b"mine")
    with pytest.raises(UsageError, match=r"LICENSE and README\.md were edited .* move them away"):
        convert(source.folder, out, tp=2)


def test_a_document_that_came_while_it_was_made_is_kept(
    source: Checkpoint, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A night is long enough for notes; what was made is not lost by them."""
    new, undisturbed = tmp_path / "new", trees.tree(out)

    def broken(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("marlin_convert.pipeline.conversion.finish_output", broken)
        with pytest.raises(KeyboardInterrupt):
            convert(source.folder, new, tp=2)
    (new / "README.md").write_text("mine")
    for _ in range(2):
        with pytest.raises(UsageError, match=r"README\.md was edited .* move it away"):
            convert(source.folder, new, tp=2)
        assert (new / "README.md").read_text() == "mine"
    (new / "README.md").unlink()
    assert convert(source.folder, new, tp=2).made == 0
    assert trees.tree(new) == undisturbed


def test_what_was_edited_while_it_was_mended_is_not_removed(
    source: Checkpoint, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A repair broke off, so there is no manifest; the one that is set aside tells what was written."""
    undisturbed = trees.tree(out)
    (out / "rank-01-of-02" / "layer-000.safetensors").unlink()

    def broken(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("marlin_convert.pipeline.conversion.finish_output", broken)
        with pytest.raises(KeyboardInterrupt):
            convert(source.folder, out, tp=2)
    (out / "LICENSE").write_bytes(b"mine")
    for tp, overwrite in ((1, True), (2, True), (2, False)):
        with pytest.raises(UsageError, match=r"LICENSE was edited .* move it away"):
            convert(source.folder, out, tp=tp, overwrite=overwrite)
        assert (out / "LICENSE").read_bytes() == b"mine"
    (out / "LICENSE").unlink()
    assert convert(source.folder, out, tp=2, overwrite=True).action == "continue"
    assert trees.tree(out) == undisturbed


def test_a_linked_folder_is_read_and_never_written_to(source: Checkpoint, out: Path, tmp_path: Path) -> None:
    """A rank's files may be moved to another disk; where one of them is lost the manifest stays until the
    folder is back.
    """
    folder, elsewhere = out / "rank-01-of-02", tmp_path / "elsewhere"
    shutil.move(folder, elsewhere)
    folder.symlink_to(elsewhere)
    assert convert(source.folder, out, tp=2).action == "done"
    (elsewhere / "layer-000.safetensors").unlink()
    before = everything(out)
    with pytest.raises(UsageError, match=r"rank-01-of-02 is a link; move it away, then run the same"):
        convert(source.folder, out, tp=2)
    assert everything(out) == before
    folder.unlink()
    shutil.move(elsewhere, folder)
    assert convert(source.folder, out, tp=2).made == 1


def test_a_folder_behind_a_link_is_neither_emptied_nor_written(
    other: Checkpoint, out: Path, tmp_path: Path
) -> None:
    elsewhere = tmp_path / "elsewhere"
    shutil.move(out / "rank-01-of-02", elsewhere)
    (out / "rank-01-of-02").symlink_to(elsewhere)
    before = everything(elsewhere)
    with pytest.raises(UsageError, match=r"rank-01-of-02; move them away"):
        convert(str(other.folder), out, tp=2, overwrite=True)
    assert everything(elsewhere) == before


# What --overwrite keeps, lists and asks.


def test_overwrite_keeps_what_the_same_conversion_made(source: Checkpoint, out: Path) -> None:
    """This one has no experts, so its digests.bin is empty, and whole."""
    made = {path: path.stat().st_mtime_ns for path in out.rglob("*.safetensors")}
    lost = out / "rank-00-of-02" / "layer-000.safetensors"
    report = convert(str(source.folder), out, tp=2, overwrite=True)
    assert report.made == 0
    lost.unlink()
    report = convert(str(source.folder), out, tp=2, overwrite=True)
    assert report.made == 1
    kept = {path for path, when in made.items() if path.stat().st_mtime_ns == when}
    assert kept == {path for path in made if path.name != "layer-000.safetensors"}
    assert verify(out).ok


def test_nothing_is_removed_before_the_source_was_read(out: Path, tmp_path: Path) -> None:
    before = everything(out)
    with pytest.raises(Exception, match="nowhere"):
        convert(str(tmp_path / "nowhere"), out, tp=2, overwrite=True)
    assert everything(out) == before


def overwrite(source: Path, out: Path, *options: str) -> subprocess.CompletedProcess[str]:
    line = [*COMMAND, "convert", str(source), str(out), "--tp", "2", "--overwrite", *options]
    return subprocess.run(line, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)


def test_without_a_terminal_it_lists_and_refuses(other: Checkpoint, out: Path) -> None:
    before = everything(out)
    done = overwrite(other.folder, out)
    assert done.returncode == 2
    assert f"--overwrite removes {len(before)} files" in done.stderr
    assert str(out / "manifest.json") in done.stderr
    assert "nothing was removed" in done.stderr
    assert everything(out) == before
    assert overwrite(other.folder, out, "--yes").returncode == 0
    assert everything(out) != before


@pytest.mark.parametrize(("answer", "code"), [(b"n\n", 2), (b"y\n", 0)])
def test_in_a_terminal_it_asks(other: Checkpoint, out: Path, answer: bytes, code: int) -> None:
    before = trees.tree(out)
    line = [*COMMAND, "convert", str(other.folder), str(out), "--tp", "2", "--overwrite"]
    leader, terminal = pty.openpty()
    with subprocess.Popen(line, stdin=terminal, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        os.close(terminal)
        os.write(leader, answer)
        _, stderr = process.communicate(timeout=120)
    os.close(leader)
    assert process.returncode == code
    assert b"Remove them?" in stderr
    assert (trees.tree(out) == before) == (code == 2)


# What else is beside, within or in the place of what is ours.


def test_a_finished_conversion_keeps_what_somebody_put_in_its_work_folder(
    source: Checkpoint, out: Path
) -> None:
    (out / ".work" / "units").mkdir(parents=True)
    (out / ".work" / "units" / "layer-000.json").write_text("left by a broken run")
    (out / ".work" / "units" / "mine.txt").write_text("mine")
    before = everything(out)
    assert convert(source.folder, out, tp=2).made == 0
    before.pop(".work/units/layer-000.json")
    assert everything(out) == before


def test_a_file_that_only_the_new_source_copies_is_not_of_the_old_conversion(
    out: Path, other: Checkpoint, tmp_path: Path
) -> None:
    """notes.txt was not in the source of what lies in OUT, so it is somebody's own."""
    more = shutil.copytree(other.folder, tmp_path / "more")
    (more / "notes.txt").write_text("published")
    (out / "notes.txt").write_text("mine")
    before = everything(out)
    with pytest.raises(UsageError, match=r"such as notes\.txt; move them away"):
        convert(more, out, tp=2, overwrite=True)
    assert everything(out) == before


def test_what_comes_to_lie_in_out_while_it_begins_is_asked_for_too(
    source: Checkpoint, other: Checkpoint, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the first look there is nothing in OUT; at the second another process has converted into it."""
    place = tmp_path / "place"
    looks: list[OutState] = []
    asked: list[Path] = []

    def look(*arguments: Any, **more: Any) -> OutState:
        if looks:
            shutil.copytree(out, place, dirs_exist_ok=True)
        looks.append(observe(*arguments, **more))
        return looks[-1]

    monkeypatch.setattr("marlin_convert.pipeline.conversion.observe", look)

    def refuse(files: Sequence[Path]) -> bool:
        asked.extend(files)
        return False

    with pytest.raises(UsageError, match="was left as it is"):
        convert(other.folder, place, tp=2, overwrite=True, confirm=refuse)
    assert sorted(asked) == sorted(place / name for name in everything(out))
    assert everything(place) == everything(out)


def test_out_moved_away_and_begun_anew_meanwhile(
    source: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What another process is writing there is neither taken for finished nor removed."""
    out = tmp_path / "out"
    half = out / "rank-00-of-02" / "layer-000.safetensors.partial"

    def move(files: list[ShardFile]) -> None:
        if not half.exists() or half.stat().st_size > 4:
            out.rename(tmp_path / "moved")
            half.parent.mkdir(parents=True)
            half.write_bytes(b"half")
        finish_files(files)

    monkeypatch.setattr("marlin_convert.pipeline.unit_work.finish_files", move)
    with pytest.raises(MachineError, match="it was moved or replaced meanwhile"):
        convert(source.folder, out, tp=2, threads=1)
    assert everything(out) == {"rank-00-of-02/layer-000.safetensors.partial": b"half"}


@pytest.fixture
def mounted(out: Path) -> Iterator[Path]:
    """A rank's folder that is another file system, its files lost."""
    place = out / "rank-00-of-02"
    for path in place.iterdir():
        path.unlink()
    line = ["mount", "-t", "tmpfs", "-o", "size=20m", "none", str(place)]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"a file system cannot be mounted here: {done.stderr.strip()}")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_folder_on_another_file_system_is_refused_before_anything_is_made(
    source: Checkpoint, other: Checkpoint, out: Path, mounted: Path
) -> None:
    """Nothing can be moved into it at the end, and --overwrite could not remove it."""
    with pytest.raises(UsageError, match=r"rank-00-of-02 is on another file system .*; unmount it"):
        convert(source.folder, out, tp=2)
    assert list(mounted.iterdir()) == []
    before = everything(out)
    with pytest.raises(UsageError, match=r"such as rank-00-of-02; move them away"):
        convert(other.folder, out, tp=2, overwrite=True)
    assert everything(out) == before


def test_every_folder_above_a_recorded_file_is_durable(
    source: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once a unit is recorded its source may go: each name on the way to its files must be on the disk."""
    synced: list[str] = []
    sync, record = os.fsync, WorkFolder.record
    out = tmp_path / "above" / "out"

    def noted(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        sync(descriptor)

    def recording(work: WorkFolder, unit: FinishedUnit) -> None:
        for file in unit.files:
            folder = out / ("common" if file.rank is None else f"rank-{file.rank:02}-of-02")
            name = str(folder / f"{unit.name}.safetensors.partial")
            # the file, then its own folder; and, after their folders were made, those above
            assert synced.index(name) < len(synced) - 1 - synced[::-1].index(str(folder))
            assert synced.index(f"{out}/.work/job.json.partial") < len(synced) - 1 - synced[::-1].index(
                str(out)
            )
            assert {str(tmp_path), str(tmp_path / "above")} <= set(synced)
        assert synced.count(str(out)) == 2  # for .work, and for the ranks
        record(work, unit)

    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr(WorkFolder, "record", recording)
    assert convert(source.folder, out, tp=2).made == 3
