#!/usr/bin/env bash
# Real SGLang on a bare GPU machine: the default loader on a source against ours on the shards. About four minutes on an H200.
# Usage: tests/gpu/sglang/run.sh [PLACE]     .gpu/sglang/site.tar.xz is what prepare.sh left; results go to $OUT or PLACE/results
# JOBS chooses among model engine graphs http tp2 measure (tp2 only where there are two GPUs).
set -uo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../../.." && pwd)
place=${1:-/tmp}/marlin-convert-sglang
out=${OUT:-$place/results}
jobs=${JOBS:-model engine graphs http tp2 measure}
python=${PYTHON:-python3}
begin=$(date +%s)
say() { echo "##### $(($(date +%s) - begin)) s: $*"; }
wanted() { case " $jobs " in *" $1 "*) ;; *) return 1 ;; esac }

results=$place/json
rm -rf "$results"
mkdir -p "$results" "$out" "$place/plugin/marlin_convert-0.dist-info"
if [ ! -e "$place/.complete" ]; then
    "$python" -c "import sys, tarfile; tarfile.open(sys.argv[1]).extractall(sys.argv[2], filter='fully_trusted')" \
        "${GPU_CARRY:-$root/.gpu}/sglang/site.tar.xz" "$place" && touch "$place/.complete"
fi
# The project as it would be installed: its entry points are what SGLang finds it by. And sums that can be repeated.
printf 'Metadata-Version: 2.1\nName: marlin-convert\nVersion: 0\n' > "$place/plugin/marlin_convert-0.dist-info/METADATA"
printf '[sglang.srt.plugins]\nmarlin-convert = marlin_convert.engines.sglang:register\nsteady = steady:register\n' \
    > "$place/plugin/marlin_convert-0.dist-info/entry_points.txt"
for home in "${CUDA_HOME:-}" /usr/local/cuda-13* /usr/local/cuda; do
    if [ -x "$home/bin/nvcc" ]; then
        export CUDA_HOME=$home
        break
    fi
done
export PYTHONPATH=$here:$place/site:$root/convert:$place/plugin${PYTHONPATH:+:$PYTHONPATH}
export TVM_FFI_CACHE_DIR=$place/tvmc SGLANG_IS_FLASHINFER_AVAILABLE=false HF_HUB_OFFLINE=1
export PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 PYTHONWARNINGS=ignore NUMBA_CACHE_DIR=$place/numba
compiled=$(ls "$place/tvmc" | sort)
say "unpacked"

convert() { "$python" -m marlin_convert convert "$@" > /dev/null || say "convert $* failed"; }
sources() {
    "$python" "$here/make_sources.py" "$1" "$place/src-$1" || return
    convert "$place/src-$1" "$place/out-1-1-$1" --tp 1
    convert "$place/src-$1" "$place/out-2-1-$1" --tp 2
    convert "$place/src-$1" "$place/out-2-2-$1" --tp 2 --ep 2
    convert "$place/src-$1" "$place/out-8-8-$1" --tp 8 --ep 8
    convert "$place/src-$1" "$place/out-4-2-$1-dp2" --tp 4 --ep 2 --attn-tp 2
}
layers() { # two layers of full size, 19.6 GB, and rank 0 of eight, 2.5 GB
    timeout "${LIMIT:-150}" "$python" "$here/make_sources.py" layers "$place/src-layers" || return
    convert "$place/src-layers" "$place/out-8-1-layers" --tp 8 --ranks 0
}
for form in flat k26; do
    [ -e "$place/out-4-2-$form-dp2/manifest.json" ] || sources $form &
done
wait
say "small checkpoints made and converted"
if wanted measure && [ ! -e "$place/out-8-1-layers/manifest.json" ]; then
    layers > "$results/layers.log" 2>&1 &
fi

port=31000
served() { # NAME KIND FORM OUT MORE-ARGUMENTS: the default and ours, both at once
    local name=$1 kind=$2 source=$place/src-$3 shards=$4 more=$5
    port=$((port + 700))
    timeout "${LIMIT:-150}" "$python" "$here/generate.py" "$kind" "$source" "$results/$name-default.json" $port "{$more}" \
        > "$results/$name-default.log" 2>&1 &
    port=$((port + 700))
    timeout "${LIMIT:-150}" "$python" "$here/generate.py" "$kind" "$shards" "$results/$name-ours.json" $port \
        "{$more, \"load_format\": \"marlin-convert\"}" > "$results/$name-ours.log" 2>&1 &
}
eager='"disable_cuda_graph": true, "disable_overlap_schedule": true'
graphs='"cuda_graph_backend_prefill": "disabled"'
for form in flat k26; do
    one=$place/out-1-1-$form kind=http more=
    # the tower's processor is code of the published checkpoint, and no flag turns it off
    if [ $form = k26 ]; then kind=server more=', "enable_multimodal": false'; fi
    if wanted model; then
        timeout "${LIMIT:-150}" "$python" "$here/compare_models.py" "$place/src-$form" "$one" "$results/model-$form.json" \
            "$place/out-2-1-$form" "$place/out-2-2-$form" "$place/out-8-8-$form" \
            "$place/out-4-2-$form-dp2" > "$results/model-$form.log" 2>&1 &
    fi
    if wanted engine; then served engine-$form engine $form "$one" "$eager$more"; fi
    if wanted http; then served http-$form $kind $form "$one" "$graphs$more"; fi
done
if wanted graphs; then served graphs-flat engine flat "$place/out-1-1-flat" "$graphs"; fi
wait
say "compared and served"
if wanted tp2 && [ "$("$python" -c 'import torch; print(torch.cuda.device_count())')" -ge 2 ]; then
    served tp2-flat engine flat "$place/out-2-1-flat" "$graphs, \"tp_size\": 2"
    wait
    served tp2ep2-flat engine flat "$place/out-2-2-flat" "$graphs, \"tp_size\": 2, \"ep_size\": 2"
    wait
    say "two GPUs"
fi
if wanted measure; then
    timeout "${LIMIT:-110}" "$python" "$here/measure.py" "$place/src-k26" "$place/src-layers" "$place/out-8-1-layers" \
        "$results/measure.json" > "$results/measure.log" 2>&1
    say "measured"
fi

for log in "$results"/*.log; do
    echo "=== $(basename "$log")"
    grep -vE "Ignore import|UserWarning|warnings.warn|^$|Multi-thread|server_args=" "$log" | cut -c1-220 | tail -"${LINES_OF_LOG:-5}"
done
echo "=== compiled here: $(comm -13 <(echo "$compiled") <(ls "$place/tvmc" | sort) | tr '\n' ' ')"
tar czf "$out/sglang-logs.tgz" -C "$place" json
"$python" "$here/report.py" "$results" | tee "$out/sglang-report.txt"
status=${PIPESTATUS[0]}
say "end"
exit "$status"
