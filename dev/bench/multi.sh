#!/usr/bin/env bash
# The GPUs of one host in one go, 1, 2, 4 ... of them: speed, memory, equal bits, the death of a rank.
#
#   dev/bench/multi.sh [PREFIX of tinyshakespeare's shards]
#   TRAIN=./train_gpt2cpu GPUS=4 SIZES='L2,NH2,C64,T64,V50257:4:20' LENGTH=64 dev/bench/multi.sh    # none
#
# GPUS: the first so many (default: all). SIZES: MODEL:B:STEPS, and :TOKENS for a row with so many a step.
# A row of speed is one micro-step on each GPU, no accumulation, in percent of N times one GPU: that is the
# mean of N runs at the same time, each alone on its GPU, because GPUs differ and one of a quiet host has a
# higher clock. Its memory is the program's prediction beside what the driver says is taken on the fullest
# GPU, what the CUDA context and NCCL take (0.95 GiB on H200s) included.
#
# It ends with 1 if bits differ, or a process outlives the death of a rank, or the others call that success.
#
# Time on 8 H200s: 124M 8 runs of 14 s, 1558M 7 of 36 to 40 s (most of it is the start), equal bits 4 of 7 s,
# a death 15 s: seven minutes.
set -eu
cd "$(dirname "$0")/../.."
data=${1:-dev/data/tinyshakespeare/tiny_shakespeare}
train=${TRAIN:-build/check/train_gpt2.BF16}
length=${LENGTH:-1024}
sizes=${SIZES:-d12:64:80 d48:16:20:1048576}
logs=build/multi
mkdir -p $logs
[ -x "$train" ] || make -s "$train"
result=0
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT     # runs and the watch of taken_by, if one of them fails
smi() { nvidia-smi --query-gpu="$1" --format=csv,noheader,nounits 2>/dev/null; }
smi name,driver_version,power.limit || true
gpus=${GPUS:-$(smi index | wc -l)}
counts=$(for ((n = 2; n <= gpus; n *= 2)); do echo $n; done)
common=(-t "$length" -v 0 -s 0 -i "${data}_train.bin" -j "${data}_val.bin")

# each GPU by itself, all at once: a log for each
alone() {
    local pids=() gpu
    for ((gpu = 0; gpu < gpus; gpu++)); do
        CUDA_VISIBLE_DEVICES=$gpu "$train" -e "$1" -b "$2" -x "$3" "${common[@]}" >$logs/alone.$gpu.log &
        pids+=($!)
    done
    for gpu in "${pids[@]}"; do wait "$gpu"; done
}
# the most MiB that a GPU had taken while the command ran, in $taken
taken_by() {
    : >$logs/taken
    while smi memory.used >>$logs/taken; do sleep 0.5; done &
    local watch=$!
    "$@"
    kill $watch 2>/dev/null || true
    wait $watch 2>/dev/null || true
    taken=$(sort -n $logs/taken | tail -n 1)
}
# together N MODEL B STEPS TOKENS FLAGS...: one row, against the first N of alone()
together() {
    local n=$1 model=$2 rows=$3 steps=$4 tokens=$5
    shift 5
    taken_by "$train" --gpus "$n" -e "$model" -b "$rows" -z "$tokens" -x "$steps" "$@" "${common[@]}" \
        >$logs/together.log
    awk -v n="$n" -v tokens="$tokens" -v taken="${taken:-0}" -v what="$model, B=$rows, $n GPUs $*" '
        /^memory: / && FILENAME ~ /together/ { predicted = $2 " " $3 }
        /^mean step time/ {
            if (FILENAME ~ /together/) { ms = $4 }
            sub(/.* ms, /, "")
            if (FILENAME ~ /together/) { all = $1 } else { sum += $1 }
        }
        END {
            printf "%s: %d tokens/s, %.1f %% of %d x one (%d); %.1f ms for %d tokens; memory: predicted %s",
                what, all, 100 * all / sum, n, sum / n, ms, tokens, predicted
            if (taken) { printf ", taken %.2f GiB", taken / 1024 }
            printf "\n"
        }
    ' $logs/together.log $(seq -f "$logs/alone.%g.log" 0 $((n - 1)))
}
echo "== speed, T=$length"
echo "published, 8 H100s of one host: 124M 140 ms for 524288 tokens, 1558M 2800 ms for 1048576"
for size in $sizes; do
    IFS=: read -r model rows steps tokens <<<"$size:"
    tokens=${tokens%:}
    alone "$model" "$rows" "$steps"
    for n in $counts; do
        each=$((n * rows * length))
        together "$n" "$model" "$rows" "$steps" $each -zs 1
        # stage 0: of what fits easily on any number of GPUs, else on all of them
        if [ "$n" = "$gpus" ] || [ "$model" = d12 ]; then
            together "$n" "$model" "$rows" "$steps" $each -zs 0
        fi
    done
    if [ -n "$tokens" ]; then together "$gpus" "$model" "$rows" 5 "$tokens" -zs 1; fi
done

IFS=: read -r model _ <<<"${sizes%% *}"
echo "== equal bits: $model, 20 steps of 8 lanes"
for n in 1 $counts; do
    rm -rf $logs/bits.$n
    "$train" --gpus "$n" -zs $((n > 1)) --lanes 8 -e "$model" -b 4 -z $((32 * length)) -x 20 \
        -o "$logs/bits.$n" "${common[@]}" >$logs/bits.log
    if [ "$n" = 1 ]; then continue; fi          # the judge of the others
    same=differ
    if cmp -s $logs/bits.{1,$n}/main.log && cmp -s $logs/bits.{1,$n}/model_00000020.bin; then same=equal; fi
    if [ $same = differ ]; then result=1; fi
    echo "$n GPUs: main.log and weights $same"
done

if [ "$gpus" -ge 2 ]; then
    echo "== kill -9 of the last rank"
    "$train" --gpus "$gpus" -zs 1 -e "$model" -b 4 -z $((gpus * 4 * length)) -x 1000000 "${common[@]}" \
        >$logs/killed.log 2>$logs/killed.err &
    job=$!
    until grep -q '^step 10/' $logs/killed.log || ! kill -0 $job 2>/dev/null; do sleep 0.2; done
    ranks=$(pgrep -P $job) || { cat $logs/killed.err >&2; exit 1; }     # it has ended by itself
    started=$SECONDS code=0
    kill -9 "$(tail -n 1 <<<"$ranks")"
    wait $job || code=$?
    left=$(for pid in $ranks; do if kill -0 "$pid" 2>/dev/null; then echo "$pid"; fi; done | wc -l)
    echo "exit code $code after $((SECONDS - started)) s, $left processes left: $(tail -n 1 $logs/killed.err)"
    if [ $code = 0 ] || [ "$left" != 0 ]; then result=1; fi
fi
exit $result
