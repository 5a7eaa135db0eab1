"""What cannot be planned is refused from headers alone: with the right class, and the tensor's name."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from checkpoints.names import Tensor
from marlin_convert.checkpoint.index import SourceTensor
from marlin_convert.checkpoint.source import Source
from marlin_convert.errors import SourceError, UsageError
from marlin_convert.planning import output_plan
from marlin_convert.planning.output_plan import Options, plan_output

Sparse = Callable[..., Source]
EXPERT = "language_model.model.layers.1.mlp.experts.3.up_proj."


def edit(name: str, /, **changes: Any) -> Callable[[list[list[Tensor]]], None]:
    """Change one tensor; `drop=True` takes it out."""

    def change(files: list[list[Tensor]]) -> None:
        (file,) = [file for file in files if any(tensor.name == name for tensor in file)]
        at = [tensor.name for tensor in file].index(name)
        if changes.get("drop"):
            del file[at]
        else:
            file[at] = replace(file[at], **changes)

    return change


def add(name: str, dtype: str, shape: tuple[int, ...]) -> Callable[[list[list[Tensor]]], None]:
    return lambda files: files[0].append(Tensor(name, dtype, shape))


def refused(error: type[Exception], source: Source, **options: Any) -> str:
    with pytest.raises(error) as caught:
        plan_output(source, Options(**{"tp": 1} | options))
    assert type(caught.value) is error
    return str(caught.value)


@pytest.mark.parametrize(
    ("tp", "ep", "dims", "message"),
    [
        (3, 1, {}, "--tp 3 --ep 1: the experts' intermediate size 512 is not divisible by tp / ep = 3"),
        (
            32,
            1,
            {},
            (
                "--tp 32 --ep 1: a slice of 16 of the experts' intermediate size 512 at tp / ep = 32 would"
                " cut a group of 32"
            ),
        ),
        (
            2,
            1,
            {"moe_intermediate": 96},
            (
                "--tp 2 --ep 1: a slice of 48 of the experts' intermediate size 96 at tp / ep = 2 would cut a"
                " group of 32"
            ),
        ),
        (
            16,
            1,
            {},
            (
                "--tp 16 does not divide language_model.model.layers.0.self_attn.q_b_proj.weight: 8 heads of"
                " 48; choose a tp that does"
            ),
        ),
        (
            16,
            16,
            {},
            (
                "--tp 16 does not divide language_model.model.layers.0.self_attn.q_b_proj.weight: 8 heads of"
                " 48; choose a tp that does"
            ),
        ),
        (
            4,
            1,
            {"vocab": 514},
            (
                "--tp 4 does not divide language_model.model.embed_tokens.weight: 514 rows; choose a tp that"
                " does"
            ),
        ),
        (
            8,
            1,
            {"intermediate": 516},
            (
                "--tp 8 does not divide language_model.model.layers.0.mlp.gate_proj.weight: 516 rows; choose"
                " a tp that does"
            ),
        ),
        (
            8,
            3,
            {},
            "--ep 3 does not divide --tp 8; tp is the number of all ranks, so tp 8 ep 8 is 8 ranks, not 64",
        ),
        (
            8,
            16,
            {},
            "--ep 16 does not divide --tp 8; tp is the number of all ranks, so tp 8 ep 8 is 8 ranks, not 64",
        ),
        (8, 8, {"experts": 12}, "--ep 8 does not divide the 12 routed experts"),
        (128, 1, {}, "--tp 128 with --ep 1 cuts each expert into 128 slices; at most 64 are supported"),
        (0, 1, {}, "--ep 1 does not divide --tp 0"),
        (8, 0, {}, "--ep 0 does not divide --tp 8"),
        (-8, 1, {}, "--ep 1 does not divide --tp -8"),
        (8, -8, {}, "--ep -8 does not divide --tp 8"),
        (
            1,
            1,
            {"hidden": 192},
            "--tp 1 --ep 1: hidden size 192 is not a multiple of 128, which the kernel needs",
        ),
        (1, 1, {"group": 16}, "--tp 1 --ep 1: group size 16 is not one the kernel has (32, 64, 128)"),
        (
            8,
            1,
            {"group": 128},
            (
                "--tp 8 --ep 1: a slice of 64 of the experts' intermediate size 512 at tp / ep = 8 would cut"
                " a group of 128"
            ),
        ),
    ],
)
def test_requests_that_cannot_be_met(
    sparse: Sparse, tp: int, ep: int, dims: dict[str, int], message: str
) -> None:
    assert refused(UsageError, sparse(**dims), tp=tp, ep=ep).startswith(message)


def test_a_unit_that_is_cut_evenly_may_still_not_be_cut(sparse: Sparse) -> None:
    """6 heads of 48 are 288 rows, which 4 divides, and 6 heads of 64, 384."""
    message = refused(UsageError, sparse(heads=6), tp=4)
    assert (
        message
        == "--tp 4 does not divide language_model.model.layers.0.self_attn.q_b_proj.weight: 6 heads of 48;"
        " choose a tp that does; with --ep 1, --tp 1, 2 would do; with --tp 4 --ep 1, --attn-tp 1, 2 would do"
    )


#: what is asked for, what the checkpoint has, and what is offered
OFFERS: list[tuple[dict[str, int], dict[str, int], list[str]]] = [
    ({"tp": 3}, {}, ["with --ep 1, --tp 1, 2, 4, 8 would do"]),
    # attention beyond its 8 heads: fewer ranks, or fewer slices of it
    (
        {"tp": 16},
        {},
        ["with --ep 1, --tp 1, 2, 4, 8 would do", "with --tp 16 --ep 1, --attn-tp 1, 2, 4, 8 would do"],
    ),
    # slices of 16 cut a group of 32: no attention helps, and more groups of experts run out of heads
    ({"tp": 32}, {}, ["with --ep 1, --tp 1, 2, 4, 8 would do"]),
    (
        {"tp": 32, "attn_tp": 8},
        {},
        [
            "with --ep 1 --attn-tp 8, --tp 8, 16 would do",
            "with --tp 32 --attn-tp 8, --ep 2, 4, 8, 16 would do",
        ],
    ),
    # 128 slices of an expert
    (
        {"tp": 128, "attn_tp": 8},
        {},
        ["with --ep 1 --attn-tp 8, --tp 8, 16 would do", "with --tp 128 --attn-tp 8, --ep 8, 16 would do"],
    ),
    ({"tp": 8, "ep": 3}, {}, ["with --tp 8, --ep 1, 2, 4, 8 would do"]),
    ({"tp": 8, "ep": 8}, {"experts": 12}, ["with --tp 8, --ep 1, 2, 4 would do"]),
    ({"tp": 8, "attn_tp": 3}, {}, ["with --tp 8 --ep 1, --attn-tp 1, 2, 4, 8 would do"]),
    # rows of the embedding are cut by all ranks
    ({"tp": 4}, {"vocab": 514}, ["with --ep 1, --tp 1, 2 would do"]),
    # a dense layer is cut like attention
    (
        {"tp": 8},
        {"intermediate": 516},
        ["with --ep 1, --tp 1, 2, 4 would do", "with --tp 8 --ep 1, --attn-tp 1, 2, 4 would do"],
    ),
    # no other value of one flag would do
    ({"tp": 15, "ep": 5}, {}, ["with --ep 1, --tp 1, 2, 4, 8 would do"]),
    ({"tp": 1}, {"hidden": 192}, []),
]


@pytest.mark.parametrize(("asked", "dims", "offers"), OFFERS, ids=str)
def test_what_would_do_is_offered(
    sparse: Sparse, asked: dict[str, int], dims: dict[str, int], offers: list[str]
) -> None:
    """And does, each of it."""
    source = sparse(**dims)
    said = refused(UsageError, source, **asked)
    assert [part for part in said.split("; ") if part.endswith("would do")] == offers
    for offer in offers:
        *others, (name, values) = re.findall(r"--([a-z-]+) ([\d, ]+?)(?=[, ]+--| would)", offer)
        for value in values.split(", "):
            pairs = [*others, (name, value)]
            options: dict[str, Any] = {flag.replace("-", "_"): int(number) for flag, number in pairs}
            assert plan_output(source, Options(**options)).topology.tp == options["tp"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers": (3,)}, "--layers: there is no layer 3; they run from 0 to 2"),
        ({"layers": (0, -1)}, "--layers: there is no layer -1; they run from 0 to 2"),
        ({"ranks": (2,), "tp": 2}, "--ranks: there is no rank 2; they run from 0 to 1"),
    ],
)
def test_scopes_out_of_range(sparse: Sparse, options: dict[str, Any], message: str) -> None:
    assert refused(UsageError, sparse(), **options) == message


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (EXPERT + "weight_packed", {"drop": True}, "{name} missing: no weight file of the checkpoint has it"),
        (EXPERT + "weight_scale", {"drop": True}, "{name} missing: no weight file of the checkpoint has it"),
        (EXPERT + "weight_shape", {"drop": True}, "{name} missing: no weight file of the checkpoint has it"),
        (
            "language_model.model.norm.weight",
            {"drop": True},
            "{name} is missing: no weight file of the checkpoint has it",
        ),
        (
            "language_model.model.layers.2.mlp.gate.e_score_correction_bias",
            {"drop": True},
            "{name} is missing",
        ),
        ("vision_tower.encoder.blocks.1.wo.bias", {"drop": True}, "{name} is missing"),
        (EXPERT + "weight_packed", {"dtype": "I64"}, "{name} in {file} is I64, expected I32"),
        (EXPERT + "weight_scale", {"dtype": "F32"}, "{name} in {file} is F32, expected BF16"),
        (EXPERT + "weight_shape", {"dtype": "BF16"}, "{name} in {file} is BF16, expected I32 or I64"),
        (
            "language_model.model.layers.0.self_attn.o_proj.weight",
            {"dtype": "F32"},
            "{name} in {file} is F32, expected BF16",
        ),
        ("mm_projector.proj.0.weight", {"dtype": "F32"}, "{name} in {file} is F32, expected BF16"),
        (
            EXPERT + "weight_packed",
            {"shape": (512, 33)},
            "{name} in {file} has the shape [512, 33], expected [512, 32] from config.json",
        ),
        (
            EXPERT + "weight_packed",
            {"shape": (32, 512)},
            "{name} in {file} has the shape [32, 512], expected [512, 32] from config.json",
        ),
        (
            EXPERT + "weight_scale",
            {"shape": (512, 4)},
            "{name} in {file} has the shape [512, 4], expected [512, 8] from config.json",
        ),
        (
            EXPERT + "weight_shape",
            {"shape": (3,)},
            "{name} in {file} has the shape [3], expected [2] from config.json",
        ),
        (
            "language_model.lm_head.weight",
            {"shape": (512, 255)},
            "{name} in {file} has the shape [512, 255], expected [512, 256] from config.json",
        ),
        (
            "language_model.model.norm.weight",
            {"shape": (256, 1)},
            "{name} in {file} has the shape [256, 1], expected [256] from config.json",
        ),
        (
            "vision_tower.patch_embed.pos_emb.weight",
            {"shape": (64, 32)},
            "{name} in {file} has the shape [64, 32], expected [8, 8, 32] from",
        ),
    ],
)
def test_tensors_that_are_missing_or_wrong(
    sparse: Sparse, name: str, changes: dict[str, Any], message: str
) -> None:
    whole = sparse()
    said = refused(SourceError, sparse(tensors=edit(name, **changes)))
    assert said.startswith(message.format(name=name, file=whole.tensors[name].file))


def test_every_vision_tensor_must_be_there_in_its_shape(sparse: Sparse) -> None:
    whole = sparse()
    names = [name for name in whole.tensors if name.startswith(("vision_tower.", "mm_projector."))]
    assert len(names) == 3 + 2 * 12 + 2 + 6
    for name in names:
        others = {other: tensor for other, tensor in whole.tensors.items() if other != name}
        assert refused(SourceError, replace(whole, tensors=others)).startswith(f"{name} is missing")
        file, entry = whole.tensors[name]
        for shape in ((*entry.shape[:-1], entry.shape[-1] + 1), (*entry.shape, 1)):
            misshapen = SourceTensor(file, entry._replace(shape=shape))
            message = refused(SourceError, replace(whole, tensors=others | {name: misshapen}))
            assert message.startswith(f"{name} in {file} has the shape {list(shape)}, expected ")
        another = f"{name}_another"
        message = refused(SourceError, replace(whole, tensors=whole.tensors | {another: whole.tensors[name]}))
        assert message.startswith(f"1 tensors have no rule, such as {another} in {file}")


def test_a_missing_expert(sparse: Sparse) -> None:
    def without_expert(files: list[list[Tensor]]) -> None:
        for file in files:
            file[:] = [tensor for tensor in file if (tensor.layer, tensor.expert) != (2, 15)]

    message = refused(SourceError, sparse(tensors=without_expert))
    assert (
        message
        == "language_model.model.layers.2.mlp.experts.15.gate_proj.weight_packed and 8 more tensors of this"
        " layer's 16 experts missing: no weight file of the checkpoint has it; fetch the checkpoint again"
    )


@pytest.mark.parametrize(
    ("name", "dtype", "shape"),
    [
        ("language_model.model.layers.1.mlp.experts.16.gate_proj.weight_packed", "I32", (512, 32)),
        ("language_model.model.layers.3.input_layernorm.weight", "BF16", (256,)),
        ("language_model.model.layers.1.mlp.experts.0.gate_proj.weight_zero_point", "I32", (64, 8)),
        ("language_model.model.layers.1.mlp.experts.0.gate_proj.weight_g_idx", "I32", (256,)),
        ("language_model.model.layers.0.self_attn.q_b_proj.weight_packed", "I32", (384, 8)),
        ("language_model.model.layers.1.mlp.gate_proj.weight", "BF16", (512, 256)),
        ("model.norm.weight", "BF16", (256,)),
        ("vision_tower.encoder.blocks.2.wo.bias", "BF16", (32,)),
        ("language_model.model.layers.1.mlp.experts.w13_weight_packed", "I32", (2, 2)),
    ],
)
def test_tensors_without_a_rule(sparse: Sparse, name: str, dtype: str, shape: tuple[int, ...]) -> None:
    message = refused(SourceError, sparse(tensors=add(name, dtype, shape)))
    assert message.startswith(
        f"1 tensors have no rule, such as {name} in model-00001-of-000006.safetensors (1 of that form)"
    )
    assert ("only routed experts may be quantized" in message) == name.endswith(
        (".weight_packed", "zero_point", "g_idx")
    )


def test_a_quantized_tensor_in_the_place_of_a_plain_one_is_missing(sparse: Sparse) -> None:
    name = "language_model.model.layers.0.self_attn.q_b_proj.weight"
    assert refused(SourceError, sparse(tensors=edit(name, name=name + "_packed"))).startswith(
        f"{name} is missing"
    )


def test_a_plan_of_one_layer_still_wants_the_whole_checkpoint(sparse: Sparse) -> None:
    source = sparse(tensors=edit("language_model.lm_head.weight", drop=True))
    assert refused(SourceError, source, layers=(1,)).startswith("language_model.lm_head.weight is missing")


def test_more_tensors_than_a_small_loader_takes(sparse: Sparse) -> None:
    source = sparse(vt_layers=90)
    assert refused(SourceError, source).startswith(
        "common: 1361 tensors in one file, more than the 1024 a small loader takes"
    )


@pytest.mark.parametrize("name", ["MAX_STORED", "LISTED", "RECORD"])
def test_more_than_the_documents_hold(monkeypatch: pytest.MonkeyPatch, sparse: Sparse, name: str) -> None:
    """A manifest, digests.bin or a record of a unit that their readers would refuse."""
    source = sparse()
    plan = plan_output(source, Options(2))
    digests = [sum(stack.experts for stack in unit.stacked) * 16 * 2 for unit in plan.units]
    count, most = {
        "MAX_STORED": (
            stored := sum(len(unit.files.tensors) * len(unit.ranks) for unit in plan.units),
            stored,
        ),
        "LISTED": (sum(digests), sum(digests)),
        "RECORD": (max(digests), 2 * max(digests)),
    }[name]
    monkeypatch.setattr(output_plan, name, most)
    plan_output(source, Options(2))
    monkeypatch.setattr(output_plan, name, most - 1)
    said = refused(UsageError, source, tp=2)
    assert f"the output would have {count} " in said
    assert "make parts of it, with --ranks or --layers" in said
    plan_output(source, Options(2, ranks=(0,)))


def test_more_experts_than_the_list_of_a_rank_holds(monkeypatch: pytest.MonkeyPatch, sparse: Sparse) -> None:
    source = sparse()
    plan = plan_output(source, Options(2))
    count = sum(unit.stacked[0].experts for unit in plan.units if unit.stacked)
    assert count > 0
    monkeypatch.setattr(output_plan, "MAX_PLACED", count)
    plan_output(source, Options(2))
    monkeypatch.setattr(output_plan, "MAX_PLACED", count - 1)
    assert f"the output would have {count} experts of a rank" in refused(UsageError, source, tp=2)
    plan_output(source, Options(2, ep=2))
