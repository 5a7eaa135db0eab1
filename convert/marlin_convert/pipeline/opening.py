"""Open the source for an OUT: a repository without a revision at the commit that OUT was begun from."""

from __future__ import annotations

import os
import warnings
from dataclasses import replace
from pathlib import Path

from marlin_convert.arguments import refuse_odd
from marlin_convert.checkpoint.hub_files import HubOptions
from marlin_convert.checkpoint.source import Source, is_repository, open_source
from marlin_convert.documents.identity import SourceIdentity
from marlin_convert.errors import ConvertError, MachineWarning
from marlin_convert.pipeline.out_state import observe
from marlin_convert.planning.output_plan import Options, OutputPlan, plan_output


def open_and_plan(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str] | None,
    options: Options,
    hub: HubOptions | None,
    overwrite: bool,
) -> tuple[Source, OutputPlan]:
    """The source as it is to be read for OUT, and what is to be written there. Raises UsageError,
    SourceError.
    """
    refuse_odd(places={"source": source, "out": out})
    if out is not None:
        hub = begun_commit(source, Path(out), hub, overwrite)
    opened = open_source(source, hub)
    return opened, plan_output(opened, options)


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
