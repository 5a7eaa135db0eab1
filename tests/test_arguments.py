"""What may come to the public functions in Python, where nothing sees it before: named, never a traceback of
somewhere inside.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

import marlin_convert
from checkpoints import Checkpoint
from marlin_convert import UsageError

#: untyped: what the types forbid is what comes here
convert, download, load_rank, open_shards, plan, verify, verify_kernel = (
    cast(Any, getattr(marlin_convert, name))
    for name in ("convert", "download", "load_rank", "open_shards", "plan", "verify", "verify_kernel")
)

ODD: list[tuple[str, dict[str, Any]]] = [
    ("tp is '8'; it must be a whole number of at least 1", {"tp": "8"}),
    ("tp is 2.0;", {"tp": 2.0}),
    ("tp is True;", {"tp": True}),
    ("tp is 0;", {"tp": 0}),
    ("ep is -1;", {"tp": 2, "ep": -1}),
    ("threads is 0;", {"tp": 2, "threads": 0}),
    ("memory is '2GiB';", {"tp": 2, "memory": "2GiB"}),
    ("layers is 1; it must be a list of whole numbers", {"tp": 2, "layers": 1}),
    ("layers is '1';", {"tp": 2, "layers": "1"}),
    (r"ranks is \[0, '1'\];", {"tp": 2, "ranks": [0, "1"]}),
    ("out is 5; it must be a path", {"tp": 2, "out": 5}),
    ("source is b'x'; it must be a path", {"tp": 2, "source": b"x"}),
    ("--verify nonsense: choose one of", {"tp": 2, "verify": "nonsense"}),
    ("there is no layout nonsense; known are", {"tp": 2, "layout": "nonsense"}),
]


@pytest.mark.parametrize(("said", "given"), ODD)
@pytest.mark.parametrize("verb", [plan, convert])
def test_odd_values_of_a_conversion(
    tiny: Checkpoint, tmp_path: Path, verb: Any, said: str, given: dict[str, Any]
) -> None:
    asked = {"source": tiny.folder, "out": tmp_path / "out"} | given
    try:
        refusal = verb(**asked).refusal  # what only a place is refused for
    except UsageError as error:
        refusal = error
    assert isinstance(refusal, UsageError)
    assert re.match(said, str(refusal))


@pytest.mark.parametrize(
    ("said", "call"),
    [
        ("threads is 0;", lambda out: verify(out, threads=0)),
        ("ranks is 1;", lambda out: verify(out, ranks=1)),
        ("source is 5;", lambda out: verify(out, 5)),
        ("sample is 0;", lambda out: verify_kernel(out, device="cpu", sample=0)),
        ("experts is '3';", lambda out: verify_kernel(out, device="cpu", experts="3")),
        ("device is 'gpu'; it must be cpu, cuda, or cuda:N", lambda out: verify_kernel(out, device="gpu")),
        ("device is 'gpu';", lambda out: load_rank(out, 0, device="gpu")),
        ("device is 'meta';", lambda out: load_rank(out, 0, device="meta")),
        ("device is 5.5;", lambda out: load_rank(out, 0, device=5.5)),
        ("threads is 0;", lambda out: load_rank(out, 0, device="cpu", threads=0)),
        ("give layers or units, not both", lambda out: load_rank(out, 0, layers=[1], units=["top"])),
        ("has no layer-009 on rank 0", lambda out: load_rank(out, 0, device="cpu", layers=[9])),
        ("has no rank 2; it has 0, 1", lambda out: open_shards(out, 2)),
        ("rank is '0'; it must be a whole number of at least 0", lambda out: open_shards(out, "0")),
        ("is not the id of a hub repository", download),
        ("folder is 5;", lambda out: download("org/name", 5)),
    ],
)
def test_odd_values_of_the_others(tiny_tp2: Path, said: str, call: Any) -> None:
    pytest.importorskip("torch")
    with pytest.raises(UsageError, match=said):
        call(tiny_tp2)


def test_a_gpu_that_is_not_there(tiny_tp2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for call in (load_rank, lambda out, rank, device: verify_kernel(out, device=device)):
        with pytest.raises(UsageError, match="there is no cuda:1: torch sees 1, the last is cuda:0"):
            call(tiny_tp2, 0, device="cuda:1")


def test_numbers_of_numpy_and_paths_are_fine(tiny: Checkpoint, tmp_path: Path) -> None:
    report = plan(tiny.folder, tmp_path / "out", tp=int(np.int64(2)), layers=np.array([1]), ranks=range(2))
    assert [unit.name for unit in report.output.units] == ["layer-001"]
    made = convert(str(tiny.folder), str(tmp_path / "out"), tp=2, layers=(1,))
    assert verify(tmp_path / "out", tiny.folder).ok
    assert made.out == tmp_path / "out"


def test_what_comes_back_is_seen_at_a_glance(copied: Path, tiny: Checkpoint) -> None:
    """None of it fills a screen, and what is wrong is false."""
    pytest.importorskip("torch")
    whole, shards = verify(copied), open_shards(copied, 1)
    loaded = load_rank(copied, 1, device="cpu", layers=[1])
    kernel = verify_kernel(copied, tiny.folder, device="cpu", layers=[1], experts=[0], tokens=())
    report = plan(tiny.folder, tp=2)
    for each in (whole, shards, loaded, kernel, report, report.source, report.output):
        assert len(repr(each)) < 300
    assert whole
    assert kernel
    assert isinstance(loaded, marlin_convert.LoadedRank)
    assert {name for name in loaded.tensors if ".layers.1." not in name} == set()
    (copied / "config.json").write_text("{}")
    assert not verify(copied)


def test_shards_are_read_like_a_mapping(tiny_tp2: Path) -> None:
    shards = open_shards(tiny_tp2, 1)
    assert len(shards) == len(shards.keys()) == len(list(shards))
    assert shards.keys() == shards.names()
    assert all(np.array_equal(array, array) for name, array in shards.items())
