"""Files uploaded to an object store in parts, several at a time; what was left unfinished is removed."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

from marlin_convert.errors import MachineError
from marlin_convert.storage.files import machine_errors, open_regular
from marlin_convert.storage.object_errors import AGAIN, MissingError, PreconditionError, again
from marlin_convert.storage.objects import Objects, StoredObject, content_md5
from marlin_convert.storage.reads import ShortFileError, read_exactly
from marlin_convert.threads import Workers

#: bytes of a part, of which PARALLEL are in memory; more where there would be more than MAX_PARTS
PART = 32 << 20
MAX_PARTS = 1000
PARALLEL = 4


def part_size(size: int) -> int:
    """Bytes of each part but the last of an object of `size` bytes, whole MiB."""
    return max(PART, -(-size // (MAX_PARTS << 20)) << 20)


def upload(
    objects: Objects, name: str, path: Path, sent: Callable[[int], None] = lambda size: None
) -> StoredObject:
    """Write a file as an object, which is there whole or not at all. `sent` gets the bytes of each part from
    any thread, and may raise to stop. Raises what `Objects` raises, MachineError where the file cannot be
    read or is changed meanwhile.
    """
    try:
        with machine_errors(f"reading {path}"), os.fdopen(open_regular(path), "rb") as file:
            before = os.fstat(file.fileno())
            if before.st_size <= PART:
                data = read_exactly(file.fileno(), 0, before.st_size, path)
                objects.put(name, data)
                sent(len(data))
            else:
                _in_parts(objects, name, file.fileno(), sent)
            after = os.stat(path)
    except ShortFileError as error:
        raise _touched(path) from error
    stored = objects.head(name)
    if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
        raise _touched(path)
    if stored is None or stored.size != before.st_size:
        found = "there is none" if stored is None else f"it has {stored.size}"
        raise MachineError(
            f"{objects.location}/{name} should have {before.st_size} bytes now, {found}; {AGAIN}"
        )
    return stored


def _touched(path: Path) -> MachineError:
    return MachineError(f"{path} was changed while it was being uploaded; {AGAIN}")


def _in_parts(objects: Objects, name: str, descriptor: int, sent: Callable[[int], None]) -> None:
    size = os.fstat(descriptor).st_size
    step, asked, client = part_size(size), objects.asked("writing", name), objects.client
    place = objects.place(name)
    begun = again(asked, lambda: client.create_multipart_upload(**place))
    upload_id, stopped, lock = begun["UploadId"], False, Lock()

    def part(number: int) -> dict[str, Any]:
        at = (number - 1) * step
        if stopped:
            raise InterruptedError
        data = read_exactly(descriptor, at, min(step, size - at), name)
        more = {"UploadId": upload_id, "PartNumber": number, "ContentMD5": content_md5(data)}
        answer = again(asked, lambda: client.upload_part(**place, Body=data, **more))
        with lock:
            sent(len(data))
        return {"PartNumber": number, "ETag": answer["ETag"]}

    try:
        with Workers(PARALLEL) as workers:
            try:
                parts = list(workers.map(part, range(1, -(-size // step) + 1)))
            except BaseException:
                stopped = True
                raise
        _complete(objects, name, upload_id, parts, size)
    except MissingError as error:
        raise MachineError(f"{asked.what}: the upload was removed by somebody else; {AGAIN}") from error
    except BaseException:
        with suppress(Exception):
            client.abort_multipart_upload(**place, UploadId=upload_id)
        raise


def _complete(objects: Objects, name: str, upload_id: str, parts: list[dict[str, Any]], size: int) -> None:
    """Make the object of its parts. Where the answer is lost the next try finds the object and no upload."""
    tried = 0

    def complete() -> None:
        nonlocal tried
        tried += 1
        objects.client.complete_multipart_upload(
            **objects.place(name), UploadId=upload_id, MultipartUpload={"Parts": parts}
        )

    try:
        again(objects.asked("writing", name), complete)
    except (MissingError, PreconditionError):
        there = objects.head(name) if tried > 1 else None
        if there is None or there.size != size or not there.etag.strip('"').endswith(f"-{len(parts)}"):
            raise


def abort_uploads(objects: Objects, names: Collection[str]) -> int:
    """Remove the parts of unfinished uploads of these names below the prefix, which are paid for and in no
    listing; returns how many there were. Nobody else may be writing these objects.
    """
    location, client, aborted = objects.location, objects.client, 0
    keys, asked = {location.key(name) for name in names}, objects.asked("removing unfinished uploads in", "")
    where = {"Bucket": location.bucket, "Prefix": location.key("")}
    while True:
        page = again(asked, partial(client.list_multipart_uploads, **where))
        for entry in page.get("Uploads", ()):
            if entry["Key"] in keys:
                one = {"Bucket": location.bucket, "Key": entry["Key"], "UploadId": entry["UploadId"]}
                with suppress(MissingError):
                    again(asked, partial(client.abort_multipart_upload, **one))
                    aborted += 1
        if not page.get("IsTruncated"):
            return aborted
        where |= {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"]}
