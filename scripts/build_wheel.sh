#!/usr/bin/env bash
# Build the one wheel of this package into dist/.
#
#   scripts/build_wheel.sh [--shim] [--aot MODEL:EP:PRECISION:ARCH]... [--output DIR]
#
#   --shim     also build the `deep_gemm` shim wheel, for images that have no other `deep_gemm`
#   --aot      put ready cubins into the wheel, for images that must not compile; may be given several times.
#              MODEL is a name that `prime-kernels warmup --help` lists, EP the number of ranks: for example
#              qwen3-30b-a3b:8:bf16:sm_90a
#   --output   folder to write to (default: dist)
#
# PYTHON=... chooses the interpreter (default: python3); it needs pip, and for --aot also this package's
# dependencies and a compiler (`prime-kernels doctor` tells). The same sources give the same bytes.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
python="${PYTHON:-python3}"
output="$root/dist"
shim=false
aot=()

fail() {
    printf '%s: %s\n' "$(basename "$0")" "$*" >&2
    exit 2
}

while (($#)); do
    case "$1" in
        --shim) shim=true ;;
        --aot)
            [[ "${2:-}" =~ ^[^:]+:[0-9]+:[^:]+:[^:]+$ ]] ||
                fail "--aot takes MODEL:EP:PRECISION:ARCH, for example qwen3-30b-a3b:8:bf16:sm_90a; got '${2:-}'"
            aot+=("$2")
            shift
            ;;
        --output)
            [[ -n "${2:-}" ]] || fail "--output takes a folder"
            mkdir -p "$2"
            output="$(cd "$2" && pwd)"
            shift
            ;;
        -h | --help)
            sed -n '2,/^set /{/^set /d; s/^# \{0,1\}//; p}' "${BASH_SOURCE[0]}"
            exit 0
            ;;
        *) fail "unknown argument '$1' (see --help)" ;;
    esac
    shift
done

"$python" -m pip --version >/dev/null 2>&1 || fail "$python has no pip; name another interpreter with PYTHON=..."

# A wheel is a zip archive and holds file times; a fixed one makes builds of the same sources equal.
export SOURCE_DATE_EPOCH="${SOURCE_DATE_EPOCH:-1577836800}"

work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT

# The build happens in a copy, so that cubins of one wheel never end up in another or in the source tree.
mkdir "$work/source"
(cd "$root" && tar -c --exclude=__pycache__ --exclude=prime_kernels/_aot \
    .gitignore pyproject.toml hatch_build.py README.md LICENSE CHANGELOG.md prime_kernels scripts patches) |
    tar -x -C "$work/source"

if ((${#aot[@]})); then
    "$python" "$work/source/scripts/vendor_deepgemm.py"
    (cd "$work/source" && "$python" -m prime_kernels warmup --aot-dir prime_kernels/_aot "${aot[@]}")
fi

# build SOURCE: its wheel goes to the output folder, and the script tells its path.
build() {
    local built name
    built="$(mktemp -d -p "$work")"
    "$python" -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir "$built" "$1"
    name="$(basename "$built"/*.whl)"
    mkdir -p "$output"
    mv "$built/$name" "$output/$name"
    printf 'wheel: %s (%s bytes)\n' "$output/$name" "$(wc -c <"$output/$name")"
}

build "$work/source"

if $shim; then
    version="$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' "$root/prime_kernels/_version.py")"
    mkdir -p "$work/shim/deep_gemm"
    cp "$root/scripts/deep_gemm_shim.py" "$work/shim/deep_gemm/__init__.py"
    cp "$root/LICENSE" "$work/shim/"
    cat >"$work/shim/pyproject.toml" <<TOML
[build-system]
requires = ["hatchling>=1.25"]
build-backend = "hatchling.build"

[project]
name = "prime-kernels-deep-gemm"
version = "$version"
description = "The name deep_gemm for prime-kernels, in images that have no other deep_gemm"
requires-python = ">=3.10"
license = "Apache-2.0"
license-files = ["LICENSE"]
dependencies = ["prime-kernels==$version"]

[tool.hatch.build.targets.wheel]
packages = ["deep_gemm"]
TOML
    build "$work/shim"
fi
