"""The output, planned from headers alone: every file of every rank with every tensor's place."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from marlin_convert.arguments import plain, refuse_odd
from marlin_convert.checkpoint.source import Source
from marlin_convert.documents.bounds import LISTED, MAX_PLACED, MAX_STORED, RECORD
from marlin_convert.documents.expert_map import ExpertMap, read_expert_map
from marlin_convert.documents.manifest import Padding, PipelineStage
from marlin_convert.errors import SourceError, UsageError
from marlin_convert.layout import DEFAULT_LAYOUT, get_layout, known_layouts
from marlin_convert.layout.protocol import ExpertShape, Layout, StackedTensor
from marlin_convert.models.family import rules_digest
from marlin_convert.planning.offers import offers_of
from marlin_convert.planning.placement import placement_of
from marlin_convert.planning.units import SourceUnit, check_tensors, source_units
from marlin_convert.slicing import Topology
from marlin_convert.storage.shard_file import (
    FileLayout,
    Place,
    Placed,
    TensorSpec,
    data_start,
    is_filler,
    lay_out,
    metadata_of,
)

#: the length of a real source id; plans made before the source is sampled stand in this
NO_ID = "0" * 32


@dataclass(frozen=True)
class Options:
    """What decides the bytes of the output. `layers` and `ranks` None mean all."""

    tp: int
    ep: int = 1
    attn_tp: int | None = None
    pp: int = 1
    layers: tuple[int, ...] | None = None
    ranks: tuple[int, ...] | None = None
    layout: str = DEFAULT_LAYOUT
    expert_map: ExpertMap | None = None

    @staticmethod
    def of(
        topology: tuple[int, int, int | None, int],
        layers: Sequence[int] | None,
        ranks: Sequence[int] | None,
        layout: str | None,
        expert_map: str | os.PathLike[str] | None = None,
    ) -> Options:
        """Options as the verbs take them: tp, ep, attn_tp and pp; `layout` None is the default one,
        `expert_map` a file. Raises UsageError for what cannot be meant.
        """
        tp, ep, attn_tp, pp = topology
        lists, places = {"layers": layers, "ranks": ranks}, {"expert_map": expert_map}
        refuse_odd(tp=tp, ep=ep, attn_tp=attn_tp, pp=pp, lists=lists, places=places)
        placed = None if expert_map is None else read_expert_map(Path(expert_map))
        wanted, ranked = (None if each is None else tuple(map(int, each)) for each in (layers, ranks))
        whole = int(tp), int(ep), plain(attn_tp), int(pp)
        return Options(*whole, wanted, ranked, layout or DEFAULT_LAYOUT, placed)


@dataclass(frozen=True)
class Stack:
    """A stacked tensor of a unit's `experts` local experts, under its full name."""

    name: str
    experts: int
    tensor: StackedTensor

    @property
    def spec(self) -> TensorSpec:
        """As it stands in a file: [E, *shape]."""
        return TensorSpec(self.name, self.tensor.dtype, (self.experts, *self.tensor.shape))

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert."""
        return self.spec.size // self.experts


@dataclass(frozen=True)
class OutputUnit:
    """All ranks' files of one source unit; they share one layout."""

    source: SourceUnit
    files: FileLayout
    data_start: int
    stacked: tuple[Stack, ...]
    ranks: tuple[int | None, ...]
    places: dict[str, Placed] = field(compare=False)

    @property
    def name(self) -> str:
        """`layer-001`, `top` or `common`; `embed` and `head` in place of `top` where there are stages."""
        return self.source.name

    @property
    def file_size(self) -> int:
        """Bytes of each file."""
        return self.data_start + self.files.data_size

    def offset(self, name: str) -> int:
        """Where a stored tensor begins, from the start of the file."""
        return self.data_start + self.places[name].offset


@dataclass(frozen=True, repr=False)
class OutputPlan:
    """Everything that will be written."""

    options: Options
    topology: Topology
    layout: Layout
    shape: ExpertShape
    experts: int
    units: tuple[OutputUnit, ...]
    ranks: tuple[int, ...]
    layers: tuple[int, ...]
    complete: bool
    #: digest of the rules it was made by
    rules: str
    #: what each pipeline stage has of the whole model; empty where there is one only
    stages: tuple[PipelineStage, ...] = ()

    def __repr__(self) -> str:
        return f"OutputPlan({self.options!r}, units={len(self.units)}, bytes={self.total_bytes})"

    def path(self, unit: OutputUnit, rank: int | None) -> str:
        """A shard's path inside OUT."""
        return f"{self.folder(unit, rank)}/{unit.name}.safetensors"

    def folder(self, unit: OutputUnit, rank: int | None) -> str:
        """The folder of a shard, inside OUT: of its rank, in that of its stage where there are stages."""
        folder = "common" if rank is None else rank_folder(rank, self.topology.tp)
        if self.topology.pp == 1:
            return folder
        return f"{numbered('stage', unit.source.stage, self.topology.pp)}/{folder}"

    @property
    def folders(self) -> list[str]:
        """The folders of all shards, inside OUT, each after the one it lies in."""
        found = {self.folder(unit, rank) for unit in self.units for rank in unit.ranks}
        return sorted(found | {above for folder in found if (above := folder.rpartition("/")[0])})

    def placed(self, unit: OutputUnit) -> Sequence[int]:
        """The routed expert in each slot of a unit; empty where it has none."""
        if unit.source.experts_prefix is None or unit.source.layer is None:
            return ()
        return self.topology.placed(unit.source.layer, self.experts)

    def held(self, unit: OutputUnit, rank: int) -> Sequence[int]:
        """The routed experts in a rank's slots of a unit, in their order; empty where it has none."""
        return _held(self.topology, unit.source, rank, self.experts)

    def metadata(self, unit: OutputUnit, rank: int | None, source_id: str) -> dict[str, str]:
        """The identity in a shard's header."""
        return _metadata(source_id, self.layout, self.topology, unit.source, rank, self.experts)

    @property
    def total_bytes(self) -> int:
        """Bytes of all shard files."""
        return sum(unit.file_size * len(unit.ranks) for unit in self.units)

    @property
    def padding(self) -> Padding | None:
        """What a rank's slice of an expert is padded to; None where it is not."""
        padded = self.layout.padded(self.shape)
        return None if padded == self.shape.local else Padding(self.shape.local, padded)

    def rank_bytes(self) -> int:
        """Bytes of the tensors one rank loads, in the stage with the most (no fillers, no headers)."""
        stages = Counter[int]()
        for unit in self.units:
            if unit.name != "common":
                placed = [p.spec for p in unit.files.tensors if not is_filler(p.spec.name)]
                stages[unit.source.stage] += sum(spec.size for spec in placed)
        return max(stages.values(), default=0)


def rank_folder(rank: int, tp: int) -> str:
    """The folder of a rank, in OUT or in that of its stage."""
    return numbered("rank", rank, tp)


def numbered(what: str, number: int, count: int) -> str:
    """A folder's name: `rank-03-of-08`."""
    digits = max(2, len(str(count)))
    return f"{what}-{number:0{digits}d}-of-{count:0{digits}d}"


def plan_output(source: Source, options: Options) -> OutputPlan:
    """Plan the output. Raises SourceError for a source that is not whole, UsageError for a request that
    cannot be met.
    """
    try:
        made, units = _plan(source, options)
    except UsageError as error:
        asked = replace(options, layers=None, ranks=None)
        if options.layout not in known_layouts() or (options != asked and _works(source, asked)):
            raise  # it is not for the split
        offers = offers_of(asked, partial(_works, source))
        raise UsageError("; ".join([str(error), *offers])) from error
    check_tensors(source, units)
    return made


def _works(source: Source, options: Options) -> bool:
    """Whether a checkpoint can be split so."""
    try:
        _plan(source, options)
    except UsageError:
        return False
    return True


def _plan(source: Source, options: Options) -> tuple[OutputPlan, list[SourceUnit]]:
    """The plan, and all units of the source, which are not all in it."""
    topology = Topology.of(options.tp, options.ep, options.attn_tp, options.pp)
    layout, model = get_layout(options.layout), source.model
    if options.expert_map is not None:
        topology = replace(topology, placement=placement_of(options.expert_map, model, topology.ep))
    slots = model.experts if topology.placement is None else topology.placement.slots
    if slots % topology.ep:
        raise UsageError(f"--ep {topology.ep} does not divide the {model.experts} routed experts")
    shape = model.expert_shape(topology.moe_tp)
    if (reason := layout.validate(shape)) is not None:
        raise UsageError(f"--tp {topology.tp} --ep {topology.ep}: {reason}")
    ranks = _scope("rank", options.ranks, topology.tp)
    layers = _scope("layer", options.layers, model.layers)
    every = source_units(source, topology)
    units = [
        _unit(unit, layout, shape, topology, (model.experts, slots // topology.ep), ranks)
        for unit in every
        if _in_scope(unit, options.layers, layers)
    ]
    _refuse_more_than_documents_hold(units)
    complete = len(ranks) == topology.tp and options.layers is None
    made = OutputPlan(
        options=options,
        topology=topology,
        layout=layout,
        shape=shape,
        experts=model.experts,
        units=tuple(units),
        ranks=ranks,
        layers=layers,
        complete=complete,
        rules=rules_digest(model.rules),
        stages=tuple(_stage(every, stage) for stage in range(topology.pp)) if topology.pp > 1 else (),
    )
    return made, every


def _stage(units: Sequence[SourceUnit], stage: int) -> PipelineStage:
    here = [unit for unit in units if unit.stage == stage]
    return PipelineStage(
        tuple(unit.layer for unit in here if unit.layer is not None),
        tuple(unit.name for unit in here if unit.layer is None),
    )


def _refuse_more_than_documents_hold(units: Sequence[OutputUnit]) -> None:
    """Raise UsageError for an output of which a document would be longer than its readers take."""
    tensors = sum(len(unit.files.tensors) * len(unit.ranks) for unit in units)
    placed = sum(unit.stacked[0].experts for unit in units if unit.stacked)
    digests = [16 * len(unit.ranks) * sum(stack.experts for stack in unit.stacked) for unit in units]
    for what, count, most in (
        ("tensors in all shards", tensors, MAX_STORED),
        ("experts of a rank in all layers", placed, MAX_PLACED),
        ("bytes of expert digests", sum(digests), LISTED),
        ("bytes of expert digests in a layer", max(digests, default=0), RECORD // 2),
    ):
        if count > most:
            raise UsageError(
                f"the output would have {count} {what}, at most {most} are supported; make parts of it, with"
                " --ranks or --layers"
            )


def _scope(what: str, wanted: Sequence[int] | None, count: int) -> tuple[int, ...]:
    if wanted is None:
        return tuple(range(count))
    if not wanted:
        raise UsageError(f"--{what}s: none is asked for")
    if outside := [n for n in wanted if not 0 <= n < count]:
        raise UsageError(f"--{what}s: there is no {what} {outside[0]}; they run from 0 to {count - 1}")
    return tuple(sorted(set(wanted)))


def _in_scope(unit: SourceUnit, wanted: Sequence[int] | None, layers: Sequence[int]) -> bool:
    """With --layers only these layers are made; top and common belong to the whole model."""
    return wanted is None or unit.layer in layers


def _unit(
    unit: SourceUnit,
    layout: Layout,
    shape: ExpertShape,
    topology: Topology,
    experts: tuple[int, int],
    ranks: tuple[int, ...],
) -> OutputUnit:
    """`experts`: of the model, and in slots of each rank."""
    total, local = experts
    specs: list[tuple[TensorSpec, str | None]] = [
        (TensorSpec(tensor.name, tensor.dtype, tensor.cut.local_shape(tensor.shape)), tensor.fuse)
        for tensor in unit.plain
    ]
    stacked: tuple[Stack, ...] = ()
    if unit.experts_prefix is not None:
        stacked = tuple(
            Stack(f"{unit.experts_prefix}.{tensor.name}", local, tensor) for tensor in layout.stacked(shape)
        )
        specs[unit.experts_at : unit.experts_at] = [(stack.spec, None) for stack in stacked]
    try:
        files = lay_out(specs)
    except ValueError as error:
        raise SourceError(f"{unit.name}: {error}") from error
    file_ranks: tuple[int | None, ...] = (None,) if unit.name == "common" else ranks
    # no rank's header is longer than the last one's, which has the largest numbers, or that of common/; but
    # for those that name their experts one by one
    longest = (topology.tp - 1,) if topology.placement is None else range(topology.tp)
    metadatas = [_metadata(NO_ID, layout, topology, unit, rank, total) for rank in (None, *longest)]
    return OutputUnit(
        unit,
        files,
        data_start(files, metadatas),
        stacked,
        file_ranks,
        {placed.spec.name: placed for placed in files.tensors},
    )


def _metadata(
    source_id: str, layout: Layout, topology: Topology, unit: SourceUnit, rank: int | None, experts: int
) -> dict[str, str]:
    layer = unit.name if unit.layer is None else str(unit.layer)
    held = _held(topology, unit, rank, experts)
    return metadata_of(source_id, layout.id, topology, Place(rank, layer, unit.stage), held)


def _held(topology: Topology, unit: SourceUnit, rank: int | None, experts: int) -> Sequence[int]:
    """The routed experts in a rank's slots of a unit, in their order; empty where it has none."""
    if rank is None or unit.layer is None or unit.experts_prefix is None:
        return ()
    return topology.held(rank, unit.layer, experts)
