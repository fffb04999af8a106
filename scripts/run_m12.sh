#!/usr/bin/env bash
# m12, 162M of Qwen3's form, on 3.25B tokens of FineWeb with Muon.
#
#   scripts/setup.sh data                           # once, for the hub
#   python3 dev/data/get.py fineweb10B-shards --shards 33 && python3 dev/data/get.py hellaswag
#   scripts/run_m12.sh                              # again, after a stop: it goes on
#
#   parameters   162,151,680: 12 layers, 6 heads, C=768, F=2048, T=1024, V=50,257
#   tokens       6,200 steps x 524,288 = 3.25e9, 20 a parameter; 6 x N x tokens = 3.2e18 flop
#   warm-up      30 steps, 0.02e9 tokens; Muon's learning rates are the defaults, 0.02 and 3.6e-3, down to a
#                tenth. They were tried in 600 steps of 65,536 tokens (docs/models.md), not here.
#   one H200     3.25e9 / 673K tokens/s = 1.3 hours
#   eight        3.25e9 / 5,218K tokens/s = 0.17 hours: both speeds are what `--plan H200` says
#   loss         not known for these steps
exec "$(dirname "$0")/pretrain.sh" m12 'fineweb10B-shards --shards 33' \
    --model m12 --micro-batch 64 --sequence-length 1024 --total-batch 524288 --max-steps 6200 \
    --optimizer muon --warmup 30 --final-fraction 0.1 --weight-decay 0.1 \
    --val-every 250 --val-batches 160 --sample-every 2000 --checkpoint-every 1000 \
    -- "$@"
