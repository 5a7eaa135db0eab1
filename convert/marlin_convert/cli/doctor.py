"""`marlin-convert doctor`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from marlin_convert.cli import output
from marlin_convert.cli.by_file import examples
from marlin_convert.cli.options import json_option
from marlin_convert.words import gigabytes

if TYPE_CHECKING:
    from marlin_convert.documents.doctor import Driver, Examination, Torch


@click.command(
    "doctor",
    short_help="Say what this machine can do.",
    epilog=examples(
        "doctor",
        "doctor /data/out-tp8 --json",
        "doctor --kernel",
    ),
)
@click.argument("path", default=".", type=click.Path())
@click.option(
    "--kernel",
    is_flag=True,
    help="Also run the kernel once (it may compile first: minutes); exit code 4 unless the check would work.",
)
@json_option
@click.pass_context
def command(ctx: click.Context, path: str, kernel: bool, as_json: bool) -> None:
    """Say what this machine can do: CPU, memory, disk at PATH, GPU, torch, and which package has the kernel.

    The last three lines say whether conversion, verification and the kernel check would work. Exit code 0 if
    the first two would (with --kernel, all three), else 4. Bug reports should carry the output of doctor
    --json.
    """
    from marlin_convert.doctor import examine

    found = examine(path, kernel=kernel)
    if as_json:
        output.document(found)
    else:
        _show(found)
    if not (found.conversion.ok and found.verification.ok and (found.kernel.ok or not kernel)):
        ctx.exit(4)


def _show(found: Examination) -> None:
    machine, place, cache = found.machine, found.place, found.numba_cache
    limit = f", limited to {gigabytes(machine.memory_limit_bytes)}" if machine.memory_limit_bytes else ""
    usable = f", {_size(machine.usable_bytes)} usable by {machine.usable_by}" if machine.usable_by else ""
    missing = "" if place.exists else f", since {place.path} is not there yet"
    lines = {
        "cpu": (
            f"{machine.cpu} ({machine.architecture}), {machine.usable_cores} of {machine.cores} cores usable"
        ),
        "memory": f"{_size(machine.memory_bytes)}, {_size(machine.available_bytes)} available{limit}{usable}",
        "system": f"{machine.system}, {machine.python}",
        "open files": f"{_limit(machine.open_files)} (at most {_limit(machine.open_files_hard)})",
        "packages": ", ".join(f"{name} {version}" for name, version in found.packages.items() if version),
        "not installed": ", ".join(name for name, version in found.packages.items() if not version) or "-",
        "compiled code": f"kept in {cache.path}" if cache.writable else f"not kept: {cache.reason}",
        "disk": (
            f"{place.probed}{missing} ({place.file_system or 'unknown file system'}),"
            f" {_size(place.free_bytes)} free"
        ),
        "writing": "yes" if place.writable else f"no: {place.writable_reason}",
        "direct I/O": "yes" if place.direct_io else f"no: {place.direct_io_reason}",
        "driver": _driver(found.driver),
        "torch": _torch(found.torch),
        "compiler": ", ".join(f"{name} {where or '-'}" for name, where in found.compiler.items()),
    }
    for provider in found.providers:
        loads = f"loads ({provider.version})"
        reason = provider.reason.replace(
            found.torch.problem or provider.reason, "torch is of no use, see its line"
        )
        lines[provider.name] = loads if provider.available else f"does not load: {reason}"
    if found.install and found.install not in found.kernel.reason:  # said once
        lines["to install"] = found.install
    for name, text in lines.items():
        output.result(f"{name:<17} {text}")
    answers = {
        "conversion": found.conversion,
        "verification": found.verification,
        "kernel check": found.kernel,
    }
    for name, answer in answers.items():
        reason = f": {answer.reason}" if answer.reason else ""
        output.result(f"{name}: {'yes' if answer.ok else 'no'}{reason}")


def _size(size: int | None) -> str:
    return "unknown" if size is None else gigabytes(size)


def _limit(count: int | None) -> str:
    return "unlimited" if count is None else str(count)


def _driver(driver: Driver) -> str:
    if not driver.gpus:
        return f"none: {driver.problem}"
    gpus = ", ".join(f"{gpu.name} (capability {gpu.capability}, {gpu.memory_mib} MiB)" for gpu in driver.gpus)
    return f"{driver.version}, CUDA up to {driver.cuda or 'unknown'}: {gpus}"


def _torch(torch: Torch) -> str:
    if torch.version is None:
        return torch.problem
    gpus = ", ".join(
        f"{gpu.name} (capability {gpu.capability}, {_size(gpu.memory_bytes)})" for gpu in torch.gpus
    )
    return f"{torch.version}, CUDA {torch.cuda or 'none'}: {gpus or torch.problem}"
