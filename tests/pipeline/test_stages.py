"""Pipeline stages: who has what, each value at its place, proven, and no mistake of it passes."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import gqa
import trees
from checkpoints import Checkpoint
from forks import Forks
from marlin_convert import convert, open_shards, plan, reshard, restore, verify
from marlin_convert.checks.stages import Stages
from marlin_convert.errors import UsageError
from marlin_convert.shards.compare import diff
from marlin_convert.shards.inspect import describe_folder
from marlin_convert.slicing import Topology
from whole import assert_as_the_oracle_says

Document = dict[str, Any]
Make = Callable[..., Checkpoint]
#: tp, ep, attn-tp, pp
SPLITS = [(2, 1, None, 2), (4, 2, 2, 2), (2, 2, None, 3)]


@pytest.fixture(scope="module")
def staged(make: Make, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three layers in two stages of two ranks. Not to be changed: copy it."""
    out = tmp_path_factory.mktemp("staged") / "out"
    convert(make(layers=3).folder, out, tp=2, pp=2, threads=2)
    return out


@pytest.fixture
def out(staged: Path, tmp_path: Path) -> Path:
    """A copy to spoil."""
    return Path(shutil.copytree(staged, tmp_path / "out"))


def flat(out: Path, to: Path) -> Path:
    """The folders of all stages laid over each other."""
    for path in out.glob("stage-*/*/*.safetensors"):
        (to / path.parent.name).mkdir(parents=True, exist_ok=True)
        (to / path.parent.name / path.name).symlink_to(path)
    return to


@pytest.mark.parametrize(
    ("layers", "pp", "starts"),
    [
        (61, 1, [0]),
        (61, 2, [0, 30]),
        (61, 4, [0, 15, 30, 45]),
        (61, 8, [0, 7, 14, 21, 29, 37, 45, 53]),
        (3, 3, [0, 1, 2]),
        (93, 4, [0, 23, 46, 69]),
    ],
)
def test_layers_are_spread_as_sglang_does(layers: int, pp: int, starts: list[int]) -> None:
    """What get_pp_indices of SGLang 0.5.17 and 0.5.23 gives."""
    stages = Topology(1, 1, None, pp).stages(layers)
    assert [stage.start for stage in stages] == starts
    assert stages[-1].stop == layers


@given(st.integers(1, 200), st.integers(1, 200))
def test_stages_partition_the_layers(layers: int, pp: int) -> None:
    """In order, none empty, and the checks come to the same by another way."""
    if pp > layers:
        with pytest.raises(ValueError, match="not enough"):
            Topology(1, 1, None, pp).stages(layers)
        return
    stages = Topology(1, 1, None, pp).stages(layers)
    assert [layer for stage in stages for layer in stage] == list(range(layers))
    assert {len(stage) - layers // pp for stage in stages} <= {0, 1}
    again = Stages(pp, layers)
    assert all(again.of(f"layer-{n:03d}") == i for i, stage in enumerate(stages) for n in stage)


@pytest.mark.parametrize("form", ["k26", "k2-thinking"])
@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_every_value_is_at_its_place_and_proven(
    make: Make, tmp_path: Path, split: tuple[int, int, int | None, int], form: str
) -> None:
    (tp, ep, attn_tp, pp), out, source = split, tmp_path / "out", make(layers=3, form=form)
    convert(source.folder, out, tp=tp, ep=ep, attn_tp=attn_tp, pp=pp, threads=2)
    for against in (None, source.folder):
        proof = verify(out, against)
        assert [str(finding) for finding in proof.findings] == []
        assert (proof.proven, proof.unproven) == (len(source.tensors), 0)
    assert_as_the_oracle_says(flat(out, tmp_path / "flat"), source, tp, ep, attn_tp)


def test_who_has_what(staged: Path) -> None:
    document = trees.manifest_of(staged)
    assert document["format_version"] == 2
    assert document["parallel"]["pp"] == 2
    assert document["parallel"]["stages"] == [
        {"layers": [0], "has": ["embed", "common"]},
        {"layers": [1, 2], "has": ["head"]},
    ]
    names = {
        unit["name"]: [origin["tensor"].rpartition("model.")[2] for origin in unit["tensors"]]
        for unit in document["units"]
        if unit["layer"] is None and unit["name"] != "common"
    }
    assert names == {
        "embed": ["embed_tokens.weight"],
        "head": ["lm_head.weight", "norm.weight"],
    }
    files = sorted(path.relative_to(staged).as_posix() for path in staged.glob("stage-*/**/*.safetensors"))
    assert files == [
        "stage-00-of-02/common/common.safetensors",
        *(
            f"stage-00-of-02/rank-{r:02d}-of-02/{u}.safetensors"
            for r in (0, 1)
            for u in ("embed", "layer-000")
        ),
        *(
            f"stage-01-of-02/rank-{r:02d}-of-02/{u}.safetensors"
            for r in (0, 1)
            for u in ("head", "layer-001", "layer-002")
        ),
    ]
    for path in staged.glob("stage-*/rank-*/*.safetensors"):
        metadata = trees.read_shard(path).metadata
        assert (metadata["format_version"], metadata["pp"]) == ("2", "2")
        assert metadata["stage"] == path.parent.parent.name[6:8].lstrip("0").rjust(1, "0")


def test_the_data_is_that_of_one_stage(make: Make, staged: Path, tmp_path: Path) -> None:
    convert(make(layers=3).folder, tmp_path / "one", tp=2, threads=2)
    for path in staged.glob("stage-*/rank-*/layer-*.safetensors"):
        ours = trees.read_shard(path)
        theirs = trees.read_shard(tmp_path / "one" / path.parent.name / path.name)
        assert ours.entries == theirs.entries
        assert ours.data[ours.start :] == theirs.data[theirs.start :]


def test_one_stage_is_what_it_was(make: Make, tmp_path: Path) -> None:
    convert(make().folder, tmp_path / "with", tp=2, pp=1, threads=2)
    convert(make().folder, tmp_path / "without", tp=2, threads=2)
    assert trees.tree(tmp_path / "with") == trees.tree(tmp_path / "without")
    assert "pp" not in trees.manifest_of(tmp_path / "with")["parallel"]


def test_a_part_of_a_stage(make: Make, tmp_path: Path) -> None:
    out, source = tmp_path / "out", make(layers=3).folder
    convert(source, out, tp=2, pp=2, layers=[2], ranks=[1], threads=2)
    shards = [path.relative_to(out).as_posix() for path in out.rglob("*.safetensors")]
    assert shards == ["stage-01-of-02/rank-01-of-02/layer-002.safetensors"]
    assert trees.manifest_of(out)["parallel"]["stages"][0]["layers"] == [0]
    assert verify(out).ok
    assert verify(out, source).ok


def test_a_part_of_the_folder_is_checked_by_itself(out: Path) -> None:
    shutil.rmtree(out / "stage-00-of-02")
    assert [str(finding) for finding in verify(out, layers=[1, 2]).findings] == []
    shutil.rmtree(out / "stage-01-of-02" / "rank-00-of-02")
    assert [str(finding) for finding in verify(out, layers=[1, 2], ranks=[1]).findings] == []
    assert not verify(out).ok


def test_a_stage_is_checked_by_itself(
    make: Make, out: Path, command: Callable[..., tuple[int, str, str]]
) -> None:
    shutil.rmtree(out / "stage-00-of-02")
    source = make(layers=3)
    for against in (None, source.folder):
        found = verify(out, against, stages=[1])
        assert [str(finding) for finding in found.findings] == []
        theirs = [
            n for n in source.tensors if ".layers.0." not in n and "embed" not in n and "vision" not in n
        ]
        assert found.proven == len([name for name in theirs if not name.startswith("mm_projector")])
        assert found.unproven == 0
    assert command("verify", out, "--stages", 1)[0] == 0
    code, _, stderr = command("verify", out)
    assert code == 1
    assert "stage-00-of-02/rank-00-of-02, stage-00-of-02/rank-01-of-02: not here" in stderr
    assert "verify what is here with --stages or --ranks" in stderr
    path = out / "stage-01-of-02/rank-01-of-02/head.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    assert command("verify", out, "--stages", 1)[0] == 1
    code, _, stderr = command("verify", out, "--stages", 2)
    assert code == 2
    assert "there is no stage 2 to check here; there are 0 to 1" in stderr
    code, _, stderr = command("verify", out, "--stages", 1, "--kernel")
    assert code == 2
    assert "--stages does not go with --kernel" in stderr


def test_a_folder_without_stages_is_all_of_the_first(tiny_tp2: Path) -> None:
    assert (verify(tiny_tp2, stages=[0]).proven, verify(tiny_tp2, stages=[0]).of_all) == (
        verify(tiny_tp2).proven,
        True,
    )


@pytest.mark.parametrize("pp", [0, 4, 5])
def test_what_cannot_be_is_refused(make: Make, tmp_path: Path, pp: int) -> None:
    with pytest.raises(UsageError, match=r"pp"):
        convert(make(layers=3).folder, tmp_path / "out", tp=2, pp=pp)
    assert not (tmp_path / "out").exists()


def test_another_number_of_stages_does_not_continue(make: Make, out: Path) -> None:
    source = make(layers=3).folder
    with pytest.raises(UsageError, match=r"pp 2.*now asked for.*pp 1"):
        convert(source, out, tp=2)
    assert convert(source, out, tp=2, pp=2).action == "done"
    assert plan(source, out, tp=2, pp=3).refusal is not None


def test_lost_files_are_made_again(make: Make, staged: Path, out: Path) -> None:
    (out / "stage-01-of-02/rank-01-of-02/head.safetensors").unlink()
    (out / "stage-01-of-02/rank-00-of-02/manifest.json").unlink()
    (out / "stage-00-of-02/rank-00-of-02/model.safetensors.index.json").unlink()
    report = convert(make(layers=3).folder, out, tp=2, pp=2)
    assert (report.action, report.made) == ("repair", 1)
    assert trees.tree(out) == trees.tree(staged)


def test_a_rank_of_a_stage_is_opened_by_its_own_manifest(staged: Path, out: Path) -> None:
    every, last = open_shards(staged, 1), open_shards(staged, 1, stage=1)
    assert every.manifest.ranks == (0, 1)
    assert (last.manifest.ranks, last.manifest.layers) == ((1,), (1, 2))
    assert last.names() == [name for name in every if ".layers.0." not in name and "embed_tokens" not in name]
    assert all(last[name].tobytes() == every[name].tobytes() for name in last)
    (out / "stage-01-of-02/rank-01-of-02/manifest.json").unlink()
    assert open_shards(out, 1, stage=1).names() == last.names()
    assert open_shards(staged, None, stage=0).names() == open_shards(staged, None).names()
    assert open_shards(staged, None, stage=1).names() == []
    with pytest.raises(UsageError, match="no stage 2; the conversion has 2 stages"):
        open_shards(staged, 1, stage=2)


def test_the_documents_of_a_rank(staged: Path) -> None:
    folder = staged / "stage-01-of-02" / "rank-01-of-02"
    own = json.loads((folder / "manifest.json").read_bytes())
    assert (own["ranks"], own["layers"], own["complete"]) == ([1], [1, 2], False)
    assert [unit["name"] for unit in own["units"]] == ["layer-001", "layer-002", "head"]
    assert {Path(each["path"]).parent for each in own["shards"]} == {Path("stage-01-of-02/rank-01-of-02")}
    places = json.loads((folder / "experts.json").read_bytes())
    assert [unit["unit"] for unit in places["units"]] == ["layer-001", "layer-002"]
    first = json.loads((staged / "stage-00-of-02/rank-01-of-02/manifest.json").read_bytes())
    assert [unit["name"] for unit in first["units"]] == ["layer-000", "embed", "common"]


def test_the_command(make: Make, tmp_path: Path, command: Callable[..., tuple[int, str, str]]) -> None:
    out, source = tmp_path / "out", make(layers=3).folder
    line = (source, out, "--tp", 2, "--pp", 2)
    code, stdout, _ = command("plan", *line, "--json")
    assert (code, json.loads(stdout)["pp"]) == (0, 2)
    assert command("convert", *line)[0] == 0
    assert command("verify", out)[0] == 0
    card = (out / "README.md").read_text()
    assert "for 4 GPUs" in card
    assert "its layers over 2 stages (pp 2)" in card
    assert "`stage-SS-of-PP/rank-RR-of-NN/`" in card
    code, stdout, _ = command("inspect", out)
    assert code == 0
    assert "\npp: 2\n" in stdout
    assert describe_folder(out).complete
    assert command("inspect", out, "--tensor", "language_model.lm_head.weight", "--rank", 1)[0] == 0
    code, _, stderr = command("verify", out / "stage-01-of-02" / "rank-00-of-02")
    assert code == 2
    assert "is one folder of the conversion" in stderr


def test_other_stages_are_another_split(make: Make, staged: Path, tmp_path: Path) -> None:
    convert(make(layers=3).folder, tmp_path / "one", tp=2, threads=2)
    found = diff(staged, tmp_path / "one")
    assert (found.same, found.by) == (True, "source tensors")
    assert diff(staged, staged).same


def test_the_checkpoint_comes_back(make: Make, staged: Path, tmp_path: Path) -> None:
    source = make(layers=3).folder
    assert restore(staged, tmp_path / "again").missing == ()
    expected, found = trees.tree(source), trees.tree(tmp_path / "again")
    left_out = trees.manifest_of(staged)["source"]["not_copied"]
    assert found == {name: data for name, data in expected.items() if not name.startswith(tuple(left_out))}
    assert any(name.endswith(".safetensors") for name in found)


def test_a_part_of_the_stages_gives_back_what_it_has(make: Make, tmp_path: Path) -> None:
    """What is missing is told by its layers, whatever stage they are in."""
    out, source = tmp_path / "out", make(layers=3).folder
    convert(source, out, tp=2, pp=2, layers=[1, 2], threads=2)
    given = restore(out, tmp_path / "again")
    assert given.missing
    for path in (tmp_path / "again").glob("*.safetensors"):
        assert path.read_bytes() == (source / path.name).read_bytes()


def test_every_split_at_once(make: Make, tmp_path: Path) -> None:
    """Stages, attention apart, and experts in slots, one of them twice on a rank: each byte is where
    experts.json says, and all of it is proven and cut again.
    """
    source, out, placed = make(layers=3, experts=4).folder, tmp_path / "out", tmp_path / "map.json"
    rows = [[0, 1, 2, 3, 0, 1], [3, 1, 2, 0, 0, 3], [2, 2, 1, 0, 3, 1]]
    placed.write_text(json.dumps({"physical_to_logical_map": rows}))
    convert(source, out, tp=4, ep=2, attn_tp=2, pp=2, expert_map=placed, threads=2)
    assert [str(finding) for finding in verify(out, source).findings] == []
    folder = out / "stage-01-of-02" / "rank-03-of-04"
    units = json.loads((folder / "experts.json").read_bytes())["units"]
    assert [[place["expert"] for place in unit["experts"]] for unit in units] == [[0, 0, 3], [0, 3, 1]]
    for unit in units:
        shard = trees.read_shard(folder / unit["file"])
        for slot, place in enumerate(unit["experts"]):
            for name, (offset, size) in zip(unit["tensors"], place["ranges"], strict=True):
                assert shard.data[offset : offset + size] == shard.array(name)[slot].tobytes()
    reshard(out, tmp_path / "plain", tp=2, threads=2)
    convert(source, tmp_path / "converted", tp=2, threads=2)
    assert trees.tree(tmp_path / "plain") == trees.tree(tmp_path / "converted")


@pytest.mark.parametrize(
    "to", [{"tp": 4}, {"tp": 2, "pp": 3}, {"tp": 4, "ep": 2, "attn_tp": 2, "pp": 2}], ids=str
)
def test_stages_are_cut_again(make: Make, staged: Path, tmp_path: Path, to: dict[str, int]) -> None:
    """Into another split, and another split into stages: the bytes are those of a conversion."""
    convert(make(layers=3).folder, tmp_path / "converted", **to, threads=2)  # type: ignore[arg-type]  # of its kinds
    reshard(staged, tmp_path / "there", **to, threads=2)  # type: ignore[arg-type]  # of its kinds
    assert trees.tree(tmp_path / "there") == trees.tree(tmp_path / "converted")
    reshard(tmp_path / "there", tmp_path / "back", tp=2, pp=2, threads=2)
    assert trees.tree(tmp_path / "back") == trees.tree(staged)


@pytest.mark.parametrize(
    ("call", "share"),
    [("mkdir", 0.5), ("posix_fallocate", 0.5), ("pwrite", 0.6), ("replace", 0.4), ("replace", 0.95)],
)
def test_killed_runs_continue(
    tiny: Checkpoint, tmp_path: Path, forks: Forks, call: str, share: float
) -> None:
    whole, out = tmp_path / "whole", tmp_path / "out"
    line = ("convert", tiny.folder, whole, "--tp", 2, "--pp", 3, "--threads", 1)
    counts = forks.run(*line).counts
    line = (*line[:2], out, *line[3:])
    fault = {"call": call, "number": int(counts[call] * share), "action": "SIGKILL"}
    assert forks.run(*line, fault=fault).code == -9
    assert forks.run(*line).code == 0
    assert trees.tree(out) == trees.tree(whole)
    assert not list(out.rglob("*.partial"))


# What is not ours stays, whatever its name; what is ours goes.


def everything(folder: Path) -> dict[str, bytes]:
    """All files of a folder, no matter what."""
    return trees.tree(folder, without=())


@pytest.mark.parametrize(
    "path",
    [
        "stage-00-of-02/notes.txt",
        "stage-00-of-02/common/common.safetensors",
        "stage-00-of-02/common/model.safetensors.index.json",
        "stage-00-of-02/rank-00-of-02/layer-000.safetensors",
        "stage-00-of-02/rank-00-of-02/layer-000.safetensors.partial",
        "stage-00-of-02/rank-00-of-02/manifest.json",
        "stage-00-of-02/rank-00-of-02/experts.json",
    ],
)
@pytest.mark.parametrize("begun", [False, True])
def test_a_users_folder_that_is_called_like_that_of_a_stage_is_kept(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, begun: bool
) -> None:
    """Beside a conversion without stages, finished or broken off."""
    out, source = tmp_path / "out", make(layers=3).folder

    def broken(*_: object) -> None:
        raise KeyboardInterrupt

    if begun:
        with monkeypatch.context() as patch:
            patch.setattr("marlin_convert.pipeline.conversion.finish_output", broken)
            with pytest.raises(KeyboardInterrupt):
                convert(source, out, tp=2)
    else:
        convert(source, out, tp=2)
    (out / path).parent.mkdir(parents=True)
    (out / path).write_text("mine")
    before = everything(out)
    for options in ({"tp": 1}, {"tp": 2, "pp": 2}):
        # a manifest there might be that of a rank, edited
        with pytest.raises(
            UsageError, match=r"not of a conversion, such as stage-00-of-02|manifest\.json was edited"
        ):
            convert(source, out, overwrite=True, **options)  # type: ignore[arg-type]  # of the verb's own kinds
        assert everything(out) == before
    assert convert(source, out, tp=2).action == ("continue" if begun else "done")
    assert (out / path).read_text() == "mine"


@pytest.mark.parametrize(
    "path",
    [
        "notes.txt",
        "stage-00-of-02/notes.txt",
        "stage-01-of-02/rank-00-of-02/notes.txt",
        "rank-00-of-02/layer-000.safetensors",
        "common/common.safetensors",
        "stage-00-of-02/stage-00-of-02/common/common.safetensors",
    ],
)
def test_what_is_not_ours_is_kept_beside_stages(make: Make, out: Path, path: str) -> None:
    (out / path).parent.mkdir(parents=True, exist_ok=True)
    (out / path).write_text("mine")
    before = everything(out)
    with pytest.raises(UsageError, match="not of a conversion, such as"):
        convert(make(layers=3).folder, out, tp=1, overwrite=True)
    assert everything(out) == before


def test_stages_are_removed_as_a_whole(make: Make, out: Path) -> None:
    (out / "stage-00-of-02/rank-00-of-02/layer-000.safetensors.partial").write_bytes(b"half")
    convert(make(layers=3).folder, out, tp=1, overwrite=True, threads=2)
    assert not list(out.glob("stage-*"))
    assert verify(out).ok


def test_what_is_left_of_stages_is_removed(make: Make, out: Path) -> None:
    """Without manifest or job nobody knows how many there were."""
    (out / "manifest.json").unlink()
    convert(make(layers=3).folder, out, tp=1, overwrite=True, threads=2)
    assert not list(out.glob("stage-*"))


def test_half_written_shards_of_stages_are_removed(make: Make, staged: Path, out: Path) -> None:
    (out / "stage-01-of-02/rank-00-of-02/layer-001.safetensors").unlink()
    (out / "stage-01-of-02/rank-00-of-02/layer-001.safetensors.partial").write_bytes(b"half")
    assert convert(make(layers=3).folder, out, tp=2, pp=2).made == 1
    assert trees.tree(out) == trees.tree(staged)


def test_a_link_in_place_of_a_stage_is_not_written_through(make: Make, out: Path, tmp_path: Path) -> None:
    shutil.move(out / "stage-01-of-02", tmp_path / "elsewhere")
    (out / "stage-01-of-02").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere/rank-00-of-02/layer-001.safetensors").unlink()
    before = everything(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match=r"stage-01-of-02"):
        convert(make(layers=3).folder, out, tp=2, pp=2)
    assert everything(tmp_path / "elsewhere") == before


def test_files_of_the_source_with_such_names_are_ours(copied_source: Path, tmp_path: Path) -> None:
    for name in ("stage-notes.md", "rank-list.txt", "common-sense.txt"):
        (copied_source / name).write_text("of the source")
    for pp, other in ((1, 2), (2, 1)):
        out = tmp_path / str(pp)
        convert(copied_source, out, tp=2, pp=pp, threads=2)
        assert convert(copied_source, out, tp=2, pp=other, overwrite=True, threads=2).action == "replace"
        assert verify(out).ok


def test_a_family_without_embeddings_has_one_stage(tmp_path: Path) -> None:
    with gqa.registered():
        source = gqa.make_gqa(tmp_path / "checkpoint")
        with pytest.raises(UsageError, match="has one stage only; leave --pp out"):
            convert(source.folder, tmp_path / "out", tp=2, pp=2)


def test_a_source_with_a_file_of_that_name_leaves_it_behind(copied_source: Path, tmp_path: Path) -> None:
    (copied_source / "stage-00-of-02").write_text("not a folder")
    convert(copied_source, tmp_path / "out", tp=2, pp=2, threads=2)
    assert "stage-00-of-02" in trees.manifest_of(tmp_path / "out")["source"]["not_copied"]


# Forgeries: whatever is said of stages is derived again. All digests, headers, indexes and manifests fit.


def moved(out: Path, unit: str, stage: int, document: Document) -> None:
    """The files of a unit in the folders of another stage, as if they had been written there."""
    for shard in (shard for shard in document["shards"] if shard["unit"] == unit):
        _, rank, name = shard["path"].split("/")
        path = f"stage-{stage:02d}-of-02/{rank}/{name}"
        (out / path).parent.mkdir(parents=True, exist_ok=True)
        os.replace(out / shard["path"], out / path)
        shard["path"] = path
        trees.rewrite_header(
            out / path,
            lambda header: header["__metadata__"].update(
                stage=str(stage), layer=header["__metadata__"]["layer"]
            ),
        )


def index_again(out: Path, document: Document) -> None:
    """The indexes of all folders by what is in them."""
    for folder in {shard["path"].rpartition("/")[0] for shard in document["shards"]}:
        here = [shard for shard in document["shards"] if shard["path"].rpartition("/")[0] == folder]
        stored = [
            (tensor, shard)
            for shard in here
            for tensor in shard["tensors"]
            if not tensor["name"].startswith("__pad__.")
        ]
        index = {
            "metadata": {"total_size": sum(tensor["size"] for tensor, _ in stored)},
            "weight_map": {tensor["name"]: shard["path"].split("/")[-1] for tensor, shard in stored},
        }
        (out / folder / "model.safetensors.index.json").write_text(json.dumps(index))


def forge(out: Path, change: Callable[[Document], object]) -> list[str]:
    """What verify finds after a change with everything made to fit."""

    def whole(document: Document) -> None:
        change(document)
        index_again(out, document)

    trees.reseal(out, whole)
    return [str(finding) for finding in verify(out).findings]


def stages(document: Document) -> list[Document]:
    """What the manifest says of the stages."""
    found: list[Document] = document["parallel"]["stages"]
    return found


def test_fitting_everything_alone_is_accepted(out: Path) -> None:
    assert forge(out, lambda document: None) == []


def test_a_layer_in_another_stage(out: Path) -> None:
    found = forge(out, lambda document: moved(out, "layer-001", 0, document))
    for rank in (0, 1):
        place = f"stage-00-of-02/rank-{rank:02d}-of-02/layer-001.safetensors"
        right = f"stage-01-of-02/rank-{rank:02d}-of-02/layer-001.safetensors"
        assert any(said.startswith(place) and f"whose place is {right}" in said for said in found)
        assert any(
            said.startswith(place) and "its header says stage 0, in this place it must be 1" in said
            for said in found
        )


def test_files_of_two_stages_exchanged(out: Path) -> None:
    """In their folders alone; their headers tell."""
    one, other = (
        out / f"stage-{stage:02d}-of-02/rank-00-of-02/{unit}.safetensors"
        for stage, unit in ((0, "layer-000"), (1, "layer-001"))
    )
    spare = out / "spare"
    os.replace(one, spare)
    os.replace(other, one)
    os.replace(spare, other)
    found = [str(finding) for finding in verify(out).findings]
    assert any(said.startswith("stage-00-of-02/rank-00-of-02/layer-000") for said in found)
    assert any(said.startswith("stage-01-of-02/rank-00-of-02/layer-001") for said in found)


def test_two_folders_of_stages_exchanged(out: Path) -> None:
    os.replace(out / "stage-00-of-02", out / "spare")
    os.replace(out / "stage-01-of-02", out / "stage-00-of-02")
    os.replace(out / "spare", out / "stage-01-of-02")
    found = {finding.path for finding in verify(out).findings}
    assert {shard["path"] for shard in trees.manifest_of(out)["shards"]} <= found


def test_a_layer_in_another_stage_and_said_to_be_there(out: Path) -> None:
    """A partition, in order, and all of one piece: only the rule of the page tells."""

    def change(document: Document) -> None:
        moved(out, "layer-001", 0, document)
        stages(document)[0]["layers"] = [0, 1]
        stages(document)[1]["layers"] = [2]

    found = forge(out, change)
    assert any("says that layer 1 is in the stages 0, it must be in stage 1 alone" in said for said in found)


def test_the_embeddings_in_the_last_stage(out: Path) -> None:
    def change(document: Document) -> None:
        moved(out, "embed", 1, document)
        stages(document)[0]["has"] = ["common"]
        stages(document)[1]["has"] = ["embed", "head"]

    found = forge(out, change)
    assert any("says that embed is in the stages 1, it must be in stage 0 alone" in said for said in found)
    assert any(said.startswith("stage-01-of-02/rank-00-of-02/embed.safetensors") for said in found)


SAID: dict[str, tuple[Callable[[Document], object], str]] = {
    "a layer in two stages": (
        lambda d: stages(d)[0]["layers"].append(1),
        "that layer 1 is in the stages 0, 1, it must be in stage 1 alone",
    ),
    "a layer in no stage": (
        lambda d: stages(d)[1]["layers"].remove(2),
        "that layer 2 is in no stage, it must be in stage 1 alone",
    ),
    "head in two stages": (
        lambda d: stages(d)[0]["has"].append("head"),
        "that head is in the stages 0, 1, it must be in stage 1 alone",
    ),
    "common in none": (
        lambda d: stages(d)[0]["has"].remove("common"),
        "that common is in no stage, it must be in stage 0 alone",
    ),
    "a layer that the model has not": (
        lambda d: stages(d)[1]["layers"].append(3),
        "parallel.stages that are not those of the format",
    ),
    "layers in another order": (
        lambda d: stages(d)[1]["layers"].reverse(),
        "parallel.stages that are not those of the format",
    ),
    "something more": (
        lambda d: stages(d)[1]["has"].append("draft"),
        "parallel.stages that are not those of the format",
    ),
    "stages in another order": (
        lambda d: stages(d).reverse(),
        "that layer 0 is in the stages 1, it must be in stage 0 alone",
    ),
    "version 1": (
        lambda d: d.update(format_version=1),
        "format_version 1 for attn_tp None, pp 2 and slots None",
    ),
    "more stages than layers": (
        lambda d: d["parallel"].update(pp=4, stages=[{"layers": [n], "has": []} for n in range(4)]),
        "parallel.pp 4, but the model has 3 layers",
    ),
    "no stages": (
        lambda d: [d["parallel"].pop(key) for key in ("pp", "stages")],
        "format_version 2 for attn_tp None, pp 1 and slots None",
    ),
    "embeddings in head": (
        lambda d: unit(d, "head")["tensors"].append(unit(d, "embed")["tensors"][0]),
        "unit head has language_model.model.embed_tokens.weight, which is of embed",
    ),
    "a tensor of a layer in another": (
        lambda d: unit(d, "layer-001")["tensors"].append(unit(d, "layer-000")["tensors"].pop()),
        ", which is of layer-000",
    ),
    "head is called top": (
        lambda d: (
            [each.update(name="top") for each in d["units"] if each["name"] == "head"]
            + [each.update(unit="top") for each in d["shards"] if each["unit"] == "head"]
        ),
        "unit top has language_model.lm_head.weight, which is of head",
    ),
}


def unit(document: Document, name: str) -> Document:
    """A unit's entry."""
    return next(unit for unit in document["units"] if unit["name"] == name)


@pytest.mark.parametrize("name", SAID)
def test_what_a_manifest_must_not_say(out: Path, name: str) -> None:
    change, said = SAID[name]
    assert any(said in each for each in forge(out, change))


@pytest.mark.parametrize("pp", [{"pp": 2}, {"pp": 1}, {"stages": []}, {"pp": 0}])
def test_pp_and_stages_that_do_not_go_together(out: Path, pp: Document) -> None:
    from marlin_convert.errors import OutputError

    with pytest.raises(OutputError, match=r"pp|stages"):
        forge(out, lambda d: d["parallel"].update({"stages": stages(d)[:1]} | pp))


@pytest.mark.parametrize(("key", "value"), [("stage", "0"), ("stage", None), ("pp", "3"), ("pp", None)])
def test_what_a_header_must_not_say(out: Path, key: str, value: str | None) -> None:
    def change(header: Document) -> None:
        header["__metadata__"].pop(key)
        if value is not None:
            header["__metadata__"][key] = value

    path = "stage-01-of-02/rank-01-of-02/layer-002.safetensors"
    trees.rewrite_header(out / path, change)
    right = {"stage": 1, "pp": 2}[key]
    found = forge(out, lambda document: None)
    assert any(
        said.startswith(path) and f"its header says {key} {value}, in this place it must be {right}" in said
        for said in found
    )


def test_a_copy_of_the_embeddings_in_the_last_stage(out: Path) -> None:
    """Read by nobody, and proven by nobody: a file that the manifest lists once more."""

    def change(document: Document) -> None:
        for rank in (0, 1):
            shard = next(s for s in document["shards"] if s["unit"] == "embed" and s["rank"] == rank)
            path = shard["path"].replace("stage-00", "stage-01")
            shutil.copy(out / shard["path"], out / path)
            document["shards"].append(shard | {"path": path})

    found = forge(out, change)
    assert any("unit embed has shards of the ranks [0, 0, 1, 1], not of [0, 1]" in said for said in found)
    assert any(said.startswith("stage-01-of-02/rank-01-of-02/embed.safetensors") for said in found)


def test_a_tensor_that_no_unit_has(out: Path) -> None:
    """In a shard and its header, and not in what each shard of the unit has."""
    found = forge(out, lambda document: unit(document, "head")["tensors"].pop())
    assert any("that it has language_model.model.norm.weight, which head has not" in said for said in found)


def test_a_manifest_of_a_rank_of_another_stage(out: Path) -> None:
    one, other = (f"stage-{stage:02d}-of-02/rank-00-of-02/manifest.json" for stage in (0, 1))
    shutil.copy(out / one, out / other)
    whole = trees.manifest_of(out)
    listed = {file["path"]: file for file in whole["files"]}
    listed[other].update(size=listed[one]["size"], digest=listed[one]["digest"])
    (out / "manifest.json").write_bytes(trees.seal(whole))
    found = [str(finding) for finding in verify(out).findings]
    assert any(
        said.startswith(other) and "its layers are not what the whole manifest says" in said for said in found
    )
