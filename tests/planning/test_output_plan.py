"""Small plans: both forms, scopes, padding, paths, identity, and what `plan` reports."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from any_document import plain
from checkpoints import FULL, make_config
from marlin_convert.checkpoint.source import Source
from marlin_convert.models.family import parse_config, rules_digest
from marlin_convert.pipeline.preview import plan
from marlin_convert.planning.output_plan import Options, plan_output, rank_folder
from marlin_convert.planning.plan_report import rule_of
from marlin_convert.planning.units import AXES
from marlin_convert.slicing import Topology
from marlin_convert.storage.shard_file import is_filler

Sparse = Callable[..., Source]


@pytest.mark.parametrize(
    ("tp", "ep", "moe_tp"), [(1, 1, 1), (8, 1, 8), (8, 2, 4), (8, 8, 1), (64, 1, 64), (128, 2, 64), (6, 3, 2)]
)
def test_topology(tp: int, ep: int, moe_tp: int) -> None:
    topology = Topology.of(tp, ep)
    assert topology.moe_tp == moe_tp
    seen = [(topology.ep_rank(rank), topology.moe_tp_rank(rank)) for rank in range(tp)]
    assert seen == [(group, index) for group in range(ep) for index in range(moe_tp)]
    experts = 12 * ep
    for rank in range(tp):
        assert topology.expert_range(rank, experts) == range(rank // moe_tp * 12, (rank // moe_tp + 1) * 12)


def test_the_slice_of_a_rank_runs_fastest() -> None:
    """tp 8 ep 2: ranks 0 to 3 have the first half of the experts, a quarter of each."""
    topology = Topology.of(8, 2)
    assert [list(topology.expert_range(rank, 4)) for rank in range(8)] == [[0, 1]] * 4 + [[2, 3]] * 4
    assert [topology.moe_tp_rank(rank) for rank in range(8)] == [0, 1, 2, 3] * 2


@pytest.mark.parametrize(
    ("tp", "rank", "folder"),
    [
        (8, 3, "rank-03-of-08"),
        (1, 0, "rank-00-of-01"),
        (64, 63, "rank-63-of-64"),
        (128, 7, "rank-007-of-128"),
    ],
)
def test_folders(tp: int, rank: int, folder: str) -> None:
    assert rank_folder(rank, tp) == folder


def test_rules_as_shipped() -> None:
    rules = parse_config(make_config(FULL)).rules
    assert {rule.kind for rule in rules} == {*AXES, "experts"}
    assert {rule.scope for rule in rules} == {"layer", "dense", "moe", "top", "common"}
    assert len({(rule.scope, rule.name) for rule in rules}) == len(rules)
    units = {rule.name: rule.unit for rule in rules if rule.unit}
    assert units == {
        "self_attn.q_b_proj.weight": "q_head",
        "self_attn.kv_b_proj.weight": "kv_head",
        "self_attn.o_proj.weight": "v_head",
    }
    assert rules_digest(rules) == rules_digest(list(rules))
    assert rules_digest(rules) != rules_digest(rules[:-1])
    for rule in rules:
        assert (rule.kind == "common") == (rule.scope == "common")
        assert (rule.kind == "vocab") == (rule.name in ("model.embed_tokens.weight", "lm_head.weight"))


def test_k26(sparse: Sparse) -> None:
    output = plan_output(sparse(), Options(tp=2))
    assert [unit.name for unit in output.units] == ["layer-000", "layer-001", "layer-002", "top", "common"]
    assert [output.path(unit, unit.ranks[-1]) for unit in output.units] == [
        "rank-01-of-02/layer-000.safetensors",
        "rank-01-of-02/layer-001.safetensors",
        "rank-01-of-02/layer-002.safetensors",
        "rank-01-of-02/top.safetensors",
        "common/common.safetensors",
    ]
    assert output.complete
    places = {
        name: placed.spec.shape for name, placed in output.units[1].places.items() if not is_filler(name)
    }
    base = "language_model.model.layers.1."
    assert places == {
        f"{base}input_layernorm.weight": (256,),
        f"{base}self_attn.q_a_proj.weight": (64, 256),
        f"{base}self_attn.kv_a_proj_with_mqa.weight": (80, 256),
        f"{base}self_attn.q_a_layernorm.weight": (64,),
        f"{base}self_attn.kv_a_layernorm.weight": (64,),
        f"{base}self_attn.q_b_proj.weight": (192, 64),
        f"{base}self_attn.kv_b_proj.weight": (256, 64),
        f"{base}self_attn.o_proj.weight": (256, 128),
        f"{base}post_attention_layernorm.weight": (256,),
        f"{base}mlp.gate.weight": (16, 256),
        f"{base}mlp.gate.e_score_correction_bias": (16,),
        f"{base}mlp.shared_experts.gate_proj.weight": (256, 256),
        f"{base}mlp.shared_experts.up_proj.weight": (256, 256),
        f"{base}mlp.shared_experts.down_proj.weight": (256, 256),
        f"{base}mlp.experts.w13_weight_packed": (16, 16, 1024),
        f"{base}mlp.experts.w13_weight_scale": (16, 8, 512),
        f"{base}mlp.experts.w2_weight_packed": (16, 16, 512),
        f"{base}mlp.experts.w2_weight_scale": (16, 8, 256),
    }
    for unit in output.units:
        for name, placed in unit.places.items():
            assert unit.offset(name) == unit.data_start + placed.offset


def test_k2_thinking(sparse: Sparse) -> None:
    output = plan_output(sparse("k2-thinking"), Options(tp=2, ep=2))
    assert [unit.name for unit in output.units] == ["layer-000", "layer-001", "layer-002", "top"]
    for layer, unit in enumerate(output.units[:3]):
        name = f"model.layers.{layer}.self_attn.rotary_emb.inv_freq"
        assert unit.places[name].spec.dtype == "F32"
        assert unit.places[name].spec.shape == (16,)
        assert rule_of(unit, name) == "replicate"
        assert unit.files.fused[0].name == f"model.layers.{layer}.self_attn.fused_qkv_a_proj_with_mqa.weight"
    assert {name for name in output.units[3].places if not is_filler(name)} == {
        "model.embed_tokens.weight",
        "model.norm.weight",
        "lm_head.weight",
    }
    assert output.units[1].places["model.layers.1.mlp.experts.w13_weight_packed"].spec.shape == (8, 16, 2048)


def test_scopes(sparse: Sparse) -> None:
    source = sparse()
    some = plan_output(source, Options(tp=4, layers=(2, 0, 2), ranks=(3, 1)))
    assert (some.layers, some.ranks, some.complete) == ((0, 2), (1, 3), False)
    assert [(unit.name, unit.ranks) for unit in some.units] == [("layer-000", (1, 3)), ("layer-002", (1, 3))]
    whole = plan_output(source, Options(tp=4))
    by_name = {unit.name: unit for unit in whole.units}
    for unit in some.units:
        assert (unit.files, unit.data_start) == (by_name[unit.name].files, by_name[unit.name].data_start)
    every_layer = plan_output(source, Options(tp=4, layers=(0, 1, 2)))
    assert not every_layer.complete, "without top and common it is not the whole"
    assert not plan_output(source, Options(tp=4, ranks=(0,))).complete
    assert plan_output(source, Options(tp=4, ranks=(3, 2, 1, 0))).complete


def test_metadata_says_which_file_it_is(sparse: Sparse) -> None:
    output = plan_output(sparse(), Options(tp=4, ep=2))
    dense, moe, _, top, common = output.units
    same = {
        "format": "marlin-convert",
        "format_version": "1",
        "layout": "moe_wna16_marlin.u4b8",
        "source": "a" * 32,
        "tp": "4",
        "ep": "2",
    }
    assert output.metadata(dense, 3, "a" * 32) == same | {"rank": "3", "layer": "0", "expert_range": "0:0"}
    assert output.metadata(moe, 1, "a" * 32) == same | {"rank": "1", "layer": "1", "expert_range": "0:8"}
    assert output.metadata(moe, 2, "a" * 32) == same | {"rank": "2", "layer": "1", "expert_range": "8:16"}
    assert output.metadata(top, 0, "a" * 32) == same | {"rank": "0", "layer": "top", "expert_range": "0:0"}
    assert output.metadata(common, None, "a" * 32) == same | {
        "rank": "common",
        "layer": "common",
        "expert_range": "0:0",
    }


def test_the_same_offsets_on_every_rank_whatever_the_length_of_its_number(sparse: Sparse) -> None:
    source = sparse(experts=128, heads=16)
    one, all_of_them = (
        plan_output(source, Options(tp=16, ep=8, ranks=(0,))),
        plan_output(source, Options(tp=16, ep=8)),
    )
    assert [(u.files, u.data_start) for u in one.units] == [
        (u.files, u.data_start) for u in all_of_them.units
    ]


def test_bytes_add_up(sparse: Sparse) -> None:
    output = plan_output(sparse(), Options(tp=2))
    assert output.total_bytes == sum(unit.file_size * len(unit.ranks) for unit in output.units)
    assert [len(unit.ranks) for unit in output.units] == [2, 2, 2, 2, 1]
    for unit in output.units:
        assert unit.file_size == unit.data_start + sum(placed.spec.size for placed in unit.files.tensors)
    real = [
        p.spec.size
        for unit in output.units[:4]
        for p in unit.files.tensors
        if not p.spec.name.startswith("__pad__.")
    ]
    assert output.rank_bytes() == sum(real)


def test_report(sparse: Sparse) -> None:
    source = sparse(moe_intermediate=256)
    report = plan(str(source.folder), tp=8)
    document = plain(report.document())
    assert document["padding"] == {"moe_intermediate": 32, "padded": 64}
    assert (document["tp"], document["ep"], document["moe_tp"]) == (8, 1, 8)
    assert document["source"]["tensors"] == len(source.tensors)
    assert document["source"]["payload_bytes"] == source.payload_bytes
    assert plan(str(source.folder), tp=4).document().padding is None
    layer = document["units"][1]
    rules = {tensor["name"].split(".layers.1.")[-1]: tensor["rule"] for tensor in layer["tensors"]}
    assert rules["mlp.experts.w2_weight_scale"] == "experts"
    assert rules["self_attn.o_proj.weight"] == "row"
    assert rules["self_attn.q_b_proj.weight"] == "column"
    assert rules["mlp.gate.weight"] == "replicate"
    assert rules["__pad__.0"] == "filler"
    assert layer["tensors"][0]["offset"] == report.output.units[1].data_start
    ends = [tensor["offset"] + tensor["size"] for tensor in layer["tensors"]]
    assert [tensor["offset"] for tensor in layer["tensors"]][1:] == ends[:-1]
    assert ends[-1] == layer["file_size"]


def test_layers_that_are_alike_are_told_once(sparse: Sparse) -> None:
    report = plan(str(sparse(layers=5).folder), tp=2)
    assert [[unit.name for unit in group] for group in report.groups()] == [
        ["layer-000"],
        ["layer-001", "layer-002", "layer-003", "layer-004"],
        ["top"],
        ["common"],
    ]


def test_packed_modules_on_the_ignore_list_are_noted(sparse: Sparse) -> None:
    def ignore_experts(config: dict[str, Any]) -> None:
        config["text_config"]["quantization_config"]["ignore"].append("re:.*experts.3.up_proj")

    (note,) = plan(str(sparse(config=ignore_experts).folder), tp=1).notes
    assert note.startswith("2 packed modules")
    assert "such as language_model.model.layers.1.mlp.experts.3.up_proj" in note
    assert "ignore list" in note
    assert plan(str(sparse().folder), tp=1).notes == ()


def test_where_weight_shape_is_wide(sparse: Sparse) -> None:
    def widen(files: list[list[Any]]) -> None:
        for file in files:
            file[:] = [
                replace(tensor, dtype="I64") if tensor.name.endswith("weight_shape") else tensor
                for tensor in file
            ]

    wide, narrow = plan_output(sparse(tensors=widen), Options(tp=2)), plan_output(sparse(), Options(tp=2))
    assert [unit.files for unit in wide.units] == [unit.files for unit in narrow.units]
