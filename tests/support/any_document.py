"""Hypothesis strategies for the typed documents: any value that a definition allows."""

from __future__ import annotations

import math
import re
from typing import Any

import msgspec
from hypothesis import strategies as st
from msgspec import inspect

#: items of a list, keys of a map
MANY = 3
#: text that is no half of a surrogate
CHARACTERS = st.characters(codec="utf-8")


def documents(kind: type[Any], **fixed: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Instances of a document's definition; `fixed` are strategies of single fields."""
    node = inspect.type_info(kind)
    assert isinstance(node, inspect.StructType)
    return _struct(node, fixed)


def _struct(node: inspect.StructType, fixed: dict[str, st.SearchStrategy[Any]]) -> st.SearchStrategy[Any]:
    fields = {field.name: fixed.get(field.name, _any(field.type)) for field in node.fields}
    return st.builds(node.cls, **fields)


def _any(node: inspect.Type) -> st.SearchStrategy[Any]:  # noqa: PLR0912  # a branch for each kind
    match node:
        case inspect.Metadata():
            return _any(node.type)
        case inspect.BoolType():
            return st.booleans()
        case inspect.NoneType():
            return st.none()
        case inspect.LiteralType():
            return st.sampled_from(node.values)
        case inspect.IntType():
            step = node.multiple_of or 1
            least = -(1 << 62) if node.ge is None else node.ge
            most = (1 << 62) - 1 if node.le is None else node.le
            return st.integers(-(-least // step), most // step).map(lambda n: n * step)
        case inspect.FloatType():
            return st.floats(node.ge if node.ge is not None else -math.inf, 1e300, allow_nan=False).filter(
                math.isfinite
            )
        case inspect.BytesType():
            return st.binary(max_size=64)
        case inspect.StrType():
            if node.pattern is None:
                return st.text(CHARACTERS, min_size=node.min_length or 0, max_size=8)
            if digits := re.fullmatch(r"\^\[0-9a-f\]\{(\d+)\}\$", node.pattern):
                size = int(digits[1])  # digests are most of a document, and a pattern is slow
                return st.integers(0, 16**size - 1).map(lambda value: f"{value:0{size}x}")
            least, most = node.min_length or 0, node.max_length or 1 << 20
            texts = st.from_regex(node.pattern, alphabet=CHARACTERS)
            return texts.filter(lambda text: least <= len(text) <= most)
        case inspect.VarTupleType():
            return _items(node).map(tuple)
        case inspect.ListType():
            return _items(node)
        case inspect.TupleType():
            return st.tuples(*map(_any, node.item_types))
        case inspect.DictType():
            least = node.min_length or 0
            return st.dictionaries(
                _any(node.key_type), _any(node.value_type), min_size=least, max_size=least + MANY
            )
        case inspect.UnionType():
            return st.one_of(*map(_any, node.types))
        case inspect.StructType():
            return _struct(node, {})
    raise AssertionError(f"no strategy for {node}")


def _items(node: inspect.VarTupleType | inspect.ListType) -> st.SearchStrategy[list[Any]]:
    least = node.min_length or 0
    return st.lists(_any(node.item_type), min_size=least, max_size=min(least + MANY, node.max_length or 99))


def plain(document: msgspec.Struct) -> Any:
    """A document as the values of its JSON."""
    from marlin_convert.documents.codec import parse_json, write

    return parse_json(write(document))
