"""A published checkpoint on a hub of the tests' own, and the command line pointed at it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from checkpoints import Checkpoint

pytest.importorskip("olah")
from hub.proxy import Proxy
from hub.server import Hub
from hub.setting import CARD, REPO, Done, Published, run_command


@pytest.fixture(scope="session")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    """The servers."""
    if shutil.which("git") is None:
        pytest.skip("git makes the repository")
    running = Hub(tmp_path_factory.mktemp("hub"))
    try:
        running.start()
        yield running
    finally:
        running.stop()


@pytest.fixture(scope="session")
def published_once(
    hub: Hub, tiny: Checkpoint, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Published]:
    """`tiny`, with a licence in its card, on the hub."""
    folder = shutil.copytree(tiny.folder, tmp_path_factory.mktemp("published") / "checkpoint")
    (folder / "README.md").write_text(CARD)
    commit = hub.publish(REPO, folder)
    proxy = Proxy(hub.endpoint)
    proxy.start()
    try:
        yield Published(REPO, commit, folder, hub, proxy)
    finally:
        proxy.stop()


@pytest.fixture
def published(published_once: Published) -> Iterator[Published]:
    """The same, without faults and with nothing counted."""
    published_once.proxy.reset()
    yield published_once
    published_once.proxy.reset()


@pytest.fixture(scope="session")
def expected(published_once: Published, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The conversion of the folder, tp 2."""
    from marlin_convert.pipeline.run import convert

    out = tmp_path_factory.mktemp("expected") / "out"
    convert(str(published_once.folder), out, tp=2, threads=1)
    return out


@pytest.fixture
def run(published: Published, tmp_path: Path) -> Callable[..., Done]:
    """Run a command line against the hub, with a HF_HOME of its own; see `run_command`."""

    def call(*arguments: object, **more: Any) -> Done:
        return run_command(published.proxy.endpoint, tmp_path / "home", *arguments, **more)

    return call
