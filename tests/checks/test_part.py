"""`verify` of some ranks and layers: what one machine has of an output is enough. And what verify counts."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

import trees
from checkpoints import Checkpoint
from marlin_convert.checks.verify import verify
from marlin_convert.errors import UsageError
from marlin_convert.progress import Point

LAYER = "layer-001.safetensors"


def sources(out: Path, unit: str, experts: int) -> int:
    """How many source tensors a unit's files are made of, by the manifest."""
    (found,) = (each for each in trees.manifest_of(out)["units"] if each["name"] == unit)
    names = [name for origin in found["tensors"] for name in origin["from"]] + found["checked"]
    return sum(experts if "{expert}" in name else 1 for name in names)


def flip(path: Path) -> None:
    """One bit, in the middle."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_one_machine_has_its_rank_alone(copied: Path, tiny: Checkpoint) -> None:
    shutil.rmtree(copied / "rank-00-of-02")
    assert not verify(copied).ok
    alone = verify(copied, ranks=[1], threads=2)
    assert alone.findings == []
    assert alone.proven + alone.unproven == len(tiny.tensors)
    assert alone.unproven > 0
    proven = verify(copied, tiny.folder, ranks=[1], threads=2)
    assert (proven.findings, proven.proven, proven.unproven) == ([], len(tiny.tensors), 0)


@pytest.mark.parametrize("source", [False, True])
def test_what_is_wrong_is_found_where_it_is_looked_for(copied: Path, tiny: Checkpoint, source: bool) -> None:
    flip(copied / "rank-00-of-02" / LAYER)
    against = tiny.folder if source else None
    assert verify(copied, against, ranks=[1]).findings == []
    assert verify(copied, against, layers=[0, 2]).findings == []
    for scope in ({"ranks": [0]}, {"layers": [1]}, {"ranks": [0], "layers": [1]}):
        findings = verify(copied, against, **scope).findings  # type: ignore[arg-type]  # lists of numbers
        assert {(finding.path, finding.rank) for finding in findings} == {(f"rank-00-of-02/{LAYER}", 0)}


def test_only_what_is_asked_for_is_read(copied: Path, tiny: Checkpoint) -> None:
    for path in copied.rglob("*.safetensors"):
        if path != copied / "rank-01-of-02" / LAYER:
            path.unlink()
    seen = list[Point]()
    found = verify(copied, tiny.folder, layers=[1], ranks=[1], progress=seen.append)
    assert (found.findings, found.unproven) == ([], 0)
    assert found.proven == sum(".layers.1." in name for name in tiny.tensors)
    shards = trees.manifest_of(copied)["shards"]
    (shard,) = (each for each in shards if (each["unit"], each["rank"]) == ("layer-001", 1))
    size = sum(tensor["size"] for tensor in shard["tensors"])
    assert {(point.unit, point.number, point.units, point.total) for point in seen} == {
        ("layer-001", 1, 1, size)
    }
    assert seen[-1].done == size


@pytest.mark.parametrize(("scope", "said"), [({"ranks": [2]}, "no rank 2"), ({"layers": [3]}, "no layer 3")])
def test_what_is_not_there(copied: Path, scope: dict[str, list[int]], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        verify(copied, **scope)  # type: ignore[arg-type]  # lists of numbers


@pytest.mark.parametrize("unit", ["layer-000", "layer-001", "top", "common"])
def test_each_tensor_is_counted_once_where_a_file_is_missing(
    copied: Path, tiny: Checkpoint, unit: str
) -> None:
    next(copied.glob(f"*/{unit}.safetensors")).unlink()
    found = verify(copied)
    assert found.proven + found.unproven == len(tiny.tensors)
    assert found.unproven == sources(copied, unit, tiny.dims.experts)


def test_what_is_wrong_is_not_counted_as_proven(copied: Path, tiny: Checkpoint) -> None:
    whole = verify(copied)
    assert (whole.proven, whole.unproven) == (len(tiny.tensors), 0)
    flip(copied / "rank-00-of-02" / LAYER)
    flip(copied / "rank-01-of-02" / "top.safetensors")
    found = verify(copied)
    assert len(found.findings) == 2
    assert (found.proven, found.unproven) == (len(tiny.tensors) - 2, 0)


@pytest.mark.parametrize("keep", [0, 4, 100, 5000])
def test_a_shard_that_is_cut_off_is_to_be_made_not_fetched(copied: Path, keep: int) -> None:
    os.truncate(copied / "rank-00-of-02" / LAYER, keep)
    (finding,) = verify(copied).findings
    assert (finding.path, finding.rank) == (f"rank-00-of-02/{LAYER}", 0)
    assert "fetch" not in finding.what
    assert LAYER not in finding.what
