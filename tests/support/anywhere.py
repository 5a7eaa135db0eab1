"""Other values anywhere in a JSON document, as hypothesis draws them."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

_PLAIN = st.one_of(st.none(), st.booleans(), st.integers(-3, 10**6), st.floats(), st.text(max_size=4))
_ODD = st.one_of(
    _PLAIN, st.lists(_PLAIN, max_size=3), st.dictionaries(st.text(max_size=3), _PLAIN, max_size=2)
)


def paths(section: Any, above: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where every value of a document is."""
    inner: Any = ()
    if isinstance(section, dict):
        inner = section.items()
    elif isinstance(section, list):
        inner = enumerate(section)
    found = [above] if above else []
    for key, value in inner:
        found += paths(value, (*above, key))
    return found


def holder(document: Any, path: tuple[Any, ...]) -> Any:
    """The object or list that holds the value at `path`."""
    for step in path[:-1]:
        document = document[step]
    return document


def put_odd_values(data: st.DataObject, document: Any, count: int) -> None:
    """Put something else in `count` places, one after the other."""
    for _ in range(count):
        path = data.draw(st.sampled_from(paths(document)))
        holder(document, path)[path[-1]] = data.draw(_ODD)
