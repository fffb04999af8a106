#!/usr/bin/env python3
"""Makes the committed fixture: small models whose weights leave no gradient at zero, and a training run.

    python dev/reference/make_fixture.py [FOLDER]        # default dev/reference/fixture; CPU, a minute or two
    python dev/reference/make_fixture.py FOLDER CASE...  # of these only

ugly    nothing is a multiple of anything: C=40, head size 20, V=509, T=33 of 37, B=3; fp32 weights, version 3
head64  head size 64, so that the tensor-core attention runs; T=70, beyond one tile; bf16 weights, version 5
qwen    of the family Llama: six heads of q on two of k, NH * HS is not C, QK-norm, SwiGLU, an untied head
relu2   the rest of the family: ReLU^2, tied, softcap, a norm behind the embedding, none with weights, T=70;
        weights are exact in bf16
parallel, tied   GPT-2's relatives: parallel branches under two RMSNorms, and under one LayerNorm
windows of the family Llama: a window in two layers of three, T=70
documents   likewise, in one of two, and each document sees itself alone
qwen2   of the family Llama: biases of q, k and v, and frequencies that Llama 3 scales: of eight it keeps one,
        blends three and divides four
run     two shards of made-up tokens and the losses of a training run over them: initial weights, shuffling
        over several epochs, accumulation, warm-up, cosine, weight decay and clipping at once. `our_flags` are
        what the trainer wants to hear.
"""
import dataclasses
import os
import sys

import numpy as np

import reference
import train_gpt2
from formats import (BY_TOKEN, NAMES, RAND_SHUFFLE, param_shape, parse_model, rand_normal, rand_unit,
                     write_shard)

COMMAND = "python dev/reference/make_fixture.py"
SEED = 20240326
HYPER = {"learning_rate": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1,
         "grad_clip": 1.0}
CASES = {"ugly": ("L2,NH2,C40,T37,V509", 3, 33, "float32"),
         "head64": ("L2,NH1,C64,T70,V67", 2, 70, "bfloat16"),
         "qwen": ("llama:L2,NH6,NKV2,HS16,C24,F40,T37,V109,qk_norm,theta=1000,eps=1e-6", 2, 33, "float32"),
         "relu2": ("llama:L2,NH2,NKV1,HS64,C24,F56,T70,V67,relu2,no_norm_weights,embed_norm,tied,softcap=1.5",
                   2, 70, "bfloat16"),
         "parallel": ("L2,NH2,C32,T17,V67", 2, 17, "float32"),
         "tied": ("L2,NH2,C32,T17,V67", 2, 17, "float32"),
         "windows": ("llama:L3,NH2,NKV1,HS64,C24,F40,T70,V67,tied,window=9,pattern=SSL", 2, 70, "bfloat16"),
         "qwen2": ("llama:L2,NH4,NKV2,HS16,C24,F40,T37,V67,tied,qkv_bias,theta=100,rope_factor=8,rope_low=1,"
                   "rope_high=4,rope_original=40", 2, 33, "bfloat16"),
         "values": ("llama:L4,NH4,NKV2,HS16,C24,F40,T37,V67,tied,qk_norm,value_embed", 2, 33, "float32"),
         "documents": ("llama:L2,NH2,NKV1,HS64,C24,F40,T70,V67,window=20,pattern=SL", 2, 70, "bfloat16")}
KINDS = {"parallel": {"block": 1, "norm": 1}, "tied": {"block": 2}, "documents": {"document_end": 3}}


def lively_params(dims):
    """Weights as after training: attention is far from uniform, no bias is 0 and no LayerNorm weight 1."""
    params = {}
    for tensor, name in enumerate(NAMES):
        shape = param_shape(dims, name)
        noise = rand_normal(SEED, tensor, int(np.prod(shape))).reshape(shape)
        if name in ("wte", "wpe"):
            params[name] = noise * np.float32(0.1)
        elif name in ("ln1w", "ln2w", "lnfw", "qnw", "knw"):
            params[name] = 1 + noise * np.float32(0.2)
        elif name.endswith("b"):
            params[name] = noise * np.float32(0.1)
        else:
            params[name] = noise * np.float32(shape[-1] ** -0.5)
    for name in BY_TOKEN:
        params[name][..., dims.V:, :] = 0
    return params


def batch(dims, B, T):
    """Windows of one text, as a loader cuts them. Some tokens come often; the first and the last appear."""
    u = rand_unit(SEED, RAND_SHUFFLE, 99, B * T + 1)
    text = (dims.V * u * u * u).astype(np.int64)
    text[3], text[7], text[-1] = dims.V - 1, 0, dims.V - 1
    return text[:-1].reshape(B, T), text[1:].reshape(B, T)


def write_run(folder):
    V = 97
    for i, count in enumerate((700, 333)):          # 43 + 20 windows; 24 a step, five epochs
        u = rand_unit(SEED, RAND_SHUFFLE, 100 + i, count)
        write_shard(os.path.join(folder, f"run_{i}.bin"), (V * u * u).astype(np.int64))
    flags = {"model": f"L2,NH2,C40,T16,V{V}", "batch_size": 4, "sequence_length": 16, "total_batch_size": 384,
             "learning_rate": 3e-3, "num_iterations": 12, "warmup_iters": 3, "learning_rate_decay_frac": 0.1,
             "weight_decay": 0.1, "grad_clip": 0.5, "seed": 42, "overfit_single_batch": 0}
    args = train_gpt2.parse_arguments([f"--{k}={v}" for k, v in flags.items()]
                                      + [f"--input_bin={folder}/run_?.bin", "--device=cpu"])
    steps = train_gpt2.train(args, *train_gpt2.initial_weights(args), show=lambda line: None)
    ours = ("-e {model} -b {batch_size} -t {sequence_length} -z {total_batch_size} -l {learning_rate} "
            "-k cosine -x {num_iterations} -u {warmup_iters} -q {learning_rate_decay_frac} -c {weight_decay} "
            "--grad-clip {grad_clip} --seed {seed} -v 0 -s 0").format(**flags)
    reference.write_json(os.path.join(folder, "run.json"), {
        "command": COMMAND, "our_flags": ours, "shards": "run_?.bin", "flags": flags,
        "losses": [row["loss"] for row in steps], "norms": [row["norm"] for row in steps],
        "learning_rates": [row["lr"] for row in steps]})


def main():
    folder = sys.argv[1] if len(sys.argv) > 1 else os.path.join(os.path.dirname(__file__), "fixture")
    wanted = sys.argv[2:] or [*CASES, "run"]
    for case, (model, B, T, weights) in CASES.items():
        if case not in wanted:
            continue
        dims = dataclasses.replace(parse_model(model), **KINDS.get(case, {}))
        x, y = batch(dims, B, T)
        made = reference.write(os.path.join(folder, case), dims, lively_params(dims), x, y, hyper=HYPER,
                               command=COMMAND, weights=weights)
        print(case, " ".join(f"{os.path.basename(path)} {os.path.getsize(path)}" for path in made))
    if "run" in wanted:
        write_run(folder)


if __name__ == "__main__":
    main()
