"""Loads one converted layer of one rank and runs its routed experts: the whole of what an engine has to do.

python examples/run_moe_layer.py OUT --layer 1 --rank 0          on a GPU, with the real kernel
python examples/run_moe_layer.py OUT --layer 1 --device cpu      slowly, with a model of the kernel

The result is this rank's share: the ranks' results add up to the layer's. It is compared with a float32
computation from the original codes and scales, restored from the shard.
"""

from __future__ import annotations

import sys
from typing import Any

import click
import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import silu

from marlin_convert import open_shards
from marlin_convert.kernels.fused_moe import contiguous_expert_map, fused_moe, route
from marlin_convert.kernels.providers import load
from marlin_convert.layout.marlin import unpack_scale, unpack_weight

#: five roundings to bf16 lie between input and result
TOLERANCE = 5 * 2.0**-9


def as_tensor(array: np.ndarray[Any, Any], dtype: str, device: str) -> Tensor:
    """A view of a shard as a tensor; numpy has no bf16, so that comes as uint16."""
    if dtype == "BF16":
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16).to(device)
    return torch.from_numpy(array.copy()).to(device)


def original(words: np.ndarray[Any, Any], scale: np.ndarray[Any, Any], group: int) -> Tensor:
    """One expert's matrix [outputs, inputs] in float32: the inverse layout, then (code - 8) * scale."""
    size_k = 16 * words.shape[0]
    data = unpack_weight(words.copy()).view(np.uint8)
    codes = torch.from_numpy(np.stack((data & 15, data >> 4), -1).reshape(data.shape[0], size_k))
    scales = torch.from_numpy(unpack_scale(scale.copy(), group, size_k).view(np.int16)).view(torch.bfloat16)
    return (codes.float() - 8) * scales.float().repeat_interleave(group, dim=1)


@click.command()
@click.argument("out", type=click.Path(exists=True, file_okay=False))
@click.option("--layer", type=int, default=1, show_default=True)
@click.option("--rank", type=int, default=0, show_default=True)
@click.option("--tokens", type=click.IntRange(1), default=9, show_default=True)
@click.option("--device", default="cuda", show_default=True)
def main(out: str, layer: int, rank: int, tokens: int, device: str) -> None:
    """Run the routed experts of a converted layer on random tokens."""
    shards = open_shards(out, rank)
    names = shards.names(f"layer-{layer:03d}")
    mlp = next((name for name in names if name.endswith(".mlp.experts.w13_weight_packed")), "").removesuffix(
        "experts.w13_weight_packed"
    )
    if not mlp:
        raise click.UsageError(f"layer {layer} has no routed experts here")
    stacked = [f"{mlp}experts.{w}_weight_{kind}" for w in ("w13", "w2") for kind in ("packed", "scale")]
    if device != "cpu" and not torch.cuda.is_available():
        raise click.ClickException(
            f"torch {torch.__version__} sees no CUDA GPU; --device cpu runs a slow model of the kernel"
        )
    w13, w13_scale, w2, w2_scale = (as_tensor(shards[name], shards.dtype(name), device) for name in stacked)
    for name in stacked:
        click.echo(f"{name}  {shards.dtype(name)} {list(shards[name].shape)}")

    # The router is on every rank: sigmoid scores, a bias that takes part in the choice only, the weights
    # scaled.
    model, manifest = shards.manifest.model, shards.manifest
    x = torch.randn((tokens, 16 * w13.shape[1]), generator=torch.Generator().manual_seed(0)).to(
        device, torch.bfloat16
    )
    gate, bias = (
        as_tensor(shards[mlp + name], shards.dtype(mlp + name), device)
        for name in ("gate.weight", "gate.e_score_correction_bias")
    )
    weights, ids = route(
        x.float() @ gate.float().t(),
        bias,
        model["num_experts_per_tok"],
        model["routed_scaling_factor"],
        model["norm_topk_prob"],
    )

    # With expert parallelism a rank owns some of the experts: others' choices are left out.
    local, experts = w13.shape[0], model["n_routed_experts"]
    start = rank // (manifest.tp // manifest.ep) * local
    expert_map = None if local == experts else contiguous_expert_map(experts, start, start + local, device)
    provider = load("reference" if device == "cpu" else None)
    result = (
        fused_moe(provider, x, w13, w13_scale, w2, w2_scale, weights, ids, expert_map=expert_map)
        .float()
        .cpu()
    )
    click.echo(
        f"{provider.name}: {tokens} tokens -> {list(result.shape)}, norm {result.norm():.6g}, sum"
        f" {result.double().sum():.6g}"
    )

    expected = torch.zeros_like(result)
    arrays = [shards[name] for name in stacked]
    x, weights, ids = x.float().cpu(), weights.cpu(), ids.cpu()
    for expert in range(start, start + local):
        rows, choices = (ids == expert).nonzero(as_tuple=True)
        if rows.numel():
            first, second = (
                original(arrays[i][expert - start], arrays[i + 1][expert - start], manifest.group_size)
                for i in (0, 2)
            )
            up_and_gate = x[rows] @ first.t()
            inner = silu(up_and_gate[:, : first.shape[0] // 2]) * up_and_gate[:, first.shape[0] // 2 :]
            expected.index_add_(0, rows, inner @ second.t() * weights[rows, choices].unsqueeze(1))
    error = float((result - expected).norm() / expected.norm().clamp_min(1e-30))
    click.echo(
        f"float32 from the restored originals: norm {expected.norm():.6g}; relative error {error:.2e} (at"
        f" most {TOLERANCE:.2e})"
    )
    sys.exit(0 if error <= TOLERANCE else 1)


if __name__ == "__main__":
    main()
