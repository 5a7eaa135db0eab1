"""How a tensor of the format comes to be, stated again from schemas/README.md and the published model, for
the checks alone.

A manifest that is consistent in itself can still be wrong (gate and up exchanged in bytes and in text). So
the checks compare it with this, and import nothing from planning.
"""

from __future__ import annotations

from marlin_convert.documents.manifest import Origin

_COLUMN = ("self_attn.q_b_proj.weight", "self_attn.kv_b_proj.weight", "gate_proj.weight", "up_proj.weight")
_ROW = ("self_attn.o_proj.weight", "down_proj.weight")
_VOCAB = ("embed_tokens.weight", "lm_head.weight")
_STACKED = {
    "w13_weight_packed": (0, ("gate_proj.weight_packed", "up_proj.weight_packed")),
    "w13_weight_scale": (0, ("gate_proj.weight_scale", "up_proj.weight_scale")),
    "w2_weight_packed": (1, ("down_proj.weight_packed",)),
    "w2_weight_scale": (1, ("down_proj.weight_scale",)),
}


def expected_origin(name: str) -> Origin:
    """The origin a stored tensor of this name must have."""
    prefix, _, last = name.rpartition(".")
    if prefix.endswith(".mlp.experts") and last in _STACKED:
        axis, sources = _STACKED[last]
        return Origin(
            name, "experts", axis, "moe_tp", tuple(f"{prefix}.{{expert}}.{source}" for source in sources)
        )
    if name.startswith(("vision_tower.", "mm_projector.")):
        return Origin(name, "common", None, None, (name,))
    for rule, axis, endings in (("column", 0, _COLUMN), ("row", 1, _ROW), ("vocab", 0, _VOCAB)):
        if name.endswith(endings):
            return Origin(name, rule, axis, "tp", (name,))
    return Origin(name, "replicate", None, None, (name,))


def fused_pairs() -> tuple[tuple[str, str, str], ...]:
    """Neighbours that may be read as one: the two endings of their names, and that of the view."""
    return (
        (
            "self_attn.q_a_proj.weight",
            "self_attn.kv_a_proj_with_mqa.weight",
            "self_attn.fused_qkv_a_proj_with_mqa.weight",
        ),
        ("gate_proj.weight", "up_proj.weight", "gate_up_proj.weight"),
    )


def expert_owner(expert: int, experts: int, tp: int, ep: int) -> range:
    """The ranks that hold slices of an expert, in slice order."""
    group = expert // (experts // ep)
    return range(group * (tp // ep), (group + 1) * (tp // ep))
