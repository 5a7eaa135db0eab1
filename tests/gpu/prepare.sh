#!/usr/bin/env bash
# Where there is a network (no GPU needed): fetch and compile what a bare GPU machine lacks, into .gpu/.
# Usage: tests/gpu/prepare.sh [CUDA_ARCH_MAJOR CUDA_ARCH_MINOR]    default 9 0 (H100, H200)
# Needs nvcc with CUDA_HOME set, g++ with C++20 and ninja. About 6 minutes a module on one slow core.
# TARGET_PYTHON: the GPU machine's Python (default 3.12). MODULES: which kernels, IS_EP,HAS_BIAS pairs.
set -euo pipefail

major=${1:-9} minor=${2:-0}
target=${TARGET_PYTHON:-3.12}
modules=${MODULES:-0,0 1,0 0,1}
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
carry=${GPU_CARRY:-$root/.gpu}
build=${GPU_BUILD:-$carry/build}
: "${CUDA_HOME:?say where the CUDA toolkit is: a nvcc on the PATH alone is not enough to link}"

sglang=sglang==0.5.17 tvm_ffi=apache-tvm-ffi==0.1.11
# What importing sglang's kernels needs and a machine with torch, transformers and the like does not have.
small=(orjson pybase64 starlette ipython traitlets typing-inspection annotated-types msgspec pyzmq typing-extensions)
mkdir -p "$carry/wheels" "$carry/tvm-ffi-cache" "$build"

python3 -m venv "$build/venv"
pip=("$build/venv/bin/python" -m pip)
"${pip[@]}" install -q torch torchvision triton psutil requests packaging pillow anyio tqdm aiohttp attrs ninja pydantic "${small[@]}"
"${pip[@]}" install -q --no-deps "$sglang" "$tvm_ffi"

# pydantic takes one version of its compiled half only: the pair that was just installed.
core=$("${pip[@]}" freeze | grep -iE '^pydantic(-core|_core)?==')
platforms=()
for glibc in 34 28 27 24 17; do platforms+=(--platform "manylinux_2_${glibc}_x86_64"); done
# shellcheck disable=SC2086
"${pip[@]}" download -q --no-deps --only-binary=:all: --python-version "$target" --implementation cp "${platforms[@]}" \
    --platform manylinux2014_x86_64 -d "$carry/wheels" "$sglang" "$tvm_ffi" "${small[@]}" $core

PATH="$build/venv/bin:$PATH" TVM_FFI_CACHE_DIR="$build/cache" "$build/venv/bin/python" - "$major" "$minor" $modules <<'PYTHON'
import sys

import torch
from sglang.kernels.jit.utils import override_jit_cuda_arch
from sglang.kernels.ops.moe.moe_wna16_marlin import _jit_moe_wna16_marlin_module
from sglang.kernels.ops.quantization.gptq_marlin_repack import _jit_gptq_marlin_repack_module

major, minor, *modules = sys.argv[1:]
with override_jit_cuda_arch(int(major), int(minor)):
    _jit_gptq_marlin_repack_module()
    for module in modules:
        is_ep, has_bias = (flag == "1" for flag in module.split(","))
        _jit_moe_wna16_marlin_module(torch.bfloat16, is_ep, has_bias)
PYTHON

# A cached module is looked up by its folder's and its own name; objects and ninja's files are not read.
for module in "$build"/cache/*/*.so; do
    folder=$carry/tvm-ffi-cache/$(basename "$(dirname "$module")")
    mkdir -p "$folder"
    cp "$module" "$folder/"
done
du -sh "$carry/wheels" "$carry/tvm-ffi-cache"
