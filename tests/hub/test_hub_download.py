"""`download`: what a conversion needs, compared with what the hub publishes, and nothing twice."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

from hub.proxy import Answer, Request
from hub.setting import Done, Published, differences
from marlin_convert.checkpoint.store import RECORD
from marlin_convert.documents.schemas import schema

pytestmark = pytest.mark.slow

Run = Callable[..., Done]


def test_into_a_folder_and_again(run: Run, published: Published, expected: Path, tmp_path: Path) -> None:
    folder = tmp_path / "fetched"
    done = run("download", published.repo, folder)
    assert done.code == 0, done.stderr
    assert published.commit in done.stdout
    assert [name for name in differences(folder, published.folder, set()) if not name.startswith(".")] == []
    assert len(published.fetched()) == len(list(published.folder.glob("*.safetensors")))
    published.proxy.requests.clear()
    assert run("download", published.repo, folder).code == 0
    assert published.fetched() == []
    assert run("convert", folder, tmp_path / "out", "--tp", 2).code == 0
    assert differences(tmp_path / "out", expected) == []
    source = json.loads((tmp_path / "out" / "manifest.json").read_bytes())["source"]
    assert (source["repo"], source["revision"]) == (published.repo, published.commit)


def test_patterns(run: Run, published: Published, tmp_path: Path) -> None:
    done = run(
        "download",
        published.repo,
        "--local-dir",
        tmp_path / "some",
        "--include",
        "*.json",
        "--exclude",
        "tokenizer*",
        "--json",
    )
    assert done.code == 0, done.stderr
    listed = json.loads(done.stdout)
    assert set(listed["files"]) == {
        path.name for path in published.folder.glob("*.json") if not path.name.startswith("tokenizer")
    }
    assert listed["revision"] == published.commit
    Draft202012Validator(schema("download")).validate(listed)
    record = json.loads((tmp_path / "some" / RECORD).read_bytes())
    Draft202012Validator(schema("download-record")).validate(record)
    config = (published.folder / "config.json").read_bytes()
    blob = hashlib.sha1(b"blob %d\0" % len(config) + config).hexdigest()
    assert record["files"]["config.json"] == [len(config), blob]
    assert run("download", published.repo, tmp_path / "none", "--include", "nothing").code == 3


def test_a_moved_revision(run: Run, published: Published, tmp_path: Path) -> None:
    older = published.hub.publish("org/moving", published.folder)
    first = run("download", "org/moving", tmp_path / "first", "--include", "config.json")
    assert older in first.stdout
    changed = tmp_path / "changed"
    changed.mkdir()
    (changed / "config.json").write_text("{}")
    newer = published.hub.publish("org/moving", changed)
    published.proxy.forget()
    assert newer in run("download", "org/moving", tmp_path / "second", "--include", "config.json").stdout
    assert (
        older
        in run(
            "download", "org/moving", tmp_path / "third", "--include", "config.json", "--revision", older
        ).stdout
    )
    assert (tmp_path / "third" / "config.json").read_bytes() == (
        published.folder / "config.json"
    ).read_bytes()


def test_a_broken_download_continues(run: Run, published: Published, tmp_path: Path) -> None:
    names = sorted(path.name for path in published.folder.glob("*.safetensors"))

    def fault(request: Request, answer: Answer) -> Answer | None:
        return Answer(500, {}, b"") if request.is_data and request.file == names[-1] else None

    published.proxy.fault = fault
    done = run("download", published.repo, tmp_path / "fetched", "--max-workers", 1)
    assert done.code == 4
    assert names[-1] in done.stderr
    published.proxy.reset()
    assert run("download", published.repo, tmp_path / "fetched").code == 0
    assert published.fetched() == [names[-1]]


def test_what_is_no_repository(run: Run, published: Published, tmp_path: Path) -> None:
    assert run("download", "no-organisation").code == 2
    assert run("download", published.repo, tmp_path / "a", "--local-dir", tmp_path / "b").code == 2
