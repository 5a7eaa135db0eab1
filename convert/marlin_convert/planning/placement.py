"""An expert map held to the model that it is for."""

from __future__ import annotations

from collections.abc import Sequence

from marlin_convert.documents.bounds import MAX_SLOTS
from marlin_convert.documents.expert_map import ExpertMap
from marlin_convert.errors import UsageError
from marlin_convert.models.family import ModelConfig
from marlin_convert.slicing import Placement


def placement_of(found: ExpertMap, model: ModelConfig, ep: int) -> Placement | None:
    """The placement that a map asks for; None where every expert is in the slot of its number. Raises
    UsageError for a map that cannot be of this model.
    """
    rows, moe_layers = found.physical_to_logical_map, sorted(model.moe_layers)
    slots = len(rows[0])
    if odd := [i for i, row in enumerate(rows) if len(row) != slots]:
        raise UsageError(
            f"--expert-map: row {odd[0]} has {len(rows[odd[0]])} slots, row 0 has {slots}; all layers must"
            " have as many"
        )
    if len(rows) not in (model.layers, len(moe_layers)):
        raise UsageError(
            f"--expert-map: {len(rows)} rows, the model has {model.layers} layers, of which"
            f" {len(moe_layers)} have routed experts; give a row for each of either"
        )
    if slots % ep:
        raise UsageError(
            f"--expert-map: {slots} slots are not a multiple of --ep {ep}; each group has as many"
        )
    if (total := slots * len(moe_layers)) > MAX_SLOTS:
        raise UsageError(f"--expert-map: {total} slots in all layers, at most {MAX_SLOTS} are supported")
    of_layer = (
        dict(enumerate(rows)) if len(rows) == model.layers else dict(zip(moe_layers, rows, strict=True))
    )
    for layer in moe_layers:
        _refuse_odd_row(layer, of_layer[layer], model.experts)
    if all(of_layer[layer] == tuple(range(model.experts)) for layer in moe_layers):
        return None
    return Placement(slots, {layer: of_layer[layer] for layer in moe_layers})


def _refuse_odd_row(layer: int, row: Sequence[int], experts: int) -> None:
    """Raise UsageError where a layer's row names an expert that is not there, or leaves one out."""
    if outside := [expert for expert in row if expert >= experts]:
        raise UsageError(
            f"--expert-map: layer {layer} has expert {outside[0]} in slot {row.index(outside[0])}; they run"
            f" from 0 to {experts - 1}"
        )
    if lost := set(range(experts)) - set(row):
        raise UsageError(
            f"--expert-map: layer {layer} has expert {min(lost)} in no slot; each must be in one at least"
            + (f" ({len(lost)} are in none)" if len(lost) > 1 else "")
        )
