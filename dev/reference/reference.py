"""Reference files: a model, what PyTorch makes of it on one batch, how far apart PyTorch's own types are.

write() makes PREFIX_model.bin, PREFIX_tensors.bin and PREFIX.json. Truth is torch float32 with attention
written out and TF32 off, run from exactly the weights in the model file. All errors are |a - b| / |b|
(Frobenius) of one table row, layers together.

Of the family Llama, logits, loss and gradients are those of float64, rounded once, and the errors of float32
and of the 16-bit types are against them. Keys of the JSON:

    losses, norms           loss before, and norm before clipping, of each of 10 AdamW steps on the batch
    losses_float64          the same steps in float64: how well the float32 losses are determined at all
    hyper                   learning rate (constant), betas, eps, weight decay (2-D tensors), gradient clip
    float32_grad_error      float32 against float64
    bfloat16_grad_error     pure bf16 PyTorch (SDPA) against float32, both from the same bf16-rounded weights
    bfloat16_total_error    the same gradients against float32 from the unrounded weights: the tensors file
    float16_*               likewise; the gradients were scaled by float16_loss_scale
    autocast_grad_error     bf16 autocast (weights float32) against float32
    *_logits_error          max |d| / rms(reference)

`weights` says to what the weights in the model file were rounded: "bfloat16" makes it version 5, "float16"
stays version 3. A type whose rounding changes nothing has equal _grad_error and _total_error; then the
tensors file is the truth to hold a 16-bit build against.
"""
import contextlib
import json
import os
import math

import numpy as np
import torch

from formats import NAMES, round_params, whole_file, write_checkpoint, write_tensors
from gpt2 import (get_grads, load_params, make_optimizer, new_model, setup_device, to_numpy, undropped,
                  update, versions)

HYPER = ("learning_rate", "beta1", "beta2", "eps", "weight_decay", "grad_clip")
STEPS = 10
NOTES = ["the gradient of the key part of qkvb is zero in exact arithmetic: softmax ignores a constant",
         "rows of wte from V on and rows of wpe from T on have zero gradient"]


# ---- the two measures used everywhere ----
def as_double(a):
    return torch.as_tensor(np.asarray(a) if isinstance(a, np.ndarray) else a).double()


def relative_error(a, b):
    """|a - b| / |b|; NaN anywhere gives NaN, which fails every bound written as `err <= tol`."""
    a, b = as_double(a), as_double(b)
    distance, size = float((a - b).norm()), float(b.norm())
    return float("%.4g" % (distance / size)) if size > 0 else (0.0 if distance == 0 else math.inf)


def grad_errors(a, b):
    return {name: relative_error(a[name], b[name]) for name in NAMES}


def logits_error(a, b):
    a, b = as_double(a), as_double(b)
    return float("%.4g" % ((a - b).abs().max() / b.square().mean().sqrt()))


# ---- one forward and backward ----
def run(dims, params, x, y, dtype, device, sdpa=False, loss_scale=1.0, autocast=False, micro_steps=1,
        dropped=undropped):
    """(logits, loss, grads) of one batch: tensors on the device, at least float32.

    With micro_steps > 1 the rows are split evenly and .grad accumulates, in the dtype of the weights.
    `dropped` is gpt2.py's; it knows the rows of the whole batch."""
    model = new_model(dims, device, sdpa).to(dtype)
    load_params(model, params)
    xt, yt = batch_tensors(x, y, device)
    logits, total = [], 0.0
    for xs, ys in zip(xt.chunk(micro_steps), yt.chunk(micro_steps)):
        with torch.autocast(device, torch.bfloat16) if autocast else contextlib.nullcontext():
            out, loss = model(xs, ys, dropped)
        (loss * (loss_scale / micro_steps)).backward()
        logits.append(out.detach() if out.dtype == torch.float64 else out.detach().float())
        total += loss.item() / micro_steps
        del out, loss
    grads = get_grads(model)
    return torch.cat(logits), total, {name: g / loss_scale for name, g in grads.items()}


def batch_tensors(x, y, device):
    return tuple(torch.from_numpy(np.ascontiguousarray(a, dtype=np.int64)).to(device) for a in (x, y))


def run_float16(dims, params, x, y, device, dropped=undropped):
    """Pure fp16 at the largest loss scale that does not overflow."""
    scale = 65536.0
    while scale >= 1.0:
        logits, loss, grads = run(dims, params, x, y, torch.float16, device, sdpa=True, loss_scale=scale,
                                  dropped=dropped)
        if all(torch.isfinite(g).all() for g in grads.values()):
            return scale, logits, loss, grads
        scale /= 2
    raise SystemExit("error: the fp16 gradients overflow at every loss scale")


def optimizer_steps(dims, params, x, y, dtype, device, hyper):
    """Losses and norms of STEPS AdamW steps on one batch at a constant learning rate."""
    model = new_model(dims, device, sdpa=False).to(dtype)
    load_params(model, params)
    optimizer = make_optimizer(model, hyper)
    xt, yt = batch_tensors(x, y, device)
    losses, norms = [], []
    for _ in range(STEPS):
        loss = model(xt, yt)[1]
        loss.backward()
        losses.append(loss.item())
        norms.append(update(model, optimizer, hyper["grad_clip"]))
    return losses, norms


# ---- the files ----
def write_json(path, data):
    """One top-level key per line, so that a small scanner can read it too."""
    rows = ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in data.items())
    with whole_file(path) as f:
        f.write(f"{{\n{rows}\n}}\n".encode())


def write(prefix, dims, params, x, y, hyper, device="cpu", command="", weights="float32"):
    """Writes the files; returns their names."""
    os.makedirs(os.path.dirname(prefix) or ".", exist_ok=True)
    setup_device(device)
    if weights != "float32":
        params = round_params(params, weights)
    logits, loss, grads = run(dims, params, x, y, torch.float32, device)
    exact_logits, exact_loss, exact = run(dims, params, x, y, torch.float64, device)
    info = {"command": command, "model": dims.text(), "weights": weights, "B": x.shape[0], "T": x.shape[1],
            "versions": versions(device), "notes": [] if dims.is_llama else NOTES, "hyper": hyper,
            "loss": exact_loss if dims.is_llama else loss}
    if dims.document_end >= 0:
        info["document_end"] = dims.document_end
    info["losses"], info["norms"] = optimizer_steps(dims, params, x, y, torch.float32, device, hyper)
    info["float32_logits_error"] = logits_error(logits, exact_logits)
    info["float32_loss_error"] = abs(loss - exact_loss)
    info["float32_grad_error"] = grad_errors(grads, exact)
    if dims.is_llama:
        logits, loss, grads = exact_logits, exact_loss, exact
    del exact_logits, exact
    exact_steps = optimizer_steps(dims, params, x, y, torch.float64, device, hyper)
    info["losses_float64"], info["norms_float64"] = exact_steps
    add_low_types(info, dims, params, x, y, device, logits, grads)
    made = [prefix + "_model.bin", prefix + "_tensors.bin", prefix + ".json"]
    write_checkpoint(made[0], dims, params, version=5 if weights == "bfloat16" else 3)
    write_tensors(made[1], dims, x, y, logits.cpu().numpy(), loss, to_numpy(grads))
    write_json(made[2], info)
    return made


def add_low_types(info, dims, params, x, y, device, logits, grads):
    """Errors of PyTorch's 16-bit types, the yardstick for ours."""
    for kind, dtype in (("bfloat16", torch.bfloat16), ("float16", torch.float16)):
        rounded = round_params(params, kind)
        same_weights = all(np.array_equal(rounded[name], params[name]) for name in NAMES)
        base_logits, base = logits, grads
        if not same_weights:
            base_logits, _, base = run(dims, rounded, x, y, torch.float32, device)
        if kind == "float16":
            info["float16_loss_scale"], low_logits, _, low = run_float16(dims, rounded, x, y, device)
        else:
            low_logits, _, low = run(dims, rounded, x, y, dtype, device, sdpa=True)
        info[kind + "_logits_error"] = logits_error(low_logits, base_logits)
        info[kind + "_grad_error"] = grad_errors(low, base)
        info[kind + "_total_error"] = grad_errors(low, grads)
    low_logits, _, low = run(dims, params, x, y, torch.float32, device, sdpa=True, autocast=True)
    info["autocast_logits_error"] = logits_error(low_logits, logits)
    info["autocast_grad_error"] = grad_errors(low, grads)
