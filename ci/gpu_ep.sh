#!/usr/bin/env bash
# Everything that needs several GPUs of one machine, with one command; with one GPU, the parts that mean something there.
#
#   ci/gpu_ep.sh [--smoke] [--gpus N]
#
# --smoke takes small sizes (less than two minutes on one GPU), --gpus fewer than the 2, 4 or 8 that are visible.
# PYTHON=... is an interpreter that has this package's dependencies, pytest and the extra `cli` (default: .venv's, else
# python3). Results go to runs/gpu_ep: ranks/rank*.xml, parity/parity.{json,md,xml}, killed.xml, bench/ep*.json, ep.md,
# ep.png, logs (of every rank) and summary.txt. The exit code is 1 if a part failed. docs/multi-gpu.md says what each part checks.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

usage() {
    echo 'usage: ci/gpu_ep.sh [--smoke] [--gpus N]' >&2
    exit 2
}

smoke=0
wanted=""
while (($#)); do
    case "$1" in
        --smoke) smoke=1 ;;
        --gpus) wanted="${2:-}"; [[ "$wanted" =~ ^[1-9][0-9]*$ ]] || usage; shift ;;
        *) usage ;;
    esac
    shift
done

default=python3
[[ -x .venv/bin/python ]] && default=.venv/bin/python
python="${PYTHON:-$default}"
visible="$("$python" -c 'import torch; print(torch.cuda.device_count())')"
wanted="${wanted:-$visible}"
if ((visible < 1)); then
    echo "ci/gpu_ep.sh: torch finds no GPU" >&2
    exit 2
fi
if ((wanted > visible)); then
    echo "ci/gpu_ep.sh: --gpus $wanted, but torch finds $visible" >&2
    exit 2
fi
gpus=1
for count in 2 4 8; do
    ((count <= wanted)) && gpus=$count
done

# Multicast over NVLink cannot be set up on every host; the kernels do not use it.
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1
export REQUIRE_GPU=1 PYTHONUNBUFFERED=1 OMP_NUM_THREADS="${OMP_NUM_THREADS:-4}"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
out="$PWD/runs/gpu_ep"
rm -rf "$out"
mkdir -p "$out/ranks" "$out/bench"
summary=()
failed=0

# part NAME SECONDS COMMAND...: run it, note how long it took and whether it passed.
part() {
    local name="$1" limit="$2" started=$SECONDS verdict=passed
    shift 2
    printf '\n== %s\n' "$name"
    if ! timeout --kill-after=30 "$limit" "$@"; then
        verdict=FAILED
        failed=1
    fi
    summary+=("$(printf '%-24s %-8s %4d s' "$name" "$verdict" $((SECONDS - started)))")
}

left_out() {
    summary+=("$(printf '%-24s left out: %s' "$1" "$2")")
}

# The terminal shows rank 0, the logs all.
torchrun=("$python" -m torch.distributed.run --standalone --nnodes 1 --tee 3 --local-ranks-filter 0 --log-dir "$out/logs")
# Every rank writes a report of its own. They pass or fail together; rank 0 tells.
tests='exec "$0" -m pytest -m gpu -p no:cacheprovider --junitxml "$1/rank$RANK.xml" tests/gpu/test_several_gpus.py'
part "ranks in step" 1200 \
    "${torchrun[@]}" --nproc-per-node "$gpus" --no-python bash -c "$tests" "$python" "$out/ranks"
if ((gpus > 1)); then
    part "one rank killed" 900 "$python" ci/killed_rank.py --ranks "$gpus" --junit "$out/killed.xml"
else
    left_out "one rank late" "needs a peer"
    left_out "one rank killed" "needs a peer"
fi

sizes=()
for count in 1 2 4 8; do
    ((count <= gpus)) && sizes+=("$count")
done
if ((smoke)); then
    parity=(--ranks "$gpus" --shapes small --routings mixed,zero-ranks --variants plain,clamp)
    bench=(--smoke)
else
    parity=(--ranks "$(IFS=,; echo "${sizes[*]}")")
    bench=()
fi
part "parity matrix" 5400 "$python" ci/parity.py --device cuda --out "$out/parity" "${parity[@]}"
for count in "${sizes[@]}"; do
    # The record of one rank tells what the many are measured against; in a smoke run the largest group will do.
    if ((smoke && count < gpus)); then continue; fi
    part "layer benchmark, EP $count" 3600 "${torchrun[@]}" --nproc-per-node "$count" \
        -m prime_kernels bench ep --out "$out/bench" "${bench[@]}"
done
((gpus > 1)) || left_out "growth with EP" "needs several GPUs"

printf '\n%s of %s GPUs used\n' "$gpus" "$visible" | tee "$out/summary.txt"
printf '%s\n' "${summary[@]}" | tee -a "$out/summary.txt"
exit "$failed"
