"""`verify`: is this output whole, and is it exactly the source? Everything is read from disk again."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from marlin_convert.checkpoint.header import TensorEntry
from marlin_convert.checkpoint.identity import identify
from marlin_convert.checkpoint.source import Source, open_source
from marlin_convert.checks.derived import check_manifest
from marlin_convert.checks.experts import ExpertCheck
from marlin_convert.checks.kept_source import ZEROS, KeptSource, read_kept_source, sound_bytes
from marlin_convert.checks.origins import expert_owner
from marlin_convert.checks.plain import Stored, check_plain
from marlin_convert.checks.report import SOURCE_DAMAGED, Finding, Report
from marlin_convert.checks.structural import (
    check_coverage,
    check_documents,
    check_listed_files,
    check_shard,
    check_small_files,
)
from marlin_convert.documents.manifest import Manifest, Origin, Shard, Unit, read_manifest
from marlin_convert.errors import OutputError, SourceError, UsageError
from marlin_convert.files import digest, machine_errors
from marlin_convert.layout.moe import LAYOUTS
from marlin_convert.reads import PieceReader
from marlin_convert.shards.format import is_filler

Progress = Callable[[int, int], None]
REMAKE = "to mend it make it again: convert with --overwrite"


def verify(
    out: str | os.PathLike[str],
    source: str | None = None,
    *,
    threads: int | None = None,
    progress: Progress | None = None,
) -> Report:
    """Check a converted folder: structure, every digest, and that the inverse layout gives the source, every
    nibble and every scale.

    Without `source` the digests kept in OUT stand for it; with it, the published files are read as well.
    Returns a Report; raises OutputError where OUT cannot be checked at all, SourceError where `source` is not
    the one OUT was made from.
    """
    folder = Path(out)
    if not folder.is_dir():
        raise UsageError(f"{out} is not a folder")
    manifest = read_manifest(folder)
    report = Report()
    with machine_errors(f"checking {out}"):
        kept = read_kept_source(folder, manifest)
        check_listed_files(folder, manifest, report)
        check_documents(manifest, kept, folder, report)
        right = check_manifest(manifest, kept, report)
        check_coverage(manifest, kept, report)
        opened = None if source is None else _open_same(source, manifest)
        if opened is not None:
            check_small_files(folder, opened, report)
        good = {
            shard.path
            for shard in manifest.shards
            if check_shard(folder, manifest, shard, kept.model.experts, report)
        }
        good &= right
        _Data(folder, manifest, kept, opened, report, good).run(threads or os.cpu_count() or 1, progress)
    return report


def _open_same(source: str, manifest: Manifest) -> Source:
    opened = open_source(source)
    if (difference := manifest.source.identity.difference(identify(opened))) is not None:
        raise SourceError(f"{source} is not what this output was made from: {difference}")
    return opened


class _Data:
    """The pass over all tensor data."""

    def __init__(
        self,
        out: Path,
        manifest: Manifest,
        kept: KeptSource,
        source: Source | None,
        report: Report,
        good: set[str],
    ) -> None:
        self._manifest, self._kept, self._source, self._report, self._good = (
            manifest,
            kept,
            source,
            report,
            good,
        )
        self._reader = PieceReader(lambda path: out / path)
        self._piece_digests = sound_bytes(out, manifest, "digests.bin")
        self._source_digests_hold = bool(sound_bytes(out, manifest, "source/digests.bin"))
        if source is None and not self._source_digests_hold:
            raise OutputError(
                f"{out}/source/digests.bin is damaged, so nothing can be proven from {out} alone: give"
                f" --source; {REMAKE}"
            )
        self._bytes_of = lru_cache(maxsize=16)(self._read_source)
        if manifest.layout_id not in LAYOUTS:
            raise OutputError(f"{out}: the layout {manifest.layout_id} is not one this program knows")

    def run(self, threads: int, progress: Progress | None) -> None:
        """Check every unit whose shards are structurally sound."""
        tasks = list(self._tasks())
        total = len(tasks)
        with ThreadPoolExecutor(threads) as workers:
            for done, _ in enumerate(workers.map(lambda task: task(), tasks), 1):
                if progress is not None:
                    progress(done, total)

    def _tasks(self) -> Iterator[Callable[[], None]]:
        for unit in self._manifest.units:
            shards = [shard for shard in self._manifest.shards if shard.unit == unit.name]
            if not shards or any(shard.path not in self._good for shard in shards):
                self._report.count(unproven=sum(len(origin.sources) for origin in unit.tensors))
                continue
            yield from self._plain_tasks(unit, shards)
            yield from self._expert_tasks(unit, shards)
            for shard in shards:
                yield partial(self._check_fillers, shard, unit.layer)

    def _plain_tasks(self, unit: Unit, shards: list[Shard]) -> Iterator[Callable[[], None]]:
        for origin in unit.tensors:
            if origin.rule == "experts":
                continue
            held = [
                Stored(shard, tensor)
                for shard in shards
                for tensor in shard.tensors
                if tensor.name == origin.tensor
            ]
            if len(held) != len(shards):
                self._report.add(
                    Finding(
                        "manifest.json", f"{origin.tensor} is not in all shards of {unit.name}", unit.layer
                    )
                )
                continue
            yield partial(self._check_plain, origin, held, unit.layer)

    def _check_plain(self, origin: Origin, held: list[Stored], layer: int | None) -> None:
        name = origin.sources[0]
        rows = None if self._source is None else partial(self._rows, name)
        check_plain(
            self._reader,
            origin,
            layer,
            held,
            self._manifest.tp,
            self._expected(name),
            rows,
            partial(self._hint, name),
            self._report,
        )

    def _expert_tasks(self, unit: Unit, shards: list[Shard]) -> Iterator[Callable[[], None]]:
        stacked = [origin.tensor for origin in unit.tensors if origin.rule == "experts"]
        if not stacked or unit.layer is None:
            return
        manifest, experts = self._manifest, self._kept.model.experts
        layout = LAYOUTS[manifest.layout_id]
        held = {
            (shard.rank, t.name): Stored(shard, t)
            for shard in shards
            for t in shard.tensors
            if t.name in stacked and shard.rank is not None
        }
        local, moe_tp = experts // manifest.ep, manifest.tp // manifest.ep
        shape = self._kept.model.expert_shape(moe_tp)
        expected = {t.name: (local, *t.shape) for t in layout.stacked(shape)}
        for (rank, name), item in held.items():
            if item.tensor.shape != expected.get(name.rpartition(".")[2]) or item.tensor.experts is None:
                what = f"{name} has the shape {list(item.tensor.shape)}, not that of its experts"
                self._report.add(Finding(item.shard.path, what, unit.layer, rank=rank))
                return
        check = ExpertCheck(
            reader=self._reader,
            layout=layout,
            shape=shape,
            prefix=stacked[0].rpartition(".")[0],
            layer=unit.layer,
            held=held,
            owners=lambda expert: expert_owner(expert, experts, manifest.tp, manifest.ep),
            first=lambda rank: rank // moe_tp * local,
            piece_digest=lambda rank, name, i: self._piece(held[rank, name], i),
            expected=self._expected,
            source_bytes=None if self._source is None else self._bytes_of,
            hint=self._hint,
            report=self._report,
        )
        for (rank, name), item in held.items():
            at = item.tensor.experts or 0
            if (
                self._piece_digests
                and digest(self._piece_digests[at : at + 16 * local]).hex() != item.tensor.digest
            ):
                what = f"{name}: its digest is not that of its experts' digests in digests.bin"
                self._report.add(Finding(item.shard.path, what, unit.layer, rank=rank))
        owned = sorted(
            {
                expert
                for rank in {rank for rank, _ in held}
                for expert in range(rank // moe_tp * local, (rank // moe_tp + 1) * local)
            }
        )
        yield from (partial(check.check, expert) for expert in owned)

    def _piece(self, stored: Stored, i: int) -> bytes | None:
        at = (stored.tensor.experts or 0) + 16 * i
        return self._piece_digests[at : at + 16] or None

    def _hint(self, name: str, found: bytes) -> str:
        """What it tells that OUT has data of this digest in the place of a source tensor."""
        if self._source is not None and self._source_digests_hold and self._kept.digests.get(name) == found:
            file = self._source.tensors[name].file
            return f", but not from the digest that OUT keeps of it: {file} {SOURCE_DAMAGED}"
        holders = self._kept.holders(found)
        return f": it holds the data of {holders[0]}" if holders else ""

    def _check_fillers(self, shard: Shard, layer: int | None) -> None:
        from marlin_convert.checks.plain import read_rows

        for tensor in shard.tensors:
            if is_filler(tensor.name):
                data = read_rows(self._reader, Stored(shard, tensor), 0, tensor.shape[0])
                if data.any() or digest(np.ascontiguousarray(data)).hex() != tensor.digest:
                    self._report.add(
                        Finding(
                            shard.path, f"the filler {tensor.name} is not all zeros", layer, rank=shard.rank
                        )
                    )

    def _expected(self, name: str) -> bytes | None:
        """The digest a source tensor must have; None where nothing tells. With a source, the kept digest is
        checked against it on the way.
        """
        kept = self._kept.digests.get(name, ZEROS)
        if self._source is None:
            return None if kept == ZEROS else kept
        value = (
            digest(self._bytes_of(name))
            if self._source.tensors[name].entry.size < 64 << 20
            else self._stream(name)
        )
        if kept not in (ZEROS, value):
            self._report.add(
                Finding(
                    "source/digests.bin",
                    f"the kept digest of {name} is not that in {self._source.tensors[name].file}",
                )
            )
        return value

    def _stream(self, name: str) -> bytes:
        rows, hasher = self._source_entry(name).shape[0], xxhash.xxh3_128()
        step = max(rows * (8 << 20) // self._source_entry(name).size, 1)
        for begin in range(0, rows, step):
            hasher.update(self._rows(name, begin, min(begin + step, rows)).data)
        return hasher.digest()

    def _source_entry(self, name: str) -> TensorEntry:
        assert self._source is not None
        return self._source.tensors[name].entry

    def _read_source(self, name: str) -> npt.NDArray[np.uint8]:
        entry = self._source_entry(name)
        return self._read_range(name, entry.offset, entry.size)

    def _rows(self, name: str, begin: int, end: int) -> npt.NDArray[np.uint8]:
        entry = self._source_entry(name)
        row = entry.size // entry.shape[0]
        return self._read_range(name, entry.offset + begin * row, (end - begin) * row).reshape(
            end - begin, row
        )

    def _read_range(self, name: str, offset: int, size: int) -> npt.NDArray[np.uint8]:
        """Plain reads, tensor by tensor: on purpose not the way the conversion reads."""
        assert self._source is not None
        with self._source.path(self._source.tensors[name].file).open("rb") as file:
            file.seek(offset)
            data = file.read(size)
        if len(data) != size:
            raise SourceError(f"{name}: its file ends too early")
        return np.frombuffer(data, np.uint8)
