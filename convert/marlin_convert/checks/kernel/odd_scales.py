"""Scales that are not finite, NaN or infinite: the kernel cannot be asked for them.

Each output is a sum over all inputs, and 0 x NaN is NaN, so one such scale makes all weights of its row
unreadable. Their bits are compared instead, and the kernel runs with `STAND_IN` in their place.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from marlin_convert.kernels.reference import decode_scales

#: of the size that scales have, so that sums stay as they are
STAND_IN = 2.0**-6


def finite(scale: Tensor) -> Tensor:
    """The same with `STAND_IN` for what is not finite."""
    return torch.nan_to_num(scale, nan=STAND_IN, posinf=STAND_IN, neginf=STAND_IN)


def has_odd(scale: Tensor) -> bool:
    """Whether any is not finite."""
    return not bool(torch.isfinite(scale).all())


def first_place(where: Tensor) -> tuple[int, int]:
    """Row and group of the first that is true."""
    row, group = where.nonzero()[0].tolist()
    return row, group


def value(scale: Tensor) -> str:
    """One bf16 with its bits."""
    return f"{scale.item():g} (0x{int(scale.view(torch.int16).item()) & 0xFFFF:04x})"


def stored_scales(scales: Tensor) -> Tensor:
    """Stored scales bf16 [G, N] of one matrix in the order of the published ones [N, G], found by what the
    kernel's threads read, not by the layout.
    """
    return decode_scales(scales.cpu(), scales.shape[0] == 1).t().contiguous().to(scales.device)


@dataclass(frozen=True)
class OddScales:
    """Scales [N, G] that differ where one of the two is not finite, and those to expect of the kernel."""

    differ: Tensor
    expected: Tensor

    @staticmethod
    def compare(stored: Tensor, source: Tensor) -> OddScales:
        """Bit for bit, since NaN equals nothing. What differs here is expected as it is stored, so that the
        kernel tells about the others only.
        """
        odd = ~(torch.isfinite(stored) & torch.isfinite(source))
        differ = odd & (stored.view(torch.int16) != source.view(torch.int16))
        return OddScales(differ, torch.where(differ, finite(stored), finite(source)))
