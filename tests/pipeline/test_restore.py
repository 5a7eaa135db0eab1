"""`restore`: out of every kind of conversion the published checkpoint comes back, file for file and byte for
byte, or what is wrong is named and no file has its name.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jsonschema import Draft202012Validator
from safetensors import safe_open

import damage
import trees
from checkpoints import make_small
from marlin_convert import Point, convert, restore
from marlin_convert.checkpoint.index import INDEX_NAME
from marlin_convert.checkpoint.source import open_source
from marlin_convert.checkpoint.store import RECORD
from marlin_convert.documents.codec import write
from marlin_convert.documents.records import DownloadRecord
from marlin_convert.errors import MachineError, OutputError, UsageError
from marlin_convert.pipeline import restore_job
from marlin_convert.pipeline.restore_folder import RestoreFolder
from marlin_convert.storage.reads import OpenFile

SCHEMAS = Path(__file__).parents[2] / "schemas"
Command = Callable[..., tuple[int, str, str]]
DIMS: dict[str, Any] = {"layers": 2, "experts": 4, "vt_layers": 1, "moe_intermediate": 256}


def everything(folder: Path) -> dict[str, bytes]:
    """All files of a folder."""
    return trees.tree(folder, without=())


def weights(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.safetensors"))


def rewrite(path: Path, change: Callable[[bytes], bytes]) -> None:
    """Another header, the same data."""
    raw = path.read_bytes()
    end = 8 + int.from_bytes(raw[:8], "little")
    header = change(raw[8:end])
    path.write_bytes(len(header).to_bytes(8, "little") + header + raw[end:])


def with_metadata(metadata: dict[str, str] | None) -> Callable[[bytes], bytes]:
    """Change what a header says beside its tensors, in a form of its own: blanks, escapes, the key last."""

    def change(raw: bytes) -> bytes:
        header = json.loads(raw)
        header.pop("__metadata__", None)
        header |= {} if metadata is None else {"__metadata__": metadata}
        return json.dumps(header, indent=1, ensure_ascii=True).encode()

    return change


def odd_padding(folder: Path) -> None:
    """Data at odd offsets, another one in each file."""
    for number, name in enumerate(weights(folder), 1):
        rewrite(folder / name, lambda raw, more=number: raw.rstrip() + b" " * more)  # type: ignore[misc]  # mypy infers no type for a lambda with a default


def metadata(folder: Path) -> None:
    one, other, *_ = weights(folder)
    rewrite(folder / one, with_metadata(None))
    rewrite(folder / other, with_metadata({"format": "pt", "größe": "é\u2028"}))


def no_index(folder: Path) -> None:
    (folder / INDEX_NAME).unlink()


def bare(folder: Path) -> None:
    """Without a README, and without any file that is copied."""
    for path in folder.iterdir():
        if path.suffix != ".safetensors" and path.name not in ("config.json", INDEX_NAME):
            path.unlink()


def empty_file(folder: Path) -> None:
    """A weight file without a tensor, which no index names."""
    no_index(folder)
    header = b'{"__metadata__":{"format":"pt"}} '
    (folder / "none.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)


def with_others(folder: Path) -> None:
    """What no conversion keeps, and small files of odd content."""
    (folder / "figures").mkdir()
    (folder / "figures" / "one.png").write_bytes(b"\x89PNG")
    (folder / ".gitattributes").write_text("*.safetensors filter=lfs\n")
    (folder / "pytorch_model.bin").write_bytes(bytes(100))
    (folder / "empty.txt").write_bytes(b"")
    (folder / "crlf.txt").write_bytes(b"a\r\n\xff\x00")


Spoil = Callable[[Path], None]
#: options of the maker, and what is changed then
FORMS: dict[str, tuple[dict[str, Any], Spoil | None]] = {
    "nested": ({}, None),
    "flat": ({"form": "k2-thinking"}, None),
    "I64": ({"shape_dtype": "I64"}, None),
    "layer in two files": ({"split_layer": True}, None),
    "no index": ({}, no_index),
    "bare": ({}, bare),
    "odd padding": ({"order": "interleaved"}, odd_padding),
    "metadata": ({}, metadata),
    "others": ({}, with_others),
    "empty file": ({}, empty_file),
    "shuffled": ({"order": "shuffled", "shape_dtype": "I64"}, odd_padding),
    "interleaved": ({"order": "interleaved", "split_layer": True}, None),
}
Split = tuple[int, int, int | None, int]
#: tp, ep, attn_tp, pp; with eight slices each is padded
SPLITS: list[Split] = [(1, 1, None, 1), (4, 2, None, 1), (8, 1, None, 2), (4, 1, 2, 1), (4, 4, 1, 2)]
PAIRS = [(form, SPLITS[number % len(SPLITS)]) for number, form in enumerate(FORMS)]
ALL = [(form, split) for form in FORMS for split in SPLITS if (form, split) not in PAIRS]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Checkpoints by form. Not to be changed."""
    place = tmp_path_factory.mktemp("sources")

    def made(form: str) -> Path:
        folder = place / form.replace(" ", "-")
        if not folder.exists():
            options, spoil = FORMS[form]
            make_small(folder, **(DIMS | options))
            if spoil is not None:
                spoil(folder)
        return folder

    return made


@pytest.fixture(scope="module")
def source(sources: Callable[[str], Path]) -> Path:
    """One of them."""
    return sources("others")


@pytest.fixture(scope="module")
def converted(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A conversion of it. Not to be changed."""
    out = tmp_path_factory.mktemp("converted") / "out"
    convert(source, out, tp=4, ep=2, threads=2)
    return out


@pytest.fixture
def out(converted: Path, tmp_path: Path) -> Path:
    """A copy of it to spoil."""
    made: Path = shutil.copytree(converted, tmp_path / "out")
    return made


def not_kept(source: Path) -> set[str]:
    """Files of `with_others` that stay behind."""
    return {"figures/one.png", ".gitattributes", "pytorch_model.bin"} & everything(source).keys()


def published(source: Path) -> dict[str, bytes]:
    """What must come back."""
    return {name: data for name, data in everything(source).items() if name not in not_kept(source)}


# What comes back.


@pytest.mark.parametrize(
    ("form", "split"),
    [*PAIRS, *(pytest.param(*pair, marks=pytest.mark.slow) for pair in ALL)],
    ids=lambda value: str(value).replace(" ", "-"),
)
def test_the_published_files_come_back(
    sources: Callable[[str], Path], tmp_path: Path, form: str, split: Split
) -> None:
    source, (tp, ep, attn_tp, pp) = sources(form), split
    convert(source, tmp_path / "out", tp=tp, ep=ep, attn_tp=attn_tp, pp=pp, threads=2)
    found = restore(tmp_path / "out", tmp_path / "back", threads=2)
    assert everything(tmp_path / "back") == published(source)
    files = weights(source)
    assert (found.action, found.made, found.found, found.missing) == ("new", len(files), 0, ())
    assert found.made_bytes == sum((source / name).stat().st_size for name in files)
    kept = {"figures/", ".gitattributes", "pytorch_model.bin"} if form == "others" else set()
    assert set(found.not_kept) == kept
    assert found.by_sha256 == 0


@pytest.mark.parametrize("step", [4096, 100_000])
@pytest.mark.parametrize("direct_io", [True, False])
def test_whatever_is_made_at_once(
    sources: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    step: int,
    direct_io: bool,
) -> None:
    """Tensors longer than a step are made by their rows; columns put together, too."""
    source = sources("shuffled")
    convert(source, tmp_path / "out", tp=4, ep=1, threads=2)
    monkeypatch.setattr("marlin_convert.pipeline.restore.STEP", step)
    restore(tmp_path / "out", tmp_path / "back", threads=3, direct_io=direct_io)
    assert everything(tmp_path / "back") == published(source)


def test_little_memory(source: Path, converted: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"the smallest that works is \d+MiB") as refused:
        restore(converted, tmp_path / "back", memory=4096)
    assert not (tmp_path / "back").exists()
    least = int(str(refused.value).split("works is ")[1].split("MiB")[0])
    restore(converted, tmp_path / "back", memory=least << 20)
    assert everything(tmp_path / "back") == published(source)


def test_it_loads_where_the_original_loads(source: Path, converted: Path, tmp_path: Path) -> None:
    """By index, through safetensors, unpacked by compressed-tensors."""
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    restore(converted, tmp_path / "back")
    places = json.loads((tmp_path / "back" / INDEX_NAME).read_text())["weight_map"]

    def unpacked(folder: Path) -> Any:
        tensors = {}
        for kind in ("packed", "scale", "shape"):
            name = f"language_model.model.layers.1.mlp.experts.3.up_proj.weight_{kind}"
            with safe_open(folder / places[name], "pt") as file:
                tensors[kind] = file.get_tensor(name)
        shape = tuple(tensors["shape"].tolist())
        return helpers.unpack_from_int32(tensors["packed"], 4, shape), tensors["scale"]

    (ours, our_scales), (theirs, their_scales) = unpacked(tmp_path / "back"), unpacked(source)
    assert tuple(ours.shape) == (256, 256)
    assert np.array_equal(ours.numpy(), theirs.numpy())
    assert np.array_equal(our_scales.float().numpy(), their_scales.float().numpy())
    with safe_open(tmp_path / "back" / weights(source)[0], "np") as file:
        assert file.metadata() == {"format": "pt"}


def test_converted_again_it_is_the_same_conversion(source: Path, converted: Path, tmp_path: Path) -> None:
    restore(converted, tmp_path / "back")
    for name in not_kept(source):
        (tmp_path / "back" / name).parent.mkdir(exist_ok=True)
        shutil.copy(source / name, tmp_path / "back" / name)
    convert(tmp_path / "back", tmp_path / "again", tp=4, ep=2, threads=2)
    assert trees.tree(tmp_path / "again") == trees.tree(converted)


def test_progress(converted: Path, tmp_path: Path) -> None:
    points: list[Point] = []
    found = restore(converted, tmp_path / "back", threads=1, progress=points.append)
    stages = list(dict.fromkeys(point.stage for point in points))
    assert stages == ["restoring", "writing small files"]
    data = sum(point.total for point in points[:1])
    assert points[0].done == 0
    headers = sum(8 + len(header.raw) for header in open_source(tmp_path / "back").headers)
    assert data == points[-1].done == found.made_bytes - headers
    assert [point.done for point in points] == sorted(point.done for point in points)
    assert {point.unit for point in points[:-1]} == set(weights(tmp_path / "back"))


# Proven by the published sha256, too.


@pytest.fixture(scope="module")
def of_a_commit(
    sources: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """A checkpoint of which the published digests are known, and its conversion."""
    folder = tmp_path_factory.mktemp("commit") / "source"
    shutil.copytree(sources("nested"), folder)
    files: dict[str, tuple[int, str | None]] = {
        path.name: (path.stat().st_size, sha256(path)) for path in folder.iterdir()
    }
    (folder / RECORD).write_bytes(write(DownloadRecord("org/name", "c0ffee" + "0" * 34, files)))
    convert(folder, folder.parent / "out", tp=2, threads=2)
    return folder, folder.parent / "out"


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_proven_by_sha256(of_a_commit: tuple[Path, Path], tmp_path: Path, command: Command) -> None:
    source, out = of_a_commit
    code, stdout, stderr = command("restore", out, tmp_path / "back", "--json")
    assert (code, stderr) == (0, "")
    said = json.loads(stdout)
    assert said["by_sha256"] == said["files_made"] == len(weights(source))
    expected = everything(source)
    del expected[RECORD]
    assert everything(tmp_path / "back") == expected


def test_another_sha256_is_noticed(
    of_a_commit: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where each tensor has its digest: as if two of them had the same."""
    monkeypatch.setattr(restore_job, "sha256_of", lambda path: "0" * 64)
    said = (
        r"^5 files could not.* model-0000\d.*its sha256 is 0{64}, and \w{64} was published; and 2 files more"
    )
    with pytest.raises(OutputError, match=said):
        restore(of_a_commit[1], tmp_path / "back", threads=1)
    assert weights(tmp_path / "back") == []


@pytest.mark.parametrize("whole", [True, False])
def test_a_file_without_a_record_is_compared_by_sha256(
    of_a_commit: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: bool
) -> None:
    (source, out), back = of_a_commit, tmp_path / "back"
    begun(out, back, monkeypatch)
    name = weights(source)[1]
    (back / ".work" / "records" / f"{name}.json").unlink()
    if not whole:
        damage.flip(back / name, (back / name).stat().st_size // 2)
        with pytest.raises(UsageError, match=f"{name} is there and is not what would be restored"):
            restore(out, back)
        return
    found = restore(out, back)
    assert (found.made, found.found, found.by_sha256) == (0, 5, 5)


# What is wrong is named, and no file has its name.


def stored(out: Path, name: str, rank: int | None = 0) -> tuple[Path, int, int]:
    """Shard, offset and bytes of a stored tensor, by the end of its name."""
    for shard in trees.manifest_of(out)["shards"]:
        for tensor in shard["tensors"]:
            if tensor["name"].endswith(name) and shard["rank"] == rank:
                return out / shard["path"], tensor["offset"], tensor["size"]
    raise AssertionError(name)


def flip_plain(out: Path) -> str:
    file, offset, _ = stored(out, "layers.0.mlp.gate_proj.weight", 1)
    damage.flip(file, offset + 5)
    return r"model-00001.*layers\.0\.mlp\.gate_proj\.weight, put together"


def flip_common(out: Path) -> str:
    file, offset, _ = stored(out, "pos_emb.weight", None)
    damage.flip(file, offset)
    return r"pos_emb\.weight, put together"


def flip_expert(out: Path) -> str:
    """Of expert 2, the first of ranks 2 and 3."""
    file, offset, _ = stored(out, "layers.1.mlp.experts.w2_weight_packed", 3)
    damage.flip(file, offset + 7)
    return r"layers\.1\.mlp\.experts\.2\.down_proj\.weight_packed, put together"


def flip_digest(out: Path) -> str:
    damage.flip(out / "source" / "digests.bin", 40)
    return r"source/digests\.bin is damaged or missing"


def flip_digest_resealed(out: Path) -> str:
    """The digest of the first tensor of the first file."""
    damage.flip(out / "source" / "digests.bin", 0)
    trees.reseal(out)
    return r"model-00001.*, put together from the shards, is not what it was"


def flip_header(out: Path) -> str:
    damage.flip(next((out / "source" / "headers").iterdir()), 30)
    return r"source/headers/model.*gz is damaged or missing"


def other_header_resealed(out: Path) -> str:
    """A header with one more blank, as good as the other to every reader."""
    path = out / "source" / "headers" / "model-00002-of-000005.safetensors.gz"
    raw = gzip.decompress(path.read_bytes())
    path.write_bytes(gzip.compress(raw.replace(b'":{"', b'": {"', 1).rstrip().ljust(len(raw)), 6, mtime=0))
    trees.reseal(out)
    return r"model-00002.*gz is not what manifest\.json says of the source"


def exchanged_experts(out: Path) -> str:
    """Of ranks 0 and 1, the two experts that they have."""
    for rank in (0, 1):
        for name in ("w13_weight_packed", "w13_weight_scale", "w2_weight_packed", "w2_weight_scale"):
            file, offset, size = stored(out, f"layers.1.mlp.experts.{name}", rank)
            data, half = bytearray(file.read_bytes()), size // 2
            one, other = data[offset : offset + half], data[offset + half : offset + size]
            data[offset : offset + size] = other + one
            file.write_bytes(data)
    trees.reseal(out)
    return r"experts\.0\..*\(what was read is language_model\.model\.layers\.1\.mlp\.experts\.1\."


def lost_shard(out: Path) -> str:
    (out / "rank-01-of-04" / "top.safetensors").unlink()
    return r"rank-01-of-04/top\.safetensors is gone or of another size"


def short_shard(out: Path) -> str:
    path = out / "rank-01-of-04" / "top.safetensors"
    path.write_bytes(path.read_bytes()[:-4096])
    return r"rank-01-of-04/top\.safetensors is gone or of another size"


def edited_tokenizer(out: Path) -> str:
    (out / "tokenizer_config.json").write_text("{}")
    return r"tokenizer_config\.json: what .* keeps of it is damaged or missing"


def edited_index(out: Path) -> str:
    (out / "source" / INDEX_NAME).write_text("{}")
    return r"model\.safetensors\.index\.json: what .* keeps of it is damaged or missing"


def edited_config(out: Path) -> str:
    damage.edit_json(out / "source" / "config.json", lambda config: config.update(more=1))
    return r"source/config\.json is damaged or missing"


def edited_config_resealed(out: Path) -> str:
    edited_config(out)
    trees.reseal(out)
    return r"source/config\.json is not what manifest\.json says of the source"


def no_manifest(out: Path) -> str:
    (out / "manifest.json").unlink()
    return r"has no manifest\.json"


def name_that_leads_away(out: Path) -> str:
    """A small file of a name that is none in a folder of weights."""
    (out / ".work").mkdir()
    (out / ".hidden").write_text("{}")

    def listed(manifest: dict[str, Any]) -> None:
        manifest["files"].append({"path": ".hidden", "size": 0, "digest": "0" * 32})

    trees.reseal(out, listed)
    return r"'\.hidden' is no name of a file that is copied"


def weights_that_lead_away(out: Path) -> str:
    """A weight file of a name below the folder."""
    name, other = "model-00001-of-000005.safetensors", "figures/x.safetensors"
    headers = out / "source" / "headers"
    (headers / "figures").mkdir()
    (headers / f"{name}.gz").rename(headers / f"{other}.gz")

    def renamed(manifest: dict[str, Any]) -> None:
        manifest["source"]["files"][0]["name"] = other
        for file in manifest["files"]:
            file["path"] = file["path"].replace(name, other)

    trees.reseal(out, renamed)
    return r"'figures/x\.safetensors' is no name of one weight file"


@pytest.mark.parametrize(
    "spoil",
    [
        flip_plain,
        flip_common,
        flip_expert,
        flip_digest,
        flip_digest_resealed,
        flip_header,
        other_header_resealed,
        exchanged_experts,
        lost_shard,
        short_shard,
        edited_tokenizer,
        edited_index,
        edited_config,
        edited_config_resealed,
        no_manifest,
        name_that_leads_away,
        weights_that_lead_away,
    ],
)
def test_what_is_wrong_is_named(
    source: Path, out: Path, tmp_path: Path, command: Command, spoil: Callable[[Path], str]
) -> None:
    said = spoil(out)
    code, stdout, stderr = command("restore", out, tmp_path / "back", "--threads", 1)
    assert (code, stdout) == (1, "")
    assert re.search(said, stderr), stderr
    assert stderr.count("\n") == 1
    back = tmp_path / "back"
    if not stderr.startswith("error: 1 file could not be restored: "):
        assert not back.exists(), "nothing can be proven, so nothing was begun"
        return
    name = stderr.split(": ")[2]
    there = {name: data for name, data in everything(back).items() if not name.startswith(".work/")}
    assert there == {key: data for key, data in published(source).items() if key != name}
    assert not list(back.rglob("*.partial"))
    assert (back / ".work" / "restore.json").exists()


def test_padding_that_is_not_zero(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "out", tp=8, threads=2)
    file, offset, size = stored(tmp_path / "out", "layers.1.mlp.experts.w2_weight_scale", 5)
    with file.open("r+b") as opened:
        opened.seek(offset + size // 4 - 2)  # the last scale of expert 0
        opened.write(b"\x80\x3f")
    trees.reseal(tmp_path / "out")
    with pytest.raises(
        OutputError, match=r"rank-05-of-08/layer-001\.safetensors: expert 0, rank 5: the padding"
    ):
        restore(tmp_path / "out", tmp_path / "back", threads=1)


def test_a_shard_that_cannot_be_read(
    source: Path, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What needs it is left, all else is restored; the error is the machine's."""
    fill = OpenFile.fill

    def broken(file: OpenFile, target: memoryview, offset: int, needed: int, name: object = None) -> None:
        if "top" in str(file.path):
            raise MachineError(f"reading {file.path}: Input/output error; check the disk")
        fill(file, target, offset, needed, name)

    with monkeypatch.context() as patch:
        patch.setattr(OpenFile, "fill", broken)
        with pytest.raises(MachineError, match=r"^1 file could .*model-00003.*Input/output error; check the"):
            restore(out, tmp_path / "back")
    assert len(weights(tmp_path / "back")) == 4
    assert restore(out, tmp_path / "back").made == 1
    assert everything(tmp_path / "back") == published(source)


def test_mended_it_goes_on(source: Path, out: Path, tmp_path: Path) -> None:
    """What could be restored all the same is kept as it is."""
    file, offset, _ = stored(out, "lm_head.weight")
    damage.flip(file, offset)
    with pytest.raises(OutputError, match=r"1 file could not be restored: model-00003.*lm_head"):
        restore(out, tmp_path / "back", threads=1)
    before = {name: (tmp_path / "back" / name).stat().st_ino for name in weights(tmp_path / "back")}
    assert len(before) == 4
    damage.flip(file, offset)
    found = restore(out, tmp_path / "back")
    assert (found.action, found.made, found.found) == ("continue", 1, 4)
    assert everything(tmp_path / "back") == published(source)
    assert before == {name: (tmp_path / "back" / name).stat().st_ino for name in before}


# Parts.


@pytest.mark.parametrize(
    ("options", "restored", "why"),
    [
        (
            {"layers": [1]},
            {2},
            {1: "layer 0", 3: "3 tensors outside the layers, such as language_model.lm_head"},
        ),
        ({"ranks": [0, 1]}, {4, 5}, {1: "the slices of ranks 2-3", 3: "the slices of ranks 2-3"}),
        ({"ranks": [0, 1], "layers": [1]}, set(), {}),
    ],
)
def test_a_part(
    source: Path, tmp_path: Path, options: dict[str, Any], restored: set[int], why: dict[int, str]
) -> None:
    convert(source, tmp_path / "out", tp=4, ep=2, threads=2, **options)
    names = dict(enumerate(weights(source), 1))
    if not restored:
        with pytest.raises(UsageError, match="nothing can be restored: of 5 weight files none is wholly in"):
            restore(tmp_path / "out", tmp_path / "back")
        assert not (tmp_path / "back").exists()
        return
    found = restore(tmp_path / "out", tmp_path / "back")
    absent = {names[number] for number in names.keys() - restored}
    assert everything(tmp_path / "back") == {
        name: data for name, data in published(source).items() if name not in absent
    }
    assert {file.name for file in found.missing} == absent
    said = {file.name: f"it has not {file.why}" for file in found.missing}
    for number, text in why.items():
        assert text in said[names[number]]
    assert not found.document(1.0).complete
    assert restore(tmp_path / "out", tmp_path / "back").action == "done"


# Running it again.


def test_again_there_is_nothing_to_do(
    source: Path, converted: Path, tmp_path: Path, command: Command
) -> None:
    back = tmp_path / "back"
    restore(converted, back)
    before = stamps(back)
    assert command("restore", converted, back) == (
        0,
        f"{back} is restored already: 5 weight files were there; what is in them was not looked at\n"
        "not kept: .gitattributes lay beside the weights and is in no conversion\n"
        "not kept: figures/ lay beside the weights and is in no conversion\n"
        "not kept: pytorch_model.bin lay beside the weights and is in no conversion\n",
        "",
    )
    assert stamps(back) == before


def stamps(folder: Path) -> dict[Path, tuple[int, int]]:
    return {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in folder.rglob("*")}


def begun(out: Path, back: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Restored, but for the small files."""

    def fail(*arguments: object) -> None:
        raise MachineError("stopped here")

    with monkeypatch.context() as patch:
        patch.setattr(RestoreFolder, "write_small", fail)
        with pytest.raises(MachineError, match="stopped here"):
            restore(out, back)
    assert (back / ".work" / "restore.json").exists()


def test_from_another_conversion_of_the_same_source(
    source: Path, converted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert(source, tmp_path / "other", tp=2, threads=2)
    begun(converted, tmp_path / "back", monkeypatch)
    (tmp_path / "back" / weights(source)[1]).unlink()
    (tmp_path / "back" / ".work" / "documents" / "27").write_text("of a run that had more small files")
    found = restore(tmp_path / "other", tmp_path / "back")
    assert (found.action, found.made, found.found) == ("continue", 1, 4)
    assert everything(tmp_path / "back") == published(source)


def test_of_another_source(
    converted: Path, sources: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert(sources("flat"), tmp_path / "other", tp=2, threads=2)
    begun(converted, tmp_path / "back", monkeypatch)
    before = everything(tmp_path / "back")
    with pytest.raises(UsageError, match="was begun from a conversion of another source"):
        restore(tmp_path / "other", tmp_path / "back")
    assert everything(tmp_path / "back") == before


@pytest.mark.parametrize("whole", [True, False])
def test_a_file_without_a_record_is_compared(
    source: Path, converted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: bool
) -> None:
    """A run that broke off between the two, or somebody, has put it there: it is right or it is refused, and
    never written over.
    """
    back, name = tmp_path / "back", weights(source)[2]
    begun(converted, back, monkeypatch)
    (back / ".work" / "records" / f"{name}.json").unlink()
    if not whole:
        damage.flip(back / name, -1 + (back / name).stat().st_size)
    before = (back / name).stat()
    points: list[Point] = []
    if whole:
        found = restore(converted, back, progress=points.append)
        assert (found.made, found.found) == (0, 5)
        assert [point.unit for point in points if point.stage == "comparing"] == [name, name]
        assert everything(back) == published(source)
    else:
        with pytest.raises(
            UsageError, match=f"{name} is there and is not what would be restored; nothing is"
        ):
            restore(converted, back)
    assert (back / name).stat().st_mtime_ns == before.st_mtime_ns


def test_a_restored_file_that_was_cut_off(
    source: Path, converted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    back, name = tmp_path / "back", weights(source)[2]
    begun(converted, back, monkeypatch)
    (back / name).write_bytes((back / name).read_bytes()[:-1])
    with pytest.raises(UsageError, match=f"{name} is there and is not what would be restored"):
        restore(converted, back)
    (back / name).unlink()
    assert restore(converted, back).made == 1
    assert everything(back) == published(source)


@pytest.mark.parametrize("name", ["README.md", "config.json", INDEX_NAME, "crlf.txt"])
def test_a_small_file_of_the_users(
    source: Path, converted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    back = tmp_path / "back"
    begun(converted, back, monkeypatch)
    (back / name).write_text("mine")
    with pytest.raises(UsageError, match="is there and is not what would be restored"):
        restore(converted, back)
    assert (back / name).read_text() == "mine"
    (back / name).unlink()
    restore(converted, back)
    assert everything(back) == published(source)


# Nothing of the user's is written over or removed.


@pytest.mark.parametrize(
    "files",
    [
        {"notes.txt": "mine"},
        {"model-00001-of-000005.safetensors": "mine"},
        {".work/restore.json": '{"format": "other"}'},
        {".work/made/model-00001-of-000005.safetensors": "mine"},
        {"config.json": "{}"},
        {".work/job.json": '{"format": "marlin-convert"}'},
    ],
)
def test_a_folder_that_holds_something_else(converted: Path, tmp_path: Path, files: dict[str, str]) -> None:
    back = tmp_path / "back"
    for name, text in files.items():
        (back / name).parent.mkdir(parents=True, exist_ok=True)
        (back / name).write_text(text)
    with pytest.raises(UsageError, match="is not empty, and no restoration was begun there"):
        restore(converted, back)
    assert everything(back) == {name: text.encode() for name, text in files.items()}


def test_what_is_put_beside_the_files_stays(
    source: Path, converted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    back = tmp_path / "back"
    begun(converted, back, monkeypatch)
    mine = {"notes.txt": b"mine", ".work/mine.txt": b"mine", ".work/made/mine.partial": b"mine"}
    for name, data in mine.items():
        (back / name).write_bytes(data)
    restore(converted, back)
    assert everything(back) == published(source) | mine
    assert restore(converted, back).action == "done"
    assert everything(back) == published(source) | mine


@pytest.mark.parametrize("link", [".work", ".work/made", ".work/records", ".work/documents"])
def test_no_link_is_written_through(converted: Path, tmp_path: Path, link: str) -> None:
    back, mine = tmp_path / "back", tmp_path / "mine"
    mine.mkdir()
    (back / link).parent.mkdir(parents=True, exist_ok=True)
    (back / link).symlink_to(mine)
    with pytest.raises(UsageError, match=r"is a link; move it away|is not empty"):
        restore(converted, back)
    assert list(mine.iterdir()) == []


def test_a_link_in_place_of_a_file(
    converted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: Path
) -> None:
    back, name = tmp_path / "back", weights(source)[0]
    begun(converted, back, monkeypatch)
    (back / name).unlink()
    (back / name).symlink_to(tmp_path / "nowhere")
    with pytest.raises(UsageError, match="is there and is not what would be restored"):
        restore(converted, back)
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("out", "is the source folder or lies in it"),
        ("out/back", "lies in the conversion"),
        ("out/rank-00-of-04/back", "lies in the conversion"),
        ("", "where files of the source are, lies in"),
        ("begun/back", "lies in the conversion"),
        ("file", "is not a folder"),
    ],
)
def test_places(out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, said: str) -> None:
    if place.startswith("begun"):
        begun(out, tmp_path / "begun", monkeypatch)
    (tmp_path / "file").write_text("mine")
    before = everything(tmp_path)
    with pytest.raises(UsageError, match=said):
        restore(out, tmp_path / place)
    assert everything(tmp_path) == before


def test_no_conversion(source: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is no conversion; if it is the published checkpoint"):
        restore(source, tmp_path / "back")
    with pytest.raises(UsageError, match="out"):
        restore(8, tmp_path / "back")  # type: ignore[arg-type]  # refusing it is the test
    with pytest.raises(UsageError, match="threads"):
        restore(source, tmp_path / "back", threads=0)


def test_a_begun_restoration_is_nothing_to_convert_to(
    source: Path, converted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun(converted, tmp_path / "back", monkeypatch)
    before = everything(tmp_path / "back")
    for overwrite in (False, True):
        with pytest.raises(UsageError, match="is not empty and is not a conversion"):
            convert(source, tmp_path / "back", tp=2, overwrite=overwrite)
    assert everything(tmp_path / "back") == before


# Words.


def test_said_in_words(converted: Path, tmp_path: Path, command: Command) -> None:
    code, stdout, stderr = command("restore", converted, tmp_path / "back")
    assert (code, stderr) == (0, "")
    assert re.fullmatch(
        rf"{tmp_path}/back: 5 weight files made, [\d.]+ MB in [\d.]+ s, each tensor compared with its digest"
        r" before the file got its name",
        stdout.splitlines()[0],
    )


def test_a_part_in_words(source: Path, tmp_path: Path, command: Command) -> None:
    convert(source, tmp_path / "out", tp=4, layers=[1], threads=2)
    code, stdout, _ = command("restore", tmp_path / "out", tmp_path / "back")
    assert code == 0
    assert "not restored: model-00001-of-000005.safetensors: OUT has not layer 0\n" in stdout


def test_what_the_work_folder_holds_is_as_the_schema_says(
    converted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun(converted, tmp_path / "back", monkeypatch)
    schema = json.loads((SCHEMAS / "restore-record.schema.json").read_text())
    found = sorted((tmp_path / "back" / ".work").rglob("*.json"))
    assert len(found) == 1 + 5
    for path in found:
        Draft202012Validator(schema).validate(json.loads(path.read_text()))
