#!/usr/bin/env bash
# Builds the native examples and runs them on a GPU: every way of loading a rank, every byte checked and then timed, and
# the routed experts of a layer against the original checkpoint.
#
#     tests/gpu/run_native.sh prepare                     where there is a network and the Debian packages: fills .gpu/include
#     tests/gpu/run_native.sh OUT [SRC [RANK [LAYER]]]    on the GPU machine; without SRC only loading is tried
#
# Needs nvcc 13, cmake, g++ and a Python with torch and safetensors, and in .gpu/ what `prepare` and prepare.sh left there.
# Results are JSON, one document a line, on stdout and in $OUT_DIR if that is set; the rest is on stderr.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
carry=${GPU_CARRY:-$root/.gpu}
build=${NATIVE_BUILD:-/tmp/marlin-native}
python=${PYTHON:-python3}

if [ "${1:-}" = prepare ]; then
    mkdir -p "$carry/include"
    cp -r /usr/include/nlohmann /usr/include/xxhash.h "$carry/include/"
    exit
fi
[ $# -gt 0 ] || { sed -n '2,9s/^# \{0,1\}//p' "$0" >&2; exit 2; }
out=$1 src=${2:-} rank=${3:-0} layer=${4:-}

say() { echo "$*" >&2; }
result() { tee -a "${OUT_DIR:-/tmp}/native-results.jsonl"; }
measure() { say "== $*"; "$loader/load_rank" "$out" "$rank" --json "$@" | result || say "   failed; going on"; }

for home in "${CUDA_HOME:-}" /usr/local/cuda-13* /usr/local/cuda; do
    if [ -x "$home/bin/nvcc" ]; then
        export CUDA_HOME=$home
        break
    fi
done

# Build -----------------------------------------------------------------------------------------------------------------
if [ ! -d "$build/wheel/tvm_ffi" ]; then
    "$python" -m zipfile -e "$carry"/wheels/apache_tvm_ffi-*.whl "$build/wheel"
fi
cmake -S "$root/examples/native_moe" -B "$build/build" -DCMAKE_BUILD_TYPE=Release -DMARLIN_INCLUDE_DIR="$carry/include" \
    -DTVM_FFI_DIR="$build/wheel/tvm_ffi" -DCMAKE_CUDA_COMPILER="$CUDA_HOME/bin/nvcc" -DCUDAToolkit_ROOT="$CUDA_HOME" >&2
cmake --build "$build/build" --parallel "$(nproc)" >&2
loader=$build/build/native_loader

# Load ------------------------------------------------------------------------------------------------------------------
"$loader/shard_info" "$out" "$rank" --verify >&2
for path in mmap ring direct; do
    say "== $path: every byte copied back and checked"
    "$loader/load_rank" "$out" "$rank" --path "$path" --check --json | result
done
# Warm, by threads and chunk sizes: the last run of each is the one to read.
for threads in 1 2 4 8; do measure --path mmap --threads "$threads" --repeat 5; done
for chunk in 32 64; do measure --path mmap --threads 4 --chunk "$chunk" --repeat 5; done
measure --path mmap --threads 4 --populate --repeat 5
for threads in 8 16; do measure --path ring --threads "$threads" --repeat 5; done
for chunk in 8 32; do measure --path ring --threads 16 --chunk "$chunk" --repeat 5; done
# Cold: evicted before each run; resident_before in the results shows whether it was.
for threads in 1 2 4 16; do measure --path direct --threads "$threads" --evict --repeat 3; done
for path in mmap ring; do measure --path "$path" --threads 4 --evict --repeat 3; done

# Compute ---------------------------------------------------------------------------------------------------------------
[ -n "$src" ] || { say "no SRC given: the routed experts are not run"; exit 0; }
read -r tp ep first < <("$python" - "$out" <<'EOF'
import json, sys
manifest = json.load(open(sys.argv[1] + "/manifest.json"))
moe = [shard["unit"] for shard in manifest["shards"] if any("experts" in tensor for tensor in shard["tensors"])]
print(manifest["parallel"]["tp"], manifest["parallel"]["ep"], int(min(moe).removeprefix("layer-")))
EOF
)
layer=${layer:-$first}
kernel=$(ls "$carry"/tvm-ffi-cache/*moe_wna16_marlin_bf16_t_false_false_*/*.so)
say "== routed experts of rank $rank, layer $layer"
"$python" "$root/tests/gpu/make_native_moe_io.py" "$src" "$build/io.safetensors" --tp "$tp" --ep "$ep" --rank "$rank" --layer "$layer"
"$build/build/native_moe" "$out" "$rank" "$layer" --kernel "$kernel" --input "$build/io.safetensors" | result
