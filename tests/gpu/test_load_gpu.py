"""A rank on the GPU holds the very bytes of its files, whichever way they came, and `bench load` reports what
its schema says.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from checkpoints import make_layers
from marlin_convert.bench.load import bench_load
from marlin_convert.documents.codec import write
from marlin_convert.engines import mapped as mapped_module
from marlin_convert.engines import ring as ring_module
from marlin_convert.engines.ring import PinnedRing
from marlin_convert.engines.torch_loader import PATHS, host_tensors, load_rank, load_shards
from marlin_convert.errors import MachineError, OutputError, UsageError
from marlin_convert.pipeline.run import convert
from marlin_convert.shards.reader import open_shards
from marlin_convert.storage.reads import OpenFile

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason=f"torch {torch.__version__} sees no CUDA GPU"),
]


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One full-width layer of 16 experts: files of more than one ring buffer."""
    folder = tmp_path_factory.mktemp("load")
    make_layers(folder / "source", experts=16)
    convert(str(folder / "source"), folder / "out", tp=2)
    return folder / "out"


def _never(part: ring_module.Part, *_: object) -> None:
    raise MachineError(f"the compiled loop left the part at {part.offset} of {part.file.path}")


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("threads", [1, 3])
def test_every_byte_arrives(
    converted: Path, path: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mapped_module, "REGISTER", 5 << 20)  # several pieces a file
    monkeypatch.setattr(ring_module, "_again", _never)
    host, loaded = load_rank(converted, 1, device="cpu"), load_rank(converted, 1, path=path, threads=threads)
    assert loaded.bytes == sum(shard.size for shard in open_shards(converted, 1).shards()) > 40 << 20
    assert host.tensors.keys() == loaded.tensors.keys()
    for name, tensor in host.tensors.items():
        found = loaded[name]
        assert found.device.type == "cuda"
        assert (found.shape, found.dtype) == (tensor.shape, tensor.dtype)
        assert torch.equal(
            found.cpu().contiguous().view(torch.uint8), tensor.contiguous().view(torch.uint8)
        ), name


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("path", PATHS)
def test_shards_to_a_device(converted: Path, path: str, inference: bool) -> None:
    shards = open_shards(converted, 0)
    with torch.inference_mode(inference):
        tensors = load_shards(shards, units=["layer-000"], path=path).tensors
    name = next(name for name in tensors if name.endswith("w2_weight_packed"))
    assert torch.equal(tensors[name].cpu(), host_tensors(shards, ["layer-000"])[name])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("current", [0, 1])
def test_another_gpu_than_the_first(
    converted: Path, path: str, current: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Device and stream are a thread's own: copies, events and waiting must all be of the device that was
    asked for.
    """
    monkeypatch.setattr(ring_module, "_again", _never)
    host = load_rank(converted, 1, device="cpu")
    with torch.cuda.device(current):
        loaded = load_rank(converted, 1, path=path, device="cuda:1" if current == 0 else "cuda")
    for name, tensor in host.tensors.items():
        assert loaded[name].device == torch.device("cuda", 1)
        assert torch.equal(
            loaded[name].cpu().contiguous().view(torch.uint8), tensor.contiguous().view(torch.uint8)
        ), name


def test_unknown_path(converted: Path) -> None:
    with pytest.raises(UsageError, match="path warp: choose one of auto, ring, direct, mapped"):
        load_rank(converted, 0, path="warp")


def test_a_short_file_is_refused(converted: Path, tmp_path: Path) -> None:
    for entry in converted.iterdir():
        (tmp_path / entry.name).symlink_to(entry)
    rank = tmp_path / "rank-00-of-02"
    rank.unlink()
    rank.mkdir()
    for entry in (converted / rank.name).iterdir():
        (rank / entry.name).symlink_to(entry)
    victim = next(rank.glob("layer-*.safetensors"))
    data = victim.read_bytes()
    victim.unlink()
    victim.write_bytes(data[: len(data) // 2])
    with pytest.raises(OutputError, match="the manifest says"):
        load_rank(tmp_path, 0)


def test_a_file_that_ends_while_it_is_read(tmp_path: Path) -> None:
    short = tmp_path / "short"
    short.write_bytes(bytes(5000))
    target = torch.empty(8192, dtype=torch.uint8, device="cuda")
    ring = PinnedRing(2)
    with pytest.raises(MachineError, match="short ended at byte 5000 while it was being read"):
        ring.copy(ring.parts(OpenFile(short, direct=False), 0, target))


def test_parts_that_the_compiled_loop_cannot_read(converted: Path) -> None:
    """Some file systems open a file for direct reads and then refuse each of them: the ordinary way is gone
    back to, part by part.
    """
    path = converted / open_shards(converted, 0).shards()[0].path
    target = torch.zeros(path.stat().st_size, dtype=torch.uint8, device="cuda")
    file, ring = OpenFile(path, direct=False), PinnedRing(3, 1 << 20)
    file.direct = os.open(path, os.O_WRONLY)  # nothing can be read from it
    ring.copy(ring.parts(file, 0, target))
    file.close()
    assert target.cpu().numpy().tobytes() == path.read_bytes()


def test_bench_load_keeps_to_its_schema(converted: Path) -> None:
    report = bench_load(converted, None, rank=0, rounds=2, threads=2, say=lambda text: None)
    assert {(row.name, row.temperature) for row in report.rows} == {
        ("ours, auto", "warm"),
        ("ours, mapped", "warm"),
        ("ours, auto", "cold"),
        ("ours, ring", "cold"),
        ("ours, mapped", "cold"),
    }
    assert all(len(row.all) == 2 and (row.of_limit or 0) > 0 for row in report.rows)
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.validate(
        json.loads(write(report)),
        json.loads((Path(__file__).parents[2] / "schemas" / "bench-load.schema.json").read_text()),
    )
