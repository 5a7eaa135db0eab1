"""config.json: found at either level, everything else than the one scheme refused, and rewritten in its
place.
"""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anywhere import put_odd_values
from checkpoints import FULL, SMALL, Form, make_config, plan_files
from marlin_convert.errors import SourceError
from marlin_convert.models.family import ModelConfig, parse_config
from marlin_convert.models.quantization import Quantization, rewritten

WEIGHTS = ("text_config", "quantization_config", "config_groups", "group_0", "weights")
REPLACEMENT = {"quant_method": "marlin-convert"}


def changed(path: tuple[str, ...], value: Any, form: Form = "k26") -> dict[str, Any]:
    """A small config with one value set, or dropped where it is `...`."""
    config = make_config(SMALL, form)
    section = config
    for key in path[:-1]:
        section = section[key]
    if value is ...:
        del section[path[-1]]
    else:
        section[path[-1]] = value
    return config


def test_the_published_sizes() -> None:
    model = parse_config(make_config(FULL))
    assert (model.layers, model.experts, model.hidden, model.moe_intermediate) == (61, 384, 7168, 2048)
    assert model.moe_layers == frozenset(range(1, 61))
    assert model.dims == {
        "hidden": 7168,
        "vocab": 163840,
        "experts": 384,
        "dense_intermediate": 18432,
        "moe_intermediate": 2048,
        "shared_intermediate": 2048,
        "q_lora": 1536,
        "kv_lora": 512,
        "kv_a": 576,
        "q_head": 192,
        "kv_head": 256,
        "v_head": 128,
        "q_heads": 12288,
        "kv_heads": 16384,
        "v_heads": 8192,
        "vt_blocks": 27,
        "vt_hidden": 1152,
        "vt_qkv": 3456,
        "vt_intermediate": 4304,
        "vt_channels": 3,
        "vt_patch": 14,
        "vt_pos_height": 64,
        "vt_pos_width": 64,
        "vt_merged": 4608,
        "text_hidden": 7168,
    }
    assert (model.quantization.group_size, model.quantization.found_at) == (32, "text_config")


def test_a_flat_config_has_the_same_text_model_and_no_vision() -> None:
    nested, flat = parse_config(make_config(FULL)), parse_config(make_config(FULL, "k2-thinking"))
    assert flat.quantization.found_at == ""
    assert not any(rule.scope == "common" for rule in flat.rules)
    assert flat.rules == nested.rules[: len(flat.rules)]
    assert flat.dims == {
        key: value for key, value in nested.dims.items() if not key.startswith("vt_") and key != "text_hidden"
    }
    assert (flat.layers, flat.moe_layers, flat.experts) == (nested.layers, nested.moe_layers, nested.experts)


def test_the_vision_rules_are_the_published_tensors_and_no_others() -> None:
    """335 of them, by the test's own list of names and shapes."""
    model = parse_config(make_config(FULL))
    rules = {rule.name: rule for rule in model.rules if rule.kind == "common"}
    published = {tensor.name: tensor for file in plan_files(FULL)[-2:] for tensor in file}
    assert len(published) == 335
    assert rules.keys() == published.keys()
    for name, rule in rules.items():
        assert tuple(model.dims[size] for size in rule.shape or ()) == published[name].shape, name
        assert rule.dtype == ("BF16",)
        assert not rule.optional


def test_quantization_at_the_top_of_a_nested_config() -> None:
    config = make_config(SMALL)
    config["quantization_config"] = config["text_config"].pop("quantization_config")
    assert parse_config(config).quantization.found_at == ""


def test_quantization_at_both_levels() -> None:
    """As a dump through transformers shows it: fine if they say the same."""
    config = make_config(SMALL)
    config["quantization_config"] = copy.deepcopy(config["text_config"]["quantization_config"])
    assert parse_config(config).quantization.found_at == "text_config"
    config["quantization_config"]["ignore"] = []
    with pytest.raises(SourceError, match="top level and the one in text_config differ"):
        parse_config(config)


@pytest.mark.parametrize(
    ("first", "every", "moe"),
    [(1, 1, {1, 2, 3, 4, 5}), (0, 1, set(range(6))), (3, 2, {4}), (6, 1, set()), (2, 0, {2, 3, 4, 5})],
)
def test_which_layers_have_experts(first: int, every: int, moe: set[int]) -> None:
    config = make_config(SMALL)
    config["text_config"].update(num_hidden_layers=6, first_k_dense_replace=first, moe_layer_freq=every)
    assert parse_config(config).moe_layers == moe


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("architectures",), ["LlamaForCausalLM"], "architectures ['LlamaForCausalLM'] is none of"),
        (("architectures",), ..., "architectures [] is none of"),
        (("architectures",), 5, "architectures 5 is none of"),
        (("architectures",), "KimiK25ForConditionalGeneration", "is none of"),
        (
            ("text_config", "quantization_config"),
            ...,
            "no quantization_config, neither at the top level nor in text_config",
        ),
        (("text_config", "quantization_config"), "int4", "method 'int4', not compressed-tensors"),
        (("text_config", "quantization_config"), [1], "not compressed-tensors"),
        (
            ("text_config", "quantization_config"),
            {"quant_method": "fp8"},
            "method 'fp8', not compressed-tensors",
        ),
        (
            ("text_config", "quantization_config"),
            {"quant_method": "marlin-convert"},
            "this folder is a conversion already",
        ),
        (
            ("text_config", "quantization_config", "quant_method"),
            "gptq",
            "quant_method is 'gptq', only 'compressed-tensors'",
        ),
        (
            ("text_config", "quantization_config", "format"),
            "nvfp4-pack-quantized",
            "format is 'nvfp4-pack-quantized', only 'pack-quantized'",
        ),
        (("text_config", "quantization_config", "format"), ..., "format is None"),
        (("text_config", "quantization_config", "config_groups"), {}, "has 0 config groups"),
        (("text_config", "quantization_config", "config_groups"), {"a": {}, "b": {}}, "has 2 config groups"),
        (
            ("text_config", "quantization_config", "config_groups"),
            [],
            "config_groups of quantization_config should be an object, found []",
        ),
        (("text_config", "rope_scaling"), [1], "rope_scaling should be an object or null, found [1]"),
        (
            ("text_config", "rope_scaling"),
            {"factor": "64"},
            "factor and mscale_all_dim of rope_scaling should be numbers",
        ),
        (
            ("text_config", "quantization_config", "config_groups"),
            {"group_0": ["Linear"]},
            "config group group_0 is not an object with",
        ),
        (
            ("text_config", "quantization_config", "config_groups", "group_0", "weights"),
            None,
            "weights.num_bits is None",
        ),
        (
            ("text_config", "quantization_config", "config_groups", "group_0", "weights"),
            [4],
            "config group group_0 is not an object",
        ),
        (("text_config", "quantization_config", "ignore"), "lm_head", "ignore should be a list of names"),
        (("text_config", "quantization_config", "ignore"), [7], "ignore should be a list of names"),
        (("text_config", "quantization_config", "ignore"), ["re:("], "ignore has the pattern '('"),
        ((*WEIGHTS, "num_bits"), 8, "weights.num_bits is 8, only 4"),
        ((*WEIGHTS, "num_bits"), ..., "weights.num_bits is None, only 4"),
        ((*WEIGHTS, "type"), "float", "weights.type is 'float', only 'int'"),
        ((*WEIGHTS, "strategy"), "channel", "weights.strategy is 'channel', only 'group'"),
        ((*WEIGHTS, "symmetric"), False, "weights.symmetric is False, only True"),
        ((*WEIGHTS, "dynamic"), True, "weights.dynamic is True, only False"),
        ((*WEIGHTS, "actorder"), "group", "weights.actorder is 'group', only None"),
        ((*WEIGHTS, "actorder"), True, "weights.actorder is True, only None"),
        ((*WEIGHTS, "group_size"), "32", "group_size should be a whole number, found '32'"),
        ((*WEIGHTS, "group_size"), -1, "group_size should be a whole number, found -1"),
        ((*WEIGHTS, "group_size"), ..., "group_size should be a whole number, found None"),
        (("text_config", "hidden_size"), ..., "hidden_size should be a whole number, found None"),
        (("text_config", "hidden_size"), 256.0, "hidden_size should be a whole number, found 256.0"),
        (("text_config", "hidden_size"), True, "hidden_size should be a whole number, found True"),
        (("text_config", "n_routed_experts"), "16", "n_routed_experts should be a whole number"),
        (("text_config", "num_hidden_layers"), -1, "num_hidden_layers should be a whole number"),
        (("text_config", "num_nextn_predict_layers"), 1, "MTP layers are not supported"),
        (("text_config", "tie_word_embeddings"), True, "tie_word_embeddings is true"),
        (("vision_config", "vt_num_hidden_layers"), ..., "vt_num_hidden_layers should be a whole number"),
        (("vision_config", "merge_kernel_size"), 2, "merge_kernel_size should be two whole numbers, found 2"),
        (("vision_config", "merge_kernel_size"), [2, "2"], "merge_kernel_size should be two whole numbers"),
        (("vision_config",), "none", "vision_config is not an object"),
    ],
)
def test_what_is_not_converted(path: tuple[str, ...], value: Any, message: str) -> None:
    with pytest.raises(SourceError) as caught:
        parse_config(changed(path, value))
    assert str(caught.value).startswith("config.json: ")
    assert message in str(caught.value)


@pytest.mark.parametrize("actorder", [None, False, "static"])
def test_what_changes_nothing_is_taken(actorder: Any) -> None:
    assert parse_config(changed((*WEIGHTS, "actorder"), actorder)) is not None
    assert parse_config(changed((*WEIGHTS, "observer"), "mse")) is not None
    assert parse_config(changed((*WEIGHTS, "dynamic"), ...)) is not None


def test_ignore_entries_match_from_the_start() -> None:
    quantization = Quantization(32, "", ("lm_head", "re:.*self_attn.*", "re:vision_tower.*"))
    assert quantization.ignores("lm_head")
    assert not quantization.ignores("language_model.lm_head")
    assert quantization.ignores("model.layers.3.self_attn.o_proj")
    assert quantization.ignores("vision_tower.blocks.0")
    assert not quantization.ignores("model.vision_tower.blocks.0")
    assert not quantization.ignores("model.layers.1.mlp.experts.0.gate_proj")


def assert_replaced(config: dict[str, Any], at: str) -> dict[str, Any]:
    before = json.dumps(config)
    made = rewritten(config, parse_config(config).quantization, REPLACEMENT)
    assert json.dumps(config) == before, "the source's own is left alone"
    expected = copy.deepcopy(config)
    for section in (expected, expected.get("text_config", {})):
        section.pop("quantization_config", None)
    (expected["text_config"] if at else expected)["quantization_config"] = REPLACEMENT
    assert made == expected
    return made


def test_the_rewritten_config() -> None:
    assert_replaced(make_config(SMALL), "text_config")
    assert_replaced(make_config(SMALL, "k2-thinking"), "")
    both = make_config(SMALL)
    both["quantization_config"] = both["text_config"]["quantization_config"]
    assert_replaced(both, "text_config")
    top = make_config(SMALL)
    top["quantization_config"] = top["text_config"].pop("quantization_config")
    made = assert_replaced(top, "")
    with pytest.raises(SourceError, match="this folder is a conversion already"):
        parse_config(made)


@settings(max_examples=400)
@given(form=st.sampled_from(["k26", "k2-thinking"]), data=st.data(), count=st.integers(1, 2))
def test_any_other_value_anywhere_is_taken_or_refused_with_a_source_error(
    form: Form, data: st.DataObject, count: int
) -> None:
    config = copy.deepcopy(make_config(SMALL, form))
    put_odd_values(data, config, count)
    try:
        model = parse_config(config)
    except SourceError as error:
        message = str(error)
    else:
        assert isinstance(model, ModelConfig)
        assert all(type(size) is int and size >= 0 for size in model.dims.values())
        assert model.quantization.ignores("x") in (True, False)
        return
    assert message.startswith("config.json: ")


TEXT = ("text_config",)
HUGE = 10**12


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ((*TEXT, "num_hidden_layers"), HUGE, "num_hidden_layers is 1000000000000, expected 0 to 4096"),
        ((*TEXT, "n_routed_experts"), HUGE, "n_routed_experts is 1000000000000, expected 0 to 65536"),
        ((*TEXT, "hidden_size"), HUGE, "hidden_size is 1000000000000, expected 0 to 16777216"),
        ((*TEXT, "vocab_size"), 1 << 70, "vocab_size is a number of 71 bits, beyond 64 bits"),
        ((*TEXT, "unknown"), 10**4000, "unknown is a number of 13288 bits, beyond 64 bits"),
        ((*TEXT, "qk_rope_head_dim"), 0, "qk_rope_head_dim is 0, expected 1 to"),
        (("vision_config", "vt_num_hidden_layers"), HUGE, "vt_num_hidden_layers is 1000000000000"),
        (("vision_config", "merge_kernel_size"), [HUGE, 2], "should be two whole numbers"),
        ((*WEIGHTS, "group_size"), HUGE, "group_size is 1000000000000"),
        ((*TEXT, "rms_norm_eps"), float("nan"), "rms_norm_eps is nan, which is no number"),
        ((*TEXT, "rms_norm_eps"), float("inf"), "rms_norm_eps is inf, which is no number"),
        ((*TEXT, "model_type"), "k\udc80", "'model_type' has text that is no Unicode"),
        ((*TEXT, "k\ud800"), 1, "has text that is no Unicode"),
        ((*TEXT, "rope_scaling", "mscale_all_dim"), 1e308, "mscale_all_dim of rope_scaling is 1e+308"),
        ((*TEXT, "rope_scaling", "factor"), 10**19, "factor is 10000000000000000000, beyond 64 bits"),
    ],
)
def test_values_beyond_any_model_are_refused_by_name(path: tuple[str, ...], value: Any, message: str) -> None:
    with pytest.raises(SourceError) as caught:
        parse_config(changed(path, value))
    assert message in str(caught.value)


@pytest.mark.parametrize("key", ["init_pos_emb_height", "vt_hidden_size", "merge_kernel_size"])
def test_a_key_of_a_section_is_named_with_it(key: str) -> None:
    with pytest.raises(SourceError, match=f"config.json: vision_config.{key} should be"):
        parse_config(changed(("vision_config", key), "many"))


def test_a_config_nested_deeply_is_refused() -> None:
    value: Any = 1
    for _ in range(33):
        value = [value]
    with pytest.raises(SourceError, match="nested more than 32 deep"):
        parse_config(changed((*TEXT, "x"), value))


def test_patterns_that_are_not_followed_are_told() -> None:
    path = (*TEXT, "quantization_config", "ignore")
    quantization = parse_config(changed(path, ["re:(?!.*experts).*", "re:.*gate$"])).quantization
    assert quantization.unread == ["(?!.*experts).*"]
    assert quantization.ignores("a.gate")
    assert not quantization.ignores("a.gate.b")
    with pytest.raises(SourceError, match=r"ignore has the pattern .* more than 4096 characters"):
        parse_config(changed(path, ["re:" + "a" * 5000]))
    with pytest.raises(SourceError, match="patterns of 5000 characters, expected at most 4096"):
        parse_config(changed(path, ["re:" + "a" * 2500] * 2))
