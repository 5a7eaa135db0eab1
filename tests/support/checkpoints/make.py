"""Makes whole checkpoints: small ones, full-size layers, and a sparse stand-in for all of Kimi-K2.6."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from .bulk import layers_dims, random_content
from .config import make_config, write_small_files
from .names import FULL, SMALL, Dims, Form, ShapeDtype, Tensor, plan_files, split_layer_files
from .values import expected_tensor
from .writer import Content, Order, write_checkpoint


@dataclass(frozen=True)
class Checkpoint:
    """What was written: `files` has the tensors of each file in the order of their data."""

    folder: Path
    dims: Dims
    form: Form
    files: dict[str, list[Tensor]]

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All tensors by name."""
        return {tensor.name: tensor for file in self.files.values() for tensor in file}

    @property
    def nbytes(self) -> int:
        """The payload of all files."""
        return sum(tensor.nbytes for file in self.files.values() for tensor in file)


def make_small(
    folder: Path | str,
    *,
    form: Form = "k26",
    order: Order = "reference",
    split_layer: bool = False,
    shape_dtype: ShapeDtype = "I32",
    seed: int = 0,
    **dims: int,
) -> Checkpoint:
    """Writes a checkpoint of a few megabytes whose values encode their coordinates.

    Args:
        folder: where to; made if missing, must be empty.
        form: "k26" (nested config, text prefix, vision) or "k2-thinking" (flat, no prefix, rotary tables).
        order: of the data in each file; see `arrange`. `seed` matters to "shuffled" only, never to values.
        split_layer: whether the first MoE layer lies in two files.
        shape_dtype: of `weight_shape`.
        **dims: fields of `Dims` to differ from the small defaults, such as `experts=32`.
    """
    chosen = replace(SMALL, **dims)
    files = plan_files(chosen, form, shape_dtype)
    if split_layer:
        files = split_layer_files(files)

    def content(tensor: Tensor) -> Iterator[memoryview]:
        yield expected_tensor(tensor, chosen).data.cast("B")

    return _make(folder, chosen, form, files, content, order=order, seed=seed)


def make_layers(
    folder: Path | str,
    *,
    layers: int = 1,
    experts: int = FULL.experts,
    order: Order = "reference",
    seed: int = 0,
    dense: bool = False,
) -> Checkpoint:
    """Writes Kimi-K2.6 MoE layers of full width with random values, as fast as the disk takes them.

    All else that a checkpoint needs is there but small. A layer with all 384 experts is 9.8 GB.

    Args:
        folder: where to; made if missing, must be empty.
        layers: MoE layers.
        experts: routed experts of each layer, all that the config knows of.
        order: of the data in each file; see `arrange`.
        seed: of the values.
        dense: whether a dense layer 0 comes before them.
    """
    dims = layers_dims(layers, experts, dense=dense)
    return _make(folder, dims, "k26", plan_files(dims), random_content(dims, seed), order=order, seed=seed)


def make_standin(folder: Path | str) -> Checkpoint:
    """Writes a stand-in for Kimi-K2.6: real names, shapes, sizes and headers, but holes for data.

    The files say they are 595 GB and take 52 MB.
    """
    return _make(folder, FULL, "k26", plan_files(FULL), None)


def _make(
    folder: Path | str,
    dims: Dims,
    form: Form,
    files: list[list[Tensor]],
    content: Content | None,
    *,
    order: Order = "reference",
    seed: int = 0,
) -> Checkpoint:
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise FileExistsError(f"{folder} is not empty")
    write_small_files(folder, make_config(dims, form), form)
    return Checkpoint(folder, dims, form, write_checkpoint(folder, files, content, order, seed))
