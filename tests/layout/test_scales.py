"""Scales: the two orders and when each holds, any shape and place, their inverse, and flipped bits."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from marlin_convert.layout import marlin
from marlin_convert.layout.batch import MarlinBatch, Move
from marlin_convert.layout.rows import RowView
from oracle import read_scales

many = settings(max_examples=60)
seeds = st.integers(0, 2**32 - 1)


def wrong_scale(stored: RowView, source: RowView, group: int, size_k: int) -> tuple[int, int] | None:
    """The (n, group) that is named where the inverse of `stored` is not `source`; None where it is."""
    move = Move(0, "gate_proj", source, stored, size_k)
    found = MarlinBatch([], [move], group)._scale_mismatch(move)
    assert marlin.scale_differs(stored, source, group, size_k) == (found is not None)
    if found is None:
        return None
    match = re.fullmatch(r"weight_scale differs at row (\d+) of the slice, group (\d+)", found.where)
    assert match is not None
    return int(match[1]), int(match[2])


def random_scales(shape: tuple[int, int], seed: int) -> NDArray[np.uint16]:
    return np.random.default_rng(seed).integers(0, 1 << 16, shape, dtype=np.uint16)


def test_grouped_order_literally() -> None:
    """Each run of 64 columns is read as an 8 by 8 square by columns."""
    stored = marlin.pack_scale(np.arange(256, dtype=np.uint16).reshape(128, 2), 32, 64)
    first = [0, 8, 16, 24, 32, 40, 48, 56, 1, 9, 17, 25, 33, 41, 49, 57, 2, 10]
    assert stored[0, :18].tolist() == [2 * n for n in first]
    assert stored[1, :18].tolist() == [2 * n + 1 for n in first]
    assert stored[0, 64:72].tolist() == [2 * (64 + n) for n in first[:8]]


def test_single_order_literally() -> None:
    stored = marlin.pack_scale(np.arange(64, dtype=np.uint16).reshape(64, 1), -1, 256)
    first = [
        0,
        1,
        8,
        9,
        16,
        17,
        24,
        25,
        2,
        3,
        10,
        11,
        18,
        19,
        26,
        27,
        4,
        5,
        12,
        13,
        20,
        21,
        28,
        29,
        6,
        7,
        14,
        15,
        22,
        23,
        30,
        31,
    ]
    assert stored[0].tolist() == first + [32 + n for n in first]


@pytest.mark.parametrize(
    ("group", "size_k", "grouped"),
    [
        (32, 64, True),
        (32, 33, True),
        (32, 32, False),
        (64, 32, False),
        (64, 64, False),
        (128, 7168, True),
        (-1, 256, False),
        (0, 64, False),
    ],
)
def test_the_order_follows_from_group_and_k(group: int, size_k: int, grouped: bool) -> None:
    scale = np.arange(64, dtype=np.uint16).reshape(64, 1)
    assert marlin.pack_scale(scale, group, size_k)[0, :4].tolist() == (
        [0, 8, 16, 24] if grouped else [0, 1, 8, 9]
    )


@many
@given(n=st.integers(1, 4), groups=st.integers(2, 16), group=st.sampled_from([32, 64, 128]), seed=seeds)
@example(n=2, groups=224, group=32, seed=1)
@example(n=1, groups=256, group=32, seed=2)
@example(n=2, groups=264, group=32, seed=3)
def test_a_gpu_thread_reads_the_published_scales(n: int, groups: int, group: int, seed: int) -> None:
    published = random_scales((64 * n, groups), seed)
    stored = marlin.pack_scale(published, group, group * groups)
    assert stored.shape == (groups, 64 * n)
    np.testing.assert_array_equal(read_scales(stored, group, group * groups), published.T)
    np.testing.assert_array_equal(marlin.unpack_scale(stored, group, group * groups), published)


@many
@given(n=st.integers(1, 4), group=st.sampled_from([-1, 64]), seed=seeds)
def test_a_gpu_thread_reads_the_scales_of_one_group(n: int, group: int, seed: int) -> None:
    published = random_scales((64 * n, 1), seed)
    stored = marlin.pack_scale(published, group, 64)
    np.testing.assert_array_equal(read_scales(stored, group, 64), published.T)
    np.testing.assert_array_equal(marlin.unpack_scale(stored, group, 64), published)


@many
@given(
    n=st.integers(1, 3),
    groups=st.one_of(st.integers(1, 9), st.sampled_from([4, 8, 260])),
    single=st.booleans(),
    seed=seeds,
    start=st.integers(0, 5),
    gaps=st.one_of(st.tuples(*[st.integers(0, 5)] * 2), st.sampled_from([(0, 0), (4, 8), (0, 4)])),
)
@example(n=2, groups=8, single=False, seed=0, start=4, gaps=(4, 8))
@example(n=2, groups=8, single=False, seed=0, start=4, gaps=(4, 2))
@example(n=2, groups=8, single=False, seed=0, start=2, gaps=(4, 8))
def test_from_and_to_any_place_in_memory(
    n: int, groups: int, single: bool, seed: int, start: int, gaps: tuple[int, int]
) -> None:
    published = random_scales((64 * n, groups), seed)
    size_k = 32 if single else 32 * groups + 32
    places, memories = [], []
    for (rows, cols), gap in zip(((64 * n, groups), (groups, 64 * n)), gaps, strict=True):
        memory = np.full(start + rows * (cols + gap), 0xEEEE, np.uint16)
        places.append(RowView(memory, start, cols + gap, rows, cols))
        memories.append(memory)
    source, target = places
    source.array()[:] = published
    marlin.pack_scale_view(source, target, 32, size_k)
    np.testing.assert_array_equal(target.array(), marlin.pack_scale(published, 32, size_k))
    assert wrong_scale(target, source, 32, size_k) is None
    source.array()[:] = 0
    marlin.unpack_scale_view(target, source, 32, size_k)
    np.testing.assert_array_equal(source.array(), published)
    for memory, place in zip(memories, places, strict=True):
        place.array()[:] = 0xEEEE
        assert (memory == 0xEEEE).all()


@many
@given(
    data=st.data(),
    n=st.integers(1, 3),
    groups=st.one_of(st.integers(1, 9), st.sampled_from([8, 12, 260])),
    single=st.booleans(),
    seed=seeds,
)
def test_a_flipped_bit_is_found_at_its_place(
    data: st.DataObject, n: int, groups: int, single: bool, seed: int
) -> None:
    published = random_scales((64 * n, groups), seed)
    size_k = 32 if single else 32 * groups + 32
    stored = marlin.pack_scale(published, 32, size_k)
    row, group = data.draw(st.integers(0, 64 * n - 1)), data.draw(st.integers(0, groups - 1))
    marked = np.zeros_like(published)
    marked[row, group] = 1 << data.draw(st.integers(0, 15))
    stored ^= marlin.pack_scale(marked, 32, size_k)
    assert wrong_scale(RowView.of(stored), RowView.of(published), 32, size_k) == (row, group)


@many
@given(n=st.integers(1, 5), groups=st.integers(2, 8), data=st.data(), seed=seeds)
def test_packing_commutes_with_slicing(n: int, groups: int, data: st.DataObject, seed: int) -> None:
    published = random_scales((64 * n, groups), seed)
    n0, g0 = data.draw(st.integers(0, n - 1)), data.draw(st.integers(0, groups - 1))
    n1, g1 = data.draw(st.integers(n0 + 1, n)), data.draw(st.integers(g0 + 1, groups))
    whole = marlin.pack_scale(published, 32, 1024)
    np.testing.assert_array_equal(
        marlin.pack_scale(published[64 * n0 : 64 * n1, g0:g1].copy(), 32, 1024),
        whole[g0:g1, 64 * n0 : 64 * n1],
    )


@pytest.mark.parametrize(("source", "target"), [((32, 2), (2, 32)), ((64, 2), (2, 128)), ((64, 2), (3, 64))])
@pytest.mark.parametrize(
    "function",
    [
        marlin.pack_scale_view,
        lambda a, b, *g: marlin.unpack_scale_view(b, a, *g),
        lambda a, b, *g: marlin.scale_differs(b, a, *g),
    ],
)
def test_shapes_that_do_not_fit_are_refused(
    function: Any, source: tuple[int, int], target: tuple[int, int]
) -> None:
    with pytest.raises(
        ValueError,
        match=rf"source of {source[0]} x {source[1]} needs a Marlin side of {source[1]} x {source[0]}",
    ):
        function(RowView.of(np.zeros(source, np.uint16)), RowView.of(np.zeros(target, np.uint16)), 32, 64)
