"""What `import marlin_convert` offers: dir() and help() see all of it, nothing is loaded early."""

from __future__ import annotations

import inspect
import pydoc
import subprocess
import sys

import pytest

import marlin_convert
from marlin_convert import errors

NAMES = {
    "Converted",
    "Differences",
    "Downloaded",
    "Finding",
    "KernelReport",
    "LoadedRank",
    "PlanReport",
    "Point",
    "Restored",
    "Shards",
    "Verification",
    "ConvertError",
    "HubOptions",
    "MachineError",
    "OutputError",
    "SourceError",
    "UsageError",
    "convert",
    "diff",
    "download",
    "load_rank",
    "open_shards",
    "plan",
    "reshard",
    "restore",
    "verify",
    "verify_kernel",
}


def test_every_public_name_can_be_had_and_is_seen() -> None:
    assert set(marlin_convert.__all__) == NAMES
    assert {*NAMES, "__version__"} <= set(dir(marlin_convert))
    for name in NAMES:
        assert inspect.getdoc(getattr(marlin_convert, name)), name
    assert marlin_convert.OutputError is errors.OutputError
    assert marlin_convert.__version__ == "0.2.0.dev0"
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        marlin_convert.nonsense  # noqa: B018  # asking for it is the test


def test_help_shows_every_function_with_its_parameters() -> None:
    text = pydoc.plain(pydoc.render_doc(marlin_convert))
    functions = "\n" + text.split("\nFUNCTIONS\n")[1].split("\nDATA\n")[0]
    verbs = {name for name in NAMES if name[0].islower()}
    for name in verbs:
        assert f"\n    {name}(" in functions, name
    classes = text.split("\nCLASSES\n")[1].split("\nFUNCTIONS\n")[0]
    for name in NAMES - verbs:
        assert name in classes, name


def test_help_without_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None; import pydoc, marlin_convert;"
        "print('load_rank(' in pydoc.plain(pydoc.render_doc(marlin_convert)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"
