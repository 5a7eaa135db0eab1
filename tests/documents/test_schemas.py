"""schemas/ is what the definitions of the documents give, and leaves room for keys of later releases."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from marlin_convert.documents import schemas

FOLDER = Path(__file__).parents[2] / "schemas"
WRITTEN = schemas.files()


def test_every_schema_file_is_of_a_definition() -> None:
    assert {path.name for path in FOLDER.glob("*.json")} == set(WRITTEN)


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


@pytest.mark.parametrize("name", schemas.PAGES)
def test_schemas_are_schemas(name: str) -> None:
    schema = schemas.schema(name)
    Draft202012Validator.check_schema(schema)
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert schema["$id"] == f"{name}.schema.json"
    assert schema["title"]


def keys_without_words(schema: dict[str, Any]) -> Iterator[str]:
    """Properties that nothing is said about."""
    for part in parts(schema):
        named = part.get("properties")
        for key, value in named.items() if isinstance(named, dict) else ():
            refers = "$ref" in value or "not" in value or "const" in value
            if not (value.get("description") or refers or {"maxItems", "minItems"} & set(value)):
                yield key


@pytest.mark.parametrize("name", schemas.PAGES)
def test_every_key_is_described(name: str) -> None:
    assert [key for key in keys_without_words(schemas.schema(name)) if key != "text_config"] == []


@pytest.mark.parametrize("name", schemas.PAGES)
def test_what_may_be_left_out_is_never_null(name: str) -> None:
    """A key that has no value is either not written or null, not one or the other."""
    for part in parts(schemas.schema(name)):
        required = part.get("required", ())
        for key, value in part.get("properties", {}).items() if "title" in part else ():
            assert key in required or {"type": "null"} not in value.get("anyOf", ()), key
