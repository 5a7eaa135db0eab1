"""Many slices in one call: the same as each alone, in one buffer or many, and the wrong one is named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from experts import mismatch, shape_of
from marlin_convert.layout import qweight, scales
from marlin_convert.layout.batch import Column, require_all_once
from marlin_convert.layout.marlin_moe import MarlinU4B8
from marlin_convert.layout.protocol import ELEMENT, PROJECTIONS, ExpertShape, ExpertSlice, Role
from marlin_convert.layout.rows import RowView

LAYOUT = MarlinU4B8()
EXPERTS = 2


def batch(shape: ExpertShape, *, shift: int = 0, apart: bool = False) -> list[ExpertSlice]:
    """All slices of some experts, sources and targets behind each other in a buffer each; `shift` puts scales
    off their words, `apart` in many.
    """
    seed = shape.scheme.group_size + shape.moe_tp
    sources = np.random.default_rng(seed).integers(0, 256, 1 << 21, dtype=np.uint8)
    targets = np.full(1 << 21, 0xEE, np.uint8)
    source_memory = {role: sources.view(element) for role, element in ELEMENT.items()}
    target_memory = {role: targets.view(element) for role, element in ELEMENT.items()}
    at, matrices = 0, {}
    for expert in range(EXPERTS):
        for projection in PROJECTIONS:
            for role in Role:
                out, width = shape.scheme.source_shape(role, *shape.matrix(projection))
                cols = width // 2 if role is Role.WEIGHT else width
                begin = at // 8 if role is Role.WEIGHT else at // 2 + shift
                matrices[expert, projection, role] = RowView(source_memory[role], begin, cols, out, cols)
                size = out * cols * source_memory[role].itemsize
                at += size if role is Role.WEIGHT else -(-(size + 2 * shift) // 8) * 8
    target_at, made = 0, []
    for index in range(shape.moe_tp):
        for expert in range(EXPERTS):
            stored = {}
            for tensor in LAYOUT.stacked(shape):
                flat, (rows, width) = target_memory[tensor.role], tensor.shape
                cols = width // 2 if tensor.role is Role.WEIGHT else width
                view = RowView(flat, target_at // flat.itemsize, cols, rows, cols)
                stored[tensor.name] = RowView(view.flat[:], *view[1:]) if apart else view
                target_at += rows * cols * flat.itemsize
            source = {
                (projection, role): matrices[expert, projection, role].block(shape.cut(projection), index)
                for projection in PROJECTIONS
                for role in Role
            }
            made.append(ExpertSlice(source, stored))
    assert max(at, target_at) < sources.size
    return made


def alone(shape: ExpertShape, each: ExpertSlice) -> dict[str, NDArray[Any]]:
    """One slice packed by itself, in memory of its own."""
    stored = {n: RowView.of(np.zeros((v.rows, v.cols), v.flat.dtype)) for n, v in each.stored.items()}
    source = {key: RowView.of(view.array().copy()) for key, view in each.source.items()}
    LAYOUT.batch(shape, [ExpertSlice(source, stored)]).pack()
    return {name: view.array() for name, view in stored.items()}


def place(each: ExpertSlice, projection: str, role: Role) -> tuple[NDArray[Any], tuple[int, int]]:
    """The stacked tensor of a role, and one of its elements that the projection fills."""
    array = each.stored[f"{'w2' if projection == 'down_proj' else 'w13'}_{role}"].array()
    return array, (0, array.shape[1] // 2 + 3 if projection == "up_proj" else 3)


SHAPES = [
    shape_of(*sizes)
    for sizes in (
        (256, 512, 32, 4),
        (256, 512, 32, 2),
        (256, 512, 64, 8),
        (256, 256, 32, 8),
        (128, 96, 32, 1),
    )
]


@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_batch_is_each_slice_alone(shape: ExpertShape, shift: int, apart: bool, check: bool) -> None:
    slices = batch(shape, shift=shift, apart=apart)
    assert LAYOUT.batch(shape, slices).pack(check) is None
    for each in slices:
        for name, expected in alone(shape, each).items():
            np.testing.assert_array_equal(each.stored[name].array(), expected)
    assert mismatch(LAYOUT, shape, slices) is None


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_wrong_slice_is_named(shape: ExpertShape, apart: bool) -> None:
    slices = batch(shape, apart=apart)
    LAYOUT.batch(shape, slices).pack()
    for i, each in enumerate(slices):
        for projection in PROJECTIONS:
            for role in Role:
                array, at = place(each, projection, role)
                array[at] ^= array.dtype.type(1 << 9)
                found = mismatch(LAYOUT, shape, slices)
                assert found is not None
                assert (found.slice, found.projection) == (i, projection)
                assert found.where.startswith(f"{role} differs at row ")
                array[at] ^= array.dtype.type(1 << 9)
    assert mismatch(LAYOUT, shape, slices) is None


def watch_tables(monkeypatch: pytest.MonkeyPatch, seen: Callable[[str, NDArray[np.int64]], None]) -> None:
    """Tell of every table of parts that is packed in one call."""
    for module, name in ((qweight, "pack_qweight_parts"), (scales, "pack_scale_parts")):
        function = getattr(module, name)

        def watched(
            source: Any, marlin: Any, parts: Any, check: bool, name: str = name, function: Any = function
        ) -> Any:
            seen(name, parts)
            return function(source, marlin, parts, check)

        monkeypatch.setattr(module, name, watched)


@pytest.mark.parametrize(
    ("shape", "options", "word_table", "scale_table"),
    [
        (SHAPES[0], {}, True, True),
        (SHAPES[0], {"shift": 1}, True, False),
        (SHAPES[0], {"apart": True}, False, False),
        (SHAPES[2], {}, True, False),  # one group for all of w2's K: another order
        (SHAPES[3], {}, False, False),  # padded: copies
    ],
)
def test_which_go_in_one_call(
    monkeypatch: pytest.MonkeyPatch,
    shape: ExpertShape,
    options: dict[str, Any],
    word_table: bool,
    scale_table: bool,
) -> None:
    called: list[str] = []
    watch_tables(monkeypatch, lambda name, parts: called.append(name))
    LAYOUT.batch(shape, batch(shape, **options)).pack()
    assert called == ["pack_qweight_parts"] * word_table + ["pack_scale_parts"] * scale_table


def uncompiled(function: Any) -> Any:
    """The Python source of a compiled function, or the function itself where numba is told not to compile."""
    return getattr(function, "py_func", function)


@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize("transient", [False, True])
@pytest.mark.parametrize(("index", "projection"), [(0, "gate_proj"), (3, "up_proj"), (7, "down_proj")])
def test_a_wrong_slice_is_named_while_packing(
    monkeypatch: pytest.MonkeyPatch, role: Role, transient: bool, index: int, projection: str
) -> None:
    """A compiled table cannot be made to err, so the same source runs uncompiled with a function that
    does.
    """
    module, name, table_name = {
        Role.WEIGHT: (qweight, "pack_qweight", "pack_qweight_parts"),
        Role.SCALE: (scales, "pack_scale_words", "pack_scale_parts"),
    }[role]
    slices = batch(SHAPES[0])
    stored = slices[index].stored[f"{'w2' if projection == 'down_proj' else 'w13'}_{role}"]
    target = stored if role is Role.WEIGHT else stored.in_words()
    begin = target.base + (target.cols // 2 if projection == "up_proj" else 0)
    pack, table_function = uncompiled(getattr(module, name)), uncompiled(getattr(module, table_name))
    calls = []

    def errs(source: RowView, marlin: RowView) -> None:
        pack(source, marlin)
        if marlin.base == begin:
            marlin.flat[begin] ^= np.uint64(1)
            calls.append(begin)

    def looks_again(source: Any, marlin: Any, parts: Any, check: bool) -> int:
        at = table_function(source, marlin, parts, check)
        if transient and at >= 0:
            marlin[parts[at, Column.MARLIN]] ^= np.uint64(1)
        return int(at)

    monkeypatch.setattr(module, name, errs)
    monkeypatch.setattr(module, table_name, looks_again)
    found = LAYOUT.batch(SHAPES[0], slices).pack(check=True)
    assert calls
    assert found is not None
    assert (found.slice, found.projection) == (index, projection)
    said = "it differed when it was made" if transient else f"{role} differs at row 0 of"
    assert found.where.startswith(said)
    calls.clear()
    assert LAYOUT.batch(SHAPES[0], slices).pack(check=False) is None
    assert calls


@pytest.mark.parametrize(
    ("shape", "span", "sizes"),
    [
        (SHAPES[0], 1, {64}),  # the smallest parts
        (
            shape_of(384, 384, 32, 2),
            24 << 10,
            {64, 128},
        ),  # slices of 192 rows of 192 bytes: the second part of each is shorter
    ],
)
def test_parts_of_slices(
    monkeypatch: pytest.MonkeyPatch, shape: ExpertShape, span: int, sizes: set[int]
) -> None:
    """Slices cut into parts come out the same, and the parts go through the source in order."""
    tables: list[NDArray[np.int64]] = []
    whole, parts = batch(shape), batch(shape)
    LAYOUT.batch(shape, whole).pack()
    monkeypatch.setattr("marlin_convert.layout.batch.SPAN", span)
    watch_tables(monkeypatch, lambda name, parts: tables.append(parts))
    assert LAYOUT.batch(shape, parts).pack(check=True) is None
    for one, other in zip(whole, parts, strict=True):
        for name in one.stored:
            np.testing.assert_array_equal(one.stored[name].array(), other.stored[name].array())
    assert set(tables[0][:, Column.ROWS].tolist()) == sizes
    for table in tables:
        assert (np.diff(table[:, Column.SOURCE]) >= 0).all()
        rows = [each.source[projection, Role.WEIGHT].rows for each in parts for projection in PROJECTIONS]
        made = np.bincount(table[:, Column.SLICE], weights=table[:, Column.ROWS])
        assert made.tolist() == rows


def test_parts_are_all_of_a_slice_once() -> None:
    """Parts are checked one by one, so a missing one or one on top of another is refused before anything is
    packed.
    """
    whole = np.array(
        [
            (0, 8, 192, 8, 0, 384, 0, 192),
            (1536, 8, 192, 8, 192, 384, 1, 192),
            (3072, 8, 128, 8, 3072, 128, 2, 128),
        ],
        np.int64,
    )
    table = np.array(
        [(0, 8, 128, 8, 0, 384, 0, 192), (1024, 8, 64, 8, 128, 384, 0, 192), *map(tuple, whole[1:])], np.int64
    )
    require_all_once(whole, table)
    with pytest.raises(ValueError, match="not all of it"):
        require_all_once(whole, table[[0, 2, 3]])
    for row, place in ((1, 64), (1, 320), (3, 3071), (3, 192), (0, 1), (2, 256)):
        spoiled = table.copy()
        spoiled[row, 4] = place
        with pytest.raises(ValueError, match="written to one place"):
            require_all_once(whole, spoiled)


def test_rows_of_four_scales_may_not_reach_into_another_slice() -> None:
    """A 64-bit element of a row of scales becomes four rows of the Marlin side."""
    whole = np.array([(0, 2, 64, 2, 0, 64, 0, 16), (128, 2, 64, 2, 448, 64, 1, 16)], np.int64)
    require_all_once(whole, whole, lines=1)
    with pytest.raises(ValueError, match="written to one place"):
        require_all_once(whole, whole, lines=4)


def test_nothing_to_move() -> None:
    moves = LAYOUT.batch(SHAPES[0], [])
    assert moves.pack() is None
    assert moves.pack(check=True) is None


def test_shapes_of_a_batch_are_checked() -> None:
    first, *rest = batch(SHAPES[0])
    name, view = next(iter(first.stored.items()))
    short = ExpertSlice(first.source, dict(first.stored) | {name: view.part(1, view.rows - 1, 0, view.cols)})
    with pytest.raises(ValueError, match=r"needs a Marlin side of|could not broadcast"):
        LAYOUT.batch(SHAPES[0], [*rest, short]).pack()
