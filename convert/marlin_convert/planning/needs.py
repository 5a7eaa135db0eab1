"""Which source files each unit of a plan reads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from marlin_convert.checkpoint.source import Source
from marlin_convert.planning.output_plan import OutputPlan, OutputUnit
from marlin_convert.planning.units import expert_tensors


def source_tensors(plan: OutputPlan, unit: OutputUnit) -> Iterator[str]:
    """The source tensors a unit reads, in the order it needs them."""
    yield from _routed(plan, unit)
    yield from (tensor.name for tensor in unit.source.plain)


def unit_files(source: Source, plan: OutputPlan, unit: OutputUnit) -> tuple[str, ...]:
    """The weight files a unit reads, in the order it needs them first."""
    return tuple(dict.fromkeys(source.tensors[name].file for name in source_tensors(plan, unit)))


def _routed(plan: OutputPlan, unit: OutputUnit) -> Iterable[str]:
    """The tensors of the routed experts that some rank of the plan owns."""
    if unit.source.experts_prefix is None:
        return
    owned = dict.fromkeys(expert for rank in plan.ranks for expert in plan.held(unit, rank))
    for expert in owned:
        yield from (t.name for t in expert_tensors(unit.source.experts_prefix, expert, plan.shape))


def needs(source: Source, plan: OutputPlan, units: Iterable[OutputUnit]) -> dict[str, tuple[str, ...]]:
    """Per unit its files, in the order in which the units are made."""
    return {unit.name: unit_files(source, plan, unit) for unit in units}
