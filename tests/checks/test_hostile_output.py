"""A converted folder made to hang a reader or to fill its memory: refused, whatever it says of itself."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import trees
from limited import limited
from marlin_convert.checks.verify import verify
from marlin_convert.shards.kept_source import unpacked

pytestmark = pytest.mark.slow


def wrong(out: Path) -> str:
    """What `verify` says, under limits."""
    code, said = limited("verify", out)
    assert code == 1, said
    return said


#: without these nothing can be checked; of the others each has a finding of its own
NEEDED = ["manifest.json", "source/config.json", "source/digests.bin", "source/headers/*.gz"]
OTHERS = [
    "config.json",
    "provenance.json",
    "digests.bin",
    "README.md",
    "source/README.md",
    "source/model.safetensors.index.json",
    "rank-00-of-02/model.safetensors.index.json",
    "rank-00-of-02/layer-001.safetensors",
]
SETS = [*([name] for name in NEEDED), OTHERS]


@pytest.mark.parametrize("names", SETS)
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_what_never_ends_or_answers_in_place_of_a_file(copied: Path, names: list[str], kind: str) -> None:
    for name in names:
        path = sorted(copied.glob(name))[0]
        path.unlink()
        if kind == "pipe":
            os.mkfifo(path)
        else:
            path.symlink_to("/dev/zero")
    said = wrong(copied)
    assert "it is not a regular file" in said
    assert all(name in said for name in names if names == OTHERS)


@pytest.mark.parametrize("verb", ["inspect", "convert"])
def test_a_pipe_in_place_of_the_manifest(copied: Path, copied_source: Path, verb: str) -> None:
    (copied / "manifest.json").unlink()
    os.mkfifo(copied / "manifest.json")
    code, said = limited(
        *(("inspect", copied) if verb == "inspect" else ("convert", copied_source, copied, "--tp", 2))
    )
    assert code in (1, 2), said
    assert "internal" not in said


@pytest.mark.parametrize("names", SETS)
def test_files_of_a_terabyte_without_data(copied: Path, names: list[str]) -> None:
    for name in names:
        os.truncate(sorted(copied.glob(name))[0], 1 << 40)
    said = wrong(copied)
    assert all(name in said for name in names if names == OTHERS)
    assert str(1 << 40) in said


def test_a_header_that_unpacks_to_gigabytes(copied: Path) -> None:
    path = sorted(copied.glob("source/headers/*.gz"))[0]
    with gzip.open(path, "wb", compresslevel=1) as file:
        for _ in range(1 << 10):
            file.write(bytes(1 << 20))
    trees.reseal(copied, lambda document: document["source"]["files"][0].update(size=1 << 50))
    assert "a header unpacks to more than the 100000000 bytes that are expected" in wrong(copied)


def test_headers_are_unpacked_whole_or_not_at_all() -> None:
    packed = gzip.compress(b"abc" * 100)
    assert unpacked(packed, 300) == b"abc" * 100
    for damaged, words in (
        (packed, "more than the 299 bytes"),
        (packed[:-1], "not one whole gzip file"),
        (packed + b"x", "not one whole gzip file"),
        (packed + packed, "not one whole gzip file"),
        (packed[:-8] + bytes(8), "incorrect data check"),
        (b"", "not one whole gzip file"),
        (b"abc", "incorrect header check"),
    ):
        with pytest.raises(ValueError, match=words):
            unpacked(damaged, 299 if damaged is packed else 300)


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d["parallel"].update(tp=2_000_000_000),
        lambda d: d["parallel"].update(tp=2_000_000_000, ep=1_000_000_000),
        lambda d: d["parallel"].update(tp=4096, ep=4096, moe_tp=1),
        lambda d: d["parallel"].update(tp=4096, ep=64, moe_tp=64),
        lambda d: d["units"][1].update(layer=1 << 61),
        lambda d: d["layers"].append(1 << 61),
        lambda d: d["ranks"].append(1 << 61),
        lambda d: d["units"][1].update(checked=["{expert}" * 1000] * 10_000),
        lambda d: [unit["tensors"][0].update(replicas=1 << 61) for unit in d["units"]],
        lambda d: d["shards"][0].update(unit="layer-x", path="rank-00-of-02/layer-x.safetensors"),
        lambda d: d["shards"][1]["tensors"][0].update(shape=[1 << 61] * 4),
        lambda d: d["source"].update(tensors=1 << 61, payload_bytes=1 << 61),
    ],
)
def test_numbers_of_a_manifest_are_followed_by_nobody(copied: Path, change: Callable[[Any], object]) -> None:
    trees.reseal(copied, change)
    wrong(copied)


@pytest.mark.parametrize(
    ("key", "value"),
    [("n_routed_experts", 10**10), ("num_hidden_layers", 10**12), ("n_routed_experts", 1 << 16)],
)
def test_a_kept_config_with_any_number_of_experts(copied: Path, key: str, value: int) -> None:
    path = copied / "source" / "config.json"
    config = json.loads(path.read_bytes())
    config["text_config"][key] = value
    path.write_bytes(json.dumps(config).encode())
    trees.reseal(copied)
    wrong(copied)


@pytest.mark.parametrize("name", ["digests.bin", "source/digests.bin"])
@pytest.mark.parametrize("length", ["empty", "short", "long"])
def test_digests_of_the_wrong_length_under_a_sealed_manifest(copied: Path, name: str, length: str) -> None:
    path = copied / name
    whole = path.read_bytes()
    path.write_bytes({"empty": b"", "short": whole[:-16], "long": whole + bytes(16)}[length])
    document = trees.manifest_of(copied)
    for file in document["files"]:
        data = (copied / file["path"]).read_bytes()
        file["size"], file["digest"] = len(data), trees.digest(data)
    (copied / "manifest.json").write_bytes(trees.seal(document))
    said = wrong(copied)
    assert f"{name}" in said
    assert "bytes" in said


def test_digests_said_to_lie_behind_the_file(copied: Path) -> None:
    def change(document: Any) -> None:
        for shard in document["shards"]:
            for tensor in shard["tensors"]:
                if "experts" in tensor:
                    tensor["experts"] += 1 << 40
                    tensor["digest"] = trees.digest(b"")

    document = trees.manifest_of(copied)
    change(document)
    for shard in document["shards"]:
        joined = shard["header"] + "".join(tensor["digest"] for tensor in shard["tensors"])
        shard["digest"] = trees.digest(bytes.fromhex(joined))
    (copied / "manifest.json").write_bytes(trees.seal(document))
    assert any("lie behind" in str(finding) for finding in verify(copied).findings)


@pytest.mark.parametrize(
    "raw", [b"[" * 100_000, b'{"a":' * 900 + b"1" + b"}" * 900, b"\xff", b"NaN", b'"\\ud800"']
)
def test_documents_of_any_content(copied: Path, raw: bytes) -> None:
    names = ["config.json", "rank-00-of-02/model.safetensors.index.json", "provenance.json"]
    for name in names:
        (copied / name).write_bytes(raw)
    trees.reseal(copied)
    said = wrong(copied)
    assert all(name in said for name in names)
