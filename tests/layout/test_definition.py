"""The plain lines and the fast form are the same layout."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from marlin_convert.layout import definition, marlin
from oracle import published_codes


@settings(max_examples=20)
@given(n=st.integers(1, 3), k=st.integers(1, 5), seed=st.integers(0, 2**32 - 1))
def test_the_repack_is_the_reference(n: int, k: int, seed: int) -> None:
    packed = np.random.default_rng(seed).integers(-(2**31), 2**31, (64 * n, 2 * k), dtype=np.int32)
    expected = definition.repack(published_codes(packed))
    np.testing.assert_array_equal(marlin.pack_weight(packed).view(np.uint32), expected)


@pytest.mark.parametrize(("group", "size_k"), [(32, 128), (64, 128), (128, 128), (-1, 256)])
def test_the_scales_are_the_reference(group: int, size_k: int) -> None:
    groups = 1 if group == -1 else size_k // group
    scale = np.random.default_rng(groups).integers(0, 1 << 16, (192, groups), dtype=np.uint16)
    expected = definition.permute_scales(scale, group, size_k)
    np.testing.assert_array_equal(marlin.pack_scale(scale, group, size_k), expected)
