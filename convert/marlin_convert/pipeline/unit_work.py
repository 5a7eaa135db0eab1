"""One unit while it is being converted: its files, what is left to do, and the digests gathered on the
way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from marlin_convert.documents.records import ExpertDigests, FinishedFile, FinishedUnit
from marlin_convert.errors import OutputError, SourceError
from marlin_convert.pipeline.ours import refuse_no_shard
from marlin_convert.pipeline.target import Target
from marlin_convert.pipeline.work import Work
from marlin_convert.planning.output_plan import OutputUnit
from marlin_convert.storage.files import digest
from marlin_convert.storage.shard_file import header_bytes, is_filler
from marlin_convert.storage.writer import ShardFile, finish_files

Digests = npt.NDArray[np.uint8]
#: digest and file of source tensors that were converted into this OUT before
Recorded = Mapping[str, tuple[bytes, str]]


@dataclass(eq=False)
class UnitWork(Work):
    """The files of a unit, one for each rank."""

    target: Target
    unit: OutputUnit
    recorded: Recorded = field(default_factory=dict)
    files: dict[int | None, ShardFile] = field(default_factory=dict)
    heads: dict[int | None, bytes] = field(default_factory=dict)
    plain_digests: dict[tuple[int | None, str], bytes] = field(default_factory=dict)
    expert_digests: dict[tuple[int | None, str], Digests] = field(default_factory=dict)
    source_digests: dict[str, bytes] = field(default_factory=dict)

    def create(self) -> None:
        """See `Work`."""
        for rank in self.unit.ranks:
            head = header_bytes(
                self.unit.files,
                self.target.plan.metadata(self.unit, rank, self.target.identity.id),
                self.unit.data_start,
            )
            file = ShardFile(
                self.target.out / self.target.plan.path(self.unit, rank),
                self.unit.file_size,
                self.target.direct_io,
                self.target.attempt,
            )
            self.files[rank] = file
            self.heads[rank] = head
            file.open(head)
            for stack in self.unit.stacked:
                self.expert_digests[rank, stack.name] = np.zeros((stack.experts, 16), np.uint8)

    def note_source(self, name: str, value: bytes) -> None:
        """Keep the digest of a source tensor. Raises SourceError where it was another one when the tensor was
        read before, as one of an expert in several slots is.
        """
        if self.source_digests.setdefault(name, value) != value:
            raise SourceError(
                f"{name} was read twice and was not the same: its file is being changed, or disk or memory is"
                " faulty; see that nothing writes to it, then run the same command again"
            )

    def finish(self) -> FinishedUnit:
        """Make the files durable under their names and return the record. Raises SourceError, and no file
        gets its name, where the source is not what OUT was made from before; OutputError where it is not what
        the folder that it is read out of was made from; UsageError where somebody put something else in the
        place of one meanwhile.
        """
        self._refuse_other_data()
        for file in self.files.values():
            refuse_no_shard(file.path)
        finish_files(list(self.files.values()))
        experts = {key: digests.tobytes() for key, digests in self.expert_digests.items()}
        files = []
        for rank in self.unit.ranks:
            tensors = {}
            for placed in self.unit.files.tensors:
                name = placed.spec.name
                if is_filler(name):
                    value = digest(bytes(placed.spec.size))
                elif (rank, name) in experts:
                    value = digest(experts[rank, name])
                else:
                    value = self.plain_digests[rank, name]
                tensors[name] = value.hex()
            files.append(FinishedFile(rank, self.unit.file_size, digest(self.heads[rank]).hex(), tensors))
        return FinishedUnit(
            self.unit.name,
            tuple(files),
            tuple(ExpertDigests(rank, name, digests) for (rank, name), digests in experts.items()),
            {name: value.hex() for name, value in self.source_digests.items()},
        )

    def _refuse_other_data(self) -> None:
        store = self.target.source.store
        for name, found in self.source_digests.items() if store.known is not None else ():
            if store.known is not None and store.known.digests.get(name) != found:
                raise OutputError(
                    f"{name}, put together out of {store.where}, is not what that was made from"
                    f"{store.known.whose(found)}; nothing of {self.unit.name} was kept; run marlin-convert"
                    f" verify {store.where}"
                )
        for name, found in self.source_digests.items():
            kept, file = self.recorded.get(name, (found, ""))
            if kept != found:
                raise SourceError(
                    f"{file}: {name} is not what {self.target.out} was made from: its xxh3-128 is"
                    f" {found.hex()}, source/digests.bin there has {kept.hex()}; fetch the file again, then"
                    " run the same command"
                )

    def discard(self) -> None:
        """See `Work`."""
        for file in self.files.values():
            file.discard()
