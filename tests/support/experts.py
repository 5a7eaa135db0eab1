"""Slices of experts in memory, for tests of layouts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from marlin_convert.layout.batch import MarlinBatch
from marlin_convert.layout.marlin_moe import MarlinU4B8
from marlin_convert.layout.protocol import (
    ELEMENT,
    ExpertShape,
    ExpertSlice,
    Layout,
    Mismatch,
    QuantScheme,
    Role,
    SourceViews,
)
from marlin_convert.layout.rows import RowView

#: whole source matrices or stacked tensors of an expert, as numpy has them (weights int32, scales uint16)
Arrays = Mapping[Any, NDArray[Any]]


def shape_of(hidden: int, intermediate: int, group: int, moe_tp: int) -> ExpertShape:
    """The shape of 4-bit symmetric experts."""
    return ExpertShape(hidden, intermediate, QuantScheme(group), moe_tp)


def view(array: NDArray[Any], role: Role) -> RowView:
    """An array in a role's elements."""
    return RowView.of(array.view(ELEMENT[role]))


def source_views(shape: ExpertShape, matrices: Arrays, index: int) -> SourceViews:
    """Slice `index` of whole source matrices by (projection, role)."""
    return {key: view(array, key[1]).block(shape.cut(key[0]), index) for key, array in matrices.items()}


def empty_stack(layout: Layout, shape: ExpertShape) -> dict[str, NDArray[Any]]:
    """The stacked tensors of one expert, in memory that is not zero."""
    return {
        tensor.name: np.full(tensor.shape, 0x5A5A, np.int32 if tensor.dtype == "I32" else np.uint16)
        for tensor in layout.stacked(shape)
    }


def slice_of(layout: Layout, shape: ExpertShape, matrices: Arrays, stack: Arrays, index: int) -> ExpertSlice:
    """Slice `index` of an expert between its source matrices and its stacked tensors."""
    roles = {tensor.name: tensor.role for tensor in layout.stacked(shape)}
    stored = {name: view(array, roles[name]) for name, array in stack.items()}
    return ExpertSlice(source_views(shape, matrices, index), stored)


def mismatch(layout: MarlinU4B8, shape: ExpertShape, slices: Sequence[ExpertSlice]) -> Mismatch | None:
    """What a batch would say of its Marlin side as it is now, weights first."""
    batch = layout.batch(shape, slices)
    assert isinstance(batch, MarlinBatch)
    weights = (batch._weight_mismatch(move) for move in batch.weights)
    scales = (batch._scale_mismatch(move) for move in batch.scales)
    return next((found for found in (*weights, *scales) if found is not None), None)
