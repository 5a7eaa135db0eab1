"""What the tests of object stores as a source share: a checkpoint in one, and a command's environment."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from s3.proxy import Proxy, Request
from s3.server import KEY, REGION, SECRET, Store

#: of a conversion, what differs between a folder and an object store
OWN = {"manifest.json", "provenance.json"}


def environment(endpoint: str, home: Path) -> dict[str, str]:
    """Endpoint and credentials, and no configuration of the machine's own."""
    return {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_REGION": REGION,
        "AWS_CONFIG_FILE": str(home / "no-config"),
        "AWS_SHARED_CREDENTIALS_FILE": str(home / "no-credentials"),
        "AWS_EC2_METADATA_DISABLED": "true",
    }


@dataclass(frozen=True)
class Published:
    """A checkpoint in a store: the folder it was uploaded from, and the way to it."""

    bucket: str
    prefix: str
    folder: Path
    store: Store
    proxy: Proxy

    @property
    def uri(self) -> str:
        """What SOURCE is."""
        return f"s3://{self.bucket}/{self.prefix}"

    @property
    def weights(self) -> list[Path]:
        """The weight files, as they were uploaded."""
        return sorted(self.folder.glob("*.safetensors"))

    def upload(self) -> None:
        """Put all files of the folder in the bucket, and others beside and below them."""
        client = self.store.client()
        for path in self.folder.iterdir():
            client.put_object(Bucket=self.bucket, Key=f"{self.prefix}/{path.name}", Body=path.read_bytes())
        for beside in (f"{self.prefix}-other/config.json", f"{self.prefix}/deeper/x.safetensors"):
            client.put_object(Bucket=self.bucket, Key=beside, Body=b"another")

    def replace(self, name: str, data: bytes) -> None:
        """Write an object anew."""
        self.store.client().put_object(Bucket=self.bucket, Key=f"{self.prefix}/{name}", Body=data)

    def listed(self) -> dict[str, Any]:
        """All objects of the bucket, with what tells when they were written."""
        found = self.store.client().list_objects_v2(Bucket=self.bucket)["Contents"]
        return {each["Key"]: (each["ETag"], each["LastModified"]) for each in found}

    def fetched(self, name: str = ".safetensors") -> list[tuple[int, int]]:
        """First and last byte of what was asked for of files whose names end so, headers too, in order."""
        asked = [r for r in self.proxy.requests if r.data and r.name.endswith(name)]
        return sorted(self._first_and_last(request) for request in asked)

    def _first_and_last(self, request: Request) -> tuple[int, int]:
        if request.range is None:
            return 0, (self.folder / request.name).stat().st_size - 1
        first, last = request.range.removeprefix("bytes=").split("-")
        return int(first), int(last)
