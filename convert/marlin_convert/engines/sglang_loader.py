"""SGLang's loader for our shards. SGLang builds the model, loads everything but the routed experts and
post-processes; the experts are copied into its parameters and marked as converted, which its own guard
against a second repack then leaves alone.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from marlin_convert.engines.serving import Options, Served, open_served, refuse_experts, refuse_untested
from marlin_convert.engines.sglang import TESTED, as_default
from marlin_convert.engines.weights import ShardWeights, fill_routed_experts, moe_layers, refuse_nan
from marlin_convert.errors import OutputError, UsageError

logger = logging.getLogger(__name__)

#: the class of a Marlin layer's scheme, exactly: the one for Triton is a subclass with another layout
SCHEME = "CompressedTensorsWNA16MoE"
METHOD = "CompressedTensorsFusedMoEMethod"


class ShardLoader:
    """In the place of SGLang's loaders. It is none of its DefaultModelLoader, so that an update of weights
    into a running server is refused by SGLang, which shows what is printed for it.
    """

    def __init__(self, load_config: Any) -> None:
        self.load_config = load_config

    def __repr__(self) -> str:
        return "marlin-convert shards cannot be loaded into a running server; start it anew"

    def download_model(self, model_config: Any) -> None:
        """Nothing: the shards are local."""

    def load_model(self, *, model_config: Any, device_config: Any) -> nn.Module:
        """Build and fill this rank's model. Raises UsageError where the shards are not made for it,
        OutputError or MachineError where they are damaged or cannot be read.
        """
        from sglang.srt.model_loader import loader as engine
        from sglang.srt.model_loader.utils import set_default_torch_dtype

        begin = time.perf_counter()
        options = Options.of(self.load_config.model_loader_extra_config, model_config.model_path)
        refuse_untested("SGLang", version(), TESTED, options)
        served = where()
        shards = open_served(options, model_config.model_path, served, flags)
        default, device = as_default(self.load_config), torch.device(device_config.device)
        with set_default_torch_dtype(model_config.dtype):
            quantization = engine._get_quantization_config(model_config, default)
            with device:
                model: nn.Module = engine._initialize_model(model_config, default, quantization)
            built = time.perf_counter()
            weights = ShardWeights(shards, placed_device(device), options.path, options.verify_on_load)
            fill(model, weights)
            others = weights.others(served.whole)
            with refusing_skipped(weights):
                engine.DefaultModelLoader.load_weights_and_postprocess(model, others, device)
        if next(others, None) is not None:
            raise OutputError(f"{shards.out}: SGLang did not take all tensors; use a tested version")
        refuse_nan(model, shards.out)
        logger.info(
            "%s, rank %d: %s in %.2f s, the model built in %.2f s before",
            shards.out,
            served.rank,
            ", ".join(f"{size / 1e9:.2f} GB of {whose}" for whose, size in weights.bytes.items()),
            time.perf_counter() - built,
            built - begin,
        )
        model.eval()
        return model


def version() -> str:
    """SGLang's own."""
    from sglang.version import __version__

    return str(__version__)


def flags(tp: int, ep: int) -> str:
    """How SGLang is started for a split."""
    return f"--tp-size {tp} --ep-size {ep}"


def where() -> Served:
    """Where this process of SGLang stands. Raises UsageError where experts may move while it serves."""
    from sglang.srt.runtime_context import get_exec, get_parallel

    parallel, moe = get_parallel(), get_exec().moe
    if moe.enable_eplb or moe.ep_num_redundant_experts:
        raise UsageError(
            "shards hold each expert once, at its own place: serve without --enable-eplb and without"
            " --ep-num-redundant-experts"
        )
    tp, rank = parallel.tp_size, parallel.tp_rank
    if parallel.moe_ep_rank * parallel.moe_tp_size + parallel.moe_tp_rank != rank:
        raise UsageError(
            f"rank {rank} holds slice {parallel.moe_tp_rank} of {parallel.moe_tp_size} of the experts of"
            f" group {parallel.moe_ep_rank}, in the shards it holds another; serve without --moe-dp-size"
        )
    whole = (
        parallel.attn_tp_size != tp
        or parallel.enable_dp_attention
        or parallel.moe_dense_tp_size not in (None, tp)
        or moe.moe_a2a_backend not in (None, "none")
    )
    return Served(tp, parallel.moe_ep_size, rank, parallel.pp_size, whole)


def placed_device(device: torch.device) -> torch.device:
    """The device by its number: SGLang says `cuda` and sets the current one."""
    return torch.empty(0, device=device).device


def fill(model: nn.Module, weights: ShardWeights) -> None:
    """Everything of the routed experts; NaN into what SGLang fills. Raises UsageError for layers that the
    shards do not fit.
    """
    layers = moe_layers(model)
    for name, layer in layers.items():
        refuse_layer(name, layer, weights)
    fill_routed_experts(model, layers, weights)
    for layer in layers.values():
        mark_converted(layer)


def refuse_layer(name: str, layer: Any, weights: ShardWeights) -> None:
    """Raise UsageError where a layer does not run the Marlin kernel on these experts."""
    manifest, device = weights.manifest, weights.device
    scheme: Any = getattr(layer, "scheme", None)
    method: Any = getattr(layer, "quant_method", None)
    if type(scheme).__name__ != SCHEME or type(method).__name__ != METHOD:
        raise UsageError(
            f"{name} is served by {type(method).__name__} with {type(scheme).__name__}, the shards are for"
            f" Marlin ({SCHEME}); start SGLang with --moe-runner-backend marlin"
        )
    layout = manifest.layout
    expected = (layout.num_bits, layout.group_size, layout.symmetric, None)
    if (found := (scheme.num_bits, scheme.group_size, scheme.sym, scheme.actorder)) != expected:
        raise UsageError(
            f"{name}: SGLang expects bits, group size, symmetry and act-order {found}, the shards have"
            f" {expected}; serve the model they were made from"
        )
    if layer.num_fused_shared_experts:
        raise UsageError(
            f"{name} has shared experts fused in, the shards do not; start SGLang with"
            " --disable-shared-experts-fusion"
        )
    if layer.use_padded_loading:
        raise UsageError(
            f"{name} pads experts while loading, the shards are not padded so; start SGLang with"
            " --moe-runner-backend marlin"
        )
    if layer.w13_weight_packed.device != device:
        raise UsageError(
            f"{name} is on {layer.w13_weight_packed.device} and not on {device}; start SGLang without"
            " --cpu-offload-gb"
        )
    refuse_experts(name, manifest, weights.shards.rank or 0, logical_experts(layer))


def logical_experts(layer: Any) -> list[int]:
    """The experts of a layer on this rank, by their numbers in the model."""
    from sglang.srt.eplb.expert_location import get_global_expert_location_metadata

    first = layer.moe_ep_rank * layer.num_local_experts
    physical = range(first, first + layer.num_local_experts)
    placement = get_global_expert_location_metadata()
    if placement is None:
        return list(physical)
    of_layer = placement.physical_to_logical_map_cpu[layer.layer_id]
    return [int(of_layer[expert]) for expert in physical]


def mark_converted(layer: Any) -> None:
    """What SGLang's own post-processing leaves beside the four tensors."""
    from sglang.srt.layers.quantization.marlin_utils import marlin_make_workspace

    device, experts = layer.w13_weight_packed.device, layer.w13_weight_packed.shape[0]
    for name in ("w13_weight_g_idx", "w2_weight_g_idx", "w13_g_idx_sort_indices", "w2_g_idx_sort_indices"):
        empty = torch.empty((experts, 0), dtype=torch.int32, device=device)
        setattr(layer, name, nn.Parameter(empty, requires_grad=False))
    layer.workspace = marlin_make_workspace(device, 4)
    layer.is_marlin_converted = True


@contextmanager
def refusing_skipped(weights: ShardWeights) -> Iterator[None]:
    """SGLang only warns of a tensor that it has no parameter for. Raises OutputError for one of ours."""
    models = logging.getLogger("sglang.srt.models")
    said = _Said(logging.WARNING)
    level = models.level
    models.setLevel(min(logging.WARNING, models.getEffectiveLevel()))
    models.addHandler(said)
    try:
        yield
    finally:
        models.removeHandler(said)
        models.setLevel(level)
    for message in said.messages:
        for word in message.split():
            if any(name == word or name.endswith(f".{word}") for name in weights.names):
                raise OutputError(
                    f"{weights.shards.out}: SGLang left {word} out ({message}); use a tested version:"
                    f" {', '.join(TESTED)}"
                )


class _Said(logging.Handler):
    def __init__(self, level: int) -> None:
        super().__init__(level)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())
