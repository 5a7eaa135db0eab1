"""What `doctor` finds."""

from __future__ import annotations

from typing import Annotated

from msgspec import Struct

from marlin_convert.documents.fields import Count, about

#: a size or count, null where it cannot be told
OptionalCount = Count | None
Version = Annotated[str | None, about("null where not installed")]


class Machine(Struct, frozen=True):
    """Processor, memory and limits; what cannot be told is null."""

    cpu: Annotated[str, about("name of the processor")]
    architecture: Annotated[str, about("as uname has it")]
    cores: Annotated[OptionalCount, about("cores")]
    usable_cores: Annotated[OptionalCount, about("of them, those that this process may use")]
    memory_bytes: Annotated[OptionalCount, about("memory")]
    available_bytes: Annotated[OptionalCount, about("of it, available now")]
    memory_limit_bytes: Annotated[OptionalCount, about("a container's limit, null where there is none")]
    usable_bytes: Annotated[OptionalCount, about("memory that this process may still use")]
    usable_by: Annotated[
        str | None, about("what limits it: available memory, a control group's file or ulimit")
    ]
    threads_left: Annotated[OptionalCount, about("threads that it may still start; null: any number")]
    open_files: Annotated[OptionalCount, about("files that may be open at once; null: any number")]
    open_files_hard: Annotated[OptionalCount, about("how far that may be raised; null: without limit")]
    system: Annotated[str, about("kernel and its version")]
    python: Annotated[str, about("interpreter and its version")]


class NumbaCache(Struct, frozen=True):
    """Where compiled functions are kept."""

    writable: Annotated[bool, about("whether they are kept at all")]
    path: Annotated[str | None, about("where")]
    reason: Annotated[str, about("why not")]


class Place(Struct, frozen=True):
    """The place to convert to. Reasons are empty where it works."""

    path: Annotated[str, about("as it was given")]
    exists: Annotated[bool, about("whether path is there; if not, the nearest folder above it was probed")]
    probed: Annotated[str, about("the folder that is there, in which a file was written and read back")]
    file_system: Annotated[str | None, about("its type")]
    free_bytes: Annotated[OptionalCount, about("free space")]
    writable: Annotated[bool, about("whether ordinary writing works")]
    writable_reason: Annotated[str, about("why not")]
    direct_io: Annotated[bool, about("whether writing past the page cache works")]
    direct_io_reason: Annotated[str, about("why not")]


class DriverGpu(Struct, frozen=True):
    """A GPU as nvidia-smi lists it."""

    name: Annotated[str, about("name")]
    memory_mib: Annotated[OptionalCount, about("memory")]
    capability: Annotated[str, about("compute capability")]


class Driver(Struct, frozen=True):
    """The NVIDIA driver, from nvidia-smi."""

    version: Annotated[str | None, about("version of the driver")]
    cuda: Annotated[str | None, about("the newest CUDA that this driver serves")]
    gpus: Annotated[tuple[DriverGpu, ...], about("all that it lists")]
    problem: Annotated[str, about("why there is none")]


class TorchGpu(Struct, frozen=True):
    """A GPU as torch sees it."""

    name: Annotated[str, about("name")]
    capability: Annotated[str, about("compute capability")]
    memory_bytes: Annotated[OptionalCount, about("memory")]
    multiprocessors: Annotated[OptionalCount, about("streaming multiprocessors")]


class Torch(Struct, frozen=True):
    """What torch says; `problem` where it does not load or sees no GPU."""

    version: Version
    cuda: Annotated[str | None, about("that torch was built for")]
    gpus: Annotated[tuple[TorchGpu, ...], about("all that it sees")]
    problem: Annotated[str, about("why it is of no use, empty where it is")]


class ProviderReport(Struct, frozen=True):
    """A place from which the kernel may be taken."""

    name: Annotated[str, about("as --provider takes it")]
    available: Annotated[bool, about("whether it loads")]
    reason: Annotated[str, about("why not, empty if it does")]
    install: Annotated[str, about("what would help")]
    version: Version


class Answer(Struct, frozen=True):
    """Whether something would work here."""

    ok: Annotated[bool, about("whether it would")]
    reason: Annotated[str, about("why not, or what to know")]


class Examination(Struct, frozen=True):
    """All that was found."""

    machine: Machine
    packages: Annotated[dict[str, Version], about("versions by name")]
    numba_cache: NumbaCache
    place: Place
    driver: Driver
    torch: Torch
    compiler: Annotated[
        dict[str, str | None], about("what compiling the kernel at first use needs, and where it is")
    ]
    providers: Annotated[tuple[ProviderReport, ...], about("where the kernel may be, in the order tried")]
    install: Annotated[str, about("what would bring the kernel; empty where nothing would")]
    conversion: Annotated[Answer, about("whether a conversion would work")]
    verification: Annotated[Answer, about("whether verify would work")]
    kernel: Annotated[Answer, about("whether verify --kernel would work")]
