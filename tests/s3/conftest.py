"""An object store of the tests' own, with a proxy in front of it, and the command line pointed at that."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from checkpoints import Checkpoint
from s3.proxy import Proxy
from s3.server import Store
from s3.setting import Published, environment


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """The servers."""
    pytest.importorskip("boto3", reason="boto3 is not installed: it is in the extra s3")
    pytest.importorskip("swift", reason="OpenStack Swift, the object store of these tests, is not installed")
    running = Store(tmp_path_factory.mktemp("store"))
    try:
        running.start()
        yield running
    finally:
        running.stop()


@pytest.fixture(scope="session")
def _proxy(store: Store) -> Iterator[Proxy]:
    running = Proxy(store.endpoint)
    running.start()
    try:
        yield running
    finally:
        running.stop()


@pytest.fixture
def proxy(_proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """The proxy without faults and with nothing counted, and an environment that leads to it alone."""
    _proxy.reset()
    for name, value in environment(_proxy.endpoint, tmp_path).items():
        monkeypatch.setenv(name, value)
    yield _proxy
    _proxy.reset()


@pytest.fixture
def bucket(store: Store, request: pytest.FixtureRequest) -> str:
    """An empty bucket of the test's own."""
    name = "b" + re.sub(r"[^a-z0-9]+", "-", request.node.name.lower())[:50].rstrip("-")
    store.client().create_bucket(Bucket=name)
    return name


@pytest.fixture(scope="session")
def published_once(
    store: Store, _proxy: Proxy, tiny: Checkpoint, tmp_path_factory: pytest.TempPathFactory
) -> Published:
    """`tiny`, uploaded. Not to be changed."""
    made = Published("checkpoints", "models/tiny one", tiny.folder, store, _proxy)
    store.client().create_bucket(Bucket=made.bucket)
    made.upload()
    return made


@pytest.fixture
def published(published_once: Published, proxy: Proxy) -> Published:
    """The same, with nothing counted."""
    return published_once


@pytest.fixture
def own(bucket: str, store: Store, proxy: Proxy, tiny: Checkpoint, tmp_path: Path) -> Published:
    """The same again, to be changed."""
    made = Published(bucket, "x", Path(shutil.copytree(tiny.folder, tmp_path / "uploaded")), store, proxy)
    made.upload()
    return made
