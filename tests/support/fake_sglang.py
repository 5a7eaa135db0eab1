"""The parts of SGLang that the plugin touches, played: modules in sys.modules, and a model that narrows and
copies what its weight loading is given, as SGLang's does.
"""

from __future__ import annotations

import enum
import logging
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from marlin_convert.engines.torch_loader import torch_dtype
from marlin_convert.shards.reader import open_shards

#: of the four tensors of a layer, the shape that SGLang allocates, from the shape that is stored
ALLOCATED: dict[str, Callable[[tuple[int, ...]], tuple[int, ...]]] = {
    "w13_weight_packed": lambda stored: (stored[0], stored[1] * 2, stored[2] // 2),
    "w2_weight_packed": lambda stored: (stored[0], stored[1] * 2, stored[2] // 2),
}


class CompressedTensorsWNA16MoE:
    num_bits, group_size, sym, actorder = 4, 32, True, None


class CompressedTensorsFusedMoEMethod:
    pass


class HookType(enum.Enum):
    AROUND = "around"


class Layer(nn.Module):
    """A layer of routed experts."""

    num_fused_shared_experts = 0
    use_padded_loading = False

    def __init__(self, layer_id: int, experts: int, ep_rank: int) -> None:
        super().__init__()
        self.layer_id, self.num_local_experts, self.moe_ep_rank = layer_id, experts, ep_rank
        self.scheme: Any = CompressedTensorsWNA16MoE()
        self.quant_method: Any = CompressedTensorsFusedMoEMethod()
        for name in ("w13_weight_shape", "w2_weight_shape"):
            self.register_parameter(name, parameter((experts, 2), torch.bfloat16))


def parameter(shape: tuple[int, ...], dtype: torch.dtype) -> nn.Parameter:
    """An unfilled parameter."""
    return nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)


@dataclass
class FakeSglang:
    """What tests turn. `change` is called with the model once it is built, `skips` names what is left out
    with a warning, `stops` ends the loading early.
    """

    out: Path
    rank: int = 0
    parallel: SimpleNamespace = field(default_factory=SimpleNamespace)
    moe: SimpleNamespace = field(default_factory=SimpleNamespace)
    version: str = "0.5.17"
    placement: Any = None
    change: Callable[[nn.Module], None] = lambda model: None
    skips: str = "-"
    stops: bool = False
    choices: list[str] = field(default_factory=list)
    hooks: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        manifest = open_shards(self.out, None).manifest
        tp, ep = manifest.tp, manifest.ep
        self.parallel = SimpleNamespace(
            tp_size=tp,
            tp_rank=self.rank,
            pp_size=1,
            moe_ep_size=ep,
            moe_ep_rank=self.rank // (tp // ep),
            moe_tp_size=tp // ep,
            moe_tp_rank=self.rank % (tp // ep),
            attn_tp_size=tp,
            enable_dp_attention=False,
            moe_dense_tp_size=None,
        )
        self.moe = SimpleNamespace(enable_eplb=False, ep_num_redundant_experts=0, moe_a2a_backend="none")

    def model(self) -> nn.Module:
        """This rank's model, named as the shards are, with memory that nobody has filled."""
        shards, common = open_shards(self.out, self.rank), open_shards(self.out, None)
        root = nn.Module()
        for reader in (shards, common):
            for shard in reader.shards():
                for stored in shard.tensors:
                    if stored.name.startswith("__pad__"):
                        continue
                    path, _, name = stored.name.rpartition(".")
                    shape = ALLOCATED[name](stored.shape) if name in ALLOCATED else stored.shape
                    owner = self._owner(root, path, stored.shape[0], stored.experts is not None)
                    owner.register_parameter(name, parameter(shape, torch_dtype(stored.dtype)))
        return root

    def _owner(self, root: nn.Module, path: str, experts: int, stacked: bool) -> nn.Module:
        module, parts = root, path.split(".")
        for i, part in enumerate(parts):
            if not hasattr(module, part):
                last = stacked and i == len(parts) - 1
                layer = int(parts[parts.index("layers") + 1]) if last else 0
                module.add_module(
                    part, Layer(layer, experts, self.parallel.moe_ep_rank) if last else nn.Module()
                )
            module = getattr(module, part)
        return module

    def load(self, model: nn.Module, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Weight loading: narrow a tensor of full shape to this rank's slice, copy it."""
        found = dict(model.named_parameters())
        for name, full in weights:
            if self.stops:
                return
            if self.skips in name:
                logging.getLogger("sglang.srt.models.deepseek").warning(
                    f"{name.removeprefix('language_model.')} not found in params_dict."
                )
                continue
            target = found[name].data
            cut = [axis for axis in range(full.dim()) if full.shape[axis] != target.shape[axis]]
            own = full
            for axis in cut:
                size = target.shape[axis]
                own = full.narrow(axis, self.parallel.tp_rank % (full.shape[axis] // size) * size, size)
            target.copy_(own)

    def modules(self) -> dict[str, Any]:
        """The modules by name, with what the plugin takes from each."""
        registry = SimpleNamespace(register=lambda target, hook, kind: self.hooks.update({target: hook}))

        def build(*_: object) -> nn.Module:
            model = self.model()
            self.change(model)
            return model

        return {
            "sglang.version": {"__version__": self.version},
            "sglang.srt.model_loader.loader": {
                "_get_quantization_config": lambda *_: None,
                "_initialize_model": build,
                "DefaultModelLoader": SimpleNamespace(
                    load_weights_and_postprocess=lambda model, weights, device: self.load(model, weights)
                ),
            },
            "sglang.srt.model_loader.utils": {"set_default_torch_dtype": _dtype},
            "sglang.srt.runtime_context": {
                "get_parallel": lambda: self.parallel,
                "get_exec": lambda: SimpleNamespace(moe=self.moe),
            },
            "sglang.srt.eplb.expert_location": {
                "get_global_expert_location_metadata": lambda: self.placement
            },
            "sglang.srt.layers.quantization.marlin_utils": {
                "marlin_make_workspace": lambda device, blocks: torch.zeros(132 * blocks, dtype=torch.int32)
            },
            "sglang.srt.plugins.hook_registry": {"HookRegistry": registry, "HookType": HookType},
            "sglang.srt.server_args": {"add_load_format_choices": self.choices.extend},
        }

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Put the modules in place."""
        for name, content in self.modules().items():
            parts = name.split(".")
            for i in range(1, len(parts) + 1):
                here = ".".join(parts[:i])
                if here not in sys.modules or i == len(parts):
                    monkeypatch.setitem(sys.modules, here, ModuleType(here))
                if i > 1:
                    monkeypatch.setattr(
                        sys.modules[".".join(parts[: i - 1])], parts[i - 1], sys.modules[here], raising=False
                    )
            vars(sys.modules[name]).update(content)


@contextmanager
def _dtype(dtype: torch.dtype) -> Iterator[None]:
    yield


@dataclass
class LoadConfig:
    """SGLang's, as far as the plugin looks."""

    load_format: Any = "marlin-convert"
    model_loader_extra_config: dict[str, Any] = field(default_factory=dict)


def model_config(path: Path, **more: Any) -> SimpleNamespace:
    """SGLang's ModelConfig, as far as the plugin looks."""
    return SimpleNamespace(model_path=str(path), dtype=torch.bfloat16, **more)
