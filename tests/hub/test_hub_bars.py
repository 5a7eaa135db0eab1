"""On a terminal: one bar for what is fetched, one for what is converted, and none of the hub client's own."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from hub.setting import Published, hub_environment

pytestmark = pytest.mark.slow


def on_a_terminal(published: Published, home: Path, *arguments: object, env: dict[str, str]) -> str:
    """What a command shows on a terminal that is its stderr."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 100))
    command = [sys.executable, "-m", "marlin_convert", *map(str, arguments)]
    environment = hub_environment(published.proxy.endpoint, home) | env
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=theirs)
    os.close(theirs)
    shown = bytearray()
    try:
        while piece := os.read(ours, 4096):
            shown += piece
    except OSError:
        pass  # the other end is closed
    os.close(ours)
    assert process.wait(60) == 0
    return shown.decode()


def test_two_bars(published: Published, tmp_path: Path) -> None:
    command = ("convert", published.repo, tmp_path / "out", "--tp", 2, "--layers", "0", "--free-source")
    shown = on_a_terminal(published, tmp_path / "home", *command, env={})
    assert "downloading: 100%" in shown
    assert "writing manifest and documents: 100%" in shown
    assert ".safetensors" not in shown


def test_without_the_hubs_bars(published: Published, tmp_path: Path) -> None:
    command = ("convert", published.repo, tmp_path / "out", "--tp", 2, "--layers", "0", "--free-source")
    shown = on_a_terminal(published, tmp_path / "home", *command, env={"HF_HUB_DISABLE_PROGRESS_BARS": "1"})
    assert "downloading" not in shown
    assert "writing manifest and documents: 100%" in shown
