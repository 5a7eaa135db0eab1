"""What a check found."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from threading import Lock
from typing import Any

#: what a finding says where the output is what it was made to be and the source is not
SOURCE_DAMAGED = "of the source may be damaged; fetch it again first"


@dataclass(frozen=True, order=True)
class Finding:
    """One thing that is wrong. The coordinates are None where they do not apply."""

    path: str
    what: str
    layer: int | None = None
    expert: int | None = None
    projection: str | None = None
    rank: int | None = None

    def __str__(self) -> str:
        places = (("layer", self.layer), ("expert", self.expert), ("", self.projection), ("rank", self.rank))
        where = ", ".join(f"{name} {value}".strip() for name, value in places if value is not None)
        return f"{self.path}: {where + ': ' if where else ''}{self.what}"


@dataclass
class Report:
    """Findings and what was proven. Filled from several threads."""

    findings: list[Finding] = field(default_factory=list)
    files: int = 0
    bytes: int = 0
    proven: int = 0
    unproven: int = 0
    _lock: Lock = field(default_factory=Lock)

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.findings

    def add(self, *findings: Finding) -> None:
        """Add findings."""
        with self._lock:
            self.findings.extend(findings)

    def count(self, *, files: int = 0, size: int = 0, proven: int = 0, unproven: int = 0) -> None:
        """Count what was looked at: files, bytes read, source tensors proven and not provable from OUT
        alone.
        """
        with self._lock:
            self.files += files
            self.bytes += size
            self.proven += proven
            self.unproven += unproven

    def as_json(self) -> dict[str, Any]:
        """For `--json`; its schema is schemas/verify.schema.json."""
        return {
            "ok": self.ok,
            "files": self.files,
            "bytes": self.bytes,
            "tensors_proven": self.proven,
            "tensors_unproven": self.unproven,
            "findings": [
                asdict(finding) | {"message": str(finding)} for finding in sorted(self.findings, key=str)
            ],
        }
