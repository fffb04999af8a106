#!/usr/bin/env bash
# GPT-3 125M, rows of 2048, on 300B tokens of FineWeb.
#
#   scripts/setup.sh data                           # once, for the hub
#   python3 dev/data/get.py fineweb100B-shards && python3 dev/data/get.py hellaswag
#   scripts/run_gpt3_125M.sh                        # again, after a stop: it goes on
#
#   parameters   125,226,240: 12 layers, 12 heads, C=768, T=2048, V=50,257
#   tokens       572,204 steps x 524,288 = 300.00e9, three times through 103e9; 6 x N x tokens = 2.3e20 flop
#   warm-up      700 steps, 0.37e9 tokens; learning rate 6e-4, down to a tenth: GPT-3's paper, table 2.1 and
#                appendix B
#   one H200     300.00e9 / 564K tokens/s = 6.2 days
#   eight        300.00e9 / 4,376K tokens/s = 19 hours: both speeds are what `--plan H200` says
#   loss         not known for these steps. Of HellaSwag GPT-3's own has 0.337 (table H.1).
exec "$(dirname "$0")/pretrain.sh" gpt3_125M fineweb100B-shards \
    --model gpt3:c768 --micro-batch 32 --sequence-length 2048 --total-batch 524288 --max-steps 572204 \
    --learning-rate 6e-4 --warmup 700 --final-fraction 0.1 --weight-decay 0.1 \
    --val-every 1000 --val-batches 160 --sample-every 20000 --checkpoint-every 2000 --major-every 50000 \
    -- "$@"
