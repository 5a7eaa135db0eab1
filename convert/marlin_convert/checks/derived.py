"""What the manifest says, derived again from what is kept of the source and from the format: a folder whose
digests all fit can still be wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from typing import Any

from marlin_convert.checks.findings import Finding, Verification
from marlin_convert.checks.origins import expected_origin
from marlin_convert.checks.split import Split
from marlin_convert.documents.manifest import FusedTensor, Manifest, Padding, Shard, StoredTensor, Unit
from marlin_convert.kernels.quant_types import kernel_type
from marlin_convert.layout import get_layout, known_layouts
from marlin_convert.models.family import Facts, ModelConfig
from marlin_convert.shards.kept_source import KeptSource
from marlin_convert.storage.shard_file import is_filler


def check_manifest(manifest: Manifest, kept: KeptSource, split: Split, report: Verification) -> set[str]:
    """Everything in the manifest that can be derived. Returns the paths of shards of which it says the right
    things.
    """
    report.add(*(Finding("manifest.json", f"says {what}") for what in _wrong_facts(manifest, kept, split)))
    report.add(*(Finding("digests.bin", what) for what in _wrong_digests(manifest)))
    odd = {unit.name: _wrong_slots(unit, split) for unit in manifest.units if unit.slots is not None}
    layers, right = {unit.name: unit.layer for unit in manifest.units}, set()
    units = {unit.name: {origin.tensor for origin in unit.tensors} for unit in manifest.units}
    for name, problem in odd.items():
        if problem is not None:
            report.add(Finding("manifest.json", f"says of {name} {problem}", layers[name]))
    for shard in manifest.shards:
        problems = list(_wrong_shard(split, kept, shard, units[shard.unit]))
        report.add(
            *(
                Finding(shard.path, f"the manifest says {what}", layers.get(shard.unit), rank=shard.rank)
                for what in problems
            )
        )
        if not problems and odd.get(shard.unit) is None:
            right.add(shard.path)
    return right


def _wrong_facts(manifest: Manifest, kept: KeptSource, split: Split) -> Iterator[str]:
    model = kept.model
    expected: dict[str, dict[str, Any]] = {
        "source": {
            "tensors": len(kept.entries),
            "payload_bytes": sum(entry.size for entry in kept.entries.values()),
            "quantization_config_at": model.quantization.found_at,
        },
        "parallel": {"moe_tp": split.moe_tp},
        "layout": {"group_size": model.quantization.group_size},
    }
    if manifest.layout_id in known_layouts():
        shape = model.expert_shape(split.moe_tp)
        padded = get_layout(manifest.layout_id).padded(shape)
        kernel = kernel_type(manifest.layout_id)
        expected["parallel"]["padding"] = None if padded == shape.local else Padding(shape.local, padded)
        expected["layout"] |= {
            "num_bits": shape.scheme.num_bits,
            "symmetric": shape.scheme.symmetric,
            "b_q_type": None if kernel is None else kernel.name,
            "b_q_type_id": None if kernel is None else kernel.id,
        }
    for section, values in expected.items():
        for key, value in values.items():
            if (given := getattr(getattr(manifest, section), key)) != value:
                yield f"{section}.{key} {given}, it must be {value}"
    if manifest.format_version != split.version or split.attn_tp == split.tp:
        apart = f"attn_tp {split.attn_tp}, pp {manifest.parallel.pp} and slots {split.slots}"
        yield f"format_version {manifest.format_version} for {apart}"
    placed = [unit.slots for unit in manifest.units if unit.slots is not None]
    if manifest.complete and placed and all(slots == tuple(range(model.experts)) for slots in placed):
        yield f"slots {split.slots}, but every expert is in the slot of its number, as without a map"
    common = any(name.startswith(model.family.facts.common) for name in kept.entries)
    yield from split.stages.wrong(manifest.parallel, common)
    constants = model_constants(model)
    for key in sorted(constants.keys() | manifest.model.keys()):
        if manifest.model.get(key) != constants.get(key):
            yield (
                f"model.{key} {manifest.model.get(key)}, by the source's config.json it is"
                f" {constants.get(key)}"
            )
    layers = tuple(sorted(unit.layer for unit in manifest.units if unit.layer is not None))
    if manifest.layers != layers:
        yield f"layers {list(manifest.layers)}, but its units are of the layers {list(layers)}"
    beside = set(split.stages.beside)
    whole = len(manifest.ranks) == manifest.tp and beside <= {unit.name for unit in manifest.units}
    if manifest.complete != whole:
        yield (
            f"complete {manifest.complete}, but its ranks and units are {'all' if whole else 'not all'}"
            " there are"
        )


def _wrong_slots(unit: Unit, split: Split) -> str | None:
    """What is wrong with the experts that a layer's slots are said to have."""
    slots = split.placed(unit)
    if outside := [expert for expert in slots if expert >= split.experts]:
        return f"that slot {slots.index(outside[0])} has expert {outside[0]}; they run to {split.experts - 1}"
    if lost := set(range(split.experts)) - set(slots):
        return f"that expert {min(lost)} is in none of its slots"
    return None


def _wrong_digests(manifest: Manifest) -> Iterator[str]:
    """digests.bin has 16 bytes for each expert of each stacked tensor, and each at its place."""
    size = next((file.size for file in manifest.files if file.path == "digests.bin"), 0)
    stacked = [t for shard in manifest.shards for t in shard.tensors if t.experts is not None and t.shape]
    ends = {tensor.name: (tensor.experts or 0) + 16 * tensor.shape[0] for tensor in stacked}
    if size != (expected := sum(16 * tensor.shape[0] for tensor in stacked)):
        yield (
            f"has {size} bytes by the manifest, expected {expected}: 16 for each expert of each stacked"
            " tensor"
        )
    if beyond := [name for name, end in ends.items() if end > size]:
        yield f"has {size} bytes, and the manifest says that digests of {beyond[0]} lie behind them"


def model_constants(model: ModelConfig) -> dict[str, Any]:
    """The constants an engine needs, from the text model's config: all its plain values, one level deep, and
    what its family has besides.
    """
    constants = {
        key: value for key, value in model.text.items() if isinstance(value, (int, float, str, bool))
    }
    for key, section in model.text.items():
        if isinstance(section, Mapping) and not key.endswith("_config"):
            constants |= {
                f"{key}.{inner}": value
                for inner, value in section.items()
                if not isinstance(value, (list, dict))
            }
    return constants | model.family.facts.constants(model.text)


def _wrong_shard(split: Split, kept: KeptSource, shard: Shard, unit: Set[str]) -> Iterator[str]:
    """`unit` are the tensors that each shard of its unit has."""
    folder = split.folder(shard.rank, shard.unit)
    if shard.path != f"{folder}/{shard.unit}.safetensors":
        yield f"it is {shard.unit} of rank {shard.rank}, whose place is {folder}/{shard.unit}.safetensors"
    if (shard.rank is None) != (shard.unit == "common"):
        yield f"{shard.unit} is of rank {shard.rank}"
    tensors = {tensor.name: tensor for tensor in shard.tensors if not is_filler(tensor.name)}
    for name in sorted(tensors.keys() - unit):
        yield f"that it has {name}, which {shard.unit} has not"
    for tensor in tensors.values():
        yield from _wrong_tensor(split, kept, tensor)
    views = sorted(_expected_views(tensors, kept.model.family.facts), key=lambda view: view.name)
    if sorted(shard.fused, key=lambda view: view.name) != views:
        yield (
            f"that its fused views are {[view.name for view in shard.fused]}, by the format"
            f" {[view.name for view in views]} with other places"
        )


def _wrong_tensor(split: Split, kept: KeptSource, tensor: StoredTensor) -> Iterator[str]:
    """dtype and shape against the kept headers. (Shapes of stacked tensors are the layout's and checked with
    their data.)
    """
    origin = expected_origin(tensor.name, kept.model, split)
    stacked = origin.rule == "experts"
    source = kept.entries.get(origin.sources[0].replace("{expert}", "0"))
    if source is None:
        return  # check_coverage reports it
    shape = (
        tensor.shape
        if stacked
        else tuple(
            n // split.slices(origin) if axis == origin.axis else n for axis, n in enumerate(source.shape)
        )
    )
    if (tensor.dtype, tensor.shape) != (source.dtype, shape):
        yield (
            f"that {tensor.name} is {tensor.dtype} {list(tensor.shape)}, it must be {source.dtype}"
            f" {list(shape)}"
        )
    if stacked != (tensor.experts is not None):
        yield f"that {tensor.name} has {'no' if stacked else ''} digests of experts"


def _expected_views(tensors: Mapping[str, StoredTensor], facts: Facts) -> Iterator[FusedTensor]:
    for name, tensor in tensors.items():
        for endings, fused in facts.views:
            if not name.endswith(f".{endings[0]}"):
                continue
            module = name.removesuffix(endings[0])
            members = [tensors[module + ending] for ending in endings if module + ending in tensors]
            if len(members) == len(endings):
                rows = sum(member.shape[0] for member in members)
                names = tuple(member.name for member in members)
                yield FusedTensor(
                    module + fused, tensor.dtype, (rows, *tensor.shape[1:]), tensor.offset, names
                )
