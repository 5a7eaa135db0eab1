"""SGLang's own allocation, slicing and post-processing of the source's experts, against what our loader
leaves in the same layers: for every version that is said to be tested. The repack op is played by its
definition. Needs the wheels: `make engines`.
"""

from __future__ import annotations

import enum
import tomllib
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from packaging.requirements import Requirement
from torch import Tensor, nn

from checkpoints import Checkpoint, expected_packed, expected_scales, make_small
from engine_sources import WHEELS, defined, parts, source
from fake_sglang import CompressedTensorsFusedMoEMethod, FakeSglang, LoadConfig, model_config
from marlin_convert import convert, open_shards
from marlin_convert.engines.sglang import TESTED
from marlin_convert.engines.sglang_loader import ShardLoader
from marlin_convert.engines.weights import moe_layers
from played_repack import played_repack

SCHEMES = "sglang/srt/layers/quantization/compressed_tensors/schemes/compressed_tensors_wNa16_moe.py"
UTILS = "sglang/srt/layers/quantization/marlin_utils.py"
LAYER = "sglang/srt/layers/moe/fused_moe_triton/layer.py"
#: what the plugin touches, by file; with a dot, a method
TOUCHED = {
    "sglang/srt/configs/load_config.py": ["LoadConfig._verify_load_format"],
    "sglang/srt/model_loader/loader.py": [
        "get_model_loader",
        "_get_quantization_config",
        "_initialize_model",
        "DefaultModelLoader.load_weights_and_postprocess",
    ],
    "sglang/srt/model_loader/utils.py": ["set_default_torch_dtype"],
    "sglang/srt/utils/hf_transformers/config.py": ["get_config"],
    "sglang/srt/plugins/hook_registry.py": ["HookRegistry.register", "HookType"],
    "sglang/srt/runtime_context.py": ["get_parallel", "get_exec"],
    "sglang/srt/eplb/expert_location.py": ["get_global_expert_location_metadata"],
    "sglang/srt/layers/quantization/marlin_utils.py": ["marlin_make_workspace"],
}
PROJECTIONS = {"w1": "gate", "w3": "up", "w2": "down"}


class Engine:
    """Parts of one version of SGLang."""

    def __init__(self, version: str) -> None:
        texts = [source("sglang", version, path) for path in (SCHEMES, UTILS, LAYER)]
        if None in texts:
            pytest.skip(f"no wheel of sglang {version} in {WHEELS}: make engines")
        schemes, utils, layer = (str(text) for text in texts)
        scales = parts(
            utils,
            ["marlin_moe_permute_scales", "marlin_permute_scales", "get_scale_perms"],
            {"torch": torch},
        )
        given = {
            "torch": torch,
            "enum": enum,
            "Enum": enum.Enum,
            "marlin_moe_permute_scales": scales["marlin_moe_permute_scales"],
            "marlin_make_workspace": lambda device, blocks: torch.zeros(132 * blocks, dtype=torch.int32),
            "gptq_marlin_moe_repack": played_repack,
            "set_weight_attrs": set_attributes,
        }
        methods = ["create_weights", "process_weights_after_loading"]
        names = ["GPTQMarlinState", *(f"CompressedTensorsWNA16MoE.{name}" for name in methods)]
        self.scheme = parts(schemes, names, given)["CompressedTensorsWNA16MoE"]
        own = ["_load_w13", "_load_w2", "_load_model_weight_or_group_weight_scale"]
        given = {
            "torch": torch,
            "_is_cpu": False,
            "_maybe_copy_weight_view_before_h2d": lambda weight: weight,
            "_weight_layout_method": lambda layer: layer.scheme,
        }
        self.loading = parts(layer, [f"FusedMoE.{name}" for name in own], given)["FusedMoE"]

    def layer(self, shape: SimpleNamespace) -> Any:
        """A layer of routed experts as SGLang allocates it, unfilled."""
        layer = nn.Module()
        scheme = object.__new__(self.scheme)
        vars(scheme).update(
            num_bits=4, packed_factor=8, strategy="group", group_size=32, actorder=None, sym=True
        )
        vars(layer).update(
            scheme=scheme,
            quant_config=SimpleNamespace(get_name=lambda: "compressed_tensors"),
            quant_method=CompressedTensorsFusedMoEMethod(),
            use_padded_loading=False,
            num_fused_shared_experts=0,
            num_local_experts=shape.experts,
            use_presharded_weights=False,
            use_triton_kernels=False,
            moe_runner_config=SimpleNamespace(is_gated=True),
            moe_tp_size=shape.moe_tp,
            moe_ep_rank=shape.ep_rank,
            layer_id=shape.layer_id,
        )
        scheme.create_weights(layer, shape.experts, shape.hidden, shape.width, torch.bfloat16)
        return layer

    def fill(self, layer: Any, expert: int, shard: str, name: str, weight: Tensor, tp_rank: int) -> None:
        """One tensor of the source into a layer, as SGLang's weight loader hands it on."""
        parameter = getattr(layer, f"{'w2' if shard == 'w2' else 'w13'}_{name}")
        if name == "weight_shape":
            parameter.data[expert] = weight
            return
        loader = object.__new__(self.loading)
        vars(loader).update(vars(layer), moe_tp_rank=tp_rank)
        load = loader._load_model_weight_or_group_weight_scale
        # newer versions take the rank from the layer
        rank = {"tp_rank": tp_rank} if "tp_rank" in signature(load).parameters else {}
        load(
            shard_id=shard,
            shard_dim=0 if shard == "w2" else 1,
            loaded_weight=weight.t().contiguous(),
            expert_data=parameter.data[expert],
            **rank,
        )


def set_attributes(weight: Tensor, attributes: dict[str, Any]) -> None:
    for name, value in attributes.items():
        setattr(weight, name, value)


@pytest.mark.parametrize("path", TOUCHED)
@pytest.mark.parametrize("version", TESTED)
def test_what_the_plugin_touches_is_there(version: str, path: str) -> None:
    text = source("sglang", version, path)
    if text is None:
        pytest.skip(f"no wheel of sglang {version} in {WHEELS}: make engines")
    assert set(TOUCHED[path]) <= defined(text)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return make_small(tmp_path_factory.mktemp("parity") / "source", layers=2, experts=8, vt_layers=1)


@pytest.mark.parametrize(("tp", "ep"), [(1, 1), (2, 1), (8, 1), (2, 2), (8, 2), (8, 8)])
@pytest.mark.parametrize("version", TESTED)
def test_what_sglang_makes_of_the_source_is_what_our_loader_leaves(
    version: str, tp: int, ep: int, checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, dims, moe_tp = Engine(version), checkpoint.dims, tp // ep
    convert(str(checkpoint.folder), tmp_path / "out", tp=tp, ep=ep)
    for rank in {0, tp - 1}:
        shape = SimpleNamespace(
            experts=dims.experts // ep,
            hidden=dims.hidden,
            width=dims.moe_intermediate // moe_tp,
            moe_tp=moe_tp,
            ep_rank=rank // moe_tp,
            layer_id=1,
        )
        default, ours = engine.layer(shape), engine.layer(shape)
        for local in range(shape.experts):
            fill_expert(engine, default, dims, local, rank % moe_tp)
        with torch.no_grad():
            default.scheme.process_weights_after_loading(default)
        loaded(tmp_path / "out", rank, version, ours, monkeypatch)
        left, right = dict(default.named_parameters()), dict(ours.named_parameters())
        assert list(left) == list(right)
        for name, parameter in left.items():
            other = right[name]
            assert (parameter.dtype, parameter.shape, parameter.stride()) == (
                other.dtype,
                other.shape,
                other.stride(),
            ), name
            assert torch.equal(raw(parameter), raw(other)), name
        assert torch.equal(default.workspace, ours.workspace)
        assert default.is_marlin_converted
        assert ours.is_marlin_converted
        before = {name: raw(parameter) for name, parameter in right.items()}
        with torch.no_grad():
            ours.scheme.process_weights_after_loading(ours)  # SGLang comes by again and leaves it alone
        assert all(torch.equal(before[name], raw(p)) for name, p in ours.named_parameters())


def raw(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().contiguous().view(-1).view(torch.uint8)


def fill_expert(engine: Engine, layer: Any, dims: Any, local: int, tp_rank: int) -> None:
    """The source's tensors of one expert."""
    expert = layer.moe_ep_rank * layer.num_local_experts + local
    for shard, projection in PROJECTIONS.items():
        rows, columns = dims.expert_shape(projection)
        packed = torch.from_numpy(expected_packed(1, expert, projection, rows, columns, group=dims.group))
        scales = torch.from_numpy(expected_scales(1, expert, projection, rows, columns // dims.group))
        engine.fill(layer, local, shard, "weight_packed", packed, tp_rank)
        engine.fill(layer, local, shard, "weight_scale", scales.view(torch.bfloat16), tp_rank)
        engine.fill(layer, local, shard, "weight_shape", torch.tensor([rows, columns]), tp_rank)


def loaded(out: Path, rank: int, version: str, layer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Our loader's way with a layer that SGLang allocated, in a model that is played."""
    name = "language_model.model.layers.1.mlp.experts"

    def put(model: nn.Module) -> None:
        owner = model.get_submodule(name.removesuffix(".experts"))
        owner._modules["experts"] = layer

    engine = FakeSglang(out, rank, version=version, change=put)
    engine.install(monkeypatch)
    model = ShardLoader(LoadConfig()).load_model(
        model_config=model_config(out), device_config=SimpleNamespace(device="cpu")
    )
    assert moe_layers(model)[name] is layer
    assert open_shards(out, rank).manifest.ep == engine.parallel.moe_ep_size


def test_the_extra_installs_versions_that_the_loader_takes() -> None:
    """Of all that there are from the oldest on; of those to come none before it was tested."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    (wanted,) = map(Requirement, project["optional-dependencies"]["sglang"])
    assert {f"0.5.{n}" for n in range(10, 40) if wanted.specifier.contains(f"0.5.{n}")} == set(TESTED)
