"""From which source tensors a stored tensor is made, and how: stated again from schemas/README.md and the
facts of its family, for the checks alone.

A manifest that is consistent in itself can still be wrong (gate and up exchanged in bytes and in text). So
the checks compare it with this. They import nothing from planning, and of a family's module they use the
facts at its end, which share nothing with the rules that a conversion goes by.
"""

from __future__ import annotations

from marlin_convert.checks.split import Split
from marlin_convert.documents.manifest import Origin
from marlin_convert.models.family import ModelConfig

_STACKED = {
    "w13_weight_packed": (0, ("gate_proj.weight_packed", "up_proj.weight_packed")),
    "w13_weight_scale": (0, ("gate_proj.weight_scale", "up_proj.weight_scale")),
    "w2_weight_packed": (1, ("down_proj.weight_packed",)),
    "w2_weight_scale": (1, ("down_proj.weight_scale",)),
}


def expected_origin(name: str, model: ModelConfig, split: Split) -> Origin:
    """The origin a stored tensor of this name must have."""
    facts = model.family.facts
    prefix, _, last = name.rpartition(".")
    if prefix.endswith(f".{facts.experts}") and last in _STACKED:
        axis, sources = _STACKED[last]
        return Origin(
            name, "experts", axis, "moe_tp", tuple(f"{prefix}.{{expert}}.{source}" for source in sources)
        )
    if name.startswith(facts.common):
        return Origin(name, "common", None, None, (name,))
    for rule, axis, endings in (
        ("column", 0, facts.columns),
        ("row", 1, facts.rows),
        ("vocab", 0, facts.vocab),
    ):
        if name.endswith(endings):
            whole = split.attn_tp is None or rule == "vocab" or any(part in name for part in facts.by_all)
            parts = "tp" if whole else "attn_tp"
            return Origin(name, rule, axis, parts, (name,), _replicas(name, model, split.group(parts)))
    return Origin(name, "replicate", None, None, (name,))


def _replicas(name: str, model: ModelConfig, tp: int) -> int:
    """On how many ranks in a row each slice is: more than one where there are fewer slices than ranks."""
    shared = model.family.facts.shared
    slices = next((model.text[key] for ending, key in shared.items() if name.endswith(ending)), tp)
    return int(tp // slices) if slices and tp % slices == 0 else 1
