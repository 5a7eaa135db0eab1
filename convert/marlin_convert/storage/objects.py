"""Objects below one prefix of an S3 store: listed, read by ranges, written, removed. Each answer is compared
with what was asked for, and what passes is asked for again (`object_errors.again`).

The client is boto3, which knows every way to configure endpoint, region and credentials, and can list uploads
that were left unfinished; obstore, lighter and quicker, knows neither profiles nor such uploads, and s3fs is
asynchronous and holds to versions of fsspec. It is imported only where a store is used.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from marlin_convert.errors import ConvertError, SourceError, UsageError
from marlin_convert.extras import require
from marlin_convert.storage.object_errors import (
    Asked,
    MissingError,
    PreconditionError,
    again,
    attempts,
    explain,
)

SCHEME = "s3://"
BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,254}")
#: bytes of a piece of an object that is read: who reads is asked after each whether to go on
PIECE = 256 << 10
#: connections that are kept; more are opened where more threads ask at the same time
CONNECTIONS = 64
#: seconds without any answer
CONNECT, READ = 10, 60


@dataclass(frozen=True)
class Location:
    """A bucket and a prefix in it, without slashes at its ends; "" is the whole bucket."""

    bucket: str
    prefix: str

    @staticmethod
    def of(uri: str) -> Location:
        """Of s3://bucket/prefix. Raises UsageError, which does not repeat what may be a secret."""
        bucket, _, prefix = uri.removeprefix(SCHEME).partition("/")
        if not uri.startswith(SCHEME) or BUCKET.fullmatch(bucket) is None:
            raise UsageError(
                "what follows s3:// is not the name of a bucket; give s3://bucket/prefix, as text, and"
                " credentials by AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
            )
        return Location(bucket, prefix.strip("/"))

    def __str__(self) -> str:
        return f"{SCHEME}{self.bucket}/{self.prefix}".rstrip("/")

    def key(self, name: str) -> str:
        """The key of what is called `name` below the prefix."""
        return f"{self.prefix}/{name}" if self.prefix else name


@dataclass(frozen=True)
class StoredObject:
    """An object as it was listed: its name below the prefix, bytes, and the ETag that any other content has
    not.
    """

    name: str
    size: int
    etag: str


def is_uri(place: str) -> bool:
    """Whether a place is one in an object store; `s3:/`, which a Path makes of it, too."""
    return place.startswith("s3:/")


@dataclass(frozen=True)
class Objects:
    """The objects below `location`, from any number of threads.

    Methods raise `stays` for what will be the same however often it is asked (no bucket, no rights, an object
    that was changed), MachineError where network or server fail. UsageError where boto3 is not there.
    """

    location: Location
    stays: type[ConvertError] = SourceError

    @cached_property
    def client(self) -> Any:
        """boto3's, configured as everywhere: AWS_ENDPOINT_URL, AWS_PROFILE, AWS_REGION and so on."""
        require("boto3")
        import boto3
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError

        config = Config(
            connect_timeout=CONNECT,
            read_timeout=READ,
            max_pool_connections=CONNECTIONS,
            # tried again here, in one place, bodies too
            retries={"total_max_attempts": 1, "mode": "standard"},
            # Content-MD5 in its place, which every store knows
            request_checksum_calculation="when_required",
        )
        asked = self.asked("opening", "")
        try:
            # which boto3 alone of the usual clients does not read
            region = os.environ.get("AWS_REGION") or None
            return boto3.session.Session().client("s3", region_name=region, config=config)
        except BotoCoreError as error:
            raise explain(asked, error)[1] from error
        except ValueError as error:  # the endpoint; of which nothing is repeated
            raise UsageError(f"{asked.what}: AWS_ENDPOINT_URL is not like https://host:port") from error

    def asked(self, verb: str, name: str) -> Asked:
        """A request for an object, or with "" for the prefix."""
        return Asked(f"{verb} {self.location}{'/' if name else ''}{name}", self.stays)

    def place(self, name: str) -> dict[str, str]:
        """Where an object is, as the client's methods are told."""
        return {"Bucket": self.location.bucket, "Key": self.location.key(name)}

    def list(self, deep: bool = False) -> tuple[dict[str, StoredObject], tuple[str, ...]]:
        """The objects directly below the prefix by name, and the names that others have there as folders;
        with `deep` all objects below it, and no folders.
        """
        found, folders, start = dict[str, StoredObject](), list[str](), self.location.key("")
        where = {"Bucket": self.location.bucket, "Prefix": start} | ({} if deep else {"Delimiter": "/"})
        while True:
            page = again(self.asked("listing", ""), partial(self.client.list_objects_v2, **where))
            for entry in page.get("Contents", ()):
                if name := entry["Key"].removeprefix(start):  # "" is the mark of a folder
                    found[name] = StoredObject(name, entry["Size"], entry["ETag"])
            folders += [each["Prefix"].removeprefix(start)[:-1] for each in page.get("CommonPrefixes", ())]
            if not page.get("IsTruncated"):
                return found, tuple(name for name in folders if name)
            where["ContinuationToken"] = page["NextContinuationToken"]

    def head(self, name: str) -> StoredObject | None:
        """An object as it is now; None where there is none."""
        try:
            answer = again(
                self.asked("looking for", name), lambda: self.client.head_object(**self.place(name))
            )
        except MissingError:
            return None
        return StoredObject(name, answer["ContentLength"], answer["ETag"])

    def read(self, wanted: StoredObject, part: range | None = None) -> bytes:
        """Bytes `part` of an object, or all of it: held in memory, so the caller sees to the size."""
        return b"".join(self.stream(wanted, part))

    def stream(self, wanted: StoredObject, part: range | None = None) -> Iterator[bytes]:
        """The same piece by piece, gone on with where an answer breaks off. Raises `stays` where the object
        is not the one that was listed any more.
        """
        part = range(wanted.size) if part is None else part
        asked, at = self.asked("reading", wanted.name), part.start
        tries = attempts(asked)
        while at < part.stop:
            try:
                for piece in self._pieces(wanted, range(at, part.stop)):
                    at, tries = at + len(piece), attempts(asked)
                    yield piece
            except Exception as error:
                try:
                    next(tries)(error)
                except (MissingError, PreconditionError):
                    raise self.changed(wanted) from error

    def _pieces(self, wanted: StoredObject, part: range) -> Iterator[bytes]:
        more = {"IfMatch": wanted.etag}
        if len(part) != wanted.size:
            more["Range"] = f"bytes={part.start}-{part.stop - 1}"
        answer = self.client.get_object(**self.place(wanted.name), **more)
        with closing(answer["Body"]) as body:
            if answer["ETag"].strip('"') != wanted.etag.strip('"'):
                raise self.changed(wanted)
            self._refuse_other(wanted, part, answer)
            left = len(part)
            while left and (piece := body.read(min(PIECE, left))):
                left -= len(piece)
                yield piece
        if left:
            raise ConnectionError(f"{left} bytes did not come")

    def _refuse_other(self, wanted: StoredObject, part: range, answer: dict[str, Any]) -> None:
        """Raise `stays` for an answer that is not that part of the object."""
        said = (
            answer.get("ContentRange") or f"bytes 0-{answer['ContentLength'] - 1}/{answer['ContentLength']}"
        )
        if said != f"bytes {part.start}-{part.stop - 1}/{wanted.size}":
            raise self.stays(
                f"{self.location}/{wanted.name}: asked for bytes {part.start}-{part.stop - 1} of"
                f" {wanted.size}, the server says it sends {said}; it ignores ranges, or a proxy is between"
            )

    def changed(self, wanted: StoredObject) -> ConvertError:
        """What is said of an object that is not there as it was listed any more."""
        now = self.head(wanted.name)
        found = "it is gone" if now is None else f"now it has {now.etag} and {now.size} bytes"
        return self.stays(
            f"{self.location}/{wanted.name} was changed while it was in use: it had the ETag {wanted.etag}"
            f" and {wanted.size} bytes, {found}; put it back, or begin again with --overwrite"
        )

    def put(self, name: str, data: bytes, only_if_absent: bool = False) -> bool:
        """Write an object whole. With `only_if_absent` False where there is one of that name already, which
        is left as it is. The bytes should be the writer's own: after a cut the same bytes are taken for his.
        """
        absent = {"IfNoneMatch": "*"} if only_if_absent else {}
        tried = 0

        def write() -> None:
            nonlocal tried
            tried += 1
            self.client.put_object(**self.place(name), Body=data, ContentMD5=content_md5(data), **absent)

        try:
            again(self.asked("writing", name), write)
        except PreconditionError:
            there = self.head(name) if tried > 1 else None  # the answer of an earlier try may have been lost
            return there is not None and there.size == len(data) and self.read(there) == data
        except MissingError as error:
            raise self.stays(f"{error}: the server says that it is not there; check the bucket") from error
        return True

    def delete(self, name: str) -> None:
        """Remove an object; it may be gone already."""
        try:
            again(self.asked("removing", name), lambda: self.client.delete_object(**self.place(name)))
        except MissingError:
            return


def content_md5(data: bytes) -> str:
    """What Content-MD5 says of some bytes."""
    return base64.b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode()
