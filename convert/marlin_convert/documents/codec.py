"""JSON to typed documents and back. Reading is strict where it matters and open where the format promises it:
keys that a later release added are left alone, everything else must be of its type and in its range.
"""

from __future__ import annotations

import json
import math
import re
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from marlin_convert.documents.bounds import MAX_MARKS
from marlin_convert.documents.fields import Digest, about
from marlin_convert.errors import OutputError
from marlin_convert.storage.files import digest

#: stands in a sealed document's place of the digest while the digest is taken
NO_DIGEST = "0" * 32
#: how every document begins by which a folder is known to be ours
MARK = re.compile(rb'\s*\{\s*"format"\s*:\s*"marlin-convert"')

#: in valid JSON: whatever stands before it, and an escape that is half of a pair. Looked for in the text,
#: since looking into the values would copy all of them
HALF_SURROGATE = re.compile(
    rb"(?:[^\\]++|\\[^u]|\\u(?![dD][89a-fA-F])|\\u[dD][89abAB]..\\u[dD][c-fC-F]..)*+\\u"
)

T = TypeVar("T")


class Sealed(msgspec.Struct, frozen=True, kw_only=True):
    """A file that carries the digest of its own bytes; the three keys come first, in this order."""

    format: Annotated[Literal["marlin-convert"], about("what wrote it")]
    format_version: Annotated[Literal[1, 2], about("version of the format")]
    digest: Annotated[Digest, about("xxh3-128 of this file with these 32 digits set to 0")]


def parse_json(raw: bytes) -> Any:
    """The value of a JSON text. Raises ValueError for what is no JSON, and for what parsers disagree about: a
    key twice in an object, NaN and Infinity, halves of surrogates, nesting that is too deep. A text
    of more marks than any document has is not parsed.
    """
    if (marks := sum(map(raw.count, (b",", b":", b"[", b"{")))) > MAX_MARKS:
        raise ValueError(
            f"it has {marks} commas, colons and opening brackets, at most {MAX_MARKS} are expected"
        )
    try:
        value = json.loads(
            raw.decode(), object_pairs_hook=_unique, parse_float=_finite_float, parse_constant=_no_number
        )
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if HALF_SURROGATE.match(raw):
        raise ValueError("half of a surrogate is no text")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        seen = set[str]()
        for name, _ in pairs:
            if name in seen:
                raise ValueError(f"a key stands twice: {name!r}")
            seen.add(name)
    return value


def _finite_float(text: str) -> float:
    if not math.isfinite(value := float(text)):
        _no_number(text)
    return value


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is no number of JSON")


def typed(value: Any, kind: type[T], complaint: str) -> T:
    """A parsed JSON value as a document. Raises OutputError, `complaint` and what is wrong where."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise OutputError(f"{complaint} ({error})") from error
    except RecursionError as error:
        raise OutputError(f"{complaint} (it is nested too deeply)") from error


def read(raw: bytes, kind: type[T], complaint: str) -> T:
    """The document in `raw`. Raises OutputError: `complaint`, which names the file, and what is wrong."""
    try:
        value = parse_json(raw)
    except ValueError as error:
        raise OutputError(f"{complaint} ({error})") from error
    return typed(value, kind, complaint)


def write(document: Any, indent: int | None = None) -> bytes:
    """A document as ASCII JSON, keys in the order of its fields; without blanks unless indented. JSON has no
    numbers that are not finite: null stands for them.
    """
    value = msgspec.to_builtins(document)
    separators = (",", ":") if indent is None else None
    try:
        text = json.dumps(value, separators=separators, indent=indent, allow_nan=False)
    except ValueError:
        text = json.dumps(_finite(value), separators=separators, indent=indent, allow_nan=False)
    return text.encode("ascii")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def begins_ours(start: bytes) -> bool:
    """Whether a file that starts with these bytes is a document by which a folder is known to be ours."""
    return MARK.match(start[:64]) is not None


def sealed(document: Sealed) -> bytes:
    """The bytes of a document that carries the digest of its own bytes, taken with 32 zeros in its place."""
    raw = write(msgspec.structs.replace(document, digest=NO_DIGEST))
    return raw.replace(NO_DIGEST.encode(), digest(raw).hex().encode(), 1)


def seal_holds(raw: bytes) -> bool:
    """Whether a sealed document is as it was written."""
    key = b'"digest":"'
    at = raw.find(key) + len(key)
    return (
        at >= len(key)
        and digest(raw[:at] + NO_DIGEST.encode() + raw[at + 32 :]).hex().encode() == raw[at : at + 32]
    )
