#!/usr/bin/env bash
# Everything that only a GPU can show, in one call of under eight minutes:
#
#     bench/gpu/run.sh OUT [WHEELS]
#
# OUT gets a log of each part, golden.npz, figures/ with figures.json and table.txt, and at last
# results.tar.gz with all of these. WHEELS is a folder of wheels that the machine lacks; nothing is
# installed, and nothing is fetched. A part that fails or runs into its limit leaves its log, and the
# next one starts; what the checks leave of the time goes to the figures. With REHEARSE=1 in the
# environment everything runs without a GPU: tiny, on the emulator, and for the figures that
# FIGURES names alone. Exit status: 2 without a usable GPU or package, else the number of parts that
# failed.
set -uo pipefail
usage() { sed -n '2,14s/^# \{0,1\}//p' "$0"; exit 64; }
root=$(cd "$(dirname "$0")/../.." && pwd)
[ $# -ge 1 ] || usage
mkdir -p "$1" && out=$(cd "$1" && pwd) || usage
wheels=
if [ $# -ge 2 ]; then wheels=$(cd "$2" && pwd) || usage; fi
python=${PYTHON:-python3}
rehearse=${REHEARSE:+--rehearse}
cd "$root" || usage

rm -rf "$out/site" "$out/figures"
"$python" bench/gpu/checkout.py "$out/site" ${wheels:+--wheels "$wheels"} || exit 64
PYTHONPATH="$out/site:$(printf '%s:' packages/*/src)$root/bench/gpu"
export PYTHONPATH PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 VLLMX_CACHE_DIR="$out/cache"
"$python" bench/gpu/check.py $rehearse 2>&1 | tee "$out/environment.log"
[ "${PIPESTATUS[0]}" = 0 ] || exit 2

failed=0 total=${SECONDS_IN_ALL:-465}
[ -z "$rehearse" ] || total=$((10 * total))
part() { # part NAME SECONDS COMMAND...
  local name=$1 limit=$2 begin=$SECONDS status
  shift 2
  [ -z "$rehearse" ] || limit=$((10 * limit))  # of the emulator, which compiles with g++
  if [ $((total - SECONDS)) -lt 10 ]; then
    echo "$name: not started, no time left" | tee -a "$out/summary.txt"
    failed=$((failed + 1))
    return
  fi
  timeout -s INT -k 5 "$limit" "$@" >"$out/$name.log" 2>&1
  status=$?
  if [ "$status" = 0 ]; then
    echo "$name: passed in $((SECONDS - begin)) s" | tee -a "$out/summary.txt"
    return
  fi
  failed=$((failed + 1))
  echo "$name: FAILED, status $status, after $((SECONDS - begin)) s: see $name.log" |
    tee -a "$out/summary.txt"
  tail -n 5 "$out/$name.log"
}
pack() {
  cd "$out" && tar czf results.tar.gz --exclude=start-cache -- *.log *.txt *.npz figures 2>/dev/null
}
trap pack EXIT
: >"$out/summary.txt"

# not the configuration of the repository, which wants plugins that may be missing there
pytest=("$python" -m pytest -c /dev/null --rootdir "$root" -p no:cacheprovider -p live
        --import-mode=importlib -q --tb=short)
side_by_side=()
has() { "$python" -c "import $1" 2>/dev/null; }
has xdist && side_by_side=(-n 4)  # kernels are compiled side by side, a lost GPU costs one process
has pytest_timeout && pytest+=(--timeout 40 --timeout-method thread)
PATH="$PATH:${CUDA_HOME:-/usr/local/cuda}/bin"
golden=("$python" bench/gpu/golden.py $rehearse)
sanitize=(compute-sanitizer --error-exitcode 9)

part golden 30 "${golden[@]}" "$out/golden.npz"
part suite "${SUITE_SECONDS:-100}" "${pytest[@]}" "${side_by_side[@]}" ${REHEARSE:+-k against_the_reference} \
  bench/gpu/device_suite.py
part transformers 60 "${pytest[@]}" ${REHEARSE:+-k Qwen3} bench/gpu/device_transformers.py
part memcheck 40 "${sanitize[@]}" --tool memcheck "${golden[@]}" --dtypes bf16 "$out/memcheck.npz"
part racecheck 40 "${sanitize[@]}" --tool racecheck "${golden[@]}" --dtypes bf16 "$out/racecheck.npz"
left=$((total - SECONDS - 45))
part figures "$left" "$python" bench/gpu/figures.py "$out/figures" --seconds $((left - 5)) \
  ${FIGURES:+--only "$FIGURES"} $rehearse
# last, for what it runs has never run on a GPU: nothing is behind it that it could take along
part wgmma 45 "$python" bench/gpu/wgmma.py ${REHEARSE:+--emulated}
[ -f "$out/figures/table.txt" ] && cat "$out/figures/table.txt"
cat "$out/wgmma.log" "$out/summary.txt"
exit "$failed"
