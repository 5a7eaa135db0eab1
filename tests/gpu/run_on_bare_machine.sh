#!/usr/bin/env bash
# Run a command on a GPU machine that has torch but no network, with the kernel's packages and its compiled modules as
# prepare.sh left them in .gpu/. Usage: tests/gpu/run_on_bare_machine.sh python3 -m pytest -m gpu tests/gpu
# PYTHON, GPU_CARRY and GPU_SITE say which interpreter, where .gpu/ is and where to unpack.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
carry=${GPU_CARRY:-$root/.gpu}
site=${GPU_SITE:-/tmp/marlin-convert-site}
python=${PYTHON:-python3}

[ $# -gt 0 ] || { echo "usage: $0 COMMAND [ARGUMENT...]" >&2; exit 2; }
[ -d "$carry/wheels" ] || { echo "$carry/wheels is missing: run tests/gpu/prepare.sh where there is a network" >&2; exit 2; }

if [ ! -e "$site/.complete" ]; then
    # --no-deps: sglang names a hundred packages that importing the kernel does not need.
    "$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$site" "$carry"/wheels/*.whl
    touch "$site/.complete"
fi

export PYTHONPATH="$root/convert:$site${PYTHONPATH:+:$PYTHONPATH}"
export TVM_FFI_CACHE_DIR="$carry/tvm-ffi-cache"
# For a module that is not in the cache: it is compiled. An nvcc on the PATH may be a link or a wrapper, beside which there
# are no libraries, so CUDA_HOME is said.
for home in "${CUDA_HOME:-}" /usr/local/cuda-13* /usr/local/cuda; do
    if [ -x "$home/bin/nvcc" ]; then
        export CUDA_HOME=$home PATH="$home/bin:$PATH"
        break
    fi
done
exec "$@"
