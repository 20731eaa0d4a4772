#!/usr/bin/env bash
# Sets up .venv and runs everything that can be checked on this machine: ruff, mypy, the tests (the wheel's among them),
# and the parity matrix on the CPU; with a GPU also the GPU tests, and the matrix on its kernels. Every stage runs, the
# exit code is 1 if one failed.
#
#   scripts/test.sh [arguments of pytest]
#
# PYTHON=python3.12 chooses the interpreter of a new environment, JOBS=4 the number of test processes (2).
set -euo pipefail
# shellcheck source=environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

reports="$root/runs/test"
jobs="${JOBS:-2}"
summary=()
failed=0

# stage NAME COMMAND...: run it, note how long it took and whether it passed.
stage() {
    local name="$1" started=$SECONDS verdict=passed
    shift
    say "$name"
    if ! "$@"; then
        verdict=FAILED
        failed=1
    fi
    summary+=("$(printf '%-12s %-6s %5d s' "$name" "$verdict" $((SECONDS - started)))")
}

set_up() {
    make_venv
    install_torch
    install_package cli,test
    install_torchtitan
}

run_pytest() {
    "$venv_python" -m pytest --junitxml "$reports/$1.xml" "${@:2}"
}

started=$SECONDS
set_up
summary+=("$(printf '%-12s %-6s %5d s' set-up passed $((SECONDS - started)))")
mkdir -p "$reports"
cd "$root"
# The tests run in several processes: one thread each.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

stage ruff "$venv_python" -m ruff check .
stage mypy "$venv_python" -m mypy
stage tests run_pytest tests -n "$jobs" --dist loadfile tests/cpu tests/compile "$@"
if "$venv_python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    stage gpu-tests run_pytest gpu-tests tests/gpu "$@"
    if "$venv_python" -c 'import sys, prime_kernels; sys.exit(not prime_kernels.is_available("mega_moe_bf16"))'; then
        stage gpu-parity "$venv_python" -m prime_kernels parity --device cuda --out "$reports/gpu-parity"
    fi
fi
stage parity "$venv_python" -m prime_kernels parity --device cpu --precision bf16,f64 --out "$reports/parity"

printf '\n'
printf '%s\n' "${summary[@]}"
printf 'reports: %s\n' "$reports"
exit "$failed"
