"""schemas/*.schema.json, made from the definitions of the documents.

    python -m marlin_convert.documents.schemas --write schemas

Objects are open: a later release may add keys. A key that may be left out is not required, and is never null.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec

from marlin_convert.documents.bench import ConversionBench, KernelBench, LayoutBench, LoadBench, VerifyBench
from marlin_convert.documents.checks import KernelCheck, VerifyReport
from marlin_convert.documents.doctor import Examination
from marlin_convert.documents.engine_files import Index, QuantizationConfig
from marlin_convert.documents.expert_map import ExpertMap
from marlin_convert.documents.expert_places import ExpertPlaces
from marlin_convert.documents.log import LogCompiling, LogError, LogMessage, LogProgress
from marlin_convert.documents.manifest import Manifest
from marlin_convert.documents.plan import Plan
from marlin_convert.documents.provenance import Provenance
from marlin_convert.documents.records import DownloadRecord, FinishedUnit, JobRecord, Record, Removal
from marlin_convert.documents.restore import RestoredFile, RestoreJob, RestoreResult
from marlin_convert.documents.results import (
    ConvertResult,
    Differences,
    DownloadResult,
    InspectedFile,
    InspectedFolder,
    InspectedTensor,
)

Schema = dict[str, Any]
#: columns of a schema file
WIDTH = 110
#: the two places of config.json in which a quantization_config may stand, and only one of them
_REPLACED = {"properties": {"quantization_config": {"$ref": "#/$defs/QuantizationConfig"}}}
_HAS = {"required": ["quantization_config"]}
CONFIG: Schema = {
    "type": "object",
    "required": ["architectures"],
    "properties": {
        "architectures": {
            "type": "array",
            "items": {"type": "string", "minLength": 1},
            "minItems": 1,
            "description": "as in the source",
        }
    },
    "oneOf": [
        {
            "required": ["text_config"],
            "properties": {"text_config": {"type": "object"} | _HAS | _REPLACED},
            "not": _HAS,
        },
        _HAS | {"properties": _REPLACED["properties"] | {"text_config": {"not": _HAS}}},
    ],
}


class Page(NamedTuple):
    """One schema file: its title, the documents it is for, more definitions, and what no type can say."""

    title: str
    documents: Sequence[type] = ()
    definitions: Sequence[type] = ()
    more: Mapping[str, Any] = MappingProxyType({})


#: a finding is what makes a folder wrong
FINDINGS: Schema = {
    "if": {"properties": {"ok": {"const": True}}},
    "then": {"properties": {"findings": {"maxItems": 0}}},
    "else": {"properties": {"findings": {"minItems": 1}}},
}
PAGES = {
    "bench-convert": Page("marlin-convert bench convert --json", [ConversionBench]),
    "bench-kernel": Page("marlin-convert bench kernel --json", [KernelBench]),
    "bench-layout": Page("marlin-convert bench layout --json", [LayoutBench]),
    "bench-load": Page("marlin-convert bench load --json", [LoadBench]),
    "bench-verify": Page("marlin-convert bench verify --json", [VerifyBench]),
    "config": Page(
        "config.json of a converted folder: the source's, but for quantization_config",
        definitions=[QuantizationConfig],
        more=CONFIG,
    ),
    "convert": Page("Output of convert --json and of reshard --json", [ConvertResult]),
    "diff": Page("Output of diff --json", [Differences]),
    "doctor": Page("doctor --json: what a machine can do", [Examination]),
    "download": Page("Output of download --json", [DownloadResult]),
    "download-record": Page(".marlin-convert-source.json in a folder that download filled", [DownloadRecord]),
    "expert-map": Page("The file of --expert-map: which routed expert is in which slot", [ExpertMap]),
    "experts": Page("experts.json of a rank: where each of its experts lies", [ExpertPlaces]),
    "index": Page("model.safetensors.index.json of a rank or of common/", [Index]),
    "inspect": Page(
        "Output of inspect --json: of a folder, a file, or a tensor",
        [InspectedFolder, InspectedFile, InspectedTensor],
    ),
    "kernel-report": Page(
        "verify --kernel: what the kernel read in the shards", [KernelCheck], more=FINDINGS
    ),
    "log": Page("A line of --log-json on standard error", [LogProgress, LogCompiling, LogMessage, LogError]),
    "manifest": Page("manifest.json of a converted folder, and of a rank in its folder", [Manifest]),
    "plan": Page("Output of plan --json", [Plan]),
    "provenance": Page("provenance.json: who, when, how fast; never compared", [Provenance]),
    "record": Page(
        "What OUT/.work holds until the conversion is done", [JobRecord, Record, Removal], [FinishedUnit]
    ),
    "restore": Page("Output of restore --json", [RestoreResult]),
    "restore-record": Page(
        "What DIR/.work holds until a checkpoint is restored in DIR", [RestoreJob, RestoredFile]
    ),
    "verify": Page("Output of verify --json", [VerifyReport], more=FINDINGS),
}


def schema(name: str) -> Schema:
    """A schema by the name of its file, without `.schema.json`."""
    page = PAGES[name]
    kinds = [*page.documents, *page.definitions]
    (*whole,), definitions = msgspec.json.schema_components(kinds, ref_template="#/$defs/{name}")
    for definition in definitions.values():
        for value in definition.get("properties", {}).values():
            _not_null_where_left_out(value)
    made: Schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"{name}.schema.json",
    }
    if len(page.documents) == 1:
        made |= definitions.pop(page.documents[0].__name__)
    elif page.documents:
        made["oneOf"] = whole[: len(page.documents)]
    made |= {"title": page.title, **page.more}
    return made | ({"$defs": definitions} if definitions else {})


def _not_null_where_left_out(value: Schema) -> None:
    """None as the default of a field stands for a key that is not written: the schema has its other type."""
    if value.get("default", ...) is None:
        del value["default"]
        (kind,) = [kind for kind in value.pop("anyOf") if kind != {"type": "null"}]
        value |= kind


def files() -> dict[str, bytes]:
    """All schema files and what is in them."""
    return {f"{name}.schema.json": f"{_text(schema(name))}\n".encode("ascii") for name in PAGES}


def _text(value: Any, margin: str = "") -> str:
    """JSON for people: what fits into a line stands in one."""
    line = json.dumps(value)
    if len(margin + line) <= WIDTH or not isinstance(value, (dict, list)):
        return line
    inner = margin + "  "
    if isinstance(value, dict):
        parts = [f"{json.dumps(key)}: {_text(each, inner)}" for key, each in value.items()]
    else:
        parts = [_text(each, inner) for each in value]
    lines = f",\n{inner}".join(parts)
    begin, end = "{}" if isinstance(value, dict) else "[]"
    return f"{begin}\n{inner}{lines}\n{margin}{end}"


def main() -> None:
    """Write the files."""
    parser = argparse.ArgumentParser(description="Write the JSON Schemas of all documents.")
    parser.add_argument("--write", metavar="FOLDER", type=Path, required=True)
    folder = parser.parse_args().write
    for name, data in files().items():
        (folder / name).write_bytes(data)


if __name__ == "__main__":
    main()
