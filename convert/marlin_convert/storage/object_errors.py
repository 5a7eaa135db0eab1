"""What an object store's client raises, as errors of this project; what passes is tried again for a bounded
time.

Nothing that a client or a server says of credentials is repeated, nor what stands before the host in an
endpoint.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar
from urllib.parse import urlsplit

from marlin_convert.errors import ConvertError, MachineError

T = TypeVar("T")
AGAIN = "run the same command again"
#: seconds before each further try: half a minute in all, besides what the tries themselves take
PAUSES = (0.25, 0.5, 1, 2, 4, 5, 5, 5, 5)
#: codes of answers that pass: the server is busy, or a request did not come whole
PASSING = frozenset(
    (
        "SlowDown",
        "ServiceUnavailable",
        "Throttling",
        "ThrottlingException",
        "RequestLimitExceeded",
        "BandwidthLimitExceeded",
        "RequestTimeout",
        "InternalError",
        "OperationAborted",
        "ConditionalRequestConflict",
        "BadDigest",
        "IncompleteBody",
    )
)
#: codes by which a server does not take the credentials
UNKNOWN = frozenset(
    ("InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken", "ExpiredToken", "TokenRefreshRequired")
)
#: what the client raises, by name, where it finds no credentials
NO_CREDENTIALS = frozenset(
    (
        "NoCredentialsError",
        "PartialCredentialsError",
        "CredentialRetrievalError",
        "ProfileNotFound",
        "NoAuthTokenError",
        "TokenRetrievalError",
        "UnauthorizedSSOTokenError",
        "SSOTokenLoadError",
        "LoginTokenLoadError",
    )
)
SET_THEM = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"


@dataclass(frozen=True)
class Asked:
    """A request: what it is for, with the object's name, for people; and what an error is that stays however
    often it is asked (an object that is not there, missing rights).
    """

    what: str
    stays: type[ConvertError]


class MissingError(Exception):
    """There is no such object."""


class PreconditionError(Exception):
    """The object is not the one that was asked for, or there is one where there should be none."""


def endpoint() -> str:
    """The host that is asked, for people."""
    given = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""
    try:
        parts = urlsplit(given)
        host = f"{parts.hostname}:{parts.port}" if parts.port else parts.hostname
    except ValueError:
        host = None
    return host or "the store's host"


def again(asked: Asked, call: Callable[[], T]) -> T:
    """What `call` returns, asked for again where a failure passes. Raises SourceError (or what `asked` says),
    MachineError, MissingError and PreconditionError.
    """
    tries = attempts(asked)
    while True:
        try:
            return call()
        except Exception as error:
            next(tries)(error)


def attempts(asked: Asked) -> Iterator[Callable[[Exception], None]]:
    """For each try what is to be called with its failure: it waits, or raises what `again` raises. After the
    last one nothing passes.
    """
    for pause in (*PAUSES, None):

        def failed(error: Exception, pause: float | None = pause) -> None:
            if isinstance(error, (ConvertError, InterruptedError, MissingError, PreconditionError)):
                raise error
            passes, meaning = explain(asked, error)
            if not passes or pause is None:
                raise meaning from error
            time.sleep(pause)

        yield failed


def explain(asked: Asked, error: Exception) -> tuple[bool, Exception]:
    """Whether trying again may help, and the error of this project for one of the client's."""
    from botocore import exceptions
    from urllib3.exceptions import HTTPError

    if isinstance(error, exceptions.ClientError):
        return _of_answer(asked, error)
    name, what = type(error).__name__, asked.what
    if name in NO_CREDENTIALS:
        return False, asked.stays(f"{what}: there are no credentials, or not all ({name}); {SET_THEM}")
    if isinstance(error, exceptions.SSLError):
        advice = "AWS_CA_BUNDLE names the certificates to trust"
        return False, MachineError(f"{what}: {endpoint()} has no certificate that is trusted here; {advice}")
    if isinstance(error, exceptions.EndpointResolutionError | exceptions.InvalidRegionError):
        return False, asked.stays(f"{what}: there is no such region; check AWS_REGION")
    broken = (
        exceptions.ConnectionError,
        exceptions.HTTPClientError,
        exceptions.IncompleteReadError,
        exceptions.FlexibleChecksumError,
        HTTPError,
        OSError,
    )
    if isinstance(error, broken):
        reason = f"{name}{_reason(error)}"
        return True, MachineError(
            f"{what}: no whole answer of {endpoint()} ({reason}), {len(PAUSES) + 1} times; check the network"
            f" and AWS_ENDPOINT_URL, then {AGAIN}"
        )
    return False, MachineError(f"{what}: the client failed ({name}); check its configuration, then {AGAIN}")


def _of_answer(asked: Asked, error: Exception) -> tuple[bool, Exception]:
    """The same of an answer that says no."""
    response = getattr(error, "response", {})
    code = str(response.get("Error", {}).get("Code") or "")
    status = int(response.get("ResponseMetadata", {}).get("HTTPStatusCode") or 0)
    what, said = asked.what, f"{code} {status}" if code != str(status) else code
    if code == "NoSuchBucket":
        where = f"{endpoint()} has no such bucket"
        return False, asked.stays(f"{what}: {where}; check its name, AWS_ENDPOINT_URL and AWS_REGION")
    if code == "NoSuchUpload" or status == 404:
        return False, MissingError(what)
    if status == 412:
        return False, PreconditionError(what)
    if code in PASSING or status in (408, 429) or (status >= 500 and status != 501):
        return True, MachineError(
            f"{what}: {endpoint()} refuses ({said}), {len(PAUSES) + 1} times; wait a little, then {AGAIN}"
        )
    if code in UNKNOWN:
        return False, asked.stays(f"{what}: {endpoint()} does not take the credentials ({said}); {SET_THEM}")
    if status in (401, 403):
        need = f"the credentials have no right to this, or are wrong; {SET_THEM}"
        return False, asked.stays(f"{what}: {endpoint()} refuses ({said}): {need}")
    if status == 501:
        return False, asked.stays(f"{what}: {endpoint()} cannot do this ({said}); use another store")
    if 300 <= status < 400 or code == "AuthorizationHeaderMalformed":
        return False, asked.stays(f"{what}: the bucket is in another region ({said}); set AWS_REGION to that")
    return False, asked.stays(f"{what}: {endpoint()} answers {said}")


def _reason(error: BaseException | None) -> str:
    """What the system says, of the failure below."""
    seen = 0
    while error is not None and seen < 8:
        if isinstance(error, OSError) and error.strerror:
            return f": {error.strerror}"
        error, seen = error.__cause__ or error.__context__, seen + 1
    return ""
