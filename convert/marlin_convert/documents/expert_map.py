"""The file of `--expert-map`: which routed expert is in which slot, as SGLang takes it in
`--init-expert-location`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct

from marlin_convert.documents.bounds import EXPERT_MAP
from marlin_convert.documents.codec import parse_json, typed, write
from marlin_convert.documents.fields import Number, about
from marlin_convert.errors import OutputError, UsageError
from marlin_convert.storage.files import digest, read_small

#: what else is found in files of this kind, and what it is
NO_MAP = {
    "logical_count": "that is how often each expert was asked for, a load and not yet a placement",
    "last_physical_to_logical_map": "write its rows under the key physical_to_logical_map",
}


class ExpertMap(Struct, frozen=True):
    """A row for each layer, that of a dense one being without meaning, or for each MoE layer alone."""

    physical_to_logical_map: Annotated[
        tuple[Annotated[tuple[Number, ...], Meta(min_length=1)], ...],
        Meta(min_length=1),
        about("per layer the expert in each slot, by its number in the model; all rows are of one length"),
    ]

    def __repr__(self) -> str:
        rows = self.physical_to_logical_map
        return f"ExpertMap({len(rows)} rows, {len(rows[0])} slots)"


def read_expert_map(path: Path) -> ExpertMap:
    """The map in a file. Raises UsageError, which says what is wrong with it."""
    try:
        document = parse_json(read_small(path, EXPERT_MAP))
    except OSError as error:
        raise UsageError(f"{path}: cannot be read as an expert map ({error.strerror})") from error
    except ValueError as error:
        hint = "; torch.load reads a .pt file, its lists are then written as JSON"
        raise UsageError(f"{path}: is no JSON ({error}){hint if path.suffix == '.pt' else ''}") from error
    if not isinstance(document, dict) or "physical_to_logical_map" not in document:
        found = [what for key, what in NO_MAP.items() if isinstance(document, dict) and key in document]
        raise UsageError(
            f"{path}: has no physical_to_logical_map, a list of each layer's experts by slot"
            + "".join(f"; {what}" for what in found)
        )
    try:
        return typed(document, ExpertMap, f"{path}: is no expert map")
    except OutputError as error:
        raise UsageError(str(error)) from error


def placement_digest(slots: int, rows: Iterable[Sequence[int]]) -> str:
    """Stands for a placement where two are compared: that of these layers, in their order."""
    return digest(write([slots, [list(row) for row in rows]])).hex()
