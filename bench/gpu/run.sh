#!/usr/bin/env bash
# What only a GPU can show, in one call of under ten minutes:
#
#     bench/gpu/run.sh [--second] OUT [WHEELS]
#
# The first call has what matters most: ceilings, golden outputs, ids beside transformers, decode and
# prefill at real shapes, the wgmma kernel, the conformance suite (parts.py has the order and the
# limits). With --second: compute-sanitizer, transformers and torch, starts, more forms of weights.
# OUT gets a log of each part, figures.json, table.txt, golden.npz and at last results.tar.gz with
# all of these. WHEELS is a folder of wheels that the machine lacks; nothing is installed, and
# nothing is fetched. SECONDS_IN_ALL (540) is the time for everything, FIGURES=WORD leaves out
# figures whose names do not hold the word. With REHEARSE=1 everything runs without a GPU, tiny, on
# the emulator. Exit status: 2 without a usable GPU or package, else the number of parts that failed.
set -uo pipefail
usage() { sed -n '2,15s/^# \{0,1\}//p' "$0"; exit 64; }
root=$(cd "$(dirname "$0")/../.." && pwd)
second=
if [ "${1:-}" = --second ]; then second=--second && shift; fi
[ $# -ge 1 ] || usage
mkdir -p "$1" && out=$(cd "$1" && pwd) || usage
wheels=
if [ $# -ge 2 ]; then wheels=$(cd "$2" && pwd) || usage; fi
python=${PYTHON:-python3}
rehearse=${REHEARSE:+--rehearse}
cd "$root" || usage

rm -rf "$out/site" && rm -f "$out"/*.log "$out"/*.json "$out"/*.txt
"$python" bench/gpu/checkout.py "$out/site" ${wheels:+--wheels "$wheels"} || exit 64
PYTHONPATH="$out/site:$(printf '%s:' packages/*/src)$root/bench/gpu"
export PYTHONPATH PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 VLLMX_CACHE_DIR="$out/cache"
PATH="$PATH:${CUDA_HOME:-/usr/local/cuda}/bin"
for given in "$out"/site/nvidia/*/compute-sanitizer; do  # of WHEELS
  [ -f "$given/compute-sanitizer" ] && chmod +x "$given"/* 2>/dev/null && PATH="$given:$PATH"
done
export PATH
"$python" bench/gpu/check.py $rehearse 2>&1 | tee "$out/environment.log"
[ "${PIPESTATUS[0]}" = 0 ] || exit 2

pack() {
  cd "$out" && tar czf results.tar.gz $(ls | grep -E '\.(log|txt|npz|json)$') 2>/dev/null
}
trap pack EXIT
"$python" bench/gpu/call.py "$out" $second $rehearse --only "${FIGURES:-}" \
  --seconds $((${SECONDS_IN_ALL:-540} - SECONDS))
