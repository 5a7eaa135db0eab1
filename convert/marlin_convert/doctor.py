"""What this machine can do: looked at, not assumed. The first thing a bug report should carry.

Nothing here needs torch, numba or a GPU; what is missing is an answer, never a crash.
"""

from __future__ import annotations

import importlib
import os
import platform
import re
import resource
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from marlin_convert.buffers import aligned_buffer
from marlin_convert.files import PAGE, existing, open_direct
from marlin_convert.gpu import (
    Torch,
    advice,
    find_compiler,
    find_driver,
    find_providers,
    find_torch,
    installed,
    one_line,
    package_version,
    run_kernel,
)

#: distribution name -> module name
CORE = {
    "click": "click",
    "tqdm": "tqdm",
    "numpy": "numpy",
    "numba": "numba",
    "safetensors": "safetensors",
    "xxhash": "xxhash",
    "huggingface_hub": "huggingface_hub",
}
OPTIONAL = (
    "torch",
    "sglang",
    "sgl-kernel",
    "sglang-kernel",
    "apache-tvm-ffi",
    "triton",
    "matplotlib",
    "llvmlite",
    "hf-xet",
)

#: a conversion for tp ranks keeps the files of two units open
OPEN_FILES = 512
PROBE_BYTES = 16 * PAGE


@dataclass(frozen=True)
class Answer:
    """Whether something would work here, and why not (or with what)."""

    ok: bool
    reason: str


@dataclass(frozen=True)
class Examination:
    """All that was found."""

    machine: dict[str, Any]
    packages: dict[str, str | None]
    numba_cache: dict[str, Any]
    place: dict[str, Any]
    driver: dict[str, Any]
    torch: Torch
    compiler: dict[str, str | None]
    providers: tuple[dict[str, Any], ...]
    install: str
    conversion: Answer
    verification: Answer
    kernel: Answer

    def as_json(self) -> dict[str, Any]:
        """For `--json`; its schema is schemas/doctor.schema.json."""
        document = asdict(self)
        document["torch"]["gpus"] = list(self.torch.gpus)
        document["providers"] = list(self.providers)
        return document


def examine(path: str | os.PathLike[str] = ".", *, kernel: bool = False) -> Examination:
    """Look at this machine, with `path` as the place to convert to. `kernel` also runs the kernel once (it
    may have to be compiled: minutes).
    """
    place, cache, layout = _place(Path(path)), _numba_cache(), _layout_works()
    found, driver = find_torch(), find_driver()
    providers = tuple(find_providers(found))
    install = advice(found.version, found.cuda, driver.get("cuda"), bool(driver.get("gpus")))
    verification = layout
    return Examination(
        machine=_machine(),
        packages={name: package_version(name) for name in ("marlin-convert", *CORE, *OPTIONAL)},
        numba_cache=cache,
        place=place,
        driver=driver,
        torch=found,
        compiler=find_compiler(),
        providers=providers,
        install=install,
        conversion=_conversion(layout, place),
        verification=verification,
        kernel=_kernel(verification, found, driver, providers, install, kernel),
    )


def _machine() -> dict[str, Any]:
    memory, available = _memory()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return {
        "cpu": _cpu(),
        "architecture": platform.machine(),
        "cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": memory,
        "available_bytes": available,
        "memory_limit_bytes": _memory_limit(),
        "open_files": None if soft == resource.RLIM_INFINITY else soft,
        "open_files_hard": None if hard == resource.RLIM_INFINITY else hard,
        "system": f"{platform.system()} {platform.release()}",
        "python": f"{platform.python_implementation()} {platform.python_version()}",
    }


def _cpu() -> str:
    for key in ("model name", "Hardware", "CPU part"):
        if match := re.search(rf"^{key}\s*:\s*(.+)$", _text("/proc/cpuinfo"), re.MULTILINE):
            return match[1].strip()
    return platform.processor() or platform.machine()


def _memory() -> tuple[int | None, int | None]:
    """All and available, in bytes; None where it cannot be told."""
    values = {
        name: int(size) * 1024
        for name, size in re.findall(r"^(\w+):\s+(\d+) kB$", _text("/proc/meminfo"), re.MULTILINE)
    }
    if "MemTotal" in values:
        return values["MemTotal"], values.get("MemAvailable")
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), None
    except (OSError, ValueError):
        return None, None


def _memory_limit() -> int | None:
    """A container's limit, if one is set."""
    for name in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        text = _text(name).strip()
        if text.isdigit() and int(text) < 1 << 60:
            return int(text)
    return None


def _text(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


def _place(path: Path) -> dict[str, Any]:
    """Disk, free space and what kind of writing works at a path, by writing there."""
    folder = existing(path)
    folder = folder if folder.is_dir() else folder.parent
    found: dict[str, Any] = {
        "path": str(path),
        "exists": path.exists(),
        "probed": str(folder),
        "file_system": _file_system(folder),
        "free_bytes": None,
    }
    try:
        state = os.statvfs(folder)
        found["free_bytes"] = state.f_bavail * state.f_frsize
    except OSError:
        pass
    writable, direct = _probe(folder)
    return found | {
        "writable": writable.ok,
        "writable_reason": writable.reason,
        "direct_io": direct.ok,
        "direct_io_reason": direct.reason,
    }


def _probe(folder: Path) -> tuple[Answer, Answer]:
    """Write a temporary file and read it back, past the page cache where that works."""
    try:
        descriptor, name = tempfile.mkstemp(prefix=".marlin-convert-probe-", dir=folder)
    except OSError as error:
        problem = Answer(False, f"no file can be made there ({error.strerror})")
        return problem, problem
    os.close(descriptor)
    try:
        writable = _round_trip(lambda: os.open(name, os.O_RDWR))
        return writable, _round_trip(lambda: open_direct(Path(name), os.O_RDWR))
    finally:
        os.unlink(name)


def _round_trip(open_file: Callable[[], int | None]) -> Answer:
    """Aligned write, flush, aligned read, compare."""
    descriptor: int | None = None
    try:
        descriptor = open_file()
        if descriptor is None:
            return Answer(
                False,
                "the file system has no direct I/O; ordinary I/O is used, which is slower for large files",
            )
        written, back = aligned_buffer(PROBE_BYTES), aligned_buffer(PROBE_BYTES)
        written[:] = [i * 31 % 251 for i in range(PROBE_BYTES)]
        size = os.pwrite(descriptor, written.data, 0)
        os.fsync(descriptor)
        size = min(size, os.preadv(descriptor, [back.data], 0))
        if size != PROBE_BYTES:
            return Answer(False, f"only {size} of {PROBE_BYTES} bytes came back")
        same = bool((written == back).all())
        return Answer(same, "" if same else "what was read back is not what was written")
    except OSError as error:
        return Answer(False, f"{error.strerror} while writing and reading back")
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _file_system(folder: Path) -> str | None:
    """Its type, by the longest mount point above the folder."""
    real, best = str(folder.resolve()), ("", "")
    for line in _text("/proc/mounts").splitlines():
        fields = line.split()
        if len(fields) > 2:
            point = fields[1].replace("\\040", " ")
            inside = real == point or real.startswith(point.rstrip("/") + "/")
            if inside and len(point) >= len(best[0]):
                best = (point, fields[2])
    return best[1] or None


def _numba_cache() -> dict[str, Any]:
    """Where compiled functions are kept; without a place each process compiles anew, which takes seconds and
    is no error.
    """
    try:
        qweight = importlib.import_module("marlin_convert.layout.qweight")
        path = qweight.pack_qweight.stats.cache_path
    except Exception as error:  # a broken numba is an answer
        return {"writable": False, "path": None, "reason": one_line(error)}
    reason = (
        ""
        if path
        else (
            "neither the package folder nor the user's cache folder can be written; NUMBA_CACHE_DIR can name"
            " another"
        )
    )
    return {"writable": path is not None, "path": path, "reason": reason}


def _layout_works() -> Answer:
    """Whether the core's packages load and a small matrix survives layout and inverse."""
    for name, module in CORE.items():
        if not installed(module):
            return Answer(False, f"the package {name} is not installed; pip install marlin-convert brings it")
    try:
        numpy = importlib.import_module("numpy")
        marlin = importlib.import_module("marlin_convert.layout.marlin")
        for module in CORE.values():
            importlib.import_module(module)
        packed = numpy.arange(64 * 8, dtype=numpy.int32).reshape(64, 8) * 2654435 + 1
        if not (marlin.unpack_weight(marlin.pack_weight(packed)) == packed).all():
            return Answer(
                False, "the layout's inverse gives something else on this machine: please report this"
            )
    except Exception as error:
        return Answer(False, f"the core does not load: {one_line(error)}")
    return Answer(True, "")


def _conversion(layout: Answer, place: dict[str, Any]) -> Answer:
    if not layout.ok:
        return layout
    if not place["writable"]:
        return Answer(False, f"{place['probed']}: {place['writable_reason']}")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < OPEN_FILES:
        return Answer(
            False, f"only {soft} files may be open at once; ulimit -n {OPEN_FILES} (at most {hard}) raises it"
        )
    notes = [] if place["direct_io"] else [f"without direct I/O: {place['direct_io_reason']}"]
    return Answer(True, "; ".join(notes))


def _kernel(
    verification: Answer,
    found: Torch,
    driver: dict[str, Any],
    providers: tuple[dict[str, Any], ...],
    install: str,
    run: bool,
) -> Answer:
    """Whether the kernel check would work, by running the kernel once if `run`."""
    if not verification.ok:
        return verification
    if found.problem:
        hint = install or (
            "no NVIDIA GPU was found: verify --kernel --device cpu checks slowly with a model of the kernel"
            if found.version
            else ""
        )
        hint = (
            hint
            or "pip install '.[torch]' for the slow check with verify --kernel --device cpu; the kernel itself "
            "needs a GPU"
        )
        return Answer(False, f"{found.problem}; {hint}")
    loading = [provider["name"] for provider in providers if provider["available"]]
    if not loading:
        why = "; ".join(f"{provider['name']}: {provider['reason']}" for provider in providers)
        return Answer(False, f"no provider of the kernel loads ({why}); {install}")
    capability = found.gpus[0]["capability"]
    note = (
        ""
        if capability == "9.0"
        else f"; this project has run it on capability 9.0 only, this is {capability}"
    )
    if not run:
        return Answer(True, f"{loading[0]} loads; doctor --kernel also runs it{note}")
    wrong = run_kernel()
    return (
        Answer(False, f"{loading[0]} loads, but {wrong}")
        if wrong
        else Answer(True, f"{loading[0]} ran and read every weight back{note}")
    )
