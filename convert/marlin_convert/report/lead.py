"""What stands below the verdict: what it rests on and, where something is wrong, what to run."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from marlin_convert.checks.findings import STRAY
from marlin_convert.checks.outcome import Outcome, changed_documents
from marlin_convert.checks.units import Blame
from marlin_convert.documents.checks import ReportedFinding
from marlin_convert.documents.manifest import Manifest
from marlin_convert.report.html import Html, html, tag
from marlin_convert.report.page import About, commands, sentence

#: files in the command that removes them
REMOVED = 20


def lead(outcome: Outcome, found: Sequence[ReportedFinding], manifest: Manifest, about: About) -> Html:
    """The verdict's sentence and, where something is wrong, how much, where, and what to run."""
    said = sentence(outcome.looked[:1].upper() + outcome.looked[1:], ".")
    if not found:
        return said
    places = sorted({finding.path for finding in found})
    many = f"{len(found):,} finding{'s' * (len(found) > 1)} in {len(places):,} place{'s' * (len(places) > 1)}"
    first = f"{many}, first: {min(finding.message for finding in found)}"
    todo = sentence(tag("strong", "To mend it: "), outcome.mend, ".")
    return html((sentence(tag("strong", first)), said, todo, _to_run(outcome, found, manifest, about)))


def _to_run(outcome: Outcome, found: Sequence[ReportedFinding], manifest: Manifest, about: About) -> Html:
    """Commands, with SOURCE where the checkpoint is to be named."""
    out = about.out
    if not any(step in outcome.mend for step in ("remove the", "move away the")):
        return commands(about.command)
    blame = Blame(found)
    wrong = [shard.path for shard in manifest.shards if blame.names(shard) or blame.names_unit(shard.unit)]
    away = sorted({*changed_documents(found), *(each.path for each in found if STRAY in each.what)})
    lines = [f"# move away first: {out}/{path}" for path in away[:REMOVED]]
    lines += [f"rm -f -- {shlex.quote(f'{out}/{path}')}" for path in wrong[:REMOVED]]
    if len(wrong) > REMOVED:
        lines.append(f"# and {len(wrong) - REMOVED:,} more: those that the findings name")
    again = f"marlin-convert convert SOURCE {shlex.quote(out)} --tp {manifest.tp} --ep {manifest.ep}"
    if manifest.parallel.attn_tp is not None:
        again += f" --attn-tp {manifest.parallel.attn_tp}"
    if manifest.parallel.pp > 1:
        again += f" --pp {manifest.parallel.pp}"
    if manifest.parallel.slots is not None:
        again += " --expert-map FILE"
    if not manifest.complete:
        again += "   # and its --layers and --ranks"
    return commands(*lines, again, about.command)
