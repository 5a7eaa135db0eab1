"""`plan REPO`: the same plan as for the folder, from headers that come by range requests and nothing else."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from hub.proxy import Answer, Request
from hub.setting import Done, Published, differences

pytestmark = pytest.mark.slow

Run = Callable[..., Done]


def test_the_plan_of_the_folder(run: Run, published: Published, tmp_path: Path) -> None:
    there = json.loads(run("plan", published.repo, "--tp", 2, "--json").stdout)
    here = json.loads(run("plan", published.folder, "--tp", 2, "--json").stdout)
    assert (there["source"].pop("repo"), there["source"].pop("revision")) == (
        published.repo,
        published.commit,
    )
    fetched, staged = there["bytes"].pop("fetched"), there["bytes"].pop("staged")
    sizes = sorted(path.stat().st_size for path in published.folder.glob("*.safetensors"))
    assert fetched == sum(sizes)
    assert sizes[-1] <= staged <= sum(sizes[-3:])
    for plan in (there, here):
        plan["source"].pop("label")
        plan["bytes"].pop("free", None)
    assert there == here
    assert not list((tmp_path / "home").rglob("*.json"))


def test_ranges_only(run: Run, published: Published) -> None:
    assert run("plan", published.repo, "--tp", 2).code == 0
    asked = [
        request
        for request in published.proxy.requests
        if request.method == "GET" and request.file.endswith(".safetensors")
    ]
    assert asked
    for request in asked:
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", request.headers["range"])
        assert found is not None
        begin, end = map(int, found.groups())
        assert end - begin < 1 << 20
    assert published.fetched() == []


def spoil_ranges(how: str) -> Callable[[Request, Answer], Answer | None]:
    """Answers to range requests for weight files, spoilt."""

    def fault(request: Request, answer: Answer) -> Answer | None:
        if not request.file.endswith(".safetensors") or "range" not in request.headers:
            return None
        headers = dict(answer.headers)
        if how == "status 200":
            headers.pop("content-range")
            return Answer(200, headers, answer.body)
        if how == "no content-range":
            headers.pop("content-range")
        elif how == "another range":
            headers["content-range"] = re.sub(r"bytes \d+-", "bytes 7-", headers["content-range"])
        elif how == "another size":
            headers["content-range"] = re.sub(r"/\d+", "/99", headers["content-range"])
        elif how == "another header":
            return Answer(206, headers, b"\xff" * len(answer.body))
        return Answer(206, headers, answer.body)

    return fault


@pytest.mark.parametrize(
    "how", ["status 200", "no content-range", "another range", "another size", "another header"]
)
def test_a_server_that_sends_other_bytes_than_asked_for(run: Run, published: Published, how: str) -> None:
    published.proxy.fault = spoil_ranges(how)
    done = run("plan", published.repo, "--tp", 2)
    assert done.code == 3
    assert ".safetensors" in done.stderr


def test_a_range_that_breaks_off_is_asked_for_again(run: Run, published: Published) -> None:
    broken: set[str] = set()

    def fault(request: Request, answer: Answer) -> Answer | None:
        if request.file.endswith(".safetensors") and request.file not in broken:
            broken.add(request.file)
            answer.cut, answer.length = len(answer.body) // 2, len(answer.body)
            return answer
        return None

    published.proxy.fault = fault
    assert run("plan", published.repo, "--tp", 2).code == 0
    assert broken


def test_a_run_that_cannot_fit_stops_before_it_starts(
    run: Run, published: Published, expected: Path, tmp_path: Path
) -> None:
    """The plan's numbers decide: output and staged files fit, output and all files do not."""
    out = tmp_path / "out"
    sizes = json.loads(run("plan", published.repo, out, "--tp", 2, "--json").stdout)["bytes"]
    assert sizes["staged"] < sizes["fetched"]
    planned = run("plan", published.repo, out, "--tp", 2, "--free-source", "--json")
    enough = json.loads(planned.stdout)["convert"]["needed"]
    assert 0 < enough - sizes["output"] - sizes["staged"] < 1 << 20
    planned = run("plan", published.repo, out, "--tp", 2, free=enough)
    done = run("convert", published.repo, out, "--tp", 2, free=enough)
    assert (planned.code, planned.stderr) == (done.code, done.stderr)
    assert done.code == 4
    assert "--free-source" in done.stderr
    assert published.fetched() == []
    assert run("convert", published.repo, out, "--tp", 2, "--free-source", free=enough - 1).code == 4
    assert published.fetched() == []
    assert not list(out.rglob("*.safetensors"))
    done = run("convert", published.repo, out, "--tp", 2, "--free-source", free=enough)
    assert done.code == 0, done.stderr
    assert differences(out, expected) == []


def test_a_download_that_cannot_fit(run: Run, published: Published, tmp_path: Path) -> None:
    done = run("download", published.repo, tmp_path / "fetched", free=1000)
    assert done.code == 4
    assert published.fetched() == []
