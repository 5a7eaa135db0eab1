"""vLLM's loading of our shards: vLLM has built the model and post-processes what it loads itself; the routed
experts are copied into its parameters, and the repack of their layers is left out.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from torch import nn

from marlin_convert.engines.serving import Options, Served, open_served, refuse_experts, refuse_untested
from marlin_convert.engines.vllm import TESTED
from marlin_convert.engines.weights import ShardWeights, fill_routed_experts, moe_layers, refuse_nan
from marlin_convert.errors import OutputError, UsageError

logger = logging.getLogger(__name__)

#: the class of a layer's method, exactly, and the backends that read these words
METHOD = "CompressedTensorsWNA16MoEMethod"
BACKENDS = ("MARLIN", "BATCHED_MARLIN")
MARLIN = "--moe-backend marlin"
#: a part of vLLM's names of experts that names of tensors do not have
INNER = ".routed_experts"


def load_weights(model: nn.Module, model_config: Any, load_config: Any) -> None:
    """Fill this rank's model. Raises UsageError where the shards are not made for it, OutputError or
    MachineError where they are damaged or cannot be read.
    """
    options = Options.of(load_config.model_loader_extra_config or {}, model_config.model)
    refuse_untested("vLLM", version(), TESTED, options)
    layers = {name.replace(INNER, ""): layer for name, layer in moe_layers(model).items()}
    served = where(layers)
    shards = open_served(options, model_config.model, served, flags)
    device = next(iter(layers.values())).get_parameter("w13_weight_packed").device
    weights = ShardWeights(shards, device, options.path, options.verify_on_load)
    for name, layer in layers.items():
        refuse_layer(name, layer, weights)
    fill_routed_experts(model, layers, weights)
    others = weights.others(served.whole)
    model.load_weights(others)  # type: ignore[operator]  # every model of vLLM has it
    if next(others, None) is not None:
        raise OutputError(f"{shards.out}: vLLM did not take all tensors; use a tested version")
    refuse_nan(model, shards.out)
    for layer in layers.values():
        leave_out_the_repack(layer)
    logger.info(
        "%s, rank %d: %s",
        shards.out,
        served.rank,
        ", ".join(f"{size / 1e9:.2f} GB of {whose}" for whose, size in weights.bytes.items()),
    )


def version() -> str:
    """vLLM's own."""
    from vllm.version import __version__

    return str(__version__)


def flags(tp: int, ep: int) -> str:
    """How vLLM is started for a split: its experts are split over all ranks or over none."""
    return f"--tensor-parallel-size {tp}" + " --enable-expert-parallel" * (ep > 1)


def where(layers: Mapping[str, Any]) -> Served:
    """Where this process of vLLM stands, as its layers say. Raises UsageError where there are no such layers
    or experts may move while it serves.
    """
    from vllm.distributed import get_pp_group

    if not layers:
        raise UsageError(
            "vLLM's model has no routed experts in 4 bit; a draft model needs a load format of its own"
        )
    parallel = next(iter(layers.values())).moe_config.moe_parallel_config
    if parallel.enable_eplb:
        raise UsageError("shards hold each expert once, at its own place: serve without --enable-eplb")
    return Served(
        tp=parallel.tp_size * parallel.ep_size,
        ep=parallel.ep_size,
        rank=parallel.ep_rank * parallel.tp_size + parallel.tp_rank,
        pp=get_pp_group().world_size,
        whole=parallel.dp_size * parallel.pcp_size > 1 or parallel.is_sequence_parallel,
    )


def refuse_layer(name: str, layer: Any, weights: ShardWeights) -> None:
    """Raise UsageError where a layer does not run the Marlin kernel on these experts."""
    method, layout = layer.quant_method, weights.manifest.layout
    backend = getattr(getattr(method, "wna16_backend", None), "name", None)
    if type(method).__name__ != METHOD or backend not in BACKENDS:
        raise UsageError(
            f"{name} is served by {type(method).__name__} with {backend}, the shards are for Marlin; start"
            f" vLLM with {MARLIN}"
        )
    expected = (layout.num_bits, layout.group_size, layout.symmetric)
    if (found := (method.num_bits, method.group_size, method.symmetric)) != expected:
        raise UsageError(
            f"{name}: vLLM expects bits, group size and symmetry {found}, the shards have {expected}; serve"
            " the model they were made from"
        )
    if method.input_dtype is not None and method.input_dtype.itemsize == 1:
        raise UsageError(f"{name} takes {method.input_dtype} inputs; unset VLLM_MARLIN_INPUT_DTYPE")
    refuse_experts(name, weights.manifest, weights.shards.rank or 0, logical_experts(layer))


def logical_experts(layer: Any) -> list[int]:
    """The experts of a layer on this rank, by their numbers in the model, in the order of their places."""
    if layer.expert_map is None:
        return list(range(layer.local_num_experts))
    places = {int(place): expert for expert, place in enumerate(layer.expert_map.tolist()) if place >= 0}
    return [places[place] for place in sorted(places)]


def leave_out_the_repack(layer: Any) -> None:
    """Once, in the place of the method's post-processing: only what it does beside the four tensors."""
    method = layer.quant_method

    def ready(layer: Any) -> None:
        del method.process_weights_after_loading
        layer.w13_weight, layer.w2_weight = layer.w13_weight_packed, layer.w2_weight_packed
        method._setup_kernel(layer)

    method.process_weights_after_loading = ready
