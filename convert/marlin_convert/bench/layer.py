"""One converted layer of one rank as torch tensors on a device: what an engine loads, and no more."""

from __future__ import annotations

import os
from dataclasses import dataclass

from torch import Tensor

from marlin_convert.engines.torch_loader import load_shards
from marlin_convert.errors import UsageError
from marlin_convert.kernels.fused_moe import Matrix, contiguous_expert_map
from marlin_convert.shards.reader import open_shards
from marlin_convert.slicing import Topology


@dataclass(frozen=True)
class LoadedLayer:
    """The routed experts `start` to `stop` - 1 of `experts`. `expert_map` is None where the rank has them
    all.
    """

    w13: Matrix
    w2: Matrix
    layer: int
    rank: int
    tp: int
    ep: int
    experts: int
    start: int
    stop: int
    top_k: int
    group_size: int
    expert_map: Tensor | None

    @property
    def expert_bytes(self) -> int:
        """Words and scales of one expert."""
        return sum(t[0].numel() * t.element_size() for m in (self.w13, self.w2) for t in (m.words, m.scales))


def load_layer(out: str | os.PathLike[str], layer: int, rank: int, device: str) -> LoadedLayer:
    """Read a layer of a rank. Raises UsageError for one that is not there or has no routed experts,
    OutputError for damaged files.
    """
    shards = open_shards(out, rank)
    names = [name for name in shards.names(f"layer-{layer:03d}") if name.endswith(".w13_weight_packed")]
    if not names:
        present = ", ".join(str(number) for number in shards.manifest.layers)
        raise UsageError(f"{out} has no routed experts of layer {layer}; its layers are {present}")
    prefix = names[0].removesuffix("w13_weight_packed")

    tensors = load_shards(shards, device=device, units=[f"layer-{layer:03d}"]).tensors

    def matrix(name: str) -> Matrix:
        return Matrix(tensors[f"{prefix}{name}_weight_packed"], tensors[f"{prefix}{name}_weight_scale"])

    w13, w2, manifest = matrix("w13"), matrix("w2"), shards.manifest
    local = w13.words.shape[0]
    experts = local * manifest.ep
    owned = Topology(manifest.tp, manifest.ep).expert_range(rank, experts)
    return LoadedLayer(
        w13=w13,
        w2=w2,
        layer=layer,
        rank=rank,
        tp=manifest.tp,
        ep=manifest.ep,
        experts=experts,
        start=owned.start,
        stop=owned.stop,
        top_k=min(int(manifest.model["num_experts_per_tok"]), experts),
        group_size=manifest.group_size,
        expert_map=None
        if local == experts
        else contiguous_expert_map(experts, owned.start, owned.stop, device),
    )
