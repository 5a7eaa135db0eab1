"""Words of any shape, from any place in memory: what a GPU thread reads of them, their inverse, slices, and
flipped bits.
"""

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
from marlin_convert.layout.qweight import RUN
from marlin_convert.layout.rows import RowView
from oracle import published_codes, read_weights

many = settings(max_examples=60)

n_tiles = st.integers(1, 4)
k_tiles = st.integers(1, 24)
seeds = st.integers(0, 2**32 - 1)


def wrong_row(stored: RowView, source: RowView) -> tuple[int, int] | None:
    """The (n, k) that is named where the inverse of `stored` is not `source`; None where it is."""
    move = Move(0, "gate_proj", source, stored, 16 * source.cols)
    found = MarlinBatch([move], [], 32)._weight_mismatch(move)
    assert marlin.weight_differs(stored, source) == (found is not None)
    if found is None:
        return None
    match = re.fullmatch(
        r"weight_packed differs at row (\d+) of the slice, inputs (\d+) to (\d+)", found.where
    )
    assert match is not None
    n, first, last = map(int, match.groups())
    assert last == first + 15
    return n, first


def random_words(shape: tuple[int, int], seed: int) -> NDArray[np.int32]:
    return np.random.default_rng(seed).integers(-(2**31), 2**31, shape, dtype=np.int32)


@many
@given(n=n_tiles, k=k_tiles, seed=seeds)
@example(n=1, k=RUN - 1, seed=1)
@example(n=2, k=RUN, seed=2)
@example(n=1, k=RUN + 1, seed=3)
@example(n=3, k=2 * RUN + 5, seed=4)
def test_a_gpu_thread_reads_the_published_codes(n: int, k: int, seed: int) -> None:
    packed = random_words((64 * n, 2 * k), seed)
    stored = marlin.pack_weight(packed)
    assert stored.shape == (k, 128 * n)
    np.testing.assert_array_equal(read_weights(stored), published_codes(packed).T)
    np.testing.assert_array_equal(marlin.unpack_weight(stored), packed)


@pytest.mark.parametrize("k", [RUN + 1, 2 * RUN + 3])
def test_rows_longer_than_what_is_handled_together(k: int) -> None:
    packed = random_words((128, 2 * k), k)
    stored = marlin.pack_weight(packed)
    np.testing.assert_array_equal(read_weights(stored), published_codes(packed).T)
    np.testing.assert_array_equal(marlin.unpack_weight(stored), packed)
    assert wrong_row(RowView.of(stored.view(np.uint64)), RowView.of(packed.view(np.uint64))) is None


@many
@given(n=n_tiles, k=k_tiles, seed=seeds)
def test_pack_undoes_unpack(n: int, k: int, seed: int) -> None:
    stored = random_words((k, 128 * n), seed)
    np.testing.assert_array_equal(marlin.pack_weight(marlin.unpack_weight(stored)), stored)


class Placed:
    """A matrix of 8-byte words somewhere in a larger memory of 0xEE: at any byte, with any distance between
    rows.
    """

    def __init__(self, rows: int, cols: int, start: int, gap: int, shift: int) -> None:
        stride = cols + gap
        self.memory = np.full(shift + 8 * (start + rows * stride + 3), 0xEE, np.uint8)
        self.flat = self.memory[shift : shift + 8 * (start + rows * stride)].view(np.uint64)
        self.rows = RowView(self.flat, start, stride, rows, cols)
        self.inside = np.zeros(self.memory.size, bool)
        for row in range(rows):
            begin = shift + 8 * (start + row * stride)
            self.inside[begin : begin + 8 * cols] = True

    @property
    def untouched(self) -> bool:
        return bool((self.memory[~self.inside] == 0xEE).all())


@many
@given(
    n=n_tiles,
    k=st.integers(1, 9),
    seed=seeds,
    starts=st.tuples(st.integers(0, 5), st.integers(0, 5)),
    gaps=st.tuples(st.integers(0, 5), st.integers(0, 5)),
    shifts=st.tuples(st.integers(0, 15), st.integers(0, 15)),
)
@example(n=1, k=1, seed=0, starts=(1, 0), gaps=(3, 1), shifts=(3, 5))
def test_from_and_to_any_place_in_memory(
    n: int, k: int, seed: int, starts: tuple[int, int], gaps: tuple[int, int], shifts: tuple[int, int]
) -> None:
    packed = random_words((64 * n, 2 * k), seed)
    expected = marlin.pack_weight(packed)
    source, target = (
        Placed(*shape, *at)
        for shape, at in zip(((64 * n, k), (k, 64 * n)), zip(starts, gaps, shifts, strict=True), strict=True)
    )
    source.rows.array()[:] = packed.view(np.uint64)
    marlin.pack_weight_view(source.rows, target.rows)
    np.testing.assert_array_equal(target.rows.array().copy().view(np.int32), expected)
    assert source.untouched
    assert target.untouched
    assert wrong_row(target.rows, source.rows) is None
    source.rows.array()[:] = 0
    marlin.unpack_weight_view(target.rows, source.rows)
    np.testing.assert_array_equal(source.rows.array().copy().view(np.int32), packed)
    assert source.untouched


@many
@given(data=st.data(), n=st.integers(1, 5), k=st.integers(1, 20), seed=seeds)
def test_packing_commutes_with_slicing(data: st.DataObject, n: int, k: int, seed: int) -> None:
    packed = random_words((64 * n, 2 * k), seed)
    n0, k0 = data.draw(st.integers(0, n - 1)), data.draw(st.integers(0, k - 1))
    n1, k1 = data.draw(st.integers(n0 + 1, n)), data.draw(st.integers(k0 + 1, k))
    part = np.ascontiguousarray(packed[64 * n0 : 64 * n1, 2 * k0 : 2 * k1])
    np.testing.assert_array_equal(
        marlin.pack_weight(part), marlin.pack_weight(packed)[k0:k1, 128 * n0 : 128 * n1]
    )
    view = RowView.of(packed.view(np.uint64)).part(64 * n0, 64 * (n1 - n0), k0, k1 - k0)
    stored = np.zeros((k1 - k0, 64 * (n1 - n0)), np.uint64)
    marlin.pack_weight_view(view, RowView.of(stored))
    np.testing.assert_array_equal(stored.view(np.int32), marlin.pack_weight(part))


@many
@given(n=st.integers(1, 3), m=st.integers(1, 3), k=st.integers(1, 9), seed=seeds)
def test_rows_joined_are_columns_joined(n: int, m: int, k: int, seed: int) -> None:
    gate, up = random_words((64 * n, 2 * k), seed), random_words((64 * m, 2 * k), seed + 1)
    np.testing.assert_array_equal(
        marlin.pack_weight(np.vstack([gate, up])),
        np.hstack([marlin.pack_weight(gate), marlin.pack_weight(up)]),
    )


@many
@given(data=st.data(), n=st.integers(1, 3), k=st.one_of(st.integers(1, 9), st.just(RUN + 1)), seed=seeds)
def test_a_flipped_bit_is_found_where_a_gpu_thread_would_read_it(
    data: st.DataObject, n: int, k: int, seed: int
) -> None:
    packed = random_words((64 * n, 2 * k), seed)
    stored = marlin.pack_weight(packed)
    source = RowView.of(packed.view(np.uint64))
    assert wrong_row(RowView.of(stored.view(np.uint64)), source) is None
    at = (data.draw(st.integers(0, k - 1)), data.draw(st.integers(0, 128 * n - 1)))
    stored.view(np.uint32)[at] ^= np.uint32(1 << data.draw(st.integers(0, 31)))
    ((wrong_k, wrong_n),) = np.argwhere(read_weights(stored) != published_codes(packed).T)
    assert wrong_row(RowView.of(stored.view(np.uint64)), source) == (wrong_n, wrong_k // 16 * 16)


def test_every_single_bit_of_a_tile_is_seen() -> None:
    packed = random_words((64, 2), 5)
    stored = marlin.pack_weight(packed)
    source, places = RowView.of(packed.view(np.uint64)), RowView.of(stored.view(np.uint64))
    flat = stored.view(np.uint32).reshape(-1)
    found = []
    for bit in range(flat.size * 32):
        flat[bit // 32] ^= np.uint32(1 << bit % 32)
        found.append(wrong_row(places, source))
        flat[bit // 32] ^= np.uint32(1 << bit % 32)
    assert wrong_row(places, source) is None
    # Each row of the tile is 16 codes of 4 bits: each of the 64 rows is named once for each of its bits.
    assert sorted(at for at in found if at is not None) == sorted(
        (n, 0) for n in range(64) for _ in range(64)
    )


@many
@given(data=st.data(), n=st.integers(1, 3), k=st.integers(1, 5), count=st.integers(1, 6), seed=seeds)
def test_of_several_wrong_places_one_is_named(
    data: st.DataObject, n: int, k: int, count: int, seed: int
) -> None:
    packed = random_words((64 * n, 2 * k), seed)
    stored = marlin.pack_weight(packed)
    for _ in range(count):
        stored[data.draw(st.integers(0, k - 1)), data.draw(st.integers(0, 128 * n - 1))] ^= data.draw(
            st.integers(1, 2**31 - 1)
        )
    differ = {
        (int(j), int(i) // 16 * 16) for i, j in np.argwhere(read_weights(stored) != published_codes(packed).T)
    }
    found = wrong_row(RowView.of(stored.view(np.uint64)), RowView.of(packed.view(np.uint64)))
    assert found in differ if differ else found is None


@pytest.mark.parametrize(
    ("source", "target"),
    [((32, 2), (2, 32)), ((96, 2), (2, 96)), ((64, 2), (2, 128)), ((64, 2), (3, 64)), ((64, 2), (64, 2))],
)
@pytest.mark.parametrize(
    "function",
    [
        marlin.pack_weight_view,
        lambda a, b: marlin.unpack_weight_view(b, a),
        lambda a, b: marlin.weight_differs(b, a),
    ],
)
def test_shapes_that_do_not_fit_are_refused(
    function: Any, source: tuple[int, int], target: tuple[int, int]
) -> None:
    with pytest.raises(
        ValueError,
        match=rf"source of {source[0]} x {source[1]} needs a Marlin side of {source[1]} x {source[0]}",
    ):
        function(RowView.of(np.zeros(source, np.uint64)), RowView.of(np.zeros(target, np.uint64)))


def test_k_off_the_tile_is_refused() -> None:
    with pytest.raises(ValueError, match="K must be a multiple of 16, got 24"):
        marlin.pack_weight(np.zeros((64, 3), np.int32))
