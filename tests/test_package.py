"""What is installed works on its own: wheel and sdist, in a fresh environment outside the repository."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from checkpoints import Checkpoint

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
SCHEMAS = sorted(path.name for path in (ROOT / "schemas").iterdir())


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """dist/ with an sdist of the tree and a wheel built from that sdist."""
    pytest.importorskip("build")
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)],
        check=True,
        capture_output=True,
    )
    return folder


@pytest.fixture(scope="module")
def wheel_of_the_tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built without the detour."""
    pytest.importorskip("build")
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", str(folder), str(ROOT)],
        check=True,
        capture_output=True,
    )
    return next(folder.glob("*.whl"))


def names_in(wheel: Path) -> set[str]:
    """Files of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_wheel_has_all_it_needs(built: Path) -> None:
    names = names_in(next(built.glob("*.whl")))
    assert {f"marlin_convert/schemas/{name}" for name in SCHEMAS} <= names
    modules = {str(path.relative_to(ROOT / "convert")) for path in (ROOT / "convert").rglob("*.py")}
    assert modules == {name for name in names if name.endswith(".py")}
    assert not any(name.startswith(("tests/", "examples/")) for name in names)


def test_wheel_of_the_tree_is_that_of_the_sdist(built: Path, wheel_of_the_tree: Path) -> None:
    assert names_in(wheel_of_the_tree) == names_in(next(built.glob("*.whl")))


def test_sdist_has_sources_tests_and_schemas(built: Path) -> None:
    with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    for name in (
        "pyproject.toml",
        "README.md",
        "LICENSE",
        "CHANGELOG.md",
        "docs/converting.md",
        "Makefile",
        "tests/support/oracle.py",
        "examples/make_checkpoint.py",
    ):
        assert name in names
    assert {f"schemas/{name}" for name in SCHEMAS} <= names
    assert not any("__pycache__" in name or name.endswith(".pyc") for name in names)


def test_the_tests_of_the_sdist_collect(built: Path, tmp_path: Path) -> None:
    """All that they need is in it."""
    with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
        archive.extractall(tmp_path, filter="data")
    root = next(tmp_path.iterdir())
    line = [sys.executable, "-m", "pytest", "--collect-only", "-qq", "-p", "no:cacheprovider"]
    environment = os.environ | {"PYTHONPATH": str(root / "convert")}
    done = subprocess.run(line, capture_output=True, text=True, check=False, cwd=root, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    collected = {row.partition(":")[0] for row in done.stdout.splitlines() if row.startswith("tests/")}
    assert collected == {str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py")}


@pytest.fixture(scope="module")
def installed(
    built: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs the command of a fresh environment with the wheel in it; what it depends on comes from the
    environment of the tests.
    """
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, capture_output=True
    )
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(folder / "bin" / "python"),
        "install",
        "--no-deps",
        "--no-index",
        "--quiet",
    ]
    subprocess.run([*pip, str(next(built.glob("*.whl")))], check=True, capture_output=True)
    site = next(folder.glob("lib/python*/site-packages"))
    # Its own packages come first; an editable install of the tree is hidden since its .pth files are not read
    # this way.
    (site / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    clean = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}

    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        command = [str(folder / "bin" / "marlin-convert"), *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder, env=clean)

    where = [str(folder / "bin" / "python"), "-c", "import marlin_convert; print(marlin_convert.__file__)"]
    found = subprocess.run(where, capture_output=True, text=True, check=True, cwd=folder, env=clean).stdout
    assert found.startswith(str(folder))
    return run


def test_job_with_the_wheel(
    installed: Callable[..., subprocess.CompletedProcess[str]], tiny: Checkpoint, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    done = installed("plan", tiny.folder, out, "--tp", 2, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["source"]["tensors"] == len(tiny.tensors)
    done = installed("convert", tiny.folder, out, "--tp", 2)
    assert done.returncode == 0, done.stderr
    done = installed("verify", out, "--source", tiny.folder)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("exact: ")
    done = installed("inspect", out, "--json")
    assert json.loads(done.stdout)["complete"] is True


def test_version_is_the_same_everywhere(
    built: Path, installed: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    version = next(built.glob("*.whl")).name.split("-")[1]
    assert installed("--version").stdout == f"marlin-convert, version {version}\n"
