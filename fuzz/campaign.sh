#!/usr/bin/env bash
# Fuzzes every target, one process each, and goes on where an earlier campaign in the same folder ended.
#
#   campaign.sh FOLDER [SECONDS]     70 seconds a target unless said
#
# With a new program or on another kind of processor, all seeds are tried first, which takes minutes, and counting begins anew. FOLDER gets
# corpora/TARGET/, findings/, logs/ and totals/TARGET; words/TARGET are those of the seeds, which the fuzzer tries. $JOBS targets run at a time: as
# many as there are processors unless set; $PROCESSES of each, which share what they find: one unless set. The second of them also keeps what
# comes nearer to passing a comparison. $TARGETS has their names: all unless set. It needs two programs in $PROGRAMS: `any` and `seeds`; without
# that variable they are built here, for which rustup's nightly toolchain and cargo-fuzz must be there. Ends with 1 if there are findings, with 2
# if a target could not be fuzzed.
set -euo pipefail

folder=$(mkdir -p "$1" && cd "$1" && pwd)
seconds=${2:-70}
all="config_document config_settings safetensors_prune safetensors_import huggingface_config checkpoint_manifest checkpoint_tensors
    checkpoint_masks checkpoint_state token_shard token_folder tokenizer_file corpus_text metrics_log"
targets=${TARGETS:-$all}
for name in $targets; do
    [[ " $(echo $all) " = *" $name "* ]] || { echo "$name is no target" >&2; exit 2; }
done

if [ -z "${PROGRAMS:-}" ]; then
    cd "$(dirname "$0")"
    # Without a sanitizer: no target has `unsafe` of its own. Overflows and memory are checked all the same.
    cargo +nightly fuzz build --fuzz-dir . --sanitizer none any
    cargo +nightly build --release --bin seeds
    PROGRAMS=$folder/programs
    mkdir -p "$PROGRAMS"
    built=${CARGO_TARGET_DIR:-target}
    strip -o "$PROGRAMS/any" "$built"/*-unknown-*/release/any
    strip -o "$PROGRAMS/seeds" "$built/release/seeds"
fi

# In memory: a loader reads files, and libFuzzer writes thousands a second.
TMPDIR=$(mktemp -d -p "$([ -w /dev/shm ] && echo /dev/shm || echo /tmp)")
export TMPDIR
trap 'rm -rf "$TMPDIR"' EXIT
limits=(-timeout=1 -rss_limit_mb=512 -max_len=8192)

# Runs a function for every name, $JOBS at a time; `failed` says whether one of them did.
failed=
for_each() {
    local function=$1 running=0 name
    shift
    for name in "$@"; do
        if [ "$running" -ge "${JOBS:-$(nproc)}" ]; then
            wait -n || failed=yes
        else
            running=$((running + 1))
        fi
        "$function" "$name" &
    done
    while [ "$running" -gt 0 ]; do
        wait -n || failed=yes
        running=$((running - 1))
    done
}

# The words of a target, and of its hundreds of thousands of seeds enough to cover what they all do; what one of them finds counts.
begin() {
    local name=$1
    { LC_ALL=C grep -haoE '[A-Za-z_][A-Za-z0-9_.-]{1,40}' "$folder/seeds/$name"/seed-* || true; } |
        LC_ALL=C sort -u | sed 's/.*/"&"/' > "$folder/words.new/$name"
    mkdir -p "$folder/corpora/$name"
    SPARSE24_FUZZ_TARGET=$name nice -n 19 "$PROGRAMS/any" -merge=1 "${limits[@]}" -artifact_prefix="$folder/findings/$name-" \
        "$folder/corpora/$name" "$folder/seeds/$name" > "$folder/logs/$name.merge.log" 2>&1 ||
        { echo "the seeds of $name cannot be tried: $folder/logs/$name.merge.log" >&2; return 1; }
}

mkdir -p "$folder"/{findings,logs}
# Another processor runs other code for some things, and so reaches other edges.
program=$({ cat "$PROGRAMS/any"; grep -m 1 -E '^(flags|Features)' /proc/cpuinfo || true; } | cksum)
if [ "$program" != "$(cat "$folder/program" 2> /dev/null)" ]; then
    rm -rf "$folder"/{words,totals}
    echo "$program" > "$folder/program"
fi
mkdir -p "$folder/totals"
if [ ! -d "$folder/words" ]; then
    rm -rf "$folder"/{seeds,words.new}
    mkdir "$folder/words.new"
    "$PROGRAMS/seeds" "$folder/seeds"
    for_each begin $(ls "$folder/seeds")
    [ -z "$failed" ] || exit 2
    rm -r "$folder/seeds"
    mv "$folder/words.new" "$folder/words"
fi

# Every line of libFuzzer after the second in which it was said and the number of the process.
fuzz() {
    local name=$1 process=$2 left
    local end=$((SECONDS + seconds)) options=("${limits[@]}" -print_final_stats=1 -reload=10)
    [ ! -s "$folder/words/$name" ] || options+=(-dict="$folder/words/$name")
    [ "$process" != 2 ] || options+=(-use_value_profile=1)
    # A finding ends the process, not the campaign.
    for _ in {1..20}; do
        left=$((end - SECONDS))
        [ "$left" -gt 0 ] || break
        TIMEFORMAT='cpu %U %S'
        { time SPARSE24_FUZZ_TARGET=$name nice -n 19 "$PROGRAMS/any" -max_total_time="$left" "${options[@]}" \
            -artifact_prefix="$folder/findings/$name-" "$folder/corpora/$name"; } 2>&1 || true
    done | while IFS= read -r line; do printf '%(%s)T %s %s\n' -1 "$process" "$line"; done > "$folder/logs/$name.$process.log"
}

# Adds the logs of a target to its totals: name, CPU seconds, executions, edges covered, CPU seconds since the last new one.
add() {
    local totals=$folder/totals/$1
    sort -s -n -k 1,1 "$folder/logs/$1".[0-9]*.log > "$folder/logs/$1.log"
    LC_ALL=C awk -v name="$1" -v total="$(cat "$totals" 2> /dev/null)" '
        BEGIN { split(total, before, "\t"); most = before[4] }
        NR == 1 { began = $1 }
        { ended = $1 }
        $3 == "cpu" { cpu += $4 + $5 }
        $3 == "stat::number_of_executed_units:" { executions += $4 }
        # When a process loads the corpus, too: another may have found it just before its end.
        $5 == "cov:" && $6 > most { most = $6; found = 1; last = $1 }
        END {
            # The processors that the processes had.
            share = ended > began ? cpu / (ended - began) : 1
            quiet = found ? (ended - last) * share : before[5] + cpu
            if (!executions) exit 1
            printf "%s\t%.0f\t%d\t%d\t%.0f\n", name, before[2] + cpu, before[3] + executions, most, quiet
        }' "$folder/logs/$1.log" > "$folder/logs/$1.totals"
    mv "$folder/logs/$1.totals" "$totals"
}

campaign() {
    local name=$1 process
    rm -f "$folder/logs/$name".[0-9]*.log
    for process in $(seq "${PROCESSES:-1}"); do fuzz "$name" "$process" & done
    wait
    add "$name"
}
for_each campaign $targets
[ -z "$failed" ] || { echo "some targets could not be fuzzed: see $folder/logs" >&2; exit 2; }

awk -F '\t' 'BEGIN { printf "%-20s %10s %14s %8s %12s\n", "target", "CPU min", "executions", "edges", "quiet min" }
    { printf "%-20s %10.1f %14d %8d %12.1f\n", $1, $2 / 60, $3, $4, $5 / 60; cpu += $2; executions += $3 }
    END { printf "%-20s %10.1f %14d\n", "all", cpu / 60, executions }' "$folder"/totals/*

status=0
for finding in "$folder"/findings/*; do
    [ -e "$finding" ] || continue
    name=$(basename "$finding")
    # A timeout may be the machine's: it counts if it comes again.
    if SPARSE24_FUZZ_TARGET=${name%-*-*} "$PROGRAMS/any" -timeout=1 -rss_limit_mb=512 "$finding" > "$folder/logs/$name.log" 2>&1; then
        mv "$finding" "$folder/logs"
        echo "not seen again: $name"
    else
        status=1
        echo "finding $name: $(grep -m 1 -A 1 -E 'panicked|ERROR' "$folder/logs/$name.log" | tr '\n' ' ' | cut -c 1-400)"
    fi
done
exit $status
