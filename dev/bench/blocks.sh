#!/usr/bin/env bash
# The three kinds of block beside each other, on a GPU.
#
#   dev/bench/blocks.sh speed [MODEL:B ...]         default: d12:64 d48:16; ms a step and tokens/s, in turns
#   dev/bench/blocks.sh loss PREFIX [STEPS]         124M, STEPS (600) steps of 65,536 tokens of the shards
#                                                   PREFIX_train_*.bin, validated on PREFIX_val_*.bin
#
# Speed is that of random weights on tinyshakespeare: 30 steps each, 124M 3 s, 1558M 15 s, and the start.
# 600 steps of 124M take a minute for each kind of block.
set -eu
cd "$(dirname "$0")/../.."
train=build/check/train_gpt2.BF16
[ -x $train ] || make -s $train
mode=${1:-speed}
shift || true
blocks="sequential parallel parallel-tied"
case $mode in
speed)
    data=dev/data/tinyshakespeare/tiny_shakespeare
    for size in "${@:-d12:64 d48:16}"; do
        for one in $size; do
            for block in $blocks sequential; do
                $train -e "${one%:*}" -b "${one#*:}" -t 1024 -x 30 -v 0 -s 0 --block "$block" \
                    -i ${data}_train.bin -j ${data}_val.bin >build/bench.log
                echo "$one $block: $(grep '^mean step time' build/bench.log)"
            done
        done
    done
    ;;
loss)
    prefix=$1 steps=${2:-600}
    for block in $blocks; do
        $train -e d12 -b 64 -t 1024 -x "$steps" -l 6e-4 -u $((steps / 10)) -c 0.1 -v 100 -m 20 -s 0 \
            --block "$block" -i "${prefix}_train*.bin" -j "${prefix}_val*.bin" >build/bench.log
        echo "$block: $(sed -n 's/^val loss \([^ ]*\).*/\1/p' build/bench.log | tr '\n' ' ')"
    done
    ;;
*)
    echo "usage: dev/bench/blocks.sh speed [MODEL:B ...] | loss PREFIX [STEPS]" >&2
    exit 1
    ;;
esac
