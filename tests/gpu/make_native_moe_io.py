"""Makes the inputs and expected outputs for examples/native_moe from an original checkpoint.

python tests/gpu/make_native_moe_io.py SRC IO.safetensors --tp 8 --ep 1 --rank 3 --layer 1

It imports nothing of the converter: the published words are unpacked here and a rank's slice is cut here, so
that an error of the converter cannot be in both. The arithmetic is float64; only the result is rounded, to
float32.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor


def experts_of(source: Path, layer: int) -> tuple[dict[str, str], str]:
    """Which file has which tensor, and the prefix of a layer's experts."""
    files: dict[str, str] = json.loads((source / "model.safetensors.index.json").read_text())["weight_map"]
    pattern = re.compile(rf"(.*\blayers\.{layer}\.mlp\.experts\.)0\.gate_proj\.weight_packed")
    prefixes = [found[1] for name in files if (found := pattern.fullmatch(name))]
    if len(prefixes) != 1:
        raise SystemExit(f"{source}: layer {layer} has no quantized routed experts")
    return files, prefixes[0]


def dequantize(packed: Tensor, scale: Tensor) -> Tensor:
    """[N, K/8] words and [N, K/g] scales to float64 [N, K]: eight codes a word, lowest bits first, stored as
    value + 8.
    """
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=packed.device)
    codes = (packed.unsqueeze(-1) >> shifts) & 15
    values = (codes.flatten(1) - 8).double()
    return values * scale.double().repeat_interleave(values.shape[1] // scale.shape[1], dim=1)


def main() -> None:
    """See above."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("io", type=Path)
    for name in ("--tp", "--ep", "--rank", "--layer"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument(
        "--tokens", type=lambda text: [int(part) for part in text.split(",")], default=[1, 9, 90, 330]
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()

    config = json.loads((arguments.source / "config.json").read_text())
    config = config.get("text_config", config)
    count, top_k, hidden = (config[key] for key in ("n_routed_experts", "num_experts_per_tok", "hidden_size"))
    parts = arguments.tp // arguments.ep
    width = config["moe_intermediate_size"] // parts
    column = arguments.rank % parts * width
    first = arguments.rank // parts * (count // arguments.ep)
    local = range(first, first + count // arguments.ep)

    generator = torch.Generator().manual_seed(arguments.seed)
    tensors: dict[str, Tensor] = {}
    work: dict[int, tuple[Tensor, Tensor, Tensor, Tensor]] = {}
    for tokens in arguments.tokens:
        x = torch.randn(tokens, hidden, generator=generator).to(torch.bfloat16)
        # Distinct experts for a token; one at least is on this rank, so that there is something to compare.
        score = torch.rand(tokens, count, generator=generator)
        mine = torch.randint(local.start, local.stop, (tokens, 1), generator=generator)
        ids = score.scatter_(1, mine, 2.0).topk(top_k, dim=1).indices
        weights = torch.rand(tokens, top_k, generator=generator) + 0.1
        weights /= weights.sum(dim=1, keepdim=True)
        name = f"tokens_{tokens}"
        tensors |= {f"{name}.x": x, f"{name}.topk_ids": ids.to(torch.int32), f"{name}.topk_weights": weights}
        total = torch.zeros(tokens, hidden, dtype=torch.float64, device=arguments.device)
        work[tokens] = (
            x.to(arguments.device).double(),
            ids.to(arguments.device),
            weights.to(arguments.device).double(),
            total,
        )

    files, prefix = experts_of(arguments.source, arguments.layer)
    handles = {}

    def weights_of(expert: int, projection: str) -> Tensor:
        found = []
        for end in ("weight_packed", "weight_scale"):
            name = f"{prefix}{expert}.{projection}.{end}"
            if files[name] not in handles:
                handles[files[name]] = safe_open(arguments.source / files[name], "pt")
            found.append(handles[files[name]].get_tensor(name).to(arguments.device))
        return dequantize(*found)

    for expert in local:
        if not any((ids == expert).any() for _, ids, _, _ in work.values()):
            continue
        gate, up = (weights_of(expert, name)[column : column + width] for name in ("gate_proj", "up_proj"))
        down = weights_of(expert, "down_proj")[:, column : column + width]
        for x, ids, weights, total in work.values():
            token, choice = (ids == expert).nonzero(as_tuple=True)
            rows = x[token]
            out = (torch.nn.functional.silu(rows @ gate.T) * (rows @ up.T)) @ down.T
            total.index_add_(0, token, out * weights[token, choice, None])

    tensors |= {f"tokens_{tokens}.expected": total.float().cpu() for tokens, (_, _, _, total) in work.items()}
    identity = {key: str(getattr(arguments, key)) for key in ("tp", "ep", "rank", "layer")}
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, arguments.io, metadata=identity
    )


if __name__ == "__main__":
    main()
