"""Source tensors read out of shards: every byte of every one, whole and in parts, whatever the split."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import damage
import gqa
import trees
from checkpoints import Checkpoint, expected_tensor, make_small
from marlin_convert import convert
from marlin_convert.documents.manifest import read_manifest
from marlin_convert.errors import OutputError
from marlin_convert.shards.assembled import AssembledReader
from marlin_convert.shards.kept_source import read_kept_source
from marlin_convert.shards.stored_index import StoredIndex
from marlin_convert.storage.buffers import aligned_buffer
from marlin_convert.storage.source_reader import Part

DIMS: dict[str, Any] = {"layers": 2, "experts": 4, "vt_layers": 1, "moe_intermediate": 256}
EXPERT = "language_model.model.layers.1.mlp.experts.{}.{}_proj.{}"
#: tp, ep, attn_tp, pp; with eight slices of 32 each is padded to 64
SPLITS = [(1, 1, None, 1), (2, 1, None, 1), (4, 2, 2, 1), (4, 4, 1, 1), (8, 1, None, 1), (4, 2, 2, 2)]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return make_small(tmp_path_factory.mktemp("assembled") / "checkpoint", shape_dtype="I64", **DIMS)


@pytest.fixture(scope="module")
def converted(source: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    place = tmp_path_factory.mktemp("converted")

    def made(tp: int, ep: int, attn_tp: int | None = None, pp: int = 1) -> Path:
        out = place / f"{tp}-{ep}-{attn_tp}-{pp}"
        if not out.exists():
            convert(source.folder, out, tp=tp, ep=ep, attn_tp=attn_tp, pp=pp, threads=2)
        return out

    return made


def index_of(out: Path) -> StoredIndex:
    manifest = read_manifest(out)
    return StoredIndex.of(manifest, read_kept_source(out, manifest))


def read(out: Path, parts: Sequence[Part], direct: bool = False) -> list[bytes]:
    """The bytes of each part."""
    reader = AssembledReader(out, index_of(out), direct)
    reads = reader.plan(parts)
    buffer = aligned_buffer(reads.size)
    buffer[:] = 0xA5
    reader.open_files(reads.files)
    with closing(_Open(reader, reads.files)):
        reader.read(reads, buffer)
    return [buffer[at : at + part.size].tobytes() for at, part in zip(reads.places, parts, strict=True)]


class _Open:
    def __init__(self, reader: AssembledReader, files: Sequence[str]) -> None:
        self.reader, self.files = reader, files

    def close(self) -> None:
        self.reader.close_files(self.files)


def whole(source: Checkpoint) -> Iterator[tuple[Part, bytes]]:
    """Every tensor of a checkpoint, and its bytes as they were written."""
    for name, tensor in source.tensors.items():
        yield Part(name, 0, tensor.nbytes), expected_tensor(tensor, source.dims).tobytes()


@pytest.mark.parametrize("split", SPLITS, ids=str)
@pytest.mark.parametrize("direct", [True, False], ids=["direct", "cached"])
def test_every_tensor(
    source: Checkpoint, converted: Callable[..., Path], split: tuple[int, int, int | None, int], direct: bool
) -> None:
    parts, expected = zip(*whole(source), strict=True)
    for part, found, want in zip(parts, read(converted(*split), parts, direct), expected, strict=True):
        assert found == want, part.tensor


@pytest.mark.parametrize("ranks", [None, (2, 3)], ids=str)
def test_experts_placed_by_a_map(source: Checkpoint, tmp_path: Path, ranks: tuple[int, ...] | None) -> None:
    """An expert is taken from a copy that is wholly here, not from the first one where that is elsewhere."""
    out, file = tmp_path / "out", tmp_path / "map.json"
    file.write_text(json.dumps({"physical_to_logical_map": [[2, 0, 1, 3, 0, 3, 1, 2]]}))
    convert(source.folder, out, tp=4, ep=2, ranks=ranks, expert_map=file)
    parts, expected = zip(*((p, e) for p, e in whole(source) if ".mlp.experts." in p.tensor), strict=True)
    assert len(parts) == 4 * 9
    assert not index_of(out).missing(part.tensor for part in parts)
    assert read(out, parts) == list(expected)


def test_shared_heads(tmp_path: Path) -> None:
    """Each slice of the keys is on two ranks, and again on two more."""
    with gqa.registered():
        made = gqa.make_gqa(tmp_path / "checkpoint", heads=8, kv_heads=2)
        convert(made.folder, tmp_path / "out", tp=8, ep=2, attn_tp=4)
        parts, expected = zip(*whole(made), strict=True)
        assert read(tmp_path / "out", parts) == list(expected)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_part(source: Checkpoint, converted: Callable[..., Path], data: st.DataObject) -> None:
    """Any bytes of any tensors, in any order, two parts of one among them."""
    names = sorted(source.tensors)
    wanted = data.draw(st.lists(st.sampled_from(names), min_size=1, max_size=6, unique=True))
    parts, expected = [], []
    for name in wanted:
        size = source.tensors[name].nbytes
        ends = sorted(data.draw(st.lists(st.integers(0, size), min_size=3, max_size=3, unique=True)))
        content = expected_tensor(source.tensors[name], source.dims).tobytes()
        for begin, stop in ((ends[1], ends[2]), (ends[0], ends[1])):
            parts.append(Part(name, begin, stop - begin))
            expected.append(content[begin:stop])
    assert read(converted(*data.draw(st.sampled_from(SPLITS))), parts) == expected


def test_one_matrix_reads_no_other(source: Checkpoint, converted: Callable[..., Path]) -> None:
    """Of the experts' tensors only the stacked one that holds it is read."""
    out = converted(2, 1)
    name = EXPERT.format(3, "down", "weight_scale")
    reader = AssembledReader(out, index_of(out), direct=False)
    reads = reader.plan([Part(name, 0, source.tensors[name].nbytes)])
    assert reads.read_bytes == 2 * 4096 == 2 * source.tensors[name].nbytes // 2 * 2
    assert reads.files == tuple(f"rank-0{rank}-of-02/layer-001.safetensors" for rank in (0, 1))


# Parts of a model.


def test_what_a_part_of_the_layers_lacks(source: Checkpoint, tmp_path: Path) -> None:
    convert(source.folder, tmp_path / "out", tp=2, layers=[1])
    index, names = index_of(tmp_path / "out"), list(source.tensors)
    missing = index.missing(names)
    here = [name for name in names if ".layers.1." in name]
    assert set(names) - set(missing.tensors) == set(here)
    assert (missing.layers, missing.ranks) == ((0,), ())
    assert str(missing).startswith("layer 0 and ")
    assert not index.missing(here)
    assert str(index.missing([name for name in names if ".layers.0." in name])) == "layer 0"
    top = index.missing(["language_model.model.norm.weight"])
    assert str(top) == "1 tensor outside the layers, such as language_model.model.norm.weight"
    with pytest.raises(OutputError, match=r"does not hold all of .*norm"):
        read(tmp_path / "out", [Part("language_model.model.norm.weight", 0, 2)])


def test_what_a_part_of_the_ranks_lacks(source: Checkpoint, tmp_path: Path) -> None:
    """Ranks 2 and 3 of four have the second half of the experts, and all of what attention has in two."""
    convert(source.folder, tmp_path / "out", tp=4, ep=2, attn_tp=2, ranks=[2, 3])
    index = index_of(tmp_path / "out")
    missing = index.missing(source.tensors)
    whole_here = set(source.tensors) - set(missing.tensors)
    experts = {name for name in source.tensors if ".mlp.experts." in name}
    assert experts & whole_here == {name for name in experts if int(name.split(".")[6]) >= 2}
    assert missing.ranks == (0, 1)
    for name in source.tensors:
        if "self_attn" in name or name.endswith("norm.weight") or name.startswith("vision"):
            assert name in whole_here
        if "shared_experts" in name or name.endswith(("embed_tokens.weight", "lm_head.weight")):
            assert name not in whole_here
    parts, expected = zip(*((p, want) for p, want in whole(source) if p.tensor in whole_here), strict=True)
    assert read(tmp_path / "out", parts) == list(expected)
    assert str(missing) == "the slices of ranks 0-1"


def test_the_copy_that_is_here(source: Checkpoint, tmp_path: Path) -> None:
    """Of experts in several slots one copy is enough, the second where the first is on a rank that is not
    here.
    """
    placed = tmp_path / "map.json"
    placed.write_text(json.dumps({"physical_to_logical_map": [[0, 1, 2, 3, 0, 1]]}))
    convert(source.folder, tmp_path / "out", tp=2, ep=2, layers=[1], ranks=[1], expert_map=placed)
    index = index_of(tmp_path / "out")
    experts = [name for name in source.tensors if ".mlp.experts." in name]
    here = [name for name in experts if int(name.split(".")[6]) != 2]
    assert set(index.missing(experts).tensors) == set(experts) - set(here)
    assert index.missing(experts).ranks == (0,)
    parts, expected = zip(*((p, want) for p, want in whole(source) if p.tensor in here), strict=True)
    assert read(tmp_path / "out", parts) == list(expected)


def test_names_that_are_none(converted: Callable[..., Path]) -> None:
    index = index_of(converted(2, 1))
    for name in (
        "",
        "x",
        EXPERT.format(4, "gate", "weight_packed"),
        EXPERT.format("01", "up", "weight_scale"),
    ):
        assert index.where(name) is None


# Damage.


def test_padding_that_is_not_zero(source: Checkpoint, converted: Callable[..., Path], tmp_path: Path) -> None:
    """Named by file, expert and rank; the other experts can be read."""
    out = shutil.copytree(converted(8, 1), tmp_path / "out")
    path = "rank-05-of-08/layer-001.safetensors"
    (tensor,) = (
        tensor
        for shard in read_manifest(out).shards
        if shard.path == path
        for tensor in shard.tensors
        if tensor.name.endswith("w2_weight_scale")
    )
    experts, groups, columns = tensor.shape
    assert (experts, groups) == (4, 2)
    damage.flip(out / path, tensor.offset + 2 * (2 * groups + 1) * columns)  # the second group of expert 2
    for expert in range(4):
        names = [EXPERT.format(expert, "down", role) for role in ("weight_packed", "weight_scale")]
        parts = [Part(name, 0, source.tensors[name].nbytes) for name in names]
        if expert == 2:
            with pytest.raises(OutputError, match=rf"{path}: expert 2, rank 5: the padding is not zero"):
                read(out, parts)
        else:
            assert read(out, parts) == [
                expected_tensor(source.tensors[name], source.dims).tobytes() for name in names
            ]


@pytest.mark.parametrize("gone", [True, False], ids=["gone", "short"])
def test_a_file_that_is_not_whole(
    source: Checkpoint, converted: Callable[..., Path], tmp_path: Path, gone: bool
) -> None:
    out = shutil.copytree(converted(2, 1), tmp_path / "out")
    path = out / "rank-01-of-02" / "layer-001.safetensors"
    if gone:
        path.unlink()
    else:
        with path.open("r+b") as file:
            file.truncate(path.stat().st_size - 8192)
    with pytest.raises(OutputError, match=r"rank-01-of-02/layer-001.*run marlin-convert verify"):
        read(out, [part for part, _ in whole(source)])


def _of(document: dict[str, Any], ending: str) -> dict[str, Any]:
    tensors = (t for shard in document["shards"] for t in shard["tensors"] if t["name"].endswith(ending))
    found: dict[str, Any] = next(tensors)
    return found


def _origin(document: dict[str, Any], ending: str) -> dict[str, Any]:
    found: dict[str, Any] = next(
        o for unit in document["units"] for o in unit["tensors"] if o["tensor"].endswith(ending)
    )
    return found


def _more_groups_than_experts(document: dict[str, Any]) -> None:
    """All that is cut in two stays so, and the four experts are to be in eight groups."""
    document["parallel"].update(tp=8, ep=8, moe_tp=1, attn_tp=2)
    document["format_version"] = 2
    for origin in (origin for unit in document["units"] for origin in unit["tensors"]):
        if origin["parts"] == "tp":
            origin["parts"] = "attn_tp"


LIES: list[tuple[str, Callable[[dict[str, Any]], object]]] = [
    ("not a slice of", lambda d: _of(d, "o_proj.weight").update(size=64)),
    ("not a slice of", lambda d: _origin(d, "q_b_proj.weight").update(replicas=2)),
    ("comes of nothing", lambda d: _origin(d, "o_proj.weight").update(replicas=64)),
    ("comes of nothing", lambda d: _origin(d, "model.norm.weight").update({"from": ["x"]})),
    ("expected I32", lambda d: _of(d, "w13_weight_packed").update(shape=[4, 8, 8])),
    ("expected BF16", lambda d: _of(d, "w2_weight_scale").update(size=8)),
    ("at a multiple of 8", lambda d: _of(d, "w2_weight_packed").update(offset=4097)),
    ("cannot be of this model", _more_groups_than_experts),
    ("is no tensor of an expert", lambda d: d["units"][1].update(checked=["a.{expert}.b"])),
]


@pytest.mark.parametrize(("said", "lie"), LIES, ids=[str(i) for i in range(len(LIES))])
def test_a_manifest_that_cannot_be_right(
    converted: Callable[..., Path], tmp_path: Path, said: str, lie: Callable[[dict[str, Any]], object]
) -> None:
    """Sealed as if it were: what it says is seen to fit the source before anything is read."""
    out = tmp_path / "out"
    shutil.copytree(converted(2, 1), out)
    document = trees.manifest_of(out)
    lie(document)
    (out / "manifest.json").write_bytes(trees.seal(document))
    with pytest.raises(OutputError, match=said):
        index_of(out)


def test_a_matrix_between_others(source: Checkpoint, converted: Callable[..., Path]) -> None:
    """Behind an odd number of bytes no matrix is where its elements could be moved to."""
    name = EXPERT.format(1, "up", "weight_packed")
    norm = "language_model.model.norm.weight"
    odd, found = read(converted(4, 2, 2), [Part(norm, 1, 3), Part(name, 0, source.tensors[name].nbytes)])
    assert odd == expected_tensor(source.tensors[norm], source.dims).tobytes()[1:4]
    assert found == np.asarray(expected_tensor(source.tensors[name], source.dims)).tobytes()
