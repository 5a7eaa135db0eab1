"""The benches of conversion and layout run and report by schema; what they measure is for whoever runs
them.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator
from msgspec import Struct

from any_document import plain
from checkpoints import make_small
from marlin_convert.bench.conversion import VERBS, bench_conversion, tell_check_apart
from marlin_convert.bench.layout import SHAPES, bench_layout
from marlin_convert.bench.synthetic import config, make_layers
from marlin_convert.checkpoint.source import open_source
from marlin_convert.documents.bench import ConversionSettings, ConversionVariant
from marlin_convert.documents.provenance import Stage
from marlin_convert.errors import MachineError
from marlin_convert.planning.output_plan import Options, plan_output

SCHEMAS = Path(__file__).parents[2] / "schemas"


def valid(name: str, document: Struct) -> None:
    """Raise where a document is not as its schema says."""
    Draft202012Validator(json.loads((SCHEMAS / f"{name}.schema.json").read_text())).validate(plain(document))


@pytest.mark.slow
@pytest.mark.parametrize("verb", VERBS)
def test_against_cp(tmp_path: Path, verb: str) -> None:
    make_small(tmp_path / "source", layers=2, experts=4)
    names = [variant.name for variant in VERBS[verb].variants]
    assert len(names) == {"convert": 4, "restore": 2, "reshard": 4}[verb]
    said: list[str] = []
    report = bench_conversion(
        tmp_path,
        ConversionSettings(verb=verb, layers=1, experts=1, rounds=2, tp=2, ep=1),
        source=tmp_path / "source",
        variants=names,
        options=["--threads", "2", "--memory", "256MiB"],
        say=said.append,
    )
    valid("bench-convert", report)
    assert [variant.name for variant in report.variants] == ["cp", *names]
    assert report.bytes == sum(path.stat().st_size for path in (tmp_path / "source").iterdir())
    assert all(len(variant.seconds) == 2 for variant in report.variants)
    stages = {"read", "hash", "write"} | ({"repack"} if verb != "restore" else set())
    for variant in report.variants[1:]:
        assert variant.stages is not None
        assert variant.peak_anonymous is not None
        assert all(work.bytes > 0 for work in variant.stages.values())
        assert variant.stages.keys() == stages | ({"check"} if "exact" in variant.name else set())
        assert variant.peak_anonymous > 10 << 20
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_the_check_is_what_repacking_takes_longer() -> None:
    def variants(**seconds: float) -> dict[str, ConversionVariant]:
        return {
            name: ConversionVariant(name, 1, 1, 1, (1,), 1, 1, stages={"repack": Stage(each, 7)})
            for name, each in seconds.items()
        }

    ordinary = "exact, ordinary I/O"
    told = tell_check_apart(variants(cp=0, none=2, exact=3.5, **{ordinary: 9}))
    assert told["exact"].stages == {"repack": Stage(2, 7), "check": Stage(1.5, 7)}
    assert told[ordinary].stages == {"repack": Stage(9, 7)}
    told = tell_check_apart(variants(none=2, exact=1.5))  # noise
    assert told["exact"].stages == {"repack": Stage(1.5, 7), "check": Stage(0, 7)}


def test_a_conversion_that_fails_is_no_measurement(tmp_path: Path) -> None:
    make_small(tmp_path / "source", layers=2, experts=4)
    with pytest.raises(MachineError, match=r"exit code 2: error: --tp 3 .* is not divisible by tp / ep = 3"):
        bench_conversion(
            tmp_path,
            ConversionSettings(verb="convert", layers=1, experts=1, rounds=1, tp=3, ep=1),
            source=tmp_path / "source",
            variants=["none"],
            options=["--threads", "1"],
            say=lambda text: None,
        )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


@pytest.mark.slow
def test_layout() -> None:
    report = bench_layout(1)
    valid("bench-layout", report)
    assert {row.shape for row in report.rows} == set(SHAPES)
    assert len(report.rows) == 4 * (7 + 8)  # a batch is only streamed


def test_the_checkpoint_of_the_bench_is_one(tmp_path: Path) -> None:
    """Full K2.6 widths, and nothing that the converter would not take."""
    size = make_layers(tmp_path / "source", 1, 8)
    source = open_source(str(tmp_path / "source"))
    assert source.payload_bytes == size
    assert (source.model.hidden, source.model.moe_intermediate, source.model.experts) == (7168, 2048, 8)
    plan = plan_output(source, Options(8))
    assert plan.shape.local == 256
    assert config(1, 8)["vocab_size"] == 1024
