#!/usr/bin/env bash
# m24, 834M of Qwen3's form, on 16.7B tokens of FineWeb with Muon.
#
#   scripts/setup.sh data                           # once, for the hub
#   python3 dev/data/get.py fineweb100B-shards --shards 168 && python3 dev/data/get.py hellaswag
#   scripts/run_m24.sh                              # again, after a stop: it goes on
#
#   parameters   833,948,160: 24 layers, 12 heads, C=1536, F=4096, T=1024, V=50,257
#   tokens       31,800 steps x 524,288 = 16.67e9, 20 a parameter; 6 x N x tokens = 8.3e19 flop
#   warm-up      100 steps, 0.05e9 tokens; Muon's learning rates are the defaults, 0.02 and 3.6e-3, down to a
#                tenth. They were tried with m12 (docs/models.md), not with this size.
#   one H200     16.67e9 / 124K tokens/s = 1.6 days
#   eight        16.67e9 / 962K tokens/s = 4.8 hours: both speeds are what `--plan H200` says
#   loss         not known
exec "$(dirname "$0")/pretrain.sh" m24 'fineweb100B-shards --shards 168' \
    --model m24 --micro-batch 32 --sequence-length 1024 --total-batch 524288 --max-steps 31800 \
    --optimizer muon --warmup 100 --final-fraction 0.1 --weight-decay 0.1 \
    --val-every 500 --val-batches 160 --sample-every 5000 --checkpoint-every 1000 --major-every 5000 \
    -- "$@"
