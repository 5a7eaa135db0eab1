"""What is known of a unit once its files are written; records and manifest are made of it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class FinishedFile:
    """A written file; `header` and the values of `tensors` are xxh3-128 in hex."""

    rank: int | None
    size: int
    header: str
    tensors: dict[str, str]


@dataclass(frozen=True)
class FinishedUnit:
    """A written unit. `experts` holds E * 16 bytes per (rank, stacked tensor), `source` 16 bytes per source
    tensor.
    """

    name: str
    files: tuple[FinishedFile, ...]
    experts: dict[tuple[int | None, str], bytes]
    source: dict[str, bytes]
