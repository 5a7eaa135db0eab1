"""An object store of the tests' own, with a proxy in front of it, and the command line pointed at that."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("boto3", reason="boto3 is not installed: the extra s3")
pytest.importorskip("swift", reason="OpenStack Swift, the object store of these tests, is not installed")
from s3.proxy import Proxy
from s3.server import KEY, REGION, SECRET, Store


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """The servers."""
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


def environment(endpoint: str, home: Path) -> dict[str, str]:
    """Endpoint and credentials, and no configuration of the machine's own."""
    return {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_REGION": REGION,
        "AWS_CONFIG_FILE": str(home / "no-config"),
        "AWS_SHARED_CREDENTIALS_FILE": str(home / "no-credentials"),
        "AWS_EC2_METADATA_DISABLED": "true",
    }


@pytest.fixture
def bucket(store: Store, request: pytest.FixtureRequest) -> str:
    """An empty bucket of the test's own."""
    name = "b" + re.sub(r"[^a-z0-9]+", "-", request.node.name.lower())[:50].rstrip("-")
    store.client().create_bucket(Bucket=name)
    return name
