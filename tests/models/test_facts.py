"""A mistake in a family's rules makes folders in which everything fits; the facts at the end of its module,
by which the checks go, find it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import gqa
from checkpoints import Checkpoint
from marlin_convert.checks.verify import verify
from marlin_convert.models import family, kimi_k2
from marlin_convert.models.family import Family, Rule
from marlin_convert.pipeline.run import convert

KIMI: dict[str, dict[str, Any]] = {
    "self_attn.o_proj.weight": {"kind": "column", "unit": None},
    "self_attn.kv_b_proj.weight": {"kind": "row", "unit": None},
    "self_attn.q_b_proj.weight": {"kind": "replicate"},
    "self_attn.q_a_proj.weight": {"fuse": None},
    "self_attn.kv_a_proj_with_mqa.weight": {"fuse": "self_attn.another.weight"},
    "mlp.gate.weight": {"kind": "column"},
    "mlp.up_proj.weight": {"kind": "vocab"},
    "mlp.shared_experts.down_proj.weight": {"kind": "column"},
    "lm_head.weight": {"kind": "replicate"},
}
GROUPED: dict[str, dict[str, Any]] = {
    "self_attn.k_proj.weight": {"kind": "replicate"},
    "self_attn.v_proj.weight": {"unit": None},
    "self_attn.q_norm.weight": {"kind": "column"},
    "self_attn.o_proj.weight": {"kind": "replicate"},
}


def spoiled(rules: tuple[Rule, ...], name: str, mistake: dict[str, Any]) -> tuple[Rule, ...]:
    """The rules, with a mistake in one."""
    assert sum(rule.name == name for rule in rules) == 1
    return tuple(replace(rule, **mistake) if rule.name == name else rule for rule in rules)


def findings(source: Path, out: Path, tp: int) -> list[str]:
    """What verify says of a conversion, which says nothing itself."""
    convert(str(source), out, tp=tp, threads=2)
    return [str(finding) for finding in verify(out, threads=2).findings]


@pytest.mark.parametrize("name", KIMI)
def test_a_mistake_in_a_rule_of_kimi_k2(
    tiny: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(kimi_k2, "_TEXT", spoiled(kimi_k2._TEXT, name, KIMI[name]))
    said = findings(tiny.folder, tmp_path / "out", 2)
    assert any(name.rpartition(".")[0] in line or "fused views" in line for line in said)


@pytest.fixture(scope="module")
def grouped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A checkpoint of the second family."""
    folder = tmp_path_factory.mktemp("grouped") / "checkpoint"
    gqa.make_gqa(folder)
    with gqa.registered():
        yield folder


@pytest.mark.parametrize("name", GROUPED)
def test_a_mistake_in_a_rule_of_the_second_family(
    grouped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(gqa, "_RULES", spoiled(gqa._RULES, name, GROUPED[name]))
    assert any(name in line for line in findings(grouped, tmp_path / "out", 8))


def test_a_mistake_in_a_constant(tiny: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong: Family = replace(kimi_k2.FAMILY, constants=lambda text: {"softmax_scale": 0.5})
    monkeypatch.setattr(kimi_k2, "FAMILY", wrong)
    monkeypatch.setattr(family, "_FAMILIES", dict.fromkeys(wrong.architectures, wrong))
    said = findings(tiny.folder, tmp_path / "out", 2)
    assert any("says model.softmax_scale 0.5, by the source's config.json it is" in line for line in said)
