"""What a family of models is to the rest of the project: one `Family`, made by a module of this package.

It says how config.json is read, which tensors a checkpoint has, and how each of them is cut. Nothing outside
knows a tensor or a size that only one family has.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import xxhash

from marlin_convert.errors import SourceError
from marlin_convert.models.config_values import refuse_odd_values, shown
from marlin_convert.models.quantization import Quantization

if TYPE_CHECKING:
    from marlin_convert.layout.protocol import ExpertShape

#: where a tensor belongs: to every layer, to the dense ones, to those with routed experts; to the text model
#: beside its layers (embeddings, last norm, head); to what no rank owns a slice of, such as a vision tower
Scope = Literal["layer", "dense", "moe", "top", "common"]
#: column: rows cut into tp; row: columns cut into tp; vocab: rows, of the vocabulary, cut into tp; replicate:
#: whole on every rank; common: whole, once, in common/; experts: stacked and cut as the layout says
Kind = Literal["column", "row", "vocab", "replicate", "common", "experts"]
SizeNames = tuple[str, ...]


@dataclass(frozen=True)
class Rule:
    """A tensor that there is once for each layer of its scope: what it must be, and how it is cut.

    `name` stands under the prefix of its scope. Of the kind `experts` it is the module of the routed experts,
    which have gate_proj, up_proj and down_proj, as compressed-tensors packs them.
    `shape` has names of sizes; None where config.json tells no more than that there is one dimension.
    """

    name: str
    scope: Scope
    kind: Kind
    shape: SizeNames | None = None
    #: accepted dtypes
    dtype: tuple[str, ...] = ("BF16",)
    #: name of the size that may not be cut, such as that of a head
    unit: str | None = None
    #: neighbours with the same value stand next to each other and are offered as one view of that name
    fuse: str | None = None
    #: whether, with fewer units than ranks, each may be on several ranks in a row, as heads of keys are
    shared: bool = False
    #: whether a checkpoint may be without it
    optional: bool = False


@dataclass(frozen=True)
class Facts:
    """A family stated a second time, for the checks alone, so that a mistake in its rules is found.

    Names are told by how they end (in `common` by how they begin); one that is nowhere here is whole on every
    rank.
    """

    #: the module of the routed experts, under that of its layer
    experts: str
    columns: tuple[str, ...]
    rows: tuple[str, ...]
    vocab: tuple[str, ...]
    #: neighbours that may be read as one: how their names end, in order, and how that of the view does
    views: tuple[tuple[tuple[str, ...], str], ...]
    #: constants of the model that its config does not hold as they are, from the text model's config
    constants: Callable[[Mapping[str, Any]], dict[str, float]]
    common: tuple[str, ...] = ()
    #: parts of names of what is cut by all ranks in a layer, where attention and dense layers are not
    by_all: tuple[str, ...] = ()
    #: of what stands before and behind the layers, that which is before them
    embeddings: tuple[str, ...] = ()
    #: those of `columns` that may have fewer slices than there are ranks, each on several ranks in a row, and
    #: the key of the text model's config with the number of slices
    shared: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Family:
    """A family of models.

    `read` makes a ModelConfig of a config.json and raises SourceError for one that is not converted.
    `prefixes` are what may stand before `model.layers` in the names of the text model. `constants` are those
    that an engine needs and the text model's config does not hold as they are. `embeddings` are the rules of
    the scope `top` whose tensors are needed before the layers, those of the first pipeline stage; a family
    without them has one stage only.
    """

    #: for the model card of a checkpoint whose name is not known
    title: str
    architectures: tuple[str, ...]
    prefixes: tuple[str, ...]
    read: Callable[[dict[str, Any]], ModelConfig]
    constants: Callable[[Mapping[str, Any]], dict[str, float]]
    facts: Facts
    embeddings: tuple[str, ...] = ()

    def prefix(self, names: Iterable[str]) -> str:
        """Which of `prefixes` the tensors of a checkpoint have."""
        return next((p for p in self.prefixes if any(name.startswith(p) for name in names)), "")


@dataclass(frozen=True)
class ModelConfig:
    """The model of a checkpoint, as its family reads it from config.json.

    `text` is the text model's section, as it stands; `rules` are all tensors there are, in load order; `dims`
    the sizes they name. Three sizes every family has: `hidden`, `experts` and `moe_intermediate`.
    """

    family: Family
    text: dict[str, Any]
    quantization: Quantization
    layers: int
    moe_layers: frozenset[int]
    dims: dict[str, int]
    rules: tuple[Rule, ...]

    @property
    def hidden(self) -> int:
        """The hidden size."""
        return self.dims["hidden"]

    @property
    def experts(self) -> int:
        """Routed experts of a layer."""
        return self.dims["experts"]

    @property
    def moe_intermediate(self) -> int:
        """A routed expert's intermediate size."""
        return self.dims["moe_intermediate"]

    @property
    def top_k(self) -> int:
        """Routed experts of a token."""
        return experts_per_token(self.text, self.experts)

    @property
    def experts_module(self) -> str:
        """The module of the routed experts, under that of its layer."""
        return next(rule.name for rule in self.rules if rule.kind == "experts")

    def expert_shape(self, moe_tp: int = 1) -> ExpertShape:
        """The routed experts, each cut into `moe_tp` slices."""
        from marlin_convert.layout.protocol import ExpertShape  # imports numpy, which not all need

        return ExpertShape(self.hidden, self.moe_intermediate, self.quantization.scheme, moe_tp)


def experts_per_token(text: Mapping[str, Any], experts: int) -> int:
    """Of `experts`, by the text model's config or the manifest's constants of it; 8 where they do not say."""
    return min(int(text.get("num_experts_per_tok", 8)), experts)


def rules_digest(rules: Iterable[Rule]) -> str:
    """What the manifest has of the rules: xxh3-128 of their JSON, as schemas/README.md says."""
    document = [asdict(rule) for rule in rules]
    return xxhash.xxh3_128_hexdigest(json.dumps(document, sort_keys=True, separators=(",", ":")).encode())


#: by architecture
_FAMILIES: dict[str, Family] = {}


def register(family: Family) -> None:
    """Make a family known under its architectures. Raises ValueError where one of them is taken."""
    if taken := _FAMILIES.keys() & set(family.architectures):
        raise ValueError(f"{min(taken)} is an architecture of {_FAMILIES[min(taken)].title}")
    _FAMILIES.update(dict.fromkeys(family.architectures, family))


def family_of(config: Mapping[str, Any]) -> Family:
    """The family of a config.json. Raises SourceError."""
    architectures = config.get("architectures") or []
    for name in architectures if isinstance(architectures, list) else ():
        if isinstance(name, str) and name in _FAMILIES:
            return _FAMILIES[name]
    titles = list(dict.fromkeys(family.title for family in _FAMILIES.values()))
    raise SourceError(
        f"config.json: architectures {shown(architectures)} is none of {', '.join(_FAMILIES)}; only the"
        f" {' and '.join(titles)} {'family is' if len(titles) == 1 else 'families are'} converted"
    )


def parse_config(config: dict[str, Any]) -> ModelConfig:
    """The checked ModelConfig of a config.json. Raises SourceError for a model or a quantization this project
    does not convert.
    """
    refuse_odd_values(config)
    return family_of(config).read(config)
