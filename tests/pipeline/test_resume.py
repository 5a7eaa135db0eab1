"""What may be done with OUT: every state it can be in against every kind of request."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from checkpoints import Checkpoint
from marlin_convert.checkpoint.identify import identify, stamps
from marlin_convert.checkpoint.source import open_source
from marlin_convert.documents.manifest import Manifest, read_manifest
from marlin_convert.documents.records import JobRecord
from marlin_convert.errors import OutputError, SourceError, UsageError
from marlin_convert.pipeline.out_state import OutState, observe
from marlin_convert.pipeline.resume import Action, Decision, Request, decide
from marlin_convert.pipeline.target import Target
from marlin_convert.pipeline.work_folder import WorkFolder
from marlin_convert.planning.output_plan import Options, plan_output


@pytest.fixture(scope="module")
def target(tiny: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Target:
    source = open_source(str(tiny.folder))
    out = tmp_path_factory.mktemp("resume") / "out"
    return Target(source, identify(source), plan_output(source, Options(2)), out)


@pytest.fixture(scope="module")
def manifest(tiny_tp2: Path) -> Manifest:
    return read_manifest(tiny_tp2)


def request_for(
    target: Target,
    verify: str = "exact",
    *,
    overwrite: bool = False,
    touched: dict[str, list[int]] | None = None,
) -> Request:
    files = [header.file for header in target.source.headers]
    return Request(target, stamps(target.source, files) | (touched or {}), verify, overwrite)


def begun(target: Target, **options: Any) -> JobRecord:
    job = request_for(target).job
    return replace(job, options=replace(job.options, **options)) if options else job


def other_source(target: Target) -> Target:
    files = (replace(target.identity.files[0], start="0" * 32), *target.identity.files[1:])
    return Target(target.source, replace(target.identity, files=files), target.plan, target.out)


def test_nothing_is_there(target: Target) -> None:
    request = request_for(target)
    assert decide(OutState(target.out), request) == Decision(Action.NEW, "exact", request.job)


def test_this_job_was_begun(target: Target) -> None:
    state = OutState(target.out, job=begun(target), any_record=True)
    assert decide(state, request_for(target)) == Decision(Action.CONTINUE, "exact", None)


@pytest.mark.parametrize("records", [False, True])
@pytest.mark.parametrize("digests", [False, True])
def test_a_source_file_was_touched_since(target: Target, records: bool, digests: bool) -> None:
    """With digests of every tensor at hand each is compared; with nothing made, nothing can be mixed."""
    (first, *_) = target.source.headers
    request = request_for(target, touched={first.file: [first.size, 1]})
    state = OutState(target.out, job=begun(target), any_record=records, keeps_digests=digests)
    if records and not digests:
        with pytest.raises(SourceError, match=f"{first.file} was written again after .* was begun"):
            decide(state, request)
    else:
        assert decide(state, request) == Decision(Action.CONTINUE, "exact", request.job)


@pytest.mark.parametrize("records", [False, True])
def test_only_the_attributes_of_a_source_file_changed(target: Target, records: bool) -> None:
    """It goes on once what was made of the file is compared."""
    (first, *_) = target.source.headers
    stamp = begun(target).stamps[first.file]
    request = request_for(target, touched={first.file: [*stamp[:2], stamp[2] + 1]})
    recheck = (first.file,) if records else ()
    decision = decide(OutState(target.out, job=begun(target), any_record=records), request)
    assert decision == Decision(Action.CONTINUE, "exact", request.job, recheck=recheck)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"tp": 4}, "was begun with tp 4, now asked for tp 2"),
        ({"ep": 2}, "was begun with ep 2, now asked for ep 1"),
        ({"layout": "toy"}, "was begun with layout toy, now asked for layout moe_wna16_marlin.u4b8"),
        ({"ranks": (0,)}, "was begun with ranks 0, now asked for ranks 0-1"),
        ({"layers": (0, 1)}, "was begun with layers 0-1, now asked for layers 0-2"),
        ({"complete": False}, "was begun with complete False, now asked for complete True"),
        ({"verify": "none"}, "was begun with verify none, now asked for verify exact"),
        ({"tp": 4, "ep": 2}, "was begun with tp 4, ep 2, now asked for tp 2, ep 1"),
        ({"ranks": (0, 2, 3, 4)}, "was begun with ranks 0,2-4, now asked for ranks 0-1"),
        ({"expert_map": "0" * 32}, "was begun with expert_map 0{32}, now asked for no expert_map"),
        ({"rules": "0" * 32}, "was begun with rules 0{32}, now asked for rules"),
    ],
)
def test_another_job_was_begun(target: Target, options: dict[str, Any], said: str) -> None:
    state = OutState(target.out, job=begun(target, **options), any_record=True)
    with pytest.raises(UsageError, match=said):
        decide(state, request_for(target))
    request = request_for(target, overwrite=True)
    assert decide(state, request) == Decision(Action.REPLACE, "exact", request.job)


def test_another_source(target: Target, manifest: Manifest) -> None:
    request = request_for(other_source(target))
    with pytest.raises(SourceError, match="was begun from another source: the content of model-00001"):
        decide(OutState(target.out, job=begun(target)), request)
    with pytest.raises(SourceError, match="was made from another source: the content of model-00001"):
        decide(OutState(target.out, manifest=manifest), request)


@pytest.mark.parametrize(("made", "asked"), [("exact", "exact"), ("exact", "none"), ("kernel", "exact")])
def test_finished_and_proven_enough(target: Target, manifest: Manifest, made: str, asked: str) -> None:
    state = OutState(target.out, manifest=replace(manifest, checks=made), keeps_digests=True)
    assert decide(state, request_for(target, asked)) == Decision(Action.DONE, made)


@pytest.mark.parametrize(
    ("made", "asked", "advice"),
    [("none", "exact", "verify .*out`"), ("exact", "kernel", "verify .*out --kernel`")],
)
def test_finished_with_less_proof(
    target: Target, manifest: Manifest, made: str, asked: str, advice: str
) -> None:
    state = OutState(target.out, manifest=replace(manifest, checks=made))
    with pytest.raises(UsageError, match=f"is finished, made with --verify {made}; prove it with .*{advice}"):
        decide(state, request_for(target, asked))


def test_finished_and_files_were_lost(target: Target, manifest: Manifest) -> None:
    missing = frozenset({"rank-00-of-02/layer-001.safetensors"})
    request = request_for(target)
    state = OutState(target.out, manifest=manifest, missing=missing, keeps_digests=True)
    assert decide(state, request) == Decision(Action.REPAIR, "exact", request.job)
    # an interrupted repair has its job already
    state = OutState(target.out, manifest=manifest, missing=missing, job=begun(target), keeps_digests=True)
    assert decide(state, request) == Decision(Action.REPAIR, "exact", None)
    # what is made again is proven as the rest was
    state = OutState(target.out, manifest=replace(manifest, checks="kernel"), missing=missing)
    with pytest.raises(UsageError, match="has lost files and was made with --verify kernel; give that again"):
        decide(state, request)
    assert decide(state, request_for(target, "kernel")).checks == "kernel"


def test_what_is_not_a_conversion(target: Target) -> None:
    with pytest.raises(UsageError, match="is not empty and is not a conversion; choose an empty folder"):
        decide(OutState(target.out, foreign=True), request_for(target, overwrite=True))
    with pytest.raises(
        UsageError, match=r"holds files of a conversion but no manifest.json; use --overwrite"
    ):
        decide(OutState(target.out, remains=True), request_for(target))
    assert decide(OutState(target.out, remains=True), request_for(target, overwrite=True)).action == "replace"
    state = OutState(target.out, damaged=OutputError("it is damaged"))
    with pytest.raises(OutputError, match="it is damaged"):
        decide(state, request_for(target))
    assert decide(state, request_for(target, overwrite=True)).action == "replace"


def test_the_source_itself(target: Target) -> None:
    folder = target.source.folder
    assert folder is not None
    for out in (folder, folder / "out", folder / "x" / ".." / "y"):
        with pytest.raises(UsageError, match="is the source folder or lies in it"):
            decide(OutState(out), request_for(target, overwrite=True))


# What is seen.


def test_states_of_a_folder(target: Target, copied: Path, tmp_path: Path) -> None:
    assert observe(tmp_path / "none", target.source) == OutState(tmp_path / "none")
    file = tmp_path / "file"
    file.write_bytes(b"")
    with pytest.raises(UsageError, match="is not a folder"):
        observe(file, target.source)
    empty = tmp_path / "empty"
    empty.mkdir()
    assert observe(empty, target.source) == OutState(empty)
    (empty / "notes.txt").write_text("mine")
    assert observe(empty, target.source) == OutState(empty, foreign=True)

    done = observe(copied, target.source)
    assert done.manifest is not None
    assert (done.missing, done.job, done.damaged, done.keeps_digests) == (frozenset(), None, None, True)
    lost = copied / "rank-01-of-02" / "layer-002.safetensors"
    lost.write_bytes(lost.read_bytes()[:-1])
    (copied / "config.json").unlink()
    assert observe(copied, target.source).missing == {"rank-01-of-02/layer-002.safetensors", "config.json"}

    WorkFolder(copied).begin(begun(target))
    assert observe(copied, target.source).job == begun(target)
    (copied / ".work" / "job.json").write_text('{"format": "marlin-convert"}')
    assert "job.json" in str(observe(copied, target.source).damaged)
    (copied / ".work" / "job.json").write_text("{}")
    assert (observe(copied, target.source).job, observe(copied, target.source).damaged) == (None, None)
    shutil.rmtree(copied / ".work")
    (copied / "manifest.json").write_bytes(
        (copied / "manifest.json").read_bytes().replace(b'"tp":2', b'"tp":4')
    )
    assert "do not match its own digest" in str(observe(copied, target.source).damaged)
    (copied / "manifest.json").unlink()
    assert observe(copied, target.source) == OutState(copied, remains=True, keeps_digests=True)
    # with some of them nothing can be compared: as without any
    os.truncate(copied / "source" / "digests.bin", 16)
    assert observe(copied, target.source) == OutState(copied, remains=True)
