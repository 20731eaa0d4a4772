#!/usr/bin/env bash
# From a fresh machine to a trained model: makes .venv, installs everything there, prints what the machine can do, and
# trains a small mixture-of-experts language model (about three minutes on two CPU cores).
#
#   scripts/quickstart.sh [arguments of `python -m prime_kernels train`]
#
# Needs python3 with venv and pip, and a package index that pip reaches. PYTHON=python3.12 chooses the interpreter.
set -euo pipefail
# shellcheck source=environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

make_venv
install_torch
install_package cli

say "doctor"
"$venv_python" -m prime_kernels doctor ||
    say "doctor: something is missing (see above); training says which backend it runs"

say "training"
"$venv_python" -m prime_kernels train --out "$root/runs/quickstart" "$@"
