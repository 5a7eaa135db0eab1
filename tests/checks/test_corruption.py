"""Whatever is changed in OUT, `verify` says so, and says where as far as that can be told."""

from __future__ import annotations

import os
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import trees
from checkpoints import Checkpoint, make_small
from marlin_convert.checks.findings import Finding
from marlin_convert.checks.verify import verify
from marlin_convert.errors import ConvertError, OutputError
from marlin_convert.pipeline.run import convert

PREFIX = "language_model.model.layers."
Command = Callable[..., tuple[int, str, str]]
#: bytes tried at random places; a run with more tries is a run of this file with the number changed
RANDOM_BYTES = 60


def flip(path: Path, at: int, mask: int = 1) -> None:
    """Change one byte."""
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ mask]))


def place(out: Path, rank: int, layer: int, name: str, tp: int = 2) -> tuple[Path, int, int, list[int]]:
    """File, offset, size and shape of a tensor of a rank."""
    path = out / f"rank-{rank:02d}-of-{tp:02d}" / f"layer-{layer:03d}.safetensors"
    _, _, shape, offset, size = next(
        entry for entry in trees.read_shard(path).entries if entry[0] == f"{PREFIX}{layer}.{name}"
    )
    return path, offset, size, shape


def found(out: Path, source: Path | None = None) -> list[Finding]:
    """The findings; there must be some."""
    report = verify(out, None if source is None else str(source), threads=2)
    assert not report.ok
    return report.findings


@pytest.fixture(scope="module")
def tp4(tmp_path_factory: pytest.TempPathFactory) -> tuple[Checkpoint, Path]:
    """Two groups of experts, two slices of each."""
    folder = tmp_path_factory.mktemp("tp4")
    checkpoint = make_small(folder / "checkpoint", layers=2, experts=4, moe_intermediate=256, vt_layers=1)
    convert(str(checkpoint.folder), folder / "out", tp=4, ep=2, threads=2)
    return checkpoint, folder / "out"


# One value of one expert.


@pytest.mark.parametrize("against_source", [False, True])
@pytest.mark.parametrize(("kind", "mask"), [("packed", 0x01), ("packed", 0x80), ("scale", 0x01)])
@pytest.mark.parametrize(
    ("projection", "stacked", "half"),
    [("gate_proj", "w13", 0), ("up_proj", "w13", 1), ("down_proj", "w2", 0)],
)
def test_one_value_of_an_expert(
    copied: Path,
    tiny: Checkpoint,
    projection: str,
    stacked: str,
    half: int,
    kind: str,
    mask: int,
    against_source: bool,
) -> None:
    path, offset, size, shape = place(copied, 1, 2, f"mlp.experts.{stacked}_weight_{kind}")
    expert, row = size // shape[0], size // shape[0] // shape[1]
    flip(path, offset + 3 * expert + 2 * row + half * row // 2 + 4, mask)
    findings = found(copied, tiny.folder if against_source else None)
    assert [(f.layer, f.expert, f.projection, f.rank) for f in findings] == [(2, 3, projection, 1)]
    assert findings[0].path == "rank-01-of-02/layer-002.safetensors"
    assert f"weight_{kind} differs from the source" in findings[0].what


@pytest.mark.parametrize(("rank", "local", "expert"), [(0, 0, 0), (1, 1, 1), (2, 0, 2), (3, 1, 3)])
def test_one_value_names_expert_and_rank_of_its_group(
    tp4: tuple[Checkpoint, Path], tmp_path: Path, rank: int, local: int, expert: int
) -> None:
    out = shutil.copytree(tp4[1], tmp_path / "out")
    path, offset, size, shape = place(out, rank, 1, "mlp.experts.w2_weight_packed", tp=4)
    assert shape[0] == 2
    flip(path, offset + local * size // 2 + 100, 0x10)
    assert [(f.layer, f.expert, f.projection, f.rank) for f in found(out)] == [(1, expert, "down_proj", rank)]


@pytest.fixture(scope="module")
def padded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Slices of 32, padded to 64. Not to be changed."""
    folder = tmp_path_factory.mktemp("padded")
    checkpoint = make_small(folder / "checkpoint", layers=2, experts=2, moe_intermediate=256, vt_layers=1)
    convert(str(checkpoint.folder), folder / "out", tp=8, threads=2)
    return folder / "out"


@pytest.mark.parametrize("resealed", [False, True])
@pytest.mark.parametrize(
    ("name", "row", "column", "projection"),
    [
        # by the format page: outputs 32 to 63 are of warps 2 and 3, their scales in columns 8i + 4 to 8i + 7
        ("w13_weight_packed", 0, 2, "gate_proj"),
        ("w13_weight_packed", 15, 128 + 127, "up_proj"),
        ("w13_weight_scale", 0, 4, "gate_proj"),
        ("w13_weight_scale", 7, 64 + 63, "up_proj"),
        # inputs 32 to 63 are k-tiles 2 and 3, and the second group
        ("w2_weight_packed", 2, 0, "down_proj"),
        ("w2_weight_scale", 1, 255, "down_proj"),
    ],
)
def test_padding_that_is_not_zero(
    padded: Path, tmp_path: Path, name: str, row: int, column: int, projection: str, resealed: bool
) -> None:
    """Padding stands for no source value, so nothing but itself can tell."""
    out = shutil.copytree(padded, tmp_path / "out")
    path, offset, size, (experts, rows, columns) = place(out, 5, 1, f"mlp.experts.{name}", tp=8)
    width = size // (experts * rows * columns)
    flip(path, offset + size // experts + (row * columns + column) * width)
    if resealed:
        trees.reseal(out)
    findings = found(out)
    assert {(f.layer, f.expert, f.rank) for f in findings} == {(1, 1, 5)}
    assert [f.projection for f in findings if "padding is not zero" in f.what] == [projection]


# Plain tensors.


@pytest.mark.parametrize("against_source", [False, True])
@pytest.mark.parametrize(
    "name",
    [
        "self_attn.q_a_proj.weight",
        "self_attn.o_proj.weight",
        "self_attn.kv_b_proj.weight",
        "mlp.shared_experts.up_proj.weight",
        "mlp.gate.e_score_correction_bias",
        "input_layernorm.weight",
    ],
)
def test_one_value_of_a_plain_tensor(copied: Path, tiny: Checkpoint, name: str, against_source: bool) -> None:
    path, offset, size, _ = place(copied, 1, 1, name)
    flip(path, offset + size // 2)
    findings = found(copied, tiny.folder if against_source else None)
    assert [(f.path, f.layer, f.rank) for f in findings] == [("rank-01-of-02/layer-001.safetensors", 1, 1)]
    assert f"{PREFIX}1.{name}" in findings[0].what


@pytest.mark.parametrize("unit", ["rank-00-of-02/top.safetensors", "common/common.safetensors"])
def test_one_value_outside_the_layers(copied: Path, unit: str) -> None:
    name, _, _, offset, size = trees.read_shard(copied / unit).entries[0]
    flip(copied / unit, offset + size - 1)
    findings = found(copied)
    assert [(f.path, f.layer, f.rank) for f in findings] == [
        (unit, None, 0 if unit.startswith("rank") else None)
    ]
    assert name in findings[0].what


# One byte anywhere.


def interesting_places(out: Path) -> dict[str, tuple[str, int]]:
    """A name for each kind of byte there is: (file, offset)."""
    shard = "rank-01-of-02/layer-001.safetensors"
    raw = trees.read_shard(out / shard)
    filler = next(entry for entry in raw.entries if entry[0].startswith("__pad__."))
    header = raw.data[: raw.start]
    places = {
        "header length": (shard, 0),
        "high byte of the header length": (shard, 7),
        "first brace": (shard, 8),
        "metadata": (shard, header.index(b'"rank":"1"') + 8),
        "a name": (shard, header.index(b"self_attn")),
        "an offset": (shard, header.index(b"offsets") + 11),
        "spaces after the header": (shard, raw.start - 1),
        "filler": (shard, filler[3]),
        "end of filler": (shard, len(raw.data) - 1),
    }
    for path in sorted(out.rglob("*")):
        name = str(path.relative_to(out))
        if path.is_file() and not name.endswith(".safetensors"):
            size = path.stat().st_size
            places |= {
                f"start of {name}": (name, 0),
                f"middle of {name}": (name, size // 2),
                f"end of {name}": (name, size - 1),
            }
    return places


def test_every_kind_of_byte(tiny_tp2: Path, copied: Path) -> None:
    places = interesting_places(tiny_tp2)
    assert len(places) > 60
    missed = [what for what, (path, at) in places.items() if not _noticed(copied, path, at, 1)]
    assert missed == []
    assert verify(copied).ok


def test_random_bytes(tiny_tp2: Path, copied: Path) -> None:
    """Every byte of every file counts the same, and every file gets a turn."""
    files = sorted(str(path.relative_to(tiny_tp2)) for path in tiny_tp2.rglob("*") if path.is_file())
    sizes = [(tiny_tp2 / path).stat().st_size for path in files]
    choose = random.Random(20)
    chosen = [*files, *choose.choices(files, sizes, k=RANDOM_BYTES)]
    tries = [
        (path, choose.randrange((tiny_tp2 / path).stat().st_size), 1 << choose.randrange(8))
        for path in chosen
    ]
    assert [one for one in tries if not _noticed(copied, *one)] == []


def _noticed(out: Path, path: str, at: int, mask: int) -> bool:
    """Whether verify notices one changed byte; it is changed back."""
    flip(out / path, at, mask)
    try:
        report = verify(out, threads=2)
        named = any(finding.path == path for finding in report.findings)
        return not report.ok and named
    except OutputError as error:
        return error.exit_code == 1 and Path(path).parts[0] in str(error)
    finally:
        flip(out / path, at, mask)


# Files exchanged, cut, lost, added.


def exchange(first: Path, second: Path) -> None:
    """Give each the other's name."""
    away = first.with_name("away")
    first.rename(away)
    second.rename(first)
    away.rename(second)


def test_two_rank_folders_exchanged(copied: Path) -> None:
    exchange(copied / "rank-00-of-02", copied / "rank-01-of-02")
    findings = found(copied)
    files = [f"{unit}.safetensors" for unit in ("layer-000", "layer-001", "layer-002", "top")]
    assert {f.path for f in findings} == {
        f"rank-{rank:02d}-of-02/{name}" for rank in (0, 1) for name in [*files, "manifest.json"]
    }
    assert any(
        f.rank == 1 and f.layer == 1 and "its header says rank 0, in this place it must be 1" in f.what
        for f in findings
    )


def test_two_layers_exchanged(copied: Path) -> None:
    folder = copied / "rank-00-of-02"
    exchange(folder / "layer-001.safetensors", folder / "layer-002.safetensors")
    findings = found(copied)
    assert {(f.path.split("/")[1], f.layer, f.rank) for f in findings} == {
        ("layer-001.safetensors", 1, 0),
        ("layer-002.safetensors", 2, 0),
    }
    assert any("its header says layer 2, in this place it must be 1" in f.what for f in findings)


@pytest.mark.parametrize(
    ("stacked", "projections"),
    [("w13_weight_packed", ["gate_proj", "up_proj"]), ("w2_weight_scale", ["down_proj"])],
)
def test_two_experts_exchanged(copied: Path, stacked: str, projections: list[str]) -> None:
    path, offset, size, shape = place(copied, 1, 1, f"mlp.experts.{stacked}")
    data, one = bytearray(path.read_bytes()), size // shape[0]
    first, second = slice(offset, offset + one), slice(offset + 3 * one, offset + 4 * one)
    data[first], data[second] = data[second], data[first]
    path.write_bytes(data)
    findings = found(copied)
    assert {(f.layer, f.expert, f.projection, f.rank) for f in findings} == {
        (1, e, p, 1) for e in (0, 3) for p in projections
    }
    assert {("expert 3" if f.expert == 0 else "expert 0") in f.what for f in findings} == {True}


def swap_gate_and_up(out: Path, rank: int, layer: int, tp: int = 2) -> None:
    """Exchange the halves of w13, words and scales, of all experts."""
    for kind in ("packed", "scale"):
        path, offset, size, shape = place(out, rank, layer, f"mlp.experts.w13_weight_{kind}", tp)
        data = bytearray(path.read_bytes())
        rows = shape[0] * shape[1]
        for row in range(rows):
            at, half = offset + row * (size // rows), size // rows // 2
            data[at : at + 2 * half] = data[at + half : at + 2 * half] + data[at : at + half]
        path.write_bytes(data)


@pytest.mark.parametrize("ranks", [[1], [0, 1]])
@pytest.mark.parametrize("resealed", [False, True])
def test_gate_and_up_exchanged(copied: Path, ranks: list[int], resealed: bool) -> None:
    for rank in ranks:
        swap_gate_and_up(copied, rank, 2)
    if resealed:
        trees.reseal(copied)
    findings = found(copied)
    assert {(f.layer, f.expert, f.projection) for f in findings} == {
        (2, e, p) for e in range(4) for p in ("gate_proj", "up_proj")
    }
    if not resealed or len(ranks) == 1:
        assert {f.rank for f in findings} == set(ranks)
    assert all("gate and up are exchanged" in f.what or "holds the data of" in f.what for f in findings)


@pytest.mark.parametrize("rank", range(4))
def test_gate_and_up_exchanged_on_one_rank_of_four(
    tp4: tuple[Checkpoint, Path], tmp_path: Path, rank: int
) -> None:
    """The digests in OUT are right for what is stored: only that of the source's tensor tells."""
    out = tmp_path / "out"
    shutil.copytree(tp4[1], out)
    swap_gate_and_up(out, rank, 1, tp=4)
    trees.reseal(out)
    group = rank // 2
    assert {(f.path, f.layer, f.expert, f.projection, f.rank) for f in found(out)} == {
        (f"rank-{rank:02d}-of-04/layer-001.safetensors", 1, expert, projection, rank)
        for expert in (2 * group, 2 * group + 1)
        for projection in ("gate_proj", "up_proj")
    }
    assert {f.what.split(" ", 1)[1] for f in found(out)} == {
        "differs from the source: gate and up are exchanged"
    }


def test_gate_and_up_exchanged_names_the_rank_with_the_source(copied: Path, tiny: Checkpoint) -> None:
    swap_gate_and_up(copied, 1, 2)
    trees.reseal(copied)
    assert {(f.layer, f.rank) for f in found(copied, tiny.folder)} == {(2, 1)}


@pytest.mark.parametrize("keep", [0, 7, 100, 5000, -4096, -1])
def test_truncated_shard(copied: Path, keep: int) -> None:
    path = copied / "rank-00-of-02" / "layer-002.safetensors"
    os.truncate(path, keep if keep >= 0 else path.stat().st_size + keep)
    findings = [f for f in found(copied) if f.path == "rank-00-of-02/layer-002.safetensors"]
    assert [(f.layer, f.rank) for f in findings] == [(2, 0)]


def test_longer_shard(copied: Path) -> None:
    with (copied / "rank-00-of-02" / "layer-002.safetensors").open("ab") as file:
        file.write(bytes(4096))
    assert [(f.path, f.rank) for f in found(copied)] == [("rank-00-of-02/layer-002.safetensors", 0)]


@pytest.mark.parametrize(
    "extra",
    ["notes.txt", "rank-00-of-02/layer-003.safetensors", "source/more.json", "rank-02-of-02/x", ".hidden"],
)
def test_extra_file(copied: Path, extra: str) -> None:
    (copied / extra).parent.mkdir(exist_ok=True)
    (copied / extra).write_bytes(b"x")
    assert [(f.path, f.what) for f in found(copied)] == [(extra, "is not in the manifest; move it away")]


def test_every_missing_file(copied: Path, command: Command) -> None:
    """Each file in turn: exit code 1, and its name or its folder's."""
    files = sorted(str(path.relative_to(copied)) for path in copied.rglob("*") if path.is_file())
    aside = copied.parent / "aside"
    for path in files:
        (copied / path).rename(aside)
        code, stdout, stderr = command("verify", copied)
        aside.rename(copied / path)
        if path == "provenance.json":  # who and when proves nothing
            assert code == 0
            continue
        assert code == 1, path
        assert path.split("/")[0] in stdout + stderr, path
    assert command("verify", copied)[0] == 0


def test_command_line_names_the_place(copied: Path, command: Command) -> None:
    path, offset, _, _ = place(copied, 0, 1, "mlp.experts.w2_weight_packed")
    flip(path, offset)
    code, stdout, _ = command("verify", copied)
    assert code == 1
    assert (
        "WRONG rank-00-of-02/layer-001.safetensors: layer 1, expert 0, down_proj, rank 0: weight_packed"
        " differs from the source" in stdout
    )
    assert "NOT OK" in stdout


# The source does not match.


def test_another_source(copied: Path, copied_source: Path) -> None:
    name = sorted(path.name for path in copied_source.glob("*.safetensors"))[1]
    raw = trees.read_shard(copied_source / name)
    data = bytearray(raw.data)
    data[raw.start :] = bytes(byte ^ 1 for byte in data[raw.start :])
    (copied_source / name).write_bytes(data)
    with pytest.raises(ConvertError, match=f"the content of {name} differs") as caught:
        verify(copied, str(copied_source))
    assert caught.value.exit_code == 3


@pytest.mark.parametrize("page", [1, 2, 3])
def test_a_change_of_the_source_between_samples_is_found_in_the_data(
    tmp_path: Path, command: Command, page: int
) -> None:
    """A source identity is a sample; the comparison is of all."""
    checkpoint = make_small(tmp_path / "checkpoint", layers=2, experts=8, vt_layers=1)
    convert(str(checkpoint.folder), tmp_path / "out", tp=2, threads=2)
    path = max(checkpoint.folder.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    raw = trees.read_shard(path)
    scales = next(entry for entry in raw.entries if entry[0].endswith("experts.7.up_proj.weight_scale"))
    flip(path, scales[3] + scales[4] // 2 + 4096 * (page - 2))
    code, stdout, _ = command("verify", tmp_path / "out", "--source", checkpoint.folder)
    assert code in (1, 3)
    assert code == 3 or re.search(r"layer 1, expert \d+", stdout)
