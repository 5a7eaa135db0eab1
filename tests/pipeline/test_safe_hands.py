"""Nothing of the user's is ever removed or written through: every way to have that happen is tried."""

from __future__ import annotations

import os
import pty
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import trees
from checkpoints import Checkpoint, make_small
from marlin_convert import convert, verify
from marlin_convert.errors import MachineError, UsageError

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
    with pytest.raises(UsageError, match=r"files that are not of a conversion.*move them away"):
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
