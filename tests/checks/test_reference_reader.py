"""Every shard is also opened by the safetensors package's own reader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors import SafetensorError, safe_open

from marlin_convert.checks import shard_files
from marlin_convert.checks.verify import verify


class Reader:
    """The package's reader as it might be of another release: it sees what `change` makes of the file."""

    def __init__(self, change: str) -> None:
        self.change = change
        self.opened: list[Path] = []
        self._real = safe_open

    def __call__(self, path: Path, framework: str) -> Any:
        self.opened.append(path)
        if self.change == "refuses":
            raise SafetensorError("header too large")
        return _Opened(self._real(path, framework=framework), self.change)


class _Opened:
    def __init__(self, real: Any, change: str) -> None:
        self._real, self._change = real, change

    def __enter__(self) -> _Opened:
        self._real.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._real.__exit__(*error)

    def keys(self) -> list[str]:
        return list(self._real.keys())[1 if self._change == "tensor" else 0 :]

    def get_slice(self, name: str) -> Any:
        return self._real.get_slice(name)

    def metadata(self) -> dict[str, str]:
        found: dict[str, str] = dict(self._real.metadata())
        return found | ({"rank": "7"} if self._change == "metadata" else {})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("nothing", None),
        ("refuses", "the safetensors package does not open it: header too large"),
        ("tensor", "the safetensors package reads other names, dtypes or shapes in it"),
        ("metadata", "the safetensors package reads another __metadata__ in it"),
    ],
)
def test_every_shard_is_opened_and_compared(
    tiny_tp2: Path, monkeypatch: pytest.MonkeyPatch, change: str, said: str | None
) -> None:
    reader = Reader(change)
    monkeypatch.setattr(shard_files, "safe_open", reader)
    report = verify(tiny_tp2, threads=2)
    shards = sorted(tiny_tp2.rglob("*.safetensors"))
    assert sorted(reader.opened) == shards
    assert [finding.what for finding in report.findings] == ([] if said is None else [said] * len(shards))
