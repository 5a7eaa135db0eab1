"""The loader for SGLang with SGLang played: what it leaves in a model, and what it refuses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from checkpoints import Checkpoint
from fake_sglang import FakeSglang, LoadConfig, model_config
from marlin_convert import convert, open_shards
from marlin_convert.engines.sglang_loader import ShardLoader
from marlin_convert.errors import OutputError, UsageError

FUSED = ("w13_weight_g_idx", "w2_weight_g_idx", "w13_g_idx_sort_indices", "w2_g_idx_sort_indices")


@pytest.fixture(scope="module")
def ep2(tiny: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("ep2") / "out"
    convert(str(tiny.folder), out, tp=2, ep=2)
    return out


@pytest.fixture(scope="module")
def apart(tiny: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For two groups of data-parallel attention, of two ranks each."""
    out = tmp_path_factory.mktemp("apart") / "out"
    convert(str(tiny.folder), out, tp=4, attn_tp=2)
    return out


def load(
    engine: FakeSglang, monkeypatch: pytest.MonkeyPatch, served: Path | None = None, **extra: Any
) -> Any:
    engine.install(monkeypatch)
    loader = ShardLoader(LoadConfig(model_loader_extra_config=extra))
    return loader.load_model(
        model_config=model_config(served or engine.out), device_config=SimpleNamespace(device="cpu")
    )


def experts(model: nn.Module, layer: int = 1) -> Any:
    return model.get_submodule(f"language_model.model.layers.{layer}.mlp.experts")


@pytest.mark.parametrize(
    ("split", "rank"),
    [
        *(("tiny_tp2", rank) for rank in range(2)),
        *(("ep2", rank) for rank in range(2)),
        *(("apart", rank) for rank in range(4)),
    ],
)
@pytest.mark.parametrize("verify", [False, True])
def test_every_parameter_is_the_stored_tensor(
    split: str, rank: int, verify: bool, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    out: Path = request.getfixturevalue(split)
    built: list[nn.Module] = []
    engine = FakeSglang(out, rank, change=built.append)
    model = load(engine, monkeypatch, verify_on_load=verify)
    found = dict(model.named_parameters())
    shards, common = open_shards(out, rank), open_shards(out, None)
    for reader in (shards, common):
        for name in reader.names():
            parameter = found.pop(name)
            assert parameter.shape == reader[name].shape
            stored = np.ascontiguousarray(reader[name]).tobytes()
            assert parameter.detach().contiguous().view(torch.uint8).numpy().tobytes() == stored, name
    layer = experts(model)
    count = layer.w13_weight_packed.shape[0]
    dims = shards.manifest.model
    hidden, width = dims["hidden_size"], dims["moe_intermediate_size"]
    assert layer.w13_weight_shape.tolist() == [[width, hidden]] * count
    assert layer.w2_weight_shape.tolist() == [[hidden, width]] * count
    for name in FUSED:
        assert getattr(layer, name).shape == (count, 0)
        assert getattr(layer, name).dtype == torch.int32
    assert layer.is_marlin_converted
    assert layer.workspace.shape == (528,)
    assert {name.rpartition(".")[2] for name in found} == {*FUSED, "w13_weight_shape", "w2_weight_shape"}
    assert not model.training


def test_the_parameters_keep_their_memory(tiny_tp2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever took a parameter's address before loading, as a captured graph does, reads the right bytes."""
    places: dict[str, int] = {}

    def note(model: nn.Module) -> None:
        places.update({name: p.data_ptr() for name, p in model.named_parameters()})

    model = load(FakeSglang(tiny_tp2, change=note), monkeypatch)
    assert {
        name: p.data_ptr() for name, p in model.named_parameters() if name in places and p.numel()
    } == places


def test_only_its_own_files_are_read_and_the_few_others_counted(
    tiny_tp2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    out = tmp_path / "out"
    shutil.copytree(tiny_tp2, out)
    shutil.rmtree(out / "rank-00-of-02")
    with caplog.at_level("INFO"):
        load(FakeSglang(out, 1), monkeypatch)
    assert "GB of rank, " in caplog.text
    assert "GB of common in " in caplog.text
    assert "other ranks" not in caplog.text


def test_attention_that_is_not_cut_reads_all_ranks(
    tiny: Checkpoint, tiny_tp2: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = FakeSglang(tiny_tp2, 1)
    engine.parallel.attn_tp_size, engine.parallel.enable_dp_attention = 1, True
    name = "language_model.model.layers.1.self_attn.o_proj.weight"
    whole = tiny.tensors[name]

    def widen(model: nn.Module) -> None:
        attention = model.get_submodule(name.removesuffix(".o_proj.weight"))
        attention.get_submodule("o_proj").weight = nn.Parameter(
            torch.empty(whole.shape, dtype=torch.bfloat16), requires_grad=False
        )

    engine.change = widen
    with caplog.at_level("INFO"):
        model = load(engine, monkeypatch)
    halves = [open_shards(tiny_tp2, rank)[name] for rank in (0, 1)]
    found = model.get_parameter(name).detach().view(torch.uint16).numpy()
    assert np.array_equal(found, np.concatenate(halves, axis=1))
    assert "of other ranks" in caplog.text


def other_experts(engine: FakeSglang) -> None:
    engine.placement = SimpleNamespace(
        physical_to_logical_map_cpu=torch.tensor([[0, 1, 2, 3], [0, 2, 1, 3], [0] * 4])
    )


def changed(**values: Any) -> Any:
    """A change of all layers of routed experts."""

    def change(model: nn.Module) -> None:
        for module in model.modules():
            if hasattr(module, "w13_weight_packed"):
                for name, value in values.items():
                    setattr(module, name, value)

    return lambda engine: setattr(engine, "change", change)


def narrower(model: nn.Module) -> None:
    layer = experts(model)
    layer.w2_weight_packed = nn.Parameter(layer.w2_weight_packed[:, ::2].clone(), requires_grad=False)


def without_second(model: nn.Module) -> None:
    delattr(model.get_submodule("language_model.model.layers.2.mlp"), "experts")


class CompressedTensorsWNA16TritonMoE:
    pass


class Scheme:
    num_bits, group_size, sym, actorder = 4, 128, True, None


Scheme.__name__ = "CompressedTensorsWNA16MoE"


def parallel(**values: Any) -> Any:
    return lambda engine: vars(engine.parallel).update(values)


def moe(**values: Any) -> Any:
    return lambda engine: vars(engine.moe).update(values)


def built(change: Any) -> Any:
    return lambda engine: setattr(engine, "change", change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            parallel(tp_size=4),
            r"cut for tp 2 ep 1, this engine runs tp 4 ep 1; start it with --tp-size 2 --ep-size 1, or"
            r" convert again with --tp 4 --ep 1",
        ),
        (parallel(moe_ep_size=2), "convert again with --tp 2 --ep 2"),
        (parallel(moe_tp_rank=1), "without --moe-dp-size"),
        (parallel(pp_size=2), "does not serve 2 pipeline stages; serve with one"),
        (moe(enable_eplb=True), "without --enable-eplb"),
        (moe(ep_num_redundant_experts=2), "without --ep-num-redundant-experts"),
        (
            other_experts,
            r"holds 4 experts \(0, 2, 1, 3\), the shards of rank 0 are those of 0 to 3 in order",
        ),
        (changed(num_local_experts=5), "serve without redundant experts"),
        (changed(num_fused_shared_experts=1), "--disable-shared-experts-fusion"),
        (
            changed(scheme=CompressedTensorsWNA16TritonMoE()),
            r"TritonMoE, the shards are for Marlin .* --moe-runner-backend marlin",
        ),
        (changed(quant_method=object()), "is served by object with"),
        (changed(scheme=Scheme()), r"\(4, 128, True, None\), the shards have \(4, 32, True, None\)"),
        (changed(use_padded_loading=True), "pads experts while loading"),
        (built(narrower), "does not pad as the shards are padded"),
        (built(without_second), "layers.2.mlp.experts.w13_weight_packed is in the shards only"),
        (built(lambda model: model.to(torch.float16)), "serve with --dtype bfloat16"),
        (built(lambda model: model.to("meta")), "is on meta and not on cpu; .* without --cpu-offload-gb"),
        (
            lambda engine: setattr(engine, "version", "0.5.18"),
            r'SGLang 0.5.18 was not tested .* "untested_version": true',
        ),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_filled(
    change: Any, message: str, tiny_tp2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = FakeSglang(tiny_tp2)
    change(engine)
    with pytest.raises(UsageError, match=message):
        load(engine, monkeypatch)


def test_an_untested_version_can_be_wanted(tiny_tp2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load(FakeSglang(tiny_tp2, version="0.9.0"), monkeypatch, untested_version=True)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"shard": "x"}, "has the key shard; marlin-convert knows shards, path, verify_on_load"),
        ({"path": "mapped"}, "path mapped; choose one of auto, ring, direct"),
        ({"verify_on_load": "yes"}, "verify_on_load is 'yes', expected true or false"),
        ({"shards": 3}, "shards is 3, expected a string"),
    ],
)
def test_wrong_options(
    extra: dict[str, Any], message: str, tiny_tp2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match=message):
        load(FakeSglang(tiny_tp2), monkeypatch, **extra)


def test_the_source_beside_the_shards_must_be_theirs(
    tiny: Checkpoint, tiny_tp2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = FakeSglang(tiny_tp2)
    load(engine, monkeypatch, tiny.folder, shards=str(tiny_tp2))
    config = json.loads((tiny.folder / "config.json").read_text())
    config["text_config"]["rope_theta"] = 1.0
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UsageError, match=r"they differ in text_config\); give the model of the shards"):
        load(engine, monkeypatch, tmp_path, shards=str(tiny_tp2))
    with pytest.raises(UsageError, match=r"cannot be compared .*; serve .* alone: --model-path"):
        load(engine, monkeypatch, tmp_path / "absent", shards=str(tiny_tp2))


def test_parts_of_a_conversion(tiny: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank alone serves that rank, but neither another nor what needs all ranks."""
    convert(str(tiny.folder), tmp_path / "one", tp=2, ranks=[0])
    load(FakeSglang(tmp_path / "one", 0), monkeypatch)
    engine = FakeSglang(tmp_path / "one", 0)
    engine.parallel.tp_rank = engine.parallel.moe_tp_rank = 1
    with pytest.raises(UsageError, match=r"has the ranks 0 of 2, rank 1 is needed; convert again without"):
        load(engine, monkeypatch)
    engine = FakeSglang(tmp_path / "one", 0)
    engine.parallel.attn_tp_size = 1
    with pytest.raises(UsageError, match="all ranks are needed"):
        load(engine, monkeypatch)
    convert(str(tiny.folder), tmp_path / "layers", tp=2, layers=[0, 1])
    with pytest.raises(UsageError, match="has 2 of 3 layers; convert again without --layers"):
        load(FakeSglang(tmp_path / "layers", 0), monkeypatch)


def test_a_parameter_that_nobody_fills_is_found(tiny_tp2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def more(model: nn.Module) -> None:
        model.extra = nn.Parameter(torch.ones(3, dtype=torch.bfloat16), requires_grad=False)
        model.scale = nn.Parameter(torch.tensor(-1.0), requires_grad=False)

    with pytest.raises(OutputError, match="1 parameters have a NaN, the first is extra"):
        load(FakeSglang(tiny_tp2, change=more), monkeypatch)


def test_a_slice_that_is_not_ours_is_found(tiny_tp2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine takes the other half of what is cut: it gets NaN, not another rank's bytes."""
    engine = FakeSglang(tiny_tp2, 0)
    taken = engine.load

    def other_half(model: nn.Module, weights: Any) -> None:
        engine.parallel.tp_rank = 1
        taken(model, weights)

    monkeypatch.setattr(engine, "load", other_half)
    with pytest.raises(OutputError, match="did not fill all of it from the slices of this rank"):
        load(engine, monkeypatch)


def test_what_the_engine_only_warns_of_is_an_error(tiny_tp2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeSglang(tiny_tp2, skips="input_layernorm")
    with pytest.raises(OutputError, match=r"SGLang left model.layers.0.input_layernorm.weight out"):
        load(engine, monkeypatch)


def test_what_the_engine_does_not_ask_for_is_an_error(
    tiny_tp2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(OutputError, match="SGLang did not take all tensors"):
        load(FakeSglang(tiny_tp2, stops=True), monkeypatch)


@pytest.mark.parametrize("unit", ["layer-001", "top"])
def test_a_changed_byte_is_found_while_loading(
    unit: str, tiny_tp2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    shutil.copytree(tiny_tp2, out)
    shard = next(shard for shard in open_shards(out, 1).shards() if shard.unit == unit)
    tensor = next(t for t in shard.tensors if unit == "top" or t.experts is not None)
    with (out / shard.path).open("r+b") as file:
        file.seek(tensor.offset + tensor.size // 2)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 1]))
    load(FakeSglang(out, 1), monkeypatch)
    with pytest.raises(OutputError, match=rf"{tensor.name} arrived with the digest"):
        load(FakeSglang(out, 1), monkeypatch, verify_on_load=True)


def test_an_update_of_weights_says_what_to_do() -> None:
    assert "start it anew" in repr(ShardLoader(LoadConfig()))
