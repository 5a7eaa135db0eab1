"""What identifies a source, in job.json and in the manifest, and how two identities are compared."""

from __future__ import annotations

import json
from typing import Annotated

import xxhash
from msgspec import Meta, Struct
from msgspec.structs import replace

from marlin_convert.documents.fields import Digest, Positive, RelativePath, Sha256, Text, about


class FileIdentity(Struct, frozen=True, omit_defaults=True):
    """One weight file: its bytes, the digests of its header and of the start of its data, of a sample of all
    of it (folder), the published sha256 (repository, or a folder of which it is known), the ETag (object).
    """

    name: Annotated[RelativePath, about("file name in the checkpoint")]
    size: Annotated[Positive, about("bytes of the file")]
    header: Annotated[Digest, about("xxh3-128 of its header's JSON as it stands")]
    start: Annotated[Digest, about("xxh3-128 of the first 16 KiB of its data, or of all if there is less")]
    sample: Annotated[
        Digest | None,
        about("xxh3-128 of a sample of its data, 256 pages and the last one; of a file read from a folder"),
    ] = None
    sha256: Annotated[
        Sha256 | None,
        about("what the hub publishes, compared with every file that was read; where repo is there"),
    ] = None
    etag: Annotated[
        Text | None,
        about("the ETag of the object, without quotation marks; where it came from an object store"),
    ] = None

    def difference(self, other: FileIdentity) -> str | None:
        """What differs of that which both know, in one word."""
        for what in ("size", "header", "start", "sample", "sha256"):
            mine, its = getattr(self, what), getattr(other, what)
            if None not in (mine, its) and mine != its:
                return what if what in ("size", "header") else "content"
        return None


#: what is said of a source here, in the manifest and by plan
Repo = Annotated[Text | None, about("the hub repository it came from")]
Commit = Annotated[Text | None, about("its commit")]
QuantizationAt = Annotated[
    str,
    about(
        "the section of config.json with the quantization_config; empty for the top level",
        enum=["", "text_config"],
    ),
]
WeightFiles = Annotated[tuple[FileIdentity, ...], Meta(min_length=1), about("weight files in name order")]
ConfigDigest = Annotated[Digest, about("xxh3-128 of the source's config.json")]


class SourceIdentity(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """All weight files and config.json; repository and commit where they are known."""

    repo: Repo = None
    revision: Commit = None
    files: WeightFiles
    config: ConfigDigest

    @property
    def id(self) -> str:
        """32 hex digits that stand for the whole; they go into every shard's header."""
        common = {
            "config": self.config,
            "files": [[file.name, file.size, file.header, file.start] for file in self.files],
        }
        return xxhash.xxh3_128_hexdigest(json.dumps(common, sort_keys=True, separators=(",", ":")).encode())

    @property
    def compared(self) -> bool:
        """Whether the published sha256 of every weight file is known and is compared with what is read: only
        then repository and commit are claimed.
        """
        return self.repo is not None and all(file.sha256 is not None for file in self.files)

    @property
    def sampled(self) -> bool:
        """Whether it is of a folder."""
        return any(file.sample is not None for file in self.files)

    @property
    def kind(self) -> str:
        """Whence it came, for people."""
        if self.sampled:
            return "a folder"
        return "an object store" if any(file.etag for file in self.files) else f"{self.repo} on the hub"

    def unclaimed(self) -> SourceIdentity:
        """The same content, without a word on where it was published."""
        files = tuple(replace(file, sha256=None) for file in self.files)
        return replace(self, repo=None, revision=None, files=files)

    def continued_by(self, other: SourceIdentity) -> str | None:
        """Why a run must not continue with `other`, in words; None where it may."""
        if self.revision is not None and other.revision is not None and self.revision != other.revision:
            return (
                f"it was commit {self.revision} of {self.repo}, now it is {other.revision}; give --revision"
                f" {self.revision} to continue"
            )
        if self.kind != other.kind:
            return f"before it was {self.kind}, now it is {other.kind}"
        return self.difference(other) or self.rewritten(other)

    def rewritten(self, other: SourceIdentity) -> str | None:
        """Which object was written again, in words; None where none was. What is in it now cannot be told
        from its header and the start of its data.
        """
        for mine, its in zip(self.files, other.files, strict=True):
            if None not in (mine.etag, its.etag) and mine.etag != its.etag:
                return f"{mine.name} was written again: its ETag was {mine.etag}, now it is {its.etag}"
        return None

    def difference(self, other: SourceIdentity) -> str | None:
        """What differs in content, in words; None where nothing that both know does."""
        if self.config != other.config:
            return "config.json differs"
        if [file.name for file in self.files] != [file.name for file in other.files]:
            return "the weight files have other names"
        for mine, its in zip(self.files, other.files, strict=True):
            if (what := mine.difference(its)) is not None:
                return f"the {what} of {mine.name} differs"
        return None
