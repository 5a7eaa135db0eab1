"""Headers: attack files are refused by file and tensor, and what is accepted is what the reference library
reads.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, deserialize
from safetensors.numpy import save

from attacks import ATTACKS, GOOD, GOOD_SIZE, encode, file_of, written
from marlin_convert.checkpoint.header import TensorEntry, parse_header, read_header
from marlin_convert.checkpoint.store import header_of
from marlin_convert.documents.bounds import HEADER
from marlin_convert.errors import SourceError
from marlin_convert.storage.shard_file import DTYPE_SIZE

many = settings(max_examples=200)


@pytest.mark.parametrize("name", ATTACKS)
def test_attacks_are_refused_by_name(name: str, tmp_path: Path) -> None:
    path = written(name, tmp_path)
    with pytest.raises(SourceError) as caught:
        header_of(path)
    message = str(caught.value)
    assert message.startswith("attack.safetensors: ")
    assert all(word in message for word in ATTACKS[name].words), message
    assert len(message) < 400, "a message, not a copy of the header"


#: what the reference library lets pass: it looks for less, or keeps the last of two
LENIENT = {
    "a blank first",
    "shape has a float",
    "a name twice",
    "metadata twice",
    "a key twice",
    "one key more",
    "entry is a list",
}


@pytest.mark.parametrize("name", sorted(ATTACKS.keys() - LENIENT))
def test_the_reference_library_refuses_them_too(name: str) -> None:
    """The attacks are attacks, not rules of our own (but for the few that are)."""
    with pytest.raises(SafetensorError):
        deserialize(ATTACKS[name].make())


def parsed(content: bytes) -> Any:
    return read_header(
        "f.safetensors", len(content), lambda offset, length: content[offset : offset + length]
    )


def test_a_good_header() -> None:
    raw = encode(GOOD)
    header = parsed(file_of(raw))
    start = 8 + len(raw)
    assert header.raw == raw
    assert header.data_start == start
    assert header.size == start + GOOD_SIZE
    assert header.metadata == {"format": "pt"}
    assert header.tensors == (
        TensorEntry("a", "BF16", (2, 3), start, 12),
        TensorEntry("b", "I32", (4,), start + 12, 16),
        TensorEntry("c", "F32", (), start + 28, 4),
    )


def test_tensors_come_in_file_order_whatever_the_header_order_and_padding() -> None:
    raw = encode({name: GOOD[name] for name in ("c", "a", "b")}) + b" " * 13
    header = parsed(file_of(raw))
    assert [tensor.name for tensor in header.tensors] == ["a", "b", "c"]
    assert header.metadata == {}
    assert header.tensors[0].offset == 8 + len(raw)


def test_empty_tensors_and_no_tensors() -> None:
    entries = {
        "a": {"dtype": "I8", "shape": [3, 0], "data_offsets": [0, 0]},
        "b": {"dtype": "I8", "shape": [1], "data_offsets": [0, 1]},
    }
    header = parsed(file_of(encode(entries), 1))
    assert [(t.name, t.size) for t in header.tensors] == [("a", 0), ("b", 1)]
    assert parsed(file_of(b"{}", 0)).tensors == ()


def test_only_the_header_is_read() -> None:
    content = file_of(encode(GOOD))
    asked = []

    def read(offset: int, length: int) -> bytes:
        asked.append((offset, length))
        return content[offset : offset + length]

    read_header("f", len(content), read)
    assert asked == [(0, 8), (8, len(encode(GOOD)))]


def test_a_header_that_is_too_long_is_not_read() -> None:
    asked = []

    def read(offset: int, length: int) -> bytes:
        asked.append((offset, length))
        return (HEADER + 1).to_bytes(8, "little")

    with pytest.raises(SourceError, match=f"claims {HEADER + 1} bytes"):
        read_header("f", 1 << 40, read)
    assert asked == [(0, 8)]


def test_the_longest_header_is_read() -> None:
    """A hundred million bytes, mostly of the padding that the format allows."""
    raw = encode(GOOD) + b" " * (HEADER - len(encode(GOOD)))
    assert [t.name for t in parse_header("f", 8 + HEADER + GOOD_SIZE, raw).tensors] == ["a", "b", "c"]


def test_dtype_sizes_are_numpys() -> None:
    names = {
        "BOOL": "bool",
        "U8": "u1",
        "I8": "i1",
        "I16": "i2",
        "U16": "u2",
        "F16": "f2",
        "I32": "i4",
        "U32": "u4",
        "F32": "f4",
    }
    names |= {"I64": "i8", "U64": "u8", "F64": "f8"}
    for dtype, name in names.items():
        array = np.zeros(3, name)
        (tensor,) = parsed(save({"x": array})).tensors
        assert (tensor.dtype, tensor.size) == (dtype, array.nbytes)
    assert DTYPE_SIZE.keys() - names.keys() == {"BF16", "F8_E4M3", "F8_E5M2"}


def accepted(content: bytes) -> Any:
    """The header, or None where it is refused as it should be: with a SourceError that can be printed."""
    try:
        return parsed(content)
    except SourceError as error:
        refusal = str(error)
    assert refusal.startswith("f.safetensors: ")
    assert refusal.encode()
    return None


def assert_agrees_with_the_library(content: bytes) -> None:
    """Refused, or accepted with the very tensors that the library finds."""
    header = accepted(content)
    if header is None:
        return
    theirs = {
        name: (entry["dtype"], tuple(entry["shape"]), bytes(entry["data"]))
        for name, entry in deserialize(content)
    }
    ours = {t.name: (t.dtype, t.shape, content[t.offset : t.offset + t.size]) for t in header.tensors}
    assert ours == theirs


@many
@given(data=st.data())
def test_mutated_bytes(data: st.DataObject) -> None:
    content = bytearray(file_of(encode(GOOD)))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(content) - 1))
        kind = data.draw(st.sampled_from(["set", "cut", "insert", "drop"]))
        if kind == "set":
            content[at] = data.draw(st.integers(0, 255))
        elif kind == "insert":
            content[at:at] = data.draw(st.binary(min_size=1, max_size=3))
        elif kind == "drop" and len(content) > 1:
            del content[at]
        elif kind == "cut" and at:
            del content[at:]
    assert_agrees_with_the_library(bytes(content))


edges = st.sampled_from([1 << 31, 1 << 61, (1 << 62) - 1, 1 << 63, (1 << 64) - 1, 1 << 64])
numbers = st.one_of(st.integers(-2, 40), edges, st.booleans(), st.floats())
scalars = st.one_of(
    numbers,
    st.none(),
    st.text(max_size=3),
    st.sampled_from(["BF16", "I32", "F8_E4M3", "U64", "F32", "F4", "C64"]),
)
values = st.one_of(
    scalars, st.lists(scalars, max_size=3), st.dictionaries(st.text(max_size=3), scalars, max_size=2)
)
plausible = {
    "dtype": st.one_of(st.sampled_from(sorted(DTYPE_SIZE)), scalars),
    "shape": st.lists(st.one_of(st.integers(0, 4), numbers), max_size=4),
    "data_offsets": st.lists(numbers, min_size=1, max_size=3),
}
entries = st.one_of(
    values, st.fixed_dictionaries(plausible), st.fixed_dictionaries(dict.fromkeys(plausible, values))
)
names = st.sampled_from(["a", "b", "c", "d", "__metadata__", ""])


@many
@given(document=st.dictionaries(names, entries, max_size=3), good=st.booleans(), size=st.integers(0, 64))
def test_mutated_entries(document: dict[str, Any], good: bool, size: int) -> None:
    raw = json.dumps(GOOD | document if good else document).encode("utf-8", "surrogatepass")
    assert_agrees_with_the_library(file_of(raw, GOOD_SIZE if good else size))


texts = st.text(max_size=4)


@many
@given(
    data=st.data(),
    metadata=st.none() | st.dictionaries(texts, texts, max_size=2),
    names=st.lists(texts, max_size=5, unique=True),
)
def test_good_headers_of_any_kind_are_accepted(
    data: st.DataObject, metadata: dict[str, str] | None, names: list[str]
) -> None:
    document: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    position = 0
    for name in names:
        dtype, shape = (
            data.draw(st.sampled_from(sorted(DTYPE_SIZE))),
            data.draw(st.lists(st.integers(1, 4), max_size=3)),
        )
        size = DTYPE_SIZE[dtype] * math.prod(shape)
        document[name] = {"dtype": dtype, "shape": shape, "data_offsets": [position, position + size]}
        position += size
    order = data.draw(st.permutations(list(document)))
    text = json.dumps({key: document[key] for key in order}, ensure_ascii=data.draw(st.booleans()))
    content = file_of(text.encode(), bytes(i % 251 for i in range(position)))
    header = parsed(content)
    assert [t.name for t in header.tensors] == names
    assert header.metadata == (metadata or {})
    assert_agrees_with_the_library(content)


def test_what_git_lfs_leaves_in_place_of_a_file() -> None:
    """Named as that, and what to do."""
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 9999999999\n"
    with pytest.raises(SourceError, match=r"x is a Git LFS pointer of 135 bytes.*git lfs pull.*download"):
        read_header("x", len(pointer), lambda offset, length: pointer[offset : offset + length])


@pytest.mark.parametrize("other", [True, 1.0])
def test_a_shape_that_equals_one_seen_before_is_not_taken_for_it(other: object) -> None:
    def of(extent: object) -> bytes:
        entry = {"dtype": "U8", "shape": [extent], "data_offsets": [0, 1]}
        return file_of(json.dumps({"a": entry}).encode(), b"x")

    assert parsed(of(1)).tensors[0].shape == (1,)
    with pytest.raises(SourceError, match="the header entry of a is malformed"):
        parsed(of(other))
