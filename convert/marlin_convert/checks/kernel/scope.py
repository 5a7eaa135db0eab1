"""What of a converted folder the kernel check looks at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from marlin_convert.checks.part import subset
from marlin_convert.checks.split import Split
from marlin_convert.documents.manifest import Manifest, Unit
from marlin_convert.models.family import ModelConfig


@dataclass(frozen=True)
class CheckScope:
    """What of a layer is checked. `experts` None means all; `tokens` empty leaves the fused check out."""

    ranks: tuple[int, ...]
    experts: tuple[int, ...] | None
    tokens: tuple[int, ...]
    top_k: int

    @staticmethod
    def of(
        manifest: Manifest,
        model: ModelConfig,
        ranks: Sequence[int] | None,
        experts: Sequence[int] | None,
        sample: int | None,
        tokens: Sequence[int],
    ) -> CheckScope:
        """What was asked for, None meaning all; `sample` is how many of the experts. Raises UsageError for a
        rank or an expert that is not there.
        """
        every = range(model.experts)
        chosen = None if experts is None else tuple(subset("expert", experts, every))
        if sample is not None:
            chosen = sampled(every if chosen is None else chosen, sample)
        return CheckScope(tuple(subset("rank", ranks, manifest.ranks)), chosen, tuple(tokens), model.top_k)

    def steps(self, manifest: Manifest, split: Split, units: Sequence[Unit]) -> tuple[int, int]:
        """Steps of some layers, and bytes of one: w13 and w2 of each slot of a rank are a step."""
        stacked = [
            tensor for shard in manifest.shards for tensor in shard.tensors if tensor.experts is not None
        ]
        wanted = set(range(split.experts) if self.experts is None else self.experts)
        places = [slot for rank in self.ranks for slot in split.held(rank)]
        pairs = sum(split.placed(unit)[slot] in wanted for unit in units for slot in places)
        one = {tensor.name.rpartition(".")[2]: tensor.size // tensor.shape[0] for tensor in stacked}
        return 2 * pairs, sum(one.values()) // 2


def expert_units(manifest: Manifest, layers: Sequence[int] | None) -> list[Unit]:
    """The layers with routed experts among `layers` (None: all). Raises UsageError for one that is not there
    or has none.
    """
    units = {
        unit.layer: unit
        for unit in manifest.units
        if unit.layer is not None and any(origin.rule == "experts" for origin in unit.tensors)
    }
    wanted = set(subset("layer", layers, list(units)))
    return [unit for layer, unit in units.items() if layer in wanted]


def sampled(experts: Sequence[int], count: int) -> tuple[int, ...]:
    """`count` experts spread evenly, the first and the last among them."""
    if count >= len(experts):
        return tuple(experts)
    if count == 1:
        return (experts[0],)
    return tuple(experts[round(i * (len(experts) - 1) / (count - 1))] for i in range(count))
