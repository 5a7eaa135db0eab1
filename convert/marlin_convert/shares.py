"""`--shard I/N`: the share that one of several processes makes. Which units are whose follows from the plan
alone, so that nobody has to ask.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from marlin_convert.errors import UsageError
from marlin_convert.words import ranges

#: no scheduler starts more processes of one job
MOST = 100_000


@dataclass(frozen=True)
class Share:
    """The share `index`, from 0, of `count`."""

    index: int
    count: int

    @staticmethod
    def of(text: object) -> Share:
        """What `I/N` says. Raises UsageError."""
        match = (
            re.fullmatch(r"\s*([0-9]{1,9})\s*/\s*([0-9]{1,9})\s*", text) if isinstance(text, str) else None
        )
        if match is None:
            raise UsageError(f"--shard {text!r}: write I/N, such as 0/4 for the first of four shares")
        index, count = int(match[1]), int(match[2])
        if not 1 <= count <= MOST:
            raise UsageError(f"--shard {text}: there can be 1 to {MOST} shares")
        if index >= count:
            raise UsageError(
                f"--shard {text}: shares are counted from 0, so the last of {count} is {count - 1}/{count}"
            )
        return Share(index, count)

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    @property
    def part(self) -> str:
        """A name for a folder."""
        return f"share-{self.index}-of-{self.count}"


def split_evenly(sizes: Sequence[int], count: int) -> list[int]:
    """The share of each of some things in order: each share has things that follow each other, and the
    largest share is as small as can be. Without a thing for each, the last shares have none.

    In order, since things that follow each other lie in the same files of the source.
    """
    low, high = max(sizes, default=0), sum(sizes)
    while low < high:
        middle = (low + high) // 2
        low, high = (
            (low, middle) if max(_filled(sizes, count, middle), default=0) < count else (middle + 1, high)
        )
    return _filled(sizes, count, low)


def _filled(sizes: Sequence[int], count: int, most: int) -> list[int]:
    """Shares of at most `most`, filled one after the other, but so that none stays empty if there are things
    enough; more than `count` where that is too little.
    """
    shares: list[int] = []
    share, filled = 0, 0
    for number, size in enumerate(sizes):
        empty = count - 1 - share
        if filled and (filled + size > most or len(sizes) - number <= empty):
            share, filled = share + 1, 0
        shares.append(share)
        filled += size
    return shares


def said(shares: Sequence[int], count: int) -> str:
    """For people: `--shard 1/4` or `--shard I/8 with I 0, 3-5`."""
    if len(shares) == 1:
        return f"--shard {shares[0]}/{count}"
    return f"--shard I/{count} with I = {ranges(shares)}"
