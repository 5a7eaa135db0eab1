"""config.json of a checkpoint of any size, and the small files that come with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .names import FULL, Dims, Form

_FULL_CONFIG = Path(__file__).parent.parent / "k26_config.json"

# K2-Thinking was published with this list; later releases added the vision modules and a pattern for lm_head.
_THINKING_IGNORE = [
    "lm_head",
    "re:.*self_attn.*",
    "re:.*shared_experts.*",
    "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
]

_CLASSES = {"k26": "kimi_k25", "k2-thinking": "deepseek"}


def make_config(dims: Dims, form: Form = "k26") -> dict[str, Any]:
    """config.json for `dims`; at full size in the K2.6 form it is the published one."""
    config: dict[str, Any] = json.loads(_FULL_CONFIG.read_text())
    text = config["text_config"]
    text.update(_text_numbers(dims))
    text["quantization_config"]["config_groups"]["group_0"]["weights"]["group_size"] = dims.group
    config["vision_config"].update(_vision_numbers(dims))
    if dims.vocab != FULL.vocab:
        config.update(
            bos_token_id=dims.vocab - 4,
            eos_token_id=dims.vocab - 3,
            media_placeholder_token_id=dims.vocab - 2,
            pad_token_id=dims.vocab - 1,
        )
    if form == "k26":
        return config
    text["quantization_config"]["ignore"] = _THINKING_IGNORE
    text["auto_map"] = {
        "AutoConfig": "configuration_deepseek.DeepseekV3Config",
        "AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM",
    }
    shared = ("dtype", "bos_token_id", "eos_token_id", "pad_token_id")
    return {**text, **{key: config[key] for key in shared}}


def write_small_files(folder: Path, config: dict[str, Any], form: Form) -> None:
    """Writes config.json and stand-ins for the tokenizer, code and text files next to it."""
    documents = {
        "config.json": config,
        "generation_config.json": {"max_length": 262144, "eos_token_id": config["eos_token_id"]},
        "tokenizer_config.json": {"tokenizer_class": "TikTokenTokenizer", "model_max_length": 262144},
    }
    for name, document in documents.items():
        (folder / name).write_text(json.dumps(document, indent=2) + "\n")
    classes = _CLASSES[form]
    texts = {
        # Whoever imports these instead of copying them finds out.
        f"configuration_{classes}.py": "raise RuntimeError('this file is to be copied, not run')\n",
        f"modeling_{classes}.py": "raise RuntimeError('this file is to be copied, not run')\n",
        "chat_template.jinja": "{% for message in messages %}{{ message.content }}{% endfor %}\n",
        "LICENSE": "A licence text would be here.\n",
        "README.md": "# A made-up checkpoint\n\nIts weights are hashes of their own coordinates.\n",
    }
    for name, content in texts.items():
        (folder / name).write_text(content)
    (folder / "tiktoken.model").write_bytes(b"".join(b"%d %d\n" % (token, token) for token in range(256)))


def _text_numbers(dims: Dims) -> dict[str, int]:
    return {
        "hidden_size": dims.hidden,
        "intermediate_size": dims.intermediate,
        "moe_intermediate_size": dims.moe_intermediate,
        "num_hidden_layers": dims.layers,
        "first_k_dense_replace": dims.first_k_dense,
        "n_routed_experts": dims.experts,
        "n_shared_experts": dims.shared_experts,
        "num_experts_per_tok": min(dims.top_k, dims.experts),
        "num_attention_heads": dims.heads,
        "num_key_value_heads": dims.heads,
        "q_lora_rank": dims.q_lora,
        "kv_lora_rank": dims.kv_lora,
        "qk_nope_head_dim": dims.nope,
        "qk_rope_head_dim": dims.rope,
        "v_head_dim": dims.v,
        "vocab_size": dims.vocab,
    }


def _vision_numbers(dims: Dims) -> dict[str, Any]:
    return {
        "vt_hidden_size": dims.vt_hidden,
        "vt_intermediate_size": dims.vt_intermediate,
        "vt_num_attention_heads": dims.vt_heads,
        "vt_num_hidden_layers": dims.vt_layers,
        "patch_size": dims.patch,
        "init_pos_emb_height": dims.pos_height,
        "init_pos_emb_width": dims.pos_width,
        "merge_kernel_size": [dims.merge, dims.merge],
        "mm_hidden_size": dims.vt_hidden,
        "text_hidden_size": dims.hidden,
    }
