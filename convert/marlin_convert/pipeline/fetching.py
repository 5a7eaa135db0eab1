"""How a conversion's source files come: all at hand in a folder, or staged from the hub as units need
them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from marlin_convert.checkpoint.hub import HubStore
from marlin_convert.checkpoint.source import Source
from marlin_convert.checkpoint.staging import AtHand, Stager, Supply, still_to_fetch
from marlin_convert.pipeline.records import WORK
from marlin_convert.planning.needs import LOOK_AHEAD, fetch_order, most_at_once, needs
from marlin_convert.planning.output import OutputPlan, OutputUnit


@dataclass(frozen=True)
class Fetching:
    """The supply of a run, and the disk space it takes: `room` more bytes at `place`."""

    supply: Supply
    place: Path
    room: int


def fetching(
    source: Source,
    plan: OutputPlan,
    left: Sequence[OutputUnit],
    out: Path,
    progress: Callable[[int, int], None] | None,
) -> Fetching:
    """How the files that the units in `left` read will come. Nothing is fetched yet."""
    if not isinstance(source.store, HubStore):
        return Fetching(AtHand(), out, 0)
    store, staging = source.store, (out / WORK / "staging").resolve()
    needed = needs(source, plan, left)
    supply = Stager(store, needed, staging, store.options.free_source, LOOK_AHEAD, progress)
    if store.options.free_source:
        sizes = {
            name: 0 if store.find(name, None) else store.files[name].size for name in fetch_order(needed)
        }
        there = sum(path.stat().st_size for path in staging.glob("*") if path.name in sizes)
        return Fetching(supply, out, max(most_at_once(needed, sizes) - there, 0))
    return Fetching(supply, store.place, still_to_fetch(store, fetch_order(needed), staging))
