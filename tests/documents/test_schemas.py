"""schemas/ is what the definitions of the documents give, and leaves room for keys of later releases."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from marlin_convert.documents import schemas

FOLDER = Path(__file__).parents[2] / "schemas"
WRITTEN = schemas.files()


def test_every_schema_file_is_of_a_definition() -> None:
    assert {path.name for path in FOLDER.glob("*.json")} >= set(WRITTEN)


@pytest.mark.parametrize("name", WRITTEN)
def test_the_file_is_what_the_definition_gives(name: str) -> None:
    assert (FOLDER / name).read_bytes() == WRITTEN[name], "make schemas writes them anew"


def parts(schema: Any) -> Iterator[dict[str, Any]]:
    """A schema and all that is in it."""
    if isinstance(schema, dict):
        yield schema
        for inner in schema.values():
            yield from parts(inner)
    elif isinstance(schema, list):
        for inner in schema:
            yield from parts(inner)


@pytest.mark.parametrize("name", schemas.PAGES)
def test_objects_are_open(name: str) -> None:
    assert [part for part in parts(schemas.schema(name)) if part.get("additionalProperties") is False] == []
    assert [part for part in parts(schemas.schema(name)) if "unevaluatedProperties" in part] == []
