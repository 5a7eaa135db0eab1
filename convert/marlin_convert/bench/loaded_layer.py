"""One converted layer of one rank as torch tensors on a device: what an engine loads, and no more."""

from __future__ import annotations

import os
from dataclasses import dataclass

from marlin_convert.documents.manifest import Manifest
from marlin_convert.engines.torch_loader import load_shards
from marlin_convert.errors import UsageError
from marlin_convert.kernels.fused_moe import Experts, contiguous_expert_map
from marlin_convert.kernels.gemm_call import Matrix
from marlin_convert.kernels.quant_types import need_kernel_type
from marlin_convert.models.family import experts_per_token
from marlin_convert.shards.reader import open_shards


@dataclass(frozen=True)
class LoadedLayer:
    """A rank's routed experts of a layer, and which ones of the model's they are."""

    experts: Experts
    owned: range
    layer: int
    rank: int
    manifest: Manifest

    @property
    def num_experts(self) -> int:
        """The model's, on all ranks."""
        return len(self.owned) * self.manifest.ep

    @property
    def top_k(self) -> int:
        """Experts of a token."""
        return experts_per_token(self.manifest.model, self.num_experts)

    @property
    def expert_bytes(self) -> int:
        """Words and scales of one expert."""
        matrices = (self.experts.w13, self.experts.w2)
        return sum(t[0].numel() * t.element_size() for m in matrices for t in (m.qweight, m.scales))


def load_layer(out: str | os.PathLike[str], layer: int, rank: int, device: str) -> LoadedLayer:
    """Read a layer of a rank. Raises UsageError for one that is not there, has no routed experts or is in a
    layout that the kernel does not read, OutputError for damaged files.
    """
    shards = open_shards(out, rank)
    manifest = shards.manifest
    kind = need_kernel_type(manifest.layout_id)
    if manifest.parallel.slots is not None:
        raise UsageError(f"{out} has its experts placed by a map, which is not for a bench; give another one")
    names = [name for name in shards.names(f"layer-{layer:03d}") if name.endswith(".w13_weight_packed")]
    if not names:
        present = ", ".join(str(number) for number in manifest.layers)
        raise UsageError(f"{out} has no routed experts of layer {layer}; its layers are {present}")
    prefix = names[0].removesuffix("w13_weight_packed")
    tensors = load_shards(shards, device=device, units=[f"layer-{layer:03d}"]).tensors
    w13, w2 = (
        Matrix(tensors[f"{prefix}{name}_weight_packed"], tensors[f"{prefix}{name}_weight_scale"], kind)
        for name in ("w13", "w2")
    )
    count = w13.num_experts * manifest.ep
    owned = manifest.topology.expert_range(rank, count)
    expert_map = None
    if len(owned) < count:
        expert_map = contiguous_expert_map(count, owned.start, owned.stop, device)
    return LoadedLayer(Experts(w13, w2, expert_map), owned, layer, rank, manifest)
