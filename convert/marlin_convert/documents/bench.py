"""What `bench` measures. Seconds and rates are medians over rounds where nothing else is said."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from marlin_convert.documents.fields import Count, Ep, OneOrMore, Seconds, Share, Text, Tp, about
from marlin_convert.documents.provenance import StageTimes

Rate = Annotated[float, Meta(ge=0)]


class ConversionSettings(Struct, frozen=True, omit_defaults=True):
    """What was converted, or what was done with what it came to."""

    verb: Annotated[str, about("what was measured", enum=["convert", "restore", "reshard"])]
    layers: Annotated[Count, about("layers")]
    experts: Annotated[Count, about("experts of each")]
    rounds: Annotated[Count, about("rounds")]
    tp: Tp
    ep: Ep
    to_tp: Annotated[Tp | None, about("of reshard: tp of what it makes")] = None
    to_ep: Annotated[Ep | None, about("of reshard: ep of what it makes")] = None


class BenchMachine(Struct, frozen=True):
    """Where it ran."""

    cores: Annotated[Count | None, about("cores")]
    machine: Annotated[str, about("architecture")]
    system: Annotated[str, about("kernel and its version")]


PeakAnonymous = Annotated[
    Count | None, about("bytes of anonymous memory, summed over the process tree, at most")
]
WallMedian = Annotated[Seconds | None, about("seconds with the start of the interpreter")]


class Timed(Struct, frozen=True):
    """One way to do a thing, over all rounds."""

    name: Annotated[str, about("the way")]
    median: Annotated[Seconds, about("seconds")]
    least: Annotated[Seconds, about("of the fastest round")]
    most: Annotated[Seconds, about("of the slowest round")]
    seconds: Annotated[tuple[Seconds, ...], about("of every round, in order")]
    gb_per_s: Annotated[Rate, about("bytes over the median")]


class ConversionVariant(Timed, frozen=True, omit_defaults=True):
    """`cp`, or one way to do it."""

    ratio_to_cp: Annotated[Share, about("median over the median of cp")]
    peak_anonymous: PeakAnonymous = None
    wall_median: WallMedian = None
    stages: Annotated[
        StageTimes | None,
        about(
            "per stage, summed over threads; check, of the exact variants, is by difference: how much longer"
            " repacking takes with it"
        ),
    ] = None


class ConversionBench(Struct, frozen=True):
    """Conversion, or the way back, or to another split, against `cp` of the checkpoint."""

    bytes: Annotated[Count, about("bytes of the checkpoint's files")]
    settings: Annotated[ConversionSettings, about("what was converted")]
    machine: Annotated[BenchMachine, about("where it ran")]
    variants: Annotated[tuple[ConversionVariant, ...], about("cp first, then the ways to do it")]


class VerifyWay(Timed, frozen=True, omit_defaults=True):
    """Plain reads, or `verify`."""

    bytes: Annotated[Count, about("bytes read: of whole files, or of what verify reads and compares")]
    resident: Annotated[Share, about("share of the files in the page cache before a round, at most")]
    peak_anonymous: PeakAnonymous = None
    wall_median: WallMedian = None


class VerifyBench(Struct, frozen=True):
    """`verify` against plain parallel reads of the same shards."""

    files: Annotated[Count, about("shard files read")]
    rounds: Annotated[OneOrMore, about("rounds")]
    readers: Annotated[OneOrMore, about("threads of the plain reads")]
    in_memory: Annotated[bool, about("whether the file system is one in memory, where nothing is cold")]
    direct: Annotated[bool, about("whether both read past the page cache, which the file system may not do")]
    machine: Annotated[BenchMachine, about("where it ran")]
    ways: Annotated[tuple[VerifyWay, ...], about("plain reads, then verify by its own clock")]
    of_plain: Annotated[Share, about("gb_per_s of verify over that of plain reads, median of the rounds")]
    of_plain_all: Annotated[tuple[Share, ...], about("the same, of each round")]


class KernelRow(Struct, frozen=True):
    """One line of the table; times in milliseconds, medians.

    `w13_ms` and `w2_ms` are the kernel alone with the alignment given, the rest around it is plain torch.
    """

    tokens: Annotated[OneOrMore, about("tokens of a call")]
    routing: Annotated[
        str,
        about("uniform: all experts alike; skewed: popularity by Zipf's law", enum=["uniform", "skewed"]),
    ]
    use_atomic_add: Annotated[bool, about("the kernel's flag")]
    block_size: Annotated[int, about("rows of a block", enum=[8, 16, 32, 48, 64])]
    calls: Annotated[OneOrMore, about("calls in one CUDA graph, each with a routing of its own")]
    experts_hit: Annotated[Share, about("of this rank, mean over the calls")]
    bytes: Annotated[Share, about("words and scales of the experts hit, mean over the calls")]
    floor_ms: Annotated[Share, about("bytes over memory_bandwidth")]
    w13_ms: Annotated[Share, about("the first GEMM")]
    w2_ms: Annotated[Share, about("the second GEMM")]
    fused_ms: Annotated[Share, about("w13, silu, w2 and the sum over experts, alignment given")]
    whole_ms: Annotated[Share, about("the same and the alignment")]
    spread: Annotated[Share, about("largest (most - least) / median of the four times")]
    bandwidth_share: Annotated[Share, about("floor_ms over w13_ms + w2_ms")]
    tokens_per_second: Annotated[Share, about("tokens over fused_ms: of this layer alone")]
    error: Annotated[
        Share | None,
        about(
            "relative difference of the fused result from that of the repeatable flags; null where it is"
            " not finite"
        ),
    ]


class KernelBench(Struct, frozen=True):
    """The Marlin MoE kernel on one converted layer of one rank."""

    layer: Annotated[Count, about("layer")]
    rank: Annotated[Count, about("rank")]
    tp: Tp
    ep: Ep
    experts: Annotated[OneOrMore, about("of the model")]
    local_experts: Annotated[OneOrMore, about("of this rank")]
    top_k: Annotated[OneOrMore, about("experts of a token")]
    hidden: Annotated[OneOrMore, about("hidden size")]
    intermediate: Annotated[OneOrMore, about("the rank's slice as stored, padding included")]
    group_size: Annotated[OneOrMore, about("weights that share a scale")]
    expert_bytes: Annotated[OneOrMore, about("words and scales of one expert on this rank")]
    rounds: Annotated[OneOrMore, about("replays")]
    memory_bandwidth: Annotated[
        float,
        Meta(gt=0),
        about(
            "bytes a second: the better of a large copy inside the device, read and written together, and a"
            " large read"
        ),
    ]
    memory_bandwidth_spread: Annotated[Share, about("(most - least) / median of it")]
    l2_bytes: Annotated[Count, about("0 where not known (CPU)")]
    environment: Annotated[
        dict[str, str | None],
        about(
            "what ran; null where there is none or it is not installed",
            required=["provider", "torch", "device", "gpu", "cuda"],
        ),
    ]
    notes: Annotated[tuple[str, ...], about("what to know when reading the figures")]
    rows: Annotated[tuple[KernelRow, ...], about("a line for each number of tokens, routing and flag")]


class LayoutRow(Struct, frozen=True):
    """One function on one shape."""

    shape: Annotated[str, about("of the matrix")]
    memory: Annotated[str, about("where it lies", enum=["in cache", "streaming"])]
    function: Annotated[str, about("what ran")]
    gb_per_s: Annotated[Rate, about("of one core, median")]
    best_gb_per_s: Annotated[Rate, about("of the fastest round")]


class LayoutBench(Struct, frozen=True):
    """GB/s a core of the layout functions."""

    rounds: Annotated[Count, about("rounds")]
    rows: Annotated[tuple[LayoutRow, ...], about("a line for each function, shape and place")]


Steps = dict[str, Seconds]


class LoadRow(Struct, frozen=True):
    """One way to load, warm or cold."""

    name: Annotated[Text, about("the way")]
    temperature: Annotated[str, about("whether the files were in the page cache", enum=["warm", "cold"])]
    bytes: Annotated[Count, about("bytes read")]
    seconds: Annotated[Seconds, about("median")]
    gb_per_s: Annotated[Rate, about("bytes over seconds")]
    steps: Annotated[Steps, about("seconds of each step, medians")]
    first: Annotated[
        Steps | None,
        about(
            "seconds of the steps of the first load of this way in the run, which is in no median. The very"
            " first, of auto, also makes pinned memory and fetches compiled code. Null for cold ways"
        ),
    ]
    all: Annotated[tuple[Seconds, ...], about("seconds of every round")]
    limit: Annotated[
        str | None, about("the least of the limits that apply to this way; null for the engine's")
    ]
    of_limit: Annotated[Share | None, about("gb_per_s over that limit")]


class LoadBench(Struct, frozen=True):
    """One rank to the GPU, against the limits of the machine."""

    rank: Annotated[Count, about("rank")]
    tp: Tp
    ep: Ep
    bytes: Annotated[Count, about("bytes of the rank's shards")]
    threads: Annotated[
        Count,
        about(
            "threads that measured the limits and read for the engine's way. Ours are those of load_rank (at"
            " most 16 from the page cache, 8 from a disk, 1 to register) unless --threads was given"
        ),
    ]
    rounds: Annotated[OneOrMore, about("rounds, warm and cold")]
    limits: Annotated[dict[str, Rate], about("GB/s of the machine, median of what the rounds measured")]
    limits_all: Annotated[dict[str, tuple[Rate, ...]], about("the same, of each round")]
    rows: Annotated[tuple[LoadRow, ...], about("a line for each way, warm and cold")]
