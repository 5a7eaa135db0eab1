"""The plugin for SGLang: registering costs nothing and never raises, its hooks touch only what is ours."""

from __future__ import annotations

import subprocess
import sys
from importlib.machinery import BuiltinImporter
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from checkpoints import Checkpoint
from fake_sglang import FakeSglang, LoadConfig, model_config
from marlin_convert.checkpoint.index import json_object
from marlin_convert.engines import sglang as plugin
from marlin_convert.engines.sglang_loader import ShardLoader
from marlin_convert.errors import UsageError

QUIET = """
import sys
from types import ModuleType
hooks = "sglang.srt.plugins.hook_registry"
for name in ("sglang", "sglang.srt", "sglang.srt.plugins", hooks, "sglang.srt.server_args"):
    sys.modules[name] = ModuleType(name)
class Registry:
    @staticmethod
    def register(target, hook, kind): print(target)
class Type: AROUND = 1
sys.modules[hooks].HookRegistry = Registry
sys.modules[hooks].HookType = Type
sys.modules["sglang.srt.server_args"].add_load_format_choices = print
from importlib.metadata import EntryPoint
EntryPoint("m", "marlin_convert.engines.sglang:register", "sglang.srt.plugins").load()()
print(sorted(name for name in ("torch", "numba", "llvmlite") if name in sys.modules))
"""


def test_registering_imports_neither_torch_nor_numba() -> None:
    ran = subprocess.run([sys.executable, "-c", QUIET], capture_output=True, text=True, check=True)
    lines = ran.stdout.splitlines()
    assert lines[0] == "['marlin-convert']"
    assert lines[1:-1] == list(plugin.HOOKS)
    assert lines[-1] == "[]"


def test_registering_never_raises(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as without:
        without.delitem(sys.modules, "sglang", raising=False)
        without.setattr(sys, "meta_path", [BuiltinImporter])  # which finds none
        plugin.register()
    assert caplog.text == ""
    monkeypatch.setitem(sys.modules, "sglang", ModuleType("sglang"))  # another one than expected
    plugin.register()
    assert "cannot be registered with this SGLang; it starts without" in caplog.text


def test_the_package_has_the_entry_point() -> None:
    import tomllib

    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["sglang.srt.plugins"] == {
        "marlin-convert": "marlin_convert.engines.sglang:register"
    }


def test_other_formats_go_their_way(tiny: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[Any] = []
    plugin.keep_our_format(checked.append, LoadConfig("auto"))
    plugin.keep_our_format(checked.append, LoadConfig("marlin-convert"))
    assert [config.load_format for config in checked] == ["auto"]
    chosen = plugin.choose_loader(lambda *a: a, LoadConfig("auto"), model_config(tiny.folder))
    assert chosen[0].load_format == "auto"


def test_our_format_gets_our_loader_but_a_draft_model_the_default(tiny: Checkpoint, tiny_tp2: Path) -> None:
    config = LoadConfig(model_loader_extra_config={"shards": str(tiny_tp2)})
    ours = plugin.choose_loader(pytest.fail, config, model_config(tiny.folder))
    assert isinstance(ours, ShardLoader)
    draft = model_config(tiny.folder, is_draft_model=True)
    default, _ = plugin.choose_loader(lambda *a: a, config, draft)
    assert (default.load_format, default.model_loader_extra_config) == ("auto", {})


def test_a_folder_of_ours_under_another_format_says_what_to_do(tiny_tp2: Path) -> None:
    with pytest.raises(
        UsageError, match="the load format auto cannot read it: add --load-format marlin-convert"
    ):
        plugin.choose_loader(pytest.fail, LoadConfig("auto"), model_config(tiny_tp2))


def test_the_engine_gets_the_quantization_of_the_source(tiny: Checkpoint, tiny_tp2: Path) -> None:
    def read(model: str) -> SimpleNamespace:
        config = json_object((Path(model) / "config.json").read_bytes(), "config.json")
        config["text_config"] = SimpleNamespace(**config["text_config"])
        return SimpleNamespace(**config)

    source = read(str(tiny.folder))
    assert read(str(tiny_tp2)) != source
    found = plugin.source_quantization(read, str(tiny_tp2))
    assert found == source
    assert found.text_config.quantization_config["quant_method"] == "compressed-tensors"
    assert plugin.source_quantization(read, str(tiny.folder)) == source


def test_a_config_of_nobody_is_left_alone() -> None:
    config = SimpleNamespace(quantization_config={"quant_method": "fp8"}, text_config=None)
    assert plugin.source_quantization(lambda model: config, "x").quantization_config == {
        "quant_method": "fp8"
    }


def test_the_hooks_that_are_registered(tiny_tp2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeSglang(tiny_tp2)
    engine.install(monkeypatch)
    plugin.register()
    assert engine.hooks == plugin.HOOKS
    assert engine.choices == ["marlin-convert"]
