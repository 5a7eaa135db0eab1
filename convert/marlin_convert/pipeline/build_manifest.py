"""manifest.json and the small documents around it: built from the plan and the records, the same bytes for
the same conversion.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from marlin_convert.checkpoint.source import Source
from marlin_convert.documents.codec import NO_DIGEST, write
from marlin_convert.documents.engine_files import Index, IndexMetadata
from marlin_convert.documents.manifest import (
    FusedTensor,
    ListedFile,
    Manifest,
    ManifestSource,
    Origin,
    Parallel,
    Shard,
    StoredLayout,
    StoredTensor,
    Unit,
)
from marlin_convert.documents.records import FinishedFile, FinishedUnit
from marlin_convert.kernels.quant_types import kernel_type
from marlin_convert.models.family import ModelConfig
from marlin_convert.pipeline.target import Target
from marlin_convert.planning.output_plan import OutputPlan, OutputUnit, Stack
from marlin_convert.planning.units import PlainTensor, expert_tensors
from marlin_convert.storage.files import digest
from marlin_convert.storage.shard_file import FORMAT, format_version, is_filler

#: unit, rank, stacked tensor
DigestPlace = tuple[str, int | None, str]


def rank_index(units: list[OutputUnit]) -> bytes:
    """model.safetensors.index.json of a rank (or of common/): fillers are in neither total nor map."""
    placed = [(unit.name, p) for unit in units for p in unit.files.tensors if not is_filler(p.spec.name)]
    total = sum(p.spec.size for _, p in placed)
    weight_map = {p.spec.name: f"{unit}.safetensors" for unit, p in placed}
    return write(Index(IndexMetadata(total), weight_map), indent=1)


def model_constants(model: ModelConfig) -> dict[str, Any]:
    """The scalars of the text model's config, flat (`rope_scaling.factor`), and what its family adds, for an
    engine that reads nothing else.
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
    return constants | model.family.constants(model.text)


def digest_offsets(plan: OutputPlan) -> dict[DigestPlace, int]:
    """Where the digests of each stacked tensor begin in digests.bin: 16 bytes an expert, in file order."""
    offsets, end = {}, 0
    for unit in plan.units:
        for rank in unit.ranks:
            for stack in unit.stacked:
                offsets[unit.name, rank, stack.name] = end
                end += 16 * stack.experts
    return offsets


def digest_file(plan: OutputPlan, records: Mapping[str, FinishedUnit]) -> bytes:
    """digests.bin."""
    known = {
        (unit.name, each.rank, each.tensor): each.digests
        for unit in records.values()
        for each in unit.experts
    }
    return b"".join(known[place] for place in digest_offsets(plan))


def source_digests(source: Source, records: Mapping[str, FinishedUnit]) -> bytes:
    """source/digests.bin: files in name order, tensors in file order; zeros for tensors outside the
    conversion's scope.
    """
    known = {name: value for record in records.values() for name, value in record.source.items()}
    return b"".join(
        bytes.fromhex(known.get(entry.name, NO_DIGEST))
        for header in source.headers
        for entry in header.tensors
    )


def build_manifest(
    target: Target, records: Mapping[str, FinishedUnit], files: Sequence[ListedFile], checks: str
) -> Manifest:
    """The manifest, without its digest."""
    source, identity, plan = target.source, target.identity, target.plan
    offsets = digest_offsets(plan)
    return Manifest(
        format=FORMAT,
        format_version=format_version(plan.topology),
        digest=NO_DIGEST,
        layout=_layout(plan),
        checks=checks,
        source=ManifestSource(
            id=identity.id,
            tensors=len(source.tensors),
            payload_bytes=source.payload_bytes,
            repo=identity.repo,
            revision=identity.revision,
            files=identity.files,
            config=identity.config,
            quantization_config_at=source.model.quantization.found_at,
            not_copied=tuple(source.left_out),
        ),
        parallel=_parallel(plan),
        ranks=tuple(plan.ranks),
        layers=tuple(plan.layers),
        complete=plan.complete,
        model=model_constants(source.model),
        units=tuple(_unit(plan, unit) for unit in plan.units),
        shards=tuple(
            _shard(plan, unit, file, offsets) for unit in plan.units for file in records[unit.name].files
        ),
        files=tuple(sorted(files, key=lambda file: file.path)),
    )


def _layout(plan: OutputPlan) -> StoredLayout:
    scheme, kernel = plan.shape.scheme, kernel_type(plan.layout.id)
    name, number = (None, None) if kernel is None else (kernel.name, kernel.id)
    return StoredLayout(plan.layout.id, scheme.num_bits, scheme.group_size, scheme.symmetric, name, number)


def _parallel(plan: OutputPlan) -> Parallel:
    topology, placement = plan.topology, plan.topology.placement
    return Parallel(
        topology.tp,
        topology.ep,
        topology.moe_tp,
        plan.rules,
        plan.padding,
        topology.attn_tp,
        topology.pp,
        plan.stages,
        None if placement is None else placement.slots,
    )


def _unit(plan: OutputPlan, unit: OutputUnit) -> Unit:
    """How each stored tensor of a unit came to be, as patterns."""
    prefix = unit.source.experts_prefix
    origins = {tensor.name: _plain_origin(tensor) for tensor in unit.source.plain}
    checked: tuple[str, ...] = ()
    if prefix is not None:
        origins |= {stack.name: _stacked_origin(plan, prefix, stack) for stack in unit.stacked}
        first = expert_tensors(prefix, 0, plan.shape)
        checked = tuple(_pattern(prefix, tensor.name) for tensor in first if tensor.role is None)
    names = [placed.spec.name for placed in unit.files.tensors if not is_filler(placed.spec.name)]
    placed = None if plan.topology.placement is None or prefix is None else tuple(plan.placed(unit))
    return Unit(unit.name, unit.source.layer, tuple(origins[name] for name in names), checked, placed)


def _plain_origin(tensor: PlainTensor) -> Origin:
    cut = tensor.cut
    parts = None if cut.axis is None else tensor.group
    return Origin(tensor.name, tensor.rule, cut.axis, parts, (tensor.name,), cut.replicas)


def _stacked_origin(plan: OutputPlan, prefix: str, stack: Stack) -> Origin:
    projections, role = stack.tensor.projections, stack.tensor.role
    sources = tuple(f"{prefix}.{{expert}}.{projection}.{role}" for projection in projections)
    return Origin(stack.name, "experts", plan.shape.cut(projections[0]).axis, "moe_tp", sources)


def _pattern(prefix: str, name: str) -> str:
    """The name of expert 0's tensor as that of any expert's."""
    return name.replace(f"{prefix}.0.", f"{prefix}.{{expert}}.")


def _shard(
    plan: OutputPlan, unit: OutputUnit, file: FinishedFile, offsets: Mapping[DigestPlace, int]
) -> Shard:
    tensors = tuple(
        StoredTensor(
            placed.spec.name,
            placed.spec.dtype,
            placed.spec.shape,
            unit.offset(placed.spec.name),
            placed.spec.size,
            file.tensors[placed.spec.name],
            offsets.get((unit.name, file.rank, placed.spec.name)),
        )
        for placed in unit.files.tensors
    )
    joined = bytes.fromhex(file.header + "".join(tensor.digest for tensor in tensors))
    return Shard(
        plan.path(unit, file.rank),
        unit.name,
        file.rank,
        file.size,
        file.header,
        digest(joined).hex(),
        tensors,
        fused_views(unit),
    )


def fused_views(unit: OutputUnit) -> tuple[FusedTensor, ...]:
    """The fused views of a file."""
    views = []
    for view in unit.files.fused:
        members = [unit.places[name].spec for name in view.members]
        shape = (sum(spec.shape[0] for spec in members), *members[0].shape[1:])
        offset = unit.offset(view.members[0])
        views.append(FusedTensor(view.name, members[0].dtype, shape, offset, view.members))
    return tuple(views)
