"""The documents in the folder of a rank, derived again from the whole manifest and the format page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from msgspec.structs import replace

from marlin_convert.checks.findings import Finding, Verification
from marlin_convert.checks.part import Part
from marlin_convert.checks.split import Split
from marlin_convert.documents.bounds import LISTED, MANIFEST
from marlin_convert.documents.codec import read, seal_holds
from marlin_convert.documents.expert_places import ExpertPlace, ExpertPlaces, UnitExperts
from marlin_convert.documents.manifest import Manifest, Shard, StoredTensor, parse_manifest
from marlin_convert.errors import OutputError
from marlin_convert.storage.files import read_small


def check_rank_documents(out: Path, part: Part, split: Split, report: Verification) -> None:
    """Each rank's manifest.json and experts.json that the manifest lists; older folders have none."""
    manifest = part.manifest
    _require_of_all(manifest, report)
    for path in (file.path for file in manifest.files):
        folder, _, name = path.rpartition("/")
        if name not in ("manifest.json", "experts.json") or "rank-" not in folder:
            continue
        shards = [shard for shard in manifest.shards if shard.path.rpartition("/")[0] == folder]
        if not shards:
            report.add(Finding(path, "is in the folder of a rank that is not there"))
        elif part.has(path):
            check = _wrong_manifest if name == "manifest.json" else _wrong_experts
            try:
                problems = list(check(out / path, manifest, shards, split))
            except OSError:
                continue  # `check_listed_files` has reported it
            except OutputError as error:
                problems = [str(error)]
            report.add(*(Finding(path, problem, rank=shards[0].rank) for problem in problems))


def _require_of_all(manifest: Manifest, report: Verification) -> None:
    """Where the folder of one rank has documents of its own, those of all have both."""
    listed = {file.path for file in manifest.files}
    names = ("manifest.json", "experts.json")
    folders = {shard.folder for shard in manifest.shards if shard.rank is not None}
    if any(f"{folder}/{name}" in listed for folder in folders for name in names):
        lost = sorted({f"{folder}/{name}" for folder in folders for name in names} - listed)
        report.add(*(Finding(path, "is not listed, and those of other ranks are") for path in lost))


def _wrong_manifest(path: Path, whole: Manifest, shards: Sequence[Shard], split: Split) -> Iterator[str]:
    raw = read_small(path, MANIFEST)
    if not seal_holds(raw):
        yield "its bytes do not match its own digest"
    rank, folder = shards[0].rank, f"{shards[0].path.rpartition('/')[0]}/"
    stage = split.stages.of(shards[0].unit)
    units = tuple(unit for unit in whole.units if split.stages.of(unit.name) == stage)
    above = split.stages.folder(shards[0].unit)
    expected = {
        "ranks": (rank,),
        "layers": tuple(unit.layer for unit in units if unit.layer is not None),
        "complete": whole.complete and whole.tp * split.stages.count == 1,
        "units": units,
        "shards": tuple(
            shard
            for shard in whole.shards
            if shard.rank in (rank, None) and split.stages.of(shard.unit) == stage
        ),
        "files": tuple(file for file in whole.files if _is_of(file.path, above, folder)),
    }
    found = parse_manifest(raw, path)
    for key in found.__struct_fields__:
        if key != "digest" and getattr(found, key) != expected.get(key, getattr(whole, key)):
            yield f"its {key} are not what the whole manifest says of this rank"


def _is_of(path: str, stage: str, folder: str) -> bool:
    """Whether a rank's manifest lists a file: those in its own folder but itself, those in common/ of its
    stage, and those that are of no stage and no rank.
    """
    if path.startswith(folder):
        return path != f"{folder}manifest.json"
    elsewhere = "/" in path and path.startswith(("rank-", "stage-"))
    return path.startswith(f"{stage}common/") or not elsewhere


def _wrong_experts(path: Path, whole: Manifest, shards: Sequence[Shard], split: Split) -> Iterator[str]:
    found = read(read_small(path, LISTED), ExpertPlaces, f"{path}: not of this format")
    expected = ExpertPlaces(whole.format, whole.format_version, whole.source_id, ())
    if replace(found, units=()) != expected:
        yield "is of another conversion"
    units = {unit.unit: unit for unit in found.units}
    stacked = {shard.unit: [t for t in shard.tensors if t.experts is not None] for shard in shards}
    if list(units) != [name for name, tensors in stacked.items() if tensors] or len(units) < len(found.units):
        yield f"has the units {list(units)}, which are not those that have experts here"
        return
    placed = {each.name: split.placed(each) for each in whole.units}
    for shard in shards:
        if stacked[shard.unit]:
            yield from _wrong_unit(units[shard.unit], (split, placed[shard.unit]), shard, stacked[shard.unit])


def _wrong_unit(
    unit: UnitExperts, where: tuple[Split, Sequence[int]], shard: Shard, stacked: Sequence[StoredTensor]
) -> Iterator[str]:
    """`where`: the split, and the expert in each slot of the layer."""
    split, placed = where
    if unit.file != shard.path.rpartition("/")[2] or list(unit.tensors) != [t.name for t in stacked]:
        yield f"says that the experts of {shard.unit} are in {unit.file}, in {', '.join(unit.tensors)}"
        return
    if split.count % split.ep:
        return  # `check_manifest` has reported it, and nobody can tell whose they are
    owned = [placed[slot] for slot in split.held(shard.rank or 0)]
    if [place.expert for place in unit.experts] != owned:
        yield f"lists other experts of {shard.unit} than the rank has, or in another order"
        return
    for slot, place in enumerate(unit.experts):
        if place != _place(place.expert, slot, len(owned), stacked):
            yield f"says that expert {place.expert} of {shard.unit} is where it is not"


def _place(expert: int, slot: int, local: int, stacked: Sequence[StoredTensor]) -> ExpertPlace:
    """An expert's part of each stacked tensor is the same share of its bytes."""
    begins = [[tensor.offset + tensor.size * i // local for i in (slot, slot + 1)] for tensor in stacked]
    return ExpertPlace(expert, tuple((begin, end - begin) for begin, end in begins))
