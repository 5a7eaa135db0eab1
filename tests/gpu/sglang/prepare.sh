#!/usr/bin/env bash
# Where there is a network (no GPU needed): .gpu/sglang/site.tar.xz, all that serving a small model with SGLang needs and a bare
# machine with torch 2.11 and transformers lacks: packages (site/) and modules compiled for sm_90 (tvmc/). About 45 MB.
# Usage: tests/gpu/sglang/prepare.sh     needs nvcc 13 with CUDA_HOME set, g++ with C++20, and tests/gpu/prepare.sh run before
# KERNEL: a folder with sgl_kernel/ of sglang-kernel 0.4.5, instead of its wheel (383 MB).
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../../.." && pwd)
carry=${GPU_CARRY:-$root/.gpu}
work=${GPU_BUILD:-$carry/build}/sglang
python=${PYTHON:-$carry/build/venv/bin/python}
: "${CUDA_HOME:?say where the CUDA toolkit is: a nvcc on the PATH alone is not enough to link}"
mkdir -p "$work/wheels" "$carry/sglang"

# Versions that go together: SGLang 0.5.17 with a transformers that does not know its models yet.
# What of its dependencies the machine lacks; tests/gpu/sglang/stubs has stand-ins for those that nothing here calls.
packages=(sglang==0.5.17 apache-tvm-ffi==0.1.11 transformers==5.12.1 tokenizers==0.22.2 compressed-tensors==0.20.1
    pydantic==2.14.4 pydantic-core==2.50.5 openai==2.6.1 gguf==0.19.0 annotated-types typing-inspection typing-extensions
    fastapi starlette uvicorn orjson msgspec pybase64 pyzmq setproctitle partial-json-parser python-multipart distro sniffio
    dill ipython traitlets loguru opentelemetry-api jsonschema jsonschema-specifications referencing rpds-py)
for_target=(--only-binary=:all: --python-version 3.12 --implementation cp --platform manylinux2014_x86_64)
for glibc in 34 28 27 26 24 17 5; do for_target+=(--platform "manylinux_2_${glibc}_x86_64"); done
"$python" -m pip download -q --no-deps "${for_target[@]}" --platform manylinux1_x86_64 --find-links "$carry/wheels" \
    -d "$work/wheels" "${packages[@]}"
if [ -z "${KERNEL:-}" ]; then
    "$python" -m pip download -q --no-deps "${for_target[@]}" -d "$work" sglang-kernel==0.4.5
    KERNEL=$work/kernel
    # of the kernels Hopper's alone: the others are 1.1 GB and are not imported
    unzip -q -o "$work"/sglang_kernel-*.whl 'sgl_kernel/*.py' 'sgl_kernel/sm90/*' 'sglang_kernel*' -d "$KERNEL"
fi

rm -rf "$work/pack"
mkdir -p "$work/pack/site" "$work/pack/tvmc"
for wheel in "$work"/wheels/*.whl; do unzip -q -o "$wheel" -d "$work/pack/site"; done
cp -r "$KERNEL"/sgl_kernel "$KERNEL"/sglang_kernel*.dist-info "$here"/stubs/* "$work/pack/site/"

PATH="$(dirname "$python"):$PATH" TVM_FFI_CACHE_DIR=${TVM_FFI_CACHE_DIR:-$work/cache} PYTHONPATH="$here/stubs" \
    "$python" "$here/prebuild.py"
# a module is found by its folder's and its own name; objects and ninja's files are not read
for module in "${TVM_FFI_CACHE_DIR:-$work/cache}"/*/*.so; do
    install -D "$module" "$work/pack/tvmc/$(basename "$(dirname "$module")")/$(basename "$module")"
done
tar -C "$work/pack" -cf - site tvmc | xz -6 -T0 > "$carry/sglang/site.tar.xz"
ls -l "$carry/sglang/site.tar.xz"
