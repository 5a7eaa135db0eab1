"""Compiles, without a GPU, the modules that SGLang would compile for the small model's forward on sm_90.
Needs nvcc 13, g++ and ninja; TVM_FFI_CACHE_DIR says where they go.
"""

from __future__ import annotations

import time

import torch
from sglang.kernels.jit.utils import override_jit_cuda_arch
from sglang.kernels.ops.activation.activation import activation_module
from sglang.kernels.ops.attention.clamp_position import _jit_clamp_position_module
from sglang.kernels.ops.attention.rope import _jit_fused_rope_module
from sglang.kernels.ops.gemm.dsv3_fused_a_gemm import dsv3_fused_a_gemm_module
from sglang.kernels.ops.moe.moe_align_single_token import _jit_align_single_token_module
from sglang.kernels.ops.moe.moe_wna16_marlin import _jit_moe_wna16_marlin_module
from sglang.kernels.ops.quantization.gptq_marlin_repack import _jit_gptq_marlin_repack_module

import fake_cuda  # noqa: F401  # before sglang asks

BF16 = torch.bfloat16
#: hidden size, and q_lora + kv_lora + rope, of the small model
FUSED_A = (2048, 512 + 512 + 64, True)
MODULES = (
    (activation_module, (BF16,)),
    (_jit_clamp_position_module, (torch.int64,)),
    (_jit_fused_rope_module, (False, 64, BF16, BF16)),
    (_jit_align_single_token_module, ()),
    (dsv3_fused_a_gemm_module, FUSED_A),
    (_jit_gptq_marlin_repack_module, ()),
    (_jit_moe_wna16_marlin_module, (BF16, False, False)),
    (_jit_moe_wna16_marlin_module, (BF16, True, False)),
)

with override_jit_cuda_arch(9, 0):
    for compile_module, arguments in MODULES:
        begin = time.monotonic()
        compile_module(*arguments)
        print(compile_module.__name__, arguments, f"{time.monotonic() - begin:.1f} s", flush=True)
