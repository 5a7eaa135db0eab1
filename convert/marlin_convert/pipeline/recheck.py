"""Source files that were touched since units were made of them: what the records say was read is compared
with what the files hold now.
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
