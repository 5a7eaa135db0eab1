"""Kimi-K2: K2.6, K2.5, K2.7-Code (nested config, text model under `language_model.`, vision) and K2-Thinking
(flat, text alone). Attention with compressed keys and values (MLA), routed and shared experts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from marlin_convert.errors import SourceError
from marlin_convert.models.config_values import (
    MAX_EXPERTS,
    MAX_LAYERS,
    MAX_RATIO,
    MAX_SIZE,
    number,
    shown,
)
from marlin_convert.models.family import Facts, Family, ModelConfig, Rule, SizeNames
from marlin_convert.models.quantization import read_quantization

_QKV_A = "self_attn.fused_qkv_a_proj_with_mqa.weight"
_GATE_UP = "mlp.gate_up_proj.weight"
_SHARED_GATE_UP = "mlp.shared_experts.gate_up_proj.weight"

#: the text model, in load order
_TEXT = (
    Rule("input_layernorm.weight", "layer", "replicate", ("hidden",)),
    Rule("self_attn.q_a_proj.weight", "layer", "replicate", ("q_lora", "hidden"), fuse=_QKV_A),
    Rule("self_attn.kv_a_proj_with_mqa.weight", "layer", "replicate", ("kv_a", "hidden"), fuse=_QKV_A),
    Rule("self_attn.q_a_layernorm.weight", "layer", "replicate", ("q_lora",)),
    Rule("self_attn.q_b_proj.weight", "layer", "column", ("q_heads", "q_lora"), unit="q_head"),
    Rule("self_attn.kv_a_layernorm.weight", "layer", "replicate", ("kv_lora",)),
    Rule("self_attn.kv_b_proj.weight", "layer", "column", ("kv_heads", "kv_lora"), unit="kv_head"),
    # K2-Thinking has it: a table computed from config.json, whose length is not told there
    Rule("self_attn.rotary_emb.inv_freq", "layer", "replicate", dtype=("F32", "F64", "BF16"), optional=True),
    Rule("self_attn.o_proj.weight", "layer", "row", ("hidden", "v_heads"), unit="v_head"),
    Rule("post_attention_layernorm.weight", "layer", "replicate", ("hidden",)),
    Rule("mlp.gate_proj.weight", "dense", "column", ("dense_intermediate", "hidden"), fuse=_GATE_UP),
    Rule("mlp.up_proj.weight", "dense", "column", ("dense_intermediate", "hidden"), fuse=_GATE_UP),
    Rule("mlp.down_proj.weight", "dense", "row", ("hidden", "dense_intermediate")),
    Rule("mlp.gate.weight", "moe", "replicate", ("experts", "hidden")),
    Rule("mlp.gate.e_score_correction_bias", "moe", "replicate", ("experts",), dtype=("F32", "BF16")),
    Rule(
        "mlp.shared_experts.gate_proj.weight",
        "moe",
        "column",
        ("shared_intermediate", "hidden"),
        fuse=_SHARED_GATE_UP,
    ),
    Rule(
        "mlp.shared_experts.up_proj.weight",
        "moe",
        "column",
        ("shared_intermediate", "hidden"),
        fuse=_SHARED_GATE_UP,
    ),
    Rule("mlp.shared_experts.down_proj.weight", "moe", "row", ("hidden", "shared_intermediate")),
    Rule("mlp.experts", "moe", "experts"),
    Rule("model.embed_tokens.weight", "top", "vocab", ("vocab", "hidden")),
    Rule("model.norm.weight", "top", "replicate", ("hidden",)),
    Rule("lm_head.weight", "top", "vocab", ("vocab", "hidden")),
)

_BLOCK: dict[str, SizeNames] = {
    "norm0": ("vt_hidden",),
    "wqkv": ("vt_qkv", "vt_hidden"),
    "wo": ("vt_hidden", "vt_hidden"),
    "norm1": ("vt_hidden",),
    "mlp.fc0": ("vt_intermediate", "vt_hidden"),
    "mlp.fc1": ("vt_hidden", "vt_intermediate"),
}
_PROJECTOR: dict[str, SizeNames] = {
    "pre_norm": ("vt_hidden",),
    "proj.0": ("vt_merged", "vt_merged"),
    "proj.2": ("text_hidden", "vt_merged"),
}


def _vision(blocks: int) -> Iterator[Rule]:
    """The tensors of vision tower and projector: all once, in common/."""
    patch: SizeNames = ("vt_hidden", "vt_channels", "vt_patch", "vt_patch")
    yield from _biased("vision_tower.patch_embed.proj", patch)
    positions: SizeNames = ("vt_pos_height", "vt_pos_width", "vt_hidden")
    yield Rule("vision_tower.patch_embed.pos_emb.weight", "common", "common", positions)
    for block in range(blocks):
        for module, shape in _BLOCK.items():
            yield from _biased(f"vision_tower.encoder.blocks.{block}.{module}", shape)
    yield from _biased("vision_tower.encoder.final_layernorm", ("vt_hidden",))
    for module, shape in _PROJECTOR.items():
        yield from _biased(f"mm_projector.{module}", shape)


def _biased(module: str, shape: SizeNames) -> Iterator[Rule]:
    """Weight and bias of a module: one bias for each row."""
    yield Rule(f"{module}.weight", "common", "common", shape)
    yield Rule(f"{module}.bias", "common", "common", shape[:1])


def _read(config: dict[str, Any]) -> ModelConfig:
    nested = isinstance(config.get("text_config"), dict)
    text: dict[str, Any] = config["text_config"] if nested else config
    vision: dict[str, Any] = config.get("vision_config") or {} if nested else {}
    if not isinstance(vision, dict):
        raise SourceError("config.json: vision_config is not an object")
    quantization = read_quantization(config)
    if number(text, "num_nextn_predict_layers", 0):
        raise SourceError(
            "config.json: num_nextn_predict_layers is not 0; checkpoints with MTP layers are not supported"
        )
    rope = text.get("rope_scaling")
    if rope is not None and not isinstance(rope, dict):
        raise SourceError(f"config.json: rope_scaling should be an object or null, found {shown(rope)}")
    scaling = {key: (rope or {}).get(key, 1) for key in ("factor", "mscale_all_dim")}
    if any(type(value) not in (int, float) for value in scaling.values()):
        raise SourceError("config.json: factor and mscale_all_dim of rope_scaling should be numbers")
    for key, value in scaling.items():
        if not 0 <= value <= MAX_RATIO:
            raise SourceError(
                f"config.json: {key} of rope_scaling is {shown(value)}, expected 0 to {MAX_RATIO:.0f}"
            )
    if text.get("tie_word_embeddings"):
        raise SourceError(
            "config.json: tie_word_embeddings is true; the Kimi-K2 family has an lm_head of its own"
        )
    layers, first = number(text, "num_hidden_layers", most=MAX_LAYERS), number(text, "first_k_dense_replace")
    every = max(number(text, "moe_layer_freq", 1), 1)
    dims = _text_dims(text) | (_vision_dims(vision) if vision else {})
    return ModelConfig(
        family=FAMILY,
        text=text,
        quantization=quantization,
        layers=layers,
        moe_layers=frozenset(layer for layer in range(first, layers) if layer % every == 0),
        dims=dims,
        rules=(*_TEXT, *(_vision(dims["vt_blocks"]) if vision else ())),
    )


def _text_dims(text: dict[str, Any]) -> dict[str, int]:
    heads, nope, rope, v = (
        number(text, key, least=1)
        for key in ("num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    )
    kv_lora, moe = number(text, "kv_lora_rank"), number(text, "moe_intermediate_size")
    return {
        "hidden": number(text, "hidden_size"),
        "vocab": number(text, "vocab_size"),
        "experts": number(text, "n_routed_experts", most=MAX_EXPERTS),
        "dense_intermediate": number(text, "intermediate_size"),
        "moe_intermediate": moe,
        "shared_intermediate": moe * number(text, "n_shared_experts"),
        "q_lora": number(text, "q_lora_rank"),
        "kv_lora": kv_lora,
        "kv_a": kv_lora + rope,
        "q_head": nope + rope,
        "kv_head": nope + v,
        "v_head": v,
        "q_heads": heads * (nope + rope),
        "kv_heads": heads * (nope + v),
        "v_heads": heads * v,
    }


def _vision_dims(vision: dict[str, Any]) -> dict[str, int]:
    size = partial(number, vision, within="vision_config")
    hidden, patch = size("vt_hidden_size"), size("patch_size")
    kernel = vision.get("merge_kernel_size", [2, 2])
    if (
        not isinstance(kernel, list)
        or len(kernel) != 2
        or any(type(n) is not int or not 0 <= n <= MAX_SIZE for n in kernel)
    ):
        raise SourceError(
            f"config.json: vision_config.merge_kernel_size should be two whole numbers, found {shown(kernel)}"
        )
    return {
        "vt_blocks": size("vt_num_hidden_layers", most=MAX_LAYERS),
        "vt_hidden": hidden,
        "vt_qkv": 3 * hidden,
        "vt_intermediate": size("vt_intermediate_size"),
        "vt_channels": 3,
        "vt_patch": patch,
        "vt_pos_height": size("init_pos_emb_height"),
        "vt_pos_width": size("init_pos_emb_width"),
        "vt_merged": hidden * kernel[0] * kernel[1],
        "text_hidden": size("text_hidden_size"),
    }


def _constants(text: Mapping[str, Any]) -> dict[str, float]:
    """The attention's softmax scale: 1/sqrt(nope + rope), times the square of YaRN's magnitude where
    mscale_all_dim is given.
    """
    scale = 1.0 / math.sqrt(text["qk_nope_head_dim"] + text["qk_rope_head_dim"])
    rope = text.get("rope_scaling") or {}
    factor, all_dim = rope.get("factor", 1), rope.get("mscale_all_dim", 0)
    if all_dim and factor > 1:
        scale *= (0.1 * all_dim * math.log(factor) + 1.0) ** 2
    return {"softmax_scale": scale}


#: the text model of K2.6 but for its layers, experts and vocabulary, for benches
PUBLISHED = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "num_attention_heads": 64,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "num_nextn_predict_layers": 0,
}


# From here on, for the checks alone: the same said a second time, from the published model and the page on
# the format. It uses nothing of what is above and must stay so: only then does a mistake in a rule show.


def _constants_again(text: Mapping[str, Any]) -> dict[str, float]:
    scale = 1.0 / math.sqrt(text["qk_nope_head_dim"] + text["qk_rope_head_dim"])
    yarn = text.get("rope_scaling") or {}
    if yarn.get("mscale_all_dim") and yarn.get("factor", 1) > 1:
        scale *= (0.1 * yarn["mscale_all_dim"] * math.log(yarn["factor"]) + 1.0) ** 2
    return {"softmax_scale": scale}


_FACTS = Facts(
    experts="mlp.experts",
    columns=("self_attn.q_b_proj.weight", "self_attn.kv_b_proj.weight", "gate_proj.weight", "up_proj.weight"),
    rows=("self_attn.o_proj.weight", "down_proj.weight"),
    vocab=("embed_tokens.weight", "lm_head.weight"),
    by_all=(".shared_experts.",),
    embeddings=("embed_tokens.weight",),
    common=("vision_tower.", "mm_projector."),
    views=(
        (
            ("self_attn.q_a_proj.weight", "self_attn.kv_a_proj_with_mqa.weight"),
            "self_attn.fused_qkv_a_proj_with_mqa.weight",
        ),
        (("gate_proj.weight", "up_proj.weight"), "gate_up_proj.weight"),
    ),
    constants=_constants_again,
)

FAMILY = Family(
    title="Kimi-K2",
    architectures=("KimiK25ForConditionalGeneration", "DeepseekV3ForCausalLM"),
    prefixes=("language_model.", ""),
    read=_read,
    constants=_constants,
    facts=_FACTS,
    embeddings=("model.embed_tokens.weight",),
)
