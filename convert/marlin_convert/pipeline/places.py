"""Where a folder may be written, and where it may not."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from marlin_convert.errors import UsageError
from marlin_convert.pipeline.work_folder import is_ours


def refuse_nested(out: Path, source: Path | None, places: Collection[Path]) -> None:
    """Raise UsageError where OUT is in, or has in it, what is read: the folder `source`, files in `places`
    (real paths). What is written could be read, and what is removed could be the source. Nor may OUT lie in
    another folder that this program writes, which would no longer be whole.
    """
    here = out.resolve()
    for above in here.parents:
        if is_ours(above):
            raise UsageError(f"{out} lies in the conversion {above}; choose another place for the output")
    if source is not None:
        there = source.resolve()
        if here == there or there in here.parents:
            raise UsageError(f"{out} is the source folder or lies in it; choose another place for the output")
    for place in places:
        if here == place or here in place.parents:
            raise UsageError(
                f"{place}, where files of the source are, lies in {out}; choose another place for the"
                " output, or move the source"
            )
