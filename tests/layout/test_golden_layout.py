"""The layout, bit for bit what the GPU's own repacking made of the same tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from experts import empty_stack, shape_of, slice_of
from marlin_convert.layout import marlin
from marlin_convert.layout.marlin_moe import MarlinU4B8
from marlin_convert.layout.protocol import Role

Load = Callable[[str], NDArray[Any]]

SHAPES = ["k16.n64", "k64.n64", "k128.n64", "k64.n128", "k256.n256"]
MOE = shape_of(256, 128, 32, 1)
LAYOUT = MarlinU4B8()


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


def published(golden: Load, expert: int) -> dict[tuple[str, Role], NDArray[Any]]:
    """An expert's matrices as published: gate and up are the halves of what was recorded as w13."""
    w13, s13 = golden("moe_m5.w13_ct")[expert], golden("moe_m5.s13_ct")[expert]
    w2, s2 = golden("moe_m5.w2_ct")[expert], golden("moe_m5.s2_ct")[expert]
    return {
        ("gate_proj", Role.WEIGHT): w13[:128],
        ("gate_proj", Role.SCALE): s13[:128],
        ("up_proj", Role.WEIGHT): w13[128:],
        ("up_proj", Role.SCALE): s13[128:],
        ("down_proj", Role.WEIGHT): w2,
        ("down_proj", Role.SCALE): s2,
    }


def stored(golden: Load, expert: int) -> dict[str, NDArray[Any]]:
    """An expert's tensors as the fused kernel read them."""
    return {
        "w13_weight_packed": golden("moe_m5.w13_marlin")[expert],
        "w13_weight_scale": golden("moe_m5.s13_marlin")[expert],
        "w2_weight_packed": golden("moe_m5.w2_marlin")[expert],
        "w2_weight_scale": golden("moe_m5.s2_marlin")[expert],
    }


@pytest.mark.parametrize("expert", range(4))
def test_moe_layer(golden: Load, expert: int) -> None:
    """w13 and w2 as the fused kernel reads them, from gate, up and down apart."""
    made = empty_stack(LAYOUT, MOE)
    part = slice_of(LAYOUT, MOE, published(golden, expert), made, 0)
    assert LAYOUT.batch(MOE, [part]).pack(check=True) is None
    for name, expected in stored(golden, expert).items():
        np.testing.assert_array_equal(made[name], expected)


@pytest.mark.parametrize("expert", range(4))
def test_moe_layer_comes_back(golden: Load, expert: int) -> None:
    expected = published(golden, expert)
    back = {key: np.zeros_like(array) for key, array in expected.items()}
    assert LAYOUT.unpack(MOE, slice_of(LAYOUT, MOE, back, stored(golden, expert), 0)) == ()
    for key, array in expected.items():
        np.testing.assert_array_equal(back[key], array)
