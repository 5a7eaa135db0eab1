"""What `restore` leaves in DIR/.work while it is under way, and what it prints with --json."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from marlin_convert.documents.fields import Count, Digest, Positive, RelativePath, Seconds, Text, about
from marlin_convert.documents.provenance import StageTimes

Proof = Annotated[
    str,
    Meta(pattern="^(digests|sha256)$"),
    about("by the digests of header and tensors; by the published sha256, too"),
]


class RestoreJob(Struct, frozen=True):
    """restore.json: whose files are being restored."""

    format: Annotated[Literal["marlin-convert"], about("the mark by which a folder is known to be ours")]
    source: Annotated[Digest, about("id of the source, as in the manifest")]
    finished: Annotated[bool, about("whether all is done but for removing the work folder")] = False


class RestoredFile(Struct, frozen=True):
    """A weight file that is durable under its name."""

    name: Annotated[RelativePath, about("the file")]
    size: Annotated[Positive, about("its bytes")]
    header: Annotated[Digest, about("xxh3-128 of its header's JSON")]
    proof: Proof


class MissingFile(Struct, frozen=True):
    """A weight file that cannot be restored."""

    name: Annotated[Text, about("the file")]
    why: Annotated[Text, about("what of it is not in OUT")]


class RestoreResult(Struct, frozen=True):
    """What a run of `restore` did."""

    folder: Annotated[Text, about("where the files are")]
    action: Annotated[Text, about("new, continue, or done: nothing was to do")]
    complete: Annotated[bool, about("whether all weight files of the source are there")]
    files_made: Annotated[Count, about("weight files made now")]
    made_bytes: Annotated[Count, about("their bytes")]
    files_found: Annotated[Count, about("weight files that were there")]
    by_sha256: Annotated[
        Count, about("of both, those compared with the published sha256, too, when they were made")
    ]
    missing: Annotated[tuple[MissingFile, ...], about("weight files that OUT does not hold all of")]
    not_kept: Annotated[tuple[Text, ...], about("what lay beside them and no conversion keeps")]
    seconds: Annotated[Seconds, about("from begin to end")]
    stages: StageTimes
