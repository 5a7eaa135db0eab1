"""The plan for the published model, held to numbers that were worked out without the planner."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator

import pytest

from checkpoints import FULL, plan_files
from marlin_convert.checkpoint.source import Source
from marlin_convert.documents import bounds
from marlin_convert.planning.output_plan import OutputPlan
from marlin_convert.slicing import Topology
from marlin_convert.storage.shard_file import TensorSpec, is_filler

PlanOf = Callable[[int, int], OutputPlan]

TENSORS = 208_550
PAYLOAD = 595_148_192_736
WEIGHT_SHAPES = 60 * 384 * 3 * 8
ITEM = {"BF16": 2, "F32": 4, "I32": 4, "U8": 1}

# Per layer and once: what every rank holds whole, as the engines' own rules have it.
EVERY_LAYER = 2 * 7168 * 2 + (1536 + 576) * 7168 * 2 + 1536 * 2 + 512 * 2
EVERY_MOE_LAYER = 384 * 7168 * 2 + 384 * 4
REPLICATED = 61 * EVERY_LAYER + 60 * EVERY_MOE_LAYER + 7168 * 2

TOPOLOGIES = [(1, 1), (8, 1), (8, 8), (8, 2), (16, 1), (32, 1), (64, 1), (64, 2)]


def stored(plan: OutputPlan, *, common: bool) -> list[tuple[str, TensorSpec]]:
    """(unit, tensor) of one rank, or of common/; fillers left out."""
    placed = [
        (unit.name, placed.spec)
        for unit in plan.units
        if (unit.name == "common") == common
        for placed in unit.files.tensors
    ]
    return [(unit, spec) for unit, spec in placed if not spec.name.startswith("__pad__.")]


def padding_bytes(tp: int, ep: int) -> int:
    """Words and scales that a rank stores beyond its share: only a slice of 32 is padded, to 64."""
    share = 2048 * ep // tp
    missing = max(64 - share, 0)
    per_channel = 3 * (7168 // 2 + 7168 // 32 * 2)
    return 60 * (384 // ep) * missing * per_channel


def test_the_stand_in_is_the_published_model(full_size: Source) -> None:
    assert len(full_size.tensors) == TENSORS
    assert full_size.payload_bytes == PAYLOAD
    assert len(full_size.headers) == 64


def test_documents_of_twice_its_size_are_within_bounds(full_size: Source, full_plan: PlanOf) -> None:
    """Twice, as K3 has more layers and more experts; the manifest at 250 bytes and 20 marks a tensor."""
    plan = full_plan(64, 1)
    stored = sum(len(unit.files.tensors) * len(unit.ranks) for unit in plan.units)
    assert stored == 78_344
    assert 2 * stored < bounds.MAX_STORED
    assert bounds.MAX_STORED * 400 < bounds.MANIFEST
    assert bounds.MAX_STORED * 20 < bounds.MAX_MARKS
    assert 3 * 60 * 384 < bounds.MAX_PLACED
    assert bounds.MAX_PLACED * 17 < bounds.MAX_MARKS
    assert 2 * 60 * 384 * 4 * 64 * 16 < bounds.LISTED
    headers = [header.raw for header in full_size.headers]
    assert 2 * TENSORS < bounds.MAX_TENSORS
    assert 2 * sum(map(len, headers)) < bounds.HEADERS
    assert sum(raw.count(mark) for raw in headers for mark in (b",", b":", b"[", b"{")) < bounds.MAX_MARKS
    assert full_size.index_bytes is not None
    assert 2 * len(full_size.index_bytes) < bounds.INDEX


@pytest.mark.parametrize(("tp", "ep"), TOPOLOGIES)
def test_all_ranks_together_reconcile_with_the_source(full_plan: PlanOf, tp: int, ep: int) -> None:
    """Every source byte once, replicated ones tp times, weight_shape never, and padding."""
    plan = full_plan(tp, ep)
    common = sum(spec.size for _, spec in stored(plan, common=True))
    assert common == 108_555_776 + 833_732_064
    ranks = tp * sum(spec.size for _, spec in stored(plan, common=False))
    assert ranks + common == PAYLOAD - WEIGHT_SHAPES + (tp - 1) * REPLICATED + tp * padding_bytes(tp, ep)


@pytest.mark.parametrize(("tp", "ep"), TOPOLOGIES)
def test_bytes_of_a_rank(full_plan: PlanOf, tp: int, ep: int) -> None:
    """The number that `plan` shows for the GPU: without fillers, headers and common/."""
    cut = PAYLOAD - WEIGHT_SHAPES - 108_555_776 - 833_732_064 - REPLICATED
    assert cut % tp == 0
    assert full_plan(tp, ep).rank_bytes() == cut // tp + REPLICATED + padding_bytes(tp, ep)


def test_expert_bytes_of_a_rank_and_layer(full_plan: PlanOf) -> None:
    for tp, ep in ((8, 8), (8, 1), (8, 2)):
        unit = next(unit for unit in full_plan(tp, ep).units if unit.name == "layer-001")
        sizes = {tensor.name.rsplit(".", 1)[1]: unit.places[tensor.name].spec.size for tensor in unit.stacked}
        assert sizes == {
            "w13_weight_packed": 704_643_072,
            "w13_weight_scale": 88_080_384,
            "w2_weight_packed": 352_321_536,
            "w2_weight_scale": 44_040_192,
        }


def expected_tensors(tp: int, ep: int) -> Iterator[tuple[str, str, str, tuple[int, ...]]]:
    """(unit, name, dtype, shape) of all that a rank stores, or common/, from the published names and shapes
    alone.
    """
    rows = re.compile(
        r"(q_b_proj|kv_b_proj|mlp\.(shared_experts\.)?(gate|up)_proj|embed_tokens|lm_head)\.weight"
    )
    columns = re.compile(r"(o_proj|mlp\.(shared_experts\.)?down_proj)\.weight")
    for tensor in (tensor for file in plan_files(FULL) for tensor in file if tensor.expert < 0):
        shape, unit = tensor.shape, f"layer-{tensor.layer:03d}" if tensor.layer >= 0 else "top"
        if not tensor.name.startswith("language_model."):
            unit = "common"
        elif rows.search(tensor.name):
            shape = (shape[0] // tp, shape[1])
        elif columns.search(tensor.name):
            shape = (shape[0], shape[1] // tp)
        yield unit, tensor.name, tensor.dtype, shape
    experts, width = 384 // ep, max(2048 * ep // tp, 64)
    for layer in range(1, 61):
        for name, dtype, shape in (
            ("w13_weight_packed", "I32", (448, 4 * width)),
            ("w13_weight_scale", "BF16", (224, 2 * width)),
            ("w2_weight_packed", "I32", (width // 16, 14336)),
            ("w2_weight_scale", "BF16", (width // 32, 7168)),
        ):
            yield (
                f"layer-{layer:03d}",
                f"language_model.model.layers.{layer}.mlp.experts.{name}",
                dtype,
                (experts, *shape),
            )


@pytest.mark.parametrize(("tp", "ep"), TOPOLOGIES)
def test_every_file_has_every_tensor_in_its_shape(full_plan: PlanOf, tp: int, ep: int) -> None:
    plan = full_plan(tp, ep)
    planned = [*stored(plan, common=False), *stored(plan, common=True)]
    assert sorted((unit, spec.name, spec.dtype, spec.shape) for unit, spec in planned) == sorted(
        expected_tensors(tp, ep)
    )
    assert [unit.name for unit in plan.units] == [
        *(f"layer-{layer:03d}" for layer in range(61)),
        "top",
        "common",
    ]
    assert [unit.ranks for unit in plan.units] == [tuple(range(tp))] * 62 + [(None,)]
    assert plan.complete


@pytest.mark.parametrize(("tp", "ep"), TOPOLOGIES)
def test_pages(full_plan: PlanOf, tp: int, ep: int) -> None:
    """All but the norms and other small tensors are whole pages; everything of a page or more starts on one,
    or is fused to what does.
    """
    odd = set()
    for unit in full_plan(tp, ep).units:
        assert unit.data_start % 4096 == 0
        assert unit.file_size % 4096 == 0
        fused = {name for view in unit.files.fused for name in view.members[1:]}
        for placed in unit.files.tensors:
            spec = placed.spec
            if unit.name == "common" or is_filler(spec.name):
                continue
            if spec.size >= 4096 and spec.name not in fused:
                assert placed.offset % 4096 == 0
            if spec.size % 4096:
                odd.add((spec.name.split(".")[-2], spec.size))
    assert odd == {
        ("input_layernorm", 14336),
        ("post_attention_layernorm", 14336),
        ("norm", 14336),
        ("q_a_layernorm", 3072),
        ("kv_a_layernorm", 1024),
        ("gate", 1536),
    }


@pytest.mark.parametrize(("tp", "ep"), [(8, 1), (8, 8), (64, 1)])
def test_fillers_are_few(full_plan: PlanOf, tp: int, ep: int) -> None:
    for unit in full_plan(tp, ep).units:
        fillers = [placed.spec for placed in unit.files.tensors if is_filler(placed.spec.name)]
        assert all(spec.dtype == "U8" and spec.size < 4096 for spec in fillers)
        if unit.name != "common":
            assert len(fillers) <= 2


@pytest.mark.parametrize(("tp", "ep"), [(1, 1), (8, 1), (8, 8), (64, 1)])
def test_fused_views_have_nothing_between(full_plan: PlanOf, tp: int, ep: int) -> None:
    for unit in full_plan(tp, ep).units:
        if unit.source.layer is None:
            assert unit.files.fused == ()
            continue
        base = f"language_model.model.layers.{unit.source.layer}."
        mlp = "mlp." if unit.source.layer == 0 else "mlp.shared_experts."
        assert {view.name: view.members for view in unit.files.fused} == {
            f"{base}self_attn.fused_qkv_a_proj_with_mqa.weight": (
                f"{base}self_attn.q_a_proj.weight",
                f"{base}self_attn.kv_a_proj_with_mqa.weight",
            ),
            f"{base}{mlp}gate_up_proj.weight": (f"{base}{mlp}gate_proj.weight", f"{base}{mlp}up_proj.weight"),
        }
        for view in unit.files.fused:
            first, second = (unit.places[name] for name in view.members)
            assert second.offset == first.offset + first.spec.size
            assert second.spec.shape[1:] == first.spec.shape[1:]


def test_load_order(full_plan: PlanOf) -> None:
    """Experts last of the whole pages but for nothing, and w13 before w2: what a layer needs first comes
    first.
    """
    unit = next(unit for unit in full_plan(8, 1).units if unit.name == "layer-007")
    names = [placed.spec.name.removeprefix("language_model.model.layers.7.") for placed in unit.files.tensors]
    assert names == [
        "self_attn.q_a_proj.weight",
        "self_attn.kv_a_proj_with_mqa.weight",
        "self_attn.q_b_proj.weight",
        "self_attn.kv_b_proj.weight",
        "self_attn.o_proj.weight",
        "mlp.gate.weight",
        "mlp.shared_experts.gate_proj.weight",
        "mlp.shared_experts.up_proj.weight",
        "mlp.shared_experts.down_proj.weight",
        "mlp.experts.w13_weight_packed",
        "mlp.experts.w13_weight_scale",
        "mlp.experts.w2_weight_packed",
        "mlp.experts.w2_weight_scale",
        "input_layernorm.weight",
        "__pad__.0",
        "post_attention_layernorm.weight",
        "mlp.gate.e_score_correction_bias",
        "self_attn.q_a_layernorm.weight",
        "self_attn.kv_a_layernorm.weight",
        "__pad__.1",
    ]


def test_an_engines_own_numbers_for_rank_3(full_plan: PlanOf) -> None:
    """Ranges that an engine's tests state for rank 3 of 8, each with its own experts."""
    plan, rank = full_plan(8, 8), 3
    assert plan.topology == Topology(8, 8)
    assert plan.topology.expert_range(rank, 384) == range(144, 192)
    ranges = {}
    for unit in (plan.units[0], plan.units[1], plan.units[61]):
        for tensor in unit.source.plain:
            cut = tensor.cut
            if cut.axis is not None:
                held = cut.block(tensor.shape, cut.index(rank))[cut.axis]
                ranges[tensor.name.removeprefix("language_model.")] = (cut.axis, held.start, held.stop)
    assert ranges == {
        "model.embed_tokens.weight": (0, 61440, 81920),
        "lm_head.weight": (0, 61440, 81920),
        "model.layers.0.mlp.gate_proj.weight": (0, 6912, 9216),
        "model.layers.0.mlp.up_proj.weight": (0, 6912, 9216),
        "model.layers.0.mlp.down_proj.weight": (1, 6912, 9216),
        "model.layers.1.mlp.shared_experts.gate_proj.weight": (0, 768, 1024),
        "model.layers.1.mlp.shared_experts.up_proj.weight": (0, 768, 1024),
        "model.layers.1.mlp.shared_experts.down_proj.weight": (1, 768, 1024),
    } | {
        f"model.layers.{layer}.self_attn.{name}.weight": place
        for layer in (0, 1)
        for name, place in (
            ("q_b_proj", (0, 4608, 6144)),
            ("kv_b_proj", (0, 6144, 8192)),
            ("o_proj", (1, 3072, 4096)),
        )
    }


def test_shares_are_whole(full_plan: PlanOf) -> None:
    for tp in (1, 8, 64):
        for unit in full_plan(tp, 1).units:
            for tensor in unit.source.plain:
                local = tensor.cut.local_shape(tensor.shape)
                if tensor.cut.axis is None:
                    assert local == tensor.shape
                else:
                    assert math.prod(local) * tp == math.prod(tensor.shape)
