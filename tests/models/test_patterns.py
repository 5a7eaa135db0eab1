"""Patterns of an ignore list: the same answers as Python's engine, in bounded time."""

from __future__ import annotations

import json
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from marlin_convert.models.patterns import MAX_LENGTH, Patterns, UnknownFormError

CONFIG = Path(__file__).parents[1] / "support" / "k26_config.json"

PIECES = st.sampled_from([
    "a", "b", ".", "\\.", "[ab]", "[^a]", "[a-c.]", "(a|b)", "(?:ab|c)?", "a*", "b+", "(a*)*", "(a|b*)+",
    ".*", ".*?", "^", "$", "|", "\\d", "\\w+", "\\D", "()", "[]a]", "[a-]", "[\\d.]"])  # fmt: skip  # a table


@settings(deadline=None, max_examples=500)
@given(st.lists(PIECES, max_size=6).map("".join), st.text("abc.0", max_size=8))
def test_the_answers_are_those_of_pythons_engine(pattern: str, text: str) -> None:
    assert Patterns([pattern]).match(text) == (re.match(pattern, text) is not None)


def test_the_published_list_is_followed() -> None:
    entries = json.loads(CONFIG.read_bytes())["text_config"]["quantization_config"]["ignore"]
    patterns = [entry[3:] for entry in entries if entry.startswith("re:")]
    assert patterns, "the published list has patterns"
    compiled = Patterns(patterns)
    for module in (
        "language_model.model.layers.3.self_attn.o_proj",
        "language_model.model.layers.0.mlp.gate_proj",
        "language_model.model.layers.1.mlp.shared_experts.up_proj",
        "language_model.lm_head",
        "vision_tower.encoder.blocks.0.wqkv",
        "mm_projector.proj.0",
    ):
        assert compiled.match(module), module
    assert not compiled.match("language_model.model.layers.1.mlp.experts.383.gate_proj")
    assert not compiled.match("language_model.vision_tower.wo")


@pytest.mark.parametrize(
    "pattern", ["(?!.*experts).*", "a{3}", "(?i)a", "\\bx", "(a)\\1", "(?P<x>a)", "a*+", "(?=a)", "a+{2}"]
)
def test_what_cannot_be_followed_is_told_apart(pattern: str) -> None:
    with pytest.raises(UnknownFormError):
        Patterns([pattern])


@pytest.mark.parametrize("pattern", ["(", ")", "[", "a\\", "*", "a|+", "[b-a]", "(" * 100 + ")" * 100])
def test_what_is_no_pattern_is_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match=r"\w") as caught:
        Patterns([pattern])
    assert not isinstance(caught.value, UnknownFormError)


def test_a_list_longer_than_any_is_refused() -> None:
    Patterns(["a" * MAX_LENGTH])
    with pytest.raises(ValueError, match=str(MAX_LENGTH)):
        Patterns(["a" * MAX_LENGTH, "b"])


HOSTILE = """
import sys
from marlin_convert.models.patterns import Patterns
patterns = Patterns([eval(sys.argv[1])])
try:
    for number in range(20_000):
        patterns.match(f"{number:b}".replace("1", "a").replace("0", "b") * 20 + "!")
except ValueError as error:
    assert "more than can be followed" in str(error)
"""


@pytest.mark.parametrize(
    "pattern",
    [
        "'(a+)+$'",
        "'(a|a)*$'",
        "'(.*)*x$'",
        "'.*a' * 1000 + 'x$'",
        "'.*a' + '(a|b)' * 800",
        "'(a?)' * 900 + 'x'",
    ],
)
def test_patterns_that_backtrack_end(pattern: str) -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_CPU, (60, 60))

    subprocess.run([sys.executable, "-c", HOSTILE, pattern], check=True, preexec_fn=limit)
