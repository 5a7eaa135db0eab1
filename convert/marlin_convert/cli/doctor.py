"""`marlin-convert doctor`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from marlin_convert.cli import output
from marlin_convert.cli.options import gigabytes, json_option

if TYPE_CHECKING:
    from marlin_convert.doctor import Answer, Examination


@click.command("doctor")
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
        output.document(found.as_json())
    else:
        _show(found)
    if not (found.conversion.ok and found.verification.ok and (found.kernel.ok or not kernel)):
        ctx.exit(4)


def _show(found: Examination) -> None:
    machine, place = found.machine, found.place
    limit = (
        f", limited to {gigabytes(machine['memory_limit_bytes'])}" if machine["memory_limit_bytes"] else ""
    )
    missing = "" if place["exists"] else f", since {place['path']} is not there yet"
    lines = [
        (
            "cpu",
            (
                f"{machine['cpu']} ({machine['architecture']}), {machine['usable_cores']} of"
                f" {machine['cores']} cores usable"
            ),
        ),
        ("memory", f"{_size(machine['memory_bytes'])}, {_size(machine['available_bytes'])} available{limit}"),
        ("system", f"{machine['system']}, {machine['python']}"),
        ("open files", f"{_limit(machine['open_files'])} (at most {_limit(machine['open_files_hard'])})"),
        ("packages", _packages(found.packages)),
        (
            "not installed",
            ", ".join(name for name, version in found.packages.items() if version is None) or "-",
        ),
        (
            "compiled code",
            (
                f"kept in {found.numba_cache['path']}"
                if found.numba_cache["writable"]
                else f"not kept: {found.numba_cache['reason']}"
            ),
        ),
        (
            "disk",
            (
                f"{place['probed']}{missing} ({place['file_system'] or 'unknown file system'}),"
                f" {_size(place['free_bytes'])} free"
            ),
        ),
        ("writing", "yes" if place["writable"] else f"no: {place['writable_reason']}"),
        ("direct I/O", "yes" if place["direct_io"] else f"no: {place['direct_io_reason']}"),
        ("driver", _driver(found.driver)),
        ("torch", _torch(found)),
        ("compiler", ", ".join(f"{name} {where or '-'}" for name, where in found.compiler.items())),
    ]
    for name, text in lines:
        output.result(f"{name:<17} {text}")
    for provider in found.providers:
        state = (
            f"loads ({provider['version']})"
            if provider["available"]
            else f"does not load: {provider['reason']}"
        )
        output.result(f"{provider['name']:<17} {state}")
    if found.install:
        output.result(f"{'to install':<17} {found.install}")
    for name, answer in (
        ("conversion", found.conversion),
        ("verification", found.verification),
        ("kernel check", found.kernel),
    ):
        output.result(_line(name, answer))


def _line(name: str, answer: Answer) -> str:
    return f"{name}: {'yes' if answer.ok else 'no'}" + (f": {answer.reason}" if answer.reason else "")


def _size(size: int | None) -> str:
    return "unknown" if size is None else gigabytes(size)


def _limit(count: int | None) -> str:
    return "unlimited" if count is None else str(count)


def _packages(packages: dict[str, str | None]) -> str:
    return ", ".join(f"{name} {version}" for name, version in packages.items() if version is not None)


def _driver(driver: dict[str, Any]) -> str:
    if not driver["gpus"]:
        return f"none: {driver['problem']}"
    gpus = ", ".join(
        f"{gpu['name']} (capability {gpu['capability']}, {gpu['memory_mib']} MiB)" for gpu in driver["gpus"]
    )
    return f"{driver['version']}, CUDA up to {driver['cuda'] or 'unknown'}: {gpus}"


def _torch(found: Examination) -> str:
    torch = found.torch
    if torch.version is None:
        return torch.problem
    gpus = ", ".join(
        f"{gpu['name']} (capability {gpu['capability']}, {gigabytes(gpu['memory_bytes'])})"
        for gpu in torch.gpus
    )
    return f"{torch.version}, CUDA {torch.cuda or 'none'}: {gpus or torch.problem}"
