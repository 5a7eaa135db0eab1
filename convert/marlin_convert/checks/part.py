"""What of a converted folder is looked at: all of it, or the files of some ranks and layers, such as those
that one machine has.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from marlin_convert.checks.split import Split
from marlin_convert.documents.manifest import Manifest, Shard, Unit
from marlin_convert.errors import UsageError
from marlin_convert.shares import Share, split_evenly


@dataclass(frozen=True)
class Part:
    """The shards that are looked at; `left_out` are the folders of ranks of which nothing is."""

    manifest: Manifest
    shards: tuple[Shard, ...]
    left_out: frozenset[str]

    @staticmethod
    def of(
        manifest: Manifest,
        layers: Sequence[int] | None,
        ranks: Sequence[int] | None,
        stages: Sequence[int] | None = None,
        share: Share | None = None,
    ) -> Part:
        """Those of some layers (None: of all, with top and common/), some ranks and some pipeline stages
        (None: of all); of these the units of a `share`, by their bytes. Raises UsageError for one that is
        not there.
        """
        on_ranks = set(subset("rank", ranks, manifest.ranks))
        of_layers = set(subset("layer", layers, manifest.layers))
        in_stages = set(subset("stage", stages, range(manifest.parallel.pp)))
        units = {
            unit.name
            for unit in manifest.units
            if (layers is None or unit.layer in of_layers)
            and (stages is None or (manifest.parallel.stage_of(unit) or 0) in in_stages)
        }
        shards = tuple(
            shard
            for shard in manifest.shards
            if shard.unit in units and (shard.rank is None or shard.rank in on_ranks)
        )
        if share is not None:
            shards = _share_of(shards, share)
        every, looked_at = ({shard.folder for shard in each} for each in (manifest.shards, shards))
        return Part(manifest, shards, frozenset(every - looked_at))

    @property
    def whole(self) -> bool:
        """Whether that is all that is there."""
        return len(self.shards) == len(self.manifest.shards)

    def has(self, path: str) -> bool:
        """Whether a listed file that is no shard is looked at."""
        return path.rpartition("/")[0] not in self.left_out

    def of_unit(self, unit: Unit) -> list[Shard]:
        """The files of a unit."""
        return [shard for shard in self.shards if shard.unit == unit.name]

    def tensors(self, unit: Unit, split: Split) -> int:
        """How many source tensors a unit's files are made of, on the ranks that are looked at."""
        ranks = {shard.rank for shard in self.of_unit(unit)}
        owned, placed = split.experts, split.placed(unit)
        # else `check_manifest` has reported it, and nobody can tell whose they are
        if len(placed) % split.ep == 0:
            here = (slot for slot in range(len(placed)) if not ranks.isdisjoint(split.owners(slot)))
            owned = len({placed[slot] for slot in here})
        names = [*(name for origin in unit.tensors for name in origin.sources), *unit.checked]
        return sum(owned if "{expert}" in name else 1 for name in names)


def _share_of(shards: Sequence[Shard], share: Share) -> tuple[Shard, ...]:
    sizes = Counter[str]()
    for shard in shards:
        sizes[shard.unit] += shard.size
    shares = dict(zip(sizes, split_evenly(list(sizes.values()), share.count), strict=True))
    return tuple(shard for shard in shards if shares[shard.unit] == share.index)


def subset(what: str, wanted: Sequence[int] | None, present: Sequence[int]) -> Sequence[int]:
    """Those of `present` that are wanted, all for None. Raises UsageError for one that is not there."""
    if wanted is None:
        return present
    if not len(wanted):
        raise UsageError(f"no {what} is asked for")
    if absent := sorted(set(wanted) - set(present)):
        there = f"there are {present[0]} to {present[-1]}" if present else "there are none at all"
        raise UsageError(f"there is no {what} {absent[0]} to check here; {there}")
    return sorted({int(number) for number in wanted})
