"""What of a converted folder the kernel check looks at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from marlin_convert.errors import UsageError


@dataclass(frozen=True)
class CheckScope:
    """What of a layer is checked. `experts` None means all; `tokens` empty leaves the fused check out."""

    ranks: tuple[int, ...]
    experts: tuple[int, ...] | None
    tokens: tuple[int, ...]
    top_k: int


def subset(what: str, wanted: Sequence[int] | None, present: Sequence[int]) -> Sequence[int]:
    """Those of `present` that are wanted, all for None. Raises UsageError for one that is not there."""
    if wanted is None:
        return present
    if absent := sorted(set(wanted) - set(present)):
        raise UsageError(
            f"there is no {what} {absent[0]} to check here; there are {present[0]} to {present[-1]}"
        )
    return sorted(set(wanted))


def sampled(experts: Sequence[int], count: int) -> tuple[int, ...]:
    """`count` experts spread evenly, the first and the last among them."""
    if count >= len(experts):
        return tuple(experts)
    if count == 1:
        return (experts[0],)
    return tuple(experts[round(i * (len(experts) - 1) / (count - 1))] for i in range(count))
