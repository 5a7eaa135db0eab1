"""What `verify --json`, `verify --kernel --json` and `--report` say."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Struct

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


class VerifyReport(Struct, frozen=True):
    """What was looked at, and what is wrong."""

    ok: Annotated[bool, about("whether nothing is wrong")]
    files: Annotated[Count, about("files looked at")]
    bytes: Annotated[Count, about("bytes read and compared")]
    tensors_proven: Annotated[Count, about("source tensors proven exact")]
    tensors_unproven: Annotated[
        Count, about("source tensors that cannot be put together from what is in OUT")
    ]
    findings: Findings


class Verdict(Struct, frozen=True):
    """One expert's matrix on one rank."""

    layer: Annotated[Count, about("layer")]
    rank: Annotated[Count, about("rank")]
    expert: Annotated[Count, about("routed expert")]
    projection: Annotated[str, about("its matrix", enum=["w13", "w2"])]
    wrong: Annotated[Count | None, about("weights that the kernel reads differently; null where not asked")]
    relative_error: Annotated[
        Share | None, about("of random activations, in norm; null where not asked or not finite")
    ]
    max_error: Annotated[Share | None, about("the largest difference of one output; null as relative_error")]
    ok: Annotated[bool, about("whether it is right")]


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
    environment: Environment
    weights_read_back: Annotated[
        Count, about("outputs of the one-hot check that were compared, padding included")
    ]
    seconds: Annotated[dict[str, Seconds], about("per stage, and `total`")]
    experts: Annotated[
        tuple[Verdict, ...],
        about("one entry per matrix of an expert on a rank; empty where the short form was asked for"),
    ]
    fused: Annotated[
        tuple[FusedVerdict, ...], about("the whole routed MoE, summed over all ranks, against float32")
    ]
    skipped: Annotated[tuple[str, ...], about("what did not run, and why")]
    findings: Findings
