"""What the loaders for published engines share before a byte is read: their options, and what they refuse.

An engine says where it stands (`Served`); each refusal names what the shards are, what the engine is, and the
flag or command that mends it. Nothing here needs torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from marlin_convert.documents.manifest import Manifest, read_manifest
from marlin_convert.documents.rank_manifest import read_rank_manifest
from marlin_convert.engines.torch_loader import PATHS
from marlin_convert.errors import OutputError, UsageError
from marlin_convert.shards.reader import Shards, open_shards
from marlin_convert.storage.files import read_small
from marlin_convert.storage.shard_file import FORMAT

#: bytes of a config.json that are read
MAX_CONFIG = 16 << 20
#: the ways of `load_rank` that fill tensors which are there already
FILLING = tuple(path for path in PATHS if path != "mapped")


@dataclass(frozen=True)
class Options:
    """The keys of an engine's --model-loader-extra-config. `shards` is the converted folder, by default the
    model path; `path` as in `load_rank`; `verify_on_load` hashes every tensor where it arrived; with
    `untested_version` an engine's version that was not tested is tried all the same.
    """

    shards: str
    path: str = "auto"
    verify_on_load: bool = False
    untested_version: bool = False

    @staticmethod
    def of(extra: Mapping[str, Any], model_path: str) -> Options:
        """The options given, checked. Raises UsageError for a key or a value that is not one."""
        known = {field.name: field for field in fields(Options)}
        for key, value in extra.items():
            if key not in known:
                raise UsageError(
                    f"--model-loader-extra-config has the key {key}; {FORMAT} knows {', '.join(known)}"
                )
            wanted = str if key in ("shards", "path") else bool
            if not isinstance(value, wanted):
                raise UsageError(
                    f"--model-loader-extra-config: {key} is {value!r}, expected"
                    f" {'a string' if wanted is str else 'true or false'}"
                )
        options = Options(**{"shards": model_path, **extra})
        if options.path not in FILLING:
            raise UsageError(
                f"--model-loader-extra-config: path {options.path}; choose one of {', '.join(FILLING)}"
            )
        return options


@dataclass(frozen=True)
class Served:
    """Where a process of an engine stands: `rank` of `tp`, whose routed experts are split over `ep` groups.
    `whole`: it may cut other tensors than routed experts otherwise than into `tp` slices.
    """

    tp: int
    ep: int
    rank: int
    pp: int = 1
    whole: bool = False


#: the flags of an engine that split a model for tp and ep
Flags = Callable[[int, int], str]


def is_conversion(path: str) -> bool:
    """Whether a model path is a converted folder: its manifest begins with the name of the format."""
    try:
        with (Path(path) / "manifest.json").open("rb") as file:
            return FORMAT.encode() in file.read(64)
    except (OSError, ValueError):
        return False


def refuse_untested(engine: str, version: str, tested: Collection[str], options: Options) -> None:
    """Raise UsageError for a version of an engine that is none of those tested, unless it is wanted."""
    if version not in tested and not options.untested_version:
        raise UsageError(
            f"{engine} {version} was not tested with {FORMAT} (tested: {', '.join(tested)}); install one of"
            ' these, or try it: --model-loader-extra-config with "untested_version": true'
        )


def open_served(options: Options, model_path: str, served: Served, flags: Flags) -> Shards:
    """The shards of the rank that an engine's process is. Raises UsageError where they are not made for this
    engine's split or model, OutputError where they are damaged.
    """
    out = Path(options.shards)
    manifest = read_rank_manifest(out, served.rank)
    if served.whole or manifest.parallel.attn_tp is not None:
        manifest = read_manifest(out)  # the slices of other ranks are needed, too
    _refuse_split(out, manifest, served, flags)
    _refuse_parts(out, manifest, served)
    _refuse_config(out, Path(model_path))
    return open_shards(out, served.rank, manifest)


def _refuse_split(out: Path, manifest: Manifest, served: Served, flags: Flags) -> None:
    if served.pp > 1:
        raise UsageError(
            f"{out}: this loader does not serve {served.pp} pipeline stages; serve with one, from shards that"
            " were converted without --pp"
        )
    if (stages := manifest.parallel.pp) > 1:
        raise UsageError(
            f"{out} is cut for {stages} pipeline stages, this engine runs one; convert again without --pp"
        )
    if (manifest.tp, manifest.ep) != (served.tp, served.ep):
        raise UsageError(
            f"{out} is cut for tp {manifest.tp} ep {manifest.ep}, this engine runs tp {served.tp} ep"
            f" {served.ep}; start it with {flags(manifest.tp, manifest.ep)}, or convert again with --tp"
            f" {served.tp} --ep {served.ep}"
        )
    if manifest.parallel.slots is not None:
        raise UsageError(
            f"{out} has its experts placed by a map in {manifest.parallel.slots} slots of each layer, which"
            " this loader does not tell the engine; convert again without --expert-map"
        )


def _refuse_parts(out: Path, manifest: Manifest, served: Served) -> None:
    """Raise UsageError for a conversion of some ranks or layers that lacks what is served."""
    layers = manifest.model["num_hidden_layers"]
    whole = served.whole or manifest.parallel.attn_tp is not None
    if served.rank not in manifest.ranks or (whole and len(manifest.ranks) < manifest.tp):
        needed = "all ranks are" if whole else f"rank {served.rank} is"
        raise UsageError(
            f"{out} has the ranks {', '.join(map(str, manifest.ranks))} of {manifest.tp}, {needed} needed;"
            " convert again without --ranks"
        )
    if sorted(manifest.layers) != list(range(layers)):
        raise UsageError(
            f"{out} has {len(manifest.layers)} of {layers} layers; convert again without --layers"
        )


def _refuse_config(out: Path, model: Path) -> None:
    """Raise UsageError where the engine's model path is neither the shards themselves nor has the config.json
    that they were made from.
    """
    if model.resolve() == out.resolve():
        return
    kept = kept_config(out)
    try:
        served = json.loads(read_small(model / "config.json", MAX_CONFIG))
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{model}/config.json cannot be compared with the one that {out} was made from ({error}); serve"
            f" {out} alone: --model-path {out}"
        ) from error
    if served != kept:
        keys = sorted(key for key in served.keys() | kept.keys() if served.get(key) != kept.get(key))
        raise UsageError(
            f"{model}/config.json is not the one that {out} was made from (they differ in"
            f" {', '.join(keys[:5])}); give the model of the shards, or {out} alone: --model-path {out}"
        )


def kept_config(out: Path) -> dict[str, Any]:
    """The source's config.json as OUT keeps it. Raises OutputError."""
    path = out / "source" / "config.json"
    try:
        found: dict[str, Any] = json.loads(read_small(path, MAX_CONFIG))
    except (OSError, ValueError) as error:
        raise OutputError(f"{path}: cannot be read ({error}); run verify") from error
    return found


def refuse_experts(where: str, manifest: Manifest, rank: int, logical: list[int]) -> None:
    """Raise UsageError where the routed experts that an engine's layer holds, by their numbers in the model
    and in its order, are not those of the shards.
    """
    stored = (t for shard in manifest.shards if shard.rank == rank for t in shard.tensors)
    experts = next(tensor.shape[0] for tensor in stored if tensor.experts is not None) * manifest.ep
    owned = manifest.topology.expert_range(rank, experts)
    if logical != list(owned):
        shown = ", ".join(map(str, logical[:4])) + ", ..." * (len(logical) > 4)
        raise UsageError(
            f"{where} holds {len(logical)} experts ({shown}), the shards of rank {rank} are those of"
            f" {owned.start} to {owned.stop - 1} in order; serve without redundant experts and with"
            " each expert at its own place"
        )
