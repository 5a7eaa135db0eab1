"""Changes converted folders and safetensors files in ways that a reader must notice."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

HEADER = 4096


def header_of(file: Path) -> dict[str, Any]:
    """The header of a shard."""
    raw = file.read_bytes()
    document: dict[str, Any] = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    return document


def with_header(file: Path, header: bytes) -> None:
    """Put other JSON in place of a shard's header, padded to the same length."""
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    assert len(header) <= length
    file.write_bytes(raw[:8] + header.ljust(length) + raw[8 + length :])


def edit_header(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a shard's header."""
    document = header_of(file)
    change(document)
    with_header(file, json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode())


def edit_json(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a JSON file."""
    document = json.loads(file.read_bytes())
    change(document)
    file.write_text(json.dumps(document))


def edit_manifest(out: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the manifest, not its digest: only a reader that was asked to checks that."""
    edit_json(out / "manifest.json", change)


def flip(file: Path, offset: int) -> None:
    """Flip one bit of a byte."""
    raw = bytearray(file.read_bytes())
    raw[offset] ^= 1
    file.write_bytes(raw)


def plain_file(file: Path, header: bytes, data: int = 64, length: int | None = None) -> Path:
    """A safetensors file with this header, `data` bytes of data and possibly another length in front."""
    claimed = len(header) if length is None else length
    file.write_bytes(claimed.to_bytes(8, "little") + header + bytes(range(data)))
    return file
