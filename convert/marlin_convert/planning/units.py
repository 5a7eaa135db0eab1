"""A family's rules expanded for one checkpoint: every tensor there should be, and how it is cut."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal, NamedTuple

from marlin_convert.checkpoint.source import Source
from marlin_convert.errors import SourceError, UsageError
from marlin_convert.layout.protocol import PROJECTIONS, ExpertShape, Role
from marlin_convert.models.family import Kind, ModelConfig, Rule, Scope
from marlin_convert.slicing import Cut, Topology

#: the axis of the source tensor that each kind of rule cuts
AXES: dict[Kind, int | None] = {"column": 0, "vocab": 0, "row": 1, "replicate": None, "common": None}
#: scopes whose tensors follow --attn-tp: attention and the dense layers' MLP. Shared experts, embeddings and
#: head are cut by all ranks
ATTENTION: frozenset[Scope] = frozenset(("layer", "dense"))
#: into how many parts a tensor is cut: the flag's name in the manifest
Group = Literal["tp", "attn_tp"]


@dataclass(frozen=True)
class PlainTensor:
    """A tensor that keeps its name: what is in the source, and how it is cut by which kind of rule, into the
    parts of which group of ranks. `fuse` is the name of the view in which it is offered together with its
    neighbours of the same.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    rule: Kind
    cut: Cut
    group: Group
    fuse: str | None


@dataclass(frozen=True)
class SourceUnit:
    """What one unit of work takes from the source, in load order, and the pipeline stage that has it.
    `experts_prefix` is None where the layer has no routed experts.
    """

    name: str
    layer: int | None
    plain: tuple[PlainTensor, ...]
    stage: int = 0
    experts_at: int = 0
    experts_prefix: str | None = None


class ExpertTensor(NamedTuple):
    """A source tensor of a routed expert; `role` None is weight_shape, which only repeats the geometry."""

    name: str
    expert: int
    projection: str
    role: Role | None
    dtypes: tuple[str, ...]
    shape: tuple[int, ...]


class _ExpertForm(NamedTuple):
    """What a source tensor of every routed expert has in common; `ending` is its name under the expert's."""

    ending: str
    projection: str
    role: Role | None
    dtypes: tuple[str, ...]
    shape: tuple[int, ...]


@cache
def _expert_forms(shape: ExpertShape) -> tuple[_ExpertForm, ...]:
    """The source tensors of a routed expert, made once: there are 200,000 of them."""
    forms, scheme = [], shape.scheme
    for projection in PROJECTIONS:
        for role in scheme.roles:
            sizes = scheme.source_shape(role, *shape.matrix(projection))
            forms.append(_ExpertForm(f"{projection}.{role}", projection, role, (scheme.dtype(role),), sizes))
        forms.append(_ExpertForm(f"{projection}.weight_shape", projection, None, ("I32", "I64"), (2,)))
    return tuple(forms)


def expert_tensors(prefix: str, expert: int, shape: ExpertShape) -> Iterator[ExpertTensor]:
    """The source tensors of one routed expert, in the order in which they are read."""
    for form in _expert_forms(shape):
        name = f"{prefix}.{expert}.{form.ending}"
        yield ExpertTensor(name, expert, form.projection, form.role, form.dtypes, form.shape)


def source_units(source: Source, topology: Topology) -> list[SourceUnit]:
    """The units of a checkpoint, every tensor of it in exactly one of them: `check_tensors` sees to that.

    Raises SourceError for a missing or misshapen tensor that keeps its name (from headers alone), UsageError
    where a rule cannot cut a tensor for these ranks.
    """
    model, units = source.model, []
    stages = _stages(model, topology)
    for stage, layer in ((stage, layer) for stage, layers in enumerate(stages) for layer in layers):
        kind = "moe" if layer in model.moe_layers else "dense"
        plain: list[PlainTensor] = []
        experts_at, experts_prefix = 0, None
        for rule in (rule for rule in model.rules if rule.scope in ("layer", kind)):
            if rule.kind == "experts":
                experts_at, experts_prefix = len(plain), source.layer_prefix(layer) + rule.name
            else:
                plain += _plain(source, rule, source.layer_prefix(layer), topology)
        units.append(SourceUnit(f"layer-{layer:03d}", layer, tuple(plain), stage, experts_at, experts_prefix))
    for name, (prefix, stage, rules) in _beside_layers(source, topology).items():
        if rules:
            found = tuple(tensor for rule in rules for tensor in _plain(source, rule, prefix, topology))
            units.append(SourceUnit(name, None, found, stage))
    return units


def check_tensors(source: Source, units: Sequence[SourceUnit]) -> None:
    """Raise SourceError for a tensor of a routed expert that is missing or misshapen, or one that is in no
    unit. It is the same for all splits, and most of the work.
    """
    seen = {tensor.name for unit in units for tensor in unit.plain}
    for unit in units:
        if unit.experts_prefix is not None:
            _check_experts(source, unit.experts_prefix, seen)
    _refuse_unknown(source, seen)


def _stages(model: ModelConfig, topology: Topology) -> list[range]:
    """The layers of each stage. Raises UsageError where the model cannot have so many."""
    if topology.pp > 1 and not model.family.embeddings:
        raise UsageError(f"--pp {topology.pp}: {model.family.title} has one stage only; leave --pp out")
    try:
        return topology.stages(model.layers)
    except ValueError as error:
        raise UsageError(f"--pp {topology.pp}: {error}; choose a pp of at most {model.layers}") from error


def _beside_layers(source: Source, topology: Topology) -> dict[str, tuple[str, int, list[Rule]]]:
    """The units that are no layers: the prefix of their tensors, the stage that has them, and their rules.
    Where there are stages, the first has the embeddings and the last what comes behind the layers.
    """
    rules = source.model.rules
    top = [rule for rule in rules if rule.scope == "top"]
    common = [rule for rule in rules if rule.scope == "common"]
    if topology.pp == 1:
        return {"top": (source.prefix, 0, top), "common": ("", 0, common)}
    first = source.model.family.embeddings
    return {
        "embed": (source.prefix, 0, [rule for rule in top if rule.name in first]),
        "head": (source.prefix, topology.pp - 1, [rule for rule in top if rule.name not in first]),
        "common": ("", 0, common),
    }


def _plain(source: Source, rule: Rule, prefix: str, topology: Topology) -> list[PlainTensor]:
    name = prefix + rule.name
    found = source.tensors.get(name)
    if found is None:
        if rule.optional:
            return []
        raise SourceError(
            f"{name} is missing: no weight file of the checkpoint has it; fetch the checkpoint again"
        )
    entry, dims = found.entry, source.model.dims
    shape = None if rule.shape is None else tuple(dims[size] for size in rule.shape)
    if shape is None and len(entry.shape) == 1:
        shape = entry.shape
    _check_entry(source, name, rule.dtype, shape)
    apart = topology.attn_tp is not None and rule.scope in ATTENTION
    group: Group = "attn_tp" if apart else "tp"
    parts = topology.attn_tp if apart and topology.attn_tp is not None else topology.tp
    cut = _cut(rule, name, entry.shape, dims[rule.unit] if rule.unit else 1, (group, parts))
    fuse = None if rule.fuse is None else prefix + rule.fuse
    return [PlainTensor(name, entry.dtype, entry.shape, rule.kind, cut, group, fuse)]


def _cut(rule: Rule, name: str, shape: tuple[int, ...], unit: int, group: tuple[Group, int]) -> Cut:
    """How a rule cuts a tensor of `shape` whose axis comes in indivisible `unit`s, for a group of so many
    ranks. Raises UsageError.
    """
    axis, tp = AXES[rule.kind], group[1]
    if axis is None:
        return Cut()
    extent, units = shape[axis], shape[axis] // unit
    if extent % unit == 0 and units % tp == 0:
        return Cut(axis, tp)
    if extent % unit == 0 and rule.shared and tp % units == 0:
        return Cut(axis, units, tp // units)
    what = f"{units} heads of {unit}" if rule.unit else f"{extent} {'columns' if axis else 'rows'}"
    other = f", or a multiple of {units}" if rule.shared else ""
    flag = group[0].replace("_", "-")
    raise UsageError(f"--{flag} {tp} does not divide {name}: {what}; choose a {flag} that does{other}")


def _check_entry(source: Source, name: str, dtypes: tuple[str, ...], shape: tuple[int, ...] | None) -> None:
    file, entry = source.tensors[name]
    if entry.dtype not in dtypes:
        raise SourceError(f"{name} in {file} is {entry.dtype}, expected {' or '.join(dtypes)}")
    if entry.shape != shape:
        want = "one dimension" if shape is None else str(list(shape))
        raise SourceError(
            f"{name} in {file} has the shape {list(entry.shape)}, expected {want} from config.json"
        )


def _check_experts(source: Source, prefix: str, seen: set[str]) -> None:
    model = source.model
    missing, forms = [], _expert_forms(model.expert_shape())
    for expert in range(model.experts):
        for ending, _, _, dtypes, sizes in forms:
            name = f"{prefix}.{expert}.{ending}"
            found = source.tensors.get(name)
            if found is None:
                missing.append(name)
                continue
            seen.add(name)
            if found.entry.shape != sizes or found.entry.dtype not in dtypes:
                _check_entry(source, name, dtypes, sizes)
    if missing:
        many = (
            f" and {len(missing) - 1} more tensors of this layer's {model.experts} experts"
            if len(missing) > 1
            else ""
        )
        raise SourceError(
            f"{missing[0]}{many} missing: no weight file of the checkpoint has it; fetch the checkpoint again"
        )


def _refuse_unknown(source: Source, seen: set[str]) -> None:
    if len(seen) == len(source.tensors):  # of which all seen ones are
        return
    unknown = [name for name in source.tensors if name not in seen]
    first = unknown[0]
    similar = sum(re.sub(r"\d+", "#", name) == re.sub(r"\d+", "#", first) for name in unknown)
    hint = ""
    if first.endswith((".weight_packed", ".weight_zero_point", ".weight_g_idx")):
        hint = ": only routed experts may be quantized, symmetrically and without act-order"
    raise SourceError(
        f"{len(unknown)} tensors have no rule, such as {first} in {source.tensors[first].file} ({similar} of"
        f" that form){hint}; nothing was written, since leaving tensors out silently would be wrong"
    )
