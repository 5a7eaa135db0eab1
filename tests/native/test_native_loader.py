"""The C++ reader: what it reads, compared with Python's reading, and what it refuses."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from damage import edit_header, edit_manifest, flip, header_of, plain_file, with_header
from native_programs import Programs, lines

pytestmark = pytest.mark.slow

Outputs = Callable[..., Path]
SHARD = "rank-03-of-08/layer-001.safetensors"
EXPERTS = "language_model.model.layers.1.mlp.experts."


def _digest(data: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(data)


def _range(raw: bytes, offset: int, size: int) -> str:
    return _digest(raw[offset : offset + size])


# -- what it reads
# ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tp", "ep", "rank"), [(8, 1, 0), (8, 1, 7), (4, 2, 3), (4, 4, 1)])
def test_views_are_what_python_reads(
    programs: Programs, outputs: Outputs, tp: int, ep: int, rank: int
) -> None:
    out = outputs(tp, ep, 0)
    result = programs("dump_views", out, rank)
    assert result.returncode == 0, result.stderr
    dumped = json.loads(result.stdout)
    manifest = json.loads((out / "manifest.json").read_bytes())
    entries = [shard for shard in manifest["shards"] if shard["rank"] == rank]
    assert [shard["path"] for shard in dumped["shards"]] == [shard["path"] for shard in entries]
    for shard, entry in zip(dumped["shards"], entries, strict=True):
        raw = (out / entry["path"]).read_bytes()
        for found, expected in zip(shard["tensors"], entry["tensors"], strict=True):
            assert {key: found[key] for key in ("name", "dtype", "shape", "offset")} == {
                key: expected[key] for key in ("name", "dtype", "shape", "offset")
            }
            assert found["digest"] == _range(raw, expected["offset"], expected["size"])
        for found, expected in zip(shard["fused"], entry["fused"], strict=True):
            members = [tensor for tensor in entry["tensors"] if tensor["name"] in expected["members"]]
            assert (found["name"], found["shape"]) == (expected["name"], expected["shape"])
            assert found["digest"] == _range(
                raw, expected["offset"], sum(tensor["size"] for tensor in members)
            )
        _check_experts(shard, entry, raw, first=rank // (tp // ep) * (16 // ep), count=16 // ep)
    constants = manifest["model"]
    assert dumped["hidden_size"] == constants["hidden_size"]
    assert dumped["rms_norm_eps"] == constants["rms_norm_eps"]
    assert dumped["rope_type"] == constants["rope_scaling.type"]
    assert None not in dumped["refused"], "every misuse is refused"


def _check_experts(shard: dict[str, Any], entry: dict[str, Any], raw: bytes, first: int, count: int) -> None:
    stacked = {
        tensor["name"].rpartition(".")[2]: tensor
        for tensor in entry["tensors"]
        if "mlp.experts." in tensor["name"]
    }
    assert bool(stacked) == ("experts" in shard)
    if not stacked:
        return
    experts = shard["experts"]
    assert (experts["first"], experts["count"], experts["hidden"]) == (first, count, 256)
    assert experts["intermediate"] == 16 * stacked["w2_weight_packed"]["shape"][1]
    names = ("w13_weight_packed", "w13_weight_scale", "w2_weight_packed", "w2_weight_scale")
    for number, (*parts, total) in enumerate(experts["each"]):
        for part, name in zip(parts, names, strict=True):
            size = stacked[name]["size"] // count
            offset = stacked[name]["offset"] + number * size
            assert (part["offset"], part["digest"]) == (offset, _range(raw, offset, size))
        scales = np.frombuffer(raw, np.uint16, size // 2, offset).astype(np.uint32) << 16
        assert total == pytest.approx(float(scales.view(np.float32).sum(dtype=np.float64)), rel=1e-12)


@pytest.mark.parametrize(("tp", "ep"), [(8, 1), (4, 2)])
def test_info_and_digests(programs: Programs, outputs: Outputs, tp: int, ep: int) -> None:
    out = outputs(tp, ep, 0)
    for rank in range(tp):
        result = programs("native_loader/shard_info", out, rank, "--verify")
        assert result.returncode == 0, result.stderr
        assert "every digest" in result.stdout
        assert f"rank-{rank:02}-of-{tp:02}/layer-001.safetensors" in result.stdout


def test_one_machine_has_its_rank_alone(programs: Programs, copied: Path) -> None:
    for other in copied.glob("rank-*"):
        if other.name != "rank-03-of-08":
            shutil.rmtree(other)
    result = programs("native_loader/shard_info", copied, 3, "--verify")
    assert result.returncode == 0, result.stderr
    assert programs("native_loader/shard_info", copied, 2, "--verify").returncode == 1
    (copied / "rank-03-of-08" / "model.safetensors.index.json").unlink()
    result = programs("native_loader/shard_info", copied, 3, "--verify")
    assert result.returncode == 1
    assert "rank-03-of-08/model.safetensors.index.json" in result.stderr


@pytest.mark.parametrize("option", ["-h", "--help"])
def test_help(programs: Programs, option: str) -> None:
    result = programs("native_loader/shard_info", option)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith("usage: shard_info OUT RANK [--verify]\n")


def test_what_is_installed(programs: Programs, tmp_path: Path) -> None:
    """The program, and the headers that it is made of."""
    line = ["cmake", "--install", str(programs.folder), "--prefix", str(tmp_path)]
    subprocess.run(line, check=True, capture_output=True)
    found = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    headers = ("safetensors_file.hpp", "marlin_shards.hpp", "marlin_digest.hpp")
    assert found >= {"bin/shard_info", *(f"include/marlin_convert/{name}" for name in headers)}


PARENT = """
cmake_minimum_required(VERSION 3.22)
project(engine LANGUAGES CXX)
add_subdirectory({loader} loader)
"""


@pytest.mark.parametrize("within", [False, True])
def test_a_warning_is_an_error_in_our_own_builds_alone(
    programs: Programs, tmp_path: Path, within: bool
) -> None:
    """Another project's compiler may know more of them."""
    loader = Path(__file__).parents[2] / "examples" / "native_loader"
    (tmp_path / "CMakeLists.txt").write_text(PARENT.format(loader=loader))
    line = ["cmake", "-S", str(tmp_path if within else loader), "-B", str(tmp_path / "build")]
    subprocess.run([*line, "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON"], check=True, capture_output=True)
    built = json.loads((tmp_path / "build" / "compile_commands.json").read_text())
    (command,) = (each["command"] for each in built if each["file"].endswith("shard_info.cpp"))
    assert "-Wall" in command
    assert ("-Werror" in command) != within


@pytest.mark.parametrize(
    "arguments", [(), ("OUT",), ("OUT", "x"), ("OUT", "-1"), ("OUT", "0", "--frobnicate"), ("OUT", "0", "1")]
)
def test_usage(programs: Programs, arguments: tuple[str, ...]) -> None:
    result = programs("native_loader/shard_info", *arguments)
    assert result.returncode == 2
    assert "usage:" in result.stderr


# -- single files that no reader should trust
# -------------------------------------------------------------------------


def _tensors(**changes: Any) -> bytes:
    """The header of two tensors, 64 bytes; `a` or `b` given replaces fields of that tensor, None removes
    it.
    """
    document = {
        "a": {"dtype": "I32", "shape": [2, 4], "data_offsets": [0, 32]},
        "b": {"dtype": "BF16", "shape": [16], "data_offsets": [32, 64]},
    }
    for name, change in changes.items():
        if change is None:
            del document[name]
        else:
            document[name] = {**document[name], **change}
    return json.dumps(document).encode()


def _renamed(name: str) -> bytes:
    return json.dumps(
        {name: json.loads(_tensors())["a"], "b": json.loads(_tensors())["b"]}, ensure_ascii=False
    ).encode()


HOSTILE: dict[str, tuple[bytes, str]] = {
    "overlap": (_tensors(b={"data_offsets": [16, 48]}), "overlaps"),
    "all of it twice": (_tensors(b={"dtype": "U8", "shape": [32], "data_offsets": [0, 32]}), "overlaps"),
    "hole": (_tensors(a=None), "hole before b"),
    "uncovered end": (_tensors(b=None), "32 bytes behind its last tensor"),
    "nothing at all": (b"{}", "64 bytes behind"),
    "behind the end": (_tensors(b={"data_offsets": [36, 68]}), "behind the end"),
    "offsets near 2^64": (_tensors(b={"data_offsets": [2**64 - 32, 2**64 - 1]}), "behind the end"),
    "offsets over 2^64": (_tensors(b={"data_offsets": [32, 2**64 + 64]}), "unsigned 64-bit"),
    "negative offsets": (_tensors(a={"data_offsets": [-32, 0]}), "unsigned 64-bit"),
    "fractional offsets": (_tensors(a={"data_offsets": [0, 32.0]}), "unsigned 64-bit"),
    "backward offsets": (_tensors(a={"data_offsets": [32, 0]}), "no range"),
    "one offset": (_tensors(a={"data_offsets": [0]}), "no range"),
    "three offsets": (_tensors(a={"data_offsets": [0, 32, 64]}), "no range"),
    "no offsets": (_tensors(a={"data_offsets": None}), "no list in data_offsets"),
    "offsets as text": (_tensors(a={"data_offsets": ["0", "32"]}), "unsigned 64-bit"),
    "other size": (_tensors(a={"shape": [2, 5]}), "do not fit its dtype and shape"),
    "shape over 2^64": (_tensors(a={"shape": [2**33, 2**33]}), "overflows"),
    "shape over 2^64 to the right size": (_tensors(a={"shape": [2**61 + 1, 8]}), "overflows"),
    "negative shape": (_tensors(a={"shape": [-2, -4]}), "unsigned 64-bit"),
    "shape is no list": (_tensors(a={"shape": "24"}), "no list in shape"),
    "five dimensions": (_tensors(a={"shape": [1, 1, 1, 2, 4]}), "more than 4 dimensions"),
    "empty tensor": (_tensors(a={"shape": [0, 4], "data_offsets": [0, 0]}), "is empty"),
    "unknown dtype": (_tensors(a={"dtype": "I33"}), "unknown dtype I33"),
    "dtype is no text": (_tensors(a={"dtype": 4}), "no string in dtype"),
    "tensor is a list": (b'{"a":[0,32]}', "is not an object"),
    "header is a list": (b"[]", "does not start with {"),
    "byte order mark": (b"\xef\xbb\xbf" + _tensors(), "does not start with {"),
    "leading space": (b" " + _tensors(), "does not start with {"),
    "long name": (_renamed("x" * 128), "127 plain ASCII"),
    "empty name": (_renamed(""), "127 plain ASCII"),
    "backslash": (b'{"a\\\\b":' + _tensors()[5:], "127 plain ASCII"),
    "quote": (b'{"a\\"b":' + _tensors()[5:], "127 plain ASCII"),
    "not ASCII": (_renamed("ä"), "127 plain ASCII"),
    "escape sequence": (b'{"\\u001b[2J":' + _tensors()[5:], "127 plain ASCII"),
    "NUL in a name": (b'{"a\\u0000":' + _tensors()[5:], "127 plain ASCII"),
    "not UTF-8": (b'{"\xff\xfe":' + _tensors()[5:], "not valid JSON"),
    "overlong UTF-8": (b'{"\xc0\xaf":' + _tensors()[5:], "not valid JSON"),
    "raw NUL": (_tensors() + b"\0junk", "NUL byte"),
    "cut off": (_tensors()[:-1], "not valid JSON"),
    "trailing text": (_tensors() + b"x", "not valid JSON"),
    "two documents": (_tensors() + b"{}", "not valid JSON"),
    "duplicate tensor": (_tensors()[:-1] + b"," + _tensors()[1:], "key a twice"),
    "duplicate field": (b'{"a":{"dtype":"U8","dtype":"U8"}}', "key dtype twice"),
    "deep lists": (b'{"a":' + b"[" * 100_000, "nested too deeply"),
    "deep objects": (b'{"a":' * 100_000, "nested too deeply"),
    "metadata is a list": (b'{"__metadata__":[],' + _tensors()[1:], "is not an object"),
    "metadata number": (b'{"__metadata__":{"rank":3},' + _tensors()[1:], "no string in rank"),
    "too many tensors": (
        json.dumps(
            {f"t{i}": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]} for i in range(1025)}
        ).encode(),
        "more than 1,024",
    ),
}
LENGTHS = {
    "no header": (0, "does not start with {"),
    "longer than the file": (4096, "truncated"),
    "over the limit": (4 * 2**20 + 1, "claims a header of"),
    "2^63": (2**63, "claims a header of"),
    "2^64 - 8": (2**64 - 8, "claims a header of"),
    "2^64 - 1": (2**64 - 1, "claims a header of"),
}


def test_hostile_headers(programs: Programs, tmp_path: Path) -> None:
    good = plain_file(tmp_path / "good", _tensors())
    files = [good]
    expected: list[str | None] = [None]
    for number, (header, message) in enumerate(HOSTILE.values()):
        files.append(plain_file(tmp_path / f"header-{number}", header))
        expected.append(message)
    for number, (length, message) in enumerate(LENGTHS.values()):
        files.append(plain_file(tmp_path / f"length-{number}", _tensors(), length=length))
        expected.append(message)
    for size in (0, 1, 7, 8, 15):
        files.append(tmp_path / f"size-{size}")
        files[-1].write_bytes(good.read_bytes()[:size])
        expected.append("too short")
    result = programs("dump_views", "--files", *files)
    assert result.returncode == 0, result.stderr
    for file, says, line in zip(files, expected, lines(result), strict=True):
        if says is None:
            assert line.startswith("ok"), line
        else:
            assert line.startswith(f"{file}: "), line
            assert says in line
            assert line.isascii()
            assert line.isprintable()


def test_mutated_headers_never_crash_it(programs: Programs, outputs: Outputs, tmp_path: Path) -> None:
    """Random damage: the reader may accept what is still valid, but must neither crash nor read out of
    bounds.
    """
    whole = (outputs(8, 1, 0) / SHARD).read_bytes()
    length = int.from_bytes(whole[:8], "little")
    choices = random.Random(5)
    files = []
    for number in range(300):
        raw = bytearray(whole)
        for _ in range(choices.randint(1, 6)):
            at = choices.randrange(8 + length)
            if choices.random() < 0.5:
                raw[at] = choices.choice(b'0123456789[]{},:"-e\\ \0\xff')
            else:
                end = min(at + choices.randint(1, 40), 8 + length)
                raw[at:end] = choices.choice((raw[8 : 8 + end - at], bytes(end - at), b"9" * (end - at)))
        files.append(tmp_path / f"{number}")
        files[-1].write_bytes(raw[: choices.choice((len(raw), len(raw), choices.randrange(len(raw))))])
    result = programs("dump_views", "--files", *files)
    assert result.returncode == 0, result.stderr
    assert len(lines(result)) == len(files)
    assert sum(not line.startswith("ok") for line in lines(result)) > len(files) / 2


# -- folders that are not what they should be
# -------------------------------------------------------------------------


def _swap(out: Path, one: str, other: str) -> None:
    (out / one).rename(out / "aside")
    (out / other).rename(out / one)
    (out / "aside").rename(out / other)


def _set_metadata(key: str, value: str) -> Callable[[Path], None]:
    return lambda out: edit_header(out / SHARD, lambda header: header["__metadata__"].update({key: value}))


def _shard_entry(manifest: dict[str, Any]) -> dict[str, Any]:
    entry: dict[str, Any] = next(shard for shard in manifest["shards"] if shard["path"] == SHARD)
    return entry


def _in_manifest(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    return lambda out: edit_manifest(out, change)


def _truncate(size: int) -> Callable[[Path], None]:
    return lambda out: os.truncate(out / SHARD, (out / SHARD).stat().st_size + size)


def _replace_by(kind: str) -> Callable[[Path], None]:
    def change(out: Path) -> None:
        (out / SHARD).unlink()
        if kind == "folder":
            (out / SHARD).mkdir()
        elif kind == "pipe":
            os.mkfifo(out / SHARD)
        elif kind == "loop":
            (out / SHARD).symlink_to(SHARD.rpartition("/")[2])

    return change


def _first_tensor(manifest: dict[str, Any], **change: Any) -> None:
    _shard_entry(manifest)["tensors"][0].update(change)


DAMAGED: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "truncated by a page": (_truncate(-4096), SHARD, "truncated"),
    "truncated by a byte": (_truncate(-1), SHARD, "truncated"),
    "truncated to nothing": (lambda out: os.truncate(out / SHARD, 0), SHARD, "truncated"),
    "extended": (_truncate(4096), SHARD, "the manifest says"),
    "missing": (_replace_by("nothing"), SHARD, "No such file"),
    "folder": (_replace_by("folder"), SHARD, "not a regular file"),
    "pipe": (_replace_by("pipe"), SHARD, "not a regular file"),
    "link to itself": (_replace_by("loop"), SHARD, "symbolic links"),
    "swapped ranks": (
        lambda out: _swap(out, "rank-03-of-08", "rank-04-of-08"),
        "rank-03",
        "is of rank 4, expected 3",
    ),
    "swapped layers": (
        lambda out: _swap(out, SHARD, SHARD.replace("001", "002")),
        SHARD,
        "is of layer 2, expected 1",
    ),
    "other source": (_set_metadata("source", "0" * 32), SHARD, "is of source 0000"),
    "other tp": (_set_metadata("tp", "4"), SHARD, "is of tp 4, expected 8"),
    "other ep": (_set_metadata("ep", "2"), SHARD, "is of ep 2, expected 1"),
    "other experts": (_set_metadata("expert_range", "0:8"), SHARD, "is of expert_range 0:8, expected 0:16"),
    "other format": (_set_metadata("format", "pt"), SHARD, "is of format pt"),
    "other version": (_set_metadata("format_version", "2"), SHARD, "is of format_version 2"),
    "other layout": (_set_metadata("layout", "awq"), SHARD, "is of layout awq"),
    "no identity": (
        lambda out: edit_header(out / SHARD, lambda header: header.pop("__metadata__")),
        SHARD,
        "is of format nothing",
    ),
    "header is no JSON": (lambda out: with_header(out / SHARD, b"{no}"), SHARD, "not valid JSON"),
    "manifest gone": (lambda out: (out / "manifest.json").unlink(), "manifest.json", "No such file"),
    "manifest is no JSON": (
        lambda out: (out / "manifest.json").write_text("{"),
        "manifest.json",
        "not valid JSON",
    ),
    "manifest is too long": (
        lambda out: os.truncate(out / "manifest.json", (64 << 20) + 1),
        "manifest.json",
        "has 67108865 bytes, at most 67108864 are expected",
    ),
    "manifest is too dense": (
        lambda out: (out / "manifest.json").write_bytes(b"[" + b"[]," * (2 << 20) + b"0]"),
        "manifest.json",
        "has 4194305 commas, colons and opening brackets, at most 4194304 are expected",
    ),
    "manifest is nested": (
        lambda out: (out / "manifest.json").write_text("[" * 100_000),
        "manifest.json",
        "nested too deeply",
    ),
    "format": (_in_manifest(lambda m: m.update(format="x")), "manifest.json", "of the format x"),
    "version": (
        _in_manifest(lambda m: m.update(format_version=2)),
        "manifest.json",
        "version 2; this loader reads 1",
    ),
    "version as text": (
        _in_manifest(lambda m: m.update(format_version="1")),
        "manifest.json",
        "format_version",
    ),
    "layout": (_in_manifest(lambda m: m["layout"].update(id="x")), "manifest.json", "layout is x"),
    "ep": (_in_manifest(lambda m: m["parallel"].update(ep=3)), "manifest.json", "does not divide tp"),
    "tp of zero": (_in_manifest(lambda m: m["parallel"].update(tp=0)), "manifest.json", "does not divide tp"),
    "huge tp": (_in_manifest(lambda m: m["parallel"].update(tp=2**63)), "manifest.json", "impossible number"),
    "tp": (_in_manifest(lambda m: m["parallel"].update(tp=16)), "layer-000", "is of tp 8, expected 16"),
    "rank not there": (_in_manifest(lambda m: m["ranks"].remove(3)), "manifest.json", "has no rank 3"),
    "no shards": (_in_manifest(lambda m: m.update(shards=[])), "manifest.json", "lists no shards of rank 3"),
    "no layer": (_in_manifest(lambda m: m["layers"].append(7)), "manifest.json", "rank 3 has no layer-007"),
    "repeated shard": (
        _in_manifest(lambda m: m["shards"].append(_shard_entry(m))),
        SHARD,
        "second shard of its unit",
    ),
    "path upwards": (_in_manifest(lambda m: _shard_entry(m).update(path="../x")), "manifest.json", "outside"),
    "path inside upwards": (
        _in_manifest(lambda m: _shard_entry(m).update(path="a/../../x")),
        "manifest.json",
        "outside",
    ),
    "absolute path": (
        _in_manifest(lambda m: _shard_entry(m).update(path="/etc/passwd")),
        "manifest.json",
        "outside",
    ),
    "size": (_in_manifest(lambda m: _shard_entry(m).update(size=4096)), SHARD, "the manifest says 4096"),
    "tensor name": (_in_manifest(lambda m: _first_tensor(m, name="x")), SHARD, "where the manifest says x"),
    "tensor dtype": (_in_manifest(lambda m: _first_tensor(m, dtype="F16")), SHARD, "differs in form"),
    "tensor shape": (_in_manifest(lambda m: _first_tensor(m, shape=[1])), SHARD, "differs in form"),
    "tensor offset": (_in_manifest(lambda m: _first_tensor(m, offset=0)), SHARD, "differs in form"),
    "tensor gone": (_in_manifest(lambda m: _shard_entry(m)["tensors"].pop()), SHARD, "other tensors"),
    "fused offset": (
        _in_manifest(lambda m: _shard_entry(m)["fused"][0].update(offset=0)),
        SHARD,
        "not made of neighbours",
    ),
    "fused shape": (
        _in_manifest(lambda m: _shard_entry(m)["fused"][0].update(shape=[2**40])),
        SHARD,
        "has another size",
    ),
    "fused overflow": (
        _in_manifest(lambda m: _shard_entry(m)["fused"][0].update(shape=[2**63, 2])),
        "manifest.json",
        "overflows",
    ),
    "fused members": (
        _in_manifest(lambda m: _shard_entry(m)["fused"][0]["members"].reverse()),
        SHARD,
        "not made of neighbours",
    ),
    "no model": (_in_manifest(lambda m: m.pop("model")), "manifest.json", "has no model"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_folders_are_refused(programs: Programs, copied: Path, name: str) -> None:
    damage, file, message = DAMAGED[name]
    damage(copied)
    result = programs("native_loader/shard_info", copied, 3)
    assert result.returncode == 1, result.stdout
    assert file in result.stderr
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def test_the_other_source_of_the_same_shapes_is_refused(
    programs: Programs, outputs: Outputs, copied: Path
) -> None:
    shutil.copy(outputs(8, 1, 1) / SHARD, copied / SHARD)
    result = programs("native_loader/shard_info", copied, 3)
    assert result.returncode == 1
    assert "is of source" in result.stderr


def test_a_link_to_a_shard_is_followed(programs: Programs, copied: Path) -> None:
    (copied / SHARD).rename(copied / "elsewhere")
    (copied / SHARD).symlink_to(copied / "elsewhere")
    assert programs("native_loader/shard_info", copied, 3, "--verify").returncode == 0


# -- digests
# ----------------------------------------------------------------------------------------------------------


def _at(out: Path, name: str) -> int:
    header = header_of(out / SHARD)
    length = int.from_bytes((out / SHARD).read_bytes()[:8], "little")
    return int(8 + length + header[name]["data_offsets"][0])


def _flip_in(name: str, offset: int = 0) -> Callable[[Path], None]:
    return lambda out: flip(out / SHARD, _at(out, name) + offset)


FLIPPED: dict[str, tuple[Callable[[Path], None], str]] = {
    "a norm": (
        _flip_in("language_model.model.layers.1.input_layernorm.weight"),
        "input_layernorm.weight does not match",
    ),
    "expert 0": (_flip_in(EXPERTS + "w13_weight_packed"), "local expert 0 of"),
    "expert 5": (_flip_in(EXPERTS + "w2_weight_packed", 5 * 4 * 512 * 4 + 9), "local expert 5 of"),
    "a scale": (_flip_in(EXPERTS + "w2_weight_scale", 256 * 2 * 2 * 15), "local expert 15 of"),
    "a filler": (_flip_in("__pad__.0"), "filler __pad__.0 is not zero"),
    "padding of the header": (
        lambda out: edit_header(out / SHARD, lambda header: header["__metadata__"].update(note="x")),
        "header does not match",
    ),
    "digests.bin": (lambda out: flip(out / "digests.bin", 3), "digests.bin"),
    "config.json": (lambda out: flip(out / "config.json", 3), "config.json"),
    "common": (lambda out: flip(out / "common/common.safetensors", -1), "__pad__"),
    "manifest": (lambda out: edit_manifest(out, lambda manifest: manifest.update(note=1)), "manifest.json"),
    "a file's size": (lambda out: os.truncate(out / "LICENSE", 3), "LICENSE: has another size"),
}


@pytest.mark.parametrize("name", FLIPPED)
def test_digests_find_one_bit(programs: Programs, copied: Path, name: str) -> None:
    damage, message = FLIPPED[name]
    damage(copied)
    assert programs("native_loader/shard_info", copied, 3).returncode == 0, (
        "contents are looked at on request only"
    )
    result = programs("native_loader/shard_info", copied, 3, "--verify")
    assert result.returncode == 1
    assert message in result.stderr
