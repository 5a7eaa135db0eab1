"""What may be done with OUT: a new conversion, one that is continued, one that is repaired, nothing any more,
or a refusal that says why.

`decide` compares what lies there with what is asked for and changes nothing. It is asked before anything is
made, so that a refusal leaves no trace, and again once OUT is locked.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from msgspec.structs import replace

from marlin_convert.checkpoint.source import Source
from marlin_convert.documents.expert_map import placement_digest
from marlin_convert.documents.identity import SourceIdentity
from marlin_convert.documents.manifest import Manifest
from marlin_convert.documents.records import WORK, JobOptions, JobRecord
from marlin_convert.errors import ConvertError, SourceError, UsageError
from marlin_convert.pipeline.out_state import OutState, edited
from marlin_convert.pipeline.places import refuse_nested
from marlin_convert.pipeline.recheck import compare_known
from marlin_convert.pipeline.target import Target
from marlin_convert.pipeline.work_folder import FOLDERS
from marlin_convert.planning.output_plan import OutputPlan
from marlin_convert.shards.kept_source import DIGESTS
from marlin_convert.storage.files import refuse_in_place_of
from marlin_convert.storage.shard_file import FORMAT, format_version
from marlin_convert.words import ranges

#: what is proven while converting, each more than the one before
CHECKS = ("none", "exact", "kernel")

#: per file of a source folder its size, modification time and change time
Stamps = Mapping[str, list[int]]


class Action(StrEnum):
    """What is to be done with OUT."""

    NEW = "new"
    CONTINUE = "continue"
    REPAIR = "repair"
    REPLACE = "replace"
    DONE = "done"


@dataclass(frozen=True)
class Request:
    """What is asked for: this target, proven so far, from files with these stamps; `overwrite` removes
    whatever conversion lies there.
    """

    target: Target
    stamps: Stamps
    verify: str
    overwrite: bool

    @property
    def job(self) -> JobRecord:
        """As it is recorded."""
        options = job_options(self.target.plan, self.verify)
        return JobRecord(FORMAT, options, self.target.identity, dict(self.stamps))


@dataclass(frozen=True)
class Decision:
    """The answer. `checks` is what is proven on the way; `job` is to be recorded where it is not None. Where
    `claim` is false, repository and commit are not named: what was made before was not compared with them.
    `recheck` are source files that must be compared with the records before the job is recorded.
    """

    action: Action
    checks: str
    job: JobRecord | None = None
    claim: bool = True
    recheck: tuple[str, ...] = ()


def decide(state: OutState, request: Request) -> Decision:
    """What may be done. Raises UsageError for an OUT that is the source, lies in it or holds something else,
    for a document that was edited, for a link in place of a folder that is written to, and for options other
    than OUT was made with; SourceError for another source; OutputError where OUT is damaged.
    """
    out = state.out
    refuse_place(state, request.target.source)
    if state.edited:
        raise edited(state.out, state.edited)
    decision = _spare_or_replace(state, request) if request.overwrite else _go_on(state, request)
    if decision.action not in (Action.DONE, Action.REPLACE):
        work = (WORK, *(f"{WORK}/{name}" for name in FOLDERS))
        for folder in (*request.target.plan.folders, "source", "source/headers", *work):
            refuse_in_place_of(out / folder)
    return decision


def _go_on(state: OutState, request: Request) -> Decision:
    """Without --overwrite: with what is there, or not at all."""
    out = state.out
    if state.remains:
        raise UsageError(
            f"{out} holds files of a conversion but no manifest.json; use --overwrite to make it again"
        )
    if state.damaged is not None:
        raise state.damaged
    if not (claim := _may_claim(state, request)):
        target = dataclasses.replace(request.target, identity=request.target.identity.unclaimed())
        request = dataclasses.replace(request, target=target)
    if state.manifest is None:
        job = _job_to_record(state, request)
        compare_known(request.target)
        action = Action.NEW if state.job is None else Action.CONTINUE
        return Decision(action, request.verify, job, claim, _to_compare(state, request))
    _compare_finished(out, state.manifest, request)
    compare_known(request.target)
    if not state.missing:
        return Decision(Action.DONE, state.manifest.checks)
    checks = state.manifest.checks
    if checks == "kernel" and request.verify != "kernel":
        raise UsageError(
            f"{out} has lost files and was made with --verify kernel; give that again to remake them"
        )
    again = Request(request.target, request.stamps, checks, overwrite=False)
    return Decision(Action.REPAIR, checks, _job_to_record(state, again), claim)


def _may_claim(state: OutState, request: Request) -> bool:
    """Whether all that was made so far was compared with what is published, as all that is left will be."""
    before = [state.job and state.job.identity, state.manifest and state.manifest.source.identity]
    return not request.target.identity.compared or all(look.compared for look in before if look)


def _spare_or_replace(state: OutState, request: Request) -> Decision:
    """With --overwrite: what the same job has made already is kept, whatever else is there is removed."""
    replace_it = Decision(Action.REPLACE, request.verify, request.job)
    if not state.missing.isdisjoint(("digests.bin", DIGESTS)):
        return replace_it  # without these nothing that is left can be proven
    try:
        return _go_on(state, dataclasses.replace(request, overwrite=False))
    except ConvertError:
        if state.edited_since:
            raise edited(state.out, state.edited_since) from None
        return replace_it


def refuse_place(state: OutState, source: Source) -> None:
    """Raise UsageError for an OUT that is the source, lies in it or holds something else."""
    refuse_nested(state.out, source.folder, source.store.places())
    if state.foreign:
        raise UsageError(f"{state.out} is not empty and is not a conversion; choose an empty folder")


def job_options(plan: OutputPlan, verify: str) -> JobOptions:
    """What must be the same for a run to continue another. Threads, memory and the way of I/O do not matter:
    they change no byte.
    """
    placement, placed = plan.topology.placement, filter(None, map(plan.placed, plan.units))
    return JobOptions(
        format_version(plan.topology),
        plan.layout.id,
        plan.rules,
        plan.topology.tp,
        plan.topology.ep,
        tuple(plan.ranks),
        tuple(plan.layers),
        plan.complete,
        verify,
        plan.topology.attn_tp,
        plan.topology.pp,
        None if placement is None else placement_digest(placement.slots, placed),
    )


def _manifest_options(manifest: Manifest) -> JobOptions:
    """The options of a finished conversion, as `job_options` has them."""
    slots, placed = manifest.parallel.slots, [unit.slots for unit in manifest.units if unit.slots]
    return JobOptions(
        manifest.format_version,
        manifest.layout_id,
        manifest.parallel.rules,
        manifest.tp,
        manifest.ep,
        manifest.ranks,
        manifest.layers,
        manifest.complete,
        manifest.checks,
        manifest.parallel.attn_tp,
        manifest.parallel.pp,
        None if slots is None else placement_digest(slots, placed),
    )


def _job_to_record(state: OutState, request: Request) -> JobRecord | None:
    """The job to be recorded, or None where the one that was begun is this one. Raises UsageError for other
    options, SourceError for another source.
    """
    begun, asked = state.job, request.job
    if begun is None:
        return asked
    _compare_sources(f"{state.out} was begun", begun.identity, asked.identity)
    _compare_options(f"{state.out} was begun", begun.options, asked.options)
    touched = _touched(begun, asked)
    if not touched:
        return None if begun.identity.compared == asked.identity.compared else asked
    # with the digest of every tensor at hand, each is compared; with nothing finished, nothing can be mixed
    if state.keeps_digests or not state.any_record:
        return asked
    known = [name for name in touched if name in begun.stamps]  # none where it was begun out of shards
    rewritten = [name for name in known if begun.stamps[name][:2] != asked.stamps[name][:2]]
    if not rewritten:
        return asked  # chmod, a hard link, or a replacement with its time put back: see `_to_compare`
    raise SourceError(
        f"{rewritten[0]} was written again after {state.out} was begun, and a sample cannot prove that all of"
        " it is the same; use --overwrite to start again"
    )


def _touched(begun: JobRecord, asked: JobRecord) -> list[str]:
    return [name for name, stamp in asked.stamps.items() if begun.stamps.get(name) != stamp]


def _to_compare(state: OutState, request: Request) -> tuple[str, ...]:
    """Source files that were touched since, of which recorded units may have been made."""
    if state.job is None or not state.any_record or state.keeps_digests:
        return ()
    return tuple(_touched(state.job, request.job))


def _compare_finished(out: Path, manifest: Manifest, request: Request) -> None:
    """See that a finished OUT is what is asked for. Raises UsageError or SourceError."""
    _compare_sources(f"{out} was made", manifest.source.identity, request.target.identity)
    made, asked = _manifest_options(manifest), request.job.options
    if CHECKS.index(made.verify) >= CHECKS.index(asked.verify):
        asked = replace(asked, verify=made.verify)  # proven more than is asked for
    elif replace(made, verify=asked.verify) == asked:
        flag = " --kernel" if asked.verify == "kernel" else ""
        raise UsageError(
            f"{out} is finished, made with --verify {made.verify}; prove it with `marlin-convert verify"
            f" {out}{flag}`"
        )
    _compare_options(f"{out} was made", made, asked)


def _compare_sources(was: str, theirs: SourceIdentity, ours: SourceIdentity) -> None:
    """Raise SourceError where an OUT is of another source."""
    if (difference := theirs.continued_by(ours)) is not None:
        raise SourceError(
            f"{was} from another source: {difference}; use another OUT, or --overwrite to start again"
        )


def _compare_options(was: str, theirs: JobOptions, ours: JobOptions) -> None:
    """Raise UsageError, naming every difference, where an OUT is of other options."""
    pairs = {key: (getattr(theirs, key), getattr(ours, key)) for key in JobOptions.__struct_fields__}
    differences = {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}
    if differences:
        found, wanted = (", ".join(_short(key, pair[i]) for key, pair in differences.items()) for i in (0, 1))
        raise UsageError(
            f"{was} with {found}, now asked for {wanted}; use another OUT, or --overwrite to start again"
        )


def _short(key: str, value: object) -> str:
    if value is None:
        return f"no {key}"
    text = ranges(value) if isinstance(value, tuple) else str(value)
    return f"{key} {text if len(text) <= 40 else text[:37] + '...'}"
