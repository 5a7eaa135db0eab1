"""The weight types the kernel knows that this project uses."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class QuantType:
    """One weight type: code c stands for `(c - bias) * scale`, or `(c - zero point) * scale` if it has zero
    points.

    `id` is the kernel's `b_q_type_id`: bit 50 set, the number of value bits from bit 8 and the bias from bit
    17. An object with this attribute is what the compiled-at-first-use form takes as `b_q_type`.
    """

    name: str
    num_bits: int
    bias: int
    has_zero_points: bool = False

    @property
    def id(self) -> int:
        """The number that names this type to the kernel."""
        return (1 << 50) | (self.num_bits << 8) | (self.bias << 17)

    @property
    def pack_factor(self) -> int:
        """Codes in one 32-bit word."""
        return 32 // self.num_bits


UINT4B8 = QuantType("uint4b8", 4, 8)
UINT8B128 = QuantType("uint8b128", 8, 128)
UINT4 = QuantType("uint4", 4, 0, has_zero_points=True)

_BY_ID = {kind.id: kind for kind in (UINT4B8, UINT8B128, UINT4)}


def quant_type(b_q_type_id: int) -> QuantType:
    """The type with this kernel id; ValueError for an id this project does not use."""
    try:
        return _BY_ID[b_q_type_id]
    except KeyError:
        known = ", ".join(f"{kind.name} = {kind.id}" for kind in _BY_ID.values())
        raise ValueError(f"b_q_type_id {b_q_type_id} is none of {known}") from None


#: how the kernel is told what a layout's codes are
_OF_LAYOUT = {"moe_wna16_marlin.u4b8": UINT4B8}


def kernel_type(layout_id: str) -> QuantType | None:
    """The weight type that the kernel is given for a stored layout; None for one that it does not read."""
    return _OF_LAYOUT.get(layout_id)
