"""Which source files a unit reads, and how many bytes of them must lie on the disk at a time. Derived from
the plan, stored nowhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from marlin_convert.checkpoint.source import Source
from marlin_convert.planning.output import OutputPlan, OutputUnit
from marlin_convert.planning.rules import expert_tensors

#: files that are fetched beyond the one that is needed now
LOOK_AHEAD = 2


def unit_files(source: Source, plan: OutputPlan, unit: OutputUnit) -> tuple[str, ...]:
    """The weight files a unit reads, in the order it needs them first."""
    files = dict.fromkeys(source.tensors[name].file for name in _routed(plan, unit))
    return tuple(files | dict.fromkeys(source.tensors[tensor.name].file for tensor in unit.source.plain))


def _routed(plan: OutputPlan, unit: OutputUnit) -> Iterable[str]:
    """The tensors of the routed experts that some rank of the plan owns."""
    if unit.source.experts_prefix is None:
        return
    owned = sorted(
        {expert for rank in plan.ranks for expert in plan.topology.expert_range(rank, plan.experts)}
    )
    for expert in owned:
        yield from (name for name, _, _ in expert_tensors(unit.source.experts_prefix, expert, plan.shape))


def needs(source: Source, plan: OutputPlan, units: Iterable[OutputUnit]) -> dict[str, tuple[str, ...]]:
    """Per unit its files, in the order in which the units are made."""
    return {unit.name: unit_files(source, plan, unit) for unit in units}


def fetch_order(needed: Mapping[str, Sequence[str]]) -> list[str]:
    """Every file once, in the order in which it is first needed."""
    return list(dict.fromkeys(file for files in needed.values() for file in files))


def most_at_once(
    needed: Mapping[str, Sequence[str]], sizes: Mapping[str, int], look_ahead: int = LOOK_AHEAD
) -> int:
    """The most bytes of source files that lie there together, where each goes as soon as the last unit that
    needs it is made.

    While a unit is made these are its files, earlier ones that later units need again, and the next ones up
    to `look_ahead` + 1 in all.
    """
    order, units = fetch_order(needed), list(needed.values())
    last = {file: i for i, files in enumerate(units) for file in files}
    fetched: set[str] = set()
    most = 0
    for i, files in enumerate(units):
        fetched |= set(files)
        held = {file for file in fetched if last[file] >= i}
        for file in order:
            if len(held) > look_ahead:
                break
            if file not in fetched:
                fetched.add(file)
                held.add(file)
        most = max(most, sum(sizes[file] for file in held))
    return most
