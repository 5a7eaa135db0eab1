#!/usr/bin/env bash
# Loading measured on a GPU machine: two full-size MoE layers, rank 0 of tp 8 and of tp 8 ep 8, ours and what engines do, with the
# machine's limits in every round. Takes about six minutes and 30 GB.
#
#     tests/gpu/run_load.sh PLACE [ROUNDS]     PLACE: a folder on the disk to measure; results go to $OUT_DIR or PLACE
#
# On a machine without a network: tests/gpu/run_on_bare_machine.sh tests/gpu/run_load.sh PLACE
set -euo pipefail

[ $# -gt 0 ] || { sed -n '2,8s/^# \{0,1\}//p' "$0" >&2; exit 2; }
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
place=$1/marlin-convert-load rounds=${2:-9}
results=${OUT_DIR:-$1}
python=${PYTHON:-python3}
trap 'rm -rf "$place"' EXIT
mkdir -p "$place" "$results"

"$python" "$root/examples/make_checkpoint.py" layers "$place/source" --layers 2 --experts 384 >&2
"$python" -m marlin_convert convert "$place/source" "$place/tp8" --tp 8 --ranks 0 >&2
"$python" -m marlin_convert convert "$place/source" "$place/ep8" --tp 8 --ep 8 --ranks 0 >&2
for out in tp8 ep8; do
    echo "== $out"
    "$python" -m marlin_convert bench load "$place/$out" --source "$place/source" --rounds "$rounds" --json > "$results/load-$out.json"
    "$python" - "$results/load-$out.json" <<'P'
import json, sys

found = json.load(open(sys.argv[1]))
print({name: round(rate, 2) for name, rate in found["limits"].items()})
for row in found["rows"]:
    limit = "" if row["of_limit"] is None else f"{row['of_limit']:.2f} of {row['limit']}"
    print(f"{row['name']}, {row['temperature']}: {row['seconds']:.3f} s, {row['gb_per_s']:.1f} GB/s {limit}")
P
done
