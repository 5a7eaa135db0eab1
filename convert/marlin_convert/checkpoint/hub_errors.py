"""What the hub's client raises, said in this project's terms: what failed, whose turn it is, what to do
next.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from marlin_convert.errors import ConvertError, MachineError, SourceError, UsageError
from marlin_convert.files import machine_error

AGAIN = "run the same command again to continue"


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
    """The error of this project for one of the client's. Its classes moved between libraries, so only the
    hub's own names are used.
    """
    from huggingface_hub import errors

    if isinstance(error, errors.LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
        error = error.__cause__  # the client's words for "the request before the download failed"
    if isinstance(error, errors.HFValidationError):
        return UsageError(
            f"{repo} is not the id of a repository: {error}; give org/name, or the path of a folder"
        )
    if isinstance(error, errors.GatedRepoError):
        return SourceError(
            f"{what}: {repo} is gated; accept its terms on the hub, then give the token of that account"
            " (--token or HF_TOKEN)"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return SourceError(f"{what}: {repo} has no such branch, tag or commit; check --revision")
    if isinstance(error, errors.RepositoryNotFoundError):
        return SourceError(
            f"{what}: the hub has no repository {repo}, or not for you: check its name, or give a token"
            f" (--token or HF_TOKEN); and there is no folder {repo} either"
        )
    if isinstance(error, errors.EntryNotFoundError) and not isinstance(error, errors.LocalEntryNotFoundError):
        return SourceError(
            f"{what}: {repo} does not have this file, although it should; the repository is incomplete"
        )
    if isinstance(error, errors.OfflineModeIsEnabled):
        return MachineError(
            f"{what}: HF_HUB_OFFLINE is set; unset it, or fetch everything before with `marlin-convert"
            f" download {repo}`"
        )
    if isinstance(error, errors.HfHubHTTPError):
        return _of_status(what, repo, error)
    if isinstance(
        error, errors.HfHubHTTPError.__bases__[0]
    ):  # the HTTP library's own base class: no answer, or a broken one
        return MachineError(
            f"{what}: the connection failed ({type(error).__name__}: {_first_line(error)}); check the"
            f" network, then {AGAIN}"
        )
    if isinstance(error, OSError) and error.errno:
        return machine_error(what, error)
    return MachineError(f"{what}: {type(error).__name__}: {_first_line(error)}; {AGAIN}")


def _of_status(what: str, repo: str, error: Exception) -> ConvertError:
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status in (401, 403):
        return SourceError(
            f"{what}: the hub refuses ({status}); the token is missing, wrong, or has no right to read {repo}"
            " (--token or HF_TOKEN)"
        )
    if status is not None and 400 <= status < 500 and status not in (408, 429):
        return SourceError(f"{what}: the hub answers {status}: {_first_line(error)}")
    return MachineError(
        f"{what}: the hub answers {status or 'nothing'} and goes on doing so; wait a little, then {AGAIN}"
    )


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [repr(error)])[0]
