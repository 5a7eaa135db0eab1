"""What a check comes to, in words: for the command line and for pages."""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass

from marlin_convert.checkpoint.index import INDEX_NAME
from marlin_convert.checks.findings import SOURCE_DAMAGED, STRAY
from marlin_convert.documents.checks import KernelCheck, ReportedFinding, VerifyReport
from marlin_convert.words import count, gigabytes, some

#: files without which nothing can be reused
KEPT = ("manifest.json", "digests.bin", "source/digests.bin", "source/config.json")


@dataclass(frozen=True)
class Outcome:
    """The verdict in a word, what it rests on, and what to do first where it is bad."""

    word: str
    looked: str
    mend: str = ""

    def __str__(self) -> str:
        return f"{self.word}: {self.looked}"


def of_verification(found: VerifyReport) -> Outcome:
    """What `verify` comes to."""
    against = "the source itself" if found.against == "source" else "the source's digests"
    looked = (
        f"{count(found.files, 'file')}, {gigabytes(found.bytes)} read,"
        f" {count(found.tensors_proven, 'source tensor')} compared with {against} and the same"
    )
    if not found.of_all:
        looked = f"of the part that was asked for, {looked}"
    if found.tensors_unproven:
        looked += f"; {found.tensors_unproven:,} could not be put together from what was read"
        looked += "" if found.against == "source" else " (give --source)"
    word = "NOT OK" if not found.ok else "sound" if found.tensors_unproven else "exact"
    return Outcome(word, looked, mend(found.findings))


def of_kernel(found: KernelCheck) -> Outcome:
    """What `verify --kernel` comes to. Of the model on the CPU it does not say that the kernel read it."""
    reader = "the model on the CPU, not the kernel," if found.model else "the kernel"
    looked = (
        f"{reader} read back {found.weights_read_back:,} weights of"
        f" {count(found.matrices, 'matrix', 'matrices')}; largest relative error with random activations"
        f" {error_text(worst_error(found))};"
        f" {found.seconds.get('total', 0.0):.1f} s"
    )
    word = "NOT OK" if not found.ok else "model-exact" if found.model else "kernel-exact"
    return Outcome(word, looked, mend(found.findings))


def worst_error(found: KernelCheck) -> float | None:
    """The largest relative error of an expert; None where one is not finite."""
    every = [
        matrix.relative_error for layer in found.layers for rank in layer.ranks for matrix in rank.matrices
    ]
    finite = [error for error in every if error is not None]
    return max(finite, default=0.0) if len(finite) == len(every) else None


def error_text(error: float | None) -> str:
    """A relative error for people."""
    return "not finite" if error is None or not math.isfinite(error) else f"{error:.2e}"


def mend(findings: Sequence[ReportedFinding]) -> str:
    """What to do first; nothing where nothing is wrong."""
    if not findings:
        return ""
    if any("(Permission denied)" in finding.what for finding in findings):
        return "see that the files named above can be read, then verify again"
    if any(SOURCE_DAMAGED in finding.what for finding in findings):
        return "fetch the source files named above again, then verify again, before anything is removed"
    if any(finding.path in KEPT or finding.path.startswith("source/headers/") for finding in findings):
        return (
            "run the same convert command again with --overwrite: what the folder keeps to prove itself is"
            " damaged"
        )
    if folders := _folders_elsewhere(findings):
        return (
            f"{some(folders)}: not here; where that is meant, verify what is here with"
            f" {'--stages or ' * folders[0].startswith('stage-')}--ranks, else run the same convert command"
            " again, which remakes what is missing"
        )
    stray = [finding for finding in findings if STRAY in finding.what]
    changed = changed_documents(findings)
    away = ["what is not in the manifest"] * bool(stray) + ["the documents that were changed"] * bool(changed)
    move = [f"move away {' and '.join(away)}"] if away else []
    named = {finding.path for finding in findings} - {finding.path for finding in stray} - set(changed)
    again = "run the same convert command again; it remakes what is missing"
    if named:
        return ", ".join([*move, f"remove the {'other ' if move else ''}files named above and {again}"])
    return f"{', '.join(move)} and {again}" if changed else move[0]


def changed_documents(findings: Sequence[ReportedFinding]) -> list[str]:
    """Documents of OUT that are there and are not as they were written: `convert` writes over none of them,
    since somebody may have edited them.
    """
    named = {finding.path for finding in findings if STRAY not in finding.what}
    return sorted(path for path in named - _gone(findings) if not path.endswith(".safetensors"))


def _gone(findings: Sequence[ReportedFinding]) -> set[str]:
    """Paths of files that are not there."""
    return {finding.path for finding in findings if os.strerror(errno.ENOENT) in finding.what}


def _folders_elsewhere(findings: Sequence[ReportedFinding]) -> list[str]:
    """Folders of ranks of which neither the index nor shards are there."""
    gone = _gone(findings)
    indexes = {path.rpartition("/")[0] for path in gone if path.endswith(f"/{INDEX_NAME}")}
    shards = {path.rpartition("/")[0] for path in gone if path.endswith(".safetensors")}
    return sorted(folder for folder in indexes & shards if folder.rpartition("/")[2].startswith("rank-"))
