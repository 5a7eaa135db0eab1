"""Shard files: every promise of the format page, for tensors of any sizes; and headers that the reference
library reads.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from safetensors import deserialize

from marlin_convert.checkpoint.header import parse_header
from marlin_convert.slicing import Topology
from marlin_convert.storage.shard_file import (
    DTYPE_SIZE,
    FileLayout,
    Place,
    TensorSpec,
    data_start,
    header_bytes,
    header_json,
    is_filler,
    lay_out,
    metadata_of,
)

PAGE = 4096
Specs = list[tuple[TensorSpec, str | None]]

# Sizes around a page and its multiples, and any others.
extents = st.one_of(
    st.integers(1, 40),
    st.sampled_from([1023, 1024, 1025, 2047, 2048, 2049, 4095, 4096, 4097, 8192, 12288]),
    st.integers(1, 20_000),
)


@st.composite
def tensors(draw: st.DrawFn) -> Specs:
    specs: Specs = []
    for block in range(draw(st.integers(0, 9))):
        dtype = draw(st.sampled_from(["BF16", "I32", "F32", "U8", "I64"]))
        fuse = f"fused.{block}" if draw(st.booleans()) else None
        for member in range(draw(st.integers(1, 3)) if fuse else 1):
            specs.append(
                (
                    TensorSpec(
                        f"t.{block}.{member}",
                        dtype,
                        (draw(extents), *draw(st.sampled_from([(), (2,), (1, 3)]))),
                    ),
                    fuse,
                )
            )
    return specs


many = settings(max_examples=150)


def blocks_of(specs: Specs) -> list[list[TensorSpec]]:
    """Tensors that must stay together, in load order."""
    blocks: dict[str, list[TensorSpec]] = {}
    for spec, fuse in specs:
        blocks.setdefault(fuse or spec.name, []).append(spec)
    return list(blocks.values())


def real(layout: FileLayout) -> list[TensorSpec]:
    return [placed.spec for placed in layout.tensors if not is_filler(placed.spec.name)]


@many
@given(specs=tensors())
@example(specs=[(TensorSpec("big", "U8", (5001,)), None), (TensorSpec("bias", "F32", (4,)), None)])
@example(
    specs=[
        (TensorSpec("big", "BF16", (2049,)), None),
        (TensorSpec("table", "I64", (4,)), None),
        (TensorSpec("bias", "F32", (4,)), None),
    ]
)
def test_every_promise(specs: Specs) -> None:
    layout = lay_out(specs)
    # each tensor once, with no hole and no overlap
    assert sorted(spec.name for spec in real(layout)) == sorted(spec.name for spec, _ in specs)
    position = 0
    for placed in layout.tensors:
        assert placed.offset == position
        position = placed.end
    assert layout.data_size == position
    assert position % PAGE == 0

    heads = {block[0].name for block in blocks_of(specs)}
    for placed in layout.tensors:
        spec = placed.spec
        assert placed.offset % DTYPE_SIZE[spec.dtype] == 0, "aligned for its dtype"
        if spec.size >= PAGE and spec.name in heads:
            assert placed.offset % PAGE == 0, "a tensor of a page or more starts on one"


@many
@given(specs=tensors())
def test_fillers_stand_only_where_they_must(specs: Specs) -> None:
    layout = lay_out(specs)
    fillers = [placed for placed in layout.tensors if is_filler(placed.spec.name)]
    assert [placed.spec.name for placed in fillers] == [f"__pad__.{i}" for i in range(len(fillers))]
    sizes = {block[0].name: sum(spec.size for spec in block) for block in blocks_of(specs)}
    for placed in fillers:
        assert placed.spec.dtype == "U8"
        assert placed.spec.shape == (placed.spec.size,)
        behind = layout.tensors[layout.tensors.index(placed) + 1 :]
        if not behind or sizes[behind[0].spec.name] >= PAGE:
            assert placed.end % PAGE == 0
            assert placed.spec.size < PAGE
        else:  # before a small tensor, only up to its element
            assert placed.spec.size < DTYPE_SIZE[behind[0].spec.dtype]


@many
@given(specs=tensors())
def test_order(specs: Specs) -> None:
    layout = lay_out(specs)
    blocks = blocks_of(specs)
    order = [spec.name for spec in real(layout)]
    whole = [spec.name for block in blocks if sum(spec.size for spec in block) % PAGE == 0 for spec in block]
    assert order[: len(whole)] == whole, "whole pages first, in load order"
    large = [
        spec.name
        for block in blocks
        if (size := sum(spec.size for spec in block)) % PAGE and size > PAGE
        for spec in block
    ]
    assert order[len(whole) : len(whole) + len(large)] == large, (
        "then what is more than a page, in load order"
    )
    small = [block for block in blocks if sum(spec.size for spec in block) < PAGE]
    small.sort(key=lambda block: -DTYPE_SIZE[block[0].dtype])
    assert order[len(whole) + len(large) :] == [spec.name for block in small for spec in block], (
        "then the small ones by element size"
    )


@many
@given(specs=tensors())
def test_fused_views(specs: Specs) -> None:
    layout = lay_out(specs)
    places = {placed.spec.name: placed for placed in layout.tensors}
    members: dict[str, list[str]] = {}
    for spec, fuse in specs:
        if fuse is not None:
            members.setdefault(fuse, []).append(spec.name)
    assert {view.name: list(view.members) for view in layout.fused} == {
        name: names for name, names in members.items() if len(names) > 1
    }
    for view in layout.fused:
        for first, second in zip(view.members, view.members[1:], strict=False):
            assert places[second].offset == places[first].end


@many
@given(
    specs=tensors(),
    metadata=st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=3),
    more=st.integers(0, 2),
)
def test_headers_open_with_the_reference_library(specs: Specs, metadata: dict[str, str], more: int) -> None:
    layout = lay_out(specs)
    assume(layout.data_size < 400_000)
    start = data_start(layout, [metadata]) + more * PAGE
    head = header_bytes(layout, metadata, start)
    assert len(head) == start
    assert start % PAGE == 0
    assert int.from_bytes(head[:8], "little") == start - 8
    assert head.rstrip(b" ").endswith(b"}")
    data = (bytes(range(251)) * (layout.data_size // 251 + 1))[: layout.data_size]
    theirs = {
        name: (entry["dtype"], entry["shape"], bytes(entry["data"]))
        for name, entry in deserialize(head + data)
    }
    assert theirs == {
        p.spec.name: (p.spec.dtype, list(p.spec.shape), data[p.offset : p.end]) for p in layout.tensors
    }
    ours = parse_header("f", start + layout.data_size, head[8:])
    assert ours.metadata == metadata
    assert [(t.name, t.offset - start) for t in ours.tensors] == [
        (p.spec.name, p.offset) for p in layout.tensors
    ]
    assert list(json.loads(head[8:])) == [
        "__metadata__",
        *(p.spec.name for p in layout.tensors),
    ], "in file order"


def test_data_starts_where_the_longest_header_ends() -> None:
    layout = lay_out([(TensorSpec("a", "U8", (PAGE,)), None)])
    empty = len(header_json(layout, {"k": ""})) + 8
    for length, start in ((PAGE - empty, PAGE), (PAGE - empty + 1, 2 * PAGE), (3 * PAGE - empty, 3 * PAGE)):
        metadatas = [{"k": ""}, {"k": "x" * length}, {"k": "y"}]
        assert data_start(layout, metadatas) == start
        heads = [header_bytes(layout, metadata, start) for metadata in metadatas]
        assert {len(head) for head in heads} == {start}
        assert {head[:8] for head in heads} == {(start - 8).to_bytes(8, "little")}


def test_nothing_to_store() -> None:
    layout = lay_out([])
    assert (layout.tensors, layout.fused, layout.data_size) == ((), (), 0)


def test_one_of_a_pair_alone_is_no_view() -> None:
    assert lay_out([(TensorSpec("a", "U8", (8,)), "ab"), (TensorSpec("c", "U8", (8,)), None)]).fused == ()


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        (
            [TensorSpec(f"t{i}", "U8", (PAGE,)) for i in range(1025)],
            "1025 tensors in one file, more than the 1024",
        ),
        (
            [TensorSpec(f"t{i}", "U8", (3,)) for i in range(1024)],
            "1025 tensors in one file, more than the 1024",
        ),
        ([TensorSpec("n" * 128, "U8", (3,))], "is not 1 to 127 ASCII characters"),
        ([TensorSpec("ü", "U8", (3,))], "is not 1 to 127 ASCII characters"),
        ([TensorSpec("a\\b", "U8", (3,))], "without backslash or quote"),
        ([TensorSpec('a"b', "U8", (3,))], "without backslash or quote"),
        ([TensorSpec("", "U8", (3,))], "is not 1 to 127 ASCII characters"),
        ([TensorSpec("a\nb", "U8", (3,))], "is not 1 to 127 ASCII characters"),
        ([TensorSpec("a", "U8", (1, 1, 1, 1, 3))], "at most 4 dimensions"),
        ([TensorSpec("a", "U8", (3, 0))], "nothing empty"),
    ],
)
def test_limits_of_small_loaders(specs: list[TensorSpec], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        lay_out([(spec, None) for spec in specs])


def test_up_to_the_limits() -> None:
    layout = lay_out([(TensorSpec("n" * 124 + f"{i:03d}", "U8", (1, 1, 1, PAGE)), None) for i in range(1000)])
    assert len(layout.tensors) == 1000
    assert len(lay_out([(TensorSpec(f"t{i}", "U8", (PAGE,)), None) for i in range(1024)]).tensors) == 1024


def test_sizes() -> None:
    sizes: dict[str, Any] = {"U8": 6, "BF16": 12, "F32": 24, "I64": 48}
    for dtype, size in sizes.items():
        assert TensorSpec("x", dtype, (2, 3)).size == size == math.prod((2, 3)) * DTYPE_SIZE[dtype]
    assert TensorSpec("x", "F32", ()).size == 4


def test_identity() -> None:
    assert metadata_of("s" * 32, "layout", Topology(8, 2), Place(5, "7"), range(8, 16)) == {
        "format": "marlin-convert",
        "format_version": "1",
        "layout": "layout",
        "source": "s" * 32,
        "tp": "8",
        "ep": "2",
        "rank": "5",
        "layer": "7",
        "expert_range": "8:16",
    }
    assert (
        metadata_of("s" * 32, "layout", Topology(8, 2), Place(None, "common"), range(0))["rank"] == "common"
    )
    assert metadata_of("s" * 32, "layout", Topology(8, 2), Place(0, "top"), range(0))["expert_range"] == "0:0"
