"""Converting from the hub: the same bytes as from a folder, in little space, continued at every point."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from hub.proxy import Answer, Request
from hub.setting import Done, Published, differences

pytestmark = pytest.mark.slow

Run = Callable[..., Done]


def test_the_same_bytes_as_from_a_folder(
    run: Run, published: Published, expected: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    done = run("convert", published.repo, out, "--tp", 2, "--free-source")
    assert done.code == 0, done.stderr
    assert differences(out, expected) == []
    assert not (out / ".work").exists()
    assert not any((tmp_path / "home").rglob("*.safetensors"))
    source = json.loads((out / "manifest.json").read_bytes())["source"]
    assert (source["repo"], source["revision"]) == (published.repo, published.commit)
    assert source["id"] == json.loads((expected / "manifest.json").read_bytes())["source"]["id"]
    assert all(len(file["sha256"]) == 64 for file in source["files"])
    assert run("verify", out).code == 0
    assert run("verify", out, "--source", published.folder).code == 0


def test_kept_in_the_cache_and_used_again(
    run: Run, published: Published, expected: Path, tmp_path: Path
) -> None:
    assert run("convert", published.repo, tmp_path / "a", "--tp", 2).code == 0
    cached = {path.resolve(): path.stat().st_mtime_ns for path in (tmp_path / "home").rglob("*.safetensors")}
    assert len(cached) == len(list(published.folder.glob("*.safetensors")))
    published.proxy.requests.clear()
    done = run("convert", published.repo, tmp_path / "b", "--tp", 2, "--free-source")
    assert done.code == 0, done.stderr
    assert published.fetched() == []
    assert {
        path.resolve(): path.stat().st_mtime_ns for path in (tmp_path / "home").rglob("*.safetensors")
    } == cached
    assert differences(tmp_path / "a", expected) == differences(tmp_path / "b", expected) == []


def test_staging_behind_a_link_is_refused_and_not_emptied(
    run: Run, published: Published, tmp_path: Path
) -> None:
    out, mine = tmp_path / "out", tmp_path / "mine"
    line = ("convert", published.repo, out, "--tp", 2, "--free-source")
    assert run(*line).code == 0
    (out / "rank-00-of-02" / "top.safetensors").unlink()
    mine.mkdir()
    (out / ".work").mkdir()
    (out / ".work" / "staging").symlink_to(mine)
    for name in ("thesis.tex", "other-model.safetensors"):
        (mine / name).write_text("mine")
    done = run(*line)
    assert done.code == 2
    assert "staging is a link; move it away" in done.stderr
    assert {path.name: path.read_text() for path in mine.iterdir()} == {
        "thesis.tex": "mine",
        "other-model.safetensors": "mine",
    }


def test_kept_in_a_folder_of_choice(run: Run, published: Published, expected: Path, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    assert run("convert", published.repo, tmp_path / "out", "--tp", 2, "--local-dir", kept).code == 0
    assert {path.name for path in kept.glob("*.safetensors")} == {
        path.name for path in published.folder.glob("*.safetensors")
    }
    assert differences(tmp_path / "out", expected) == []


def test_a_wrong_file_of_the_user_is_named_and_left_alone(
    run: Run, published: Published, tmp_path: Path
) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    name = sorted(path.name for path in published.folder.glob("*.safetensors"))[1]
    content = bytearray((published.folder / name).read_bytes())
    content[-1] ^= 1
    (kept / name).write_bytes(content)
    done = run("convert", published.repo, tmp_path / "out", "--tp", 2, "--local-dir", kept)
    assert done.code == 3
    assert str(kept / name) in done.stderr
    assert "sha256" in done.stderr
    assert (kept / name).read_bytes() == content


def test_layers_fetch_only_their_files(run: Run, published: Published, tmp_path: Path) -> None:
    done = run("convert", published.repo, tmp_path / "out", "--tp", 2, "--layers", 1, "--free-source")
    assert done.code == 0, done.stderr
    weight_map = json.loads((published.folder / "model.safetensors.index.json").read_bytes())["weight_map"]
    assert set(published.fetched()) == {file for name, file in weight_map.items() if ".layers.1." in name}


def test_continues_without_what_is_made(
    run: Run, published: Published, expected: Path, tmp_path: Path
) -> None:
    """The third weight file cannot be had; all before it is made, freed, and not fetched again."""
    names = sorted(path.name for path in published.folder.glob("*.safetensors"))

    def absent(request: Request, answer: Answer) -> Answer | None:
        return (
            Answer(404, {"x-error-code": "EntryNotFound"}, b"")
            if request.file == names[2] and request.headers.get("range") is None
            else None
        )

    published.proxy.fault = absent
    done = run(
        "convert",
        published.repo,
        tmp_path / "out",
        "--tp",
        2,
        "--free-source",
        "--max-workers",
        1,
        "--threads",
        1,
    )
    assert done.code == 3, done.stderr
    assert names[2] in done.stderr
    made = {path.stem for path in (tmp_path / "out" / ".work" / "units").glob("*.json")}
    assert "layer-000" in made
    published.proxy.reset()
    assert run("convert", published.repo, tmp_path / "out", "--tp", 2, "--free-source").code == 0
    assert names[0] not in published.fetched()
    assert differences(tmp_path / "out", expected) == []


def test_a_repository_that_moved_is_continued_from_its_commit(
    run: Run, published: Published, expected: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    published.proxy.fault = lambda request, answer: (
        Answer(503, {}, b"") if request.is_data and "00002" in request.file else None
    )
    assert run("convert", published.repo, out, "--tp", 2, "--free-source", "--threads", 1).code == 4
    published.proxy.reset()
    repo = "org/moved"
    older = published.hub.publish(repo, published.folder)
    changed = shutil.copytree(published.folder, tmp_path / "changed")
    (changed / "README.md").write_text("another card\n")
    newer = published.hub.publish(repo, changed)
    assert run("convert", repo, tmp_path / "moving", "--tp", 2, "--revision", older, "--layers", 0).code == 0
    (tmp_path / "moving" / "rank-00-of-02" / "layer-000.safetensors").unlink()
    again = ("convert", repo, tmp_path / "moving", "--tp", 2, "--layers", 0)
    done = run(*again, "--revision", newer)
    assert done.code == 3
    assert older in done.stderr
    assert newer in done.stderr
    for command in (("plan", *again[1:]), again):
        done = run(*command)
        assert done.code == 0, done.stderr
        assert f"note: {tmp_path / 'moving'} was begun from commit {older} of {repo}" in done.stderr
    assert json.loads((tmp_path / "moving" / "manifest.json").read_text())["source"]["revision"] == older
    published.proxy.fault = lambda request, answer: (
        Answer(503, {}, b"") if request.is_data and "00002" in request.file else None
    )
    assert run("convert", repo, tmp_path / "begun", "--tp", 2, "--revision", older, "--threads", 1).code == 4
    published.proxy.reset()
    assert run("convert", repo, tmp_path / "begun", "--tp", 2).code == 0
    assert differences(tmp_path / "begun", expected) == []
    assert run("convert", published.folder, out, "--tp", 2).code == 3
    assert run("convert", published.repo, out, "--tp", 2, "--free-source").code == 0
    assert differences(out, expected) == []


def test_offline_the_snapshot_is_a_folder(
    run: Run, published: Published, expected: Path, tmp_path: Path
) -> None:
    offline = {"HF_HUB_OFFLINE": "1"}
    done = run("convert", published.repo, tmp_path / "out", "--tp", 2, env=offline)
    assert done.code == 4
    assert "download" in done.stderr
    assert run("download", published.repo).code == 0
    done = run("convert", published.repo, tmp_path / "out", "--tp", 2, env=offline)
    assert done.code == 0, done.stderr
    assert differences(tmp_path / "out", expected) == []
    assert (
        json.loads((tmp_path / "out" / "manifest.json").read_bytes())["source"]["revision"]
        == published.commit
    )


def test_the_card(run: Run, published: Published, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run("convert", published.repo, out, "--tp", 2, "--layers", 0, "--free-source").code == 0
    card = (out / "README.md").read_text()
    for line in (
        "license: other",
        "license_name: modified-mit",
        "license_link: LICENSE",
        f"base_model: {published.repo}",
        "base_model_relation: quantized",
    ):
        assert f"\n{line}\n" in card
    assert published.commit in card
    assert "library_name" not in card
    assert "README.md" in {file["path"] for file in json.loads((out / "manifest.json").read_bytes())["files"]}
    assert (out / "source" / "README.md").read_bytes() == (published.folder / "README.md").read_bytes()


def test_a_mistyped_folder(run: Run, published: Published, tmp_path: Path) -> None:
    done = run("convert", "models/no-such", tmp_path / "out", "--tp", 2)
    assert done.code == 3
    assert "no folder models/no-such" in done.stderr
    done = run("convert", "./models/no-such", tmp_path / "out", "--tp", 2)
    assert done.code == 2
    done = run("convert", published.folder, tmp_path / "out", "--tp", 2, "--free-source")
    assert done.code == 2
    assert not (tmp_path / "out").exists()


def test_an_unknown_revision(run: Run, published: Published) -> None:
    done = run("plan", published.repo, "--tp", 2, "--revision", "no-such-branch")
    assert done.code == 3
    assert "--revision" in done.stderr


def test_a_token_is_sent_everywhere_and_written_nowhere(
    run: Run, published: Published, tmp_path: Path
) -> None:
    def closed(request: Request, answer: Answer) -> Answer | None:
        return None if request.headers.get("authorization") == "Bearer hf_secret" else Answer(401, {}, b"")

    published.proxy.fault = closed
    assert run("convert", published.repo, tmp_path / "none", "--tp", 2, "--free-source").code == 3
    for name, arguments, env in [
        ("option", ["--token", "hf_secret"], {}),
        ("joined", ["--token=hf_secret"], {}),
        ("environment", [], {"HF_TOKEN": "hf_secret"}),
    ]:
        out = tmp_path / name
        done = run(
            "convert", published.repo, out, "--tp", 2, "--layers", 0, "--free-source", *arguments, env=env
        )
        assert done.code == 0, done.stderr
        assert not [path for path in out.rglob("*") if path.is_file() and b"hf_secret" in path.read_bytes()]
