"""From published matrices to what each rank's kernel must read: plain torch, from the definition alone.

Nothing here uses the layout: w13 of a rank is its rows of gate, then its rows of up; w2 its columns of down;
code c of group g is (c - 8) * scale.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from marlin_convert.checks.kernel.layer_files import Original
from marlin_convert.checks.kernel.odd_scales import finite
from marlin_convert.layout.protocol import PROJECTIONS

#: codes and scales kept apart, for the diagnosis; weight = bf16((code - 8) * scale)
Pair = tuple[Tensor, Tensor]


def weight(codes: Tensor, scale: Tensor) -> Tensor:
    """uint8 codes [N, K] and bf16 scales [N, G] -> bf16 [N, K], the product rounded once as the kernel rounds
    it.
    """
    n, k = codes.shape
    groups = scale.shape[1]
    return ((codes.to(torch.bfloat16) - 8).reshape(n, groups, k // groups) * scale.unsqueeze(-1)).reshape(
        n, k
    )


def unpack_codes(packed: Tensor) -> Tensor:
    """int32 [N, K/8] -> uint8 [N, K]; low nibble first, so bytes in memory order."""
    data = packed.view(torch.uint8)
    return torch.stack((data & 15, data >> 4), dim=-1).reshape(packed.shape[0], -1)


@dataclass(frozen=True)
class ExpertWeights:
    """One expert on a device: codes and scales per projection."""

    codes: dict[str, Tensor]
    scales: dict[str, Tensor]

    @staticmethod
    def load(original: Original, device: torch.device) -> ExpertWeights:
        """Copy the published matrices to a device."""
        codes, scales = {}, {}
        for projection in PROJECTIONS:
            packed, scale = original[projection]
            codes[projection] = unpack_codes(torch.from_numpy(packed).to(device))
            scales[projection] = torch.from_numpy(scale.view("int16")).to(device).view(torch.bfloat16)
        return ExpertWeights(codes, scales)

    @property
    def device(self) -> torch.device:
        """Where they are."""
        return self.codes["down_proj"].device

    def finite(self) -> ExpertWeights:
        """The same with finite scales, as the kernel check runs it."""
        return ExpertWeights(self.codes, {name: finite(scale) for name, scale in self.scales.items()})

    def whole(self, projection: str) -> Tensor:
        """bf16 [out, in]."""
        return weight(self.codes[projection], self.scales[projection])

    def w13(self, index: int, moe_tp: int) -> Pair:
        """Codes and scales [2I, H] of slice `index`: gate rows, then up rows."""
        parts = [
            [_rows(table[p], index, moe_tp) for p in ("gate_proj", "up_proj")]
            for table in (self.codes, self.scales)
        ]
        return torch.cat(parts[0]), torch.cat(parts[1])

    def w2(self, index: int, moe_tp: int) -> Pair:
        """Codes and scales [H, I] of slice `index`: columns of down."""
        return _columns(self.codes["down_proj"], index, moe_tp), _columns(
            self.scales["down_proj"], index, moe_tp
        )


def _rows(matrix: Tensor, index: int, parts: int) -> Tensor:
    size = matrix.shape[0] // parts
    return matrix[index * size : (index + 1) * size]


def _columns(matrix: Tensor, index: int, parts: int) -> Tensor:
    size = matrix.shape[1] // parts
    return matrix[:, index * size : (index + 1) * size]


def padded_w13(w13: Tensor, padded: int) -> Tensor:
    """[2I, H] -> [2P, H]: each half with zero rows at its end, as it is stored."""
    local = w13.shape[0] // 2
    if local == padded:
        return w13
    result = w13.new_zeros((2 * padded, w13.shape[1]))
    result[:local], result[padded : padded + local] = w13[:local], w13[local:]
    return result


def padded_w2(w2: Tensor, padded: int) -> Tensor:
    """[H, I] -> [H, P] with zero columns at the end."""
    return w2 if w2.shape[1] == padded else torch.nn.functional.pad(w2, (0, padded - w2.shape[1]))
