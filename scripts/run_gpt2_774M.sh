#!/usr/bin/env bash
# GPT-2 774M on 150B tokens of FineWeb.
#
#   scripts/setup.sh data                           # once, for the hub
#   python3 dev/data/get.py fineweb100B-shards && python3 dev/data/get.py hellaswag
#   scripts/run_gpt2_774M.sh                        # again, after a stop: it goes on
#
#   parameters   774,030,080: 36 layers, 20 heads, C=1280, T=1024, V=50,257
#   tokens       286,102 steps x 524,288 = 150.00e9, one and a half times through 103e9; 6 x N x tokens =
#                7.0e20 flop
#   warm-up      700 steps, 0.37e9 tokens, as for GPT-3; its learning rate for 760M, 2.5e-4, down to 0
#   one H200     150.00e9 / 113.0K tokens/s (measured, B=32) = 15.4 days
#   eight        150.00e9 / 893K tokens/s = 47 hours: what `--plan H200` says
#   loss         not known for these steps. Of HellaSwag GPT-3's model of 760M has 0.510, after 300e9 tokens
#                of other text (GPT-3's paper, table H.1).
exec "$(dirname "$0")/pretrain.sh" gpt2_774M fineweb100B-shards \
    --model d36 --micro-batch 16 --sequence-length 1024 --total-batch 524288 --max-steps 286102 \
    --learning-rate 2.5e-4 --warmup 700 --final-fraction 0 --weight-decay 0.1 \
    --val-every 1000 --val-batches 640 --sample-every 10000 --checkpoint-every 1000 --major-every 20000 \
    -- "$@"
