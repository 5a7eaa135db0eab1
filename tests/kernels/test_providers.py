"""Finding the kernel: what is said where it is missing, and how the two forms of its call are fed."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import types
from typing import Any

import pytest
import torch

from marlin_convert.kernels import providers
from marlin_convert.kernels.providers import CANDIDATES, KernelUnavailableError, OpProvider, load, probe
from marlin_convert.kernels.quant_types import UINT4B8, quant_type

NO_GPU = pytest.mark.skipif(
    torch.cuda.is_available(), reason="says what is missing on a machine without a GPU"
)
ARGUMENTS = [f"argument {i}" for i in range(14)] + [8, 2, False, True]
AFTER_THE_TYPE: dict[str, Any] = {
    "size_m": 1,
    "size_n": 128,
    "size_k": 64,
    "is_k_full": True,
    "use_atomic_add": True,
    "use_fp32_reduce": False,
    "is_zp_float": False,
}


def test_the_light_modules_load_no_torch() -> None:
    code = (
        "import sys, marlin_convert.kernels.providers, marlin_convert.kernels.quant_types,"
        "marlin_convert.kernels.fragments;"
        "sys.exit('torch' in sys.modules or 'sglang' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@NO_GPU
def test_probe_says_what_is_missing() -> None:
    reports = probe()
    assert [report.name for report in reports] == ["sglang.kernels", "sglang.jit_kernel", "sgl_kernel"]
    for report, candidate in zip(reports, CANDIDATES, strict=True):
        assert not report.available
        assert f"torch {torch.__version__} sees no CUDA GPU" in report.reason
        installed = importlib.util.find_spec(candidate.package) is not None
        assert installed == (f"the package {candidate.package} is not installed" not in report.reason)
        assert "\n" not in report.reason
    assert "pip install '.[sglang]'" in reports[0].install
    assert "pip install '.[sgl-kernel]'" in reports[2].install
    assert "sglang" not in sys.modules


@NO_GPU
def test_load_names_every_reason_and_never_falls_back_to_the_reference() -> None:
    with pytest.raises(KernelUnavailableError) as caught:
        load()
    assert caught.value.exit_code == 4
    for candidate in CANDIDATES:
        assert f"  {candidate.name}: " in str(caught.value)
    assert load("reference").device == "cpu"
    with pytest.raises(ValueError, match=r"no provider is called 'vllm': sglang\.kernels"):
        load("vllm")


def _module(name: str, **attributes: object) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__spec__ = importlib.util.spec_from_loader(name, None)
    module.__path__ = []
    for key, value in attributes.items():
        setattr(module, key, value)
    return module


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Some GPU")
    return monkeypatch


def _install_sglang(monkeypatch: pytest.MonkeyPatch, base: str, gemm: object, repack: object) -> None:
    """Put a fake sglang that has its kernels at the paths below `base` into sys.modules."""
    candidate = next(c for c in CANDIDATES if c.name == base)
    for path in (candidate.gemm_module, candidate.repack_module):
        assert path is not None
        parts = path.split(".")
        for end in range(1, len(parts)):
            monkeypatch.setitem(sys.modules, ".".join(parts[:end]), _module(".".join(parts[:end])))
        monkeypatch.setitem(
            sys.modules, path, _module(path, moe_wna16_marlin_gemm=gemm, gptq_marlin_repack=repack)
        )


@pytest.mark.parametrize("base", ["sglang.kernels", "sglang.jit_kernel"])
def test_sglang_is_found_at_either_path_and_fed_by_keyword(fake_gpu: pytest.MonkeyPatch, base: str) -> None:
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    _install_sglang(fake_gpu, base, lambda *args, **kwargs: calls.append((args, kwargs)), lambda *args: args)
    provider = load()
    assert (provider.name, provider.device) == (base, "cuda")
    provider.gemm(*ARGUMENTS, b_q_type_id=UINT4B8.id, **AFTER_THE_TYPE)
    args, kwargs = calls[0]
    assert list(args) == ARGUMENTS
    assert kwargs.pop("b_q_type").id == UINT4B8.id
    assert kwargs == AFTER_THE_TYPE
    q = torch.zeros(2, 64, dtype=torch.int32)
    repacked: Any = provider.repack(q, None, 16, 64, 4)
    assert repacked[0] is q
    assert repacked[1].dtype == torch.int32
    assert repacked[1].numel() == 0
    assert repacked[2:] == (16, 64, 4)


def test_the_flat_op_takes_the_type_as_a_number(fake_gpu: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []
    ops = types.SimpleNamespace(
        moe_wna16_marlin_gemm=lambda *args: calls.append(args), gptq_marlin_repack=lambda *args: args
    )
    fake_gpu.setitem(sys.modules, "sgl_kernel", _module("sgl_kernel"))
    fake_gpu.setattr(torch.ops, "sgl_kernel", ops, raising=False)
    provider = load("sgl_kernel")
    provider.gemm(*ARGUMENTS, UINT4B8.id, **AFTER_THE_TYPE)
    assert calls == [(*ARGUMENTS, UINT4B8.id, 1, 128, 64, True, True, False, False)]


def test_a_package_that_lost_the_kernel_or_breaks_on_import_is_a_reason(fake_gpu: pytest.MonkeyPatch) -> None:
    fake_gpu.setitem(sys.modules, "sgl_kernel", _module("sgl_kernel"))
    fake_gpu.setattr(torch.ops, "sgl_kernel", types.SimpleNamespace(), raising=False)
    fake_gpu.setitem(sys.modules, "sglang", _module("sglang"))
    by_name = {report.name: report for report in probe()}
    assert "no longer has the kernel" in by_name["sgl_kernel"].reason
    assert by_name["sglang.kernels"].reason.startswith(
        "sglang.kernels.ops.moe.moe_wna16_marlin does not load: ModuleNotFoundError: No module named"
    )
    assert not any(report.available for report in by_name.values())


def test_an_old_gpu_and_a_missing_torch_are_reasons(fake_gpu: pytest.MonkeyPatch) -> None:
    fake_gpu.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    assert "Some GPU has compute capability 7.5, the kernel needs 8.0" in probe()[0].reason
    find_spec = importlib.util.find_spec
    fake_gpu.setattr(
        providers.importlib.util, "find_spec", lambda name: None if name == "torch" else find_spec(name)
    )
    assert "torch is not installed" in probe()[0].reason


def test_type_ids_are_the_kernels() -> None:
    known = {"uint4b8": 1125899907892224, "uint4": 1125899906843648, "uint8b128": 1125899923621888}
    assert {name: quant_type(number).name for name, number in known.items()} == {name: name for name in known}


def test_defaults_are_the_repeatable_ones() -> None:
    seen: dict[str, Any] = {}
    provider = OpProvider("any", lambda *args: None, lambda *args, **kwargs: seen.update(kwargs), True)
    provider.gemm(*ARGUMENTS, UINT4B8.id, 1, 128, 64)
    assert (seen["is_k_full"], seen["use_atomic_add"], seen["use_fp32_reduce"]) == (True, False, True)
    assert seen["is_zp_float"] is False
