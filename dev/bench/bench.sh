#!/usr/bin/env bash
# `make bench`: tokens/s of the trainer, and of PyTorch beside it on the same GPU. The shipped binary, default
# flags.
#
#   dev/bench/bench.sh [PREFIX of tinyshakespeare's shards] [MODEL:B ...]        default: d12:64
#
# Ours and PyTorch's take turns, so that both meet the same clocks. Ours is the mean from step end to step
# end, without the first step. With several GPUs there are rows for 2, 4, ... of them, the same micro-step on
# each and no accumulation, in percent of N times one GPU: that is the mean of N runs at the same time, each
# alone on its GPU, because GPUs differ and one of a quiet host has a higher clock.
set -eu
cd "$(dirname "$0")/../.."
data=${1:-dev/data/tinyshakespeare/tiny_shakespeare}
train=build/check/train_gpt2.BF16
[ -x $train ] || make -s $train
nvidia-smi --query-gpu=name,driver_version,power.limit --format=csv,noheader
ours() {
    $train -e "$1" -b "$2" -t 1024 -x 80 -v 0 -s 0 -i "${data}_train.bin" -j "${data}_val.bin" \
        >build/bench.log
    grep '^memory' build/bench.log
    tail -n 1 build/bench.log
}
shift || true
for size in "${@:-d12:64}"; do
    echo "== $size, T=1024"
    ours "${size%:*}" "${size#*:}"
    if python3 -c 'import torch, sys; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then
        python3 dev/reference/compare.py speed --model "${size%:*}" --batch_size "${size#*:}"
    fi
    ours "${size%:*}" "${size#*:}"
done

gpus=$(nvidia-smi -L | grep -c '^GPU ')
# each GPU by itself, all at once: their tokens/s in a file for each
alone() {
    local pids=() gpu
    for ((gpu = 0; gpu < gpus; gpu++)); do
        CUDA_VISIBLE_DEVICES=$gpu $train -e "$1" -b "$2" -t 1024 -x "$3" -v 0 -s 0 -i "${data}_train.bin" \
            -j "${data}_val.bin" >build/bench.$gpu.log &
        pids+=($!)
    done
    for gpu in "${pids[@]}"; do wait "$gpu"; done
}
# together N MODEL B STEPS FLAGS...: one row, against the first N of alone()
together() {
    local n=$1 model=$2 rows=$3 steps=$4
    shift 4
    $train --gpus "$n" -e "$model" -b "$rows" -t 1024 -z $((n * rows * 1024)) -x "$steps" -v 0 -s 0 "$@" \
        -i "${data}_train.bin" -j "${data}_val.bin" >build/bench.all.log
    grep '^memory' build/bench.all.log
    awk -v n="$n" -v what="$model, B=$rows, $n GPUs $*" '
        /^mean step time/ {
            sub(/.* ms, /, "")
            if (FILENAME ~ /all/) { all = $1 } else { sum += $1 }
        }
        END { printf "%s: %d tokens/s, %.1f %% of %d x one (%d)\n", what, all, 100 * all / sum, n, sum / n }
    ' build/bench.all.log $(seq -f 'build/bench.%g.log' 0 $((n - 1)))
}
if [ "$gpus" -ge 2 ]; then
    echo "== several GPUs, T=1024, no accumulation"
    for size in d12:64:80 d48:16:30; do
        IFS=: read -r model rows steps <<<"$size"
        alone "$model" "$rows" "$steps"
        for ((n = 2; n <= gpus; n *= 2)); do
            if [ "$model" = d12 ]; then together "$n" "$model" "$rows" "$steps" -zs 0; fi
            together "$n" "$model" "$rows" "$steps" -zs 1
        done
    done
fi
