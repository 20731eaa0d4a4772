#!/usr/bin/env bash
# compute-sanitizer's four tools over both directions of the SM90 kernels, on a machine with a GPU.
#
#   ci/sanitize.sh [memcheck] [racecheck] [synccheck] [initcheck]        default: all four
#
# Exit code 1 when a tool reports anything, ends without its summary, or takes longer than SECONDS_PER_TOOL
# (default 300), or when a result is wrong. PYTHON=... is an interpreter with this package's dependencies,
# SANITIZER=... the program (default: compute-sanitizer). Logs go to runs/gpu/sanitize-<tool>.log.
#
# The tools run one kernel at a time, so kernels of two ranks cannot wait for each other:
# tests/gpu/sanitizer_case.py says how it runs two ranks all the same. initcheck gets blocks without rows of
# padding, because the forward's products read those rows, which nobody writes and no output depends on.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

default=python3
[[ -x .venv/bin/python ]] && default=.venv/bin/python
python="${PYTHON:-$default}"
sanitizer="${SANITIZER:-compute-sanitizer}"
limit="${SECONDS_PER_TOOL:-300}"
if ! command -v "$sanitizer" > /dev/null; then
    echo "ci/sanitize.sh: $sanitizer not found; it comes with the CUDA toolkit" >&2
    exit 1
fi

tools=("$@")
[[ $# -gt 0 ]] || tools=(memcheck racecheck synccheck initcheck)
mkdir -p runs/gpu
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"

# Compiled before: a tool would slow that down, too.
"$python" tests/gpu/sanitizer_case.py > /dev/null

failed=0
for tool in "${tools[@]}"; do
    options=(--tool "$tool" --error-exitcode 1 --kernel-name kns=route_plan --kernel-name kns=sm90_bf16)
    rows=odd
    clean='ERROR SUMMARY: 0 errors'
    case "$tool" in
        # Errors of API calls are answers to questions that torch asks of the driver.
        memcheck) options+=(--report-api-errors no) ;;
        racecheck) clean='RACECHECK SUMMARY: 0 hazards' ;;
        synccheck) ;;
        initcheck) rows=full ;;
        *) echo "ci/sanitize.sh: no tool $tool" >&2; exit 1 ;;
    esac
    log="runs/gpu/sanitize-$tool.log"
    status=0
    start=$SECONDS
    timeout --kill-after 10 "$limit" "$sanitizer" "${options[@]}" "$python" tests/gpu/sanitizer_case.py --rows "$rows" \
        > "$log" 2>&1 || status=$?
    result=clean
    grep -q "$clean" "$log" || result='no clean summary'
    [[ $status -eq 0 ]] || result="exit code $status"
    [[ $status -ne 124 && $status -ne 137 ]] || result="longer than $limit s"
    echo "$tool: $result, $((SECONDS - start)) s"
    if [[ $result != clean ]]; then
        failed=1
        tail -n 40 "$log"
    fi
done
exit "$failed"
