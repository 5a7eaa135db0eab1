"""A folder as a source: index against files against headers, what is copied, and what is refused."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from attacks import ATTACKS, file_of, written
from checkpoints import Checkpoint, expected_tensor, make_small
from damage import edit_json
from marlin_convert.checkpoint.index import INDEX_NAME, parse_index, weight_files
from marlin_convert.checkpoint.source import open_source
from marlin_convert.errors import SourceError, UsageError


def edit_index(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    edit_json(folder / INDEX_NAME, change)


def refusal(folder: Path) -> str:
    with pytest.raises(SourceError) as caught:
        open_source(str(folder))
    return str(caught.value)


def test_what_is_found(made: Checkpoint) -> None:
    source = open_source(str(made.folder))
    assert {name: (t.file, t.entry.dtype, t.entry.shape) for name, t in source.tensors.items()} == {
        tensor.name: (file, tensor.dtype, tensor.shape)
        for file, tensors in made.files.items()
        for tensor in tensors
    }
    assert source.payload_bytes == made.nbytes
    assert source.prefix == "language_model."
    assert [header.file for header in source.headers] == sorted(made.files)
    assert source.path(source.headers[0].file) == made.folder / source.headers[0].file
    assert source.config == json.loads((made.folder / "config.json").read_bytes())
    for name, (file, entry) in list(source.tensors.items())[::7]:
        stored = (made.folder / file).read_bytes()[entry.offset : entry.offset + entry.size]
        assert stored == expected_tensor(made.tensors[name], made.dims).tobytes()


def test_what_is_copied_and_what_is_not(folder: Path) -> None:
    for name in ("pytorch_model.bin", "model.gguf", ".gitattributes", "digests.bin", "x.incomplete"):
        (folder / name).write_text("x")
    (folder / "figures").mkdir()
    source = open_source(str(folder))
    assert source.auxiliary == (
        "LICENSE",
        "chat_template.jinja",
        "configuration_kimi_k25.py",
        "generation_config.json",
        "modeling_kimi_k25.py",
        "tiktoken.model",
        "tokenizer_config.json",
    )
    assert source.left_out == (
        ".gitattributes",
        "digests.bin",
        "figures/",
        "model.gguf",
        "pytorch_model.bin",
        "x.incomplete",
    )


def test_without_an_index_all_files_are_taken(folder: Path, made: Checkpoint) -> None:
    (folder / INDEX_NAME).unlink()
    source = open_source(str(folder))
    assert source.index_bytes is None
    assert source.tensors.keys() == made.tensors.keys()


def test_k2_thinking_has_no_prefix(tmp_path: Path) -> None:
    thinking = make_small(tmp_path / "thinking", form="k2-thinking", experts=2)
    assert open_source(str(thinking.folder)).prefix == ""


@pytest.mark.parametrize(
    "file",
    [
        "../other/model.safetensors",
        "/etc/model.safetensors",
        "sub/model.safetensors",
        "..",
        "",
        ".",
        "a\\b.safetensors",
        "model.bin",
        7,
        None,
        ["x"],
    ],
)
def test_index_names_stay_in_the_folder(folder: Path, made: Checkpoint, file: Any) -> None:
    edit_index(folder, lambda index: index["weight_map"].update({next(iter(made.tensors)): file}))
    assert (
        f"{INDEX_NAME}: the file name {str(file)!r} is not that of a .safetensors file in the same folder"
        in refusal(folder)
    )


@pytest.mark.parametrize(
    "raw",
    [b"{}", b'{"weight_map": {}}', b'{"weight_map": []}', b'{"weight_map": null}', b'{"weight_map": "x"}'],
)
def test_an_index_without_a_map(raw: bytes) -> None:
    with pytest.raises(SourceError, match="it has no weight_map"):
        parse_index(raw)


@pytest.mark.parametrize("raw", [b"", b"[]", b"3", b"{", b"\xff", b"[" * 100_000])
@pytest.mark.parametrize("name", [INDEX_NAME, "config.json"])
def test_documents_that_are_none(folder: Path, name: str, raw: bytes) -> None:
    (folder / name).write_bytes(raw)
    assert refusal(folder).startswith(f"{name}: not ")


def test_a_missing_file(folder: Path, made: Checkpoint) -> None:
    first, second, *_ = sorted(made.files)
    (folder / second).unlink()
    assert (
        refusal(folder)
        == f"1 of {len(made.files)} weight files missing: {second}; fetch them, then run the same command"
    )
    for name in made.files:
        (folder / name).unlink(missing_ok=True)
    assert f"{len(made.files)} of {len(made.files)} weight files missing: {first}, {second}, " in refusal(
        folder
    )


def test_a_file_too_many(folder: Path) -> None:
    (folder / "extra.safetensors").write_bytes(file_of(b"{}", 0))
    assert refusal(folder).startswith(f"extra.safetensors lies in the folder but is not in {INDEX_NAME}; ")


def test_no_file_and_no_index() -> None:
    with pytest.raises(SourceError, match=r"no \.safetensors file and no index"):
        weight_files([], None)


def test_a_tensor_in_another_file_than_the_index_says(folder: Path, made: Checkpoint) -> None:
    (first, tensors), (second, _), *_ = made.files.items()
    edit_index(folder, lambda index: index["weight_map"].update({tensors[3].name: second}))
    assert refusal(folder) == f"{tensors[3].name} is in {first}, but {INDEX_NAME} says {second}"


def test_a_tensor_that_only_the_index_has(folder: Path, made: Checkpoint) -> None:
    file = min(made.files)
    edit_index(folder, lambda index: index["weight_map"].update({"model.layers.9.extra": file}))
    assert (
        refusal(folder)
        == f"1 tensors of {INDEX_NAME} are in no file: model.layers.9.extra; fetch {file} again"
    )


def test_a_tensor_that_the_index_has_not(folder: Path, made: Checkpoint) -> None:
    file, (tensor, *_) = next(iter(made.files.items()))
    edit_index(folder, lambda index: index["weight_map"].pop(tensor.name))
    assert refusal(folder) == f"1 tensors are not in {INDEX_NAME}: {tensor.name} (in {file})"


def test_a_name_in_two_files(folder: Path, made: Checkpoint) -> None:
    first = min(made.files)
    shutil.copy(folder / first, folder / "again.safetensors")
    (folder / INDEX_NAME).unlink()
    assert f"stands in two files: again.safetensors and {first}" in refusal(folder)


@pytest.mark.parametrize("name", ["data cut off", "overlap", "a byte too many", "huge length"])
def test_attack_files_in_a_folder(folder: Path, made: Checkpoint, name: str) -> None:
    file = min(made.files)
    written(name, folder, file)
    message = refusal(folder)
    assert message.startswith(f"{file}: ")
    assert all(word in message for word in ATTACKS[name].words)


def test_a_folder_in_the_place_of_a_file(folder: Path, made: Checkpoint) -> None:
    file = min(made.files)
    (folder / file).unlink()
    (folder / file).mkdir()
    assert refusal(folder) == f"{folder / file}: cannot be read (Is a directory)"


@pytest.mark.parametrize("name", ["", "config.json", INDEX_NAME])
def test_a_pipe_in_the_place_of_a_file(folder: Path, made: Checkpoint, name: str) -> None:
    file = name or min(made.files)
    (folder / file).unlink()
    os.mkfifo(folder / file)
    assert "cannot be read (it is not a regular file)" in refusal(folder)


def test_no_config(folder: Path) -> None:
    (folder / "config.json").unlink()
    assert (
        refusal(folder)
        == f"config.json is missing in {folder}; is this the folder of a published checkpoint?"
    )


def test_a_converted_folder(folder: Path) -> None:
    (folder / "manifest.json").write_text('{"format":"marlin-convert","format_version":1}')
    assert "has a manifest.json of marlin-convert" in refusal(folder)
    (folder / "manifest.json").write_text('{"name": "a web page"}')
    open_source(str(folder))


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not exist"):
        open_source(str(tmp_path / "nowhere"))
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="is a file, not a folder"):
        open_source(str(tmp_path / "file"))
