"""`marlin-convert verify`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any

import click
from msgspec import Struct

from marlin_convert.cli import output
from marlin_convert.cli.options import gigabytes, json_option, kernel_options, numbers
from marlin_convert.documents.codec import write
from marlin_convert.storage.files import machine_errors

if TYPE_CHECKING:
    from marlin_convert.checks.findings import Finding, Verification
    from marlin_convert.checks.kernel.kernel_report import KernelReport

#: findings printed in full; a broken folder can have a hundred thousand
SHOWN = 40
#: files without which nothing can be reused
KEPT = ("manifest.json", "digests.bin", "source/digests.bin", "source/config.json")


@click.command("verify")
@click.argument("out")
@click.argument("too_many", nargs=-1, metavar="")
@click.option(
    "--source", help="The published checkpoint: compare with it, not only with what OUT keeps of it."
)
@click.option("--threads", type=click.IntRange(1), help="Worker threads [default: cores].")
@click.option(
    "--kernel",
    is_flag=True,
    help="Run the Marlin MoE kernel on the shards instead; needs torch, and a GPU unless --device cpu.",
)
@click.option("--layers", type=numbers, help="With --kernel: only these layers.")
@click.option("--ranks", type=numbers, help="With --kernel: only these ranks.")
@click.option("--experts", type=numbers, help="With --kernel: only these experts.")
@click.option(
    "--sample", type=click.IntRange(1), help="With --kernel: only this many experts, spread evenly."
)
@kernel_options
@click.option(
    "--report",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Write the full report as JSON into this folder.",
)
@json_option
@click.pass_context
def command(
    ctx: click.Context,
    /,
    out: str,
    too_many: tuple[str, ...],
    source: str | None,
    threads: int | None,
    kernel: bool,
    as_json: bool,
    report: Path | None,
    **scope: Any,
) -> None:
    """Check a converted folder: structure, all digests, and that the inverse layout gives the source, every
    nibble and every scale.

    With --kernel, run the real kernel on the shards against the dequantized originals: it reads back every
    weight; --tokens 0 leaves the fused MoE out. Exit code 1 where anything is wrong; each line names layer,
    expert, projection and rank as far as they apply.
    """
    if too_many:
        raise click.UsageError(
            f"verify takes one folder, the output; give the checkpoint as an option: verify {too_many[0]}"
            f" --source {out}",
            ctx,
        )
    given = [
        name for name in scope if ctx.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE
    ]
    if given and not kernel:
        raise click.UsageError(f"--{given[0]} goes with --kernel; without it everything is checked", ctx)
    _prepare(report)
    ok = (
        _kernel(out, source, report, as_json, scope)
        if kernel
        else _exact(out, source, threads, report, as_json)
    )
    if not ok:
        ctx.exit(1)


def _exact(out: str, source: str | None, threads: int | None, folder: Path | None, as_json: bool) -> bool:
    from marlin_convert.checks.verify import verify

    with output.progress_bar("verifying", "step") as progress:
        found = verify(out, source, threads=threads, progress=progress)
    _write(folder, "verify.json", found.document())
    if as_json:
        output.document(found.document())
    else:
        _show(found.findings)
        output.result(_summary(found, source))
        if not found.ok:
            output.message(f"to mend it: {_mend(found.findings)}")
    return found.ok


def _mend(findings: Sequence[Finding]) -> str:
    """What to do first."""
    from marlin_convert.checks.findings import SOURCE_DAMAGED, STRAY

    if any("(Permission denied)" in finding.what for finding in findings):
        return "see that the files named above can be read, then verify again"
    if any(SOURCE_DAMAGED in finding.what for finding in findings):
        return "fetch the source files named above again, then verify again, before anything is removed"
    if any(finding.path in KEPT or finding.path.startswith("source/headers/") for finding in findings):
        return (
            "run the same convert command again with --overwrite: what the folder keeps to prove itself is"
            " damaged"
        )
    stray = [finding for finding in findings if STRAY in finding.what]
    move = "move away what is not in the manifest" if stray else ""
    if len(stray) == len(findings):
        return move
    again = "files named above and run the same convert command again; it remakes what is missing"
    return f"{move}, remove the other {again}" if stray else f"remove the {again}"


def _summary(found: Verification, source: str | None) -> str:
    against = "the source itself" if source else "the source's digests"
    looked = (
        f"{found.files} files, {gigabytes(found.bytes)} read, {found.proven:,} source tensors compared with"
        f" {against}"
    )
    if found.unproven:
        looked += f"; {found.unproven:,} could not be put together from what is in OUT" + (
            "" if source else " (give --source)"
        )
    return f"{'exact' if found.ok and not found.unproven else 'sound' if found.ok else 'NOT OK'}: {looked}"


def _kernel(out: str, source: str | None, folder: Path | None, as_json: bool, scope: dict[str, Any]) -> bool:
    from marlin_convert.checks.kernel.verify_kernel import verify_kernel

    scope["tokens"] = tuple(count for count in scope["tokens"] if count)
    with output.progress_bar("running the kernel", "layer") as progress:
        found = verify_kernel(out, source, progress=progress, **scope)
    _write(folder, "kernel-report.json", found.document())
    if as_json:
        output.document(found.document(every_expert=False))
    else:
        _show(found.findings)
        _show_kernel(found)
    return found.ok


def _show_kernel(found: KernelReport) -> None:
    environment = found.environment
    output.result(
        f"provider {environment['provider']}, torch {environment['torch']},"
        f" {environment.get('gpu', 'no GPU')}"
    )
    for verdict in found.fused:
        output.result(
            f"layer {verdict.layer}, {verdict.tokens} tokens, all ranks: relative error"
            f" {verdict.relative_error:.2e}"
        )
    for line in found.skipped:
        output.result(f"not run: {line}")
    worst = max((verdict.relative_error or 0.0 for verdict in found.verdicts), default=0.0)
    seconds = found.seconds.get("total", 0.0)
    output.result(
        f"{'kernel-exact' if found.ok else 'NOT OK'}: the kernel read back {found.weights_read_back:,}"
        f" weights of {len(found.verdicts):,} matrices; largest relative error with random activations"
        f" {worst:.2e}; {seconds:.1f} s"
    )


def _show(findings: Sequence[Finding]) -> None:
    for finding in sorted(findings, key=str)[:SHOWN]:
        output.result(f"WRONG {finding}")
    if len(findings) > SHOWN:
        output.result(f"... and {len(findings) - SHOWN} more; --json lists all")


def _prepare(folder: Path | None) -> None:
    """Before hours of work: can the report be written there?"""
    if folder is not None:
        with machine_errors(f"creating {folder}"):
            folder.mkdir(parents=True, exist_ok=True)
            with TemporaryFile(dir=folder):
                pass


def _write(folder: Path | None, name: str, document: Struct) -> None:
    if folder is not None:
        (folder / name).write_bytes(write(document, indent=1) + b"\n")
