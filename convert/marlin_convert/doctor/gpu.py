"""Driver, torch, compiler, and which provider of the kernel loads or what to install for one.

Nothing is imported that is not installed, and torch only where it is: what is missing is an answer, never a
crash.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from typing import Any

from marlin_convert.documents.doctor import Driver, DriverGpu, Torch, TorchGpu
from marlin_convert.extras import installed, package_version
from marlin_convert.kernels.providers import CANDIDATES, one_line


def find_torch() -> Torch:
    """What torch says, and why it is of no use where it is not."""
    if not installed("torch"):
        return Torch(None, None, (), "torch is not installed")
    try:
        import torch
    except Exception as error:
        return Torch(package_version("torch"), None, (), f"torch does not load: {one_line(error)}")
    try:
        cuda = torch.version.cuda
    except AttributeError:  # files of it are missing: the folder that is left imports as an empty package
        return Torch(
            package_version("torch"), None, (), "torch is broken: files are missing; install it anew"
        )
    try:
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        gpus = tuple(_gpu(torch, index) for index in range(count))
    except Exception as error:
        problem = f"torch sees a GPU that does not work: {one_line(error)}"
        return Torch(str(torch.__version__), cuda, (), problem)
    problem = "" if gpus else f"torch {torch.__version__} sees no CUDA GPU"
    if problem and cuda is not None and (hidden := hides_gpus()):
        problem += f": {hidden}"
    if cuda is None and problem:
        problem += "; it is a build without CUDA"
    return Torch(str(torch.__version__), cuda, gpus, problem)


def hides_gpus() -> str:
    """Why torch would see no GPU where there is one; empty where nothing hides them."""
    value = os.environ.get("CUDA_VISIBLE_DEVICES")
    return f"CUDA_VISIBLE_DEVICES={value} hides them; unset it" if value in ("", "-1", "NoDevFiles") else ""


def _gpu(torch: Any, index: int) -> TorchGpu:
    major, minor = torch.cuda.get_device_capability(index)
    properties = torch.cuda.get_device_properties(index)
    return TorchGpu(
        properties.name, f"{major}.{minor}", properties.total_memory, properties.multi_processor_count
    )


def _run(*command: str) -> str:
    """What a command prints; nothing where it is not there or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout


def find_driver() -> Driver:
    """The NVIDIA driver and its GPUs, from nvidia-smi; no torch needed."""
    listed = _run(
        "nvidia-smi",
        "--query-gpu=name,driver_version,memory.total,compute_cap",
        "--format=csv,noheader,nounits",
    )
    rows = [[field.strip() for field in line.split(",")] for line in listed.splitlines()]
    rows = [row for row in rows if len(row) == 4]
    if not rows:
        problem = "nvidia-smi lists no GPU" if shutil.which("nvidia-smi") else "nvidia-smi is not there"
        return Driver(None, None, (), problem)
    cuda = re.search(r"CUDA (?:UMD )?Version:\s*(\d+\.\d+)", _run("nvidia-smi"))
    gpus = tuple(DriverGpu(row[0], int(row[2]) if row[2].isdigit() else None, row[3]) for row in rows)
    return Driver(rows[0][1], cuda[1] if cuda else None, gpus, "")


def find_compiler() -> dict[str, str | None]:
    """What compiling the kernel at first use needs."""
    home = os.environ.get("CUDA_HOME")
    in_home = shutil.which("nvcc", path=f"{home}/bin") if home else None
    return {
        "CUDA_HOME": home,
        "nvcc": shutil.which("nvcc") or in_home,
        "g++": shutil.which("g++"),
        "ninja": shutil.which("ninja") or shutil.which("ninja", path=os.path.dirname(sys.executable)),
        "TVM_FFI_CACHE_DIR": os.environ.get("TVM_FFI_CACHE_DIR"),
    }


def advice(found: Torch, driver: Driver) -> str:
    """What to install so that the kernel loads; empty where there is neither a GPU nor torch for one.

    A fresh environment gets a torch that fits; which sglang goes with a torch that is there, docs/checks.md
    says.
    """
    cuda = found.cuda or driver.cuda
    if cuda is None:
        return ""
    major = int(cuda.split(".")[0])
    if major < 12:
        return "the driver is too old for the kernel's packages: CUDA 12 or newer is needed"
    return f"in a fresh environment, for {CANDIDATES[-1 if major == 12 else 0].install}"


def run_kernel() -> str:
    """Let the kernel read a small random matrix back; what went wrong, or nothing."""
    from marlin_convert.kernels.providers import load
    from marlin_convert.kernels.trial import wrongly_read

    try:
        wrong, number = wrongly_read(load())
    except Exception as error:
        return f"running it fails: {one_line(error)}"
    return f"it reads {wrong} of {number} weights wrongly" if wrong else ""
