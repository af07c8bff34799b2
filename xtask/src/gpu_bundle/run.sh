#!/usr/bin/env bash
# sparse24 on a GPU host, without Rust: run.sh test | long | sanitize [TOOL..] | bench | all
# `sanitize` wants the CUDA toolkit (compute-sanitizer, NVRTC); the rest wants only the driver where kernels/ has code for the GPU.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
export SPARSE24_REQUIRE_GPU=1 SPARSE24_KERNEL_CACHE="$PWD/kernels"
export PATH="$PATH:${CUDA_HOME:-/usr/local/cuda}/bin"

# The exit code that tells a sanitizer's complaint from a failing test.
complaint=86

test_() { ./gpu; ./training; }

# What is ignored for its length, and not for being planted or a part of another test. Training on the CPU wants the cores, holding memory the GPU.
long() {
    ./gpu --ignored --skip planted::
    ./training --ignored --skip holder --test-threads 1 --nocapture
    repeat
}

# Ten runs with one seed and the plans of the first end in the same files: fully sparse, then dense, with dropout. Two at a time share the GPU;
# the last is interrupted and resumed.
repeat() {
    local runs run process saved file code=0
    runs=$(mktemp -d)
    local settings=(--backend cuda --preset quickstart --set steps=240 --set method.refresh=10 --set model.dropout=0.1
        --set run.flip_every=5 --set run.eval_every=0 --checkpoint-every 0)
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
    [ "$code" = 143 ] || { echo "the tenth run ended with $code before it could be interrupted" >&2; return 1; }
    tail -n 1 "$runs/10/log.txt"
    ./sparse24 resume "$runs/10" > /dev/null
    # Weights, moments and masks; the other files also say which plans there were.
    saved=$(cd "$runs/1/checkpoints" && echo step-*/*.safetensors)
    for run in {2..10}; do
        for file in $saved; do cmp "$runs/1/checkpoints/$file" "$runs/$run/checkpoints/$file"; done
    done
    echo "the same bits: $saved"
    rm -r "$runs"
}

# All tools unless some are named, whatever one of them says.
sanitize() {
    local tool code output skipped failed=()
    [ $# != 0 ] || set -- memcheck racecheck initcheck synccheck
    compute-sanitizer --version | tail -n 1
    for tool; do
        local sanitizer=(compute-sanitizer --tool "$tool" --error-exitcode "$complaint")
        # Calls that the driver refuses are answers: that is how the parameters of a kernel are counted.
        if [ "$tool" = memcheck ]; then sanitizer+=(--report-api-errors no); fi
        sanitizer+=(./gpu --test-threads 1)
        echo "== $tool over all kernels ($SECONDS s)"
        # Poisoned memory counts as written; initcheck gets memory that is not.
        if [ "$tool" = initcheck ]; then export SPARSE24_UNDEFINED=1; else unset SPARSE24_UNDEFINED; fi
        # The products of cuBLASLt are its own affair, and some of them do not live with the slower tools.
        if [ "$tool" = memcheck ]; then skipped=(); else skipped=(--skip gemm::); fi
        SPARSE24_SMALL=1 "${sanitizer[@]}" "${skipped[@]}" || failed+=("$tool over all kernels ended with $?")
        echo "== $tool over a planted defect ($SECONDS s)"
        code=0
        output=$("${sanitizer[@]}" --ignored --exact "planted::$tool" 2>&1) || code=$?
        if [ "$code" != "$complaint" ] || ! grep -m 1 "planted_$tool" <<< "$output"; then
            printf '%s\n' "$output" >&2
            failed+=("$tool did not find the planted defect: exit code $code instead of $complaint")
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
    *) sed -n 2,3p "${BASH_SOURCE[0]##*/}" >&2; exit 2 ;;
esac
echo "== passed: $* ($SECONDS s)"
