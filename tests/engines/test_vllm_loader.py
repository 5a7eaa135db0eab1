"""The loading for vLLM with vLLM played; and vLLM's own post-processing, out of its wheels where they are
(`make engines ENGINES="vllm==0.31.0 vllm==0.33.0"`), against what our loading leaves.
"""

from __future__ import annotations

import enum
import sys
from importlib.machinery import BuiltinImporter
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from checkpoints import Checkpoint, expected_packed, expected_scales, make_small
from engine_sources import WHEELS, parts, source
from fake_sglang import FakeSglang, LoadConfig, parameter
from marlin_convert import convert
from marlin_convert.engines import vllm as plugin
from marlin_convert.engines.vllm_loader import load_weights
from marlin_convert.errors import UsageError
from played_repack import played_repack

UTILS = "vllm/model_executor/layers/quantization/utils/marlin_utils.py"
ORACLE = "vllm/model_executor/layers/fused_moe/oracle/int_wna16.py"
STACKED = ("w13_weight_packed", "w2_weight_packed", "w13_weight_scale", "w2_weight_scale")


class Backend(enum.Enum):
    MARLIN = 1
    HUMMING = 2


class CompressedTensorsWNA16MoEMethod:
    num_bits, group_size, symmetric, input_dtype = 4, 32, True, None

    def __init__(self) -> None:
        self.wna16_backend, self.set_up = Backend.MARLIN, 0

    def process_weights_after_loading(self, layer: Any) -> None:
        raise AssertionError("the repack")

    def _setup_kernel(self, layer: Any) -> None:
        self.set_up += 1


def vllm_model(engine: FakeSglang, ep: int, rank: int) -> nn.Module:
    """The model as vLLM names and allocates it: experts N-first, one module further in."""
    model, tp = engine.model(), engine.parallel.tp_size
    for path, layer in [(n, m) for n, m in model.named_modules() if hasattr(m, "w13_weight_packed")]:
        inner, outer = nn.Module(), nn.Module()
        for name in STACKED:
            stored = getattr(layer, name)
            inner.register_parameter(name, parameter(stored.mT.shape, stored.dtype))
        experts = inner.get_parameter("w13_weight_packed").shape[0]
        for name in ("w13_weight_shape", "w2_weight_shape"):
            inner.register_parameter(name, parameter((experts, 2), torch.bfloat16))
        places = torch.full((experts * ep,), -1)
        places[rank // (tp // ep) * experts :][:experts] = torch.arange(experts)
        parallel = SimpleNamespace(
            tp_size=tp // ep,
            ep_size=ep,
            tp_rank=rank % (tp // ep),
            ep_rank=rank // (tp // ep),
            dp_size=1,
            pcp_size=1,
            is_sequence_parallel=False,
            enable_eplb=False,
        )
        vars(inner).update(
            quant_method=CompressedTensorsWNA16MoEMethod(),
            moe_config=SimpleNamespace(moe_parallel_config=parallel),
            expert_map=None if ep == 1 else places,
            local_num_experts=experts,
        )
        outer.add_module("routed_experts", inner)
        model.get_submodule(path.removesuffix(".experts"))._modules["experts"] = outer
    vars(model)["load_weights"] = lambda weights: engine.load(model, weights)
    return model


def load(
    out: Path,
    rank: int,
    ep: int,
    patch: pytest.MonkeyPatch,
    change: Any = None,
    version: str = "0.33.0",
) -> nn.Module:
    modules: dict[str, Any] = {
        "vllm": {},
        "vllm.version": {"__version__": version},
        "vllm.distributed": {"get_pp_group": lambda: SimpleNamespace(world_size=1)},
    }
    for name, content in modules.items():
        module = ModuleType(name)
        vars(module).update(content)
        patch.setitem(sys.modules, name, module)
    model = vllm_model(FakeSglang(out, rank), ep, rank)
    if change:
        change(experts(model))
    load_weights(model, SimpleNamespace(model=str(out)), LoadConfig())
    return model


def experts(model: nn.Module, layer: int = 1) -> Any:
    return model.get_submodule(f"language_model.model.layers.{layer}.mlp.experts.routed_experts")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return make_small(tmp_path_factory.mktemp("vllm") / "source", layers=2, experts=8, vt_layers=1)


def post_processing(version: str) -> Any:
    """`_process_weights_marlin` of a version of vLLM."""
    utils, oracle = source("vllm", version, UTILS), source("vllm", version, ORACLE)
    if utils is None or oracle is None:
        pytest.skip(f"no wheel of vllm {version} in {WHEELS}: make engines ENGINES=vllm=={version}")
    names = ["marlin_moe_permute_scales", "marlin_permute_scales", "get_scale_perms"]
    scales = parts(utils, names, {"torch": torch})["marlin_moe_permute_scales"]

    def repack(packed: Tensor, *rest: Any, is_a_8bit: bool) -> Tensor:
        assert not is_a_8bit
        size_k, size_n, bits = [one for one in rest if isinstance(one, int)]
        return played_repack(packed, torch.empty(0), size_k, size_n, bits)

    given = {
        "torch": torch,
        "ops": SimpleNamespace(gptq_marlin_moe_repack=repack),
        "marlin_moe_permute_scales": scales,
        "marlin_moe_padded_intermediate": lambda width, group: width,
    }
    return parts(oracle, ["_process_weights_marlin"], given)["_process_weights_marlin"]


@pytest.mark.parametrize(("tp", "ep"), [(1, 1), (2, 1), (8, 1), (2, 2), (8, 8)])
@pytest.mark.parametrize("version", plugin.TESTED)
def test_what_vllm_makes_of_the_source_is_what_our_loading_leaves(
    version: str, tp: int, ep: int, checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process, dims, moe_tp = post_processing(version), checkpoint.dims, tp // ep
    convert(str(checkpoint.folder), tmp_path / "out", tp=tp, ep=ep)
    for rank in {0, tp - 1}:
        ours = experts(load(tmp_path / "out", rank, ep, monkeypatch, version=version))
        count, width = dims.experts // ep, dims.moe_intermediate // moe_tp
        own, cut = range(rank // moe_tp * count, (rank // moe_tp + 1) * count), rank % moe_tp

        layer = SimpleNamespace(intermediate_size_per_partition=width, num_groups_w13=8, num_groups_w2=8)
        made = process(
            layer,
            None,
            4,
            8,
            32,
            *matrices("packed", own, cut, dims, moe_tp),
            *matrices("scale", own, cut, dims, moe_tp),
        )[:4]
        for name, expected in zip(STACKED, made, strict=True):
            found = getattr(ours, name)
            assert (found.dtype, found.shape, found.stride()) == (
                expected.dtype,
                expected.shape,
                expected.stride(),
            ), name
            assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8)), name


def matrices(what: str, own: range, cut: int, dims: Any, moe_tp: int) -> tuple[Tensor, Tensor]:
    """w13 and w2 of the experts of a rank, N-first, as vLLM slices them."""
    w13, w2 = [], []
    for expert in own:
        gate, up, down = (matrix(what, expert, p, dims) for p in ("gate", "up", "down"))
        w13.append(torch.cat([gate.chunk(moe_tp)[cut], up.chunk(moe_tp)[cut]]))
        w2.append(down.chunk(moe_tp, dim=1)[cut])
    return torch.stack(w13), torch.stack(w2)


def matrix(what: str, expert: int, projection: str, dims: Any) -> Tensor:
    """A matrix of the source: words or scales."""
    rows, columns = dims.expert_shape(projection)
    if what == "packed":
        return torch.from_numpy(expected_packed(1, expert, projection, rows, columns, group=dims.group))
    scales = expected_scales(1, expert, projection, rows, columns // dims.group)
    return torch.from_numpy(scales).view(torch.bfloat16)


def test_the_repack_is_left_out_once(tiny_tp2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = experts(load(tiny_tp2, 0, 1, monkeypatch))
    layer.quant_method.process_weights_after_loading(layer)
    assert layer.quant_method.set_up == 1
    assert layer.w13_weight is layer.w13_weight_packed
    assert layer.w2_weight is layer.w2_weight_packed
    with pytest.raises(AssertionError, match="the repack"):
        layer.quant_method.process_weights_after_loading(layer)


def of_method(**values: Any) -> Any:
    return lambda layer: vars(layer.quant_method).update(values)


def of_parallel(**values: Any) -> Any:
    """All layers have one configuration of what is parallel; the loader asks the first."""
    return lambda layer: vars(layer.moe_config.moe_parallel_config).update(values)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            of_method(wna16_backend=Backend.HUMMING),
            "HUMMING, the shards are for Marlin; .*--moe-backend",
        ),
        (of_method(group_size=128), r"\(4, 128, True\), the shards have \(4, 32, True\)"),
        (of_method(input_dtype=torch.int8), "unset VLLM_MARLIN_INPUT_DTYPE"),
        (of_parallel(enable_eplb=True), "without --enable-eplb"),
        (of_parallel(tp_size=4), "start it with --tensor-parallel-size 2, or convert again with --tp 4"),
        (of_parallel(ep_size=2, tp_size=1), "convert again with --tp 2 --ep 2"),
        (lambda layer: setattr(layer, "local_num_experts", 5), "serve without redundant experts"),
    ],
)
def test_what_does_not_fit_is_refused(
    change: Any, message: str, tiny_tp2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match=message):
        load(tiny_tp2, 0, 1, monkeypatch, change)


def test_an_untested_version_is_refused(tiny_tp2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"vLLM 0\.29\.0 was not tested"):
        load(tiny_tp2, 0, 1, monkeypatch, version="0.29.0")


def test_registering(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    with monkeypatch.context() as without:
        without.delitem(sys.modules, "vllm", raising=False)
        without.setattr(sys, "meta_path", [BuiltinImporter])  # which finds none
        plugin.register()
    assert caplog.text == ""
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))  # another one than expected
    plugin.register()
    assert "cannot be registered with this vLLM; it starts without" in caplog.text
