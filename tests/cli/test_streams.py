"""Exit codes are right even when nothing can be printed: standard output or error full, closed, or closed by
its reader.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import trees
from checkpoints import Checkpoint

COMMAND = [sys.executable, "-m", "marlin_convert"]
NO_ERRORS = ["2>/dev/full", "2>&-"]
NO_RESULT = [">/dev/full", ">&-"]


def run(redirect: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """The command under a shell that redirects."""
    line = shlex.join([*COMMAND, *map(str, arguments)])
    return subprocess.run(
        ["sh", "-c", f"{line} {redirect}"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("redirect", [*NO_ERRORS, ">&- 2>&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("verify", "{damaged}"), 1),
        (("plan", "{source}", "--tp", "3", "--ep", "2"), 2),
        (("convert", "--nothing"), 2),
        (("plan", "{damaged}", "--tp", "2"), 3),
        (("convert", "{source}", "/proc/out", "--tp", "2"), 4),
    ],
)
def test_a_failure_keeps_its_code_where_errors_cannot_be_said(
    tiny: Checkpoint, copied: Path, redirect: str, arguments: tuple[str, ...], code: int
) -> None:
    (copied / "manifest.json").write_text("{")
    done = run(redirect, *(argument.format(source=tiny.folder, damaged=copied) for argument in arguments))
    assert (done.returncode, done.stderr) == (code, "")


@pytest.mark.parametrize("redirect", [*NO_ERRORS, "<&-", "2>&- <&-"])
def test_a_success_stays_one_and_prints_its_result(tiny_tp2: Path, redirect: str) -> None:
    done = run(redirect, "inspect", tiny_tp2)
    assert (done.returncode, done.stderr) == (0, "")
    assert "ranks" in done.stdout


@pytest.mark.parametrize("redirect", NO_RESULT)
@pytest.mark.parametrize(
    "arguments",
    [
        ("inspect", "{out}"),
        ("inspect", "{out}", "--json"),
        ("verify", "{out}"),
        ("verify", "{out}", "--json"),
        ("plan", "{source}", "--tp", "2"),
    ],
)
def test_a_result_that_cannot_be_printed_is_a_failure_of_the_machine(
    tiny: Checkpoint, tiny_tp2: Path, redirect: str, arguments: tuple[str, ...]
) -> None:
    done = run(redirect, *(argument.format(source=tiny.folder, out=tiny_tp2) for argument in arguments))
    assert done.returncode == 4
    why = "No space left on device" if "full" in redirect else "Bad file descriptor"
    said = f"error: the result could not be written to standard output: {why}; run the same command again\n"
    assert done.stderr == said


@pytest.mark.parametrize("redirect", [">/dev/full", ">&-"])
@pytest.mark.parametrize("option", ["--version", "--help"])
def test_so_is_a_version_that_cannot_be_printed(redirect: str, option: str) -> None:
    done = run(redirect, option)
    assert done.returncode == 4
    assert done.stderr.startswith("error: ")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("redirect", [*NO_RESULT, "<&- >&- 2>&-"])
def test_no_shard_takes_the_place_of_a_closed_stream(
    tiny: Checkpoint, tiny_tp2: Path, tmp_path: Path, redirect: str
) -> None:
    """The result is lost, and what was converted is whole."""
    done = run(redirect, "convert", tiny.folder, tmp_path / "out", "--tp", 2, "--threads", 2)
    assert done.returncode == 4
    assert trees.tree(tmp_path / "out") == trees.tree(tiny_tp2)


def test_an_error_that_nobody_reads_keeps_its_code(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [*COMMAND, "plan", str(tmp_path), "--tp", "2"], stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    process.stderr.close()
    assert process.wait() == 3


@pytest.mark.parametrize("redirect", NO_ERRORS)
def test_nothing_is_removed_where_the_question_cannot_be_shown(
    tiny: Checkpoint, copied: Path, redirect: str
) -> None:
    before = trees.tree(copied, without=())
    done = run(redirect, "convert", tiny.folder, copied, "--tp", 4, "--overwrite")
    assert done.returncode == 2
    assert trees.tree(copied, without=()) == before


def test_what_a_library_prints_is_aside(capsys: pytest.CaptureFixture[str]) -> None:
    """Ray tells of a lost node on stdout, in colours, with pages of its state behind it."""
    from marlin_convert.cli import streams

    with streams.aside():
        print("\x1b[33m(raylet)\x1b[0m A node has gone.\n[state-dump] 1\n\n(raylet) A node has gone.")
        print("no end", end="")
    print("the result")
    assert capsys.readouterr() == ("the result\n", "note: (raylet) A node has gone.\n")
