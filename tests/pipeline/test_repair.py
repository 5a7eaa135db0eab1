"""A finished output that has lost files is mended by the same command; --overwrite removes a conversion and
nothing else.
"""

from __future__ import annotations

import filecmp
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from checkpoints import Checkpoint, make_small
from marlin_convert import convert, verify
from marlin_convert.checkpoint import identify as module
from marlin_convert.checkpoint.identify import identify
from marlin_convert.checkpoint.source import open_source
from marlin_convert.errors import OutputError, SourceError, UsageError


@pytest.fixture(scope="module", autouse=True)
def _small_samples() -> Iterator[None]:
    """These files are so small that else all of them is sampled."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "SAMPLES", 2)
        yield


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
    names = {
        str(path.relative_to(folder))
        for folder in (one, other)
        for path in folder.rglob("*")
        if path.is_file()
    }
    return sorted(
        name
        for name in names
        if not ((one / name).exists() and filecmp.cmp(one / name, other / name, shallow=False))
    )


@pytest.mark.parametrize(
    ("lost", "made"),
    [
        (("rank-01-of-02/layer-001.safetensors",), 1),
        (("rank-00-of-02/top.safetensors", "common/common.safetensors"), 2),
        (("config.json", "rank-00-of-02/model.safetensors.index.json"), 0),
    ],
)
def test_lost_files_are_made_again_and_only_their_units(
    source: Checkpoint, whole: Path, tmp_path: Path, lost: tuple[str, ...], made: int
) -> None:
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
    out = shutil.copytree(whole, tmp_path / "out")
    (out / "digests.bin").unlink()
    with pytest.raises(OutputError, match=r"digests\.bin is damaged or missing.*--overwrite"):
        convert(str(source.folder), out, tp=2)
    assert (out / "manifest.json").exists()


def test_overwrite_spares_a_file_that_is_not_of_a_conversion(
    source: Checkpoint, whole: Path, tmp_path: Path
) -> None:
    out = shutil.copytree(whole, tmp_path / "out")
    (out / "note.txt").write_text("mine")
    before = sorted(path for path in out.rglob("*"))
    with pytest.raises(UsageError, match=r"1 file not of a conversion, such as note\.txt"):
        convert(str(source.folder), out, tp=1, overwrite=True)
    assert sorted(path for path in out.rglob("*")) == before
    (out / "note.txt").unlink()
    convert(str(source.folder), out, tp=1, overwrite=True)
    assert not (out / "rank-00-of-02").exists()
    assert verify(out, str(source.folder)).ok


def test_less_proof_than_there_is_is_fine_and_more_says_how(
    source: Checkpoint, whole: Path, tmp_path: Path
) -> None:
    assert convert(str(source.folder), whole, tp=2, verify="none").made == 0
    out = tmp_path / "unproven"
    convert(str(source.folder), out, tp=2, verify="none")
    with pytest.raises(UsageError, match=r"made with --verify none; prove it with `marlin-convert verify"):
        convert(str(source.folder), out, tp=2)


def damaged(source: Checkpoint, folder: Path) -> tuple[Path, str, str]:
    """A copy of the source with one wrong bit in an expert, where no sample looks; the file and the
    tensor.
    """
    copy = shutil.copytree(source.folder, folder / "damaged")
    opened = open_source(str(copy))
    before = identify(opened)
    name = next(
        name
        for name in opened.tensors
        if "layers.1." in name and name.endswith("experts.2.up_proj.weight_packed")
    )
    tensor = opened.tensors[name]
    whole = (copy / tensor.file).read_bytes()
    for at in range(tensor.entry.offset, tensor.entry.offset + tensor.entry.size, 512):
        (copy / tensor.file).write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        if identify(opened) == before:
            return copy, tensor.file, name
    raise AssertionError("the sample is all of the tensor")


def test_what_is_made_again_must_come_of_the_same_bytes(
    source: Checkpoint, whole: Path, tmp_path: Path
) -> None:
    """The other rank's good file is still there, and so is what tells that the source is not what it was."""
    bad, file, name = damaged(source, tmp_path)
    out = shutil.copytree(whole, tmp_path / "out")
    (out / "rank-01-of-02/layer-001.safetensors").unlink()
    for _ in range(2):  # the second time there is no manifest any more
        with pytest.raises(
            SourceError,
            match=f"{re.escape(file)}: {re.escape(name)} is not what .* was made from.*fetch the file again",
        ):
            convert(str(bad), out, tp=2)
        assert filecmp.cmp(
            out / "rank-00-of-02/layer-001.safetensors",
            whole / "rank-00-of-02/layer-001.safetensors",
            shallow=False,
        )
        assert not (out / "rank-01-of-02/layer-001.safetensors").exists()
    convert(str(source.folder), out, tp=2)
    assert differing(out, whole) == ["provenance.json"]


def test_a_damaged_source_is_not_the_outputs_fault(source: Checkpoint, whole: Path, tmp_path: Path) -> None:
    bad, file, name = damaged(source, tmp_path)
    found = [str(finding) for finding in verify(whole, str(bad)).findings]
    assert f"source/digests.bin: the kept digest of {name} is not that in {file}" in found
    other = next(line for line in found if not line.startswith("source/"))
    assert (
        f"weight_packed differs from the source, but not from the digest that OUT keeps of it: {file} of the"
        " source may be damaged" in other
    )
    assert len(found) == 2


@pytest.mark.parametrize("name", ["digests.bin", "source/digests.bin"])
def test_damaged_digests_are_no_shards_fault(
    source: Checkpoint, whole: Path, tmp_path: Path, name: str
) -> None:
    out = shutil.copytree(whole, tmp_path / "out")
    data = bytearray((out / name).read_bytes())
    data[len(data) // 2] ^= 1
    (out / name).write_bytes(data)
    assert {finding.path for finding in verify(out, str(source.folder)).findings} == {name}
    if name == "digests.bin":
        assert [finding.path for finding in verify(out).findings] == [name]
    else:
        with pytest.raises(
            OutputError, match=r"digests\.bin is damaged.*give --source; to mend it .*--overwrite"
        ):
            verify(out)
    (out / "rank-01-of-02/layer-001.safetensors").unlink()
    with pytest.raises(OutputError, match=rf"{re.escape(name)} is damaged.*--overwrite"):
        convert(str(source.folder), out, tp=2)
    convert(str(source.folder), out, tp=2, overwrite=True)
    assert differing(out, whole) == ["provenance.json"]


def test_without_a_manifest_only_overwrite_helps(source: Checkpoint, whole: Path, tmp_path: Path) -> None:
    out = shutil.copytree(whole, tmp_path / "out")
    (out / "manifest.json").unlink()
    with pytest.raises(UsageError, match=r"no manifest\.json; use --overwrite"):
        convert(str(source.folder), out, tp=2)
    convert(str(source.folder), out, tp=2, overwrite=True)
    assert differing(out, whole) == ["provenance.json"]
