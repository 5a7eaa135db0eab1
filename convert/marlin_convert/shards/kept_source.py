"""What OUT keeps of its source: headers, configuration and the digest of every tensor. Enough to prove an
output exact without the source.
"""

from __future__ import annotations

import errno
import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from marlin_convert.checkpoint.header import Header, TensorEntry, bounded, parse_header
from marlin_convert.checkpoint.index import json_object
from marlin_convert.checkpoint.source import Source
from marlin_convert.documents.bounds import CONFIG, HEADER, LISTED
from marlin_convert.documents.identity import FileIdentity
from marlin_convert.documents.manifest import Manifest
from marlin_convert.errors import ConvertError, MachineError, OutputError
from marlin_convert.models.family import ModelConfig, parse_config
from marlin_convert.storage.files import digest, read_small

ZEROS = bytes(16)
#: the digests of the source's tensors, in OUT
DIGESTS = "source/digests.bin"
#: the source's configuration, in OUT
CONFIG_KEPT = "source/config.json"
#: where the headers of the source's files are, packed, in OUT
HEADERS = "source/headers/"


@dataclass(frozen=True)
class KeptSource:
    """The kept headers and digests; a digest of zeros stands for a tensor outside the conversion's scope."""

    headers: tuple[Header, ...]
    config: dict[str, Any]
    config_bytes: bytes
    model: ModelConfig
    entries: dict[str, TensorEntry]
    digests: dict[str, bytes]
    #: size and xxh3-128 (hex) of the file that they are from, as it was read
    digests_file: tuple[int, str]

    def holders(self, value: bytes) -> list[str]:
        """Source tensors with this digest: whose data it is."""
        return [name for name, known in self.digests.items() if known == value]


def digests_by_tensor(headers: Sequence[Header], blob: bytes) -> dict[str, bytes]:
    """source/digests.bin: 16 bytes for each tensor, in the order of the files and of the tensors in them.
    Raises OutputError.
    """
    names = [entry.name for header in headers for entry in header.tensors]
    if len(blob) != 16 * len(names):
        raise OutputError(
            f"source/digests.bin has {len(blob)} bytes, expected {16 * len(names)}; make OUT again: convert"
            " with --overwrite"
        )
    return {name: blob[16 * i : 16 * i + 16] for i, name in enumerate(names)}


def recorded_digests(out: Path, source: Source) -> dict[str, tuple[bytes, str]]:
    """Digest and file of each source tensor, as OUT keeps them from when it was finished: what is made again
    must come of the same bytes. Nothing where they are not there, or not whole.
    """
    try:
        digests = digests_by_tensor(source.headers, read_small(out / DIGESTS, 16 * len(source.tensors)))
    except OutputError:
        return {}
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EPERM):
            raise
        return {}
    return {name: (value, source.tensors[name].file) for name, value in digests.items() if value != ZEROS}


def sound_bytes(out: Path, manifest: Manifest, name: str) -> bytes | None:
    """What a listed file holds; None where it is not there or not what the manifest has the digest of."""
    listed = next((file for file in manifest.files if file.path == name), None)
    path = out / name
    if listed is None or not path.is_file() or path.stat().st_size != listed.size:
        return None
    data = read_small(path, LISTED)
    return data if digest(data).hex() == listed.digest else None


def listed_bytes(out: Path, manifest: Manifest, name: str) -> bytes:
    """What a listed file holds. Raises OutputError where `sound_bytes` has nothing."""
    if (data := sound_bytes(out, manifest, name)) is None:
        raise OutputError(
            f"{out}/{name} is damaged or missing, or was edited, so that nothing can be proven by it; put"
            " back what was there, or make OUT again: convert with --overwrite"
        )
    return data


def may_be_edited(name: str) -> bool:
    """Whether a listed file is one that people write in: all but digests and packed headers."""
    return name not in ("digests.bin", DIGESTS) and not name.startswith(HEADERS)


def may_be_theirs(out: Path, name: str) -> bool:
    """Whether what has the name of a listed file in OUT, and is not what was written, may be somebody's: any
    file that people write in, and a folder, a pipe or a link to nowhere in the place of another one.
    """
    path = out / name
    return os.path.lexists(path) and (may_be_edited(name) or not path.is_file())


def unpacked(packed: bytes, most: int) -> bytes:
    """What a gzip file of one piece holds. Raises ValueError where that is more than `most` bytes, of which
    no more are unpacked, or not whole.
    """
    unpacking = zlib.decompressobj(wbits=31)  # with the header and the check sum of gzip
    try:
        data = unpacking.decompress(packed, most + 1)
    except zlib.error as error:
        raise ValueError(str(error)) from error
    if len(data) > most:
        raise ValueError(f"a header unpacks to more than the {most} bytes that are expected")
    if not unpacking.eof or unpacking.unused_data:
        raise ValueError("a header is not one whole gzip file")
    return data


def _kept_header(out: Path, file: FileIdentity) -> Header:
    packed = read_small(out / "source" / "headers" / f"{file.name}.gz", HEADER)
    return parse_header(file.name, file.size, unpacked(packed, min(file.size, HEADER)))


def read_kept_source(out: Path, manifest: Manifest) -> KeptSource:
    """Read source/. Raises OutputError where it is not whole or not of one piece with the manifest."""
    try:
        headers = tuple(bounded(_kept_header(out, file) for file in manifest.source.files))
        config_bytes = read_small(out / "source" / "config.json", CONFIG)
        config = json_object(config_bytes, "config.json")
        blob = read_small(out / DIGESTS, 16 * sum(len(header.tensors) for header in headers))
        model = parse_config(config)
    except MachineError:
        raise
    except (OSError, ValueError, KeyError, TypeError, ConvertError) as error:
        raise OutputError(
            f"{out}/source is damaged ({error}), so nothing can be proven; make OUT again: convert with"
            " --overwrite"
        ) from error
    entries = [entry for header in headers for entry in header.tensors]
    return KeptSource(
        headers,
        config,
        config_bytes,
        model,
        {entry.name: entry for entry in entries},
        digests_by_tensor(headers, blob),
        (len(blob), digest(blob).hex()),
    )


def read_sound_source(out: Path, manifest: Manifest) -> KeptSource:
    """Read source/: all of it as the manifest lists it, headers and configuration those that the manifest has
    the digests of. Raises OutputError.
    """
    identity = manifest.source.identity
    made_from = {CONFIG_KEPT: identity.config} | {f"{HEADERS}{f.name}.gz": f.header for f in identity.files}
    for name in (DIGESTS, *made_from):
        listed_bytes(out, manifest, name)
    kept = read_kept_source(out, manifest)
    found = [kept.config_bytes, *(header.raw for header in kept.headers)]
    for (name, said), data in zip(made_from.items(), found, strict=True):
        if digest(data).hex() != said:
            raise OutputError(f"{out}/{name} is not what manifest.json says of the source; run verify")
    return kept
