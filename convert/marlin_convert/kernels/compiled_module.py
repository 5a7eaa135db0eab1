"""Modules of the kernel that were compiled on this machine: one that a crash or a full disk cut short would
end the process by a signal, without a word, when it is loaded.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path

from marlin_convert.errors import MachineError

#: of an ELF file: its header and the entries of its tables, 64 bit, little-endian
MAGIC, HEADER, SEGMENT = b"\x7fELF\x02\x01", struct.Struct("<32xQQ6xHHHH2x"), struct.Struct("<8xQ16xQ16x")


def cache_folder() -> Path:
    """Where the compiler's package keeps what it compiled."""
    return Path(os.environ.get("TVM_FFI_CACHE_DIR") or Path.home() / ".cache" / "tvm-ffi")


def refuse_cut_modules() -> None:
    """Raise MachineError where a module of the kernel that is kept is not whole."""
    for path in sorted(cache_folder().glob("*marlin*/*.so")):
        size, needed = path.stat().st_size, needed_size(path)
        if size < needed:
            raise MachineError(
                f"{path} has {size} bytes, by its own tables it must have {needed}: it was cut short, or"
                f" another process compiles it now; else remove the folder {path.parent}: it is compiled anew"
            )


def needed_size(path: Path) -> int:
    """The bytes that a shared object must have by its own tables. What is none must have a header."""
    with path.open("rb") as file:
        start = file.read(HEADER.size)
        if len(start) < HEADER.size or not start.startswith(MAGIC):
            return max(path.stat().st_size + 1, HEADER.size)
        segments_at, sections_at, segment, segments, section, sections = HEADER.unpack(start)
        ends = [sections_at + section * sections, segments_at + segment * segments]
        file.seek(segments_at)
        table = file.read(segment * segments)
    if segment == SEGMENT.size and len(table) == segment * segments:
        ends += [offset + size for offset, size in SEGMENT.iter_unpack(table)]
    needed: int = max(ends)
    return needed
