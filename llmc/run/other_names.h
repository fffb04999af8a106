/*
What to write here instead of the flags of other trainers: llm.c, nanoGPT, nanochat, transformers. Host only.

    flags_parse(kFlags, argc, argv, kFlagGroups, kOtherNames);      // an unknown flag's error has this hint

`_` counts as `-`, so --batch_size is found, too. A name that this program takes as it is has a row only if
people give it twice.
*/
#pragma once

#include "flags.h"      // gives: FlagAnswer

#define MODEL_SHAPE "the model's shape is -e: d12, or L4,NH4,C128,T128,V50257"
#define EVERY_CHECKPOINT "-n (--checkpoint-every): steps between two checkpoints"
#define PRECISION_BUILT "the precision is the program's: make train_gpt2cu PRECISION=BF16, FP16 or FP32"

static const std::vector<FlagAnswer> kOtherNames = {
    // flags of this program that were given twice
    {"total-batch", "-z and -d are both the total batch here, in tokens; llm.c's ZeRO stage is -zs"},

    // flags of release 0.1
    {"on-bad-loss", "leave it out: after 20 skipped updates in a row a run stops, and -y 1 goes on behind "
                    "these data"},

    // batch and steps
    {"batch-size device-batch-size per-device-train-batch-size train-batch-size",
     "-b (--micro-batch): rows per GPU per micro-step; -z (--total-batch): tokens per step"},
    {"block-size max-seq-len seq-length context-length max-length n-ctx n-positions",
     "-t (--sequence-length): tokens per row"},
    {"grad-accum grad-accum-steps gradient-accumulation-steps accumulation-steps",
     "-z (--total-batch): tokens per step; micro-steps = -z / (-b x -t x GPUs)"},
    {"epochs num-epochs num-train-epochs n-epochs",
     "-x (--max-steps): steps; `-x epoch` goes through the data once"},
    {"iters max-iters num-iterations steps num-steps train-steps target-param-data-ratio target-flops",
     "-x (--max-steps): steps, or `epoch`"},

    // the model and where it comes from
    {"n-layer n-layers num-layers n-head n-heads num-heads n-embd d-model hidden-size depth vocab-size "
     "aspect-ratio head-dim", MODEL_SHAPE},
    {"init-from pretrained model-name-or-path model-name checkpoint ckpt load",
     "-e (--model): a model_*.bin, or the folder of a run or by dev/hf.py import; -y 1 -o RUN resumes"},
    {"resume-from-checkpoint resume-from-step", "-y 1 -o RUN goes on with the run in that folder"},
    {"bias", "GPT-2 has biases; -e llama:... has none"},

    // data
    {"dataset data data-dir data-path train-file input input-bin",
     "-i (--train-data) and -j (--val-data): shards; python3 dev/data/get.py makes them"},
    {"val-file input-val-bin", "-j (--val-data): validation shards"},
    {"tokenizer", "shards bring their tokenizer: python3 dev/data/get.py makes them"},
    {"num-workers", "leave it out: the loader needs no workers"},

    // the optimizer
    {"max-lr peak-lr", "-l (--learning-rate): the peak"},
    {"min-lr final-lr-frac learning-rate-decay-frac", "-q (--final-fraction): the last rate / the peak"},
    {"lr-scheduler-type lr-scheduler scheduler decay-lr lr-decay-iters",
     "-k (--lr-schedule): cosine, linear, constant or wsd"},
    {"warmup-iters warmup-ratio", "-u (--warmup): steps"},
    {"warmdown-ratio", "-k wsd --cooldown: the part of the run in which the rate falls"},
    {"max-grad-norm gradient-clip-val gradient-clipping", "--grad-clip: the largest gradient norm"},
    {"matrix-lr", "--optimizer muon --muon-lr"},
    {"embedding-lr unembedding-lr", "--embedding-rate and --head-rate: multiples of -l"},
    {"adam-beta1 adam-beta2 adam-epsilon", "--beta1, --beta2, --eps"},

    // what is printed, tried and kept
    {"out-dir out output save-dir model-tag", "-o (--output-dir): the run's folder"},
    {"run run-name", "-o RUN is the folder where a run is written; `eval RUN`, `sample RUN` and `chat RUN` "
                     "read one; --like RUN takes its settings"},
    {"eval-interval eval-steps val-loss-every val-interval", "-v (--val-every): steps"},
    {"eval-iters eval-batches eval-tokens val-max-steps", "-m (--val-batches): batches per validation"},
    {"core-metric-every", "-h 1 --eval-every: steps between two rounds of the questions in --eval-data"},
    {"log-interval logging-steps", "--log-every: steps"},
    {"save-every save-steps save-interval", EVERY_CHECKPOINT},
    {"always-save-checkpoint", EVERY_CHECKPOINT "; -nk (--keep): how many stay"},
    {"save-total-limit", "-nk (--keep): how many checkpoints stay"},
    {"all", "`eval RUN --all` answers all questions that are in dev/data"},
    {"eval-only", "`eval RUN` instead: the validation loss of a run or a model"},
    {"start", "--prompt: the text that samples go on from"},
    {"max-new-tokens max-tokens", "-g (--sample-tokens): tokens per sample"},
    {"wandb wandb-log wandb-project wandb-run-name report-to tensorboard",
     "leave it out: -o RUN writes metrics.jsonl, and docs/monitoring.md says how it becomes a picture, "
     "TensorBoard's files, or a run of Weights & Biases"},

    // the machine
    {"device device-type", "a build is for one: train_gpt2cu for GPUs, train_gpt2cpu without"},
    {"num-gpus nproc-per-node ngpus n-gpus", "--gpus: one rank on each GPU of this machine"},
    {"dtype bf16 fp16 fp32 precision", PRECISION_BUILT},
    {"fp8", "--matmul-dtype fp8 or fp8-head"},
    {"gradient-checkpointing activation-checkpointing", "-r (--recompute): 1 GELU, 2 GELU and norms"},
    {"compile flash flash-attention backend", "leave it out: the kernels are compiled already"},
    {"ge gelu-fusion", "leave it out: on Hopper GELU rides in the matrix products by itself"},
};

#undef MODEL_SHAPE
#undef EVERY_CHECKPOINT
#undef PRECISION_BUILT
