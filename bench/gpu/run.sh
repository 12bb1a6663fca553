#!/usr/bin/env bash
# Everything that only a GPU can show, in one call of under eight minutes:
#
#     bench/gpu/run.sh OUT [WHEELS]
#
# OUT gets a log of each part, golden.npz, and figures/ with figures.json and table.txt. WHEELS is a
# folder of wheels that the machine lacks; nothing is installed, and nothing is fetched. A part that
# fails or runs into its limit leaves its log, and the next one starts; what the checks leave of the
# time goes to the figures. Exit status: 2 without a usable GPU, else the number of parts that
# failed.
set -uo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
[ $# -ge 1 ] || { sed -n '2,10s/^# \{0,1\}//p' "$0"; exit 64; }
mkdir -p "$1" && out=$(cd "$1" && pwd) || exit 64
python=${PYTHON:-python3}
cd "$root" || exit 64

"$python" bench/gpu/checkout.py "$out/site" ${2:+--wheels "$2"} || exit 64
PYTHONPATH="$out/site:$(printf '%s:' packages/*/src)$root"
export PYTHONPATH PYTHONDONTWRITEBYTECODE=1 VLLMX_CACHE_DIR="$out/cache"
"$python" bench/gpu/check.py | tee "$out/environment.log"
[ "${PIPESTATUS[0]}" = 0 ] || exit 2

failed=0 total=465
part() { # part NAME SECONDS COMMAND...
  local name=$1 limit=$2 begin=$SECONDS
  shift 2
  if timeout -k 5 "$limit" "$@" >"$out/$name.log" 2>&1; then
    echo "$name: passed in $((SECONDS - begin)) s"
  else
    echo "$name: FAILED, status $?, after $((SECONDS - begin)) s: see $out/$name.log"
    failed=$((failed + 1))
    tail -n 5 "$out/$name.log"
  fi
}
# not the configuration of the repository, which wants plugins that may be missing there
pytest=("$python" -m pytest -c /dev/null --rootdir "$root" -p no:cacheprovider --import-mode=importlib -q)
sanitize=(compute-sanitizer --error-exitcode 9 --launch-count 2000)

part suite 100 "${pytest[@]}" bench/gpu/device_suite.py
part transformers 30 "${pytest[@]}" bench/gpu/device_transformers.py
part golden 20 "$python" bench/gpu/golden.py "$out/golden.npz"
part memcheck 40 "${sanitize[@]}" --tool memcheck "$python" bench/gpu/golden.py "$out/memcheck.npz"
part racecheck 40 "${sanitize[@]}" --tool racecheck "$python" bench/gpu/golden.py "$out/racecheck.npz"
left=$((total - SECONDS - 30))
part figures "$left" "$python" bench/gpu/figures.py "$out/figures" --seconds $((left - 5))
[ -f "$out/figures/table.txt" ] && cat "$out/figures/table.txt"
# last, for what it runs has never run on a GPU: nothing is behind it that it could take along
part wgmma 30 "$python" bench/gpu/wgmma.py
cat "$out/wgmma.log"
exit "$failed"
