"""What this machine can do: looked at, not assumed. The first thing a bug report should carry.

Nothing here needs torch, numba or a GPU; what is missing is an answer, never a crash.
"""

from __future__ import annotations

import importlib
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from convert.buffers import aligned_buffer
from convert.files import PAGE, existing, open_direct

#: distribution name -> module name
CORE = {
    "click": "click", "tqdm": "tqdm", "numpy": "numpy", "numba": "numba", "safetensors": "safetensors", "xxhash": "xxhash",
    "huggingface_hub": "huggingface_hub",
}  # fmt: skip
OPTIONAL = ("torch", "sglang", "sgl-kernel", "sglang-kernel", "apache-tvm-ffi", "triton", "matplotlib", "llvmlite", "hf-xet")

#: a conversion for tp ranks keeps the files of two units open
OPEN_FILES = 512
PROBE_BYTES = 16 * PAGE


@dataclass(frozen=True)
class Answer:
    """Whether something would work here, and why not (or with what)."""

    ok: bool
    reason: str


@dataclass(frozen=True)
class Torch:
    """What torch says; `version` None where it is not installed, `problem` where it does not load or sees no GPU."""

    version: str | None
    cuda: str | None
    gpus: tuple[dict[str, Any], ...]
    problem: str


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
    """Look at this machine, with `path` as the place to convert to. `kernel` also runs the kernel once (it may have to be compiled: minutes)."""
    place, cache, layout = _place(Path(path)), _numba_cache(), _layout_works()
    found, driver = _torch(), _driver()
    providers = tuple(_providers(found))
    install = advice(found.version, found.cuda, driver.get("cuda"), bool(driver.get("gpus")))
    verification = layout
    return Examination(
        machine=_machine(),
        packages={name: _version(name) for name in ("marlin-convert", *CORE, *OPTIONAL)},
        numba_cache=cache,
        place=place,
        driver=driver,
        torch=found,
        compiler=_compiler(),
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
    values = {name: int(size) * 1024 for name, size in re.findall(r"^(\w+):\s+(\d+) kB$", _text("/proc/meminfo"), re.MULTILINE)}
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


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


def _installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _place(path: Path) -> dict[str, Any]:
    """Disk, free space and what kind of writing works at a path, by writing there."""
    folder = existing(path)
    folder = folder if folder.is_dir() else folder.parent
    found: dict[str, Any] = {"path": str(path), "probed": str(folder), "file_system": _file_system(folder), "free_bytes": None}
    try:
        state = os.statvfs(folder)
        found["free_bytes"] = state.f_bavail * state.f_frsize
    except OSError:
        pass
    writable, direct = _probe(folder)
    return found | {"writable": writable.ok, "writable_reason": writable.reason, "direct_io": direct.ok, "direct_io_reason": direct.reason}


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
            return Answer(False, "the file system has no direct I/O; ordinary I/O is used, which is slower for large files")
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
    """Where compiled functions are kept; without a place each process compiles anew, which takes seconds and is no error."""
    try:
        words = importlib.import_module("convert.layout.words")
        path = words.pack_words.stats.cache_path
    except Exception as error:  # a broken numba is an answer
        return {"writable": False, "path": None, "reason": _one_line(error)}
    reason = "" if path else "neither the package folder nor the user's cache folder can be written; NUMBA_CACHE_DIR can name another"
    return {"writable": path is not None, "path": path, "reason": reason}


def _layout_works() -> Answer:
    """Whether the core's packages load and a small matrix survives layout and inverse."""
    for name, module in CORE.items():
        if not _installed(module):
            return Answer(False, f"the package {name} is not installed; pip install marlin-convert brings it")
    try:
        numpy = importlib.import_module("numpy")
        marlin = importlib.import_module("convert.layout.marlin")
        for module in CORE.values():
            importlib.import_module(module)
        packed = numpy.arange(64 * 8, dtype=numpy.int32).reshape(64, 8) * 2654435 + 1
        if not (marlin.unpack_weight(marlin.pack_weight(packed)) == packed).all():
            return Answer(False, "the layout's inverse gives something else on this machine: please report this")
    except Exception as error:
        return Answer(False, f"the core does not load: {_one_line(error)}")
    return Answer(True, "")


def _conversion(layout: Answer, place: dict[str, Any]) -> Answer:
    if not layout.ok:
        return layout
    if not place["writable"]:
        return Answer(False, f"{place['probed']}: {place['writable_reason']}")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < OPEN_FILES:
        return Answer(False, f"only {soft} files may be open at once; ulimit -n {OPEN_FILES} (at most {hard}) raises it")
    notes = [] if place["direct_io"] else [f"without direct I/O: {place['direct_io_reason']}"]
    return Answer(True, "; ".join(notes))


def _run(*command: str) -> str | None:
    """What a command prints; None where it is not there or fails."""
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout if done.returncode == 0 else None


def _driver() -> dict[str, Any]:
    """The NVIDIA driver and its GPUs, from nvidia-smi; no torch needed."""
    listed = _run("nvidia-smi", "--query-gpu=name,driver_version,memory.total,compute_cap", "--format=csv,noheader,nounits")
    rows = [[field.strip() for field in line.split(",")] for line in (listed or "").splitlines()]
    rows = [row for row in rows if len(row) == 4]
    if not rows:
        there = shutil.which("nvidia-smi") is not None
        return {"version": None, "cuda": None, "gpus": [], "problem": "nvidia-smi lists no GPU" if there else "nvidia-smi is not there"}
    cuda = re.search(r"CUDA (?:UMD )?Version:\s*(\d+\.\d+)", _run("nvidia-smi") or "")
    gpus = [{"name": row[0], "memory_mib": int(row[2]) if row[2].isdigit() else None, "capability": row[3]} for row in rows]
    return {"version": rows[0][1], "cuda": cuda[1] if cuda else None, "gpus": gpus, "problem": ""}


def _torch() -> Torch:
    if not _installed("torch"):
        return Torch(None, None, (), "torch is not installed")
    try:
        import torch
    except Exception as error:
        return Torch(_version("torch"), None, (), f"torch does not load: {_one_line(error)}")
    cuda = torch.version.cuda
    try:
        gpus = tuple(_gpu(torch, index) for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0))
    except Exception as error:
        return Torch(torch.__version__, cuda, (), f"torch sees a GPU that does not work: {_one_line(error)}")
    problem = ""
    if not gpus:
        problem = f"torch {torch.__version__} sees no CUDA GPU" + ("; it is a build without CUDA" if cuda is None else "")
    return Torch(torch.__version__, cuda, gpus, problem)


def _gpu(torch: Any, index: int) -> dict[str, Any]:
    major, minor = torch.cuda.get_device_capability(index)
    properties = torch.cuda.get_device_properties(index)
    return {
        "name": properties.name, "capability": f"{major}.{minor}", "memory_bytes": properties.total_memory,
        "multiprocessors": properties.multi_processor_count,
    }  # fmt: skip


def _compiler() -> dict[str, str | None]:
    """What compiling the kernel at first use needs."""
    home = os.environ.get("CUDA_HOME")
    return {
        "CUDA_HOME": home,
        "nvcc": shutil.which("nvcc") or (shutil.which("nvcc", path=os.path.join(home, "bin")) if home else None),
        "g++": shutil.which("g++"),
        "ninja": shutil.which("ninja", path=os.pathsep.join((os.path.dirname(sys.executable), os.environ.get("PATH", "")))),
        "TVM_FFI_CACHE_DIR": os.environ.get("TVM_FFI_CACHE_DIR"),
    }


def _providers(found: Torch) -> list[dict[str, Any]]:
    from convert.kernels.providers import CANDIDATES, probe

    if found.version is not None and not found.gpus:  # the same answer without importing a torch that may be broken
        reasons = {c.name: found.problem if _installed(c.package) else f"{c.package} is not installed and {found.problem}" for c in CANDIDATES}
        return [_provider(c.name, False, reasons[c.name], c.install, _version(c.package.replace("_", "-"))) for c in CANDIDATES]
    return [_provider(r.name, r.available, r.reason, r.install, r.version) for r in probe()]


def _provider(name: str, available: bool, reason: str, install: str, found: str | None) -> dict[str, Any]:
    return {"name": name, "available": available, "reason": reason, "install": install, "version": found}


def advice(torch_version: str | None, torch_cuda: str | None, driver_cuda: str | None, gpu: bool) -> str:
    """What to install so that the kernel loads, for this torch and CUDA. Empty where no GPU is there at all."""
    if not gpu and torch_cuda is None:
        return ""
    cuda = torch_cuda or driver_cuda or ""
    major = int(cuda.split(".")[0]) if cuda else 0
    if torch_version is not None and torch_cuda is None:
        wanted = "'.[sglang]'" if major >= 13 else "'.[sgl-kernel]'"
        return f"torch {torch_version} is a build without CUDA: in a fresh environment, pip install {wanted}"
    if major == 12:
        return "CUDA 12: pip install '.[sgl-kernel]' (torch 2.9.1 and sgl-kernel 0.3.21, compiled, 535 MB)"
    if major < 12:
        return "the driver is too old for the kernel's packages: CUDA 12 or newer is needed"
    compiles = "it compiles the kernel at first use: nvcc with CUDA_HOME set, g++ with C++20, ninja"
    number = re.match(r"(\d+)\.(\d+)", torch_version or "")
    if number is None:
        return f"CUDA {major}: pip install '.[sglang]'; {compiles}"
    release = (int(number[1]), int(number[2]))
    if release == (2, 11):
        return f"torch {torch_version}, CUDA {major}: pip install 'sglang==0.5.17'; {compiles}"
    if release >= (2, 13):
        return f"torch {torch_version}, CUDA {major}: pip install 'sglang>=0.5.18,<0.6'; {compiles}"
    return f"no sglang is known to go with torch {torch_version}: in a fresh environment, pip install '.[sglang]'; {compiles}"


def _kernel(verification: Answer, found: Torch, driver: dict[str, Any], providers: tuple[dict[str, Any], ...], install: str, run: bool) -> Answer:
    """Whether the kernel check would work, by running the kernel once if `run`."""
    if not verification.ok:
        return verification
    if found.problem:
        hint = install or ("no NVIDIA GPU was found: verify --kernel --device cpu checks slowly with a model of the kernel" if found.version else "")
        hint = hint or "pip install '.[torch]' for the slow check with verify --kernel --device cpu; the kernel itself needs a GPU"
        return Answer(False, f"{found.problem}; {hint}")
    loading = [provider["name"] for provider in providers if provider["available"]]
    if not loading:
        why = "; ".join(f"{provider['name']}: {provider['reason']}" for provider in providers)
        return Answer(False, f"no provider of the kernel loads ({why}); {install}")
    capability = found.gpus[0]["capability"]
    note = "" if capability == "9.0" else f"; this project has run it on capability 9.0 only, this is {capability}"
    if not run:
        return Answer(True, f"{loading[0]} loads; doctor --kernel also runs it{note}")
    wrong = _run_kernel()
    return Answer(False, f"{loading[0]} loads, but {wrong}") if wrong else Answer(True, f"{loading[0]} ran and read every weight back{note}")


def _run_kernel() -> str:
    """Let the kernel read a small random matrix back; what went wrong, or nothing."""
    import torch

    from convert.kernels.fused_moe import Matrix
    from convert.kernels.one_hot import read_back
    from convert.kernels.providers import load

    try:
        generator = torch.Generator().manual_seed(0)
        words = torch.randint(-(2**31), 2**31, (2, 8, 256), generator=generator).to(torch.int32)
        scales = (torch.rand((2, 4, 128), generator=generator) + 0.5).to(torch.bfloat16)
        expected = next(read_back(load("reference"), Matrix(words, scales), experts_a_call=2))[1]
        read = next(read_back(load(), Matrix(words.cuda(), scales.cuda()), experts_a_call=2))[1]
        wrong = int((read.cpu() != expected).sum())
    except Exception as error:
        return f"running it fails: {_one_line(error)}"
    return f"it reads {wrong} of {expected.numel()} weights wrongly" if wrong else ""
