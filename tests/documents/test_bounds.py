"""Files that are read whole: what each may hold, and the error of one that holds more."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from marlin_convert.checkpoint.header import Header, bounded
from marlin_convert.checkpoint.source import open_source
from marlin_convert.checkpoint.store import RECORD, download_record
from marlin_convert.checks.verify import verify
from marlin_convert.documents import bounds, codec
from marlin_convert.documents.codec import parse_json
from marlin_convert.documents.manifest import read_manifest
from marlin_convert.errors import ConvertError, OutputError, SourceError
from marlin_convert.pipeline.work_folder import WorkFolder
from marlin_convert.shards.kept_source import read_kept_source

Use = Callable[[Path], object]
KEPT = "source/headers/model-00001-of-000006.safetensors.gz"

OF_A_SOURCE: dict[str, int] = {
    "config.json": bounds.CONFIG,
    "model.safetensors.index.json": bounds.INDEX,
    "README.md": bounds.COPIED,
}
OF_AN_OUTPUT: dict[str, tuple[int, Use]] = {
    "manifest.json": (bounds.MANIFEST, read_manifest),
    ".work/job.json": (bounds.JOB, lambda out: WorkFolder(out).job()),
    "source/config.json": (bounds.CONFIG, lambda out: read_kept_source(out, read_manifest(out))),
    KEPT: (bounds.HEADER, lambda out: read_kept_source(out, read_manifest(out))),
}


def lengthen(path: Path, size: int) -> None:
    path.parent.mkdir(exist_ok=True)
    path.touch()
    os.truncate(path, size)


@pytest.mark.parametrize("name", OF_A_SOURCE)
def test_a_longer_file_of_a_source_is_named(copied_source: Path, name: str) -> None:
    most = OF_A_SOURCE[name]
    lengthen(copied_source / name, most + 1)
    with pytest.raises(SourceError) as caught:
        open_source(str(copied_source))
    assert str(copied_source / name) in str(caught.value)
    assert f"it has {most + 1} bytes, at most {most} are expected" in str(caught.value)


@pytest.mark.parametrize("name", OF_AN_OUTPUT)
def test_a_longer_file_of_an_output_is_named(copied: Path, name: str) -> None:
    most, use = OF_AN_OUTPUT[name]
    lengthen(copied / name, most + 1)
    with pytest.raises(OutputError) as caught:
        use(copied)
    assert str(copied / name) in str(caught.value)
    assert f"it has {most + 1} bytes, at most {most} are expected" in str(caught.value)


def test_longer_files_are_findings_of_verify(copied: Path) -> None:
    lengthen(copied / "provenance.json", bounds.PROVENANCE + 1)
    lengthen(copied / "LICENSE", bounds.LISTED + 1)
    said = {finding.path: finding.what for finding in verify(copied).findings}
    most = bounds.PROVENANCE
    assert f"it has {most + 1} bytes, at most {most} are expected" in said["provenance.json"]
    assert said["LICENSE"].startswith(f"{bounds.LISTED + 1} bytes with digest not taken of more than ")


def test_a_longer_download_record_is_not_believed(copied_source: Path) -> None:
    lengthen(copied_source / RECORD, bounds.JOB + 1)
    assert download_record(copied_source) is None


def test_a_manifest_of_somebody_else_may_be_longer_than_ours(copied_source: Path) -> None:
    lengthen(copied_source / "manifest.json", bounds.MANIFEST + 1)
    assert "manifest.json" in open_source(str(copied_source)).left_out


def test_all_headers_together(monkeypatch: pytest.MonkeyPatch, copied_source: Path) -> None:
    headers = open_source(str(copied_source)).headers
    size, tensors = (sum(map(count, headers)) for count in (bytes_of, tensors_of))
    for name, count, what in (("HEADERS", size, "bytes"), ("MAX_TENSORS", tensors, "tensors")):
        with monkeypatch.context() as patched:
            patched.setattr(f"marlin_convert.checkpoint.header.{name}", count)
            assert tuple(bounded(headers)) == headers
            patched.setattr(f"marlin_convert.checkpoint.header.{name}", count - 1)
            with pytest.raises(
                SourceError, match=f"{headers[-1].file}: .* {count} {what}, expected at most {count - 1}"
            ):
                open_source(str(copied_source))


def bytes_of(header: Header) -> int:
    return len(header.raw)


def tensors_of(header: Header) -> int:
    return len(header.tensors)


def test_escapes_that_are_whole_are_read() -> None:
    text = rb'["\ud83d\uDE00\\ud800\u0041\n\uE000\"\\\\ud800", "\uD7ff"]'
    assert parse_json(text) == ['\N{GRINNING FACE}\\ud800A\n\ue000"\\\\ud800', "\ud7ff"]


@pytest.mark.parametrize("text", [b"[[],[],0]", b'{"a":1,"b":[]}', b'["a,b:c[d{e"]'])
def test_marks_are_counted(monkeypatch: pytest.MonkeyPatch, text: bytes) -> None:
    """Also in strings: it is a bound of the values that is found without parsing."""
    monkeypatch.setattr(codec, "MAX_MARKS", 5)
    parse_json(text)
    with pytest.raises(ValueError, match="it has 6 commas, colons and opening brackets, at most 5 are expe"):
        parse_json(text[:-1] + b"," + text[-1:])


def test_a_dense_document_is_refused_by_name(copied: Path, copied_source: Path) -> None:
    dense = b'{"a":[' + b"[]," * (bounds.MAX_MARKS // 2) + b"0]}"
    (copied_source / "model.safetensors.index.json").write_bytes(dense)
    with pytest.raises(ConvertError, match=f"index.json: .* has {bounds.MAX_MARKS + 3} commas"):
        open_source(str(copied_source))
    (copied / ".work").mkdir()
    (copied / ".work" / "job.json").write_bytes(dense)
    with pytest.raises(ConvertError, match=f"job.json is damaged.* has {bounds.MAX_MARKS + 3} commas"):
        WorkFolder(copied).job()


DENSEST = {
    "lists": 'b"[" + b"[]," * (MAX_MARKS // 2 - 1) + b"0]"',
    "objects": 'b"[" + b\'{"a":1000},\' * (MAX_MARKS // 3 - 1) + b"0]"',
    "strings": 'b"[" + b\'"ab",\' * (MAX_MARKS - 2) + b"0]"',
    "keys": 'b"{" + b",".join(b\'"%x":1.5\' % i for i in range(MAX_MARKS // 2 - 1)) + b"}"',
    "long text": "b'[\"' + bytes.fromhex('5c75643833645c7564653030') + b'a' * (INDEX - 16) + b'\"]'",
}


@pytest.mark.slow
@pytest.mark.parametrize("what", DENSEST)
def test_the_densest_text_takes_less_than_a_gigabyte(what: str) -> None:
    # not ru_maxrss: that of who started the process counts, too
    program = (
        "import re\n"
        "from marlin_convert.documents.bounds import INDEX, MAX_MARKS\n"
        "from marlin_convert.documents.codec import parse_json\n"
        f"parse_json({DENSEST[what]})\n"
        "print(re.search(r'VmHWM:\\s+(\\d+) kB', open('/proc/self/status').read())[1])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert 100e6 < int(done.stdout) << 10 < 1e9
