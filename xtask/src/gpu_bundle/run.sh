#!/usr/bin/env bash
# sparse24 on a GPU host, without Rust
#
# usage: bash run.sh test | long | sanitize [TOOL...] | bench | all
#
# `sanitize` needs the CUDA toolkit (compute-sanitizer, NVRTC). The others need only the driver, if
# kernels/ has machine code for the GPU.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
export SPARSE24_REQUIRE_GPU=1 SPARSE24_KERNEL_CACHE="$PWD/kernels"
export PATH="$PATH:${CUDA_HOME:-/usr/local/cuda}/bin"

# Exit code of compute-sanitizer when it finds a defect; failing tests exit with another one.
complaint=86

test_() { ./gpu; ./conformance_cuda; ./gpu_training; }

# The long tests, which are ignored by default; without the planted defects.
long() {
    ./gpu --ignored --skip planted::
    ./sparse24 bench --quick --size 128 --size 1000x264
    ./gpu_training --ignored --nocapture
    repeat
}

# Checks that ten runs with the same seed and the same plans produce identical files: sparse, then
# dense steps, with dropout. Two runs share the GPU at a time; the last is interrupted and resumed.
repeat() {
    local runs run process saved file code=0
    runs=$(mktemp -d)
    local settings=(--backend cuda --preset quickstart --checkpoint-every 0
        --set steps=240 --set method.refresh=10 --set model.dropout=0.1
        --set run.flip_every=5 --set run.eval_every=0)
    echo "== ten runs ($SECONDS s)"
    ./sparse24 train "${settings[@]}" --out "$runs/1" > /dev/null
    settings+=(--plans "$runs/1")
    for run in 2 4 6 8; do
        ./sparse24 train "${settings[@]}" --out "$runs/$run" > /dev/null 2>&1 &
        process=$!
        ./sparse24 train "${settings[@]}" --out "$runs/$((run + 1))" > /dev/null 2>&1
        wait "$process"
    done
    ./sparse24 train "${settings[@]}" --out "$runs/10" > /dev/null 2>&1 &
    process=$!
    until [ -e "$runs/10/metrics.jsonl" ] && [ "$(wc -l < "$runs/10/metrics.jsonl")" -ge 60 ]; do
        kill -0 "$process"
        sleep 0.01
    done
    kill -TERM "$process"
    wait "$process" || code=$?
    if [ "$code" != 143 ]; then
        echo "the tenth run ended with exit code $code before it was interrupted" >&2
        return 1
    fi
    tail -n 1 "$runs/10/log.txt"
    ./sparse24 resume "$runs/10" > /dev/null
    # Weights, moments and masks. The other files also record the plans.
    saved=$(cd "$runs/1/checkpoints" && echo step-*/*.safetensors)
    for run in {2..10}; do
        for file in $saved; do
            cmp "$runs/1/checkpoints/$file" "$runs/$run/checkpoints/$file"
        done
    done
    echo "identical: $saved"
    rm -r "$runs"
}

# Runs the named tools, by default all. A failure does not stop the next tool.
sanitize() {
    local tool code output skipped failed=()
    [ $# != 0 ] || set -- memcheck racecheck initcheck synccheck
    compute-sanitizer --version | tail -n 1
    for tool; do
        local sanitizer=(compute-sanitizer --tool "$tool" --error-exitcode "$complaint")
        # Expected API errors: the parameters of a kernel are counted by querying until one fails.
        if [ "$tool" = memcheck ]; then sanitizer+=(--report-api-errors no); fi
        echo "== $tool over all kernels ($SECONDS s)"
        # initcheck needs uninitialized memory; the tests poison it otherwise.
        if [ "$tool" = initcheck ]; then
            export SPARSE24_UNDEFINED=1
        else
            unset SPARSE24_UNDEFINED
        fi
        # cuBLASLt's kernels are not ours, and some of them fail under the slower tools.
        if [ "$tool" = memcheck ]; then
            skipped=()
        else
            skipped=(--skip gemm:: --skip linear_ --skip logits --skip head_loss --skip methods
                --skip compress)
        fi
        for tests in ./gpu ./conformance_cuda; do
            SPARSE24_SMALL=1 "${sanitizer[@]}" "$tests" --test-threads 1 "${skipped[@]}" ||
                failed+=("$tool over $tests: exit code $?")
        done
        echo "== $tool over a planted defect ($SECONDS s)"
        code=0
        output=$("${sanitizer[@]}" ./gpu --test-threads 1 --ignored --exact "planted::$tool" 2>&1) || code=$?
        if [ "$code" != "$complaint" ] || ! grep -m 1 "planted_$tool" <<< "$output"; then
            printf '%s\n' "$output" >&2
            failed+=("$tool did not find the planted defect: exit code $code, not $complaint")
        fi
    done
    if [ "${#failed[@]}" != 0 ]; then
        printf '== failed: %s\n' "${failed[@]}" >&2
        return 1
    fi
}

bench() { ./sparse24 bench; }

./sparse24 doctor
case "${1:-}" in
    test) test_ ;;
    long) long ;;
    sanitize) sanitize "${@:2}" ;;
    bench) bench ;;
    all) test_; long; sanitize; bench ;;
    *) sed -n 2,7p "${BASH_SOURCE[0]##*/}" >&2; exit 2 ;;
esac
echo "== passed: $* ($SECONDS s)"
