"""Folders that are said to be of a commit: the published sha256 of every weight file that is used is compared
before anything made of it counts, or repository and commit are not named.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

import trees
from checkpoints import Checkpoint
from forks import Forks
from marlin_convert.checkpoint.compared import ComparedFiles, difference
from marlin_convert.checkpoint.source import open_source
from marlin_convert.checkpoint.store import RECORD
from marlin_convert.errors import MachineError, SourceError
from marlin_convert.pipeline.run import convert
from recorded import COMMIT, REPO, blob_id, record, sha256

Command = Callable[..., tuple[int, str, str]]


def weights(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def zero_a_tensor(path: Path) -> str:
    """Its name; the file keeps its size."""
    (header,) = [header for header in open_source(str(path.parent)).headers if header.file == path.name]
    entry = max(header.tensors, key=lambda entry: entry.size)
    with path.open("r+b") as file:
        file.seek(entry.offset)
        file.write(bytes(entry.size))
    return entry.name


def source_of(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "manifest.json").read_bytes())["source"]
    return found


def assert_names_nothing(out: Path) -> None:
    assert not {"repo", "revision"} & source_of(out).keys()
    assert all("sha256" not in file and "sample" in file for file in source_of(out)["files"])
    for name in (REPO, COMMIT, "base_model"):
        assert name not in (out / "README.md").read_text()


def assert_names_the_commit(out: Path, folder: Path) -> None:
    source, card = source_of(out), (out / "README.md").read_text()
    assert (source["repo"], source["revision"]) == (REPO, COMMIT)
    assert {file["name"]: file["sha256"] for file in source["files"]} == {
        path.name: sha256(path) for path in weights(folder)
    }
    assert f"[{REPO}](https://huggingface.co/{REPO}) at commit `{COMMIT}`" in card
    assert all(sha256(path) in card for path in weights(folder))


def test_what_download_recorded_is_compared_and_named(
    tiny: Checkpoint, tiny_tp2: Path, copied_source: Path, tmp_path: Path, command: Command
) -> None:
    record(copied_source)
    out = tmp_path / "out"
    convert(str(copied_source), out, tp=2, threads=2)
    assert_names_the_commit(out, copied_source)
    own = ("manifest.json", "README.md", "provenance.json")
    assert trees.tree(out, without=own) == trees.tree(tiny_tp2, without=own)
    assert command("verify", out)[0] == 0
    for source in (copied_source, tiny.folder):
        assert command("verify", out, "--source", source)[0] == 0
    code, said, _ = command("plan", copied_source, "--tp", 2)
    assert code == 0
    assert f"from: {REPO} at commit {COMMIT} (to be proven: convert compares every weight file)" in said
    assert_names_nothing(tiny_tp2)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("number", [0, 2, -1])
def test_a_zeroed_tensor_is_found(copied_source: Path, tmp_path: Path, number: int, threads: int) -> None:
    record(copied_source)
    path = weights(copied_source)[number]
    expected = sha256(path)
    zero_a_tensor(path)
    with pytest.raises(
        SourceError, match=f"{path} is not the file that {REPO}@{COMMIT} publishes: sha256 "
    ) as e:
        convert(str(copied_source), tmp_path / "out", tp=2, threads=threads)
    assert f"sha256 {sha256(path)}, expected {expected}; fetch it again" in str(e.value)
    assert not (tmp_path / "out" / "manifest.json").exists()
    # what is made of other files stays, and the right file continues
    (copied_source / RECORD).unlink()
    convert(str(copied_source), tmp_path / "as it is", tp=2, threads=threads)
    assert_names_nothing(tmp_path / "as it is")


def test_files_that_no_unit_needs_are_not_read(copied_source: Path, tmp_path: Path, tiny: Checkpoint) -> None:
    record(copied_source)
    last = weights(copied_source)[-1]
    zero_a_tensor(last)
    used = {
        tensor.file for name, tensor in open_source(str(tiny.folder)).tensors.items() if ".layers.0." in name
    }
    assert last.name not in used
    convert(str(copied_source), tmp_path / "out", tp=2, layers=[0], threads=2)
    assert source_of(tmp_path / "out")["repo"] == REPO


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json", "tokenizer_config.json"])
def test_another_small_file_is_found(copied_source: Path, tmp_path: Path, name: str) -> None:
    """Of the same length: the record would not be believed otherwise."""
    record(copied_source)
    path = copied_source / name
    expected = blob_id(path)
    path.write_bytes(path.read_bytes()[:-1] + b" ")
    with pytest.raises(SourceError, match=f"{name} is not the file that {REPO}@{COMMIT} publishes: ") as e:
        convert(str(copied_source), tmp_path / "out", tp=2, threads=2)
    assert f"git's digest {blob_id(path)}, expected {expected}; fetch it again" in str(e.value)
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_a_small_file_of_which_nothing_is_published_is_copied(copied_source: Path, tmp_path: Path) -> None:
    record(copied_source)
    (copied_source / "own.txt").write_text("mine")
    convert(str(copied_source), tmp_path / "out", tp=2, threads=2)
    assert_names_the_commit(tmp_path / "out", copied_source)
    assert (tmp_path / "out" / "own.txt").read_text() == "mine"


def test_digests_of_both_kinds() -> None:
    """Of `printf hello | git hash-object --stdin` and `printf hello | sha256sum`."""
    blob = "b6fc4c620b67d95f953a5c1c1230aaab5db5a1b0"
    whole = "2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824"
    assert difference(blob, BytesIO(b"hello")) is None
    assert difference(whole, BytesIO(b"hello")) is None
    assert difference("0" * 40, BytesIO(b"hello")) == f"git's digest {blob}, expected {'0' * 40}"
    assert difference("0" * 64, BytesIO(b"hello")) == f"sha256 {whole}, expected {'0' * 64}"


@pytest.mark.parametrize("which", ["model-00002-of-000006.safetensors", "config.json"])
def test_without_a_published_digest_nothing_is_claimed(
    copied_source: Path, tmp_path: Path, command: Command, which: str
) -> None:
    record(copied_source, without=which)
    note = f"what {REPO} at commit {COMMIT} publishes of {which} is not known here"
    assert note in command("plan", copied_source, "--tp", 2)[2]
    convert(str(copied_source), tmp_path / "out", tp=2, threads=2)
    assert_names_nothing(tmp_path / "out")


# What was made before counts, too.


def killed(forks: Forks, source: Path, out: Path) -> None:
    """Two units are recorded."""
    fault = {"call": "replace", "number": 8, "action": "SIGKILL"}
    assert forks.run("convert", source, out, "--tp", 2, "--threads", 1, fault=fault).code == -9
    assert list((out / ".work" / "units").iterdir())


def test_continued_with_the_record_it_names_the_commit(
    forks: Forks, copied_source: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    record(copied_source)
    killed(forks, copied_source, out)
    done = forks.run("convert", copied_source, out, "--tp", 2)
    assert (done.code, done.stderr) == (0, "")
    assert_names_the_commit(out, copied_source)


def test_units_that_were_made_without_the_record_are_not_proven_by_it(
    forks: Forks, copied_source: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    killed(forks, copied_source, out)
    record(copied_source)
    assert forks.run("convert", copied_source, out, "--tp", 2).code == 0
    assert_names_nothing(out)
    assert forks.run("verify", out).code == 0


def test_one_run_without_the_record_ends_the_claim(forks: Forks, copied_source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    record(copied_source)
    killed(forks, copied_source, out)
    (copied_source / RECORD).rename(tmp_path / "aside")
    fault = {"call": "pwrite", "number": 3, "action": "SIGKILL"}
    assert forks.run("convert", copied_source, out, "--tp", 2, "--threads", 1, fault=fault).code == -9
    (tmp_path / "aside").rename(copied_source / RECORD)
    assert forks.run("convert", copied_source, out, "--tp", 2).code == 0
    assert_names_nothing(out)


@pytest.mark.parametrize("recorded_before", [True, False])
def test_a_repair_claims_what_both_claim(
    forks: Forks, copied_source: Path, tmp_path: Path, recorded_before: bool
) -> None:
    out = tmp_path / "out"
    if recorded_before:
        record(copied_source)
    assert forks.run("convert", copied_source, out, "--tp", 2).code == 0
    before = trees.tree(out)
    (out / "rank-00-of-02" / "layer-001.safetensors").unlink()
    if not recorded_before:
        record(copied_source)
    assert forks.run("convert", copied_source, out, "--tp", 2).code == 0
    assert trees.tree(out) == before
    (copied_source / RECORD).unlink()
    (out / "rank-00-of-02" / "layer-001.safetensors").unlink()
    assert forks.run("convert", copied_source, out, "--tp", 2).code == 0
    assert_names_nothing(out)


# The hub's cache.


@pytest.fixture
def snapshot(tiny: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache that has REPO at COMMIT, and no network."""
    from huggingface_hub import constants

    place = tmp_path / "cache" / "models--org--name"
    folder = place / "snapshots" / COMMIT
    for each in (folder, place / "blobs", place / "refs"):
        each.mkdir(parents=True)
    (place / "refs" / "main").write_text(COMMIT)
    for path in tiny.folder.iterdir():
        name = sha256(path) if path.suffix == ".safetensors" else blob_id(path)
        shutil.copy(path, place / "blobs" / name)
        (folder / path.name).symlink_to(Path("..", "..", "blobs", name))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    return folder


def test_offline_the_cache_is_compared_and_named(
    snapshot: Path, tmp_path: Path, tiny: Checkpoint, command: Command
) -> None:
    cache = ("--cache-dir", tmp_path / "cache")
    code, _, stderr = command("convert", REPO, tmp_path / "out", "--tp", 2, *cache)
    assert (code, stderr) == (0, "")
    assert_names_the_commit(tmp_path / "out", tiny.folder)
    blob = weights(snapshot)[0].resolve()
    zero_a_tensor(weights(snapshot)[0])
    code, _, stderr = command("convert", REPO, tmp_path / "zeroed", "--tp", 2, *cache)
    assert code == 3
    assert (
        f"is not the file that {REPO}@{COMMIT} publishes: sha256 {sha256(blob)}, expected {blob.name}"
        in stderr
    )
    assert not (tmp_path / "zeroed" / "manifest.json").exists()
    (config := snapshot / "config.json").write_bytes(config.read_bytes() + b" ")
    code, _, stderr = command("plan", REPO, "--tp", 2, *cache)
    assert code == 3
    assert f"publishes: git's digest {blob_id(config)}, expected {config.resolve().name}" in stderr


def test_a_snapshot_given_as_a_folder_claims_nothing(snapshot: Path, tmp_path: Path) -> None:
    convert(str(snapshot), tmp_path / "out", tp=2, threads=2)
    assert_names_nothing(tmp_path / "out")


def test_a_cache_without_links_claims_nothing(snapshot: Path, tmp_path: Path, command: Command) -> None:
    """As on file systems that have none: the names of the blobs are lost."""
    path = weights(snapshot)[2]
    blob = path.resolve()
    path.unlink()
    shutil.copy(blob, path)
    cache = ("--cache-dir", tmp_path / "cache")
    assert f"publishes of {path.name} is not known here" in command("plan", REPO, "--tp", 2, *cache)[2]
    assert command("convert", REPO, tmp_path / "out", "--tp", 2, *cache)[0] == 0
    assert_names_nothing(tmp_path / "out")


def test_a_file_that_is_written_to_after_it_was_compared(tmp_path: Path) -> None:
    """With size and time of modification put back."""
    path = tmp_path / "a"
    path.write_bytes(b"right")
    files = ComparedFiles(tmp_path, {"a": hashlib.sha256(b"right").hexdigest()}, "x", {"unit": ["a"]})
    files.start()
    files.wait(["a"])
    files.check("unit")
    trees.rewrite_unseen(path, b"wrong")
    with pytest.raises(SourceError, match="a was changed while unit was being converted"):
        files.check("unit")
    files.join()


def test_a_pipe_in_place_of_a_file_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a")
    files = ComparedFiles(tmp_path, {"a": "0" * 64}, "x", {"unit": ["a"]})
    files.start()
    with pytest.raises(MachineError, match=r"reading .*a: it is not a regular file"):
        files.wait(["a"])
    files.join()
