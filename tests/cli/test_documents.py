"""Every document we write is as its schema says, and the schemas are strict enough to notice a change."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

import trees
from checkpoints import Checkpoint, make_small
from forks import Forks

SCHEMAS = Path(__file__).parents[2] / "schemas"
NAMES = ("config", "convert", "index", "manifest", "plan", "provenance", "record", "restore", "verify")
Command = Callable[..., tuple[int, str, str]]


def validator(name: str, definition: str | None = None) -> Draft202012Validator:
    """The validator of a schema, or of one of its definitions."""
    schema = json.loads((SCHEMAS / f"{name}.schema.json").read_text())
    if definition is not None:
        schema = {"$schema": schema["$schema"], "$defs": schema["$defs"], "$ref": f"#/$defs/{definition}"}
    return Draft202012Validator(schema)


def problems(name: str, document: Any, definition: str | None = None) -> list[str]:
    """What a schema has against a document."""
    return [
        f"{'/'.join(map(str, error.absolute_path))}: {error.message[:200]}"
        for error in validator(name, definition).iter_errors(document)
    ]


@pytest.fixture(scope="module")
def documents(
    tiny: Checkpoint, tiny_tp2: Path, forks: Forks, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """One of each."""
    folder = tmp_path_factory.mktemp("documents")
    fault = {"call": "replace", "number": 9, "action": "SIGKILL"}
    assert (
        forks.run("convert", tiny.folder, folder / "killed", "--tp", 2, "--threads", 1, fault=fault).code
        == -9
    )
    return {
        "config": json.loads((tiny_tp2 / "config.json").read_text()),
        "convert": json.loads(forks.run("convert", tiny.folder, folder / "out", "--tp", 2, "--json").stdout),
        "index": json.loads((tiny_tp2 / "rank-01-of-02" / "model.safetensors.index.json").read_text()),
        "manifest": trees.manifest_of(tiny_tp2),
        "plan": json.loads(forks.run("plan", tiny.folder, folder / "out", "--tp", 2, "--json").stdout),
        "provenance": json.loads((tiny_tp2 / "provenance.json").read_text()),
        "record": json.loads((folder / "killed" / ".work" / "job.json").read_text()),
        "record of a unit": json.loads(
            next((folder / "killed" / ".work" / "units").glob("layer-*.json")).read_text()
        ),
        "restore": json.loads(forks.run("restore", tiny_tp2, folder / "back", "--json").stdout),
        "verify": json.loads(forks.run("verify", tiny_tp2, "--json").stdout),
    }


@pytest.mark.parametrize("name", [*NAMES, "record of a unit"])
def test_documents_are_valid(documents: dict[str, Any], name: str) -> None:
    assert problems(name.partition(" ")[0], documents[name]) == []


def test_unit_in_a_record_is_valid(documents: dict[str, Any]) -> None:
    unit = json.loads(documents["record of a unit"]["unit"])
    assert problems("record", unit, "FinishedUnit") == []
    assert len(unit["experts"]) in (0, 8)
    del unit["source"]
    assert problems("record", unit, "FinishedUnit") == [": 'source' is a required property"]


def test_what_inspect_prints_is_valid(tiny_tp2: Path, command: Command) -> None:
    """Of a folder, a file, a tensor of numbers and one of codes."""
    layer = tiny_tp2 / "rank-01-of-02" / "layer-001.safetensors"
    names = [entry[0] for entry in trees.read_shard(layer).entries]
    packed = next(name for name in names if name.endswith("w2_weight_packed"))
    asked = [(tiny_tp2,), (layer,), (layer, "--tensor", names[0]), (tiny_tp2, "--tensor", packed)]
    found = [json.loads(command("inspect", *arguments, "--json")[1]) for arguments in asked]
    assert [problems("inspect", each) for each in found] == [[], [], [], []]
    for each in found:
        for key in each:
            if key not in ("minimum", "maximum", "zeros", "not_finite", "first", "codes"):
                assert problems("inspect", {k: v for k, v in each.items() if k != key}) != []


@pytest.mark.parametrize("form", ["k26", "k2-thinking"])
def test_other_conversions_are_valid(tmp_path: Path, command: Command, form: Any) -> None:
    """Padding, groups of experts, ranks left out, the flat form."""
    checkpoint = make_small(
        tmp_path / "checkpoint", form=form, layers=2, experts=4, moe_intermediate=256, vt_layers=1
    )
    code, stdout, _ = command("plan", checkpoint.folder, "--tp", 8, "--json")
    assert (code, problems("plan", json.loads(stdout))) == (0, [])
    out = tmp_path / "out"
    code, stdout, _ = command("convert", checkpoint.folder, out, "--tp", 8, "--ranks", "1,3", "--json")
    assert (code, problems("convert", json.loads(stdout))) == (0, [])
    code, stdout, _ = command("verify", out, "--json")
    report = json.loads(stdout)
    assert (code, problems("verify", report)) == (0, [])
    assert report["tensors_unproven"] > 0
    document = trees.manifest_of(out)
    assert problems("manifest", document) == []
    assert document["parallel"]["padding"] == {"moe_intermediate": 32, "padded": 64}
    assert problems("config", json.loads((out / "config.json").read_text())) == []
    for path in out.glob("*/model.safetensors.index.json"):
        assert path.parent.name == "source" or problems("index", json.loads(path.read_text())) == []
    for folder in ("rank-01-of-08", "rank-03-of-08"):
        assert problems("manifest", json.loads((out / folder / "manifest.json").read_text())) == []
        assert problems("experts", json.loads((out / folder / "experts.json").read_text())) == []
    assert problems("provenance", json.loads((out / "provenance.json").read_text())) == []


def test_report_of_damage_is_valid(copied: Path, command: Command) -> None:
    path = copied / "rank-01-of-02" / "layer-002.safetensors"
    entry = next(entry for entry in trees.read_shard(path).entries if entry[0].endswith("w2_weight_packed"))
    data = bytearray(path.read_bytes())
    data[entry[3]] ^= 1
    path.write_bytes(data)
    (copied / "extra").write_bytes(b"")
    code, stdout, _ = command("verify", copied, "--json")
    report = json.loads(stdout)
    assert (code, report["ok"], problems("verify", report)) == (1, False, [])
    assert report["findings"][1] == {
        "path": "rank-01-of-02/layer-002.safetensors",
        "what": "weight_packed differs from the source",
        "layer": 2,
        "expert": 0,
        "projection": "down_proj",
        "rank": 1,
        "message": (
            "rank-01-of-02/layer-002.safetensors: layer 2, expert 0, down_proj, rank 1: weight_packed differs"
            " from the source"
        ),
    }


def places(document: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths to everything in a document, but of long lists and large maps only the first."""
    yield path
    if isinstance(document, dict):
        keys = list(document)
        for key in keys if len(keys) < 20 else keys[:2]:
            yield from places(document[key], (*path, key))
    elif isinstance(document, list) and document:
        yield from places(document[0], (*path, 0))


@pytest.mark.parametrize("name", [*NAMES, "record of a unit"])
def test_changed_documents_are_not_valid(documents: dict[str, Any], name: str) -> None:
    """A key less, a value of another type: each is noticed. A key more may be a later release's."""
    schema, original = name.partition(" ")[0], copy.deepcopy(documents[name])
    if schema == "manifest":
        original |= {
            key: original[key][:2] for key in ("units", "shards", "files")
        }  # enough of each, and quicker
    check = validator(schema)
    assert check.is_valid(original)
    accepted = []
    for path in list(places(original)):
        if (
            not path
            or schema == "config"
            or path[0] == "model"
            or path[-2:-1] in (("stages",), ("weight_map",), ("stamps",))
            or "command" in path
        ):
            continue
        for what in ("removed", "odd"):
            document = copy.deepcopy(original)
            parent = document
            for key in path[:-1]:
                parent = parent[key]
            if what == "odd":
                parent[path[-1]] = {"odd": [{"odd": None}]}
            elif isinstance(parent, dict):
                del parent[path[-1]]
            else:
                continue
            if check.is_valid(document):
                accepted.append((what, path))
    optional = {
        *(("removed", ("layout", key)) for key in ("b_q_type", "b_q_type_id")),
        ("removed", ("source", "files", 0, "sample")),
        ("removed", ("identity", "files", 0, "sample")),
    }
    assert set(accepted) <= optional
    with_more = copy.deepcopy(original) | {"unheard_of": 1}
    assert check.is_valid(with_more)


@pytest.mark.parametrize(
    "key", ["quant_method", "format", "format_version", "bits", "group_size", "symmetric", "modules"]
)
def test_quantization_config_is_literal(documents: dict[str, Any], key: str) -> None:
    for change in ("odd", "missing", "both places"):
        document = copy.deepcopy(documents["config"])
        section = document["text_config"]["quantization_config"]
        if change == "odd":
            section[key] = "odd"
        elif change == "missing":
            del section[key]
        else:
            document["quantization_config"] = dict(section)
        assert problems("config", document) != []
