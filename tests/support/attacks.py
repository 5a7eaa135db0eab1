"""Files that claim to be safetensors and are not: each breaks one promise of the format.

`ATTACKS` maps a name to what makes the file, and `written` puts one on disk. Every one of them must be
refused by whoever reads headers, with a message that names the file and, where one is to blame, the tensor.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GOOD: dict[str, Any] = {
    "__metadata__": {"format": "pt"},
    "a": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]},
    "b": {"dtype": "I32", "shape": [4], "data_offsets": [12, 28]},
    "c": {"dtype": "F32", "shape": [], "data_offsets": [28, 32]},
}
GOOD_SIZE = 32


def file_of(header: bytes, data: int | bytes = GOOD_SIZE, length: int | None = None) -> bytes:
    """A file with this header; `length` is what it claims of the header, `data` its bytes or how many."""
    return (
        (len(header) if length is None else length).to_bytes(8, "little")
        + header
        + (bytes(data) if isinstance(data, int) else data)
    )


def encode(document: Any) -> bytes:
    """JSON without blanks."""
    return json.dumps(document, separators=(",", ":")).encode()


def with_entry(name: str, **changes: Any) -> bytes:
    """A good file but for what the header says of one tensor."""
    return file_of(encode(GOOD | {name: GOOD[name] | changes}))


def with_text(old: str, new: str) -> bytes:
    """A good file but for a piece of its header's text."""
    text = encode(GOOD).decode()
    assert text.count(old) == 1, old
    return file_of(text.replace(old, new).encode("utf-8", "surrogatepass"))


@dataclass(frozen=True)
class Attack:
    """What makes the file, and words that the refusal must have: the tensor to blame, what is wrong."""

    make: Callable[[], bytes]
    words: tuple[str, ...]


DEEP = 100_000

ATTACKS: dict[str, Attack] = {
    "empty": Attack(lambda: b"", ("0 bytes is too short",)),
    "only a length": Attack(lambda: (2).to_bytes(8, "little"), ("8 bytes is too short",)),
    "header cut off": Attack(lambda: file_of(encode(GOOD))[:60], ("truncated",)),
    "data cut off": Attack(lambda: file_of(encode(GOOD), GOOD_SIZE - 1), ("truncated",)),
    "all data gone": Attack(lambda: file_of(encode(GOOD), 0), ("truncated",)),
    "a byte too many": Attack(lambda: file_of(encode(GOOD), GOOD_SIZE + 1), ("longer than its header says",)),
    "huge length": Attack(
        lambda: file_of(encode(GOOD), length=(1 << 64) - 1), ("claims 18446744073709551615 bytes",)
    ),
    "length just over the limit": Attack(
        lambda: file_of(encode(GOOD), length=100_000_001), ("claims 100000001 bytes", "100000000")
    ),
    "length of more than the file": Attack(
        lambda: file_of(encode(GOOD), length=99_999_999), ("claims 99999999 bytes", "truncated")
    ),
    "length one too short": Attack(
        lambda: file_of(encode(GOOD), length=len(encode(GOOD)) - 1), ("not valid JSON",)
    ),
    "no JSON": Attack(lambda: file_of(b"PK\x03\x04 not JSON at all"), ("not valid JSON",)),
    "no header": Attack(lambda: file_of(b"", 40), ("not valid JSON",)),
    "a list": Attack(lambda: file_of(b"[]", 0), ("not a JSON object",)),
    "a blank first": Attack(lambda: file_of(b" " + encode(GOOD)), ("not a JSON object",)),
    "invalid UTF-8": Attack(
        lambda: file_of(encode(GOOD).replace(b'"a"', b'"\xff\xfe"')), ("not valid JSON",)
    ),
    "UTF-16": Attack(lambda: file_of(encode(GOOD).decode().encode("utf-16-le")), ("not valid JSON",)),
    "half a surrogate": Attack(lambda: with_text('"a":', '"\\ud800":'), ("not valid JSON",)),
    "zeros behind the JSON": Attack(lambda: file_of(encode(GOOD) + b"\0\0\0"), ("not valid JSON",)),
    "nested deeply": Attack(
        lambda: file_of(b'{"a":' + b"[" * DEEP + b"]" * DEEP + b"}"), ("not valid JSON",)
    ),
    "objects nested deeply": Attack(
        lambda: file_of(b'{"a":' * DEEP + b"1" + b"}" * DEEP), ("not valid JSON",)
    ),
    "a number of a million digits": Attack(
        lambda: with_text("[12,28]", "[12," + "9" * 1_000_000 + "]"), ("not valid JSON",)
    ),
    "a name twice": Attack(lambda: with_text('"b":', '"a":'), ("'a'", "twice")),
    "one name of 200,000 twice": Attack(
        lambda: file_of(
            b"{" + b",".join(b'"%d":{}' % (number % 199_999) for number in range(200_000)) + b"}", 0
        ),
        ("'0'", "twice"),
    ),
    "metadata twice": Attack(
        lambda: with_text('"a":', '"__metadata__":{},"a":'), ("'__metadata__'", "twice")
    ),
    "a key twice": Attack(
        lambda: with_text('"dtype":"I32"', '"dtype":"I32","dtype":"F32"'), ("'dtype'", "twice")
    ),
    "metadata is a list": Attack(
        lambda: file_of(encode(GOOD | {"__metadata__": []})), ("__metadata__", "strings")
    ),
    "metadata has a number": Attack(
        lambda: file_of(encode(GOOD | {"__metadata__": {"tp": 8}})), ("__metadata__", "strings")
    ),
    "metadata has an object": Attack(
        lambda: file_of(encode(GOOD | {"__metadata__": {"a": {}}})), ("__metadata__", "strings")
    ),
    "unknown dtype": Attack(lambda: with_entry("b", dtype="Q4"), ("b has the unknown dtype 'Q4'",)),
    "lower case dtype": Attack(lambda: with_entry("b", dtype="i32"), ("b has the unknown dtype 'i32'",)),
    "dtype is a number": Attack(lambda: with_entry("b", dtype=4), ("entry of b is malformed",)),
    "dtype is a list": Attack(lambda: with_entry("b", dtype=["I32"]), ("entry of b is malformed",)),
    "dtype is null": Attack(lambda: with_entry("b", dtype=None), ("entry of b is malformed",)),
    "entry is a list": Attack(
        lambda: file_of(encode(GOOD | {"b": ["I32", [4], [12, 28]]})), ("entry of b is malformed",)
    ),
    "entry is a string": Attack(lambda: file_of(encode(GOOD | {"b": "I32"})), ("entry of b is malformed",)),
    "entry is null": Attack(lambda: file_of(encode(GOOD | {"b": None})), ("entry of b is malformed",)),
    "no shape": Attack(
        lambda: file_of(encode(GOOD | {"b": {"dtype": "I32", "data_offsets": [12, 28]}})),
        ("entry of b is malformed",),
    ),
    "one key more": Attack(lambda: with_entry("b", strides=[1]), ("entry of b is malformed",)),
    "shape is a number": Attack(lambda: with_entry("b", shape=4), ("entry of b is malformed",)),
    "shape is an object": Attack(lambda: with_entry("c", shape={}), ("entry of c is malformed",)),
    "shape is an empty string": Attack(lambda: with_entry("c", shape=""), ("entry of c is malformed",)),
    "shape is negative twice": Attack(lambda: with_entry("b", shape=[-2, -2]), ("entry of b is malformed",)),
    "shape has a float": Attack(lambda: with_entry("b", shape=[4.0]), ("entry of b is malformed",)),
    "shape has a bool": Attack(lambda: with_entry("c", shape=[True]), ("entry of c is malformed",)),
    "shape is huge": Attack(lambda: with_entry("b", shape=[1 << 70]), ("entry of b is malformed",)),
    "shape overflows to nothing": Attack(
        lambda: with_entry("b", shape=[1 << 61, 1 << 61, 0], data_offsets=[12, 12]),
        ("entry of b is malformed",),
    ),
    "shape overflows to its size": Attack(
        lambda: with_entry("b", shape=[(1 << 61) + 2, 2]), ("entry of b is malformed",)
    ),
    "shape of 300,000 extents": Attack(
        lambda: with_entry("b", shape=[(1 << 61) + 1] * 300_000), ("entry of b is malformed",)
    ),
    "shape too large for its offsets": Attack(
        lambda: with_entry("b", shape=[5]), ("b is I32 [5], 20 bytes, but its offsets span 16",)
    ),
    "dtype too small for its offsets": Attack(
        lambda: with_entry("b", dtype="I16"), ("b is I16 [4], 8 bytes, but its offsets span 16",)
    ),
    "offsets are three": Attack(
        lambda: with_entry("b", data_offsets=[12, 28, 28]), ("entry of b is malformed",)
    ),
    "offsets are one": Attack(lambda: with_entry("b", data_offsets=[12]), ("entry of b is malformed",)),
    "offsets are an object": Attack(
        lambda: with_entry("b", data_offsets={"12": 0, "28": 0}), ("entry of b is malformed",)
    ),
    "offset is negative": Attack(
        lambda: with_entry("a", data_offsets=[-12, 0]), ("entry of a is malformed",)
    ),
    "offset is a float": Attack(
        lambda: with_entry("b", data_offsets=[12.0, 28.0]), ("entry of b is malformed",)
    ),
    "offset is a bool": Attack(
        lambda: with_entry("a", data_offsets=[False, 12]), ("entry of a is malformed",)
    ),
    "offset is a string": Attack(
        lambda: with_entry("b", data_offsets=["12", "28"]), ("entry of b is malformed",)
    ),
    "offset is not a number": Attack(lambda: with_text("[12,28]", "[NaN,28]"), ("b",)),
    "offset is endless": Attack(lambda: with_text("[12,28]", "[12,Infinity]"), ("b",)),
    "offset is huge": Attack(
        lambda: with_entry("b", data_offsets=[12 + (1 << 64), 28 + (1 << 64)]), ("entry of b is malformed",)
    ),
    "offsets go back": Attack(lambda: with_entry("b", data_offsets=[28, 12]), ("b is I32", "span -16")),
    "overlap": Attack(lambda: with_entry("b", data_offsets=[8, 24]), ("b starts at byte", "overlaps")),
    "the same place": Attack(lambda: file_of(encode(GOOD | {"d": GOOD["c"]})), ("overlaps",)),
    "hole": Attack(
        lambda: file_of(encode({"a": GOOD["a"], "c": GOOD["c"]})), ("c starts at byte", "leaves a hole")
    ),
    "hole at the start": Attack(
        lambda: file_of(encode({"c": GOOD["c"]})), ("c starts at byte", "leaves a hole")
    ),
    "beyond the file": Attack(
        lambda: with_entry("c", data_offsets=[1 << 40, (1 << 40) + 4]), ("c starts at byte", "leaves a hole")
    ),
    "no tensor for the data": Attack(lambda: file_of(b"{}"), ("longer than its header says",)),
}


def written(name: str, folder: Path, file: str = "attack.safetensors") -> Path:
    """Write one of them."""
    path = folder / file
    path.write_bytes(ATTACKS[name].make())
    return path
