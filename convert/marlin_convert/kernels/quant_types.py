"""The weight types the kernel knows that this project uses, and which one a stored layout has."""

from __future__ import annotations

from dataclasses import dataclass

from marlin_convert.errors import UsageError


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

#: the type of each stored layout that the kernel reads, by the layout's id
_OF_LAYOUT = {"moe_wna16_marlin.u4b8": UINT4B8}


def kernel_type(layout_id: str) -> QuantType | None:
    """The kernel's weight type for a stored layout; None where it does not read that."""
    return _OF_LAYOUT.get(layout_id)


def need_kernel_type(layout_id: str) -> QuantType:
    """The kernel's weight type for a stored layout. Raises UsageError where the kernel does not read that."""
    if (kind := kernel_type(layout_id)) is None:
        raise UsageError(
            f"the kernel does not read the layout {layout_id}, so nothing can be checked or timed with it; it"
            f" reads {', '.join(_OF_LAYOUT)}"
        )
    return kind
