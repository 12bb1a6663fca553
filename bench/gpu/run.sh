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

failed=0 rehearse_factor=${REHEARSE:+10}  # the emulator compiles with g++
rehearse_factor=${rehearse_factor:-1}
total=$((rehearse_factor * ${SECONDS_IN_ALL:-465}))
attempt() { # attempt NAME SECONDS COMMAND...
  local name=$1 limit=$2 begin=$SECONDS status
  shift 2
  limit=$((rehearse_factor * limit))
  if [ $((total - SECONDS)) -lt 10 ]; then
    echo "$name: not started, no time left" | tee -a "$out/summary.txt"
    return 1
  fi
  timeout -s INT -k 5 "$limit" "$@" >"$out/$name.log" 2>&1
  status=$?
  if [ "$status" = 0 ]; then
    echo "$name: passed in $((SECONDS - begin)) s: $(tail -n 1 "$out/$name.log")" |
      tee -a "$out/summary.txt"
    return
  fi
  echo "$name: FAILED, status $status, after $((SECONDS - begin)) s: see $name.log" |
    tee -a "$out/summary.txt"
  tail -n 5 "$out/$name.log"
  return 1
}
part() { attempt "$@" || failed=$((failed + 1)); }
pack() {
  cd "$out" && tar czf results.tar.gz --exclude=start-cache --exclude=start-model -- *.log *.txt *.npz figures 2>/dev/null
}
trap pack EXIT
: >"$out/summary.txt"

# not the configuration of the repository, which wants plugins that may be missing there
pytest=("$python" -m pytest -c /dev/null --rootdir "$root" -p no:cacheprovider -p live
        --import-mode=importlib -q --tb=short)
workers=()
has() { "$python" -c "import $1" 2>/dev/null; }
has xdist && workers=(-n 4)  # kernels are compiled side by side, a lost GPU costs one process
has pytest_timeout && pytest+=(--timeout 40 --timeout-method thread)
PATH="$PATH:${CUDA_HOME:-/usr/local/cuda}/bin"
suite=(bench/gpu/device_suite.py bench/gpu/device_quantised.py)

sanitizer=compute-sanitizer
for given in "$out"/site/nvidia/*/compute-sanitizer/compute-sanitizer; do  # of WHEELS
  [ -f "$given" ] && chmod +x "${given%/*}"/* 2>/dev/null && sanitizer=$given
done
export SANITIZED_SECONDS=$((rehearse_factor * 60))
watched() { # watched NAME SECONDS TOOL COMMAND...: under a tool of compute-sanitizer
  local name=$1 limit=$2 tool=$3 only=("$ours")
  shift 3
  [ "$tool" != memcheck ] || only+=(--padding=256)
  [ "$tool" != initcheck ] || only=()  # cuBLASLt's kernels write what ours read
  # what CUDA refuses fails a test by itself; a kernel that is caught must not take the others along
  SANITIZED=1 attempt "$name" "$limit" "$sanitizer" --tool="$tool" --error-exitcode=9 \
    --target-processes=all --port="$port" --report-api-errors=no \
    --destroy-on-device-error=kernel --log-file="$out/$name.reports.log" "${only[@]}" "$@"
}
side_by_side() { # side_by_side PID...: counts those that fail
  local pid
  for pid; do wait "$pid" || failed=$((failed + 1)); done
}

part golden 30 "$python" bench/gpu/golden.py $rehearse "$out/golden.npz"
part suite "${SUITE_SECONDS:-100}" "${pytest[@]}" "${workers[@]}" ${REHEARSE:+-k against_the_reference} \
  "${suite[@]}"
part transformers 60 "${pytest[@]}" ${REHEARSE:+-k Qwen3} bench/gpu/device_transformers.py
# behind the suite, which has compiled their kernels; side by side, for the host is what is busy
entries=$("$python" -c 'from vllmx_cuda.kernel_specs import KERNELS; print("|".join(KERNELS))')
ours=--kernel-name="regex=^($entries)\$" port=49152 pids=()
for tool in memcheck racecheck synccheck initcheck; do
  port=$((port + 100))
  watched "$tool" 75 "$tool" "${pytest[@]}" -p sanitized \
    ${REHEARSE:+-k "test_add or eager_and_recorded"} "${suite[@]}" & pids+=($!)
done
side_by_side "${pids[@]}"
left=$((total - SECONDS - 60))
part figures "$left" "$python" bench/gpu/figures.py "$out/figures" --seconds $((left - 5)) \
  ${FIGURES:+--only "$FIGURES"} $rehearse
# last, for what it runs has never run on a GPU: nothing is behind it that it could take along
part wgmma 30 "$python" bench/gpu/wgmma.py ${REHEARSE:+--emulated}
pids=()
for tool in memcheck racecheck synccheck; do
  port=$((port + 100))
  watched "wgmma-$tool" 30 "$tool" "$python" bench/gpu/wgmma.py --untimed ${REHEARSE:+--emulated} & pids+=($!)
done
side_by_side "${pids[@]}"
grep -s SUMMARY "$out"/*.reports.log | sed 's|.*/||' | tee -a "$out/summary.txt"
[ -f "$out/figures/table.txt" ] && cat "$out/figures/table.txt"
cat "$out/wgmma.log" "$out/summary.txt"
exit "$failed"
