"""Torch tensors of a rank hold the very bytes that the numpy views do; without torch, loading says so."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from checkpoints import make_small
from marlin_convert import convert, load_rank, open_shards
from marlin_convert.engines.torch_loader import host_tensors, in_page_cache, load_shards
from marlin_convert.errors import MachineError, UsageError

torch = pytest.importorskip("torch", reason="torch tensors need torch")


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("device")
    make_small(folder / "source", layers=2)
    convert(str(folder / "source"), folder / "out", tp=2)
    return folder / "out"


def test_host_tensors_are_the_stored_bytes(converted: Path) -> None:
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
    loaded = load_rank(converted, 0, device="cpu", units=["layer-001"])
    prefix = "language_model.model.layers.1.self_attn."
    fused = loaded[prefix + "fused_qkv_a_proj_with_mqa.weight"]
    parts = [loaded[prefix + "q_a_proj.weight"], loaded[prefix + "kv_a_proj_with_mqa.weight"]]
    assert torch.equal(fused, torch.cat(parts))
    assert fused.data_ptr() == parts[0].data_ptr()
    assert not any(name.startswith("language_model.model.layers.0.") for name in loaded.tensors)


def test_cold_files_are_seen_to_be_cold(converted: Path) -> None:
    from marlin_convert.bench.cold import evict, resident

    shards = open_shards(converted, 0)
    files = [converted / shard.path for shard in shards.shards()]
    for path in files:
        path.read_bytes()
    assert in_page_cache(shards, shards.shards())
    evict(files)
    if resident(files) > 0:
        pytest.skip("this file system keeps its files in memory")
    cold = open_shards(converted, 0)
    largest = max(cold.shards(), key=lambda shard: shard.size)
    assert not in_page_cache(cold, [largest])  # opening it has read its header


def test_some_units_are_asked_for_by_name(converted: Path) -> None:
    shards = open_shards(converted, 1)
    prefix = "language_model.model.layers.1."
    for tensors in (
        load_shards(shards, device="cpu", units=["layer-001"]).tensors,
        host_tensors(shards, ["layer-001"]),
    ):
        assert sorted(tensors) == sorted(shards.layer(1))
        assert tensors[prefix + "mlp.experts.w2_weight_scale"].dtype == torch.bfloat16
    assert set(host_tensors(shards, ["top"])) == set(shards.names("top"))
    with pytest.raises(UsageError, match=r'units is a list, such as \["layer-001"\]'):
        load_rank(converted, 1, device="cpu", units="layer-001")
    with pytest.raises(UsageError, match="has no layer-009 on rank 1"):
        load_rank(converted, 1, device="cpu", units=["layer-001", "layer-009"])


def test_without_a_gpu_it_says_so(converted: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(MachineError, match="sees no CUDA GPU"):
        load_rank(converted, 1)


WITHOUT_TORCH = """
import importlib.util, sys
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "torch" else find_spec(name, *rest)
from marlin_convert import UsageError, load_rank, open_shards
from marlin_convert.engines.torch_loader import host_tensors
shards = open_shards(sys.argv[1], 0)
print(shards[shards.names()[0]].size > 0)
for load in (lambda: load_rank(sys.argv[1], 0), lambda: host_tensors(shards)):
    try:
        load()
    except UsageError as error:
        print(error)
print("torch" in sys.modules)
"""


def test_without_torch_shards_are_read_and_loading_says_what_to_install(converted: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, str(converted)], capture_output=True, text=True, check=True
    )
    said = "this needs torch: pip install '.[torch]' in the project's folder"
    assert done.stdout.splitlines() == ["True", said, said, "False"]
