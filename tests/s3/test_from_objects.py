"""An object store as a source: the same bytes as from a folder, whatever the network does."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hub.setting import differences
from marlin_convert.checkpoint import object_files
from marlin_convert.storage import object_errors
from s3.proxy import Fault, Proxy, Request
from s3.server import KEY, SECRET
from s3.setting import OWN, Published

#: each process of a run starts a store of its own, which takes long
pytestmark = pytest.mark.campaign

Command = Callable[..., tuple[int, str, str]]
#: parts so small that a file of some hundred KB has several
SMALL = 64 << 10


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_errors, "PAUSES", (0.01,) * 9)
    monkeypatch.setattr(object_files, "PART", SMALL)


def test_plan_is_that_of_the_folder(command: Command, published: Published) -> None:
    code, out, err = command("plan", published.uri, "--tp", 2, "--json")
    assert code == 0, err
    headers = published.fetched()
    assert {begin for begin, _ in headers} == {0}
    assert max(last for _, last in headers) < SMALL
    assert [r.name for r in published.proxy.requests if "deeper" in r.path] == []
    there, here = json.loads(out), json.loads(command("plan", published.folder, "--tp", 2, "--json")[1])
    assert there.pop("source") != here.pop("source")
    assert there.pop("left_out") == [*here.pop("left_out"), "deeper/"]
    size = sum(path.stat().st_size for path in published.weights)
    assert there["bytes"].pop("fetched") == size
    assert size / 2 < there["bytes"].pop("staged") < size
    assert there == here
    said = command("plan", published.uri, "--tp", 2)[1]
    assert f"to fetch: {size:,} bytes" in said
    assert "--free-source" not in said


def test_plan_for_a_place(command: Command, published: Published, tmp_path: Path) -> None:
    code, said, err = command("plan", published.uri, tmp_path / "out", "--tp", 2)
    assert code == 0, err
    assert "there convert would begin a conversion; 5 of 5 units to make" in said
    assert "with documents and fetched files" in said
    code, _, err = command("convert", published.uri, tmp_path / "out", "--tp", 2, "--dry-run")
    assert (code, (tmp_path / "out").exists()) == (0, False), err


def test_convert_and_verify_through_faults(
    command: Command, published: Published, tiny_tp2: Path, tmp_path: Path
) -> None:
    before, out = published.listed(), tmp_path / "out"

    def fault(request: Request) -> Fault | None:
        if request.number % 3 == 0:
            return Fault(refuse=True)
        return Fault(cut=150_000, pause=0.001) if request.number % 4 == 0 else None

    published.proxy.fault = fault
    code, _, err = command("convert", published.uri, out, "--tp", 2)
    assert code == 0, err
    assert differences(out, tiny_tp2, OWN) == []
    assert not (out / ".work").exists()
    assert published.listed() == before
    source, from_folder = (
        json.loads((folder / "manifest.json").read_bytes())["source"] for folder in (out, tiny_tp2)
    )
    assert source["id"] == from_folder["id"]
    etags = [before[f"{published.prefix}/{path.name}"][0] for path in published.weights]
    assert [f'"{file["etag"]}"' for file in source["files"]] == etags
    assert "repo" not in source
    said = (out / "provenance.json").read_text()
    assert json.loads(said)["source"] == published.uri
    assert not any(word in said + err for word in (KEY, SECRET, published.proxy.endpoint))
    for source_of_it in (published.uri, published.folder):
        code, shown, err = command("verify", out, "--source", source_of_it)
        assert (code, "exact" in shown) == (0, True), err


def test_each_byte_is_fetched_once_and_what_follows(
    command: Command, published: Published, tiny_tp2: Path, tmp_path: Path
) -> None:
    out, line = tmp_path / "out", ("--tp", 2, "--free-source")
    code, _, err = command("convert", published.uri, out, *line)
    assert code == 0, err
    for path in published.weights:
        size = path.stat().st_size
        parts = [(at, min(at + SMALL, size) - 1) for at in range(0, size, SMALL)]
        header = (0, min(SMALL, size) - 1)
        assert published.fetched(path.name) == sorted([header, *parts])
    assert differences(out, tiny_tp2, OWN) == []
    weights = {f"{published.prefix}/{path.name}" for path in published.weights}
    assert weights <= published.listed().keys()
    code, _, err = command("convert", published.folder, out, "--tp", 2)
    assert (code, "before it was an object store, now it is a folder" in err) == (3, True)
    assert command("reshard", out, tmp_path / "again", "--tp", 2)[0] == 0
    assert differences(out, tmp_path / "again", {"provenance.json"}) == []
    (out / "rank-01-of-02" / "layer-001.safetensors").unlink()
    assert command("convert", published.uri, out, *line)[0] == 0
    assert differences(out, tiny_tp2, OWN) == []


def test_in_shares(command: Command, published: Published, tiny_tp2: Path, tmp_path: Path) -> None:
    for share in ("1/2", "0/2"):
        code, _, err = command("convert", published.uri, tmp_path / "out", "--tp", 2, "--shard", share)
        assert code == 0, err
    assert differences(tmp_path / "out", tiny_tp2, OWN) == []


def test_from_a_folder_to_a_store(command: Command, published: Published, copied: Path) -> None:
    code, _, err = command("convert", published.uri, copied, "--tp", 2)
    assert (code, "before it was a folder, now it is an object store" in err) == (3, True)


def test_another_content_is_found_by_verify(command: Command, own: Published, tiny_tp2: Path) -> None:
    path = own.weights[1]
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    own.replace(path.name, bytes(data))
    code, shown, _ = command("verify", tiny_tp2, "--source", own.uri)
    assert code == 1
    assert path.name in shown


#: `marlin-convert` with small parts
SMALL_PARTS = f"""from marlin_convert.checkpoint import object_files
object_files.PART = {SMALL}
from marlin_convert.cli import main
main()"""


def ended_in_the_midst(
    published: Published, out: Path, by: int = signal.SIGKILL, code: int = -signal.SIGKILL
) -> tuple[Path, set[int]]:
    """Begin a conversion and end it by a signal while a file comes; returns what has come of it, and the
    numbers of the parts that are noted.
    """
    published.proxy.fault = lambda request: Fault(pause=0.2) if request.data else None
    command = [sys.executable, "-c", SMALL_PARTS, "convert", published.uri, str(out), "--tp", "2"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(1200):
            assert process.poll() is None
            for notes in out.glob(".work/staging/*.parts"):
                noted = notes.read_text().splitlines()[1:]
                partial = notes.with_name(f"{notes.name.removesuffix('.parts')}.partial")
                if noted and partial.exists() and partial.stat().st_size > (len(noted) + 8) * SMALL:
                    process.send_signal(by)
                    assert process.wait(30) == code
                    return partial, {json.loads(line)[0] for line in notes.read_text().splitlines()[1:]}
            time.sleep(0.02)
    finally:
        process.kill()
        process.wait()
        published.proxy.reset()
    raise AssertionError("nothing came")


def test_killed_it_fetches_what_is_missing(
    command: Command, published: Published, tiny_tp2: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    partial, noted = ended_in_the_midst(published, out)
    damaged = min(noted)
    with partial.open("r+b") as file:  # of what was noted one part is not what came
        file.seek(damaged * SMALL + 7)
        file.write(b"\xa5\x5a\xa5")
    size, name = partial.stat().st_size, partial.name.removesuffix(".partial")
    code, _, err = command("convert", published.uri, out, "--tp", 2)
    assert code == 0, err
    missing = set(range(-(-size // SMALL))) - noted | {damaged}
    header = [(0, min(SMALL, size) - 1)]
    parts = [(number * SMALL, min((number + 1) * SMALL, size) - 1) for number in missing]
    assert published.fetched(name) == sorted(header + parts)
    assert differences(out, tiny_tp2, OWN) == []
    assert not (out / ".work").exists()


def test_interrupted_it_stops_and_can_be_replaced(
    command: Command, published: Published, tiny_tp2: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    partial, _ = ended_in_the_midst(published, out, signal.SIGTERM, 143)
    assert partial.exists()
    code, _, err = command("convert", published.folder, out, "--tp", 2, "--overwrite", "--yes")
    assert code == 0, err
    assert differences(out, tiny_tp2, {"provenance.json"}) == []
    assert not (out / ".work").exists()


def test_written_again_between_two_runs(
    command: Command, own: Published, tiny_tp2: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    partial, _ = ended_in_the_midst(own, out)
    name = partial.name.removesuffix(".partial")
    data = bytearray((own.folder / name).read_bytes())
    data[-3] ^= 16
    own.replace(name, bytes(data))
    code, _, err = command("convert", own.uri, out, "--tp", 2)
    assert code == 3
    assert f"{name} was written again: its ETag was" in err
    own.replace(name, (own.folder / name).read_bytes())
    code, _, err = command("convert", own.uri, out, "--tp", 2)
    assert code == 0, err
    assert differences(out, tiny_tp2, OWN) == []


def test_written_again_in_the_midst(command: Command, own: Published, tmp_path: Path) -> None:
    out, last, done = tmp_path / "out", own.weights[-1], list[int]()

    def fault(request: Request) -> None:
        if request.data and request.range and not request.range.startswith("bytes=0-") and not done:
            done.append(request.number)
            own.replace(last.name, last.read_bytes()[::-1])

    own.proxy.fault = fault
    code, _, err = command("convert", own.uri, out, "--tp", 2)
    assert code == 3
    assert f"{own.uri}/{last.name} was changed while it was in use" in err
    assert not (out / "manifest.json").exists()


def test_refused_for_good_it_continues_later(
    command: Command, published: Published, tiny_tp2: Path, tmp_path: Path
) -> None:
    out, first = tmp_path / "out", list[str]()

    def made() -> set[str]:
        return {path.stem for path in out.glob(".work/units/*.json")}

    def fault(request: Request) -> Fault | None:
        """Headers come, and the first three files; others are refused when a unit is made."""
        if not request.data or not (out / ".work" / "staging").exists():
            return None
        first.extend({request.name}.difference(first[:3]))
        if request.name in first[:3]:
            return None
        for _ in range(1000):
            if made():
                break
            time.sleep(0.02)
        return Fault(refuse=True)

    published.proxy.fault = fault
    code, _, err = command("convert", published.uri, out, "--tp", 2)
    assert code == 4
    assert f"reading {published.uri}/{first[3]}: 127.0.0.1:" in err
    assert "refuses (SlowDown 503), 10 times" in err
    assert made()
    published.proxy.reset()
    code, _, err = command("convert", published.uri, out, "--tp", 2)
    assert code == 0, err
    assert differences(out, tiny_tp2, OWN) == []


@pytest.mark.parametrize(
    ("uri", "words"),
    [
        ("s3://no-such-bucket/x", "listing s3://no-such-bucket/x: 127.0.0.1"),
        ("s3://checkpoints/models", "has no objects directly below it, but has tiny one"),
        ("s3://checkpoints/models/tiny one-other", "that is no JSON|config.json"),
        (
            "s3://checkpoints/models/tiny one/deeper",
            "config.json is missing in s3://checkpoints/models/tiny one",
        ),
    ],
)
def test_what_is_not_there(
    command: Command, published: Published, tmp_path: Path, uri: str, words: str
) -> None:
    code, _, err = command("convert", uri, tmp_path / "out", "--tp", 2)
    assert code == 3
    assert any(word in err for word in words.split("|")), err
    assert not (tmp_path / "out").exists()


def test_a_weight_file_that_is_gone(command: Command, own: Published, tmp_path: Path) -> None:
    own.store.client().delete_object(Bucket=own.bucket, Key=f"x/{own.weights[0].name}")
    code, _, err = command("convert", own.uri, tmp_path / "out", "--tp", 2)
    assert code == 3
    assert own.weights[0].name in err


def test_without_credentials(
    command: Command, published: Published, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "not-the-secret")
    code, _, err = command("convert", published.uri, tmp_path / "out", "--tp", 2)
    assert (code, "does not take the credentials" in err, "not-the-secret" in err) == (3, True, False)
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    code, _, err = command("plan", published.uri, "--tp", 2)
    assert (code, "there are no credentials, or not all" in err) == (3, True)


def test_without_boto3(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("marlin_convert.extras.installed", lambda module: module != "boto3")
    code, _, err = command("plan", "s3://bucket/x", "--tp", 2)
    assert code == 2
    assert "this needs boto3: pip install '.[s3]'" in err


@pytest.mark.parametrize("option", ["--revision", "--token", "--cache-dir", "--local-dir"])
def test_options_of_repositories(command: Command, option: str) -> None:
    code, _, err = command("plan", "s3://bucket/x", "--tp", 2, option, "anything")
    assert (code, f"{option}" in err, "anything" in err) == (2, True, False)


def test_a_secret_in_the_place_is_not_repeated(command: Command, proxy: Proxy) -> None:
    code, _, err = command("plan", "s3://key:secret-word@bucket/x", "--tp", 2)
    assert (code, "secret-word" in err) == (2, False)
