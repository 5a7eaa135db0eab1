"""Loads one converted layer of one rank and runs its routed experts: the whole of what an engine has to do.

python examples/run_moe_layer.py OUT --layer 1 --rank 0          on a GPU, with the real kernel
python examples/run_moe_layer.py OUT --layer 1 --device cpu      slowly, with a model of the kernel

The result is this rank's share: the ranks' results add up to the layer's. It is compared with a float32
computation from the original codes and scales, restored from the shard.
"""

from __future__ import annotations

import sys

import click
import numpy as np

try:
    import torch
    from torch import Tensor
    from torch.nn.functional import silu
except ModuleNotFoundError:
    print("error: this needs torch: pip install '.[torch]', or '.[sglang]' with the kernel", file=sys.stderr)
    raise SystemExit(2) from None

from marlin_convert import ConvertError, UsageError, load_rank, open_shards
from marlin_convert.kernels.fused_moe import Experts, Routing, contiguous_expert_map, fused_moe, route
from marlin_convert.kernels.gemm_call import Matrix
from marlin_convert.kernels.providers import KernelUnavailableError, Provider, load
from marlin_convert.layout.marlin import unpack_scale, unpack_weight

#: five roundings to bf16 lie between input and result
TOLERANCE = 5 * 2.0**-9


def original(qweight: Tensor, scales: Tensor) -> Tensor:
    """One expert's matrix [outputs, inputs] in float32: the inverse layout, then (code - 8) * scale."""
    size_k = 16 * qweight.shape[0]
    group = size_k // scales.shape[0]
    data = unpack_weight(qweight.cpu().numpy()).view(np.uint8)
    codes = torch.from_numpy(np.stack((data & 15, data >> 4), -1).reshape(data.shape[0], size_k))
    bits = unpack_scale(scales.cpu().view(torch.int16).numpy().view(np.uint16), group, size_k)
    restored = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)
    return (codes.float() - 8) * restored.float().repeat_interleave(group, dim=1)


def in_float32(x: Tensor, experts: Experts, owned: range, routing: Routing) -> Tensor:
    """What the experts `owned` add to the layer's output, from the restored originals."""
    total = torch.zeros(x.shape)
    x, weights, ids = x.float().cpu(), routing.weights.cpu(), routing.ids.cpu()
    for i, expert in enumerate(owned):
        rows, choices = (ids == expert).nonzero(as_tuple=True)
        if rows.numel():
            w13, w2 = (original(m.qweight[i], m.scales[i]) for m in (experts.w13, experts.w2))
            gate, up = (x[rows] @ w13.t()).chunk(2, dim=1)
            total.index_add_(0, rows, silu(gate) * up @ w2.t() * weights[rows, choices].unsqueeze(1))
    return total


def kernel(device: str) -> Provider:
    """The kernel for a device. Raises UsageError, which says what to install, where there is none."""
    if device != "cpu" and not torch.cuda.is_available():
        raise UsageError(
            f"torch {torch.__version__} sees no CUDA GPU; --device cpu runs a slow model of the kernel"
        )
    try:
        return load("reference" if device == "cpu" else None)
    except KernelUnavailableError as error:
        raise UsageError(
            "no package with the kernel loads here: pip install '.[sglang]' for CUDA 13, or '.[sgl-kernel]'"
            " for CUDA 12 (`marlin-convert doctor` says more); --device cpu runs a slow model of it"
        ) from error


@click.command()
@click.argument("out", type=click.Path(exists=True, file_okay=False))
@click.option("--layer", type=int, default=1, show_default=True)
@click.option("--rank", type=int, default=0, show_default=True)
@click.option("--tokens", type=click.IntRange(1), default=9, show_default=True)
@click.option("--device", default="cuda", show_default=True)
def main(out: str, layer: int, rank: int, tokens: int, device: str) -> None:
    """Run the routed experts of a converted layer on random tokens."""
    shards, unit = open_shards(out, rank), f"layer-{layer:03d}"
    w13_name = next((n for n in shards.names(unit) if n.endswith(".mlp.experts.w13_weight_packed")), None)
    if w13_name is None:
        raise click.UsageError(f"layer {layer} has no routed experts here")
    mlp = w13_name.removesuffix("experts.w13_weight_packed")
    provider = kernel(device)
    tensors = load_rank(out, rank, device=device, units=[unit]).tensors
    for name in (f"{mlp}experts.{w}_weight_{kind}" for w in ("w13", "w2") for kind in ("packed", "scale")):
        click.echo(f"{name}  {shards.dtype(name)} {list(tensors[name].shape)}")

    # With expert parallelism a rank owns some of the experts: others' choices are left out.
    w13, w2 = (
        Matrix(tensors[f"{mlp}experts.{w}_weight_packed"], tensors[f"{mlp}experts.{w}_weight_scale"])
        for w in ("w13", "w2")
    )
    model, manifest, local = shards.manifest.model, shards.manifest, w13.num_experts
    start = rank // (manifest.tp // manifest.ep) * local
    num_experts = local * manifest.ep
    whole = manifest.ep == 1
    expert_map = None if whole else contiguous_expert_map(num_experts, start, start + local, device)
    experts = Experts(w13, w2, expert_map)

    # The router is on every rank: sigmoid scores, a bias that takes part in the choice only, the weights
    # scaled.
    x = torch.randn((tokens, w13.size_k), generator=torch.Generator().manual_seed(0))
    x = x.to(device, torch.bfloat16)
    routing = route(
        x.float() @ tensors[mlp + "gate.weight"].float().t(),
        tensors[mlp + "gate.e_score_correction_bias"],
        model["num_experts_per_tok"],
        model["routed_scaling_factor"],
        model["norm_topk_prob"],
    )
    result = fused_moe(provider, x, experts, routing).float().cpu()
    click.echo(
        f"{provider.name}: {tokens} tokens -> {list(result.shape)}, norm {result.norm():.6g}, sum"
        f" {result.double().sum():.6g}"
    )
    expected = in_float32(x, experts, range(start, start + local), routing)
    error = float((result - expected).norm() / expected.norm().clamp_min(1e-30))
    click.echo(
        f"float32 from the restored originals: norm {expected.norm():.6g}; relative error {error:.2e} (at"
        f" most {TOLERANCE:.2e})"
    )
    sys.exit(0 if error <= TOLERANCE else 1)


if __name__ == "__main__":
    try:
        main()
    except ConvertError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None
