"""`bench verify` reports by schema what was read, how, and what share of the rate of plain reads that is."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

from checkpoints import Checkpoint
from marlin_convert.bench.plain_reads import CHUNK, read_whole
from marlin_convert.pipeline.run import convert
from marlin_convert.storage.buffers import aligned_buffer

SCHEMA = Path(__file__).parents[2] / "schemas" / "bench-verify.schema.json"
Command = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def out(tiny: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bench") / "out"
    convert(str(tiny.folder), folder, tp=2, threads=2)
    return folder


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("threads", [1, 3])
def test_every_byte_is_read(tmp_path: Path, threads: int, direct: bool) -> None:
    sizes = (0, 4096, CHUNK, CHUNK + 8192)
    files = [tmp_path / str(size) for size in sizes]
    for path, size in zip(files, sizes, strict=True):
        path.write_bytes(b"\x07" * size)
    slots = aligned_buffer(threads * CHUNK)
    total, _ = read_whole(files, slots, direct)
    assert total == sum(sizes)
    assert (slots[-CHUNK:][:4096] == 7).all()


@pytest.mark.slow
def test_against_plain_reads(out: Path, command: Command) -> None:
    code, printed, said = command("bench", "verify", out, "--rounds", 2, "--layers", 1, "--json")
    assert code == 0, said
    report = json.loads(printed)
    Draft202012Validator(json.loads(SCHEMA.read_text())).validate(report)
    shards = list(out.glob("rank-*/layer-001.safetensors"))
    plain, verify = report["ways"]
    assert (report["files"], report["rounds"], len(shards)) == (2, 2, 2)
    assert (plain["name"], verify["name"]) == ("plain reads", "verify")
    assert plain["bytes"] == sum(path.stat().st_size for path in shards)
    assert verify["bytes"] == json.loads(command("verify", out, "--layers", 1, "--json")[1])["bytes"]
    for way in (plain, verify):
        assert len(way["seconds"]) == 2
        assert way["least"] <= way["median"] <= way["most"]
        assert way["resident"] <= 0.01 or report["in_memory"]
    assert verify["peak_anonymous"] > 10 << 20
    assert "peak_anonymous" not in plain
    ratios = [
        verify["bytes"] / theirs / (plain["bytes"] / ours)
        for ours, theirs in zip(plain["seconds"], verify["seconds"], strict=True)
    ]
    assert report["of_plain_all"] == pytest.approx(ratios)
    assert report["of_plain"] == pytest.approx(sum(ratios) / 2)


@pytest.mark.slow
def test_what_is_not_sound_is_not_measured(out: Path, command: Command) -> None:
    shard = out / "rank-00-of-02" / "layer-002.safetensors"
    whole = shard.read_bytes()
    try:
        shard.write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
        code, _, said = command("bench", "verify", out, "--rounds", 1, "--layers", 2)
    finally:
        shard.write_bytes(whole)
    assert code == 4
    assert "verify failed with exit code 1: it says why where it is run alone" in said
