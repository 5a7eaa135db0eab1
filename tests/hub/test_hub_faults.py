"""What goes wrong between here and the hub: each ends in a correct conversion, or in a clear error from which
the next run continues.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from hub.proxy import Answer, Request
from hub.setting import Done, Published, differences

pytestmark = pytest.mark.slow

Run = Callable[..., Done]
Fault = Callable[[Request, Answer], Answer | None]

LAYER = "model-00002-of"


def of_data(fault: Fault, times: int | None = None) -> Fault:
    """A fault of the data of one weight file, the first `times` times it is asked for."""
    count = 0

    def applied(request: Request, answer: Answer) -> Answer | None:
        nonlocal count
        if not (request.is_data and request.file.startswith(LAYER)) or (times is not None and count >= times):
            return None
        count += 1
        return fault(request, answer)

    return applied


def cut(request: Request, answer: Answer) -> Answer:
    """The body ends in the middle."""
    answer.cut, answer.length = len(answer.body) // 2, len(answer.body)
    return answer


def reset(request: Request, answer: Answer) -> Answer:
    """The connection is reset in the middle."""
    answer = cut(request, answer)
    answer.reset = True
    return answer


def stall(request: Request, answer: Answer) -> Answer:
    """Nothing more comes for longer than the client waits."""
    answer.pause = 4.0
    return answer


def wrong(request: Request, answer: Answer) -> Answer:
    """Other bytes, as many."""
    answer.body = answer.body[:-1] + bytes([answer.body[-1] ^ 1])
    return answer


def short(request: Request, answer: Answer) -> Answer:
    """Fewer bytes, and the server says that this is all."""
    answer.body = answer.body[:-100]
    answer.length = len(answer.body)
    return answer


def status(code: int, **headers: str) -> Fault:
    """An error."""
    return lambda request, answer: Answer(
        code, {name.replace("_", "-"): value for name, value in headers.items()}, b""
    )


PASSING: dict[str, Fault] = {
    "429, then well": of_data(status(429, retry_after="1"), 1),
    "reset in mid-body": of_data(reset, 2),
    "truncated": of_data(cut, 2),
    "stalled": of_data(stall, 1),
    "wrong bytes, then right ones": of_data(wrong, 1),
}


@pytest.mark.parametrize("what", PASSING)
def test_passing_faults(run: Run, published: Published, expected: Path, what: str, tmp_path: Path) -> None:
    published.proxy.fault = PASSING[what]
    timeout = {"HF_HUB_DOWNLOAD_TIMEOUT": "3"} if what == "stalled" else {}
    done = run("convert", published.repo, tmp_path / "out", "--tp", 2, "--free-source", env=timeout)
    assert done.code == 0, done.stderr
    assert differences(tmp_path / "out", expected) == []


def test_a_resumed_download_whose_range_is_ignored(run: Run, published: Published, tmp_path: Path) -> None:
    """The client keeps whole pieces of 10 MB of a broken download and asks for the rest; here it gets
    everything again.
    """
    content = bytes(range(256)) * (12 << 12)
    (tmp_path / "repository").mkdir()
    (tmp_path / "repository" / "large.safetensors").write_bytes(content)
    published.hub.publish("org/large", tmp_path / "repository")
    asked: list[str] = []

    def fault(request: Request, answer: Answer) -> Answer | None:
        if request.method != "GET" or request.file != "large.safetensors":
            return None
        asked.append(request.headers.get("range", ""))
        if not asked[-1]:
            answer.cut, answer.length = 11 << 20, len(content)
            return answer
        return Answer(
            200, {key: value for key, value in answer.headers.items() if key != "content-range"}, content
        )

    published.proxy.fault = fault
    done = run("download", "org/large", tmp_path / "fetched")
    assert done.code == 0, done.stderr
    assert asked == ["", "bytes=10485760-"]
    assert (tmp_path / "fetched" / "large.safetensors").read_bytes() == content


LASTING: dict[str, tuple[Fault, int, str]] = {
    "500": (of_data(status(500)), 4, "500"),
    "503": (of_data(status(503)), 4, "503"),
    "too short, and says so": (of_data(short), 4, LAYER),
    "wrong bytes": (of_data(wrong), 3, "sha256"),
    "404": (of_data(status(404, x_error_code="EntryNotFound")), 3, "does not have this file"),
    "gated": (of_data(status(403, x_error_code="GatedRepo")), 3, "gated"),
    "401": (of_data(status(401)), 3, "token"),
    "403": (of_data(status(403)), 3, "token"),
}


@pytest.mark.parametrize("free", [True, False], ids=["freed", "cached"])
@pytest.mark.parametrize("what", LASTING)
def test_lasting_faults(
    run: Run, published: Published, expected: Path, what: str, free: bool, tmp_path: Path
) -> None:
    if not free and what not in ("wrong bytes", "500"):
        pytest.skip("differs from the other way only where something was kept")
    fault, code, words = LASTING[what]
    command = (
        "convert",
        published.repo,
        tmp_path / "out",
        "--tp",
        2,
        "--threads",
        1,
        *(["--free-source"] if free else []),
    )
    published.proxy.fault = fault
    done = run(*command)
    assert done.code == code, done.stderr
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out" / "manifest.json").exists()
    published.proxy.reset()
    done = run(*command)
    assert done.code == 0, done.stderr
    assert differences(tmp_path / "out", expected) == []


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (Answer(403, {"x-error-code": "GatedRepo"}, b""), "gated"),
        (Answer(401, {}, b""), "token"),
        (Answer(404, {"x-error-code": "RepoNotFound"}, b""), "no repository"),
    ],
)
def test_a_closed_repository(
    run: Run, published: Published, answer: Answer, words: str, tmp_path: Path
) -> None:
    published.proxy.fault = lambda request, _: answer
    done = run("convert", published.repo, tmp_path / "out", "--tp", 2)
    assert done.code == 3
    assert words in done.stderr
    assert not (tmp_path / "out").exists()


def test_nobody_answers(run: Run, published: Published, tmp_path: Path) -> None:
    done = run(
        "convert", published.repo, tmp_path / "out", "--tp", 2, env={"HF_ENDPOINT": "http://127.0.0.1:9"}
    )
    assert done.code == 4
    assert "network" in done.stderr


def test_a_file_of_the_index_is_absent(run: Run, published: Published, tmp_path: Path) -> None:
    name = sorted(path.name for path in published.folder.glob("*.safetensors"))[2]
    published.hub.publish("org/absent", published.folder, skip=(name,))
    done = run("convert", "org/absent", tmp_path / "out", "--tp", 2)
    assert done.code == 3
    assert name in done.stderr
    assert not (tmp_path / "out").exists()


def test_small_files_are_compared_too(run: Run, published: Published, tmp_path: Path) -> None:
    def fault(request: Request, answer: Answer) -> Answer | None:
        return wrong(request, answer) if request.method == "GET" and request.file == "config.json" else None

    published.proxy.fault = fault
    done = run("plan", published.repo, "--tp", 2)
    assert done.code == 3
    assert "config.json" in done.stderr
