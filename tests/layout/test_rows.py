"""RowView: a matrix in flat memory."""

from __future__ import annotations

import numpy as np
import pytest

from marlin_convert.layout.rows import RowView


def test_a_view_has_its_place_in_the_memory_it_is_of() -> None:
    array = np.arange(60, dtype=np.uint64).reshape(6, 10)
    rows = RowView.of(array[1:5, 2:7])
    assert (rows.base, rows.stride, rows.rows, rows.cols) == (0, 10, 4, 5)
    assert rows.flat[rows.base + 3 * rows.stride + 4] == array[4, 6]
    np.testing.assert_array_equal(rows.array(), array[1:5, 2:7])
    assert np.shares_memory(rows.array(), array)


def test_a_part_of_a_part() -> None:
    array = np.arange(60, dtype=np.uint64).reshape(6, 10)
    part = RowView.of(array).part(1, 4, 2, 6).part(2, 1, 3, 2)
    np.testing.assert_array_equal(part.array(), array[3:4, 5:7])
    part.array()[:] = 99
    assert array[3, 5:7].tolist() == [99, 99]
    assert (array == 99).sum() == 2


@pytest.mark.parametrize(
    "block",
    [(0, 7, 0, 1), (0, 1, 0, 11), (-1, 1, 0, 1), (0, 1, -1, 1), (6, 1, 0, 1), (0, 1, 10, 1), (3, 4, 0, 10)],
)
def test_a_part_stays_inside(block: tuple[int, int, int, int]) -> None:
    with pytest.raises(ValueError, match="leaves a matrix of 6 x 10"):
        RowView.of(np.zeros((6, 10), np.uint64)).part(*block)


def test_one_row_and_one_column() -> None:
    assert RowView.of(np.zeros((1, 3), np.uint16)).stride == 3
    assert RowView.of(np.arange(5, dtype=np.uint16)[:, None]).array().tolist() == [[0], [1], [2], [3], [4]]


@pytest.mark.parametrize(
    "array",
    [np.zeros(4), np.zeros((2, 2, 2)), np.zeros((4, 6)).T, np.zeros((4, 6))[:, ::2], np.zeros((4, 6))[::-1]],
    ids=["1-D", "3-D", "transposed", "every other column", "upside down"],
)
def test_other_arrays_are_refused(array: np.ndarray) -> None:
    with pytest.raises(ValueError, match="need"):
        RowView.of(array)


def test_read_only_memory_stays_so() -> None:
    rows = RowView.of(np.frombuffer(bytes(32), np.uint64).reshape(2, 2))
    with pytest.raises(ValueError, match="read-only"):
        rows.array()[:] = 1
