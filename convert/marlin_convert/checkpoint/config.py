"""config.json: the sizes of the model and how its experts are quantized, wherever that is written."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from marlin_convert.errors import SourceError
from marlin_convert.layout.protocol import ExpertShape, QuantScheme

ARCHITECTURES = ("KimiK25ForConditionalGeneration", "DeepseekV3ForCausalLM")


@dataclass(frozen=True)
class Quantization:
    """The one weight scheme of the checkpoint; `found_at` is the key path of its config, "" for the top
    level.
    """

    group_size: int
    found_at: str
    ignore: tuple[str, ...]

    @property
    def scheme(self) -> QuantScheme:
        """How the weights are quantized: 4 bit, symmetric, in groups; nothing else is converted."""
        return QuantScheme(self.group_size)

    def ignores(self, module: str) -> bool:
        """Whether the ignore list names a module: `re:` entries are anchored at the start, others are whole
        names.
        """
        return any(
            re.match(entry[3:], module) if entry.startswith("re:") else entry == module
            for entry in self.ignore
        )


@dataclass(frozen=True)
class ModelConfig:
    """Sizes under the names used in the rule table; `text` and `vision` are the raw sections (`vision` may be
    empty).
    """

    text: dict[str, Any]
    vision: dict[str, Any]
    quantization: Quantization
    layers: int
    moe_layers: frozenset[int]
    experts: int
    dims: dict[str, int]

    @property
    def hidden(self) -> int:
        """The hidden size."""
        return self.dims["hidden"]

    @property
    def moe_intermediate(self) -> int:
        """A routed expert's intermediate size."""
        return self.dims["moe_intermediate"]

    def expert_shape(self, moe_tp: int = 1) -> ExpertShape:
        """The routed experts, each cut into `moe_tp` slices."""
        return ExpertShape(self.hidden, self.moe_intermediate, self.quantization.scheme, moe_tp)


def parse_config(config: dict[str, Any]) -> ModelConfig:
    """The checked ModelConfig of a config.json. Raises SourceError for a model or a quantization this project
    does not convert.
    """
    architectures = config.get("architectures") or []
    if not isinstance(architectures, list) or not any(name in ARCHITECTURES for name in architectures):
        raise SourceError(
            f"config.json: architectures {architectures} is none of {', '.join(ARCHITECTURES)}; only the"
            " Kimi-K2 family is converted"
        )
    nested = isinstance(config.get("text_config"), dict)
    text: dict[str, Any] = config["text_config"] if nested else config
    vision: dict[str, Any] = config.get("vision_config") or {} if nested else {}
    if not isinstance(vision, dict):
        raise SourceError("config.json: vision_config is not an object")
    quantization = _quantization(config, nested)
    if _number(text, "num_nextn_predict_layers", 0):
        raise SourceError(
            "config.json: num_nextn_predict_layers is not 0; checkpoints with MTP layers are not supported"
        )
    rope = text.get("rope_scaling")
    if rope is not None and not isinstance(rope, dict):
        raise SourceError(f"config.json: rope_scaling should be an object or null, found {rope!r}")
    if any(type((rope or {}).get(key, 1)) not in (int, float) for key in ("factor", "mscale_all_dim")):
        raise SourceError("config.json: factor and mscale_all_dim of rope_scaling should be numbers")
    if text.get("tie_word_embeddings"):
        raise SourceError(
            "config.json: tie_word_embeddings is true; the Kimi-K2 family has an lm_head of its own"
        )
    layers, first, every = (
        _number(text, "num_hidden_layers"),
        _number(text, "first_k_dense_replace"),
        _number(text, "moe_layer_freq", 1),
    )
    moe = frozenset(layer for layer in range(layers) if layer >= first and layer % max(every, 1) == 0)
    return ModelConfig(
        text,
        vision,
        quantization,
        layers,
        moe,
        _number(text, "n_routed_experts"),
        _text_dims(text) | _vision_dims(vision),
    )


def _text_dims(text: dict[str, Any]) -> dict[str, int]:
    heads, nope, rope, v = (
        _number(text, key)
        for key in ("num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    )
    kv_lora, moe = _number(text, "kv_lora_rank"), _number(text, "moe_intermediate_size")
    return {
        "hidden": _number(text, "hidden_size"),
        "vocab": _number(text, "vocab_size"),
        "experts": _number(text, "n_routed_experts"),
        "dense_intermediate": _number(text, "intermediate_size"),
        "moe_intermediate": moe,
        "shared_intermediate": moe * _number(text, "n_shared_experts"),
        "q_lora": _number(text, "q_lora_rank"),
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
    if not vision:
        return {}
    hidden, patch = _number(vision, "vt_hidden_size"), _number(vision, "patch_size")
    kernel = vision.get("merge_kernel_size", [2, 2])
    if not isinstance(kernel, list) or len(kernel) != 2 or any(type(n) is not int or n < 0 for n in kernel):
        raise SourceError(f"config.json: merge_kernel_size should be two whole numbers, found {kernel!r}")
    merged = hidden * kernel[0] * kernel[1]
    return {
        "vt_blocks": _number(vision, "vt_num_hidden_layers"),
        "vt_hidden": hidden,
        "vt_qkv": 3 * hidden,
        "vt_intermediate": _number(vision, "vt_intermediate_size"),
        "vt_channels": 3,
        "vt_patch": patch,
        "vt_pos_height": _number(vision, "init_pos_emb_height"),
        "vt_pos_width": _number(vision, "init_pos_emb_width"),
        "vt_merged": merged,
        "text_hidden": _number(vision, "text_hidden_size"),
    }


def _number(section: dict[str, Any], key: str, default: int | None = None) -> int:
    value = section.get(key, default)
    if value is None and default is not None:
        value = default
    if type(value) is not int or value < 0:
        raise SourceError(f"config.json: {key} should be a whole number, found {value!r}")
    return value


def _quantization(config: dict[str, Any], nested: bool) -> Quantization:
    places = {"": config} | ({"text_config": config["text_config"]} if nested else {})
    found = {
        at: section["quantization_config"]
        for at, section in places.items()
        if section.get("quantization_config")
    }
    if not found:
        raise SourceError(
            "config.json: no quantization_config, neither at the top level nor in text_config; this is not an"
            " INT4 release"
        )
    at = "text_config" if "text_config" in found else ""
    if len(found) == 2 and found[""] != found["text_config"]:
        raise SourceError(
            "config.json: the quantization_config at the top level and the one in text_config differ"
        )
    quant = found[at]
    if not isinstance(quant, dict) or not isinstance(quant.get("config_groups"), dict):
        method = quant.get("quant_method") if isinstance(quant, dict) else quant
        hint = "; this folder is a conversion already" if method == "marlin-convert" else ""
        if method == "compressed-tensors":
            raise SourceError(
                "config.json: config_groups of quantization_config should be an object, found"
                f" {quant.get('config_groups')!r}"
            )
        raise SourceError(
            f"config.json: quantization_config is of method {method!r}, not compressed-tensors{hint}"
        )
    expected = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    for key, value in expected.items():
        if quant.get(key) != value:
            raise SourceError(
                f"config.json: quantization_config.{key} is {quant.get(key)!r}, only {value!r} is converted"
            )
    if len(quant["config_groups"]) != 1:
        raise SourceError(
            f"config.json: quantization_config has {len(quant['config_groups'])} config groups; exactly one"
            " is understood"
        )
    ((name, group),) = quant["config_groups"].items()
    weights = (group.get("weights") or {}) if isinstance(group, dict) else group
    if not isinstance(weights, dict):
        raise SourceError(f"config.json: config group {name} is not an object with an object of weights")
    for key, values in {
        "num_bits": (4,),
        "type": ("int",),
        "strategy": ("group",),
        "symmetric": (True,),
        "dynamic": (False, None),
        "actorder": (None, False, "static"),
    }.items():
        if weights.get(key) not in values:
            raise SourceError(
                f"config.json: quantization weights.{key} is {weights.get(key)!r}, only {values[0]!r} is"
                " converted"
            )
    return Quantization(_number(weights, "group_size"), at, _ignore(quant.get("ignore") or []))


def _ignore(entries: Any) -> tuple[str, ...]:
    if not isinstance(entries, list) or not all(isinstance(entry, str) for entry in entries):
        raise SourceError("config.json: quantization_config.ignore should be a list of names")
    for entry in entries:
        try:
            re.compile(entry[3:] if entry.startswith("re:") else "")
        except (re.error, RecursionError, OverflowError) as error:
            raise SourceError(
                f"config.json: quantization_config.ignore has the pattern {entry[3:]!r}, which is none"
                f" ({error})"
            ) from error
    return tuple(entries)


def rewritten(
    config: dict[str, Any], quantization: Quantization, replacement: dict[str, Any]
) -> dict[str, Any]:
    """config.json for the output: `replacement` where the quantization_config was, and nowhere else."""
    result = {key: value for key, value in config.items() if key != "quantization_config"}
    if quantization.found_at:
        result["text_config"] = {**config["text_config"], "quantization_config": replacement}
    else:
        result["quantization_config"] = replacement
        if isinstance(result.get("text_config"), dict):
            result["text_config"] = {
                k: v for k, v in config["text_config"].items() if k != "quantization_config"
            }
    return result
