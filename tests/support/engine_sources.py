"""Functions and classes out of an engine's wheel, without installing or importing it: parts of its source are
run with what they need given.
"""

from __future__ import annotations

import ast
import os
import zipfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

#: where `make engines` puts the wheels; an unpacked wheel PACKAGE-VERSION/ serves as well
WHEELS = Path(os.environ.get("ENGINE_WHEELS", Path(__file__).resolve().parents[2] / ".engines"))


def source(package: str, version: str, path: str) -> str | None:
    """A file of a package, or None where there is neither its wheel nor the unpacked wheel."""
    unpacked = WHEELS / f"{package}-{version}" / path
    if unpacked.is_file():
        return unpacked.read_text()
    for wheel in WHEELS.glob(f"{package}-{version}-*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            return archive.read(path).decode()
    return None


def parts(text: str, names: Collection[str], given: Mapping[str, Any]) -> dict[str, Any]:
    """What `names` are at the top of a source, run with `given`. Classes lose their bases, and
    `CLASS.METHOD` keeps one method of a class.
    """
    methods: dict[str, set[str]] = {}
    for name in names:
        owner, _, method = name.partition(".")
        methods.setdefault(owner, set()).update({method} - {""})
    kept: list[ast.stmt] = []
    for node in ast.parse(text).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name in methods:
            if isinstance(node, ast.ClassDef) and (own := methods[node.name]):
                node.bases = []
                node.body = [one for one in node.body if getattr(one, "name", "") in own]
            kept.append(node)
    found = dict(given)
    future = ast.parse("from __future__ import annotations").body
    exec(compile(ast.Module([*future, *kept], []), "engine", "exec"), found)
    missing = methods.keys() - found.keys()
    assert not missing, f"the engine's source has no {missing}"
    return found


def defined(text: str) -> set[str]:
    """Functions and classes at the top of a source, and methods as CLASS.METHOD."""
    found: set[str] = set()
    for node in ast.parse(text).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{one.name}" for one in node.body if isinstance(one, ast.FunctionDef)}
    return found
