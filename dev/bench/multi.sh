#!/usr/bin/env bash
# What several GPUs of one host have to show, on 1, 2, 4 ... of them: a line for each row of a table.
#
#   dev/bench/multi.sh                      # all of speed, bits, death, nine; or those that are named
#   LLMC=../llm.c/train_gpt2cu dev/bench/multi.sh speed         # beside it llm.c's step on all GPUs
#   TRAIN=./train_gpt2cpu GPUS=4 LENGTH=64 SIZES='L2,NH2,C64,T64,V50257 4 20' MODELS=L2,NH2,C64,T64,V50257 \
#       FORMATS=bf16 dev/bench/multi.sh speed bits death        # without a GPU
#
# GPUS: the first so many (all); speed and death want two. DATA: the PREFIX of tinyshakespeare's shards.
# LENGTH: T. LOGS: a folder.
#
# speed: one micro-step on each GPU, in percent of N times one GPU: that is the mean of N runs at the same
#   time, each alone on its GPU, because GPUs differ and one of a quiet host has a higher clock. Wanted at
#   eight: 96 for d12 and m12, 97 for d48. SIZES has rows `MODEL B STEPS FLAGS`, separated by `;`. TOKENS
#   before the flags adds a row with as many tokens a step. Memory is the program's prediction beside what the
#   driver says is taken on the fullest GPU, with the CUDA context and NCCL (0.95 GiB on H200s).
# bits: STEPS of MODELS, `MODEL FLAGS` separated by `;`, in each of FORMATS: 8 lanes of ROWS. The sha256 of
#   main.log and model must be one GPU's, also after a kill at a random step and a resume on another number.
# death: a rank is killed; all must end, and say so.
# nine: seconds of training until scripts/run_m12_9min.sh is at one GPU's last validation loss, LOSS. ENGLISH
#   is the folder of its data; FLAGS replace its flags.
#
# Exit code 1: bits differ, a process outlives a rank's death, the others call that success, or nine fails.
#
# Seconds, estimated: two H200s speed 280, bits 130, death 15, nine 300; eight 500, 220, 15, 120.
set -euo pipefail
cd "$(dirname "$0")/../.."
all="speed bits death nine"
if [ $# = 0 ]; then set -- $all; fi
stop() { printf 'error: %s\nhint: %s\n' "$1" "$2" >&2; exit 1; }
smi() { nvidia-smi --query-gpu="$1" --format=csv,noheader,nounits 2>/dev/null; }
for part in "$@"; do
    [[ $part =~ ^(${all// /|})$ ]] || stop "no part $part" "$all"
done
text=${DATA:-dev/data/tinyshakespeare/tiny_shakespeare}
train=${TRAIN:-build/check/train_gpt2.BF16}
length=${LENGTH:-1024} rows=${ROWS:-1} last=${STEPS:-200}
IFS=';' read -ra sizes <<<"${SIZES:-d12 64 80; m12 64 80 --optimizer muon; d48 16 20 1048576}"
IFS=';' read -ra models <<<"${MODELS:-d12; m12 --optimizer muon}"
export NCCL_NVLS_ENABLE=${NCCL_NVLS_ENABLE:-0}      # no multicast
logs=${LOGS:-build/multi}
gpus=${GPUS:-$(smi index | wc -l || true)}
for setting in "GPUS 1 $gpus" "LENGTH 1 $length" "ROWS 1 $rows" "STEPS 8 $last"; do
    read -r name least value <<<"$setting"
    [[ $value =~ ^[1-9][0-9]*$ && $value -ge $least ]] ||
        stop "$name=$value: a number, $least or more" "$0 begins with all settings, also without a GPU"
done
mkdir -p "$logs"
[ -x "$train" ] || make -s "$train"
result=0
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT     # runs and the watch of taken_by, if one of them fails
counts=$(for ((n = 2; n <= gpus; n *= 2)); do echo "$n"; done)
common=(-t "$length" -v 0 -s 0 -i "${text}_train.bin" -j "${text}_val.bin")
echo "$gpus GPUs, $(date +%F), commit $(git rev-parse --short HEAD 2>/dev/null || echo unknown)"
smi name,driver_version,power.limit || true

# ---- speed ----

# each GPU by itself, all at once: a log for each
alone() {
    local pids=() gpu
    for ((gpu = 0; gpu < gpus; gpu++)); do
        CUDA_VISIBLE_DEVICES=$gpu "$train" "$@" "${common[@]}" >"$logs/alone.$gpu.log" &
        pids+=($!)
    done
    for gpu in "${pids[@]}"; do wait "$gpu"; done
}
# the most MiB that a GPU had taken while the command ran, in $taken
taken_by() {
    : >"$logs/taken"
    while smi memory.used >>"$logs/taken"; do sleep 0.5; done &
    local watch=$!
    "$@"
    kill $watch 2>/dev/null || true
    wait $watch 2>/dev/null || true
    taken=$(sort -n "$logs/taken" | tail -n 1)
}
# together N TOKENS FLAGS...: one row, against the first N of alone()
together() {
    local n=$1 tokens=$2 ones=() gpu
    shift 2
    for ((gpu = 0; gpu < n; gpu++)); do ones+=("$logs/alone.$gpu.log"); done
    taken_by "$train" --gpus "$n" -z "$tokens" "$@" "${common[@]}" >"$logs/together.log"
    awk -v n="$n" -v tokens="$tokens" -v taken="${taken:-0}" -v what="$n GPUs: $*" '
        /^memory: / && NR == FNR { predicted = $2 " " $3 }
        /^mean step time/ {
            ms = $4
            sub(/.* ms, /, "")
            if (NR == FNR) { all_ms = ms; all = $1 } else { one_ms += ms / n; one += $1 / n }
        }
        END {
            printf "%s: %.1f ms for %d tokens, %d tokens/s, %.1f %% of %d x one (%.1f ms, %d tokens/s)",
                what, all_ms, tokens, all, 100 * all / (n * one), n, one_ms, one
            printf "; memory: predicted %s", predicted
            printf taken ? ", taken %.2f GiB\n" : "\n", taken / 1024
        }
    ' "$logs/together.log" "${ones[@]}"
}
# llmc MODEL B STEPS: its step on all GPUs. It wants a step's tokens in one shard: the text, eight times.
llmc() {
    python3 - "${text}_train.bin" >"$logs/llmc.bin" <<'END'
import struct, sys
shard = open(sys.argv[1], "rb").read()
tokens = struct.unpack_from("<i", shard, 8)[0]
sys.stdout.buffer.write(shard[:8] + struct.pack("<i", 8 * tokens) + shard[12:1024] + 8 * shard[1024:])
END
    OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 mpirun -np "$gpus" "$LLMC" -e "$1" -b "$2" \
        -t "$length" -d $((gpus * $2 * length)) -x "$3" -z 1 -r 0 -v 1000000 -m 1 -s 0 -i "$logs/llmc.bin" \
        -j "$logs/llmc.bin" >"$logs/llmc.log" 2>&1 || true
    echo "llm.c, $gpus GPUs, $1, B=$2:" \
        "$(grep '^total average' "$logs/llmc.log" || tail -n 1 "$logs/llmc.log")"
}
speed() {
    local row model batch steps flags tokens n zero
    if [ "$gpus" = 1 ]; then echo "== speed: left out, it wants two GPUs"; return; fi
    echo "== speed, T=$length; llm.c published of 8 H100s: 140 ms for 524288 tokens of 124M, 2800 ms for" \
        "1048576 of 1558M"
    for row in "${sizes[@]}"; do
        read -r model batch steps flags <<<"$row"
        tokens=${flags%% *}
        if [[ $tokens =~ ^[0-9]+$ ]]; then flags=${flags#"$tokens"}; else tokens=; fi
        row=(-e "$model" -b "$batch" $flags)
        alone "${row[@]}" -x "$steps"
        for n in $counts; do
            for zero in 1 0; do
                together "$n" $((n * batch * length)) "${row[@]}" -x "$steps" -zs $zero
            done
        done
        if [ -n "$tokens" ]; then together "$gpus" "$tokens" "${row[@]}" -x 5 -zs 1; fi
        if [ -n "${LLMC:-}" ] && [[ $model =~ ^d[0-9]+$ ]]; then llmc "$model" "$batch" "$steps"; fi
    done
}

# ---- bits ----

# job_of FOLDER GPUS FORMAT MODEL FLAGS...: a run's command, in $job
job_of() {
    local folder=$1 n=$2 format=$3 model=$4
    shift 4
    job=("$train" --gpus "$n" -zs $((n > 1)) --lanes 8 -e "$model" --matmul-dtype "$format" -b "$rows"
         -z $((8 * rows * length)) -x "$last" -o "$folder" "$@" "${common[@]}")
}
# begin STEP FILE: $job in the background, until it has made the step and the file; $ranks are its processes
begin() {
    : >"$logs/begun.log"
    "${job[@]}" >"$logs/begun.log" 2>"$logs/begun.err" &
    pid=$!
    while kill -0 $pid 2>/dev/null; do
        if grep -q "^step $1/" "$logs/begun.log" && compgen -G "$2" >/dev/null; then break; fi
        sleep 0.02
    done
    ranks=$(pgrep -P $pid || echo $pid)
}
hashes() { (cd "$1" && sha256sum main.log "model_$(printf %08d "$last").bin" | cut -c 1-64); }
bits() {
    local model format n i runs=() pids=() numbers=(1 $counts) from to step save=$((last / 4)) judge same
    local job pid ranks others=$((${#numbers[@]} > 1 ? ${#numbers[@]} - 1 : 1))
    echo "== bits, $last steps of 8 lanes of $rows x $length tokens"
    for model in "${models[@]}"; do
        for format in ${FORMATS:-bf16 fp8-head}; do runs+=("$format ${model# }"); done
    done
    rm -rf "$logs"/bits.*
    for i in "${!runs[@]}"; do                      # one GPU's, side by side
        job_of "$logs/bits.$i" 1 ${runs[i]}
        CUDA_VISIBLE_DEVICES=$((i % gpus)) "${job[@]}" >"$logs/begun.$i.log" &
        pids+=($!)
    done
    for i in "${pids[@]}"; do wait "$i"; done
    for i in "${!runs[@]}"; do
        judge=$(hashes "$logs/bits.$i") same=equal
        for n in $counts; do
            job_of "$logs/bits.n" "$n" ${runs[i]}
            "${job[@]}" >"$logs/begun.log"
            if [ "$(hashes "$logs/bits.n")" != "$judge" ]; then same="differ on $n"; fi
            rm -rf "$logs/bits.n"
        done
        from=$((RANDOM % ${#numbers[@]})) step=$((save + 1 + RANDOM % (last * 3 / 8)))
        to=${numbers[(from + 1 + RANDOM % others) % ${#numbers[@]}]} from=${numbers[from]}
        job_of "$logs/bits.killed" "$from" ${runs[i]} -n $save
        begin $step "$logs/bits.killed/DONE_*"
        kill -9 $ranks 2>/dev/null || true
        wait $pid 2>/dev/null || true
        job_of "$logs/bits.killed" "$to" ${runs[i]} -n $save -y 1
        "${job[@]}" >"$logs/begun.log"
        step=$(sed -n 's/^resumed: .* after step //p' "$logs/begun.log")
        if [ "$(hashes "$logs/bits.killed")" != "$judge" ]; then same+=", differ after a resume"; fi
        if [ "${step:-$last}" -ge "$last" ]; then same+=", no kill before the end"; fi
        if [ "$same" != equal ]; then result=1; fi
        echo "${runs[i]} on ${numbers[*]} GPUs; killed on $from, resumed after $step steps on $to: $same;" \
            "sha256 of log, model: $(cut -c 1-12 <<<"$judge" | xargs)"
        rm -rf "$logs/bits.killed" "$logs/bits.$i"
    done
}

# ---- death ----

death() {
    local model _ job pid ranks started code=0 left
    if [ "$gpus" = 1 ]; then echo "== death: left out, it wants two GPUs"; return; fi
    echo "== death: kill -9 of the last of $gpus ranks"
    read -r model _ <<<"${sizes[0]}"
    job=("$train" --gpus "$gpus" -zs 1 -e "$model" -b 4 -z $((gpus * 4 * length)) -x 1000000 "${common[@]}")
    begin 10 "$logs"
    started=$SECONDS
    kill -9 "$(tail -n 1 <<<"$ranks")" || { cat "$logs/begun.err" >&2; exit 1; }    # it has ended by itself
    wait $pid || code=$?
    left=$(for pid in $ranks; do if kill -0 "$pid" 2>/dev/null; then echo "$pid"; fi; done | wc -l)
    echo "exit code $code after $((SECONDS - started)) s, $left processes left:" \
        "$(tail -n 1 "$logs/begun.err")"
    if [ $code = 0 ] || [ "$left" != 0 ]; then result=1; fi
}

# ---- nine ----

nine() {
    local english folder="$logs/nine" program
    echo "== nine: scripts/run_m12_9min.sh"
    english=$(realpath "${ENGLISH:-dev/data/english}") program=$(realpath "$train")
    if ! compgen -G "$english/english_*_train_*.bin" >/dev/null; then
        echo "left out, without its data: python3 dev/data/get.py english, or ENGLISH=FOLDER"
        return
    fi
    rm -rf "$folder"
    mkdir "$folder"
    ln -s "$PWD/scripts" "$PWD/dev" "$folder"       # its program and its runs are not the repository's
    ln -s "$program" "$folder/train_gpt2cu"
    (
        cd "$folder" || exit
        gpus=$gpus data=$english questions=none scripts/run_m12_9min.sh ${FLAGS:-}
    ) >"$logs/nine.log" 2>&1 || { tail -n 5 "$logs/nine.log" >&2; result=1; }
    if [ ! -e "$folder/runs/m12_9min/metrics.jsonl" ]; then return; fi
    awk -v want="${LOSS:-3.341}" -v gpus="$gpus" '
        sub(/.*"ms": /, "") { seconds += $1 / 1000; steps++ }
        sub(/.*"val_loss": /, "") { loss = $1 + 0; if (!when && loss <= want) { when = seconds } }
        END {
            printf "%d GPUs: validation loss %s %s; %.4f at the end, after %d steps, %.1f s (%.1f ms each)\n",
                gpus, want, when ? sprintf("after %.1f s", when) : "not reached", loss, steps, seconds,
                1000 * seconds / steps
        }
    ' "$folder/runs/m12_9min/metrics.jsonl" || result=1
}

for part in "$@"; do "$part"; done
exit $result
