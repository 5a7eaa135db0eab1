"""A sealed document shows every change of its bytes; a manifest that is none is an OutputError and nothing
else.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from anywhere import holder, paths, put_odd_values
from marlin_convert.documents.codec import seal_holds, sealed, typed
from marlin_convert.documents.identity import FileIdentity, SourceIdentity
from marlin_convert.documents.manifest import (
    FusedTensor,
    ListedFile,
    Manifest,
    Origin,
    StoredTensor,
    parse_manifest,
    read_manifest,
)
from marlin_convert.errors import OutputError

DOCUMENT: dict[str, Any] = {
    "format": "marlin-convert",
    "format_version": 1,
    "digest": "0" * 32,
    "layout": {"id": "moe_wna16_marlin.u4b8", "num_bits": 4, "group_size": 32, "symmetric": True},
    "checks": "exact",
    "source": {
        "id": "0123456789abcdef0123456789abcdef",
        "tensors": 3,
        "payload_bytes": 5,
        "files": [
            {
                "name": "model-00001-of-00001.safetensors",
                "size": 9,
                "header": "6" * 32,
                "start": "7" * 32,
                "sample": "8" * 32,
            }
        ],
        "config": "9" * 32,
        "quantization_config_at": "text_config",
        "not_copied": ["figures"],
    },
    "parallel": {"tp": 2, "ep": 1, "moe_tp": 2, "rules": "a" * 32, "padding": None},
    "ranks": [0, 1],
    "layers": [0],
    "complete": True,
    "model": {"hidden_size": 256},
    "units": [
        {
            "name": "layer-000",
            "layer": 0,
            "tensors": [{"tensor": "a", "rule": "row", "axis": 1, "parts": "tp", "from": ["a"]}],
            "checked": ["s"],
        }
    ],
    "shards": [
        {
            "path": "rank-00-of-02/layer-000.safetensors",
            "unit": "layer-000",
            "rank": 0,
            "size": 8192,
            "header": "1" * 32,
            "digest": "2" * 32,
            "tensors": [
                {
                    "name": "a",
                    "dtype": "BF16",
                    "shape": [2, 3],
                    "offset": 4096,
                    "size": 12,
                    "digest": "3" * 32,
                },
                {
                    "name": "w",
                    "dtype": "I32",
                    "shape": [2, 1],
                    "offset": 4108,
                    "size": 8,
                    "digest": "4" * 32,
                    "experts": 0,
                },
            ],
            "fused": [{"name": "f", "dtype": "BF16", "shape": [4, 3], "offset": 4096, "members": ["a", "b"]}],
        }
    ],
    "files": [{"path": "config.json", "size": 3, "digest": "5" * 32}],
}
MANIFEST = typed(DOCUMENT, Manifest, "the manifest of these tests")
PATH = Path("out/manifest.json")


def test_the_seal_is_as_the_format_page_says() -> None:
    raw = sealed(MANIFEST)
    document = json.loads(raw)
    assert list(document)[:3] == ["format", "format_version", "digest"]
    assert (document["format"], document["format_version"]) == ("marlin-convert", 1)
    assert document | {"digest": "0" * 32} == DOCUMENT
    zeroed = raw.replace(document["digest"].encode(), b"0" * 32, 1)
    assert document["digest"] == xxhash.xxh3_128_hexdigest(zeroed)
    assert seal_holds(raw)


def test_every_flipped_bit_is_seen() -> None:
    raw = bytearray(sealed(MANIFEST))
    for bit in range(8 * len(raw)):
        raw[bit // 8] ^= 1 << bit % 8
        assert not seal_holds(bytes(raw)), raw[bit // 8 - 5 : bit // 8 + 5]
        raw[bit // 8] ^= 1 << bit % 8
    assert seal_holds(bytes(raw))


@settings(max_examples=200)
@given(data=st.data())
def test_every_other_change_is_seen(data: st.DataObject) -> None:
    raw = sealed(MANIFEST)
    at = data.draw(st.integers(0, len(raw)))
    end = data.draw(st.integers(at, min(len(raw), at + 40)))
    changed = raw[:at] + data.draw(st.binary(max_size=40)) + raw[end:]
    assert seal_holds(changed) == (changed == raw)


@pytest.mark.parametrize(
    "raw", [b"", b"{}", b'"digest":"', b'{"digest":""}', b'{"digest":"' + b"0" * 32 + b'"}', b"\xff" * 50]
)
def test_what_has_no_seal(raw: bytes) -> None:
    assert not seal_holds(raw)


def test_a_manifest_as_read(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_bytes(sealed(MANIFEST))
    manifest = read_manifest(tmp_path)
    assert (manifest.tp, manifest.ep, manifest.ranks, manifest.layers, manifest.complete) == (
        2,
        1,
        (0, 1),
        (0,),
        True,
    )
    assert (manifest.checks, manifest.layout_id, manifest.group_size) == (
        "exact",
        "moe_wna16_marlin.u4b8",
        32,
    )
    assert (manifest.source_id, manifest.model) == ("0123456789abcdef0123456789abcdef", {"hidden_size": 256})
    (unit,) = manifest.units
    assert (unit.name, unit.layer, unit.checked, unit.tensors) == (
        "layer-000",
        0,
        ("s",),
        (Origin("a", "row", 1, "tp", ("a",)),),
    )
    (shard,) = manifest.shards
    assert (shard.path, shard.unit, shard.rank, shard.size) == (
        "rank-00-of-02/layer-000.safetensors",
        "layer-000",
        0,
        8192,
    )
    assert (shard.header, shard.digest) == ("1" * 32, "2" * 32)
    assert shard.tensors == (
        StoredTensor("a", "BF16", (2, 3), 4096, 12, "3" * 32, None),
        StoredTensor("w", "I32", (2, 1), 4108, 8, "4" * 32, 0),
    )
    assert shard.fused == (FusedTensor("f", "BF16", (4, 3), 4096, ("a", "b")),)
    assert manifest.files == (ListedFile("config.json", 3, "5" * 32),)
    source = manifest.source
    assert (source.tensors, source.payload_bytes, source.not_copied) == (3, 5, ("figures",))
    assert source.identity == SourceIdentity(
        files=(FileIdentity("model-00001-of-00001.safetensors", 9, "6" * 32, "7" * 32, sample="8" * 32),),
        config="9" * 32,
    )
    assert (manifest.layout.b_q_type, manifest.layout.b_q_type_id) == (None, None)
    assert (manifest.parallel.moe_tp, manifest.parallel.padding) == (2, None)


def test_a_manifest_that_is_not_there_or_not_whole(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r"has no manifest\.json; is it a converted folder\?"):
        read_manifest(tmp_path)
    (tmp_path / ".work").mkdir()
    with pytest.raises(OutputError, match="has not finished: run the same convert command again"):
        read_manifest(tmp_path)
    (tmp_path / "manifest.json").write_bytes(sealed(MANIFEST).replace(b'"ranks":[0,1]', b'"ranks":[1,0]'))
    with pytest.raises(OutputError, match="do not match its own digest"):
        read_manifest(tmp_path)
    (tmp_path / "manifest.json").unlink()
    (tmp_path / "manifest.json").mkdir()
    with pytest.raises(OutputError, match="cannot be read"):
        read_manifest(tmp_path)


@pytest.mark.parametrize(
    ("key", "value"),
    [("format", "other"), *(("format_version", value) for value in (3, 0, "1", True, 1.0, None))],
)
def test_another_format_or_version(key: str, value: Any) -> None:
    raw = json.dumps(json.loads(sealed(MANIFEST)) | {key: value}).encode()
    with pytest.raises(OutputError, match="this program reads marlin-convert versions 1 and 2"):
        parse_manifest(raw, PATH)


@pytest.mark.parametrize(
    "raw", [b"", b"[]", b"7", b'"format"', b"null", b"{}", b"[" * 100_000, b"\xff\xfe", sealed(MANIFEST)[:-1]]
)
def test_what_is_no_manifest(raw: bytes) -> None:
    with pytest.raises(OutputError, match=r"out/manifest\.json: not a manifest of this format"):
        parse_manifest(raw, PATH)


def test_a_key_twice() -> None:
    raw = sealed(MANIFEST).replace(b'"ranks":[0,1]', b'"ranks":[0,1],"ranks":[0]')
    with pytest.raises(OutputError, match="a key stands twice"):
        parse_manifest(raw, PATH)


def test_every_key_is_needed() -> None:
    whole = json.loads(sealed(MANIFEST))
    for path in paths(whole):
        if (
            isinstance(path[-1], int)
            or (path[0] == "model" and len(path) > 1)
            or path[-1] in ("experts", "sample")
        ):
            continue
        document = copy.deepcopy(whole)
        del holder(document, path)[path[-1]]
        with pytest.raises(OutputError):
            parse_manifest(json.dumps(document).encode(), PATH)


@settings(max_examples=400)
@given(data=st.data(), count=st.integers(1, 2))
def test_mutated_manifests(data: st.DataObject, count: int) -> None:
    document = json.loads(sealed(MANIFEST))
    put_odd_values(data, document, count)
    try:
        manifest = parse_manifest(json.dumps(document).encode(), PATH)
    except OutputError as error:
        said = str(error)
    else:
        assert isinstance(manifest, Manifest)
        numbers = [manifest.tp, manifest.ep, manifest.group_size, *manifest.ranks, *manifest.layers]
        numbers += [
            n for shard in manifest.shards for t in shard.tensors for n in (t.offset, t.size, *t.shape)
        ]
        assert all(type(n) is int for n in numbers)
        listed = [shard.path for shard in manifest.shards] + [file.path for file in manifest.files]
        assert all(type(path) is str for path in listed)
        return
    assert said.startswith("out/manifest.json: ")
