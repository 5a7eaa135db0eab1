"""manifest.json and the small documents around it: built from the plan and the records, the same bytes for
the same conversion.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from marlin_convert.checkpoint.config import ModelConfig
from marlin_convert.checkpoint.identity import SourceIdentity
from marlin_convert.checkpoint.source import Source
from marlin_convert.files import digest
from marlin_convert.planning.output import OutputPlan, OutputUnit
from marlin_convert.planning.rules import PlainTensor, expert_tensors, rules_digest
from marlin_convert.shards.finished import FinishedUnit
from marlin_convert.shards.format import is_filler
from marlin_convert.shards.manifest import sealed


def rank_index(units: list[OutputUnit]) -> bytes:
    """model.safetensors.index.json of a rank (or of common/): fillers are in neither total nor map."""
    placed = [(unit.name, p) for unit in units for p in unit.files.tensors if not is_filler(p.spec.name)]
    total = sum(p.spec.size for _, p in placed)
    weight_map = {p.spec.name: f"{unit}.safetensors" for unit, p in placed}
    return json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=1).encode("ascii")


def model_constants(model: ModelConfig) -> dict[str, Any]:
    """The scalars of the text model's config, flat (`rope_scaling.factor`), for an engine that reads nothing
    else.
    """
    constants: dict[str, Any] = {}
    for key, value in sorted(model.text.items()):
        if isinstance(value, Mapping) and key != "quantization_config" and not key.endswith("_config"):
            constants |= {
                f"{key}.{inner}": scalar
                for inner, scalar in sorted(value.items())
                if not isinstance(scalar, (list, dict))
            }
        elif isinstance(value, (int, float, str, bool)):
            constants[key] = value
    return constants | {"softmax_scale": softmax_scale(model.text)}


def softmax_scale(text: Mapping[str, Any]) -> float:
    """The attention's softmax scale: 1/sqrt(nope + rope), times the square of YaRN's magnitude where
    mscale_all_dim is given.
    """
    scale = 1.0 / math.sqrt(text["qk_nope_head_dim"] + text["qk_rope_head_dim"])
    rope = text.get("rope_scaling") or {}
    factor, all_dim = rope.get("factor", 1), rope.get("mscale_all_dim", 0)
    if all_dim and factor > 1:
        scale *= (0.1 * all_dim * math.log(factor) + 1.0) ** 2
    return scale


def digest_file(
    plan: OutputPlan, records: Mapping[str, FinishedUnit]
) -> tuple[bytes, dict[tuple[str, int | None, str], int]]:
    """digests.bin, and where each stacked tensor's digests begin in it."""
    blob, offsets = bytearray(), {}
    for unit in plan.units:
        for rank in unit.ranks:
            for tensor in unit.stacked:
                offsets[unit.name, rank, tensor.name] = len(blob)
                blob += records[unit.name].experts[rank, tensor.name]
    return bytes(blob), offsets


def source_digests(source: Source, records: Mapping[str, FinishedUnit]) -> bytes:
    """source/digests.bin: files in name order, tensors in file order; zeros for tensors outside the
    conversion's scope.
    """
    known = {name: value for record in records.values() for name, value in record.source.items()}
    return b"".join(known.get(entry.name, bytes(16)) for header in source.headers for entry in header.tensors)


def build_manifest(
    source: Source,
    identity: SourceIdentity,
    plan: OutputPlan,
    records: Mapping[str, FinishedUnit],
    offsets: Mapping[tuple[str, int | None, str], int],
    files: list[dict[str, Any]],
    checks: str,
) -> bytes:
    """The manifest, sealed."""
    topology, shape = plan.topology, plan.shape
    padded = plan.layout.padded(shape)
    return sealed(
        {
            "layout": {
                "id": plan.layout.id,
                "num_bits": plan.layout.num_bits,
                "group_size": shape.group_size,
                "symmetric": plan.layout.symmetric,
                "b_q_type": plan.layout.b_q_type[0],
                "b_q_type_id": plan.layout.b_q_type[1],
            },
            "checks": checks,
            "source": {
                "id": identity.id,
                "tensors": len(source.tensors),
                "payload_bytes": source.payload_bytes,
                **identity.as_json(),
                "quantization_config_at": source.model.quantization.found_at,
                "not_copied": list(source.left_out),
            },
            "parallel": {
                "tp": topology.tp,
                "ep": topology.ep,
                "moe_tp": topology.moe_tp,
                "rules": rules_digest(),
                "padding": (
                    None if padded == shape.local else {"moe_intermediate": shape.local, "padded": padded}
                ),
            },
            "ranks": list(plan.ranks),
            "layers": list(plan.layers),
            "complete": plan.complete,
            "model": model_constants(source.model),
            "units": [_unit_entry(plan, unit) for unit in plan.units],
            "shards": [
                _shard_entry(plan, unit, records[unit.name], i, offsets)
                for unit in plan.units
                for i in range(len(unit.ranks))
            ],
            "files": sorted(files, key=lambda file: str(file["path"])),
        }
    )


def _unit_entry(plan: OutputPlan, unit: OutputUnit) -> dict[str, Any]:
    """How each stored tensor of a unit came to be, as patterns."""
    by_name = {tensor.name: tensor for tensor in unit.source.plain}
    tensors, checked = [], []
    for placed in unit.files.tensors:
        name = placed.spec.name
        if name in by_name:
            tensors.append(_plain_entry(by_name[name]))
        elif not is_filler(name):
            tensors.append(_stacked_entry(plan, unit, name))
    if unit.source.experts_prefix is not None:
        names = [
            name
            for name, _, _ in expert_tensors(unit.source.experts_prefix, 0, plan.shape)
            if name.endswith("weight_shape")
        ]
        checked = [name.replace(".experts.0.", ".experts.{expert}.") for name in names]
    return {"name": unit.name, "layer": unit.source.layer, "tensors": tensors, "checked": checked}


def _plain_entry(tensor: PlainTensor) -> dict[str, Any]:
    cut = tensor.cut
    return {
        "tensor": tensor.name,
        "rule": tensor.rule,
        "axis": cut.axis,
        "parts": None if cut.axis is None else "tp",
        **({"replicas": cut.replicas} if cut.replicas > 1 else {}),
        "from": [tensor.name],
    }


def _stacked_entry(plan: OutputPlan, unit: OutputUnit, name: str) -> dict[str, Any]:
    prefix = f"{unit.source.experts_prefix}."
    kind = "weight_packed" if name.endswith("packed") else "weight_scale"
    projections = ("down_proj",) if name.startswith(prefix + "w2_") else ("gate_proj", "up_proj")
    return {
        "tensor": name,
        "rule": "experts",
        "axis": plan.shape.axis(projections[0]),
        "parts": "moe_tp",
        "from": [f"{prefix}{{expert}}.{projection}.{kind}" for projection in projections],
    }


def _shard_entry(
    plan: OutputPlan,
    unit: OutputUnit,
    record: FinishedUnit,
    i: int,
    offsets: Mapping[tuple[str, int | None, str], int],
) -> dict[str, Any]:
    file, rank = record.files[i], unit.ranks[i]
    tensors = []
    for placed in unit.files.tensors:
        spec = placed.spec
        entry = {
            "name": spec.name,
            "dtype": spec.dtype,
            "shape": list(spec.shape),
            "offset": unit.data_start + placed.offset,
            "size": spec.size,
            "digest": file.tensors[spec.name],
        }
        if (unit.name, rank, spec.name) in offsets:
            entry["experts"] = offsets[unit.name, rank, spec.name]
        tensors.append(entry)
    joined = bytes.fromhex(
        file.header + "".join(file.tensors[placed.spec.name] for placed in unit.files.tensors)
    )
    return {
        "path": plan.path(unit, rank),
        "unit": unit.name,
        "rank": rank,
        "size": file.size,
        "header": file.header,
        "digest": digest(joined).hex(),
        "tensors": tensors,
        "fused": fused_views(unit),
    }


def fused_views(unit: OutputUnit) -> list[dict[str, Any]]:
    """The fused views of a file."""
    views = []
    for view in unit.files.fused:
        members = [unit.places[name].spec for name in view.members]
        rows = sum(spec.shape[0] for spec in members)
        views.append(
            {
                "name": view.name,
                "dtype": members[0].dtype,
                "shape": [rows, *members[0].shape[1:]],
                "offset": unit.offset(view.members[0]),
                "members": list(view.members),
            }
        )
    return views
