"""Writes Kimi-K2 checkpoints whose every value is known beforehand, to try the converter on.

It shares no code with the converter, so that a mistake in one cannot hide in the other.
"""

from .bulk import layers_dims, random_content
from .config import make_config
from .make import Checkpoint, make_layers, make_small, make_standin
from .names import FULL, SMALL, Dims, Form, Tensor, plan_files, split_layer_files
from .values import (
    expected_codes,
    expected_packed,
    expected_plain,
    expected_scales,
    expected_tensor,
    pack_codes,
)
from .writer import Order, arrange, encode_header

__all__ = [
    "FULL",
    "SMALL",
    "Checkpoint",
    "Dims",
    "Form",
    "Order",
    "Tensor",
    "arrange",
    "encode_header",
    "expected_codes",
    "expected_packed",
    "expected_plain",
    "expected_scales",
    "expected_tensor",
    "layers_dims",
    "make_config",
    "make_layers",
    "make_small",
    "make_standin",
    "pack_codes",
    "plan_files",
    "random_content",
    "split_layer_files",
]
