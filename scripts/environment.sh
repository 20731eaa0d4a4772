# shellcheck shell=bash
# Sourced by quickstart.sh and test.sh: the virtual environment in .venv and what is installed there.
#
# PYTHON=python3.12 chooses the interpreter a new environment is made with. Nothing outside the repository's
# folder is changed, and everything that is already there is kept.

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv="$root/.venv"
venv_python="$venv/bin/python"

torch_version=2.13.0        # what a new environment gets
torch_minimum=2.9           # what an environment that has a torch must have
python_minimum=3.10

say() { printf '==> %s\n' "$*"; }

fail() {
    printf '%s: %s\n' "$(basename "$0")" "$*" >&2
    exit 2
}

# at_least INTERPRETER VERSION MINIMUM: whether the first two numbers of VERSION are MINIMUM's or later.
at_least() {
    "$1" - "$2" "$3" <<'PYTHON'
import sys

have, need = (tuple(int(part) for part in text.split("+")[0].split(".")[:2]) for text in sys.argv[1:])
sys.exit(have < need)
PYTHON
}

# torch_of INTERPRETER: the version of the torch it can import; fails when there is none.
torch_of() {
    "$1" -c 'import torch; print(torch.__version__)' 2>/dev/null
}

make_venv() {
    local base="${PYTHON:-python3}" version options=()
    if [[ "$root" == *[[:space:]]* ]]; then
        say "note: the path $root has a space; torch.compile's inductor cannot link with a torch in it (all else works)"
    fi
    if "$venv_python" -m pip --version >/dev/null 2>&1; then
        say "environment: $venv (kept)"
    else
        command -v "$base" >/dev/null || fail "$base is not installed; name another interpreter with PYTHON=..."
        version="$("$base" -c 'import platform; print(platform.python_version())')"
        at_least "$base" "$version" "$python_minimum" ||
            fail "$base is Python $version, but $python_minimum or later is needed; name another with PYTHON=..."
        # A machine image for GPUs comes with the torch that fits its driver: see it from the new environment.
        if torch_of "$base" >/dev/null; then
            options=(--system-site-packages)
        fi
        say "environment: $venv (new, Python $version)"
        "$base" -m venv ${options[@]+"${options[@]}"} "$venv" ||
            fail "could not make the environment; Debian and Ubuntu need: apt-get install python3-venv"
    fi
}

install_torch() {
    local version
    if version="$(torch_of "$venv_python")"; then
        at_least "$venv_python" "$version" "$torch_minimum" ||
            fail "the environment has torch $version, but $torch_minimum or later is needed; remove $venv or upgrade it"
        say "torch: $version is already there, used as it is"
    else
        say "torch: installing $torch_version"
        "$venv_python" -m pip install "torch==$torch_version"
    fi
}

# The extra that brings NVRTC and its headers for the CUDA release torch was built with.
# (-W: torch warns of a missing NumPy, which installing the package brings.)
cuda_extra() {
    "$venv_python" -W ignore -c 'import torch; print("cu12" if (torch.version.cuda or "13").startswith("12") else "cu13")'
}

# What an installation depends on: when it is unchanged, a second run needs no network.
install_fingerprint() {
    (
        cd "$root"
        cat pyproject.toml hatch_build.py scripts/{vendor_deepgemm,header_patch}.py patches/* | cksum | tr -d ' '
    )
}

# install_package EXTRAS: the package in editable mode, with `EXTRAS` and the compiler that torch's CUDA asks for.
install_package() {
    local extras stamp
    extras="$1,$(cuda_extra)"
    stamp="$venv/.prime-kernels-${extras//,/-}-$(install_fingerprint)"
    if [[ -e "$stamp" && -e "$root/prime_kernels/_vendor/manifest.json" ]]; then
        say "package: prime-kernels[$extras] is installed"
        return
    fi
    say "package: installing prime-kernels[$extras]"
    "$venv_python" -m pip install --quiet --editable "${root}[$extras]"
    touch "$stamp"
}

# TorchTitan, for its tests: an extra cannot leave out what a library requires, and this one requires a lot.
install_torchtitan() {
    local requirements="$root/tests/requirements-torchtitan.txt" stamp
    stamp="$venv/.prime-kernels-torchtitan-$(cksum <"$requirements" | tr -d ' ')"
    if [[ -e "$stamp" ]]; then
        say "TorchTitan: installed"
        return
    fi
    say "TorchTitan: installing, without its dependencies"
    if "$venv_python" -m pip install --quiet --no-deps --requirement "$requirements"; then
        touch "$stamp"
    else
        say "TorchTitan: could not be installed (see above); its tests are skipped, in CI one fails for it"
    fi
}
