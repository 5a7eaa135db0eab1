"""manifest.json: what a converted folder holds, how each tensor of it came to be, and from what."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from msgspec import Meta, Struct, field
from msgspec.structs import replace

from marlin_convert.documents.bounds import MANIFEST
from marlin_convert.documents.codec import Sealed, parse_json, seal_holds, typed
from marlin_convert.documents.fields import (
    AttnTp,
    Bits,
    Checks,
    Digest,
    Dtype,
    Ep,
    GroupSize,
    LayoutId,
    Number,
    Offset,
    Positive,
    Pp,
    RelativePath,
    Shape,
    ShardPath,
    ShardSize,
    Slots,
    Symmetric,
    TensorName,
    Text,
    Tp,
    UnitName,
    about,
)
from marlin_convert.documents.identity import (
    Commit,
    ConfigDigest,
    QuantizationAt,
    Repo,
    SourceIdentity,
    WeightFiles,
)
from marlin_convert.errors import OutputError, UsageError
from marlin_convert.slicing import Placement, Topology
from marlin_convert.storage.files import digest, read_small
from marlin_convert.storage.shard_file import FORMAT, FORMAT_VERSIONS

#: of OUT, and of a rank in its folder
MANIFEST_NAME = "manifest.json"


class StoredLayout(Struct, frozen=True, omit_defaults=True):
    """How the words and scales of the stacked tensors are laid out."""

    id: Annotated[LayoutId, about("how words and scales are laid out")]
    num_bits: Bits
    group_size: GroupSize
    symmetric: Symmetric
    b_q_type: Annotated[
        str | None, about("the kernel's name of the weight type, where a kernel has one", enum=["uint4b8"])
    ] = None
    b_q_type_id: Annotated[int | None, about("the kernel's number of it", enum=[1125899907892224])] = None


class ManifestSource(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the folder was made from."""

    id: Annotated[Digest, about("stands for the source in every shard's header")]
    tensors: Annotated[Positive, about("tensors of the source")]
    payload_bytes: Annotated[Positive, about("bytes of all of them")]
    repo: Repo = None
    revision: Commit = None
    files: WeightFiles
    config: ConfigDigest
    quantization_config_at: QuantizationAt
    not_copied: Annotated[tuple[Text, ...], about("what lay in the source and is not here")]

    @property
    def identity(self) -> SourceIdentity:
        """The identity of the source."""
        return SourceIdentity(repo=self.repo, revision=self.revision, files=self.files, config=self.config)


class Padding(Struct, frozen=True):
    """Zeros at the end of each expert's slice."""

    moe_intermediate: Annotated[Positive, about("a rank's slice of the experts' intermediate size")]
    padded: Annotated[int, Meta(ge=64, lt=1 << 62, multiple_of=64), about("what it is padded to with zeros")]


OptionalPadding = Annotated[Padding | None, about("zeros at the end of each expert's slice, or null")]


class PipelineStage(Struct, frozen=True):
    """What the ranks of a pipeline stage have of the whole model."""

    layers: Annotated[tuple[Number, ...], Meta(min_length=1), about("its layers", uniqueItems=True)]
    has: Annotated[
        tuple[Annotated[Text, Meta(extra_json_schema={"enum": ["embed", "head", "common"]})], ...],
        about("what it has beside them: embeddings, what stands behind the layers, common/"),
    ]


class Parallel(Struct, frozen=True, omit_defaults=True):
    """How the model is split."""

    tp: Tp
    ep: Ep
    moe_tp: Annotated[Positive, about("tp / ep: slices of one expert", maximum=64)]
    rules: Annotated[Digest, about("xxh3-128 of the JSON of the rules")]
    padding: OptionalPadding
    attn_tp: AttnTp | None = None
    pp: Pp = 1
    stages: Annotated[
        tuple[PipelineStage, ...], about("what each stage has, in order; where pp is not 1")
    ] = ()
    slots: Slots | None = None

    def __post_init__(self) -> None:
        for name, parts in (("ep", self.ep), ("attn_tp", self.attn_tp or self.tp)):
            if self.tp % parts:
                raise ValueError(f"{name} {parts} does not divide tp {self.tp}")
        if len(self.stages) != (self.pp if self.pp > 1 else 0):
            raise ValueError(f"pp {self.pp} has {len(self.stages)} stages")
        if (self.slots or 0) % self.ep:
            raise ValueError(f"ep {self.ep} does not divide the {self.slots} slots")

    def stage_of(self, unit: Unit) -> int | None:
        """The stage that has a unit; None where there are no stages, or none has it."""
        has = [unit.name in stage.has or unit.layer in stage.layers for stage in self.stages]
        return has.index(True) if any(has) else None

    def slices(self, origin: Origin) -> int:
        """Into how many slices a tensor is cut that is not stacked."""
        ranks = self.attn_tp if origin.parts == "attn_tp" and self.attn_tp else self.tp
        return ranks // origin.replicas


class Origin(Struct, frozen=True, omit_defaults=True):
    """How a stored tensor came to be."""

    tensor: Annotated[TensorName, about("name in the shards")]
    rule: Annotated[
        Text, about("how it is cut", enum=["column", "row", "vocab", "replicate", "common", "experts"])
    ]
    axis: Annotated[Number | None, about("the axis of the source matrix that is cut", enum=[0, 1, None])]
    parts: Annotated[
        str | None, about("into how many parts it is cut", enum=["tp", "attn_tp", "moe_tp", None])
    ]
    sources: Annotated[
        tuple[Text, ...],
        Meta(min_length=1),
        about("source names in order; {expert} stands for the expert's number", maxItems=2),
    ] = field(name="from")
    replicas: Annotated[Positive, about("neighbouring ranks with the same part; left out where 1")] = 1


class Unit(Struct, frozen=True, omit_defaults=True):
    """A layer, or what stands before and behind them (top, or embed and head where there are stages), or what
    no rank owns a slice of (common).
    """

    name: Annotated[UnitName, about("the unit")]
    layer: Annotated[Number | None, about("its layer; null for the others")]
    tensors: Annotated[tuple[Origin, ...], Meta(min_length=1), about("how each stored tensor came to be")]
    checked: Annotated[
        tuple[Text, ...], about("source tensors that are not stored because they only repeat a shape")
    ]
    slots: Annotated[
        tuple[Number, ...] | None,
        about("where a map places experts: the one in each slot, by its number in the model"),
    ] = None

    @property
    def routed(self) -> bool:
        """Whether it has routed experts."""
        return any(origin.rule == "experts" for origin in self.tensors)

    def placed(self, count: int) -> Sequence[int]:
        """The routed expert in each of `count` slots."""
        return range(count) if self.slots is None else self.slots


class StoredTensor(Struct, frozen=True, omit_defaults=True):
    """A tensor of a shard."""

    name: Annotated[TensorName, about("name; __pad__.N is a filler")]
    dtype: Annotated[Dtype, about("safetensors dtype")]
    shape: Annotated[Shape, about("shape in this file")]
    offset: Annotated[Offset, about("first byte, from the start of the file")]
    size: Annotated[Positive, about("bytes")]
    digest: Annotated[
        Digest, about("xxh3-128 of its bytes; of a stacked tensor, of its experts' digests joined")
    ]
    experts: Annotated[
        Annotated[int, Meta(ge=0, lt=1 << 62, multiple_of=16)] | None,
        about("of stacked tensors alone: offset of its experts' digests in digests.bin"),
    ] = None


class FusedTensor(Struct, frozen=True):
    """Neighbours that may be read as one tensor."""

    name: Annotated[TensorName, about("the engine's name of the view")]
    dtype: Annotated[Dtype, about("dtype of all members")]
    shape: Annotated[Shape, Meta(min_length=1), about("shape of all members joined along the first axis")]
    offset: Annotated[Offset, Meta(multiple_of=4096), about("first byte, from the start of the file")]
    members: Annotated[
        tuple[TensorName, ...],
        Meta(min_length=2),
        about("the tensors it is made of, in order", uniqueItems=True),
    ]


class Shard(Struct, frozen=True):
    """One shard file; its tensors are in file order, fillers included."""

    path: Annotated[ShardPath, about("place in OUT")]
    unit: Annotated[UnitName, about("unit it belongs to")]
    rank: Annotated[Number | None, about("rank that loads it; null in common/")]
    size: Annotated[ShardSize, about("bytes of the file")]
    header: Annotated[Digest, about("xxh3-128 of the first 8 + H bytes")]
    digest: Annotated[Digest, about("xxh3-128 of the digests of header and tensors joined")]
    tensors: Annotated[
        tuple[StoredTensor, ...],
        Meta(min_length=1, max_length=1024),
        about("in file order, fillers included"),
    ]
    fused: Annotated[tuple[FusedTensor, ...], about("tensors that may be read as one")]

    @property
    def stacked(self) -> tuple[StoredTensor, ...]:
        """The tensors of routed experts."""
        return tuple(tensor for tensor in self.tensors if tensor.experts is not None)

    def __post_init__(self) -> None:
        if len({tensor.name for tensor in self.tensors}) != len(self.tensors):
            raise ValueError(f"{self.path} has a tensor twice")

    @property
    def folder(self) -> str:
        """The folder of OUT that it lies in."""
        return self.path.rpartition("/")[0]

    @property
    def file(self) -> str:
        """Its name in that folder."""
        return self.path.rpartition("/")[2]


class ListedFile(Struct, frozen=True):
    """A file beside the shards."""

    path: Annotated[RelativePath, about("place in OUT")]
    size: Annotated[Number, about("bytes")]
    digest: Annotated[Digest, about("xxh3-128 of its bytes")]

    @staticmethod
    def of(path: str, data: bytes) -> ListedFile:
        """What is listed of a file that holds `data`."""
        return ListedFile(path, len(data), digest(data).hex())


if TYPE_CHECKING:
    Constant = Any  # whoever reads one knows what it is
else:
    Constant = int | float | str | bool | None
#: keys are data here: those of the source's config.json
Model = Annotated[
    dict[str, Constant],
    about(
        "constants of the text model for an engine, flat: KEY or SECTION.KEY of its config, softmax_scale",
        required=["hidden_size", "num_hidden_layers", "softmax_scale"],
        properties={
            "softmax_scale": {
                "type": "number",
                "exclusiveMinimum": 0,
                "description": "of the attention, YaRN's magnitude included",
            },
            "hidden_size": {"type": "integer", "minimum": 1, "description": "hidden size"},
            "num_hidden_layers": {
                "type": "integer",
                "minimum": 1,
                "description": "layers of the whole model",
            },
        },
    ),
]


class Manifest(Sealed, frozen=True, kw_only=True):
    """The whole of manifest.json."""

    layout: Annotated[StoredLayout, about("the layout of the stacked tensors")]
    checks: Annotated[Checks, about("what was proven while converting: none, exact or kernel")]
    source: Annotated[ManifestSource, about("what it was made from")]
    parallel: Annotated[Parallel, about("how it is split")]
    ranks: Annotated[tuple[Number, ...], about("ranks that are here", uniqueItems=True)]
    layers: Annotated[tuple[Number, ...], about("layers that are here", uniqueItems=True)]
    complete: Annotated[bool, about("whether all ranks, layers, top and common are here")]
    model: Model
    units: Annotated[tuple[Unit, ...], Meta(min_length=1), about("once per unit, the same for all ranks")]
    shards: Annotated[tuple[Shard, ...], Meta(min_length=1), about("every .safetensors file")]
    files: Annotated[
        tuple[ListedFile, ...],
        Meta(min_length=1),
        about("every other file but manifest.json and provenance.json"),
    ]

    def __post_init__(self) -> None:
        names = [unit.name for unit in self.units]
        if len(set(names)) != len(names) or not {shard.unit for shard in self.shards} <= set(names):
            raise ValueError("units and the units of shards do not go together")
        paths = [*(shard.path for shard in self.shards), *(file.path for file in self.files)]
        if len(set(paths)) != len(paths):
            raise ValueError(f"{next(path for path in paths if paths.count(path) > 1)} is listed twice")
        self._refuse_other_slots()

    def _refuse_other_slots(self) -> None:
        """Raise ValueError where layers have not the slots that `parallel` says."""
        slots = self.parallel.slots
        for unit in self.units:
            found = None if unit.slots is None else len(unit.slots)
            if found != (slots if unit.routed else None):
                raise ValueError(f"{unit.name} has {found} slots, of parallel.slots {slots}")
        if slots is None:
            return
        local, routed = slots // self.ep, {unit.name for unit in self.units if unit.routed}
        for shard in self.shards:
            counts = {tensor.shape[:1] for tensor in shard.stacked}
            if counts - ({(local,)} if shard.unit in routed else set()):
                raise ValueError(f"{shard.path} has a tensor of other than {local} experts")

    def held(self) -> Callable[[Shard], Sequence[int]]:
        """Says of any shard which routed experts are in it, by their numbers in the model, in the order of
        its stacked tensors; none where it has none.
        """
        topology, layers = self.topology, {unit.name: unit.layer for unit in self.units}

        def experts_of(shard: Shard) -> Sequence[int]:
            layer, stacked = layers[shard.unit], shard.stacked
            if shard.rank is None or layer is None or not stacked:
                return ()
            return topology.held(shard.rank, layer, stacked[0].shape[0] * topology.ep)

        return experts_of

    @property
    def topology(self) -> Topology:
        """The split, with the placement of the layers that are here."""
        parallel, placement = self.parallel, None
        if parallel.slots is not None:
            rows = {unit.layer: unit.slots for unit in self.units if unit.layer is not None and unit.slots}
            placement = Placement(parallel.slots, rows)
        return Topology(parallel.tp, parallel.ep, parallel.attn_tp, parallel.pp, placement)

    def listing(self, documents: Mapping[str, bytes]) -> Manifest:
        """This manifest with more files listed: what they hold, by their places."""
        more = [ListedFile.of(path, data) for path, data in documents.items()]
        return replace(self, files=tuple(sorted([*self.files, *more], key=lambda file: file.path)))

    @property
    def tp(self) -> int:
        """Ranks in all."""
        return self.parallel.tp

    @property
    def ep(self) -> int:
        """Groups of ranks that the routed experts are split over."""
        return self.parallel.ep

    @property
    def layout_id(self) -> str:
        """How words and scales are laid out."""
        return self.layout.id

    @property
    def group_size(self) -> int:
        """Weights that share a scale."""
        return self.layout.group_size

    @property
    def source_id(self) -> str:
        """What every shard's header has of the source."""
        return self.source.id


def read_manifest(out: Path) -> Manifest:
    """The manifest of a converted folder. Raises OutputError where there is none, or it is damaged or of
    another version; UsageError where it is no converted folder, or a rank's folder in one.
    """
    manifest, here = parse_manifest(sealed_manifest(out), out / MANIFEST_NAME), out.resolve().as_posix()
    for folder in {f"/{shard.folder}" for shard in manifest.shards}:
        above = Path(here.removesuffix(folder))
        if here.endswith(folder) and (above / MANIFEST_NAME).exists():
            raise UsageError(f"{out} is one folder of the conversion {above}; give that")
    return manifest


def sealed_manifest(out: Path) -> bytes:
    """The bytes of the manifest, which are as they were written. Raises what `read_manifest` raises."""
    path = out / MANIFEST_NAME
    try:
        raw = read_small(path, MANIFEST)
    except FileNotFoundError:
        if not out.is_dir():
            raise UsageError(f"{out} is not a folder") from None
        if (out / "config.json").exists() and not any(out.glob("rank-*")) and not any(out.glob("stage-*")):
            raise UsageError(
                f"{out} is no conversion; if it is the published checkpoint, give the output folder instead"
            ) from None
        what = (
            "its conversion has not finished: run the same convert command again"
            if (out / ".work").exists()
            else "is it a converted folder?"
        )
        raise OutputError(f"{out} has no manifest.json; {what}") from None
    except OSError as error:
        raise OutputError(f"{path}: cannot be read ({error.strerror})") from error
    if not seal_holds(raw):
        raise OutputError(
            f"{path}: its bytes do not match its own digest: it was damaged or edited; make OUT again:"
            " convert with --overwrite"
        )
    return raw


def parse_manifest(raw: bytes, path: Path) -> Manifest:
    """The manifest in `raw`. Raises OutputError, which says what is wrong where."""
    complaint = f"{path}: not a manifest of this format"
    try:
        document = parse_json(raw)
        found = f"{document['format']} version {document['format_version']!r}"
    except (KeyError, TypeError, ValueError) as error:
        raise OutputError(f"{complaint} ({error!r})") from error
    if found not in [f"{FORMAT} version {version}" for version in FORMAT_VERSIONS]:
        versions = " and ".join(map(str, FORMAT_VERSIONS))
        raise OutputError(f"{path}: it is {found}, this program reads {FORMAT} versions {versions}")
    return typed(document, Manifest, complaint)
