"""A converted folder cut in another way: the same bytes as converting the source so, or a refusal that says
what is wrong, and then nothing has its name.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

import damage
import gqa
import trees
from checkpoints import Checkpoint, make_small
from forks import Forks
from marlin_convert import convert, diff, open_shards, reshard, verify
from marlin_convert.documents.manifest import read_manifest
from marlin_convert.documents.records import read_record, write_record
from marlin_convert.documents.schemas import schema
from marlin_convert.errors import MachineError, OutputError, SourceError, UsageError
from marlin_convert.limits import FILES_PER_THREAD, OTHER_FILES, Limit, read_limits
from marlin_convert.pipeline import budget, conversion
from marlin_convert.pipeline.run import request_of
from marlin_convert.planning.output_plan import Options, plan_output
from marlin_convert.progress import Point
from marlin_convert.shards.stored_source import ConvertedStore
from once import once
from recorded import REPO, record

Make = Callable[..., Checkpoint]
Output = Callable[..., Path]
Command = Callable[..., tuple[int, str, str]]
EXPERTS = "language_model.model.layers.1.mlp.experts"


def assert_the_same(new: Path, converted: Path) -> None:
    """All files but provenance.json, with names and bytes."""
    found, expected = trees.tree(new), trees.tree(converted)
    assert {name for name in found | expected if found.get(name) != expected.get(name)} == set()


# The same as convert.


@pytest.mark.parametrize(("old", "split"), [((2, 1), (8, 2)), ((8, 2), (1, 1)), ((1, 1), (8, 8))], ids=str)
def test_as_converted(output: Output, tmp_path: Path, old: tuple[int, int], split: tuple[int, int]) -> None:
    done = reshard(output(*old), tmp_path / "new", tp=split[0], ep=split[1])
    assert (done.action, done.made, done.found) == ("new", 4, 0)
    assert_the_same(tmp_path / "new", output(*split))


@pytest.mark.parametrize(("old", "split"), [((4, 2, 2), (4, 1, None)), ((2, 1, None), (8, 4, 4))], ids=str)
def test_attention_apart(
    make: Make, tmp_path: Path, old: tuple[int, int, int | None], split: tuple[int, int, int | None]
) -> None:
    """To it and from it, and with another number of bytes of weight_shape."""
    source = make(shape_dtype="I64", form="k2-thinking")
    for name, (tp, ep, attn_tp) in (("old", old), ("converted", split)):
        convert(source.folder, tmp_path / name, tp=tp, ep=ep, attn_tp=attn_tp)
    reshard(tmp_path / "old", tmp_path / "new", tp=split[0], ep=split[1], attn_tp=split[2])
    assert_the_same(tmp_path / "new", tmp_path / "converted")


@pytest.mark.parametrize("old", [1, 2])
def test_stages(make: Make, tmp_path: Path, old: int) -> None:
    """To pipeline stages and from them, in another split."""
    convert(make().folder, tmp_path / "old", tp=4, ep=2, pp=old)
    convert(make().folder, tmp_path / "converted", tp=2, pp=3 - old)
    reshard(tmp_path / "old", tmp_path / "new", tp=2, pp=3 - old)
    assert_the_same(tmp_path / "new", tmp_path / "converted")


def test_heads_on_several_ranks(tmp_path: Path) -> None:
    with gqa.registered():
        source = gqa.make_gqa(tmp_path / "checkpoint", heads=8, kv_heads=2)
        convert(source.folder, tmp_path / "old", tp=8, attn_tp=4)
        convert(source.folder, tmp_path / "converted", tp=4, ep=4)
        reshard(tmp_path / "old", tmp_path / "new", tp=4, ep=4)
        assert_the_same(tmp_path / "new", tmp_path / "converted")


def test_everything_beside_the_weights(copied_source: Path, tmp_path: Path) -> None:
    """What was copied and what was not, with the names that it had; a card, a commit and every sha256."""
    (copied_source / "README.md").write_text("---\nlicense: mit\n---\n")
    (copied_source / "model.safetensors.index.json").unlink()
    (copied_source / ".gitattributes").write_text("x")
    (copied_source / "pytorch_model.bin").write_bytes(b"x")
    (copied_source / "figures").mkdir()
    (copied_source / "Zoo.txt").write_text("x")
    with (copied_source / "large.txt").open("wb") as file:
        file.truncate((64 << 20) + 1)
    record(copied_source, without="figures")
    for name, tp in (("old", 2), ("converted", 4)):
        convert(copied_source, tmp_path / name, tp=tp)
    reshard(tmp_path / "old", tmp_path / "new", tp=4)
    assert_the_same(tmp_path / "new", tmp_path / "converted")
    source = read_manifest(tmp_path / "new").source
    assert set(source.not_copied) == {".gitattributes", "figures/", "large.txt", "pytorch_model.bin"}
    assert (source.repo, source.files[0].sha256 is None) == (REPO, False)


def test_what_was_not_proven_is_proven_now(make: Make, output: Output, tmp_path: Path) -> None:
    convert(make().folder, tmp_path / "old", tp=2, verify="none")
    reshard(tmp_path / "old", tmp_path / "new", tp=8, ep=2)
    assert_the_same(tmp_path / "new", output(8, 2))
    reshard(tmp_path / "old", tmp_path / "unproven", tp=8, ep=2, verify="none")
    assert read_manifest(tmp_path / "unproven").checks == "none"
    assert diff(tmp_path / "unproven", output(8, 2)).compared > 0


def test_parts(make: Make, output: Output, tmp_path: Path) -> None:
    """A part of the whole, and a part of a part."""
    convert(make().folder, tmp_path / "converted", tp=8, ep=4, layers=[1], ranks=[2, 5])
    reshard(output(2, 1), tmp_path / "new", tp=8, ep=4, layers=[1], ranks=[2, 5])
    assert_the_same(tmp_path / "new", tmp_path / "converted")
    convert(make().folder, tmp_path / "layer", tp=2, layers=[1])
    reshard(tmp_path / "layer", tmp_path / "again", tp=8, ep=4, layers=[1], ranks=[2, 5])
    assert_the_same(tmp_path / "again", tmp_path / "converted")


def test_the_same_split_is_a_proven_copy(output: Output, tmp_path: Path) -> None:
    reshard(output(4, 2), tmp_path / "new", tp=4, ep=2, direct_io=False, threads=1)
    assert_the_same(tmp_path / "new", output(4, 2))


def test_little_memory(output: Output, tmp_path: Path) -> None:
    """The least that is said to do does."""
    with pytest.raises(UsageError, match=r"the smallest that works is (\d+)MiB") as refused:
        reshard(output(8, 2), tmp_path / "new", tp=4, memory=4096, threads=1)
    (least,) = re.findall(r"works is (\d+)MiB", str(refused.value))
    reshard(output(8, 2), tmp_path / "new", tp=4, memory=int(least) << 20, threads=3)
    assert_the_same(tmp_path / "new", output(4))


def test_shards_that_are_read_together_are_open_files(
    output: Output, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight that are read and two that are written leave room for two threads."""
    allowed = Limit(OTHER_FILES + 4 * (8 + 2) + 2 * FILES_PER_THREAD, "ulimit -n")
    limits = replace(read_limits(), cores=Limit(8, "cores"), open_files=allowed)
    monkeypatch.setattr(budget, "read_limits", lambda: limits)
    source = ConvertedStore.open(output(8, 2)).source()
    request = request_of(source, plan_output(source, Options(2)), tmp_path / "new", "exact", overwrite=False)
    assert budget.choose_budget(request.target, None, None).threads == 2


#: every power of two that slices of one expert, heads and vocabulary allow, the last two padded
SPLITS = [(1, 1), (2, 1), (4, 4), (8, 1), (8, 2), (8, 8), (64, 1), (64, 8)]


def convert_in_all_splits(folder: Path) -> None:
    """Of one checkpoint whose heads, experts and vocabulary all of them divide."""
    source = make_small(
        folder / "checkpoint",
        layers=2,
        experts=8,
        heads=64,
        hidden=128,
        moe_intermediate=2048,
        nope=16,
        rope=16,
        v=16,
        q_lora=32,
        kv_lora=32,
        vt_layers=1,
    )
    for tp, ep in SPLITS:
        convert(source.folder, folder / f"{tp}-{ep}", tp=tp, ep=ep)


@pytest.mark.slow
@pytest.mark.parametrize("old", SPLITS, ids=str)
def test_from_each_split_to_each(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, old: tuple[int, int]
) -> None:
    """The same among them."""
    made = once(tmp_path_factory, "all-splits", convert_in_all_splits)
    padded = read_manifest(made / f"{old[0]}-{old[1]}").parallel.padding is not None
    assert padded == (old == (64, 1))
    for tp, ep in SPLITS:
        reshard(made / f"{old[0]}-{old[1]}", tmp_path / f"{tp}-{ep}", tp=tp, ep=ep)
        assert_the_same(tmp_path / f"{tp}-{ep}", made / f"{tp}-{ep}")


# Damage: it is named, and what it is in gets no name.


def _place(out: Path, path: str, ending: str) -> tuple[int, tuple[int, ...], int]:
    """Where a stored tensor begins, its shape, its bytes."""
    (tensor,) = (
        tensor
        for shard in read_manifest(out).shards
        if shard.path == path
        for tensor in shard.tensors
        if tensor.name.endswith(ending)
    )
    return tensor.offset, tensor.shape, tensor.size


def exchange_experts(out: Path) -> None:
    """Experts 1 and 2 of all ranks, in the weights of down."""
    for rank in (0, 1):
        path = f"rank-0{rank}-of-02/layer-001.safetensors"
        offset, (experts, *_), size = _place(out, path, "w2_weight_packed")
        data, one = bytearray((out / path).read_bytes()), size // experts
        first = slice(offset + one, offset + 2 * one)
        second = slice(offset + 2 * one, offset + 3 * one)
        data[first], data[second] = data[second], data[first]
        (out / path).write_bytes(data)


def flip_plain(out: Path) -> None:
    path = "rank-01-of-02/layer-001.safetensors"
    offset, _, size = _place(out, path, "self_attn.o_proj.weight")
    damage.flip(out / path, offset + size - 1)


def flip_expert(out: Path) -> None:
    path = "rank-00-of-02/layer-001.safetensors"
    offset, _, size = _place(out, path, "w13_weight_scale")
    damage.flip(out / path, offset + size - 1)


def flip_common(out: Path) -> None:
    path = "common/common.safetensors"
    offset, _, size = _place(out, path, "patch_embed.proj.weight")
    damage.flip(out / path, offset + size - 1)


def shorten(out: Path) -> None:
    path = out / "rank-01-of-02" / "layer-001.safetensors"
    os.truncate(path, path.stat().st_size // 2)


DAMAGES: list[tuple[Callable[[Path], object], str, str]] = [
    (flip_plain, "layer-001", r"layers\.1\.self_attn\.o_proj\.weight, put together out of .*, is not what"),
    (flip_expert, "layer-001", r"experts\.7\.up_proj\.weight_scale, put together"),
    (flip_common, "common", r"patch_embed\.proj\.weight, put together"),
    (shorten, "layer-001", r"rank-01-of-02/layer-001\.safetensors ends at byte"),
    (exchange_experts, "layer-001", rf"{EXPERTS}\.1\.down_proj.*: it is {EXPERTS}\.2\.down_proj"),
]


@pytest.mark.parametrize(("spoil", "unit", "said"), DAMAGES, ids=[spoil.__name__ for spoil, _, _ in DAMAGES])
@pytest.mark.parametrize("checked", ["exact", "none"])
def test_a_damaged_shard(
    output: Output, tmp_path: Path, command: Command, spoil: Any, unit: str, said: str, checked: str
) -> None:
    """Whether buffers are checked or not."""
    out, new = shutil.copytree(output(2, 1), tmp_path / "out"), tmp_path / "new"
    spoil(out)
    code, shown, error = command("reshard", out, new, "--tp", 4, "--verify", checked, "--threads", 1)
    assert (code, shown) == (1, "")
    assert re.search(said, error)
    assert f"run marlin-convert verify {out}" in error
    assert not (new / "manifest.json").exists()
    assert list(new.rglob(f"{unit}.safetensors*")) + list(new.rglob("*.partial")) == []
    assert not verify(out).ok
    # once it is mended, it goes on
    shutil.rmtree(out)
    shutil.copytree(output(2, 1), out)
    assert reshard(out, new, tp=4, verify=checked).action == "continue"
    if checked == "exact":
        assert_the_same(new, output(4))


def test_padding_that_is_not_zero(make: Make, tmp_path: Path) -> None:
    convert(make(moe_intermediate=256).folder, tmp_path / "out", tp=8)
    path = "rank-03-of-08/layer-001.safetensors"
    offset, (_, groups, columns), _ = _place(tmp_path / "out", path, "w2_weight_scale")
    assert groups == 2
    damage.flip(tmp_path / "out" / path, offset + 2 * columns)  # the second group of expert 0 is padding
    with pytest.raises(OutputError, match=rf"{path}: expert 0, rank 3: the padding is not zero; run verify"):
        reshard(tmp_path / "out", tmp_path / "new", tp=2)
    assert list((tmp_path / "new").rglob("layer-001*")) == []


@pytest.mark.parametrize(
    "name",
    [
        "source/digests.bin",
        "source/config.json",
        "source/README.md",
        "source/model.safetensors.index.json",
        "source/headers/model-00002-of-000004.safetensors.gz",
        "tokenizer_config.json",
        "manifest.json",
    ],
)
def test_a_damaged_document(output: Output, tmp_path: Path, name: str) -> None:
    """Said at once."""
    out = shutil.copytree(output(2, 1), tmp_path / "out")
    if name.startswith("source/headers/"):
        name = f"source/headers/{min(os.listdir(out / 'source' / 'headers'))}"
    if not (out / name).exists():
        pytest.skip(f"this checkpoint has no {name}")
    damage.flip(out / name, (out / name).stat().st_size // 2)
    with pytest.raises(OutputError, match=re.escape(name)):
        reshard(out, tmp_path / "new", tp=4)
    assert not (tmp_path / "new").exists()


def test_digests_of_something_else(output: Output, tmp_path: Path) -> None:
    """Digests that a forger made fit: they are what decides."""
    out = shutil.copytree(output(2, 1), tmp_path / "out")
    damage.flip(out / "source" / "digests.bin", 5)
    trees.reseal(out)
    with pytest.raises(OutputError, match=r"put together out of .* is not what that was made from"):
        reshard(out, tmp_path / "new", tp=4)
    assert not (tmp_path / "new" / "manifest.json").exists()


def test_a_manifest_of_another_source(output: Output, tmp_path: Path) -> None:
    out = shutil.copytree(output(2, 1), tmp_path / "out")
    trees.reseal(out, lambda document: document["source"].update(id="0" * 32))
    with pytest.raises(OutputError, match=r"source\.id is not that of its files"):
        reshard(out, tmp_path / "new", tp=4)


# Refusals.


def test_what_a_part_does_not_hold(make: Make, tmp_path: Path) -> None:
    source = make()
    convert(source.folder, tmp_path / "layer", tp=2, layers=[1])
    convert(source.folder, tmp_path / "rank", tp=2, ranks=[1])
    refused = [
        ({"tp": 4}, "layer", r"all that is asked for: layer 0 and \d+ tensors outside the layers, such as .*"
         r" are missing; it holds --layers 1, else convert the checkpoint"),
        ({"tp": 4, "layers": [0, 1]}, "layer", "layer 0 are missing; it holds --layers 1, else"),
        ({"tp": 4}, "rank", "the slices of rank 0 are missing; convert the checkpoint itself"),
        ({"tp": 2, "ranks": [1]}, "rank", "the slices of rank 0 are missing"),
    ]  # fmt: skip
    for options, name, said in refused:
        with pytest.raises(UsageError, match=said):
            reshard(tmp_path / name, tmp_path / "new", **options)  # type: ignore[arg-type]  # a mix of options
    assert not (tmp_path / "new").exists()


def test_places(output: Output, make: Make, tmp_path: Path) -> None:
    """Neither in the other; no checkpoint, nothing unfinished, nothing foreign."""
    out = shutil.copytree(output(2, 1), tmp_path / "over" / "out")
    (tmp_path / "link").symlink_to(out)
    before = trees.tree(tmp_path)
    refused = [
        (out, out, "lies in"),
        (out, tmp_path / "link", "lies in"),
        (out, out / "new", "lies in the conversion"),
        (out, tmp_path / "link" / "new", "lies in the conversion"),
        (tmp_path / "link", tmp_path / "over", "lies in"),
        (make().folder, tmp_path / "new", "is no conversion; if it is the published checkpoint"),
        (tmp_path / "absent", tmp_path / "new", "is not a folder"),
    ]
    for old, new, said in refused:
        with pytest.raises(UsageError, match=said):
            reshard(old, new, tp=4)
        with pytest.raises(UsageError, match=said):
            reshard(old, new, tp=4, overwrite=True)
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "file").write_text("mine")
    with pytest.raises(UsageError, match="is not empty and is not a conversion"):
        reshard(out, tmp_path / "foreign", tp=4, overwrite=True)
    (tmp_path / "foreign" / "file").unlink()
    (tmp_path / "foreign").rmdir()
    assert trees.tree(tmp_path) == before
    (out / "manifest.json").unlink()
    with pytest.raises(OutputError, match=r"has no manifest\.json"):
        reshard(out, tmp_path / "new", tp=4)


def test_the_kernel_needs_the_source(output: Output, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"own files, which are not here; .* verify .*new --kernel"):
        reshard(output(2, 1), tmp_path / "new", tp=4, verify="kernel")
    with pytest.raises(UsageError, match="--verify some: choose one of"):
        reshard(output(2, 1), tmp_path / "new", tp=4, verify="some")
    with pytest.raises(UsageError, match="out is 3; it must be a path"):
        reshard(3, tmp_path / "new", tp=4)  # type: ignore[arg-type]  # what is refused


# Begun and continued, by itself and by convert.


@pytest.mark.slow
@pytest.mark.parametrize("first", ["convert", "reshard"])
def test_each_continues_the_other(
    forks: Forks, tiny: Checkpoint, tiny_tp2: Path, tmp_path: Path, first: str
) -> None:
    """Units that the one has recorded count for the other."""
    convert(tiny.folder, tmp_path / "converted", tp=4, ep=2)
    lines: dict[str, tuple[object, ...]] = {
        "convert": ("convert", tiny.folder, tmp_path / "new", "--tp", 4, "--ep", 2, "--threads", 1),
        "reshard": ("reshard", tiny_tp2, tmp_path / "new", "--tp", 4, "--ep", 2, "--threads", 1),
    }
    (second,) = lines.keys() - {first}
    fault = {"call": "fsync", "number": 30, "action": "SIGKILL"}
    assert forks.run(*lines[first], fault=fault).code == -signal.SIGKILL
    there = len(list((tmp_path / "new" / ".work" / "units").glob("*.json")))
    assert 0 < there < 5
    done = forks.run(*lines[second], "--json")
    assert (done.code, done.stderr) == (0, "")
    made = json.loads(done.stdout)
    assert (made["action"], made["units_found"], made["units_made"]) == ("continue", there, 5 - there)
    assert_the_same(tmp_path / "new", tmp_path / "converted")
    for line in lines.values():
        done = forks.run(*line)
        assert (done.code, "is finished already" in done.stdout) == (0, True)


def test_lost_files_are_made_again_by_either(make: Make, output: Output, tmp_path: Path) -> None:
    new = shutil.copytree(output(8, 2), tmp_path / "new")
    (new / "rank-03-of-08" / "layer-001.safetensors").unlink()
    done = reshard(output(2, 1), new, tp=8, ep=2)
    assert (done.action, done.made, done.found) == ("repair", 1, 3)
    (new / "rank-03-of-08" / "layer-000.safetensors").unlink()
    assert convert(make().folder, new, tp=8, ep=2).action == "repair"
    assert_the_same(new, output(8, 2))


def test_units_of_other_data_are_not_mixed_in(
    make: Make, output: Output, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a sample of the files would not show: every digest of a recorded unit is compared."""
    new = tmp_path / "new"

    def breaks_off(*arguments: object) -> None:
        raise MachineError("it breaks off here")

    with monkeypatch.context() as patch:
        patch.setattr(conversion, "finish_output", breaks_off)
        with pytest.raises(MachineError):
            convert(make().folder, new, tp=4)
    path = min((new / ".work" / "units").glob("*.json"))
    unit = read_record(path.read_bytes(), "")
    name = next(iter(unit.source))
    unit.source[name] = "0" * 31 + "1"
    path.write_bytes(write_record(unit))
    with pytest.raises(SourceError, match=rf"new was made of another {re.escape(name)} than .*--overwrite"):
        reshard(output(2, 1), new, tp=4)
    assert reshard(output(2, 1), new, tp=4, overwrite=True).action == "replace"
    assert_the_same(new, output(4))


def test_a_finished_one_of_other_data(make: Make, output: Output, tmp_path: Path) -> None:
    new = shutil.copytree(output(4, 1), tmp_path / "new")
    damage.flip(new / "source" / "digests.bin", 0)
    trees.reseal(new)
    with pytest.raises(SourceError, match="was made of another"):
        reshard(output(2, 1), new, tp=4)


def test_another_split_is_refused_and_replaced(output: Output, tmp_path: Path, command: Command) -> None:
    new = shutil.copytree(output(8, 2), tmp_path / "new")
    with pytest.raises(UsageError, match=r"was made with tp 8, ep 2.*now asked for tp 4, ep 1"):
        reshard(output(2, 1), new, tp=4)
    code, _, said = command("reshard", output(2, 1), new, "--tp", 4, "--overwrite")
    assert (code, "as nobody can be asked here" in said) == (2, True)
    assert_the_same(new, output(8, 2))
    assert command("reshard", output(2, 1), new, "--tp", 4, "--overwrite", "--yes")[0] == 0
    assert_the_same(new, output(4))


# The command.


def test_command(output: Output, tmp_path: Path, command: Command) -> None:
    line = ("reshard", output(2, 1), tmp_path / "new", "--tp", 8, "--ep", 2)
    code, said, _ = command(*line)
    assert code == 0
    assert re.fullmatch(
        rf"{tmp_path}/new: 4 units made, [\d.]+ MB in [\d.]+ s, each proven exact before it was written\n"
        rf"check what is on the disk:  marlin-convert verify {tmp_path}/new\n",
        said,
    )
    code, said, _ = command(*line, "--json")
    assert code == 0
    document = json.loads(said)
    Draft202012Validator(schema("convert")).validate(document)
    assert (document["action"], document["units_found"]) == ("done", 4)
    code, _, said = command(*line, "--yes")
    assert (code, "--yes goes with --overwrite" in said) == (2, True)


def test_progress_is_of_the_source(make: Make, output: Output, tmp_path: Path) -> None:
    points: list[Point] = []
    reshard(output(2, 1), tmp_path / "new", tp=4, progress=points.append)
    assert points[-1].total == make().nbytes
    assert max(point.done for point in points) == make().nbytes
    with open_shards(tmp_path / "new", 3) as shards:
        assert len(shards) > 0
