"""Finding the kernel: what is said where it is missing, and how the two forms of its call are fed."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from marlin_convert.errors import MachineError, UsageError
from marlin_convert.kernels.gemm_call import Alignment, GemmCall, Matrix, ReduceFlags
from marlin_convert.kernels.providers import (
    CANDIDATES,
    KernelUnavailableError,
    OpProvider,
    environment,
    load,
    probe,
)
from marlin_convert.kernels.quant_types import UINT4, UINT4B8, UINT8B128, kernel_type, need_kernel_type
from marlin_convert.progress import compiling

NO_GPU = pytest.mark.skipif(
    torch.cuda.is_available(), reason="says what is missing on a machine without a GPU"
)


def _call() -> GemmCall:
    """Every tensor of it one of its own."""
    matrix = Matrix(
        torch.zeros(2, 4, 256, dtype=torch.int32),
        torch.zeros(2, 2, 128, dtype=torch.bfloat16),
        UINT4,
        bias=torch.zeros(2, 128, dtype=torch.bfloat16),
        zeros=torch.zeros(2, 2, 16, dtype=torch.int32),
        g_idx=torch.zeros(2, 64, dtype=torch.int32),
        perm=torch.zeros(2, 64, dtype=torch.int32),
    )
    ids, experts, listed = (torch.zeros(size, dtype=torch.int32) for size in (24, 3, 1))
    alignment = Alignment(ids, experts, listed, 8, is_ep=True)
    return GemmCall(
        torch.zeros(1, 64, dtype=torch.bfloat16),
        matrix,
        alignment,
        torch.zeros(4, dtype=torch.int32),
        top_k=2,
        topk_weights=torch.zeros(1, 2),
        c=torch.zeros(2, 128, dtype=torch.bfloat16),
        flags=ReduceFlags(use_atomic_add=True, use_fp32_reduce=False),
    )


def _before_the_type(call: GemmCall) -> list[object]:
    """The first 18 arguments, in the order of the op's signature."""
    return [
        call.a,
        call.c,
        call.matrix.qweight,
        call.matrix.bias,
        call.matrix.scales,
        None,
        call.matrix.zeros,
        call.matrix.g_idx,
        call.matrix.perm,
        call.workspace,
        call.alignment.sorted_token_ids,
        call.alignment.expert_ids,
        call.alignment.num_tokens_post_padded,
        call.topk_weights,
        8,
        2,
        True,
        True,
    ]


AFTER_THE_TYPE: dict[str, Any] = {
    "size_m": 1,
    "size_n": 128,
    "size_k": 64,
    "is_k_full": True,
    "use_atomic_add": True,
    "use_fp32_reduce": False,
    "is_zp_float": False,
}


def same(found: Sequence[object], expected: Sequence[object]) -> bool:
    """Tensors the very ones, numbers equal and of one type."""
    return len(found) == len(expected) and all(
        a is b or (not isinstance(a, torch.Tensor) and type(a) is type(b) and a == b)
        for a, b in zip(found, expected, strict=True)
    )


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
    call = _call()
    provider.gemm(call)
    args, kwargs = calls[0]
    assert same(args, _before_the_type(call))
    assert kwargs.pop("b_q_type").id == UINT4.id
    assert kwargs == AFTER_THE_TYPE
    q = torch.zeros(2, 64, dtype=torch.int32)
    repacked: Any = provider.repack(q, None, 16, 64, 4)
    assert repacked[0] is q
    assert repacked[1].dtype == torch.int32
    assert repacked[1].numel() == 0
    assert repacked[2:] == (16, 64, 4)


def test_a_kernel_that_cannot_be_compiled_is_no_internal_error(fake_gpu: pytest.MonkeyPatch) -> None:
    """The first call compiles, which is told; what it lacks is named. Other errors stay what they are."""
    errors = [RuntimeError("ninja exited with status 127"), RuntimeError("a wrong shape"), None]

    def gemm(*args: object, **keywords: object) -> None:
        if (error := errors.pop(0)) is not None:
            raise error

    _install_sglang(fake_gpu, "sglang.kernels", gemm, lambda *args: args)
    provider, seen = load(), list[bool]()
    with compiling.watched(seen.append):
        with pytest.raises(KernelUnavailableError, match=r"compiled.*status 127; that needs nvcc"):
            provider.gemm(_call())
        with pytest.raises(RuntimeError, match="a wrong shape"):
            provider.gemm(_call())
        provider.gemm(_call())
        errors.append(None)
        provider.gemm(_call())
    assert seen == [True, False] * 3


def test_a_cut_module_is_named_before_it_is_loaded(fake_gpu: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Loading it would end the process without a word."""
    called: list[str] = []
    _install_sglang(
        fake_gpu, "sglang.kernels", lambda *a, **k: called.append("gemm"), lambda *a: called.append("repack")
    )
    fake_gpu.setenv("TVM_FFI_CACHE_DIR", str(tmp_path))
    module = tmp_path / "sgl_kernel_jit_moe_wna16_marlin_bf16_0__arch_9.0a" / "sgl_kernel_jit_moe_wna16.so"
    module.parent.mkdir()
    module.write_bytes(b"\x7fELF")
    provider = load()
    with pytest.raises(MachineError, match=f"{module} has 4 bytes, "):
        provider.gemm(_call())
    with pytest.raises(MachineError, match=f"remove the folder {module.parent}"):
        provider.repack(torch.zeros(2, 64, dtype=torch.int32), None, 16, 64, 4)
    assert called == []


def test_the_flat_op_takes_the_type_as_a_number(fake_gpu: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []
    ops = types.SimpleNamespace(
        moe_wna16_marlin_gemm=lambda *args: calls.append(args), gptq_marlin_repack=lambda *args: args
    )
    fake_gpu.setitem(sys.modules, "sgl_kernel", _module("sgl_kernel"))
    fake_gpu.setattr(torch.ops, "sgl_kernel", ops, raising=False)
    provider = load("sgl_kernel")
    call = _call()
    provider.gemm(call)
    assert same(calls[0], [*_before_the_type(call), UINT4.id, 1, 128, 64, True, True, False, False])
    assert len(calls[0]) == 26


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
    fake_gpu.setattr("marlin_convert.kernels.providers.installed", lambda name: name != "torch")
    assert "torch is not installed" in probe()[0].reason


def test_the_environment_names_packages_and_only_the_gpu_that_ran_it(fake_gpu: pytest.MonkeyPatch) -> None:
    fake_gpu.setattr("marlin_convert.kernels.providers.package_version", lambda name: f"of {name}")
    packages = {name: f"of {name}" for name in ("marlin-convert", "sglang", "sgl-kernel", "apache-tvm-ffi")}
    on_cpu = {"provider": "reference", "torch": str(torch.__version__)} | packages
    assert environment(load("reference"), "cpu") == on_cpu
    fake_gpu.setattr(torch.cuda, "get_device_capability", {"cuda:1": (9, 0)}.__getitem__)
    fake_gpu.setattr(torch.cuda, "get_device_name", {"cuda:1": "Second GPU"}.__getitem__)
    fake_gpu.setattr(torch.version, "cuda", "13.0")
    gpu = {"gpu": "Second GPU", "capability": "9.0", "cuda": "13.0"}
    ours = OpProvider("ours", _call, _call, type_as_object=True)
    assert environment(ours, "cuda:1") == on_cpu | {"provider": "ours"} | gpu


def test_type_ids_are_the_kernels() -> None:
    known = {"uint4b8": 1125899907892224, "uint4": 1125899906843648, "uint8b128": 1125899923621888}
    assert {kind.name: kind.id for kind in (UINT4B8, UINT4, UINT8B128)} == known


def test_the_stored_layout_has_a_type_and_others_have_none() -> None:
    assert kernel_type("moe_wna16_marlin.u4b8") is need_kernel_type("moe_wna16_marlin.u4b8") is UINT4B8
    assert kernel_type("triton.u4") is None
    with pytest.raises(UsageError, match=r"the kernel does not read the layout triton\.u4"):
        need_kernel_type("triton.u4")


def test_defaults_are_the_repeatable_ones_and_what_is_not_given_is_none() -> None:
    given = _call()
    plain = Matrix(given.matrix.qweight, given.matrix.scales)
    arguments = GemmCall(given.a, plain, given.alignment, given.workspace, 2).arguments()
    assert (arguments["is_k_full"], arguments["use_atomic_add"], arguments["use_fp32_reduce"]) == (
        True,
        False,
        True,
    )
    assert arguments["is_zp_float"] is False
    assert arguments["b_q_type_id"] == UINT4B8.id
    for name in ("c", "b_bias", "global_scale", "b_zeros", "g_idx", "perm"):
        assert arguments[f"{name}_or_none"] is None
    weights = arguments["topk_weights"]
    assert isinstance(weights, torch.Tensor)
    assert (weights.dtype, weights.numel(), arguments["mul_topk_weights"]) == (torch.float32, 0, False)


def test_some_experts_of_a_matrix_are_views_of_it() -> None:
    matrix = _call().matrix
    second = matrix[1:2]
    assert (second.num_experts, second.size_k, second.size_n) == (1, 64, 128)
    for name in ("qweight", "scales", "bias", "zeros", "g_idx", "perm"):
        assert getattr(second, name).data_ptr() == getattr(matrix, name)[1:].data_ptr(), name
    assert Matrix(matrix.qweight, matrix.scales)[1:].bias is None
