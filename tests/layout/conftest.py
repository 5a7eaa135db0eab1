"""Tensors recorded on a GPU, by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

GOLDEN = Path(__file__).parents[1] / "golden" / "golden.safetensors"
DTYPES = {"I32": "<i4", "F32": "<f4", "BF16": "<u2"}


@pytest.fixture(scope="session")
def golden() -> Callable[[str], NDArray[Any]]:
    content = GOLDEN.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])

    def load(name: str) -> NDArray[Any]:
        begin, end = header[name]["data_offsets"]
        values = np.frombuffer(content[start + begin : start + end], np.dtype(DTYPES[header[name]["dtype"]]))
        return values.reshape(header[name]["shape"]).copy()

    return load
