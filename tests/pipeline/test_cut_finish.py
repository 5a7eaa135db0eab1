"""What comes after the units, and --overwrite, cut off at every one of their calls: the same command
continues to the same tree, and no document is ever there in part.
"""

from __future__ import annotations

import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

import trees
from checkpoints import Checkpoint
from forks import CHANGING, Done, Forks

pytestmark = pytest.mark.slow

UNITS = 5


def convert(
    forks: Forks, source: Path, out: Path, *options: object, fault: dict[str, object] | None = None
) -> Done:
    """With one thread: the calls come in the same order each time."""
    return forks.run("convert", source, out, "--tp", 2, "--threads", 1, *options, fault=fault)


@pytest.fixture(scope="module")
def all_recorded(forks: Forks, tiny: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An OUT whose units are all made and in which no document has its name."""
    out = tmp_path_factory.mktemp("recorded") / "out"
    counts = convert(forks, tiny.folder, out).counts
    documents = [path for path in out.rglob("*") if path.is_file() and path.suffix != ".safetensors"]
    shutil.rmtree(out)
    number = counts["replace"] - len(documents)
    fault: dict[str, object] = {"call": "replace", "number": number, "action": "SIGKILL"}
    assert convert(forks, tiny.folder, out, fault=fault).code == -signal.SIGKILL
    assert len(list((out / ".work" / "units").glob("*.json"))) == UNITS
    assert not (out / "manifest.json").exists()
    return out


def every_call(counts: dict[str, int], step: int) -> Iterator[tuple[str, int]]:
    """Each call of each name, or every `step`-th."""
    for call in CHANGING:
        yield from ((call, number) for number in range(0, counts[call], step))


def assert_documents_are_whole(out: Path, undisturbed: dict[str, bytes]) -> None:
    """Whatever has the name of a document is all of it."""
    for name, data in trees.tree(out).items():
        if not name.startswith(".work"):
            assert data == undisturbed[name], name


@pytest.mark.parametrize(
    ("action", "step"),
    [
        ("SIGKILL", 9),
        ("ENOSPC", 9),
        pytest.param("SIGKILL", 1, marks=pytest.mark.campaign),
        pytest.param("ENOSPC", 1, marks=pytest.mark.campaign),
    ],
)
def test_finish_cut_at_each_call(
    forks: Forks, tiny: Checkpoint, tiny_tp2: Path, all_recorded: Path, tmp_path: Path, action: str, step: int
) -> None:
    undisturbed = trees.tree(tiny_tp2)
    out = tmp_path / "out"
    shutil.copytree(all_recorded, out)
    counts = convert(forks, tiny.folder, out).counts
    assert trees.tree(out) == undisturbed
    assert counts["replace"] > 10
    assert counts["preadv"] == 0, "no unit is made again"
    for call, number in every_call(counts, step):
        shutil.rmtree(out)
        shutil.copytree(all_recorded, out)
        fault: dict[str, object] = {"call": call, "number": number, "action": action}
        broken = convert(forks, tiny.folder, out, fault=fault)
        if action == "SIGKILL":
            assert broken.code == -signal.SIGKILL, (call, number)
        else:
            assert broken.code in (0, 4), (call, number, broken.stderr)
        assert_documents_are_whole(out, undisturbed)
        again = convert(forks, tiny.folder, out)
        assert (again.code, again.stderr) == (0, ""), (call, number)
        assert trees.tree(out) == undisturbed, (call, number)


@pytest.mark.parametrize("step", [9, pytest.param(1, marks=pytest.mark.campaign)])
def test_overwriting_cut_at_each_call(
    forks: Forks, tiny: Checkpoint, tiny_tp2: Path, tmp_path: Path, step: int
) -> None:
    """Another conversion is replaced by one of a single layer: at no time does a manifest stand for what is
    gone, and the same command goes on.
    """
    line = ("--layers", 1, "--overwrite", "--yes")
    wanted = tmp_path / "wanted"
    assert convert(forks, tiny.folder, wanted, "--layers", 1).code == 0
    expected, out = trees.tree(wanted), tmp_path / "out"
    shutil.copytree(tiny_tp2, out)
    counts = convert(forks, tiny.folder, out, *line).counts
    assert trees.tree(out) == expected
    for call, number in every_call(counts, step):
        shutil.rmtree(out)
        shutil.copytree(tiny_tp2, out)
        fault: dict[str, object] = {"call": call, "number": number, "action": "SIGKILL"}
        broken = convert(forks, tiny.folder, out, *line, fault=fault)
        assert broken.code == -signal.SIGKILL, (call, number)
        if (out / "manifest.json").exists() and forks.run("verify", out).code == 0:
            # a file that is only locked may be left
            left = {name: data for name, data in trees.tree(out).items() if name != ".work/lock"}
            assert left in (trees.tree(tiny_tp2), expected), (call, number)
        again = convert(forks, tiny.folder, out, *line)
        assert again.code == 0, (call, number, again.stderr)
        assert again.stderr == "" or again.stderr.startswith("--overwrite removes "), (call, number)
        assert trees.tree(out) == expected, (call, number)
