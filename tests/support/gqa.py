"""A second family of models, here alone: grouped-query attention in the way of Qwen3-MoE, with fewer heads
of keys and values than a conversion may have ranks. It proves that a family is one module. And a small
checkpoint of it, whose every value is known.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from checkpoints import SMALL, Checkpoint, Tensor, expected_tensor
from checkpoints.writer import write_checkpoint
from marlin_convert.models import family
from marlin_convert.models.config_values import number
from marlin_convert.models.family import Facts, Family, ModelConfig, Rule, register
from marlin_convert.models.quantization import read_quantization

HEAD = 32

# The family: what a module of models/ would hold.

_QKV = "self_attn.qkv_proj.weight"
_GATE_UP = "mlp.gate_up_proj.weight"
_KV = ("kv_heads", "hidden")
_RULES = (
    Rule("input_layernorm.weight", "layer", "replicate", ("hidden",)),
    Rule("self_attn.q_proj.weight", "layer", "column", ("q_heads", "hidden"), unit="head", fuse=_QKV),
    Rule("self_attn.k_proj.weight", "layer", "column", _KV, unit="head", fuse=_QKV, shared=True),
    Rule("self_attn.v_proj.weight", "layer", "column", _KV, unit="head", fuse=_QKV, shared=True),
    Rule("self_attn.q_norm.weight", "layer", "replicate", ("head",)),
    Rule("self_attn.k_norm.weight", "layer", "replicate", ("head",)),
    Rule("self_attn.o_proj.weight", "layer", "row", ("hidden", "q_heads"), unit="head"),
    Rule("post_attention_layernorm.weight", "layer", "replicate", ("hidden",)),
    Rule("mlp.gate_proj.weight", "dense", "column", ("dense_intermediate", "hidden"), fuse=_GATE_UP),
    Rule("mlp.up_proj.weight", "dense", "column", ("dense_intermediate", "hidden"), fuse=_GATE_UP),
    Rule("mlp.down_proj.weight", "dense", "row", ("hidden", "dense_intermediate")),
    Rule("mlp.gate.weight", "moe", "replicate", ("experts", "hidden")),
    Rule("mlp.experts", "moe", "experts"),
    Rule("model.embed_tokens.weight", "top", "vocab", ("vocab", "hidden")),
    Rule("model.norm.weight", "top", "replicate", ("hidden",)),
    Rule("lm_head.weight", "top", "vocab", ("vocab", "hidden")),
)


def _read(config: dict[str, Any]) -> ModelConfig:
    layers, head = number(config, "num_hidden_layers"), number(config, "head_dim")
    return ModelConfig(
        family=FAMILY,
        text=config,
        quantization=read_quantization(config),
        layers=layers,
        moe_layers=frozenset(range(layers)) - frozenset(config["mlp_only_layers"]),
        dims={
            "hidden": number(config, "hidden_size"),
            "vocab": number(config, "vocab_size"),
            "experts": number(config, "num_experts"),
            "dense_intermediate": number(config, "intermediate_size"),
            "moe_intermediate": number(config, "moe_intermediate_size"),
            "head": head,
            "q_heads": head * number(config, "num_attention_heads"),
            "kv_heads": head * number(config, "num_key_value_heads"),
        },
        rules=_RULES,
    )


def _softmax_scale(text: Mapping[str, Any]) -> dict[str, float]:
    return {"softmax_scale": 1.0 / math.sqrt(text["head_dim"])}


# The same a second time, for the checks.


def _softmax_scale_again(text: Mapping[str, Any]) -> dict[str, float]:
    return {"softmax_scale": 1.0 / math.sqrt(text["head_dim"])}


FAMILY = Family(
    title="Grouped",
    architectures=("Qwen3MoeForCausalLM",),
    prefixes=("",),
    read=_read,
    constants=_softmax_scale,
    facts=Facts(
        experts="mlp.experts",
        columns=("q_proj.weight", "k_proj.weight", "v_proj.weight", "gate_proj.weight", "up_proj.weight"),
        rows=("o_proj.weight", "down_proj.weight"),
        vocab=("embed_tokens.weight", "lm_head.weight"),
        shared={"k_proj.weight": "num_key_value_heads", "v_proj.weight": "num_key_value_heads"},
        views=(
            (("q_proj.weight", "k_proj.weight", "v_proj.weight"), "qkv_proj.weight"),
            (("gate_proj.weight", "up_proj.weight"), "gate_up_proj.weight"),
        ),
        constants=_softmax_scale_again,
    ),
)


@contextmanager
def registered() -> Iterator[None]:
    """The family is known inside, and forgotten behind it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(family, "_FAMILIES", dict(family._FAMILIES))
        register(FAMILY)
        yield


# Its checkpoint, which knows nothing of the above.


def make_config(heads: int = 8, kv_heads: int = 2, experts: int = 4) -> dict[str, Any]:
    """config.json: layer 0 is dense, layer 1 has experts."""
    weights = {"num_bits": 4, "group_size": 32, "type": "int", "strategy": "group", "symmetric": True}
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 256,
        "intermediate_size": 512,
        "moe_intermediate_size": 512,
        "num_hidden_layers": 2,
        "mlp_only_layers": [0],
        "num_experts": experts,
        "num_experts_per_tok": 2,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": HEAD,
        "vocab_size": 512,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "rope_scaling": None,
        "tie_word_embeddings": False,
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"group_0": {"weights": weights}},
            "ignore": ["lm_head"],
        },
    }


def make_gqa(folder: Path, heads: int = 8, kv_heads: int = 2, experts: int = 4) -> Checkpoint:
    """Write it: a file for each layer and one for the top."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(make_config(heads, kv_heads, experts)))
    dims = replace(SMALL, layers=2, heads=heads, experts=experts)
    files = [list(_layer(layer, heads, kv_heads, experts)) for layer in (0, 1)]
    files.append(
        [
            Tensor("model.embed_tokens.weight", "BF16", (512, 256)),
            Tensor("model.norm.weight", "BF16", (256,)),
            Tensor("lm_head.weight", "BF16", (512, 256)),
        ]
    )

    def content(tensor: Tensor) -> Iterator[memoryview]:
        yield expected_tensor(tensor, dims).data.cast("B")

    return Checkpoint(folder, dims, "k2-thinking", write_checkpoint(folder, files, content, "reference"))


def _layer(layer: int, heads: int, kv_heads: int, experts: int) -> Iterator[Tensor]:
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm": (256,),
        "self_attn.q_proj": (heads * HEAD, 256),
        "self_attn.k_proj": (kv_heads * HEAD, 256),
        "self_attn.v_proj": (kv_heads * HEAD, 256),
        "self_attn.q_norm": (HEAD,),
        "self_attn.k_norm": (HEAD,),
        "self_attn.o_proj": (256, heads * HEAD),
        "post_attention_layernorm": (256,),
    }
    if layer == 0:
        shapes |= {"mlp.gate_proj": (512, 256), "mlp.up_proj": (512, 256), "mlp.down_proj": (256, 512)}
    else:
        shapes["mlp.gate"] = (experts, 256)
    for name, shape in shapes.items():
        yield Tensor(f"model.layers.{layer}.{name}.weight", "BF16", shape, layer)
    for expert in range(experts if layer else 0):
        for projection, (rows, columns) in {"gate": (512, 256), "up": (512, 256), "down": (256, 512)}.items():
            stem = f"model.layers.{layer}.mlp.experts.{expert}.{projection}_proj."
            of = (layer, expert, projection)
            yield Tensor(f"{stem}weight_packed", "I32", (rows, columns // 8), *of)
            yield Tensor(f"{stem}weight_scale", "BF16", (rows, columns // 32), *of)
            yield Tensor(f"{stem}weight_shape", "I32", (2,), *of)
