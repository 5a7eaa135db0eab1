"""What of a converted folder the kernel check looks at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class CheckScope:
    """What of a layer is checked. `experts` None means all; `tokens` empty leaves the fused check out."""

    ranks: tuple[int, ...]
    experts: tuple[int, ...] | None
    tokens: tuple[int, ...]
    top_k: int


def sampled(experts: Sequence[int], count: int) -> tuple[int, ...]:
    """`count` experts spread evenly, the first and the last among them."""
    if count >= len(experts):
        return tuple(experts)
    if count == 1:
        return (experts[0],)
    return tuple(experts[round(i * (len(experts) - 1) / (count - 1))] for i in range(count))
