"""Pretends that an H200 is there, for what SGLang asks of a GPU while its modules are compiled."""

from __future__ import annotations

from types import SimpleNamespace

import torch

H200 = SimpleNamespace(
    major=9,
    minor=0,
    multi_processor_count=132,
    total_memory=150_000_000_000,
    name="NVIDIA H200",
    warp_size=32,
)

for name, value in {
    "is_available": True,
    "device_count": 1,
    "current_device": 0,
    "get_device_capability": (9, 0),
    "get_device_properties": H200,
    "get_device_name": H200.name,
}.items():
    setattr(torch.cuda, name, lambda *_, _value=value, **__: _value)
