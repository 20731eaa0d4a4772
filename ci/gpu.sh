#!/usr/bin/env bash
# A GPU runner: the GPU tests, then the parity matrix on the GPU. Fails where there is no GPU.
#
#   ci/gpu.sh [arguments of `python -m prime_kernels parity`]
#
# PYTHON=... is an interpreter that has this package's dependencies and pytest (default: .venv's, else python3).
# Reports go to runs/gpu: tests.xml, parity.json, parity.md, parity.xml.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

default=python3
[[ -x .venv/bin/python ]] && default=.venv/bin/python
python="${PYTHON:-$default}"
"$python" -c 'import sys, torch; sys.exit(0 if torch.cuda.is_available() else "ci/gpu.sh: torch finds no GPU")'

mkdir -p runs/gpu
failed=0
REQUIRE_GPU=1 "$python" -m pytest -m gpu --junitxml runs/gpu/tests.xml tests/gpu || failed=1
"$python" ci/parity.py --device cuda --out runs/gpu "$@" || failed=1
exit "$failed"
