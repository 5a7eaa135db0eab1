"""What cannot be converted is refused with the documented exit code, before anything in OUT is changed."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import trees
from checkpoints import Checkpoint, make_small
from damage import edit_json
from forks import Forks
from marlin_convert.checkpoint.source import open_source
from marlin_convert.documents.records import read_record
from marlin_convert.errors import SourceError
from marlin_convert.pipeline.recheck import compare_recorded

Command = Callable[..., tuple[int, str, str]]
SECOND, FOURTH = "model-00002-of-000006.safetensors", "model-00004-of-000006.safetensors"
EXPERT = "language_model.model.layers.1.mlp.experts.2.up_proj"


def shards_of(folder: Path) -> list[Path]:
    """The weight files in order."""
    return sorted(folder.glob("*.safetensors"))


def in_place_of_second(folder: Path) -> Path:
    """Where the second weight file was."""
    (folder / SECOND).unlink()
    return folder / SECOND


def edit_header(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Write a file's header anew, longer or shorter as it comes."""
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    change(header)
    raw = json.dumps(header).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + data[start:])


def edit_index(folder: Path, changes: dict[str, str]) -> None:
    """Change where the index says that tensors are."""
    edit_json(
        folder / "model.safetensors.index.json", lambda document: document["weight_map"].update(changes)
    )


def without_tensor(folder: Path, name: str) -> None:
    """Take a tensor out of its file and the index, closing the hole."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    path = folder / index["weight_map"].pop(name)
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    raw = trees.read_shard(path)
    header: dict[str, Any] = {}
    data = b""
    for other, dtype, shape, offset, size in raw.entries:
        if other != name:
            header[other] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + size]}
            data += raw.data[offset : offset + size]
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def rename_tensor(folder: Path, old: str, new: str) -> None:
    """Give a tensor another name, in the index too."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    file = index["weight_map"].pop(old)
    index["weight_map"][new] = file
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    edit_header(folder / file, lambda header: header.update({new: header.pop(old)}))


def retype(name: str, dtype: str, factor: int = 1) -> Callable[[Path], None]:
    """Call a tensor another dtype, its shape fitted to the same bytes."""

    def change(folder: Path) -> None:
        file = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"][name]

        def in_header(header: dict[str, Any]) -> None:
            header[name]["dtype"] = dtype
            header[name]["shape"][-1] //= factor

        edit_header(folder / file, in_header)

    return change


def other_weights(folder: Path) -> None:
    """All data other, all headers the same: what another release of the family looks like."""
    for path in shards_of(folder):
        raw = trees.read_shard(path)
        path.write_bytes(raw.data[: raw.start] + bytes(byte ^ 5 for byte in raw.data[raw.start :]))


def shape_value(folder: Path) -> None:
    """weight_shape says what weight_packed does not have."""
    name = f"{EXPERT}.weight_shape"
    path = folder / json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"][name]
    raw = trees.read_shard(path)
    offset = next(entry[3] for entry in raw.entries if entry[0] == name)
    path.write_bytes(raw.data[:offset] + b"\x07" + raw.data[offset + 1 :])


def quantization(**changes: Any) -> Callable[[Path], None]:
    """Another way of quantizing."""

    def change(config: dict[str, Any]) -> None:
        config["text_config"]["quantization_config"]["config_groups"]["group_0"]["weights"].update(changes)

    return lambda folder: edit_json(folder / "config.json", change)


#: what is wrong with the source, and words of the message
SOURCES: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing expert tensor": (
        lambda f: without_tensor(f, f"{EXPERT}.weight_scale"),
        f"{EXPERT}.weight_scale missing",
    ),
    "missing plain tensor": (
        lambda f: without_tensor(f, "language_model.lm_head.weight"),
        "language_model.lm_head.weight is missing",
    ),
    "missing file": (
        lambda f: shards_of(f)[1].unlink(),
        "1 of 6 weight files missing: model-00002-of-000006.safetensors",
    ),
    "file more": (
        lambda f: shutil.copy(shards_of(f)[0], f / "model-x.safetensors"),
        "model-x.safetensors lies in the folder but is not in",
    ),
    "truncated file": (
        lambda f: os.truncate(shards_of(f)[1], shards_of(f)[1].stat().st_size - 1),
        "it is truncated",
    ),
    "truncated header": (lambda f: os.truncate(shards_of(f)[1], 100), "it is truncated"),
    "empty file": (lambda f: os.truncate(shards_of(f)[1], 0), "0 bytes is too short"),
    "longer file": (lambda f: shards_of(f)[1].open("ab").write(b"x"), "longer than its header says"),
    "wrong dtype": (
        retype("language_model.model.norm.weight", "F16"),
        f"model.norm.weight in {FOURTH} is F16",
    ),
    "wrong dtype of scales": (
        retype(f"{EXPERT}.weight_scale", "F16"),
        f"{EXPERT}.weight_scale in {SECOND} is F16, expected BF16",
    ),
    "wrong shape": (
        retype(f"{EXPERT}.weight_packed", "I64", 2),
        f"{EXPERT}.weight_packed in {SECOND} is I64, expected I32",
    ),
    "unknown tensor": (
        lambda f: rename_tensor(f, "mm_projector.pre_norm.bias", "mm_projector.pre_norm.bias2"),
        "mm_projector.pre_norm.bias is missing",
    ),
    "unknown dtype": (retype("language_model.model.norm.weight", "Q4"), "has the unknown dtype 'Q4'"),
    "index names another file": (
        lambda f: edit_index(f, {"language_model.lm_head.weight": shards_of(f)[0].name}),
        f"language_model.lm_head.weight is in {FOURTH}, but",
    ),
    "index leaves the folder": (
        lambda f: edit_index(f, {"x": "../x.safetensors"}),
        "'../x.safetensors' is not that of",
    ),
    "damaged index": (
        lambda f: (f / "model.safetensors.index.json").write_text("{"),
        "model.safetensors.index.json: not valid JSON",
    ),
    "damaged config": (
        lambda f: (f / "config.json").write_text('{"architectures": ['),
        "config.json: not valid JSON",
    ),
    "config that is a list": (
        lambda f: (f / "config.json").write_text("[]"),
        "config.json: not a JSON object",
    ),
    "no config": (lambda f: (f / "config.json").unlink(), "config.json is missing"),
    "another family": (
        lambda f: edit_json(f / "config.json", lambda d: d.update(architectures=["LlamaForCausalLM"])),
        "only the Kimi-K2 family",
    ),
    "more layers than there are": (
        lambda f: edit_json(f / "config.json", lambda d: d["text_config"].update(num_hidden_layers=4)),
        "layers.3.",
    ),
    "fewer experts": (
        lambda f: edit_json(f / "config.json", lambda d: d["text_config"].update(n_routed_experts=3)),
        "mlp.gate.weight",
    ),
    "8 bit": (quantization(num_bits=8), "num_bits is 8"),
    "act-order": (quantization(actorder="group"), "actorder is 'group'"),
    "asymmetric": (quantization(symmetric=False), "symmetric is False"),
    "not a file": (lambda f: in_place_of_second(f).mkdir(), "model-00002-of-000006"),
    "dangling link": (
        lambda f: in_place_of_second(f).symlink_to("nowhere"),
        "model-00002-of-000006",
    ),
}


@pytest.mark.parametrize("what", SOURCES)
@pytest.mark.parametrize("verb", ["plan", "convert"])
def test_source_that_is_not_what_it_should_be(
    copied_source: Path, tmp_path: Path, command: Command, what: str, verb: str
) -> None:
    spoil, words = SOURCES[what]
    spoil(copied_source)
    code, stdout, stderr = command(verb, copied_source, tmp_path / "out", "--tp", 2)
    assert code == 3
    assert stderr.startswith("error: ")
    assert words in stderr
    assert stdout == ""
    assert not (tmp_path / "out").exists()


def test_extra_tensor(copied_source: Path, tmp_path: Path, command: Command) -> None:
    """One that no rule names."""
    path = shards_of(copied_source)[0]
    raw = trees.read_shard(path)
    name = "language_model.model.layers.0.self_attn.extra.weight"
    end = len(raw.data) - raw.start
    edit_header(
        path,
        lambda header: header.update({name: {"dtype": "BF16", "shape": [2], "data_offsets": [end, end + 4]}}),
    )
    path.write_bytes(path.read_bytes() + bytes(4))
    edit_json(
        copied_source / "model.safetensors.index.json",
        lambda document: document["weight_map"].update({name: path.name}),
    )
    code, _, stderr = command("convert", copied_source, tmp_path / "out", "--tp", 2)
    assert code == 3
    assert f"1 tensors have no rule, such as {name}" in stderr
    assert not (tmp_path / "out").exists()


def test_shape_that_says_otherwise(copied_source: Path, tmp_path: Path, command: Command) -> None:
    """Only its data tells, so it is found while converting; no manifest comes of it."""
    shape_value(copied_source)
    code, _, stderr = command("convert", copied_source, tmp_path / "out", "--tp", 2, "--threads", 1)
    assert code == 3
    assert f"{EXPERT}.weight_shape" in stderr
    assert not (tmp_path / "out" / "manifest.json").exists()
    assert list((tmp_path / "out").rglob("*.partial")) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
@pytest.mark.parametrize("name", ["config.json", "model-00002-of-000006.safetensors"])
def test_file_that_may_not_be_read(copied_source: Path, tmp_path: Path, command: Command, name: str) -> None:
    (copied_source / name).chmod(0)
    code, _, stderr = command("convert", copied_source, tmp_path / "out", "--tp", 2)
    assert code == 3
    assert f"{name}: cannot be read" in stderr


def test_folder_that_may_not_be_written(tiny: Checkpoint, tmp_path: Path, command: Command) -> None:
    (tmp_path / "file").write_text("not a folder")
    code, _, stderr = command("convert", tiny.folder, tmp_path / "file" / "out", "--tp", 2)
    assert code == 4
    assert "check the" in stderr


# Requests that cannot be met.

REQUESTS: dict[str, tuple[tuple[object, ...], str]] = {
    "tp that does not divide": (("--tp", 3), "not divisible by tp / ep = 3"),
    "tp that does not divide the heads": (("--tp", 16, "--ep", 4), "--tp 16 does not divide"),
    "a cut group": (
        ("--tp", 16),
        "a slice of 16 of the experts' intermediate size 256 at tp / ep = 16 would cut a group of 32",
    ),
    "ep that does not divide tp": (("--tp", 4, "--ep", 3), "--ep 3 does not divide --tp 4"),
    "ep that does not divide the experts": (
        ("--tp", 8, "--ep", 8),
        "--ep 8 does not divide the 4 routed experts",
    ),
    "more than 64 slices": (("--tp", 128), "at most 64"),
    "no such layer": (("--tp", 2, "--layers", "3"), "there is no layer 3; they run from 0 to 2"),
    "no such rank": (("--tp", 2, "--ranks", "1,2"), "there is no rank 2; they run from 0 to 1"),
    "a range with a colon": (("--tp", 2, "--layers", "1:3"), "write 1-3 for a range with both ends included"),
    "a range backwards": (("--tp", 2, "--layers", "3-1"), "write numbers and ranges such as"),
    "no tp": ((), "--tp"),
    "tp 0": (("--tp", 0), "--tp"),
}


@pytest.mark.parametrize("what", REQUESTS)
def test_request_that_cannot_be_met(tiny: Checkpoint, tmp_path: Path, command: Command, what: str) -> None:
    options, words = REQUESTS[what]
    for verb in ("plan", "convert"):
        code, stdout, stderr = command(verb, tiny.folder, tmp_path / "out", *options)
        assert code == 2
        assert words in stderr
        assert stdout == ""
    assert not (tmp_path / "out").exists()


def test_memory_that_is_too_little(
    tiny: Checkpoint, tiny_tp2: Path, tmp_path: Path, command: Command
) -> None:
    out = tmp_path / "out"
    code, _, stderr = command("convert", tiny.folder, out, "--tp", 2, "--memory", "100k")
    assert code == 2
    assert not out.exists()
    least = re.search(r"the smallest that works is (\d+)MiB", stderr)
    assert least is not None
    assert command("convert", tiny.folder, out, "--tp", 2, "--memory", f"{int(least[1]) - 1}MiB")[0] == 2
    assert command("convert", tiny.folder, out, "--tp", 2, "--memory", f"{least[1]}MiB")[0] == 0
    assert trees.tree(out) == trees.tree(tiny_tp2)


# Folders that are not for us.


def test_converted_folder_as_source(copied: Path, tmp_path: Path, command: Command) -> None:
    before = trees.tree(copied, without=())
    code, _, stderr = command("convert", copied, tmp_path / "other", "--tp", 2)
    assert code == 3
    assert "is a conversion already" in stderr
    assert not (tmp_path / "other").exists()
    assert trees.tree(copied, without=()) == before


@pytest.mark.parametrize("place", [".", "out", "deep/out", "../source/out"])
def test_output_in_the_source(copied_source: Path, command: Command, place: str) -> None:
    before = trees.tree(copied_source)
    code, _, stderr = command("convert", copied_source, copied_source / place, "--tp", 2)
    assert code == 2
    assert "is the source folder or lies in it" in stderr
    assert trees.tree(copied_source) == before
    assert not (copied_source / "out").exists()


def test_output_in_the_source_by_another_name(copied_source: Path, tmp_path: Path, command: Command) -> None:
    (tmp_path / "link").symlink_to(copied_source)
    code, _, stderr = command("convert", copied_source, tmp_path / "link" / "out", "--tp", 2)
    assert code == 2
    assert "is the source folder or lies in it" in stderr


@pytest.mark.parametrize("overwrite", [(), ("--overwrite", "--yes")])
@pytest.mark.parametrize("foreign", ["notes.txt", "rank-00-of-02/layer-000.safetensors", "manifest.json"])
def test_output_that_holds_something_else(
    tiny: Checkpoint, tmp_path: Path, command: Command, foreign: str, overwrite: tuple[str, ...]
) -> None:
    out = tmp_path / "out"
    (out / foreign).parent.mkdir(parents=True)
    (out / foreign).write_text("{}")
    code, _, stderr = command("convert", tiny.folder, out, "--tp", 2, *overwrite)
    assert code == 2
    assert "is not empty and is not a conversion" in stderr
    assert trees.tree(out) == {foreign: b"{}"}


def test_output_that_is_a_file(tiny: Checkpoint, tmp_path: Path, command: Command) -> None:
    (tmp_path / "out").write_text("x")
    code, _, stderr = command("convert", tiny.folder, tmp_path / "out", "--tp", 2)
    assert code == 2
    assert "is not a folder" in stderr


@pytest.mark.parametrize("verb", ["plan", "convert"])
def test_mistyped_source(tmp_path: Path, command: Command, verb: str) -> None:
    code, _, stderr = command(verb, tmp_path / "no" / "such" / "folder", tmp_path / "out", "--tp", 2)
    assert code == 2
    assert "no/such/folder" in stderr
    assert not (tmp_path / "out").exists()


def test_file_as_source(tiny: Checkpoint, tmp_path: Path, command: Command) -> None:
    code, _, stderr = command("convert", shards_of(tiny.folder)[0], tmp_path / "out", "--tp", 2)
    assert code == 2
    assert "is a file, not a folder" in stderr


@pytest.mark.parametrize("folder", ["nowhere", "empty", "checkpoint"])
def test_verify_of_what_is_no_conversion(
    tiny: Checkpoint, tmp_path: Path, command: Command, folder: str
) -> None:
    place = {"nowhere": tmp_path / "nowhere", "empty": tmp_path, "checkpoint": tiny.folder}[folder]
    code, _, stderr = command("verify", place)
    assert code == (1 if folder == "empty" else 2)
    said = {
        "nowhere": "is not a folder",
        "empty": "has no manifest.json; is it a converted folder?",
        "checkpoint": "give the output folder instead",
    }
    assert said[folder] in stderr


def test_verify_with_the_source_first(tiny: Checkpoint, copied: Path, command: Command) -> None:
    code, _, stderr = command("verify", tiny.folder, copied)
    assert code == 2
    assert f"verify {copied} --source {tiny.folder}" in stderr


# Continuing with something else.


@pytest.fixture(params=["finished", "unfinished"])
def begun(
    request: pytest.FixtureRequest, forks: Forks, tiny: Checkpoint, copied: Path, tmp_path: Path
) -> Iterator[Path]:
    """A conversion for tp 2 that is finished, and one that was killed."""
    if request.param == "finished":
        yield copied
        return
    out = tmp_path / "unfinished"
    fault = {"call": "replace", "number": 6, "action": "SIGKILL"}
    assert forks.run("convert", tiny.folder, out, "--tp", 2, "--threads", 1, fault=fault).code == -9
    assert (out / ".work" / "job.json").exists()
    yield out


OTHER_OPTIONS: dict[str, tuple[tuple[object, ...], str]] = {
    "tp": (("--tp", 4), "tp 2, ranks 0-1, now asked for tp 4, ranks 0-3"),
    "ep": (("--tp", 2, "--ep", 2), "ep 1, now asked for ep 2"),
    "ranks": (("--tp", 2, "--ranks", 0), "ranks 0-1, complete True, now asked for ranks 0, complete False"),
    "layers": (
        ("--tp", 2, "--layers", "0-1"),
        "layers 0-2, complete True, now asked for layers 0-1, complete False",
    ),
    "all layers but nothing else": (
        ("--tp", 2, "--layers", "0-2"),
        "complete True, now asked for complete False",
    ),
}


def test_other_proof_on_an_unfinished_one(
    forks: Forks, tiny: Checkpoint, tmp_path: Path, command: Command
) -> None:
    """A finished one that is proven more than is asked for is just finished; half of each would be
    neither.
    """
    out = tmp_path / "unfinished"
    fault = {"call": "replace", "number": 6, "action": "SIGKILL"}
    assert forks.run("convert", tiny.folder, out, "--tp", 2, "--threads", 1, fault=fault).code == -9
    code, _, stderr = command("convert", tiny.folder, out, "--tp", 2, "--verify", "none")
    assert code == 2
    assert f"{out} was begun with verify exact, now asked for verify none" in stderr


@pytest.mark.parametrize("what", OTHER_OPTIONS)
def test_other_options(tiny: Checkpoint, begun: Path, command: Command, what: str) -> None:
    options, words = OTHER_OPTIONS[what]
    before = trees.tree(begun, without=())
    code, _, stderr = command("convert", tiny.folder, begun, *options)
    assert code == 2
    assert f"{begun} was {'begun' if (begun / '.work').exists() else 'made'} with {words}" in stderr
    assert "--overwrite" in stderr
    assert trees.tree(begun, without=()) == before


def test_other_weights_under_equal_headers(begun: Path, copied_source: Path, command: Command) -> None:
    other_weights(copied_source)
    before = trees.tree(begun, without=())
    code, _, stderr = command("convert", copied_source, begun, "--tp", 2)
    assert code == 3
    assert "the content of model-00001-of-000006.safetensors differs" in stderr
    assert trees.tree(begun, without=()) == before


def test_other_config(begun: Path, copied_source: Path, command: Command) -> None:
    edit_json(copied_source / "config.json", lambda document: document["text_config"].update(rope_theta=1.0))
    before = trees.tree(begun, without=())
    code, _, stderr = command("convert", copied_source, begun, "--tp", 2)
    assert code == 3
    assert "config.json differs" in stderr
    assert trees.tree(begun, without=()) == before


def test_source_that_was_touched(forks: Forks, copied_source: Path, tmp_path: Path, command: Command) -> None:
    """A sample cannot prove that a file written again is the same."""
    out = tmp_path / "out"
    fault = {"call": "replace", "number": 6, "action": "SIGKILL"}
    assert forks.run("convert", copied_source, out, "--tp", 2, fault=fault).code == -9
    os.utime(shards_of(copied_source)[2])
    before = trees.tree(out, without=())
    code, _, stderr = command("convert", copied_source, out, "--tp", 2)
    assert code == 3
    assert "was written again" in stderr
    assert trees.tree(out, without=()) == before
    assert command("convert", copied_source, out, "--tp", 2, "--overwrite", "--yes")[0] == 0


def killed_in_the_midst(forks: Forks, source: Path, out: Path) -> int:
    """How many units are recorded."""
    fault = {"call": "replace", "number": 8, "action": "SIGKILL"}
    assert forks.run("convert", source, out, "--tp", 2, "--threads", 1, fault=fault).code == -9
    return len(list((out / ".work" / "units").glob("*.json")))


def test_source_of_which_only_the_attributes_changed(
    forks: Forks, copied_source: Path, tiny_tp2: Path, tmp_path: Path, command: Command
) -> None:
    """chmod and hard links change the time of change: what was made is compared, then it goes on."""
    out = tmp_path / "out"
    made = killed_in_the_midst(forks, copied_source, out)
    assert made > 0
    for path in shards_of(copied_source):
        path.chmod(0o600)
        os.link(path, path.with_name(f".{path.name}"))
    code, stdout, stderr = command("convert", copied_source, out, "--tp", 2, "--json")
    assert (code, stderr) == (0, "")
    assert json.loads(stdout)["units_found"] == made
    assert trees.tree(out) == trees.tree(tiny_tp2)


def test_source_replaced_with_its_time_put_back(forks: Forks, copied_source: Path, tmp_path: Path) -> None:
    """Where the sample does not look the digests of what was read tell."""
    out = tmp_path / "out"
    assert killed_in_the_midst(forks, copied_source, out) > 0
    source = open_source(str(copied_source))
    records = [read_record(path.read_bytes(), str(path)) for path in (out / ".work" / "units").glob("*.json")]
    files = [header.file for header in source.headers]
    compare_recorded(source, records, files)
    name = next(iter(records[0].source))
    path, entry = source.path(source.tensors[name].file), source.tensors[name].entry
    data = bytearray(path.read_bytes())
    data[entry.offset + entry.size - 1] ^= 1
    trees.rewrite_unseen(path, bytes(data))
    compare_recorded(source, records, set(files) - {path.name})
    said = f"{path.name} was replaced after units were made of it: the xxh3-128 of {name} is"
    with pytest.raises(SourceError, match=said):
        compare_recorded(source, records, files)


def test_source_replaced_while_it_is_converted(forks: Forks, copied_source: Path, tmp_path: Path) -> None:
    """Size and time of modification are as before; what was being made does not count."""
    out = tmp_path / "out"
    path = shards_of(copied_source)[-1]
    other = tmp_path / "other"
    shutil.copy2(path, other)
    fault = {
        "call": "pwrite",
        "number": 0,
        "action": "run",
        "command": ["cp", "--preserve", str(other), str(path)],
        "result": str(tmp_path / "result"),
    }
    done = forks.run("convert", copied_source, out, "--tp", 2, fault=fault)
    assert done.code == 3
    assert "a weight file was changed while" in done.stderr
    assert not list((out / ".work" / "units").iterdir())


def test_source_that_was_touched_before_anything_was_finished(
    forks: Forks, copied_source: Path, tmp_path: Path, command: Command
) -> None:
    """Nothing was taken from it that counts, so fetching a damaged file again needs no new start."""
    out = tmp_path / "out"
    fault = {"call": "replace", "number": 2, "action": "SIGKILL"}
    assert forks.run("convert", copied_source, out, "--tp", 2, fault=fault).code == -9
    assert not list((out / ".work" / "units").iterdir())
    os.utime(shards_of(copied_source)[2])
    assert command("convert", copied_source, out, "--tp", 2)[0] == 0
    assert command("verify", out, "--source", copied_source)[0] == 0


def test_damaged_job(tiny: Checkpoint, forks: Forks, tmp_path: Path, command: Command) -> None:
    out = tmp_path / "out"
    fault = {"call": "replace", "number": 6, "action": "SIGKILL"}
    assert forks.run("convert", tiny.folder, out, "--tp", 2, fault=fault).code == -9
    job = out / ".work" / "job.json"
    job.write_bytes(job.read_bytes()[:-20])
    code, _, stderr = command("convert", tiny.folder, out, "--tp", 2)
    assert code == 1
    assert "start again with --overwrite" in stderr
    assert command("convert", tiny.folder, out, "--tp", 2, "--overwrite", "--yes")[0] == 0
    assert command("verify", out)[0] == 0


@pytest.mark.parametrize("damage", ["cut", "flipped", "file gone", "file shorter"])
def test_damaged_record_is_made_again(
    tiny: Checkpoint, forks: Forks, tiny_tp2: Path, tmp_path: Path, command: Command, damage: str
) -> None:
    """A record that is not whole, or whose files are not, does not count."""
    out = tmp_path / "out"
    fault = {"call": "replace", "number": 9, "action": "SIGKILL"}
    assert forks.run("convert", tiny.folder, out, "--tp", 2, "--threads", 1, fault=fault).code == -9
    record = min((out / ".work" / "units").glob("*.json"))
    shard = next(out.glob(f"*/{record.stem}.safetensors"))
    data = record.read_bytes()
    if damage == "cut":
        record.write_bytes(data[: len(data) // 2])
    elif damage == "flipped":
        record.write_bytes(data[:200] + bytes([data[200] ^ 1]) + data[201:])
    elif damage == "file gone":
        shard.unlink()
    else:
        os.truncate(shard, 4096)
    code, _, stderr = command("convert", tiny.folder, out, "--tp", 2)
    assert (code, stderr) == (0, "")
    assert trees.tree(out) == trees.tree(tiny_tp2)


def test_sources_with_equal_headers_have_different_ids(tmp_path: Path, command: Command) -> None:
    """Else a shard of one would pass for a shard of the other."""
    made = make_small(tmp_path / "one", layers=1, experts=2, vt_layers=1)
    shutil.copytree(made.folder, tmp_path / "two")
    other_weights(tmp_path / "two")
    for name in ("one", "two"):
        assert command("convert", tmp_path / name, tmp_path / f"{name}-out", "--tp", 2)[0] == 0
    one, two = (trees.manifest_of(tmp_path / f"{name}-out")["source"]["id"] for name in ("one", "two"))
    assert one != two
