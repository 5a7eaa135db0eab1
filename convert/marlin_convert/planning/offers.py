"""What is offered in place of a split that cannot be: only what was tried and would do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from marlin_convert.slicing import MAX_TP

if TYPE_CHECKING:
    from marlin_convert.planning.output_plan import Options

#: numbers of ranks that engines are started with
RANKS = (1, 2, 4, 8, 16, 32, 64)
Works = Callable[["Options"], bool]


def offers_of(asked: Options, works: Works) -> list[str]:
    """Which values of each flag would do with the others as they are; where none does, which --tp would
    alone.
    """
    divisors = [n for n in range(1, asked.tp + 1) if asked.tp % n == 0] if asked.tp <= MAX_TP else []
    tried = {"tp": RANKS, "ep": divisors, "attn_tp": divisors}
    found = [offer for key, values in tried.items() if (offer := _offer(asked, works, key, values))]
    if not found and (offer := _offer(replace(asked, ep=1, attn_tp=None), works, "tp", RANKS)):
        found = [offer]
    return found


def _offer(asked: Options, works: Works, key: str, values: Sequence[int]) -> str | None:
    changes: list[dict[str, Any]] = [{key: value} for value in values]
    doing = [str(change[key]) for change in changes if works(replace(asked, **change))]
    if not doing:
        return None
    pp = asked.pp if asked.pp > 1 else None
    given = {"tp": asked.tp, "ep": asked.ep, "attn_tp": asked.attn_tp, "pp": pp}
    others = (f"{_flag(other)} {value}" for other, value in given.items() if other != key and value)
    return f"with {' '.join(others)}, {_flag(key)} {', '.join(doing)} would do"


def _flag(key: str) -> str:
    return f"--{key.replace('_', '-')}"
