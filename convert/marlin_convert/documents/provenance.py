"""provenance.json: who, when, how fast; never compared."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct

from marlin_convert.documents.bounds import PROVENANCE
from marlin_convert.documents.codec import Sealed, seal_holds
from marlin_convert.documents.fields import Number, Seconds, Text, about
from marlin_convert.storage.files import read_small

#: its name in OUT
NAME = "provenance.json"


class Stage(Struct, frozen=True):
    """Time and bytes of one stage of the conversion."""

    seconds: Annotated[Seconds, about("summed over threads")]
    bytes: Annotated[Number, about("bytes that went through")]


StageTimes = Annotated[
    dict[Annotated[str, Meta(pattern="^[a-z]+$")], Stage], about("time and bytes of each stage")
]


class Provenance(Sealed, frozen=True, kw_only=True):
    """The whole of provenance.json."""

    tool: Annotated[str, Meta(pattern="^marlin-convert "), about("program and version")]
    when: Annotated[
        str, Meta(pattern=r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00$"), about("end of the conversion, UTC")
    ]
    host: Annotated[str, about("name of the machine")]
    machine: Annotated[Text, about("what kind of machine")]
    command: Annotated[tuple[str, ...], about("the command line, without secrets")]
    source: Annotated[Text, about("where the source was")]
    stages: StageTimes


def is_as_written(out: Path) -> bool:
    """Whether that of OUT is as it was written. Raises OSError where it is no file, MachineError."""
    return seal_holds(read_small(out / NAME, PROVENANCE))
