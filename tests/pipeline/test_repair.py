"""A finished output that has lost files is mended by the same command; --overwrite removes a conversion and nothing else."""

from __future__ import annotations

import filecmp
import shutil
from pathlib import Path

import pytest
from checkpoints import Checkpoint, make_small

from convert import convert, verify
from convert.errors import UsageError


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return make_small(tmp_path_factory.mktemp("repair") / "checkpoint", layers=2, experts=4)


@pytest.fixture(scope="module")
def whole(source: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("whole") / "out"
    convert(str(source.folder), out, tp=2)
    return out


def differing(one: Path, other: Path) -> list[str]:
    """Files that are not the same in two folders."""
    names = {str(path.relative_to(folder)) for folder in (one, other) for path in folder.rglob("*") if path.is_file()}
    return sorted(name for name in names if not ((one / name).exists() and filecmp.cmp(one / name, other / name, shallow=False)))


@pytest.mark.parametrize(
    ("lost", "made"),
    [
        (("rank-01-of-02/layer-001.safetensors",), 1),
        (("rank-00-of-02/top.safetensors", "common/common.safetensors"), 2),
        (("config.json", "rank-00-of-02/model.safetensors.index.json"), 0),
    ],
)
def test_lost_files_are_made_again_and_only_their_units(source: Checkpoint, whole: Path, tmp_path: Path, lost: tuple[str, ...], made: int) -> None:
    out = shutil.copytree(whole, tmp_path / "out")
    for name in lost:
        (out / name).unlink()
    report = convert(str(source.folder), out, tp=2)
    assert (report.made, report.found) == (made, 4 - made)
    assert differing(out, whole) == ["provenance.json"]
    assert verify(out, str(source.folder)).ok


def test_a_shortened_shard_is_made_again(source: Checkpoint, whole: Path, tmp_path: Path) -> None:
    out = shutil.copytree(whole, tmp_path / "out")
    shard = out / "rank-01-of-02/layer-000.safetensors"
    shard.write_bytes(shard.read_bytes()[:-4096])
    assert convert(str(source.folder), out, tp=2).made == 1
    assert differing(out, whole) == ["provenance.json"]


def test_without_its_digests_nothing_can_be_reused(source: Checkpoint, whole: Path, tmp_path: Path) -> None:
    from convert.errors import OutputError

    out = shutil.copytree(whole, tmp_path / "out")
    (out / "digests.bin").unlink()
    with pytest.raises(OutputError, match=r"digests\.bin is missing.*--overwrite"):
        convert(str(source.folder), out, tp=2)
    assert (out / "manifest.json").exists()


def test_overwrite_spares_a_file_that_is_not_of_a_conversion(source: Checkpoint, whole: Path, tmp_path: Path) -> None:
    out = shutil.copytree(whole, tmp_path / "out")
    (out / "note.txt").write_text("mine")
    before = sorted(path for path in out.rglob("*"))
    with pytest.raises(UsageError, match=r"1 files that are not of a conversion, such as note\.txt"):
        convert(str(source.folder), out, tp=1, overwrite=True)
    assert sorted(path for path in out.rglob("*")) == before
    (out / "note.txt").unlink()
    convert(str(source.folder), out, tp=1, overwrite=True)
    assert not (out / "rank-00-of-02").exists()
    assert verify(out, str(source.folder)).ok


def test_less_proof_than_there_is_is_fine_and_more_says_how(source: Checkpoint, whole: Path, tmp_path: Path) -> None:
    assert convert(str(source.folder), whole, tp=2, verify="none").made == 0
    out = tmp_path / "unproven"
    convert(str(source.folder), out, tp=2, verify="none")
    with pytest.raises(UsageError, match=r"made with --verify none; prove it with `marlin-convert verify"):
        convert(str(source.folder), out, tp=2)
