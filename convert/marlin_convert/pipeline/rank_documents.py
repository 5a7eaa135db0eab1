"""What lies in each rank's folder beside its shards and their index: the part of the manifest that is of this
rank, and where each of its experts is. All of it follows from the manifest.
"""

from __future__ import annotations

from collections.abc import Sequence

from marlin_convert.documents.codec import sealed, write
from marlin_convert.documents.expert_places import EXPERTS_NAME, ExpertPlace, ExpertPlaces, UnitExperts
from marlin_convert.documents.manifest import MANIFEST_NAME, Manifest, Shard
from marlin_convert.documents.rank_manifest import of_rank, rank_folders


def with_rank_documents(manifest: Manifest) -> tuple[Manifest, dict[str, bytes]]:
    """The manifest with these documents listed, and what they hold by their places in OUT."""
    folders = rank_folders(manifest)
    experts = {f"{folder}/{EXPERTS_NAME}": data for folder, data in _experts(manifest, folders).items()}
    manifest = manifest.listing(experts)
    own = {f"{folder}/{MANIFEST_NAME}": sealed(of_rank(manifest, folder)) for folder in folders}
    return manifest.listing(own), experts | own


def _experts(manifest: Manifest, folders: dict[str, int]) -> dict[str, bytes]:
    """experts.json of each folder. Ranks of a stage with the same experts have the same one, since their
    files are laid out alike.
    """
    topology, held = manifest.topology, manifest.held()
    made: dict[tuple[str, int], bytes] = {}
    alike = {folder: (folder.rpartition("rank-")[0], topology.ep_rank(r)) for folder, r in folders.items()}
    for folder, key in alike.items():
        if key not in made:
            shards = [shard for shard in manifest.shards if shard.folder == folder]
            units = tuple(unit for shard in shards for unit in _unit(shard, held(shard)))
            places = ExpertPlaces(manifest.format, manifest.format_version, manifest.source_id, units)
            made[key] = write(places)
    return {folder: made[key] for folder, key in alike.items()}


def _unit(shard: Shard, held: Sequence[int]) -> list[UnitExperts]:
    """The experts in a shard; nothing where it has none."""
    stacked = shard.stacked
    if not held:
        return []
    local = len(held)
    places = tuple(
        ExpertPlace(
            expert,
            tuple((t.offset + slot * (t.size // local), t.size // local) for t in stacked),
        )
        for slot, expert in enumerate(held)
    )
    return [UnitExperts(shard.unit, shard.file, tuple(tensor.name for tensor in stacked), places)]
