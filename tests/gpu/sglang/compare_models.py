"""SGLang's default loader on the source against ours on OUT alone: compare_models.py SRC OUT RESULT [OUT...].

Every parameter, buffer and other tensor, every plain attribute, and the logits of prefill and decode.
Further OUTs, split over ranks, are compared rank for rank: this one process plays each rank in turn, so
nothing is run there.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import starting
from marlin_convert.documents.manifest import read_manifest

#: two prompts of one length
PROMPTS = [[(11 * i + 5) % 1000 for i in range(40)], [(13 * i + 1) % 1000 for i in range(40)]]
STEPS = 4
#: what torch keeps on a module
TORCHS_OWN = ("_forward", "_backward", "_parameters", "_buffers", "_modules", "_state", "_load")


def tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters, buffers and every other tensor that hangs on a module."""
    found: dict[str, Tensor] = {
        f"parameter {n}": p for n, p in model.named_parameters(remove_duplicate=False)
    }
    found |= {f"buffer {n}": b for n, b in model.named_buffers(remove_duplicate=False)}
    for name, module in model.named_modules():
        found |= {f"{name}.{key}": value for key, value in vars(module).items() if isinstance(value, Tensor)}
    return found


def attributes(model: nn.Module) -> dict[str, Any]:
    """Plain values of all modules."""
    plain = (bool, int, float, str, tuple, dict, type(None))
    return {
        f"{name}.{key}": repr(value) if isinstance(value, dict) else value
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, plain) and not key.startswith(TORCHS_OWN)
    }


def same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors agree in all there is, bytes too."""
    kinds = [(t.dtype, t.shape, t.stride(), t.device, type(t)) for t in (one, other)]
    if kinds[0] != kinds[1]:
        return False
    raw = [t.detach().contiguous().view(-1).view(torch.uint8) for t in (one, other)]
    return not one.numel() or torch.equal(*raw)


def differences(one: nn.Module, other: nn.Module) -> list[str]:
    """What differs between two models, by name. The order of names counts."""
    left, right = tensors(one), tensors(other)
    found = [] if list(left) == list(right) else [f"names: {sorted(set(left) ^ set(right))[:4]}"]
    found += [name for name in left if name in right and not same(left[name], right[name])]
    plain, others = attributes(one), attributes(other)
    return found + [key for key in plain | others if plain.get(key, "-") != others.get(key, "-")]


def poison() -> None:
    """Fill what the allocator hands out next: a parameter that nobody writes must not be right by chance."""
    gc.collect()
    if torch.cuda.is_available() and torch.version.cuda and not hasattr(torch.cuda, "played"):
        torch.cuda.empty_cache()
        filled = [torch.full((4 << 30,), 0x5A, dtype=torch.uint8, device="cuda")]
        filled += [
            torch.full((size,), 0x5A, dtype=torch.uint8, device="cuda")
            for size in (512, 4096, 65536, 500_000, 1_000_000)
            for _ in range(300)
        ]
        torch.cuda.synchronize()
        del filled


def load(load_format: str, model_config: Any, **extra: Any) -> nn.Module:
    """A model by SGLang's `load_model`, as its ModelRunner calls it."""
    from sglang.srt.configs.device_config import DeviceConfig
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.model_loader import loader

    poison()
    begin = time.monotonic()
    config = LoadConfig(load_format=load_format, tp_rank=0, model_loader_extra_config=extra)
    model: nn.Module = loader.get_model_loader(config, model_config).load_model(
        model_config=model_config, device_config=DeviceConfig("cuda", 0)
    )
    print(f"loaded by {load_format} in {time.monotonic() - begin:.2f} s", flush=True)
    return model


def config_of(path: str) -> Any:
    """SGLang's ModelConfig of a folder."""
    from sglang.srt.configs.model_config import ModelConfig

    return ModelConfig.from_server_args(starting.server_args(path))


@contextmanager
def played(out: str, rank: int) -> Iterator[None]:
    """A context in which SGLang takes this process for a rank of the split of OUT; where its attention is
    split apart, of as many groups of data-parallel attention.
    """
    from sglang.srt.runtime_context import get_flags, get_parallel

    manifest = read_manifest(Path(out))
    tp, moe_tp, attn_tp = manifest.tp, manifest.tp // manifest.ep, manifest.parallel.attn_tp or manifest.tp
    with (
        get_flags().dp.override(enabled=attn_tp != tp),
        get_parallel().override(
            tp_size=tp,
            tp_rank=rank,
            attn_tp_size=attn_tp,
            attn_tp_rank=rank % attn_tp,
            attn_dp_size=tp // attn_tp,
            attn_dp_rank=rank // attn_tp,
            moe_ep_size=manifest.ep,
            moe_ep_rank=rank // moe_tp,
            moe_tp_size=moe_tp,
            moe_tp_rank=rank % moe_tp,
        ),
    ):
        yield


def turn_experts_round(model: nn.Module) -> None:
    """A fault that the comparison of logits has to see, whichever experts the tokens go to."""
    for name, parameter in model.named_parameters():
        if name.endswith("layers.1.mlp.experts.w2_weight_packed"):
            with torch.no_grad():
                parameter.copy_(parameter.flip(0))


def all_equal(one: list[Tensor], other: list[Tensor]) -> bool:
    """Whether two lists of logits are equal, bit for bit."""
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def main(source: str, out: str, result: str, *splits: str) -> None:
    """Everything; the result is JSON."""
    from sglang.srt.plugins import load_plugins

    load_plugins()
    bench = starting.runner(starting.server_args(source))
    of_source, of_out = bench.torch_runner.model_config, config_of(out)
    first = logits = starting.logits(bench, PROMPTS, STEPS)
    found: dict[str, Any] = {
        "repeat of the default equal": all_equal(first, starting.logits(bench, PROMPTS, STEPS)),
        "logits finite": all(bool(torch.isfinite(t).all()) for t in logits),
    }
    default, ours = load("auto", of_source), load("marlin-convert", of_out, verify_on_load=True)
    found["tensors"] = len(tensors(default))
    found["attributes"] = len(attributes(default))
    found["different"] = differences(default, ours)
    bench.torch_runner.model = ours
    found["logits equal"] = all_equal(first, starting.logits(bench, PROMPTS, STEPS))
    turn_experts_round(ours)
    found["exchanged experts seen"] = not all_equal(first, starting.logits(bench, PROMPTS, 0) + first[1:])
    del default, ours
    bench.torch_runner.model = None
    for split in splits:
        config = config_of(split)
        for rank in range(read_manifest(Path(split)).tp):
            with played(split, rank):
                unequal = differences(load("auto", of_source), load("marlin-convert", config))
            found.setdefault("splits", {})[f"{Path(split).name} rank {rank}"] = unequal
    Path(result).write_text(json.dumps(found, indent=1))
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
