"""Ranges of shard files into tensors that are there already: whole files for `load_rank`, an engine's
parameters for the plugins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from marlin_convert.engines.ring import CACHED, DIRECT, PinnedRing
from marlin_convert.errors import MachineError
from marlin_convert.storage.reads import OpenFile, ShortFileError


@dataclass(frozen=True)
class Range:
    """Bytes of a file from `offset` on, as many as `target` (flat uint8, contiguous) takes."""

    path: Path
    offset: int
    target: Tensor


class Copier:
    """Copies ranges to one device, any number of times, with the same pinned buffers. To the CPU, files are
    read straight into the targets.
    """

    def __init__(self, device: torch.device, threads: int, direct: bool) -> None:
        self._direct = direct and device.type != "cpu"
        self._ring = None if device.type == "cpu" else PinnedRing(threads, DIRECT if self._direct else CACHED)

    def copy(self, ranges: Sequence[Range]) -> None:
        """Copy all and wait for it. Raises MachineError where a file ends early or cannot be read,
        RuntimeError where CUDA fails.
        """
        files: dict[Path, OpenFile] = {}
        try:
            for wanted in ranges:
                if wanted.path not in files:
                    files[wanted.path] = OpenFile(wanted.path, self._direct)
            if self._ring is None:
                _read(files, ranges)
            else:
                parts = self._ring.parts
                self._ring.copy([part for r in ranges for part in parts(files[r.path], r.offset, r.target)])
        finally:
            for file in files.values():
                file.close()


def flat(tensor: Tensor) -> Tensor:
    """A contiguous tensor's own memory as flat uint8."""
    return tensor.detach().view(-1).view(torch.uint8)


def _read(files: dict[Path, OpenFile], ranges: Sequence[Range]) -> None:
    for wanted in ranges:
        size = wanted.target.numel()
        try:
            files[wanted.path].fill(wanted.target.numpy().data, wanted.offset, size)
        except ShortFileError as error:
            raise MachineError(f"{error}; run verify") from error
