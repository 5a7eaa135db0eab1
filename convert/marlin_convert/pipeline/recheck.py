"""Whether what was made before is of the same source, where that could have become another: the digests of
its tensors are compared with what is read now.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from concurrent.futures import ThreadPoolExecutor

import xxhash

from marlin_convert.checkpoint.header import TensorEntry
from marlin_convert.checkpoint.source import Source
from marlin_convert.checkpoint.store import open_file
from marlin_convert.documents.records import FinishedUnit
from marlin_convert.errors import SourceError
from marlin_convert.pipeline.target import Target
from marlin_convert.pipeline.work_folder import WorkFolder
from marlin_convert.shards.kept_source import ZEROS, recorded_digests
from marlin_convert.storage.files import CHUNK
from marlin_convert.storage.reads import read_exactly

#: files that are read at a time
AT_A_TIME = 4


def tensor_digest(descriptor: int, entry: TensorEntry, file: str) -> bytes:
    """xxh3-128 of a tensor in an opened file. Raises OSError, and ShortFileError, which names `file`."""
    hasher, end = xxhash.xxh3_128(), entry.offset + entry.size
    for at in range(entry.offset, end, CHUNK):
        hasher.update(read_exactly(descriptor, at, min(CHUNK, end - at), file))
    return hasher.digest()


def compare_known(target: Target) -> None:
    """Where it is known what each tensor of the source must be, compare what OUT was made from. Raises
    SourceError where that was something else, which a sample of the files did not show.
    """
    source, plan, out = target.source, target.plan, target.out
    if (known := source.store.known) is None:
        return
    made = {name: value for name, (value, _) in recorded_digests(out, source).items()}
    for unit in plan.units:
        if (record := WorkFolder(out).finished(plan, unit)) is not None:
            made |= {name: bytes.fromhex(value) for name, value in record.source.items()}
    for name, value in made.items():
        if known.digests.get(name, ZEROS) not in (value, ZEROS):
            raise SourceError(
                f"{out} was made of another {name} than {source.store.where}: its xxh3-128 is {value.hex()},"
                f" there it is {known.digests[name].hex()}; use another folder, or --overwrite to start again"
            )


def compare_recorded(source: Source, records: Iterable[FinishedUnit], files: Collection[str]) -> None:
    """Compare each tensor of `files` that a recorded unit was made of with its recorded digest. Raises
    SourceError for one that differs.
    """
    wanted: dict[str, dict[str, str]] = {file: {} for file in files}
    for record in records:
        for name, value in record.source.items():
            if (file := source.tensors[name].file) in wanted:
                wanted[file][name] = value

    def compare(file: str) -> None:
        with open_file(source.path(file)) as descriptor:
            for name, recorded in wanted[file].items():
                if (found := tensor_digest(descriptor, source.tensors[name].entry, file).hex()) != recorded:
                    raise SourceError(
                        f"{file} was replaced after units were made of it: the xxh3-128 of {name} is"
                        f" {found}, it was {recorded}; put the file back, or use --overwrite to start again"
                    )

    with ThreadPoolExecutor(AT_A_TIME) as workers:
        for _ in workers.map(compare, wanted):
            pass
