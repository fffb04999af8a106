#!/usr/bin/env bash
# GPT-2 124M on 10B tokens of FineWeb.
#
#   scripts/setup.sh data                           # once, for the hub
#   python3 dev/data/get.py fineweb10B-shards && python3 dev/data/get.py hellaswag
#   scripts/run_gpt2_124M.sh                        # again, after a stop: it goes on
#   gpus=4 scripts/run_gpt2_124M.sh --log-every 20  # four GPUs; more flags, by their long names
#
#   parameters   124,439,808: 12 layers, 12 heads, C=768, T=1024, V=50,257
#   tokens       19,073 steps x 524,288 = 10.00e9, once through the data; 6 x N x tokens = 7.5e18 flop
#   warm-up      700 steps, 0.37e9 tokens, as for GPT-3; its learning rate for this size, 6e-4, down to 0
#   one H200     10.00e9 / 649K tokens/s (measured) = 4.3 hours
#   eight        10.00e9 / 4,746K tokens/s (measured 2026-11-22) = 0.6 hours. Times are computed, and
#                without validation; only a few minutes of the run were ever run.
#   loss         3.28 to 3.29 on FineWeb's validation tokens, and 0.299 of HellaSwag: llm.c, with the same
#                tokens and schedule (its discussion 481). OpenAI's 124M: 3.425 here, 0.294 of HellaSwag.
exec "$(dirname "$0")/pretrain.sh" gpt2_124M fineweb10B-shards \
    --model d12 --micro-batch 64 --sequence-length 1024 --total-batch 524288 --max-steps 19073 \
    --learning-rate 6e-4 --warmup 700 --final-fraction 0 --weight-decay 0.1 \
    --val-every 500 --val-batches 160 --sample-every 5000 --checkpoint-every 1000 --major-every 5000 \
    -- "$@"
