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
    ("tp is a number of thousands of digits;", {"tp": 10**5000}),
    ("ep is 9223372036854775808;", {"tp": 2, "ep": 1 << 63}),
    (r"attn_tp is array\(\[1, 2\]\);", {"tp": 2, "attn_tp": np.array([1, 2])}),
    (r"pp is array\(2\);", {"tp": 2, "pp": np.array(2)}),
    (r"pp is np\.True_;", {"tp": 2, "pp": np.True_}),
    ("attn_tp is nan;", {"tp": 2, "attn_tp": float("nan")}),
    (r"layers is array\(1\);", {"tp": 2, "layers": np.array(1)}),
    ("layers is <list_iterator object", {"tp": 2, "layers": iter([1])}),
    (r"ranks is \{0: 1\};", {"tp": 2, "ranks": {0: 1}}),
    (r"ranks is \[array\(\[0, 1\]\)\];", {"tp": 2, "ranks": [np.array([0, 1])]}),
    ("expert_map is 5; it must be a path", {"tp": 2, "expert_map": 5}),
    (r"expert_map is 'a\\x00b'; it must be a path", {"tp": 2, "expert_map": "a\0b"}),
    (r"expert_map is '\\ud800'; it must be a path", {"tp": 2, "expert_map": "\ud800"}),
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
        ("units is 5; it must be a list of names", lambda out: load_rank(out, 0, device="cpu", units=5)),
        (r"units is \[1\];", lambda out: load_rank(out, 0, device="cpu", units=[1])),
        ("units is <list_iterator", lambda out: load_rank(out, 0, device="cpu", units=iter(["top"]))),
        (r"path array\(\[1, 2\]\): choose", lambda out: load_rank(out, 0, path=np.array([1, 2]))),
        ("device is 18446744073709551616;", lambda out: load_rank(out, 0, device=1 << 64)),
        ("stage is 0.0;", lambda out: open_shards(out, 0, stage=0.0)),
        ("rank is a number of thousands of digits;", lambda out: open_shards(out, 10**5000)),
        ("out is 'a", lambda out: open_shards("a\0b")),
        ("is not a folder", lambda out: verify("x" * 5000)),
        ("no rank is asked for", lambda out: verify(out, ranks=[])),
        ("no stage is asked for", lambda out: verify(out, stages=())),
        ("ranks is <list_iterator", lambda out: verify(out, ranks=iter([1]))),
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
    two, layers = np.int64(2), np.array([1])
    report = plan(tiny.folder, tmp_path / "out", tp=two, ep=two, layers=layers, ranks=range(2))
    assert [unit.name for unit in report.output.units] == ["layer-001"]
    asked = {"tp": two, "ep": two, "attn_tp": np.int8(1), "pp": two, "layers": layers, "memory": two << 30}
    made = convert(str(tiny.folder), str(tmp_path / "out"), ranks=range(2), threads=two, **asked)
    assert verify(tmp_path / "out", tiny.folder, ranks=np.array([1]), stages=[np.int64(1)]).ok
    assert repr(open_shards(made.out, np.int64(1), stage=np.uint8(1))).endswith("rank=1, 18 tensors)")
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
