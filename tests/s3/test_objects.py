"""Objects in a real store, through a proxy that spoils answers: listed, read, written, removed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from marlin_convert.errors import MachineError, SourceError, UsageError
from marlin_convert.storage import object_errors, uploads
from marlin_convert.storage.objects import Location, Objects, StoredObject
from s3.proxy import Fault, Proxy, Request
from s3.server import SECRET, Store

#: minutes of requests that are refused, cut and slow; what converts from a store is in test_from_objects
pytestmark = pytest.mark.campaign


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_errors, "PAUSES", (0.01,) * 9)


@pytest.fixture
def objects(proxy: Proxy, bucket: str) -> Objects:
    """Below a prefix, with others beside it."""
    return Objects(Location(bucket, "some/prefix"))


def counted(size: int) -> bytes:
    """Bytes that tell where they stand."""
    return b"".join(i.to_bytes(4, "big") for i in range(-(-size // 4)))[:size]


def put(objects: Objects, name: str, data: bytes) -> StoredObject:
    """An object that is there."""
    assert objects.put(name, data)
    found = objects.head(name)
    assert found is not None
    return found


def test_listing(objects: Objects, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    client, bucket = store.client(), objects.location.bucket
    keys = ["some/prefix/", "some/prefix/a b+ü", "some/prefix/deep/er/c", "some/prefix-not/d", "e"]
    for i, key in enumerate(keys):
        client.put_object(Bucket=bucket, Key=key, Body=b"x" * i)
    found, folders = objects.list()
    assert [(each.name, each.size) for each in found.values()] == [("a b+ü", 1)]
    assert folders == ("deep",)
    assert found["a b+ü"].etag == client.head_object(Bucket=bucket, Key=keys[1])["ETag"]
    assert list(objects.list(deep=True)[0]) == ["a b+ü", "deep/er/c"]
    whole = Objects(Location.of(f"s3://{bucket}/"))
    assert (list(whole.list()[0]), whole.list()[1]) == (["e"], ("some",))


def test_listing_of_several_pages(objects: Objects, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"{i:02}" for i in range(7)]
    for name in names:
        objects.put(name, name.encode())
    ask = objects.client.list_objects_v2
    monkeypatch.setattr(objects.client, "list_objects_v2", lambda **more: ask(MaxKeys=3, **more))
    assert list(objects.list()[0]) == names


def test_parts_are_what_they_should_be(objects: Objects) -> None:
    data = counted(300_000)
    there = put(objects, "x", data)
    assert objects.read(there) == data
    assert objects.read(there, range(1001, 250_003)) == data[1001:250_003]
    assert objects.read(put(objects, "empty", b"")) == b""


@pytest.mark.parametrize("k", [2, 3, 5])
def test_every_kth_refused_and_every_other_cut(objects: Objects, proxy: Proxy, k: int) -> None:
    data = counted(2_000_000)
    there = put(objects, "x", data)

    def fault(request: Request) -> Fault | None:
        if request.number % k == 0:
            return Fault(refuse=True)
        return Fault(cut=200_000) if request.number % 2 else Fault(cut=1)

    proxy.fault = fault
    assert objects.read(there, range(7, 1_900_000)) == data[7:1_900_000]
    assert len(proxy.requests) > 10


def test_what_came_before_a_cut_is_not_asked_for_again(objects: Objects, proxy: Proxy) -> None:
    data = counted(500_000)
    there = put(objects, "x", data)
    proxy.requests.clear()
    proxy.fault = lambda request: Fault(cut=100_000) if request.number == 1 else None
    assert objects.read(there, range(10, 400_010)) == data[10:400_010]
    assert [request.range for request in proxy.requests] == ["bytes=10-400009", "bytes=100010-400009"]


def test_slow_answers_come(objects: Objects, proxy: Proxy) -> None:
    data = counted(300_000)
    there = put(objects, "x", data)
    proxy.fault = lambda request: Fault(pause=0.1)
    assert objects.read(there) == data


def test_a_server_that_always_refuses(objects: Objects, proxy: Proxy) -> None:
    there = put(objects, "x", b"1234")
    proxy.requests.clear()
    proxy.fault = lambda request: Fault(refuse=True)
    with pytest.raises(
        MachineError, match=r"reading s3://.*/some/prefix/x: 127.0.0.1:\d+ refuses \(SlowDown"
    ):
        objects.read(there)
    assert len(proxy.requests) == 10


def test_a_server_that_always_cuts(objects: Objects, proxy: Proxy) -> None:
    there = put(objects, "x", b"1234")
    proxy.requests.clear()
    proxy.fault = lambda request: Fault(cut=0)
    with pytest.raises(MachineError, match=r"some/prefix/x: no whole answer of 127.0.0.1:\d+"):
        objects.read(there)
    assert len(proxy.requests) == 10


def test_nobody_there(objects: Objects, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://user:pass-word@127.0.0.1:9")
    with pytest.raises(
        MachineError, match=r"listing s3://.*: no whole answer of 127.0.0.1:9 .*refused"
    ) as found:
        Objects(objects.location).list()
    assert "pass-word" not in str(found.value)


def test_another_content_is_seen(objects: Objects, proxy: Proxy) -> None:
    data = counted(200_000)
    there = put(objects, "x", data)
    objects.put("x", data[::-1])
    with pytest.raises(SourceError, match=r"some/prefix/x was changed while it was in use.*ETag") as found:
        objects.read(there, range(5, 100))
    assert there.etag in str(found.value)
    objects.delete("x")
    with pytest.raises(SourceError, match="it is gone"):
        objects.read(there)


def test_replaced_in_the_midst_of_a_read(objects: Objects, proxy: Proxy) -> None:
    data = counted(400_000)
    there = put(objects, "x", data)
    proxy.requests.clear()

    def fault(request: Request) -> Fault | None:
        return Fault(cut=100_000) if request.number == 1 else None

    proxy.fault = fault
    stream = objects.stream(there)
    begin = next(stream)
    proxy.fault = lambda request: None
    objects.put("x", data[::-1])
    with pytest.raises(SourceError, match="was changed while it was in use"):
        assert data.startswith(begin + b"".join(stream))


def test_only_if_absent(objects: Objects) -> None:
    assert objects.put("x", b"mine", only_if_absent=True)
    assert not objects.put("x", b"theirs", only_if_absent=True)
    assert objects.read(put(objects, "y", b"")) == b""
    there = objects.head("x")
    assert there is not None
    assert objects.read(there) == b"mine"


def test_only_if_absent_where_the_answer_is_lost(objects: Objects, proxy: Proxy) -> None:
    proxy.fault = lambda request: Fault(lose=True) if request.number == 1 else None
    assert objects.put("x", b"mine", only_if_absent=True)
    proxy.requests.clear()
    assert not objects.put("x", b"late", only_if_absent=True)


def test_removed(objects: Objects) -> None:
    put(objects, "x", b"1")
    objects.delete("x")
    objects.delete("x")
    assert objects.head("x") is None


def test_no_bucket(proxy: Proxy) -> None:
    with pytest.raises(SourceError, match=r"listing s3://no-such-bucket/x: 127.*has no such bucket"):
        Objects(Location("no-such-bucket", "x")).list()


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("AWS_SECRET_ACCESS_KEY", "not-the-secret", "does not take the credentials"),
        ("AWS_ACCESS_KEY_ID", "nobody", "does not take the credentials|refuses"),
        ("AWS_ACCESS_KEY_ID", None, "there are no credentials"),
        ("AWS_PROFILE", "none-of-mine", "there are no credentials, or not all"),
        ("AWS_REGION", "no region", "there is no such region; check AWS_REGION"),
    ],
)
def test_configuration(
    objects: Objects, monkeypatch: pytest.MonkeyPatch, name: str, value: str | None, words: str
) -> None:
    if value is None:
        monkeypatch.delenv(name)
        monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    else:
        monkeypatch.setenv(name, value)
    with pytest.raises(SourceError, match=words) as found:
        Objects(objects.location).list()
    assert SECRET not in str(found.value)
    assert "not-the-secret" not in str(found.value)


def test_an_error_of_the_kind_that_is_wanted(proxy: Proxy) -> None:
    with pytest.raises(UsageError, match="no such bucket"):
        Objects(Location("no-such-bucket", "x"), UsageError).put("x", b"")


@pytest.mark.parametrize(
    "uri", ["s3://", "s3:///x", "s3:/bucket/x", "s3://key:secret-word@bucket/x", "s3://b u/x"]
)
def test_no_place(uri: str) -> None:
    with pytest.raises(UsageError, match="not the name of a bucket") as found:
        Location.of(uri)
    assert "secret-word" not in str(found.value)


@pytest.mark.parametrize("endpoint", ["127.0.0.1:80", "http://user:p4ssword@[x"])
def test_an_endpoint_that_is_none(proxy: Proxy, monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    with pytest.raises(UsageError, match="AWS_ENDPOINT_URL is not like") as found:
        Objects(Location("bucket", "x")).list()
    assert "p4ssword" not in str(found.value)


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> int:
    """Parts as small as stores take them."""
    monkeypatch.setattr(uploads, "PART", 5 << 20)
    return 5 << 20


def test_uploaded_in_parts(objects: Objects, proxy: Proxy, small_parts: int, tmp_path: Path) -> None:
    data, sent = counted(2 * small_parts + 12_345), list[int]()
    (tmp_path / "file").write_bytes(data)
    proxy.fault = lambda request: Fault(refuse=True) if request.number % 3 == 0 else None
    there = uploads.upload(objects, "x", tmp_path / "file", sent.append)
    assert sorted(sent) == [12_345, small_parts, small_parts]
    assert (there.size, re.sub(r'.*-|"', "", there.etag)) == (len(data), "3")
    proxy.reset()
    assert objects.read(there) == data


def test_an_upload_whose_end_is_not_heard_of(
    objects: Objects, proxy: Proxy, small_parts: int, tmp_path: Path
) -> None:
    data, lost = counted(small_parts + 1), list[Request]()
    (tmp_path / "file").write_bytes(data)

    def fault(request: Request) -> Fault | None:
        if request.method == "POST" and "uploadId=" in request.path and not lost:
            lost.append(request)
            return Fault(lose=True)
        return None

    proxy.fault = fault
    assert objects.read(uploads.upload(objects, "x", tmp_path / "file")) == data
    assert len(lost) == 1


def test_an_upload_that_fails_leaves_nothing(
    objects: Objects, proxy: Proxy, store: Store, small_parts: int, tmp_path: Path
) -> None:
    (tmp_path / "file").write_bytes(counted(3 * small_parts))

    def stop(size: int) -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        uploads.upload(objects, "x", tmp_path / "file", stop)
    found = store.client().list_multipart_uploads(Bucket=objects.location.bucket)
    assert found.get("Uploads", []) == []
    assert objects.head("x") is None


def test_what_was_left_unfinished_is_removed(objects: Objects, store: Store) -> None:
    client, bucket = store.client(), objects.location.bucket
    for key in ("some/prefix/mine", "some/prefix/mine", "some/prefix/other", "some/mine"):
        client.create_multipart_upload(Bucket=bucket, Key=key)
    assert uploads.abort_uploads(objects, ["mine", "none"]) == 2
    left = [each["Key"] for each in client.list_multipart_uploads(Bucket=bucket)["Uploads"]]
    assert left == ["some/mine", "some/prefix/other"]
    assert uploads.abort_uploads(objects, ["mine"]) == 0


def test_part_sizes() -> None:
    assert uploads.part_size(40 << 20) == 32 << 20
    assert uploads.part_size(64 << 30) == 66 << 20
    assert -(-(64 << 30) // uploads.part_size(64 << 30)) <= uploads.MAX_PARTS
