"""A source whose files, names and numbers are made to hang, to fill memory or to spoil the output: refused by
`plan` and `convert` before anything is written.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import trees
from checkpoints import Checkpoint
from damage import edit_json
from limited import limited
from marlin_convert.checkpoint.source import open_source
from marlin_convert.checkpoint.store import RECORD
from marlin_convert.documents.bounds import ALL_COPIED, COPIED
from marlin_convert.pipeline.run import convert

Command = Callable[..., tuple[int, str, str]]
INDEX_NAME = "model.safetensors.index.json"

pytestmark = pytest.mark.slow


def refused(folder: Path, out: Path, *words: str) -> None:
    """Both verbs refuse it within limits, and nothing is written."""
    for arguments in (("plan", folder, "--tp", 2), ("convert", folder, out, "--tp", 2)):
        code, said = limited(*arguments)
        assert code == 3, said
        assert all(word in said for word in words), said
    assert not out.exists()


@pytest.mark.parametrize("name", ["config.json", INDEX_NAME, "README.md", "model-00001-of-*.safetensors"])
def test_a_pipe_in_place_of_a_file(copied_source: Path, tmp_path: Path, name: str) -> None:
    path = sorted(copied_source.glob(name))[0]
    path.unlink()
    os.mkfifo(path)
    if name == "README.md":  # a file that may be missing
        assert open_source(str(copied_source)).readme is None
    else:
        refused(copied_source, tmp_path / "out", "it is not a regular file")


@pytest.mark.parametrize("name", ["config.json", INDEX_NAME, "README.md"])
def test_a_document_of_a_terabyte_without_data(copied_source: Path, tmp_path: Path, name: str) -> None:
    os.truncate(copied_source / name, 1 << 40)
    refused(copied_source, tmp_path / "out", name, f"{1 << 40} bytes")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda text: text.update(num_hidden_layers=10**12), "num_hidden_layers is 1000000000000"),
        (lambda text: text.update(n_routed_experts=1 << 16), "expected [65536, "),
        (lambda text: text.update(num_hidden_layers=4096), "missing"),
        (lambda text: text["quantization_config"].update(ignore=["re:(" * 2000]), "which is none"),
    ],
)
def test_numbers_that_nothing_could_follow(
    copied_source: Path, tmp_path: Path, change: Callable[[Any], object], words: str
) -> None:
    edit_json(copied_source / "config.json", lambda config: change(config["text_config"]))
    refused(copied_source, tmp_path / "out", words)


def test_a_pattern_that_backtracks_is_followed(copied_source: Path, command: Command) -> None:
    def change(config: Any) -> None:
        config["text_config"]["quantization_config"]["ignore"] = ["re:(.*.*)*(a|.)*x$", "re:(?=.*a)+b"]

    edit_json(copied_source / "config.json", change)
    code, said = limited("plan", copied_source, "--tp", 2)
    assert code == 0, said
    assert "1 patterns that were not compared, such as (?=.*a)+b" in said


@pytest.mark.parametrize(
    "text", [b"NaN", b"Infinity", b"1e999", b'"\\ud800"', b"1" * 30, b'{"a":' * 40 + b"1" + b"}" * 40]
)
def test_values_that_readers_take_differently(
    copied_source: Path, tmp_path: Path, command: Command, text: bytes
) -> None:
    path = copied_source / "config.json"
    raw = path.read_bytes().rstrip()
    path.write_bytes(raw[:-1] + b',"more":' + text + b"}")
    code, _, said = command("convert", copied_source, tmp_path / "out", "--tp", 2)
    assert code == 3, said
    assert "config.json" in said
    assert not (tmp_path / "out").exists()


OWN = [
    "common",
    "source",
    "rank-00-of-02",
    "rank-5-of-9",
    "manifest.json.partial",
    ".work",
    "x.partial",
    "digests.bin",
]


def test_files_with_names_that_the_output_uses_stay_behind(
    copied_source: Path, tiny_tp2: Path, tmp_path: Path
) -> None:
    for name in OWN:
        (copied_source / name).write_text("theirs")
    assert set(OWN) <= set(open_source(str(copied_source)).left_out)
    convert(str(copied_source), tmp_path / "out", tp=2, threads=2)
    assert set(OWN) <= set(trees.manifest_of(tmp_path / "out")["source"]["not_copied"])
    without = ("provenance.json", "manifest.json")
    assert trees.tree(tmp_path / "out", without=without) == trees.tree(tiny_tp2, without=without)


@pytest.mark.parametrize("length", [240, 241])
@pytest.mark.parametrize("ending", [".safetensors", ".txt"])
def test_names_of_any_length(
    copied_source: Path, tmp_path: Path, command: Command, length: int, ending: str
) -> None:
    name = "n" * (length - len(ending)) + ending
    if ending == ".safetensors":
        first = sorted(copied_source.glob("*.safetensors"))[0]
        first.rename(copied_source / name)

        def change(index: Any) -> None:
            files = index["weight_map"]
            files |= {tensor: name for tensor, file in files.items() if file == first.name}

        edit_json(copied_source / INDEX_NAME, change)
    else:
        (copied_source / name).write_text("x")
    code, _, said = command("convert", copied_source, tmp_path / "out", "--tp", 2, "--threads", 2)
    assert code == (0 if length == 240 else 3), said
    assert ("expected at most 240" in said) == (length == 241)


def test_a_name_that_is_no_text(copied_source: Path, tmp_path: Path, command: Command) -> None:
    with open(os.fsencode(copied_source) + b"/\xff.txt", "w"):
        pass
    code, _, said = command("convert", copied_source, tmp_path / "out", "--tp", 2)
    assert (code, "is no text in UTF-8" in said) == (3, True)


def test_large_files_beside_the_weights_are_left_out_and_never_read(
    copied_source: Path, tmp_path: Path
) -> None:
    (copied_source / "backup.tar").touch()
    os.truncate(copied_source / "backup.tar", 1 << 40)
    source = open_source(str(copied_source))
    assert "backup.tar" in source.left_out
    assert "backup.tar" not in source.auxiliary
    code, said = limited("convert", copied_source, tmp_path / "out", "--tp", 2)
    assert code == 0, said
    assert trees.manifest_of(tmp_path / "out")["source"]["not_copied"] == ["backup.tar"]


def test_many_files_that_are_large_together_are_refused(copied_source: Path, tmp_path: Path) -> None:
    for number in range(ALL_COPIED // COPIED + 1):
        (copied_source / f"part{number}").touch()
        os.truncate(copied_source / f"part{number}", COPIED)
    refused(copied_source, tmp_path / "out", "move away what no engine needs")


@pytest.mark.parametrize("raw", [b"{" * 3000, b'{"files":' * 900 + b"1" + b"}" * 900, b"[]", b"{}", b"\xff"])
def test_a_download_record_of_any_content(copied_source: Path, command: Command, raw: bytes) -> None:
    (copied_source / RECORD).write_bytes(raw)
    code, _, said = command("plan", copied_source, "--tp", 2)
    assert code == 0, said


def test_a_job_of_any_content(tiny: Checkpoint, tmp_path: Path, command: Command) -> None:
    job = tmp_path / "out" / ".work" / "job.json"
    job.parent.mkdir(parents=True)
    for raw in (b"{}", b'{"format": "marlin-convert"}', b'{"format": "marlin-convert", "a": ' + b"[" * 5000):
        job.write_bytes(raw)
        code, _, said = command("convert", tiny.folder, tmp_path / "out", "--tp", 2)
        assert code in (1, 2), said
        assert "internal" not in said


@pytest.mark.parametrize(
    "change",
    [
        lambda document: document["units"][0]["tensors"][0].update({"from": []}),
        lambda document: document["source"]["files"].__setitem__(0, 255),
        lambda document: document["shards"][0].update(tensors=[]),
        lambda document: document.update(model=255),
    ],
)
@pytest.mark.parametrize("verb", ["verify", "inspect", "convert"])
def test_a_sealed_manifest_of_any_content(
    copied: Path, tiny: Checkpoint, command: Command, verb: str, change: Callable[[Any], object]
) -> None:
    document = trees.manifest_of(copied)
    change(document)
    (copied / "manifest.json").write_bytes(trees.seal(document))
    arguments = ("convert", tiny.folder, copied, "--tp", 2) if verb == "convert" else (verb, copied)
    code, _, said = command(*arguments)
    assert code == 1, said


def test_an_emptied_shard_is_inspected(copied: Path, command: Command) -> None:
    shard = copied / "rank-00-of-02" / "layer-001.safetensors"
    name = trees.read_shard(shard).entries[0][0]
    shard.write_bytes(b"")
    for arguments in ((shard,), (shard, "--tensor", name), (copied, "--tensor", name)):
        code, _, said = command("inspect", *arguments)
        assert code in (1, 3), said
        assert "internal" not in said


ODD = "a\x1b[31mred\x07\u202eb\x9b\r\nerror: forged"


def test_names_with_signs_for_a_terminal_are_written_out(
    copied_source: Path, tmp_path: Path, command: Command
) -> None:
    path = sorted(copied_source.glob("*.safetensors"))[0]
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header = {(name if number else ODD): entry for number, (name, entry) in enumerate(header.items())}
    raw = json.dumps(header).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + data[8 + length :])
    for arguments in (
        ("inspect", path),
        ("inspect", path, "--tensor", ODD + "x"),
        ("plan", copied_source, "--tp", 2),
    ):
        _, out, said = command(*arguments)
        assert all(char.isprintable() or char == "\n" for char in out + said), (out, said)
        assert "\\x1b[31m" in out + said
        assert "\nerror: forged" not in out + said
