#!/usr/bin/env bash
# `make bench`: tokens/s of the trainer, and of PyTorch beside it on the same GPU. The shipped binary, default
# flags.
#
#   dev/bench/bench.sh [PREFIX of tinyshakespeare's shards] [MODEL:B ...]        default: d12:64
#
# Ours and PyTorch's take turns, so that both meet the same clocks. Ours is the mean of all steps but the
# first, each by the GPU's clock. With several GPUs dev/bench/multi.sh follows.
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

if [ "$(nvidia-smi -L | grep -c '^GPU ')" -ge 2 ]; then dev/bench/multi.sh "$data"; fi
