"""Which commit of a repository a run is for: that of what was begun in OUT, where none is asked for."""

from __future__ import annotations

import os
import warnings
from dataclasses import replace
from pathlib import Path

from marlin_convert.checkpoint.hub_files import HubOptions
from marlin_convert.checkpoint.source import is_repository
from marlin_convert.documents.identity import SourceIdentity
from marlin_convert.errors import ConvertError, MachineWarning
from marlin_convert.pipeline.out_state import observe


def begun_commit(
    source: str | os.PathLike[str], out: Path, hub: HubOptions | None, overwrite: bool
) -> HubOptions | None:
    """The options to open a source with: where it is a repository, no revision is given, and OUT was begun or
    made from a commit of it, that commit. So the same command continues although the repository has got
    another commit meanwhile.
    """
    name, options = os.fspath(source), hub or HubOptions()
    if overwrite or options.revision is not None or Path(name).exists() or not is_repository(name):
        return hub
    identity = _identity(out)
    if identity is None or identity.repo != name or identity.revision is None:
        return hub
    warnings.warn(
        f"{out} was begun from commit {identity.revision} of {name}, which is continued; --revision asks for"
        " another one",
        MachineWarning,
        stacklevel=2,
    )
    return replace(options, revision=identity.revision)


def _identity(out: Path) -> SourceIdentity | None:
    try:
        state = observe(out, None)
    except ConvertError:
        return None  # said where it is decided what may be done with OUT
    if state.job is not None:
        return state.job.identity
    return None if state.manifest is None else state.manifest.source.identity
