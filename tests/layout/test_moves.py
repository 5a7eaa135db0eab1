"""Many slices in one call: the same as each alone, in one buffer or many, and the wrong one is named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from marlin_convert.layout import scales, words
from marlin_convert.layout.moe import MarlinU4B8
from marlin_convert.layout.moves import require_all_once
from marlin_convert.layout.protocol import PROJECTIONS, ExpertShape, Slice
from marlin_convert.layout.rows import Rows

LAYOUT = MarlinU4B8()
EXPERTS = 2


def spy(
    monkeypatch: pytest.MonkeyPatch, module: ModuleType, name: str, see: Callable[[tuple[Any, ...]], object]
) -> None:
    """Show the arguments of a function's calls to `see` first."""
    function = getattr(module, name)

    def called(*args: Any) -> Any:
        see(args)
        return function(*args)

    monkeypatch.setattr(module, name, called)


def batch(shape: ExpertShape, *, shift: int = 0, apart: bool = False) -> list[Slice]:
    """All slices of some experts, sources and targets behind each other in a buffer each; `shift` puts scales
    off their words, `apart` in many.
    """
    memory = np.random.default_rng(shape.group_size + shape.moe_tp).integers(0, 256, 1 << 21, dtype=np.uint8)
    targets = np.full(1 << 21, 0xEE, np.uint8)
    source_at = target_at = 0
    stacked = {tensor.name: tensor.shape for tensor in LAYOUT.stacked(shape)}
    made = []
    sources, source_words, target_words = {}, memory.view(np.uint64), targets.view(np.uint64)
    source_scales, target_scales = memory.view(np.uint16), targets.view(np.uint16)
    for expert in range(EXPERTS):
        for projection in PROJECTIONS:
            out, inputs = shape.matrix(projection)
            packed = Rows(source_words, source_at // 8, inputs // 16, out, inputs // 16)
            source_at += out * inputs // 2
            scale = Rows(
                source_scales,
                source_at // 2 + shift,
                inputs // shape.group_size,
                out,
                inputs // shape.group_size,
            )
            source_at += -(-(out * inputs // shape.group_size * 2 + 2 * shift) // 8) * 8
            sources[expert, projection] = packed, scale
    for index in range(shape.moe_tp):
        for expert in range(EXPERTS):
            places = {}
            for name, (rows, cols) in stacked.items():
                wide = name.endswith("packed")
                flat, per = (target_words, 2) if wide else (target_scales, 1)
                places[name] = Rows(flat, target_at // (8 if wide else 2), cols // per, rows, cols // per)
                target_at += rows * cols * (4 if wide else 2)
            for projection in PROJECTIONS:
                w, s = (places[name] for name in LAYOUT.targets(projection))
                if apart:
                    w, s = (Rows(each.flat[:], *each[1:]) for each in (w, s))
                made.append(Slice(projection, index, *sources[expert, projection], w, s))
    assert max(source_at, target_at) < memory.size
    return made


def alone(shape: ExpertShape, each: Slice) -> tuple[NDArray[Any], NDArray[Any]]:
    """One slice packed by itself, in memory of its own."""
    w, s = (Rows.of(np.zeros((rows.rows, rows.cols), rows.flat.dtype)) for rows in (each.words, each.scales))
    LAYOUT.pack(shape, each.projection, each.index, each.packed, each.scale, w, s)
    return w.array(), s.array()


def part(projection: str, array: NDArray[Any]) -> NDArray[Any]:
    """The columns that a projection fills."""
    half = array.shape[1] // 2
    return {"gate_proj": array[:, :half], "up_proj": array[:, half:], "down_proj": array}[projection]


SHAPES = [
    ExpertShape(*sizes)
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
    moves = LAYOUT.moves(shape, slices)
    assert moves.pack(check) is None
    for each in slices:
        w, s = alone(shape, each)
        for made, expected in ((each.words.array(), w), (each.scales.array(), s)):
            np.testing.assert_array_equal(part(each.projection, made), part(each.projection, expected))
    assert moves.mismatch() is None
    assert LAYOUT.moves(shape, slices).mismatch() is None


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_wrong_slice_is_named(shape: ExpertShape, apart: bool) -> None:
    slices = batch(shape, apart=apart)
    LAYOUT.moves(shape, slices).pack()
    for i, each in enumerate(slices):
        column = {"gate_proj": 3, "up_proj": each.words.cols // 2 + 3, "down_proj": 3}[each.projection]
        each.words.array()[0, column] ^= np.uint64(1 << 17)
        assert (found := LAYOUT.moves(shape, slices).mismatch()) is not None
        assert found[0] == i
        assert found[1].startswith("weight_packed differs at row ")
        each.words.array()[0, column] ^= np.uint64(1 << 17)
        column = {"gate_proj": 3, "up_proj": each.scales.cols // 2 + 3, "down_proj": 3}[each.projection]
        each.scales.array()[0, column] ^= np.uint16(1 << 9)
        assert (found := LAYOUT.moves(shape, slices).mismatch()) is not None
        assert found[0] == i
        assert found[1].startswith("weight_scale differs at row ")
        each.scales.array()[0, column] ^= np.uint16(1 << 9)
    assert LAYOUT.moves(shape, slices).mismatch() is None


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
    spy(monkeypatch, words, "pack_table", lambda args: called.append("pack_table"))
    spy(monkeypatch, scales, "pack_scale_table", lambda args: called.append("pack_scale_table"))
    LAYOUT.moves(shape, batch(shape, **options)).pack()
    assert called == ["pack_table"] * word_table + ["pack_scale_table"] * scale_table


def uncompiled(function: Any) -> Any:
    """The Python source of a compiled function, or the function itself where numba is told not to compile."""
    return getattr(function, "py_func", function)


@pytest.mark.parametrize(
    ("module", "name", "what"),
    [(words, "pack_words", "weight_packed"), (scales, "pack_scale_words", "weight_scale")],
)
@pytest.mark.parametrize("transient", [False, True])
@pytest.mark.parametrize("index", [0, 7, 11])
def test_a_wrong_slice_is_named_while_packing(
    monkeypatch: pytest.MonkeyPatch, module: Any, name: str, what: str, transient: bool, index: int
) -> None:
    """A compiled table cannot be made to err, so the same source runs uncompiled with a function that does,
    in a slice of gate, up or down.
    """
    shape = SHAPES[0]
    slices = batch(shape)
    pack, wrong = uncompiled(getattr(module, name)), slices[index]
    place = wrong.words if module is words else wrong.scales.in_words()
    calls = []

    def errs(
        source: Any,
        s_base: int,
        s_stride: int,
        size_n: int,
        cols: int,
        target: Any,
        m_base: int,
        m_stride: int,
    ) -> None:
        pack(source, s_base, s_stride, size_n, cols, target, m_base, m_stride)
        if m_base == place.base + (place.cols // 2 if wrong.projection == "up_proj" else 0):
            target[m_base] ^= np.uint64(1)
            calls.append(m_base)

    def looks_again(source: Any, target: Any, table: Any, check: bool) -> int:
        at = table_function(source, target, table, check)
        if transient and at >= 0:
            target[table[at, 4]] ^= np.uint64(1)
        return int(at)

    table_name = {"pack_words": "pack_table", "pack_scale_words": "pack_scale_table"}[name]
    table_function = uncompiled(getattr(module, table_name))
    monkeypatch.setattr(module, name, errs)
    monkeypatch.setattr(module, table_name, looks_again)
    found = LAYOUT.moves(shape, slices).pack(check=True)
    assert calls
    assert found is not None
    assert found[0] == index
    assert found[1].startswith(
        f"{what} differs at row 0 of" if not transient else "it differed when it was made"
    )
    calls.clear()
    assert LAYOUT.moves(shape, slices).pack(check=False) is None
    assert calls


@pytest.mark.parametrize(
    ("shape", "span", "sizes"),
    [
        (SHAPES[0], 1, {64}),  # the smallest parts
        (
            ExpertShape(384, 384, 32, 2),
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
    LAYOUT.moves(shape, whole).pack()
    monkeypatch.setattr("marlin_convert.layout.moves.SPAN", span)
    for module, name in ((words, "pack_table"), (scales, "pack_scale_table")):
        spy(monkeypatch, module, name, lambda args: tables.append(args[2]))
    assert LAYOUT.moves(shape, parts).pack(check=True) is None
    for one, other in zip(whole, parts, strict=True):
        np.testing.assert_array_equal(one.words.array(), other.words.array())
        np.testing.assert_array_equal(one.scales.array(), other.scales.array())
    assert set(tables[0][:, 2].tolist()) == sizes
    for table in tables:
        assert (np.diff(table[:, 0]) >= 0).all()
        rows = [each.packed.rows // (1 if each.projection == "down_proj" else shape.moe_tp) for each in parts]
        assert np.bincount(table[:, 6], weights=table[:, 2]).tolist() == rows


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


def test_nothing_to_move() -> None:
    moves = LAYOUT.moves(SHAPES[0], [])
    assert moves.pack() is None
    assert moves.pack(check=True) is None
    assert moves.mismatch() is None


def test_shapes_of_a_batch_are_checked() -> None:
    first, *rest = batch(SHAPES[0])
    short = replace(first, words=first.words.part(1, first.words.rows - 1, 0, first.words.cols))
    with pytest.raises(ValueError, match=r"needs a Marlin side of|could not broadcast"):
        LAYOUT.moves(SHAPES[0], [*rest, short]).pack()
