"""What a store's client raises, and what this project makes of it: kinds, words, what is tried again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from marlin_convert.errors import MachineError, SourceError, UsageError
from marlin_convert.storage import object_errors
from marlin_convert.storage.object_errors import Asked, MissingError, PreconditionError, again

exceptions = pytest.importorskip("botocore.exceptions", reason="boto3, of the extra s3, is not installed")
ASKED = Asked("reading s3://bucket/x", SourceError)


def answer(code: str, status: int) -> Exception:
    """An answer of a server."""
    error = {"Code": code, "Message": "with secret words"}
    made: Exception = exceptions.ClientError(
        {"Error": error, "ResponseMetadata": {"HTTPStatusCode": status}}, "GetObject"
    )
    return made


def failing(error: Exception, times: int) -> tuple[Callable[[], str], list[int]]:
    """What fails so often and then gives "whole"; and how often it was called."""
    calls: list[int] = []

    def call() -> str:
        calls.append(1)
        if len(calls) <= times:
            raise error
        return "whole"

    return call, calls


@pytest.fixture(autouse=True)
def waited(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that would have been waited."""
    seconds: list[float] = []
    monkeypatch.setattr("marlin_convert.storage.object_errors.time.sleep", seconds.append)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "https://user:pass-word@store.example:9000/x")
    return seconds


PASSES = [
    answer("SlowDown", 503),
    answer("503", 503),
    answer("InternalError", 500),
    answer("TooManyRequests", 429),
    answer("RequestTimeout", 400),
    answer("BadDigest", 400),
    exceptions.EndpointConnectionError(endpoint_url="https://user:pass-word@x", error=None),
    exceptions.ReadTimeoutError(endpoint_url="https://user:pass-word@x", error=None),
    exceptions.ResponseStreamingError(error=None),
    exceptions.IncompleteReadError(actual_bytes=1, expected_bytes=2),
    ConnectionResetError(104, "Connection reset by peer"),
]


@pytest.mark.parametrize("error", PASSES)
def test_what_passes_is_tried_ten_times_in_half_a_minute(error: Exception, waited: list[float]) -> None:
    call, calls = failing(error, 9)
    assert again(ASKED, call) == "whole"
    assert (len(calls), waited) == (10, list(object_errors.PAUSES))
    assert 20 < sum(waited) < 40
    call, calls = failing(error, 10)
    with pytest.raises(
        MachineError, match=r"reading s3://bucket/x: .*store\.example:9000.* 10 times"
    ) as found:
        again(ASKED, call)
    assert len(calls) == 10
    assert "pass-word" not in str(found.value)


STAYS: list[tuple[Exception, type[Exception], str]] = [
    (answer("NoSuchBucket", 404), SourceError, "store.example:9000 has no such bucket"),
    (
        answer("AccessDenied", 403),
        SourceError,
        r"refuses \(AccessDenied 403\): the credentials have no right",
    ),
    (answer("403", 403), SourceError, r"refuses \(403\)"),
    (answer("InvalidAccessKeyId", 403), SourceError, "does not take the credentials"),
    (answer("ExpiredToken", 400), SourceError, "does not take the credentials"),
    (answer("PermanentRedirect", 301), SourceError, "in another region"),
    (answer("AuthorizationHeaderMalformed", 400), SourceError, "set AWS_REGION"),
    (answer("NotImplemented", 501), SourceError, "cannot do this"),
    (answer("InvalidRequest", 400), SourceError, r"answers InvalidRequest 400"),
    (answer("NoSuchKey", 404), MissingError, "reading"),
    (answer("404", 404), MissingError, "reading"),
    (answer("PreconditionFailed", 412), PreconditionError, "reading"),
    (exceptions.NoCredentialsError(), SourceError, "there are no credentials"),
    (exceptions.ProfileNotFound(profile="x"), SourceError, "there are no credentials"),
    (exceptions.SSLError(endpoint_url="x", error="y"), MachineError, "AWS_CA_BUNDLE"),
    (exceptions.InvalidRegionError(region_name="a b"), SourceError, "check AWS_REGION"),
    (exceptions.ParamValidationError(report="secret words"), MachineError, "the client failed"),
]


@pytest.mark.parametrize(("error", "kind", "words"), STAYS)
def test_what_stays_is_not_tried_again(
    error: Exception, kind: type[Exception], words: str, waited: list[float]
) -> None:
    call, calls = failing(error, 1)
    with pytest.raises(kind, match=words) as found:
        again(ASKED, call)
    assert (len(calls), waited) == (1, [])
    assert "secret words" not in str(found.value)


def test_the_kind_is_the_one_that_is_wanted() -> None:
    with pytest.raises(UsageError, match="no right"):
        again(Asked("writing x", UsageError), failing(answer("AccessDenied", 403), 1)[0])


@pytest.mark.parametrize("error", [InterruptedError(), SourceError("mine"), MissingError("x")])
def test_what_is_no_failure_of_the_store_passes_through(error: Any) -> None:
    with pytest.raises(type(error)) as found:
        again(ASKED, failing(error, 1)[0])
    assert found.value is error
