"""Errors of the hub's client as errors of this project: what failed, and what to do next."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from marlin_convert.errors import ConvertError, MachineError, SourceError, UsageError
from marlin_convert.storage.files import machine_error

AGAIN = "run the same command again"
#: the client's errors by name, special ones before general ones, with the error here and its words
MEANINGS: tuple[tuple[str, type[ConvertError], str], ...] = (
    (
        "HFValidationError",
        UsageError,
        "{repo} is not the id of a repository: {error}; give org/name, or the path of a folder",
    ),
    (
        "GatedRepoError",
        SourceError,
        (
            "{what}: {repo} is gated; accept its terms on the hub, then give the token of that account"
            " (--token or HF_TOKEN)"
        ),
    ),
    (
        "RevisionNotFoundError",
        SourceError,
        "{what}: {repo} has no such branch, tag or commit; check --revision",
    ),
    (
        "RepositoryNotFoundError",
        SourceError,
        (
            "{what}: the hub has no repository {repo}, or not for you: check its name, or give a token"
            " (--token or HF_TOKEN); and there is no folder {repo} either"
        ),
    ),
    (
        "RemoteEntryNotFoundError",
        SourceError,
        "{what}: {repo} does not have this file, although it should; the repository is incomplete",
    ),
    (
        "OfflineModeIsEnabled",
        MachineError,
        "{what}: HF_HUB_OFFLINE is set, so nothing can be fetched; unset it",
    ),
)


@contextmanager
def hub_errors(what: str, repo: str) -> Iterator[None]:
    """Turn anything the hub's client raises into a SourceError or a MachineError (UsageError for a malformed
    id).
    """
    try:
        yield
    except (ConvertError, InterruptedError):
        raise
    except Exception as error:
        raise explain(what, repo, error) from error


def explain(what: str, repo: str, error: Exception) -> ConvertError:
    """The error of this project for one of the client's. The HTTP library moved between versions, so only the
    hub's own names are used.
    """
    from huggingface_hub import errors

    if isinstance(error, errors.LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
        error = error.__cause__  # the client's words for "the request before the download failed"
    for name, kind, words in MEANINGS:
        if isinstance(error, getattr(errors, name)):
            return kind(words.format(what=what, repo=repo, error=error))
    line = (str(error).strip().splitlines() or [repr(error)])[0]
    if isinstance(error, errors.HfHubHTTPError):
        status = getattr(error.response, "status_code", None)
        if status in (401, 403):
            return SourceError(
                f"{what}: the hub refuses ({status}); the token is missing, wrong, or has no right to read"
                f" {repo} (--token or HF_TOKEN)"
            )
        if status is not None and 400 <= status < 500 and status not in (408, 429):
            return SourceError(f"{what}: the hub answers {status}: {line}")
        answer = f"answers {status or 'nothing'} and goes on doing so"
        return MachineError(f"{what}: the hub {answer}; wait a little, then {AGAIN}")
    if isinstance(error, errors.HfHubHTTPError.__bases__[0]):
        # the HTTP library's own base class: no answer, or a broken one
        return MachineError(
            f"{what}: the connection failed ({type(error).__name__}: {line}); check the network, then {AGAIN}"
        )
    if isinstance(error, OSError) and error.errno:
        return machine_error(what, error)
    return MachineError(f"{what}: {type(error).__name__}: {line}; {AGAIN}")
