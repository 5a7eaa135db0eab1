"""What `verify --json`, `verify --kernel --json` and `--report` say."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from marlin_convert.documents.fields import Count, OneOrMore, Seconds, Share, Text, about

Coordinate = Annotated[Count | None, about("null where it does not apply")]


class ReportedFinding(Struct, frozen=True):
    """One thing that is wrong, and where."""

    path: Annotated[Text, about("file in OUT")]
    what: Annotated[Text, about("what is wrong with it")]
    layer: Coordinate
    expert: Coordinate
    projection: Annotated[
        str | None,
        about("matrix of the expert", enum=["gate_proj", "up_proj", "down_proj", "w13", "w2", None]),
    ]
    rank: Coordinate
    message: Annotated[Text, about("all of it in one line")]


Findings = Annotated[tuple[ReportedFinding, ...], about("all that is wrong")]


ShardState = Literal["exact", "sound", "unread", "suspect", "wrong"]


class CheckedShard(Struct, frozen=True):
    """How a file of a unit stands."""

    rank: Annotated[Count | None, about("whose it is; null in common/")]
    state: Annotated[
        ShardState,
        about(
            "exact: read and equal to the source; sound: read, whole, but not all of its unit could be put"
            " together; unread: its data was not read, since another file of its unit is unsound; suspect:"
            " something is wrong in its unit, of which rank is not known; wrong: a finding names it"
        ),
    ]


class CountedScale(Struct, frozen=True):
    """A bin of scales, a quarter of the way to the next power of two wide."""

    begin: Annotated[Share, about("the smallest magnitude in it")]
    count: Annotated[OneOrMore, about("scales in it")]


class CountedValues(Struct, frozen=True):
    """Codes and scales of a projection of the routed experts of a layer, of some 8 rows of each matrix."""

    projection: Annotated[str, about("which", enum=["gate_proj", "up_proj", "down_proj"])]
    codes: Annotated[
        tuple[Count, ...], Meta(min_length=16, max_length=16), about("how often 0 to 15 occur, as stored")
    ]
    scales: Annotated[tuple[CountedScale, ...], about("magnitudes of the finite scales, where there are any")]
    negative: Annotated[Count, about("scales below zero")]
    not_finite: Annotated[Count, about("scales that are infinite or no number")]


class CheckedUnit(Struct, frozen=True):
    """What was looked at of a unit."""

    unit: Annotated[Text, about("the unit")]
    layer: Annotated[Count | None, about("its layer; null for top and common")]
    bytes: Annotated[Count, about("bytes of tensors read")]
    seconds: Annotated[Seconds, about("time it took, summed over threads")]
    tensors_proven: Annotated[Count, about("source tensors proven exact")]
    tensors_unproven: Annotated[Count, about("source tensors that could not be put together")]
    shards: Annotated[tuple[CheckedShard, ...], about("its files")]
    values: Annotated[
        tuple[CountedValues, ...], about("of the routed experts that could be put together, if any")
    ]


class VerifyReport(Struct, frozen=True):
    """What was looked at, and what is wrong."""

    ok: Annotated[bool, about("whether nothing is wrong")]
    against: Annotated[
        Literal["source", "digests"],
        about("whether the published files were read, or the digests that OUT keeps stand for them"),
    ]
    of_all: Annotated[bool, about("whether all that is there was looked at, not some ranks or layers only")]
    files: Annotated[Count, about("files looked at")]
    bytes: Annotated[Count, about("bytes read and compared")]
    tensors_proven: Annotated[Count, about("source tensors proven exact")]
    tensors_unproven: Annotated[
        Count, about("source tensors that cannot be put together from what is in OUT")
    ]
    seconds: Annotated[
        dict[str, Seconds],
        about("per stage, and all of it", required=["documents and headers", "tensors", "total"]),
    ]
    environment: Annotated[
        dict[str, str | None], about("what ran, for reports: package versions by name, the machine")
    ]
    units: Annotated[tuple[CheckedUnit, ...], about("every unit")]
    findings: Findings


class MatrixErrors(Struct, frozen=True):
    """How the kernel read one matrix of many experts."""

    projection: Annotated[str, about("which matrix", enum=["w13", "w2"])]
    wrong: Annotated[Count, about("weights that the kernel reads differently, of all of them")]
    relative_error: Annotated[
        Share | None, about("the largest of random activations, in norm; null where one is not finite")
    ]
    max_error: Annotated[
        Share | None, about("the largest difference of one output; null where one is not finite")
    ]
    relative_errors: Annotated[
        tuple[Share | None, ...],
        about("of each expert, in the order of `experts`, to three digits; empty in the short form"),
    ]


class KernelRank(Struct, frozen=True):
    """The experts of a rank in a layer."""

    rank: Annotated[Count, about("rank")]
    ok: Annotated[bool, about("whether all of them are right")]
    experts: Annotated[tuple[Count, ...], about("those that ran; empty in the short form")]
    matrices: Annotated[tuple[MatrixErrors, ...], about("w13 and w2")]


class KernelLayer(Struct, frozen=True):
    """A layer's experts."""

    layer: Annotated[Count, about("layer")]
    seconds: Annotated[Seconds, about("time it took")]
    ranks: Annotated[tuple[KernelRank, ...], about("the ranks that ran")]


class FusedVerdict(Struct, frozen=True):
    """The whole routed MoE of a layer, summed over ranks, for one number of tokens."""

    layer: Annotated[Count, about("layer")]
    tokens: Annotated[OneOrMore, about("tokens of the call")]
    relative_error: Annotated[Share | None, about("against float32, in norm; null where it is not finite")]
    tolerance: Annotated[Share, about("the most that it may be")]
    ok: Annotated[bool, about("whether it is right")]


_TEXT = {"type": "string"}
Environment = Annotated[
    dict[str, Any],
    about(
        "what ran; package versions by name, null where not installed",
        required=["provider", "torch", "layout", "source", "tp", "ep"],
        properties={
            "provider": _TEXT | {"description": "where the kernel came from"},
            "torch": _TEXT | {"description": "version of torch"},
            "layout": _TEXT | {"description": "layout of the shards"},
            "source": _TEXT | {"pattern": "^[0-9a-f]{32}$", "description": "source id of the shards"},
            "tp": {"type": "integer", "minimum": 1, "description": "ranks in all"},
            "ep": {"type": "integer", "minimum": 1, "description": "groups of experts"},
            "gpu": _TEXT | {"description": "name of the GPU"},
            "capability": _TEXT | {"description": "its compute capability"},
            "cuda": {"type": ["string", "null"], "description": "CUDA that torch was built for"},
        },
        additionalProperties={"type": ["string", "null"]},
    ),
]


class KernelCheck(Struct, frozen=True):
    """What the kernel read in the shards."""

    ok: Annotated[bool, about("whether everything that ran was right")]
    model: Annotated[bool, about("whether a model on the CPU ran in the kernel's place")]
    environment: Environment
    tolerance: Annotated[Share, about("the most that the relative error of an expert may be")]
    weights_read_back: Annotated[
        Count, about("outputs of the one-hot check that were compared, padding included")
    ]
    seconds: Annotated[dict[str, Seconds], about("per stage, and `total`")]
    matrices: Annotated[Count, about("experts' matrices that were checked")]
    layers: Annotated[tuple[KernelLayer, ...], about("every layer that ran")]
    fused: Annotated[
        tuple[FusedVerdict, ...], about("the whole routed MoE, summed over all ranks, against float32")
    ]
    skipped: Annotated[tuple[str, ...], about("what did not run, and why")]
    findings: Findings
