"""Torch views of a rank hold the very bytes that the numpy views do."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from checkpoints import make_small
from marlin_convert import convert, open_shards

torch = pytest.importorskip("torch", reason="torch views need torch")


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("device")
    make_small(folder / "source", layers=2)
    convert(str(folder / "source"), folder / "out", tp=2)
    return folder / "out"


def test_host_tensors_are_the_stored_bytes(converted: Path) -> None:
    from marlin_convert.shards.device import load_rank

    shards = open_shards(converted, 1)
    loaded = load_rank(converted, 1, device="cpu")
    names = shards.names() + shards.fused_names()
    assert sorted(loaded.tensors) == sorted(names)
    for name in names:
        array, tensor = shards[name], loaded[name]
        assert tuple(tensor.shape) == array.shape
        assert (
            tensor.contiguous().view(torch.uint8).numpy().tobytes() == np.ascontiguousarray(array).tobytes()
        )


def test_fused_view_is_its_members_one_after_the_other(converted: Path) -> None:
    from marlin_convert.shards.device import load_rank

    loaded = load_rank(converted, 0, device="cpu", units=["layer-001"])
    prefix = "language_model.model.layers.1.self_attn."
    fused = loaded[prefix + "fused_qkv_a_proj_with_mqa.weight"]
    parts = [loaded[prefix + "q_a_proj.weight"], loaded[prefix + "kv_a_proj_with_mqa.weight"]]
    assert torch.equal(fused, torch.cat(parts))
    assert fused.data_ptr() == parts[0].data_ptr()
    assert not any(name.startswith("language_model.model.layers.0.") for name in loaded.tensors)


def test_cold_files_are_seen_to_be_cold(converted: Path) -> None:
    from marlin_convert.bench.cold import evict, resident
    from marlin_convert.shards.device import _cached

    shards = open_shards(converted, 0)
    files = [converted / shard.path for shard in shards.shards()]
    for path in files:
        path.read_bytes()
    assert _cached(shards, shards.shards())
    evict(files)
    if resident(files) > 0:
        pytest.skip("this file system keeps its files in memory")
    cold = open_shards(converted, 0)
    largest = max(cold.shards(), key=lambda shard: shard.size)
    assert not _cached(cold, [largest])  # opening it has read its header


def test_rows_that_are_read_are_those_of_the_mapping(converted: Path) -> None:
    shards = open_shards(converted, 1)
    name = next(name for name in shards.names() if name.endswith("w13_weight_packed"))
    assert shards.read(name, 2, 3).tobytes() == shards[name][2:5].tobytes()


def test_exchanged_layers_are_refused(converted: Path) -> None:
    folder = converted / "rank-00-of-02"
    first, second = folder / "layer-000.safetensors", folder / "layer-001.safetensors"
    shards = open_shards(converted, 0)
    assert shards.names("layer-001")[0] in shards.names()
    if first.stat().st_size != second.stat().st_size:
        from marlin_convert.errors import OutputError

        spare = folder / "spare"
        first.rename(spare)
        second.rename(first)
        spare.rename(second)
        try:
            with pytest.raises(OutputError, match="bytes, the manifest says"):
                shards[shards.names("layer-001")[0]]
        finally:
            first.rename(spare)
            second.rename(first)
            spare.rename(second)


def test_layer_and_expert_views(converted: Path) -> None:
    from marlin_convert.errors import UsageError

    shards = open_shards(converted, 1)
    prefix = "language_model.model.layers.1."
    layer = shards.layer(1)
    assert set(layer) == set(shards.names("layer-001")) | {
        name for name in shards.fused_names() if name.startswith(prefix)
    }
    words = shards[prefix + "mlp.experts.w13_weight_packed"]
    assert np.array_equal(shards.expert(prefix + "mlp.experts.w13_weight_packed", 5), words[5])
    with pytest.raises(UsageError, match="owns the experts 0 to 15, not 16"):
        shards.expert(prefix + "mlp.experts.w13_weight_packed", 16)
    tensors = shards.to("cpu", ["layer-001"])
    assert sorted(tensors) == sorted(layer)
    assert tensors[prefix + "mlp.experts.w2_weight_scale"].dtype == torch.bfloat16
    assert set(shards.tensors(["top"])) == set(shards.names("top"))


def test_what_a_rank_holds_and_how_units_are_named(converted: Path) -> None:
    from marlin_convert.errors import UsageError
    from marlin_convert.shards.device import load_rank

    shards = open_shards(converted, 1)
    assert list(shards) == shards.names()
    assert shards.names()[0] in shards
    assert "no such tensor" not in shards
    assert repr(shards) == f"Shards({str(converted)!r}, rank=1, {len(shards.names())} tensors)"
    with pytest.raises(UsageError, match=r'units is a list, such as \["layer-001"\]'):
        load_rank(converted, 1, device="cpu", units="layer-001")


def test_without_a_gpu_it_says_so(converted: Path) -> None:
    from marlin_convert.errors import MachineError
    from marlin_convert.shards.device import load_rank

    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(MachineError, match="no CUDA GPU to load to"):
        load_rank(converted, 1)
