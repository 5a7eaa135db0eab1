"""Which rank owns what: the one place for the arithmetic of tp and ep."""

from __future__ import annotations

from dataclasses import dataclass

from marlin_convert.errors import UsageError

#: more slices than this of one expert is nothing an engine runs, and the folder names stay short
MAX_MOE_TP = 64


@dataclass(frozen=True)
class Topology:
    """`tp` ranks in all; the routed experts are split over `ep` groups of `moe_tp` ranks: rank = ep_rank *
    moe_tp + moe_tp_rank.
    """

    tp: int
    ep: int

    @staticmethod
    def of(tp: int, ep: int) -> Topology:
        """A checked topology. Raises UsageError."""
        if tp < 1 or ep < 1 or tp % ep:
            raise UsageError(
                f"--ep {ep} does not divide --tp {tp}; tp is the number of all ranks, so tp 8 ep 8 is 8"
                " ranks, not 64"
            )
        if tp // ep > MAX_MOE_TP:
            raise UsageError(
                f"--tp {tp} with --ep {ep} cuts each expert into {tp // ep} slices; at most {MAX_MOE_TP} are"
                " supported"
            )
        return Topology(tp, ep)

    @property
    def moe_tp(self) -> int:
        """Slices of one expert."""
        return self.tp // self.ep

    def ep_rank(self, rank: int) -> int:
        """The group of experts a rank owns."""
        return rank // self.moe_tp

    def moe_tp_rank(self, rank: int) -> int:
        """The slice of each of its experts a rank owns."""
        return rank % self.moe_tp

    def expert_range(self, rank: int, experts: int) -> range:
        """The routed experts of a rank."""
        local = experts // self.ep
        return range(self.ep_rank(rank) * local, (self.ep_rank(rank) + 1) * local)

    def folder(self, rank: int) -> str:
        """The folder of a rank inside OUT."""
        digits = max(2, len(str(self.tp)))
        return f"rank-{rank:0{digits}d}-of-{self.tp:0{digits}d}"
