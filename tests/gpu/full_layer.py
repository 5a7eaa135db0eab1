"""A full-size Kimi-K2.6 layer on one GPU machine: make, convert, check with the kernel, plant a wrong scale
bit, bench.

OUT=results python tests/gpu/full_layer.py [PLACE]      PLACE [default: /dev/shm where it has 24 GB, else the
temporary folder]

Needs 24 GB there (and as much memory if it is /dev/shm). Each step is tried even where one before it failed,
writes OUT/<step>.json and prints its seconds; exit code 1 if any failed.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "convert"), str(ROOT / "tests" / "support")]

LAYER, TP = 0, 8
#: (rank, expert) in which a scale is spoiled
SPOILED_TP8, SPOILED_EP8 = (5, 200), (0, 17)
#: the layer's source and one converted form together; room is made before the second
NEEDED = 24 * 10**9
START = time.monotonic()
RESULTS = Path(os.environ.get("OUT", "full-layer-results"))
FAILED: list[str] = []


def say(text: str) -> None:
    """A line with seconds since the start."""
    print(f"[{time.monotonic() - START:7.1f} s] {text}", flush=True)


def step(name: str, run: Callable[[], dict[str, Any]]) -> None:
    """Run a step, write what it returns, go on where it fails."""
    say(f"{name} ...")
    begin = time.monotonic()
    try:
        result = run()
        seconds = time.monotonic() - begin
        ok = bool(result.get("as_expected", True))
    except Exception:
        result, seconds, ok = {"error": traceback.format_exc()}, time.monotonic() - begin, False
        print(result["error"], flush=True)
    if not ok:
        FAILED.append(name)
    (RESULTS / f"{name}.json").write_text(
        json.dumps({"step": name, "ok": ok, "step_seconds": round(seconds, 3)} | result, indent=1) + "\n"
    )
    say(f"{name}: {'done' if ok else 'FAILED'} in {seconds:.1f} s")


def choose_place() -> Path:
    """A fast folder with room."""
    if len(sys.argv) > 1:
        return Path(sys.argv[1])
    memory = Path("/dev/shm")
    if (
        memory.is_dir()
        and shutil.disk_usage(memory).free > NEEDED
        and os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") > 2 * NEEDED
    ):
        return memory
    return Path(tempfile.gettempdir())


def main() -> None:
    """All steps."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    place = choose_place() / "marlin-convert-full-layer"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    source, tp8, ep8 = place / "source", place / "tp8", place / "ep8"
    say(f"working in {place}, {shutil.disk_usage(place).free / 1e9:.0f} GB free; results in {RESULTS}")
    try:
        step("doctor", doctor)
        step("compile", lambda: compile_all(place))
        step("make", lambda: make(source))
        step("convert-tp8", lambda: convert_to(source, tp8, tp=TP, ep=1))
        for name in ("verify-tp8-first", "verify-tp8"):  # the second with warm files
            step(name, lambda: kernel(tp8, source))
        step("bench-tp8", lambda: bench(tp8))
        step("wrong-scale-tp8", lambda: wrong_scale(tp8, source, *SPOILED_TP8, "w2"))
        step("wrong-scale-tp8-all", lambda: still_wrong(tp8, source, *SPOILED_TP8))
        shutil.rmtree(tp8, ignore_errors=True)
        # One rank of eight only: the sum over ranks needs all of them, so the fused check is left out and
        # said so in `skipped`.
        step("convert-ep8", lambda: convert_to(source, ep8, tp=TP, ep=TP, ranks=(0,)))
        step("verify-ep8", lambda: kernel(ep8, source))
        step("bench-ep8", lambda: bench(ep8))
        step("wrong-scale-ep8", lambda: wrong_scale(ep8, source, *SPOILED_EP8, "w13"))
    finally:
        shutil.rmtree(place, ignore_errors=True)
    say(f"all done; failed: {', '.join(FAILED) or 'nothing'}")
    sys.exit(1 if FAILED else 0)


def doctor() -> dict[str, Any]:
    """What the machine is, with the kernel run once."""
    from marlin_convert.doctor import examine
    from marlin_convert.documents.codec import write

    found = examine(kernel=True)
    say(f"kernel check: {found.kernel.reason}")
    document: dict[str, Any] = json.loads(write(found))
    return {"as_expected": found.kernel.ok and found.verification.ok} | document


def compile_all(place: Path) -> dict[str, Any]:
    """Compile the layout and check functions on a small checkpoint, so that no figure below has it in."""
    from checkpoints import make_small
    from marlin_convert.checks.kernel.verify_kernel import verify_kernel
    from marlin_convert.pipeline.run import convert

    small = make_small(place / "small", layers=2, experts=4)
    convert(str(small.folder), place / "small-out", tp=2)
    report = verify_kernel(place / "small-out", None)
    return {"as_expected": report.ok, "findings": [str(finding) for finding in report.findings]}


def make(source: Path) -> dict[str, Any]:
    """A layer of 384 experts, 9.8 GB."""
    from checkpoints import make_layers

    made = make_layers(source)
    return {"bytes": made.nbytes, "tensors": len(made.tensors)}


def convert_to(
    source: Path, out: Path, *, tp: int, ep: int, ranks: tuple[int, ...] | None = None
) -> dict[str, Any]:
    """Convert, with the figures of each stage."""
    from marlin_convert.pipeline.run import convert

    begin = time.monotonic()
    report = convert(str(source), out, tp=tp, ep=ep, ranks=ranks)
    seconds = time.monotonic() - begin
    stages = report.stages
    for stage, spent in stages.seconds.items():
        say(
            f"  {stage}: {spent:.2f} s over all threads, {stages.bytes[stage] / 1e9:.2f} GB,"
            f" {stages.bytes[stage] / max(spent, 1e-9) / 1e9:.2f} GB/s"
        )
    say(
        f"  {report.output_bytes / 1e9:.2f} GB in {seconds:.2f} s, {report.output_bytes / seconds / 1e9:.2f}"
        " GB/s"
    )
    return {
        "seconds": seconds,
        "output_bytes": report.output_bytes,
        "stage_seconds": stages.seconds,
        "stage_bytes": stages.bytes,
    }


def kernel(out: Path, source: Path) -> dict[str, Any]:
    """The whole kernel check of what is in `out`: every weight one-hot, random activations, and the fused sum
    where all ranks are there.
    """
    import torch

    from marlin_convert.checks.kernel.verify_kernel import verify_kernel
    from marlin_convert.documents.codec import write

    torch.cuda.reset_peak_memory_stats()
    begin = time.monotonic()
    report = verify_kernel(out, str(source))
    seconds = time.monotonic() - begin
    for stage, spent in report.seconds.items():
        say(f"  {stage}: {spent:.2f} s")
    for verdict in report.fused:
        say(
            f"  fused, {verdict.tokens} tokens: relative error {verdict.relative_error:.2e} of at most"
            f" {verdict.tolerance:.2e}"
        )
    for line in [*report.skipped, *map(str, report.findings[:5])]:
        say(f"  {line}")
    errors = [verdict.relative_error or 0.0 for verdict in report.verdicts]
    say(
        f"  {report.weights_read_back:,} weights of {len(report.verdicts)} matrices in {seconds:.1f} s; all"
        f" 60 layers would take {seconds:.1f} min"
    )
    return {
        "as_expected": report.ok,
        "seconds_whole": seconds,
        "minutes_for_60_layers": seconds,
        "largest_relative_error": max(errors),
        "least_relative_error": min(errors),
        "matrices": len(errors),
        "gpu_peak_bytes": torch.cuda.max_memory_allocated(),
        "report": json.loads(write(report.document(every_expert=False))),
    }


def wrong_scale(out: Path, source: Path, rank: int, expert: int, matrix: str) -> dict[str, Any]:
    """One last bit of one scale of one expert of 384, checked with a few experts around it."""
    from marlin_convert.checks.kernel.verify_kernel import verify_kernel
    from mistakes import plant

    planted = plant(out, "one last bit of one scale", LAYER, rank, expert, matrix)
    report = verify_kernel(out, str(source), experts=range(max(expert - 2, 0), expert + 3), tokens=())
    return {
        "as_expected": found_it(report, planted),
        "planted": asdict(planted),
        "findings": [str(finding) for finding in report.findings],
    }


def still_wrong(out: Path, source: Path, rank: int, expert: int) -> dict[str, Any]:
    """The same bit, found among all 384 experts of that rank."""
    from marlin_convert.checks.kernel.verify_kernel import verify_kernel

    report = verify_kernel(out, str(source), ranks=[rank], tokens=())
    places = [(finding.layer, finding.rank, finding.expert) for finding in report.findings]
    wrong = [asdict(verdict) for verdict in report.verdicts if not verdict.ok]
    for finding in report.findings:
        say(f"  {finding}")
    return {
        "as_expected": places == [(LAYER, rank, expert)],
        "matrices": len(report.verdicts),
        "wrong": wrong,
    }


def found_it(report: Any, planted: Any) -> bool:
    """Whether the one finding names the place."""
    for finding in report.findings:
        say(f"  {finding}")
    expected = [(planted.layer, planted.rank, planted.expert, planted.projection)]
    return [
        (finding.layer, finding.rank, finding.expert, finding.projection) for finding in report.findings
    ] == expected


def bench(out: Path) -> dict[str, Any]:
    """`bench kernel` of rank 0, as the command line prints it."""
    from marlin_convert.bench.kernel import KernelSettings, bench_kernel
    from marlin_convert.cli.bench_kernel import show
    from marlin_convert.documents.codec import write

    report = bench_kernel(out, KernelSettings(LAYER))
    show(report)
    measured: dict[str, Any] = json.loads(write(report))
    return measured


if __name__ == "__main__":
    main()
