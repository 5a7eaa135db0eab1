"""Keys that a later release added, in any object of any document, are nothing to this one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import trees
from checkpoints import Checkpoint
from marlin_convert import convert, open_shards, verify
from marlin_convert.checkpoint.store import RECORD, download_record
from marlin_convert.documents.codec import write
from marlin_convert.documents.manifest import read_manifest
from marlin_convert.documents.records import DownloadRecord
from marlin_convert.shards.inspect import describe_folder

#: objects whose keys are data: a key more there is a claim about the source
DATA = ("model", "weight_map", "stamps")


def objects(value: Any, key: str | None = None) -> Iterator[dict[str, Any]]:
    """Every object of a document whose keys the format names."""
    if isinstance(value, dict):
        if key not in DATA:
            yield value
        for inner, each in value.items():
            yield from objects(each, inner)
    elif isinstance(value, list):
        for each in value:
            yield from objects(each)


def add_keys(value: Any) -> int:
    """A key more in each object; returns how many there are."""
    found = list(objects(value))
    for each in found:
        each["unheard_of"] = {"name": [1, None], "digest": "0" * 32}
    return len(found)


def test_in_every_object_of_the_manifest(copied: Path, tiny: Checkpoint) -> None:
    before = read_manifest(copied)
    counts = []
    trees.reseal(copied, lambda document: counts.append(add_keys(document)))
    entries = sum(1 + len(shard.tensors) + len(shard.fused) for shard in before.shards)
    assert counts[0] > entries
    after = read_manifest(copied)
    assert (after.units, after.shards) == (before.units, before.shards)
    listed = [{f.path: f for f in m.files if not f.path.endswith("/manifest.json")} for m in (before, after)]
    assert listed[0] == listed[1]
    assert (after.source, after.layout, after.parallel) == (before.source, before.layout, before.parallel)
    assert [str(finding) for finding in verify(copied, str(tiny.folder)).findings] == []
    with open_shards(copied, 1) as shards, open_shards(copied, None) as common:
        assert all(shards[name].size for name in (*shards.names(), *shards.fused_names()))
        assert all(common[name].size for name in common.names())
    assert describe_folder(copied).tp == 2
    done = convert(str(tiny.folder), copied, tp=2)
    assert (done.made, done.found) == (0, len(before.units))


def test_in_the_files_for_engines_and_in_provenance(copied: Path) -> None:
    for path in [*copied.glob("rank-*/*.index.json"), copied / "common" / "model.safetensors.index.json"]:
        index = json.loads(path.read_text())
        assert add_keys(index) == 2
        path.write_text(json.dumps(index))
    config = json.loads((copied / "config.json").read_text())
    config["text_config"]["quantization_config"]["unheard_of"] = 1
    (copied / "config.json").write_text(json.dumps(config))
    provenance = json.loads((copied / "provenance.json").read_text())
    add_keys(provenance)
    (copied / "provenance.json").write_bytes(trees.seal(provenance))
    trees.reseal(copied)
    assert [str(finding) for finding in verify(copied).findings] == []


def test_but_not_where_keys_are_data(copied: Path) -> None:
    """In `model` and `weight_map`, a key is a claim about the source or the shards."""
    config = json.loads((copied / "config.json").read_text())
    config["unheard_of"] = 1
    (copied / "config.json").write_text(json.dumps(config))
    path = copied / "rank-00-of-02" / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["unheard_of"] = "top.safetensors"
    path.write_text(json.dumps(index))
    trees.reseal(copied, lambda document: document["model"].update(unheard_of=1))
    assert {finding.path for finding in verify(copied).findings} == {
        "config.json",
        "manifest.json",
        "rank-00-of-02/model.safetensors.index.json",
    }


def test_in_what_a_run_continues_from(
    tiny: Checkpoint, tiny_tp2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from marlin_convert.pipeline import conversion as running

    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    out = tmp_path / "out"
    with monkeypatch.context() as patched:
        patched.setattr(running, "finish_output", killed)
        with pytest.raises(KeyboardInterrupt):
            convert(str(tiny.folder), out, tp=2)
    job = json.loads((out / ".work" / "job.json").read_text())
    assert add_keys(job) == 3 + len(job["identity"]["files"])
    (out / ".work" / "job.json").write_text(json.dumps(job))
    units = list((out / ".work" / "units").iterdir())
    for path in units:
        body = json.loads(json.loads(path.read_text())["unit"])
        body["unheard_of"] = 1
        for file in body["files"]:
            file["unheard_of"] = 1
        text = json.dumps(body)
        path.write_text(json.dumps({"digest": trees.digest(text.encode()), "unit": text, "unheard_of": 1}))
    done = convert(str(tiny.folder), out, tp=2)
    assert (done.made, done.found) == (0, len(units))
    assert trees.tree(out) == trees.tree(tiny_tp2)


def test_in_what_download_leaves(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"abc")
    record = json.loads(write(DownloadRecord("org/name", "c0ffee", {"file": (3, None)})))
    record["unheard_of"] = 1
    (tmp_path / RECORD).write_text(json.dumps(record))
    found = download_record(tmp_path)
    assert found is not None
    assert (found.repo, found.revision, found.files) == ("org/name", "c0ffee", {"file": (3, None)})
    (tmp_path / "file").write_bytes(b"abcd")
    assert download_record(tmp_path) is None
    (tmp_path / RECORD).write_text(
        '{"repo": "org/name", "repo": "org/other", "revision": "c0ffee", "files": {}}'
    )
    assert download_record(tmp_path) is None
