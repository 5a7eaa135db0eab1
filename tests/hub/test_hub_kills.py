"""A conversion from the hub that is killed, and the disk it takes."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hub.setting import Done, Published, differences, hub_environment
from hub.watch import Watch

pytestmark = pytest.mark.slow

Run = Callable[..., Done]
#: bytes a second, so that a run takes some seconds
RATE = 2e6
#: hub.measure in tests/support does twenty
KILLS = 4


def start(published: Published, home: Path, out: Path) -> subprocess.Popen[bytes]:
    """A conversion under way."""
    command = [
        sys.executable,
        "-m",
        "marlin_convert",
        "convert",
        published.repo,
        str(out),
        "--tp",
        "2",
        "--free-source",
    ]
    environment = hub_environment(published.proxy.endpoint, home)
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def test_killed_at_random_moments(run: Run, published: Published, expected: Path, tmp_path: Path) -> None:
    moments = random.Random(20261129)
    out = tmp_path / "out"
    for _ in range(KILLS):
        published.proxy.rate = RATE
        process = start(published, tmp_path / "home", out)
        time.sleep(moments.uniform(1.0, 4.0))
        process.kill()
        process.wait()
    published.proxy.rate = None
    done = run("convert", published.repo, out, "--tp", 2, "--free-source")
    assert done.code == 0, done.stderr
    assert differences(out, expected) == []
    assert not (out / ".work").exists()


def test_interrupted_it_stops_at_once_and_continues(
    run: Run, published: Published, expected: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    published.proxy.rate = 3e5
    process = start(published, tmp_path / "home", out)
    staging = out / ".work" / "staging"
    for _ in range(600):
        if any(staging.rglob("*.incomplete")):
            break
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 143
    published.proxy.rate = None
    assert run("convert", published.repo, out, "--tp", 2, "--free-source").code == 0
    assert differences(out, expected) == []


def test_no_more_than_three_files_are_staged(
    run: Run, published: Published, expected: Path, tmp_path: Path
) -> None:
    published.proxy.rate = RATE
    out = tmp_path / "out"
    with Watch(out) as watch:
        assert run("convert", published.repo, out, "--tp", 2, "--free-source").code == 0
    sizes = sorted(path.stat().st_size for path in published.folder.glob("*.safetensors"))
    assert watch.looks > 20
    assert 0 < watch.files <= 3
    small = 64 << 10  # the client's own records of what it fetched
    assert watch.staged <= sum(sizes[-3:]) + small
    assert differences(out, expected) == []
