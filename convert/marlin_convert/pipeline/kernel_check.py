"""`convert --verify kernel`: each layer's written files go through the kernel before the layer counts as
finished.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from threading import Lock

import numpy as np
import numpy.typing as npt

from marlin_convert.errors import OutputError, SourceWarning
from marlin_convert.extras import require_for_kernel
from marlin_convert.pipeline.target import Target
from marlin_convert.planning.output_plan import OutputUnit
from marlin_convert.storage.reads import ShortFileError, read_bytes
from marlin_convert.words import count

Check = Callable[[OutputUnit], None]


def kernel_check(target: Target, device: str = "cuda") -> Check:
    """A function that runs the kernel check on a unit whose files lie in OUT, one unit at a time.

    Raises MachineError here, before anything is written, where no kernel loads. The function raises
    OutputError naming the first finding; what could not be asked of the kernel is a SourceWarning.
    """
    require_for_kernel(device)
    from marlin_convert.checks.kernel.kernel_report import KernelReport
    from marlin_convert.checks.kernel.layer_files import LayerFiles, originals_from_source
    from marlin_convert.checks.kernel.scope import CheckScope
    from marlin_convert.checks.kernel.verify_kernel import check_layer
    from marlin_convert.checks.split import Split
    from marlin_convert.kernels import TOKENS
    from marlin_convert.kernels.providers import load_for
    from marlin_convert.kernels.quant_types import need_kernel_type
    from marlin_convert.kernels.trial import try_kernel

    source, plan, out = target.source, target.plan, target.out
    need_kernel_type(plan.layout.id)
    provider = load_for(device)
    try_kernel(provider)  # compiles it, or says why that cannot be done, before anything is written
    lock = Lock()

    def check(unit: OutputUnit) -> None:
        if unit.source.experts_prefix is None or unit.source.layer is None:
            return
        slots = None if plan.topology.placement is None else plan.topology.placement.slots
        files = LayerFiles(
            layer=unit.source.layer,
            prefix=unit.source.experts_prefix,
            layout=plan.layout,
            shape=plan.shape,
            split=Split(plan.topology.tp, plan.topology.ep, plan.experts, slots=slots),
            placed=plan.placed(unit),
            stored=lambda rank, name, begin, number: _stored(
                out / plan.path(unit, rank), unit, name, begin, number
            ),
            path=lambda rank: plan.path(unit, rank),
        )
        report = KernelReport()
        with lock:
            check_layer(
                files,
                originals_from_source(source, files),
                provider,
                device,
                CheckScope(plan.ranks, None, TOKENS, source.model.top_k),
                report,
            )
        if not report.ok:
            raise OutputError(
                f"the kernel does not read what was converted ({len(report.findings)} findings):"
                f" {report.findings[0]}"
            )

        if report.skipped:
            more = count(len(report.skipped) - 1, "more such line")
            rest = "" if len(report.skipped) == 1 else f" ({more} by `verify --kernel`)"
            warnings.warn(f"{report.skipped[0]}{rest}", SourceWarning, stacklevel=2)

    return check


def _stored(path: Path, unit: OutputUnit, name: str, begin: int, number: int) -> npt.NDArray[np.uint8]:
    """Some experts of a stacked tensor in a file that is whole, before there is a manifest to open the folder
    by.
    """
    size = next(stack.expert_bytes for stack in unit.stacked if stack.name == name)
    try:
        return read_bytes(path, unit.offset(name) + begin * size, number * size)
    except ShortFileError as error:
        raise OutputError(f"{error}; run the same command again") from error
