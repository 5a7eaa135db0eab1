"""What a document's definition allows is written, read back the same, and has the promised form."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from any_document import documents, plain
from marlin_convert.documents.codec import parse_json, read, seal_holds, sealed, write
from marlin_convert.documents.engine_files import Index, QuantizationConfig
from marlin_convert.documents.identity import SourceIdentity
from marlin_convert.documents.manifest import ListedFile, Manifest, Parallel, Shard, StoredTensor, Unit
from marlin_convert.documents.provenance import Provenance
from marlin_convert.documents.records import (
    DownloadRecord,
    FinishedUnit,
    JobOptions,
    JobRecord,
    read_record,
    write_record,
)
from marlin_convert.errors import OutputError

slowly = settings(max_examples=40, suppress_health_check=list(HealthCheck))


UNITS = st.lists(documents(Unit, slots=st.none()), min_size=1, max_size=2, unique_by=lambda unit: unit.name)
TENSORS = st.lists(documents(StoredTensor), min_size=1, max_size=3, unique_by=lambda tensor: tensor.name)
PATHS = st.integers(0, 99).map("rank-00-of-01/layer-{:03d}.safetensors".format)
SHARD = {"path": PATHS, "tensors": TENSORS.map(tuple)}
SHARDS = st.lists(documents(Shard, **SHARD), min_size=1, max_size=2, unique_by=lambda shard: shard.path)
FILES = st.lists(documents(ListedFile), min_size=1, max_size=3, unique_by=lambda file: file.path)
SPLITS = st.sampled_from([(1, 1), (8, 1), (8, 4), (16, 16)])
#: all but the parts that must go together
REST = documents(
    Manifest,
    units=documents(Unit, name=st.just("top"), slots=st.none()).map(lambda unit: (unit,)),
    shards=documents(Shard, unit=st.just("top"), **SHARD).map(lambda shard: (shard,)),
    files=FILES.map(tuple),
    parallel=documents(
        Parallel,
        tp=st.just(4),
        ep=st.just(2),
        attn_tp=st.none(),
        pp=st.just(1),
        stages=st.just(()),
        slots=st.none(),
    ),
)


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    """Manifests whose parts go together."""
    units, manifest = draw(UNITS), draw(REST)
    names = st.sampled_from([unit.name for unit in units])
    shards = [replace(shard, unit=draw(names)) for shard in draw(SHARDS)]
    tp, ep = draw(SPLITS)
    parallel = replace(manifest.parallel, tp=tp, ep=ep, attn_tp=draw(st.sampled_from([None, 1, tp])))
    if draw(st.booleans()):  # placed by a map, and then stacked tensors have as many experts
        parallel = replace(parallel, slots=2 * ep)
        units = [replace(unit, slots=tuple(range(2 * ep)) if unit.routed else None) for unit in units]
        shards = [
            replace(shard, tensors=tuple(replace(tensor, experts=None) for tensor in shard.tensors))
            for shard in shards
        ]
    made: Manifest = replace(manifest, units=tuple(units), shards=tuple(shards), parallel=parallel)
    return made


@slowly
@given(manifests())
def test_manifests(manifest: Manifest) -> None:
    raw = sealed(manifest)
    assert seal_holds(raw)
    back = read(raw, Manifest, "a manifest")
    assert replace(back, digest=manifest.digest) == manifest
    assert list(plain(back))[:3] == ["format", "format_version", "digest"]
    assert sealed(back) == raw


@slowly
@given(documents(FinishedUnit))
def test_records_of_units(unit: FinishedUnit) -> None:
    assert read_record(write_record(unit), "a record") == unit


@pytest.mark.parametrize(
    "kind",
    [DownloadRecord, Index, JobRecord, JobOptions, Provenance, QuantizationConfig, SourceIdentity],
    ids=lambda kind: str(kind.__name__),
)
@slowly
@given(data=st.data())
def test_other_documents(kind: type[msgspec.Struct], data: st.DataObject) -> None:
    document = data.draw(documents(kind))
    for indent in (None, 1):
        raw = write(document, indent)
        assert raw.isascii()
        assert read(raw, kind, "a document") == document


def test_as_it_stands_on_the_disk() -> None:
    """Compact, or indented as an index is; keys in the order of the fields; nothing for what is not known."""
    options = JobOptions(1, "a layout", "0" * 32, 2, 1, (0, 1), (3,), False, "exact")
    assert write(options) == (
        b'{"format_version":1,"layout":"a layout","rules":"00000000000000000000000000000000","tp":2,"ep":1,'
        b'"ranks":[0,1],"layers":[3],"complete":false,"verify":"exact"}'
    )
    record = DownloadRecord("org/name", "c0ffee", {"\u00e9": (3, None)})
    assert write(record, indent=1).decode() == json.dumps(
        {"repo": "org/name", "revision": "c0ffee", "files": {"\u00e9": [3, None]}}, indent=1
    )


def test_a_record_that_was_changed_is_not_read() -> None:
    unit = FinishedUnit("layer-001", (), (), {})
    raw = write_record(unit)
    with pytest.raises(OutputError, match=r"^R is damaged \(its text does not match its digest\)$"):
        read_record(raw.replace(b"layer-001", b"layer-002"), "R")
    with pytest.raises(
        OutputError, match=r"^R is damaged \(Expected `array` of length >= 1 - at `\$.files`\)$"
    ):
        read_record(raw, "R")
    with pytest.raises(OutputError, match=r"^R is damaged \("):
        read_record(raw[:-1], "R")


@pytest.mark.parametrize(
    ("raw", "wrong"),
    [
        (b'{"a":1,"b":{"c":[{"d":1,"e":2,"d":1}]}}', "a key stands twice: 'd'"),
        (b'{"a":NaN}', "NaN is no number of JSON"),
        (b"[-Infinity]", "-Infinity is no number of JSON"),
        (b'{"a":"\\ud800"}', "half of a surrogate is no text"),
        (b'{"a":"\\uDFFF\\ud83d\\ude00"}', "half of a surrogate is no text"),
        (b'{"a\\ud83d\\\\ude00":1}', "half of a surrogate is no text"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a":' * 100_000, "nested too deeply"),
        (b'"\xff"', "invalid start byte"),
        (b"\xef\xbb\xbf{}", "BOM"),
        ("{}".encode("utf-16"), "can't decode"),
        (b"9" * 5000, "integer string conversion"),
        (b"{} {}", "Extra data"),
    ],
)
def test_what_is_no_json_that_all_parsers_agree_on(raw: bytes, wrong: str) -> None:
    with pytest.raises(ValueError, match=wrong):
        parse_json(raw)
    with pytest.raises(OutputError, match=f"^F is damaged .*{wrong}"):
        read(raw, dict[str, Any], "F is damaged")


def test_what_is_wrong_is_said_with_its_place() -> None:
    job: dict[str, Any] = plain(
        JobRecord(
            "marlin-convert",
            JobOptions(1, "a layout", "0" * 32, 2, 1, (0, 1), (3,), False, "exact"),
            SourceIdentity(files=(), config="0" * 32),
            {"a": [1, 2]},
        )
    )
    job["options"]["ranks"][1] = True
    with pytest.raises(OutputError) as caught:
        read(json.dumps(job).encode(), JobRecord, "job.json is damaged")
    assert str(caught.value) == "job.json is damaged (Expected `int`, got `bool` - at `$.options.ranks[1]`)"
