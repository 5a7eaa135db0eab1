"""The loader to the GPU, run against a CUDA runtime without a GPU that copies as late as it may."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from damage import flip
from marlin_convert.bench.cold import evict, resident
from native_programs import Programs

pytestmark = pytest.mark.slow

Outputs = Callable[..., Path]


@pytest.mark.parametrize("path", ["mmap", "ring", "direct"])
@pytest.mark.parametrize("threads", [1, 5])
@pytest.mark.parametrize("buffers", [1, 3])
def test_every_byte_arrives(
    programs: Programs, outputs: Outputs, path: str, threads: int, buffers: int
) -> None:
    out = outputs(8, 1, 0)
    options = (
        "--threads",
        threads,
        "--buffers",
        buffers,
        "--chunk",
        "64k",
        "--repeat",
        2,
        "--check",
        "--json",
    )
    result = programs("fake_load_rank", out, 2, "--path", path, *options)
    if path == "direct" and "cannot be opened: Invalid argument" in result.stderr:
        pytest.skip("this file system has no O_DIRECT")
    assert result.returncode == 0, result.stderr
    runs = json.loads(result.stdout)["runs"]
    assert len(runs) == 2
    for run in runs:
        assert (run["path"], run["threads"], run["chunk_bytes"], run["checked"]) == (
            path,
            threads,
            65536,
            True,
        )
        files = sorted((out / "rank-02-of-08").glob("*.safetensors"))
        headers = sum(8 + int.from_bytes(file.read_bytes()[:8], "little") for file in files)
        assert run["bytes"] == sum(file.stat().st_size for file in files) - headers
        assert run["transfer_s"] <= run["total_s"]


def _opens_directly(path: Path) -> bool:
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECT))
    except OSError:
        return False
    return True


@pytest.mark.parametrize("cached", [True, False])
def test_it_chooses_by_the_page_cache(programs: Programs, outputs: Outputs, cached: bool) -> None:
    out = outputs(8, 1, 0)
    files = sorted((out / "rank-00-of-08").iterdir())
    if cached:
        for file in files:
            file.read_bytes()  # the converter gives the page cache back
    else:
        evict(files)
        if resident(files) > 0:
            pytest.skip("files stay in the page cache here")
    result = programs("fake_load_rank", out, 0, "--check", "--json", "--threads", 1, "--chunk", "64k")
    assert result.returncode == 0, result.stderr
    run = json.loads(result.stdout)["runs"][0]
    assert run["path"] == ("direct" if not cached and _opens_directly(files[0]) else "ring")
    assert (run["resident_before"] > 0.9) == cached


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"FAKE_CUDA_READ_ONLY": "0"}, "can't register read-only"),
        ({"FAKE_CUDA_REGISTER_LIMIT": "3"}, "fake out of memory"),
    ],
)
def test_a_path_that_was_asked_for_fails_aloud(
    programs: Programs, outputs: Outputs, env: dict[str, str], message: str
) -> None:
    result = programs("fake_load_rank", outputs(8, 1, 0), 0, "--path", "mmap", "--chunk", "64k", env=env)
    assert result.returncode == 1
    assert message in result.stderr


def test_check_finds_one_bit(programs: Programs, copied: Path) -> None:
    flip(copied / "rank-00-of-08/layer-001.safetensors", 300_000)
    assert programs("fake_load_rank", copied, 0).returncode == 0
    result = programs("fake_load_rank", copied, 0, "--check")
    assert result.returncode == 1
    assert "layer-001" in result.stderr


@pytest.mark.parametrize(
    "options", [("--path", "fast"), ("--buffers", "0"), ("--chunk", "3k"), ("--threads",)]
)
def test_usage(programs: Programs, outputs: Outputs, options: tuple[str, ...]) -> None:
    result = programs("fake_load_rank", outputs(8, 1, 0), 0, *options)
    assert result.returncode == 2
    assert "usage:" in result.stderr
