"""What this machine can do: looked at, not assumed. The first thing a bug report should carry.

Nothing here needs torch, numba or a GPU; what is missing is an answer, never a crash.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from pathlib import Path

from marlin_convert.doctor.gpu import (
    advice,
    find_compiler,
    find_driver,
    find_torch,
    hides_gpus,
    run_kernel,
)
from marlin_convert.doctor.machine import find_machine
from marlin_convert.doctor.place import find_place
from marlin_convert.documents.doctor import (
    Answer,
    Examination,
    Machine,
    NumbaCache,
    Place,
    ProviderReport,
    Torch,
)
from marlin_convert.extras import installed, package_version
from marlin_convert.kernels.providers import COMPILED_HERE, one_line, probe

#: packages without which nothing works; each is imported by its own name
CORE = ("click", "tqdm", "numpy", "numba", "safetensors", "xxhash", "huggingface_hub", "msgspec")
OTHERS = (
    "torch",
    "sglang",
    "sgl-kernel",
    "sglang-kernel",
    "apache-tvm-ffi",
    "triton",
    "matplotlib",
    "llvmlite",
    "hf-xet",
    "boto3",
)
#: a conversion for tp ranks keeps the files of two units open
OPEN_FILES = 512
NO_GPU = "no NVIDIA GPU was found: verify --kernel --device cpu checks slowly with a model of the kernel"
NO_TORCH = (
    "pip install '.[torch]' for the slow check with verify --kernel --device cpu; the kernel itself needs a"
    " GPU"
)


def examine(path: str | os.PathLike[str] = ".", *, kernel: bool = False) -> Examination:
    """Look at this machine, with `path` as the place to convert to. `kernel` also runs the kernel once (it
    may have to be compiled: minutes).
    """
    machine, place, core = find_machine(), find_place(Path(path)), _core()
    torch, driver = find_torch(), find_driver()
    compiler, hidden = find_compiler(), bool(hides_gpus() and torch.cuda and torch.problem)
    providers, install = probe(torch.problem), "" if hidden else advice(torch, driver)
    return Examination(
        machine=machine,
        packages={name: package_version(name) for name in ("marlin-convert", *CORE, *OTHERS)},
        numba_cache=_numba_cache(),
        place=place,
        driver=driver,
        torch=torch,
        compiler=compiler,
        providers=providers,
        install=install,
        conversion=_conversion(machine, place) if core.ok else core,
        verification=core,
        kernel=_kernel(torch, providers, install, kernel, compiler["nvcc"]) if core.ok else core,
    )


def _numba_cache() -> NumbaCache:
    """Where compiled functions are kept; without a place each process compiles anew, which takes seconds and
    is no error.
    """
    try:
        path = importlib.import_module("marlin_convert.layout.qweight").pack_qweight.stats.cache_path
    except Exception as error:  # a broken numba is an answer
        return NumbaCache(False, None, one_line(error))
    nowhere = (
        "neither the package folder nor the user's cache folder can be written; NUMBA_CACHE_DIR can name"
        " another"
    )
    return NumbaCache(path is not None, path, "" if path else nowhere)


def _core() -> Answer:
    """Whether the core's packages load and a small matrix survives layout and inverse."""
    for name in CORE:
        if not installed(name):
            return Answer(False, f"the package {name} is not installed; pip install marlin-convert brings it")
    try:
        numpy = importlib.import_module("numpy")
        marlin = importlib.import_module("marlin_convert.layout.marlin")
        for name in CORE:
            importlib.import_module(name)
        packed = numpy.arange(64 * 8, dtype=numpy.int32).reshape(64, 8) * 2654435 + 1
        if not (marlin.unpack_weight(marlin.pack_weight(packed)) == packed).all():
            return Answer(
                False, "the layout's inverse gives something else on this machine: please report this"
            )
    except Exception as error:
        return Answer(False, f"the core does not load: {one_line(error)}")
    return Answer(True, "")


def _conversion(machine: Machine, place: Place) -> Answer:
    if not place.writable:
        return Answer(False, f"{place.probed}: {place.writable_reason}")
    if machine.open_files is not None and machine.open_files < OPEN_FILES:
        most = "" if machine.open_files_hard is None else f" (at most {machine.open_files_hard})"
        return Answer(
            False,
            f"only {machine.open_files} files may be open at once; ulimit -n {OPEN_FILES}{most} raises it",
        )
    return Answer(True, "" if place.direct_io else f"without direct I/O: {place.direct_io_reason}")


def _kernel(
    torch: Torch, providers: Sequence[ProviderReport], install: str, run: bool, nvcc: str | None
) -> Answer:
    """Whether the kernel check would work, by running the kernel once if `run`."""
    if torch.problem and torch.cuda and hides_gpus():
        return Answer(False, torch.problem)
    if torch.problem:
        return Answer(False, f"{torch.problem}; {install or (NO_GPU if torch.version else NO_TORCH)}")
    loading = next((provider.name for provider in providers if provider.available), None)
    if loading is None:
        why = "; ".join(f"{provider.name}: {provider.reason}" for provider in providers)
        return Answer(False, f"no provider of the kernel loads ({why}); {install}")
    capability, note = torch.gpus[0].capability, ""
    if capability != "9.0":
        note = f"; this project has run it on capability 9.0 only, this is {capability}"
    if not run and nvcc is None and loading in COMPILED_HERE:
        return Answer(
            False,
            f"{loading} loads, but compiles the kernel at first use and there is no nvcc (CUDA_HOME); where"
            f" it was compiled before, doctor --kernel shows that it runs{note}",
        )
    if not run:
        return Answer(True, f"{loading} loads; doctor --kernel also runs it{note}")
    if wrong := run_kernel():
        return Answer(False, f"{loading} loads, but {wrong}")
    return Answer(True, f"{loading} ran and read every weight back{note}")
