"""The layouts, by their id. A layout lives in a module of its own and is registered here."""

from __future__ import annotations

from contextlib import suppress
from importlib import import_module

from marlin_convert.errors import UsageError
from marlin_convert.layout.marlin_moe import MarlinU4B8
from marlin_convert.layout.protocol import Layout

DEFAULT_LAYOUT = "moe_wna16_marlin.u4b8"

_LAYOUTS: dict[str, Layout] = {}


def register(layout: Layout) -> None:
    """Make a layout known by its id."""
    _LAYOUTS[layout.id] = layout


def known_layouts() -> tuple[str, ...]:
    """The ids of all layouts."""
    return tuple(_LAYOUTS)


def get_layout(layout_id: str) -> Layout:
    """The layout of this id. Raises UsageError for an unknown one, naming those there are."""
    if layout_id not in _LAYOUTS:
        raise UsageError(f"there is no layout {layout_id}; known are {', '.join(_LAYOUTS)}")
    return _LAYOUTS[layout_id]


def load_code() -> None:
    """Import numba and the compiled layouts, half a second, beside what waits for the disk; who needs them
    meets the errors.
    """
    with suppress(Exception):
        import_module("marlin_convert.layout.batch")


def load_inverse() -> None:
    """The same, and the machine code of the way back, a quarter of a second more. For who is sure to need it:
    where none is kept, it is compiled.
    """
    load_code()
    with suppress(Exception):
        import numpy as np

        from marlin_convert.layout import marlin
        from marlin_convert.layout.rows import RowView

        words = np.zeros((1, marlin.TILE_N), np.uint64)
        marlin.unpack_weight_view(RowView.of(words), RowView.of(np.zeros_like(words.T, order="C")))


register(MarlinU4B8())
