#!/usr/bin/env bash
# GPT-2 350M on 31B tokens of FineWeb.
#
#   scripts/setup.sh data                           # once, for the hub
#   python3 dev/data/get.py fineweb100B-shards --shards 315 && python3 dev/data/get.py hellaswag
#   scripts/run_gpt2_350M.sh                        # again, after a stop: it goes on
#
#   parameters   354,823,168: 24 layers, 16 heads, C=1024, T=1024, V=50,257
#   tokens       60,000 steps x 524,288 = 31.46e9, 89 a parameter; 6 x N x tokens = 6.7e19 flop
#   warm-up      700 steps, 0.37e9 tokens, as for GPT-3; its learning rate for this size, 3e-4, down to 0
#   one H200     31.46e9 / 242K tokens/s = 36 hours
#   eight        31.46e9 / 1,879K tokens/s = 4.7 hours: both speeds are what `--plan H200` says
#   loss         not known for these steps. Of HellaSwag GPT-3's model of this size has 0.436, after 300e9
#                tokens of other text (GPT-3's paper, table H.1).
exec "$(dirname "$0")/pretrain.sh" gpt2_350M 'fineweb100B-shards --shards 315' \
    --model d24 --micro-batch 32 --sequence-length 1024 --total-batch 524288 --max-steps 60000 \
    --learning-rate 3e-4 --warmup 700 --final-fraction 0 --weight-decay 0.1 \
    --val-every 500 --val-batches 320 --sample-every 5000 --checkpoint-every 1000 --major-every 10000 \
    -- "$@"
