"""The layout, bit for bit what the GPU's own repacking made of the same tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from marlin_convert.layout import marlin
from marlin_convert.layout.moe import MarlinU4B8
from marlin_convert.layout.protocol import ExpertShape
from marlin_convert.layout.rows import Rows

Load = Callable[[str], NDArray[Any]]

SHAPES = ["k16.n64", "k64.n64", "k128.n64", "k64.n128", "k256.n256"]
MOE = ExpertShape(hidden=256, intermediate=128, group_size=32, moe_tp=1)


@pytest.mark.parametrize("shape", SHAPES)
def test_repacked_words(golden: Load, shape: str) -> None:
    np.testing.assert_array_equal(
        marlin.pack_weight(golden(f"repack.w4.{shape}.ct")), golden(f"repack.w4.{shape}.marlin")
    )


@pytest.mark.parametrize("shape", SHAPES)
def test_published_words_come_back(golden: Load, shape: str) -> None:
    np.testing.assert_array_equal(
        marlin.unpack_weight(golden(f"repack.w4.{shape}.marlin")), golden(f"repack.w4.{shape}.ct")
    )


@pytest.mark.parametrize("group", [32, 64, 128, -1])
def test_scales(golden: Load, group: int) -> None:
    published, stored = golden(f"scales.g{group}.ct"), golden(f"scales.g{group}.marlin")
    np.testing.assert_array_equal(marlin.pack_scale(published, group, 256), stored)
    np.testing.assert_array_equal(marlin.unpack_scale(stored, group, 256), published)


def rows64(array: NDArray[Any]) -> Rows:
    return Rows.of(array.view(np.uint64))


@pytest.mark.parametrize("expert", range(4))
def test_moe_layer(golden: Load, expert: int) -> None:
    """w13 and w2 as the fused kernel reads them, from gate, up and down apart."""
    layout = MarlinU4B8()
    made = {
        tensor.name: np.full(tensor.shape, 77, np.int32 if tensor.dtype == "I32" else np.uint16)
        for tensor in layout.stacked(MOE)
    }
    w13, s13 = golden("moe_m5.w13_ct")[expert], golden("moe_m5.s13_ct")[expert]
    parts = {
        "gate_proj": (w13[:128], s13[:128]),
        "up_proj": (w13[128:], s13[128:]),
        "down_proj": (golden("moe_m5.w2_ct")[expert], golden("moe_m5.s2_ct")[expert]),
    }
    for projection, (packed, scale) in parts.items():
        words, scales = layout.targets(projection)
        places = (
            MOE,
            projection,
            0,
            rows64(packed),
            Rows.of(scale),
            rows64(made[words]),
            Rows.of(made[scales]),
        )
        layout.pack(*places)
        assert layout.mismatch(*places) is None
    for part, name in (("w13", "13"), ("w2", "2")):
        np.testing.assert_array_equal(made[f"{part}_weight_packed"], golden(f"moe_m5.w{name}_marlin")[expert])
        np.testing.assert_array_equal(made[f"{part}_weight_scale"], golden(f"moe_m5.s{name}_marlin")[expert])


@pytest.mark.parametrize("expert", range(4))
def test_moe_layer_comes_back(golden: Load, expert: int) -> None:
    layout = MarlinU4B8()
    stored = {
        f"{part}_weight_{what}": golden(f"moe_m5.{letter}{number}_marlin")[expert]
        for part, number in (("w13", "13"), ("w2", "2"))
        for what, letter in (("packed", "w"), ("scale", "s"))
    }
    published = {
        "gate_proj": (golden("moe_m5.w13_ct")[expert][:128], golden("moe_m5.s13_ct")[expert][:128]),
        "up_proj": (golden("moe_m5.w13_ct")[expert][128:], golden("moe_m5.s13_ct")[expert][128:]),
        "down_proj": (golden("moe_m5.w2_ct")[expert], golden("moe_m5.s2_ct")[expert]),
    }
    for projection, (packed, scale) in published.items():
        words, scales = (stored[name] for name in layout.targets(projection))
        packed_back, scale_back = np.zeros_like(packed), np.zeros_like(scale)
        layout.unpack(
            MOE, projection, 0, rows64(words), Rows.of(scales), rows64(packed_back), Rows.of(scale_back)
        )
        np.testing.assert_array_equal(packed_back, packed)
        np.testing.assert_array_equal(scale_back, scale)
