"""docs/architecture.md is true: all modules are on its map, imports go up only, what it names is there."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "convert" / "marlin_convert"
PAGE = (ROOT / "docs" / "architecture.md").read_text()
#: where torch is imported, by the page
TORCH = ("kernels/", "checks/kernel/", "engines/", "bench/", "doctor/", "extras.py")


def lines_of_the_map() -> dict[str, int]:
    """Modules and folders of the package, and on which line each stands."""
    block = re.search(r"(?:^    .*\n)+", PAGE, re.MULTILINE)
    assert block is not None
    names = [re.split(r"   +|(?<=/) {2,}(?=[a-z]+ )", line.strip())[0] for line in block[0].splitlines()]
    return {name.strip("/"): number for number, line in enumerate(names) for name in line.split()}


def modules() -> Iterator[tuple[Path, ast.Module]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        yield path.relative_to(PACKAGE), ast.parse(path.read_text())


def imported(tree: ast.Module) -> Iterator[str]:
    """Full names of what a module imports, wherever in it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_every_module_is_on_the_map() -> None:
    there = {path.name.removesuffix(".py") for path in PACKAGE.iterdir() if path.name[0] not in "_."}
    assert there - {"py.typed"} == lines_of_the_map().keys()


def test_imports_go_up() -> None:
    at = lines_of_the_map()
    wrong = [
        (str(path), name)
        for path, tree in modules()
        if (own := path.parts[0].removesuffix(".py")) in at
        for name in imported(tree)
        if name.startswith("marlin_convert.") and at[name.split(".")[1]] > at[own]
    ]
    assert wrong == []


def test_torch_is_imported_where_the_page_says() -> None:
    using = {
        str(path) for path, tree in modules() if any(name.split(".")[0] == "torch" for name in imported(tree))
    }
    assert {name for name in using if not name.startswith(TORCH)} == set()
    assert {prefix for prefix in TORCH if any(name.startswith(prefix) for name in using)} == set(TORCH)


def test_checks_derive_anew() -> None:
    """By their own imports: neither the cuts nor the plan of what is checked."""
    for path, tree in modules():
        if path.parts[0] == "checks":
            used = {name.split(".")[1] for name in imported(tree) if name.startswith("marlin_convert.")}
            assert used.isdisjoint({"slicing", "planning", "pipeline"}), path


def test_what_is_named_beside_a_file_is_in_it() -> None:
    """`file.py`, `one` and `two`; `Class.method` too."""
    found = re.findall(r"`([\w/]+\.py)`, (`[\w.]+`(?:(?:, | and )`[\w.]+`(?!\.py))*)", PAGE)
    assert len(found) > 8
    for file, names in found:
        tree = ast.parse((PACKAGE / file).read_text())
        there = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        for name in re.findall(r"`([\w.]+)`", names):
            assert set(name.split(".")) <= there, (file, name)
