"""GPT-2 in plain PyTorch, the twin of train_gpt2.cu: LayerNorm eps 1e-5, tanh GELU, tied head, padded wte.
The optimizers and all else that does not ask what a layer computes serve llama.py's family, too.

    model = new_model(dims); load_params(model, init_params(dims, seed))
    logits, loss = model(x, y)                          # logits (B,T,V): padding columns never exist outside
    loss.backward(); grads = get_grads(model)           # {"wte": (Vp,C), "qkvw": (L,3C,C), ...}
"""
import math
import os

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")    # cuBLAS sums in one order

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

from formats import BY_TOKEN, NAMES, PARAMS, dropout_factors, layers_of, param_shape
from llama import Llama, documents_of, hidden, undropped, visible


class Attention(nn.Module):
    def __init__(self, dims, sdpa, window):
        super().__init__()
        self.NH, self.sdpa, self.window = dims.NH, sdpa, window
        self.qkv = nn.Linear(dims.C, 3 * dims.C)
        self.proj = nn.Linear(dims.C, dims.C)

    def forward(self, x, documents):
        B, T, C = x.shape
        q, k, v = (z.view(B, T, self.NH, C // self.NH).transpose(1, 2) for z in self.qkv(x).split(C, dim=2))
        if self.sdpa:
            out = F.scaled_dot_product_attention(q, k, v, **visible(T, self.window, documents, x.device))
        else:
            scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(C // self.NH))
            unseen = hidden(T, self.window, documents, x.device)
            weights = F.softmax(scores.masked_fill(unseen, float("-inf")), dim=-1)
            out = weights @ v
        return self.proj(out.transpose(1, 2).reshape(B, T, C))


def new_norm(dims):
    return (nn.LayerNorm, nn.RMSNorm)[dims.norm](dims.C, eps=1e-5)


class Block(nn.Module):
    """One layer: dims.block says what it reads; dropped(x, place) is attention's, place + 1 the MLP's."""

    def __init__(self, dims, sdpa, window):
        super().__init__()
        self.kind = dims.block
        self.ln1 = new_norm(dims)
        self.att = Attention(dims, sdpa, window)
        if self.kind < 2:
            self.ln2 = new_norm(dims)
        self.fc = nn.Linear(dims.C, 4 * dims.C)
        self.fcproj = nn.Linear(4 * dims.C, dims.C)

    def mlp(self, x):
        return self.fcproj(F.gelu(self.fc(x), approximate="tanh"))

    def forward(self, x, documents=None, dropped=undropped, place=1):
        first = self.ln1(x)
        attention = self.att(first, documents)
        if self.kind == 0:
            x = x + dropped(attention, place)
            return x + dropped(self.mlp(self.ln2(x)), place + 1)
        second = first if self.kind == 2 else self.ln2(x)
        return x + dropped(attention, place) + dropped(self.mlp(second), place + 1)


class GPT2(nn.Module):
    """Also what is not GPT-2: dims.block and dims.norm. dropped(x, place) is x with the mask of a place of
    the model: 0 the embedding's, 1 + 2 l and 2 + 2 l those of layer l's attention and MLP."""

    def __init__(self, dims, sdpa=True):
        super().__init__()
        self.dims = dims
        self.wte = nn.Parameter(torch.empty(dims.Vp, dims.C))
        self.wpe = nn.Parameter(torch.empty(dims.maxT, dims.C))
        self.blocks = nn.ModuleList(Block(dims, sdpa, dims.window_of(l)) for l in range(dims.L))
        self.lnf = new_norm(dims)

    def forward(self, x, y, dropped=undropped):
        h = dropped(F.embedding(x, self.wte) + self.wpe[:x.shape[1]], 0)
        for l, block in enumerate(self.blocks):
            h = block(h, documents_of(self.dims, x), dropped, 1 + 2 * l)
        # the product runs over all Vp rows, which keeps it aligned; the padding is cut off unseen
        logits = F.linear(self.lnf(h), self.wte)[..., :self.dims.V]
        wide = logits if logits.dtype == torch.float64 else logits.float()
        return logits, F.cross_entropy(wide.reshape(-1, self.dims.V), y.reshape(-1), ignore_index=-1)

    def loss(self, x, y):
        """What a training step compiles: logits that are not returned need not be stored."""
        return self(x, y)[1]


def drop_as_trainer(seed, p, device):
    """A model's `dropped` with the masks of the trainer's first update, for rows of C."""
    def dropped(x, place):
        factors = dropout_factors(seed, 0, place, 0, x.numel() // x.shape[-1], x.shape[-1], p)
        factors = torch.from_numpy(factors.astype(np.float64)).to(device).view(x.shape)
        wide = x.dtype if x.dtype == torch.float64 else torch.float32
        return (x.to(wide) * factors.to(wide)).to(x.dtype)      # the scale is not rounded to 16 bits
    return dropped if p else undropped


def new_model(dims, device="cpu", sdpa=True):
    with torch.device(device):
        return (Llama if dims.is_llama else GPT2)(dims, sdpa)


def tensor_list(model, name):
    """The torch parameters of one table row: one per layer, or a single one; [] where the model lacks it."""
    if math.prod(param_shape(model.dims, name)) == 0:
        return []
    paths = {"ln1w": "ln1.weight", "ln1b": "ln1.bias", "qkvw": "att.qkv.weight", "qkvb": "att.qkv.bias",
             "attprojw": "att.proj.weight", "attprojb": "att.proj.bias", "ln2w": "ln2.weight",
             "ln2b": "ln2.bias", "fcw": "fc.weight", "fcb": "fc.bias", "fcprojw": "fcproj.weight",
             "fcprojb": "fcproj.bias", "qnw": "att.qn.weight", "knw": "att.kn.weight",
             "vew": "att.vew", "vegw": "att.vegw"}
    if name in paths:
        return [model.blocks[l].get_parameter(paths[name]) for l in layers_of(model.dims, name)]
    return [model.get_parameter({"lnfw": "lnf.weight", "lnfb": "lnf.bias"}.get(name, name))]


def load_params(model, params):
    """From {name: float32 array}; converts to the model's own dtype and device."""
    with torch.no_grad():
        for name in NAMES:
            for i, p in enumerate(tensor_list(model, name)):
                array = params[name].reshape((-1,) + p.shape)
                p.copy_(torch.from_numpy(np.ascontiguousarray(array[i])))


def collect(model, pick):
    """{name: tensor on the model's device}, layers stacked; float32, or float64 if the model is."""
    out = {}
    for name in NAMES:
        parts = [pick(p).detach() for p in tensor_list(model, name)]
        stacked = torch.stack(parts or [model.wte.new_empty(0)]).reshape(param_shape(model.dims, name))
        out[name] = stacked if stacked.dtype == torch.float64 else stacked.float()
    return out


def get_grads(model):
    return collect(model, lambda p: p.grad)


def random_params(dims, seed):
    """No tensor is left at 0 or at 1, where a wrong one would not show. Layers weigh so much that greedy text
    does not repeat one token, and that another token in the prompt changes nearly all that follow."""
    generator = torch.Generator().manual_seed(seed)
    wide = 1 / math.sqrt(dims.C)
    sizes = {"wte": 0.02, "wpe": 0.05, "one": 0.1, "zero": 0.1, "normal": 2 * wide,
             "resid": wide / math.sqrt(2 * dims.L)}
    params = {}
    for name, _, _, init, _ in PARAMS:
        values = torch.randn(param_shape(dims, name), generator=generator)
        values = values * sizes.get(name, sizes[init]) + (init == "one")
        if name in BY_TOKEN:
            values[..., dims.V:, :] = 0
        params[name] = values.numpy()
    return params


def get_params(model):
    return to_numpy(collect(model, lambda p: p))


def to_numpy(tensors):
    return {name: t.float().cpu().numpy() for name, t in tensors.items()}


# ---- the optimizer and its schedule ----
def make_optimizer(model, hyper, fused=False, without=()):
    """AdamW; weight decay only on tensors of two dimensions. The embedding and a head of its own have rates
    of their own where hyper has some. Not fused: PyTorch's default for the device."""
    embedding = hyper.get("embedding_lr")
    own = {"wte": embedding, "vew": embedding, "headw": hyper.get("head_lr")}
    groups = {}                                     # few: each is a launch
    for name, _, _, _, decays in PARAMS:
        key = own.get(name) or hyper["learning_rate"], hyper["weight_decay"] if decays else 0.0
        if name not in without:
            groups.setdefault(key, []).extend(tensor_list(model, name))
    groups = [{"params": tensors, "lr": lr, "weight_decay": decay}
              for (lr, decay), tensors in groups.items() if tensors]
    return torch.optim.AdamW(groups, betas=(hyper["beta1"], hyper["beta2"]),
                             eps=hyper["eps"], fused=True if fused else None)


def newton_schulz(x, coefficients, steps, eps):
    """What torch.optim.Muon does in bf16, in the type of x."""
    a, b, c = coefficients
    y = x.T if x.size(0) > x.size(1) else x
    y = y / y.norm().clamp(min=eps)
    for _ in range(steps):
        gram = y @ y.T
        y = a * y + (b * gram + c * gram @ gram) @ y
    return y.T if x.size(0) > x.size(1) else y


class MuonAndAdamW:
    """torch.optim.Muon for the layers' matrices, AdamW for all else, as --optimizer muon divides them: q, k
    and v are three matrices, SwiGLU's gate and what it multiplies are two, so Muon gets parameters that lie
    inside those of the model."""

    @staticmethod
    def taken(d):
        """{name: rows of each of its matrices}"""
        return {"qkvw": [d.NH * d.HS, d.NKV * d.HS, d.NKV * d.HS], "attprojw": [d.C],
                "fcw": [d.F, d.F] if d.gated else [d.F], "fcprojw": [d.C]}

    def __init__(self, model, hyper, fused=False):
        if not hyper["muon_bf16"]:
            torch.optim._muon._zeropower_via_newtonschulz = newton_schulz
        taken = self.taken(model.dims)
        self.parts = [(p, [nn.Parameter(part) for part in p.detach().split(rows)])
                      for name, rows in taken.items() for p in tensor_list(model, name)]
        self.muon = torch.optim.Muon([part for _, parts in self.parts for part in parts], lr=hyper["muon_lr"],
                                     weight_decay=hyper["muon_decay"], momentum=hyper["muon_momentum"])
        self.adamw = make_optimizer(model, hyper, fused, without=taken)
        self.param_groups = self.muon.param_groups + self.adamw.param_groups

    def step(self):
        for p, parts in self.parts:
            for part, grad in zip(parts, p.grad.split([len(part) for part in parts])):
                part.grad = grad
        self.muon.step()
        self.adamw.step()

    def zero_grad(self, set_to_none=True):
        assert set_to_none
        for p, _ in self.parts:
            p.grad = None
        self.muon.zero_grad()
        self.adamw.zero_grad()


def learning_rate(step, steps, peak, warmup, final_fraction):
    """Linear warm-up, then a cosine that reaches peak * final_fraction at `steps` and stays there."""
    if step < warmup:
        return peak * (step + 1) / warmup
    if step >= steps:
        return peak * final_fraction
    progress = (step - warmup) / (steps - warmup)
    low = peak * final_fraction
    return low + 0.5 * (1.0 + math.cos(math.pi * progress)) * (peak - low)


def update(model, optimizer, grad_clip):
    """Clip and step; returns the norm before clipping. A norm that is not finite skips the update."""
    if grad_clip > 0:
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    else:
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    if torch.isfinite(norm):
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return float(norm)


# ---- devices ----
def setup_device(device, tf32=False, deterministic=True):
    if device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("error: --device cuda: PyTorch finds no GPU\nhint: --device cpu")
    torch.backends.cuda.matmul.allow_tf32 = tf32
    torch.backends.cudnn.allow_tf32 = tf32
    # reductions of 16-bit products stay in fp32, as in our kernels
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    torch.use_deterministic_algorithms(deterministic, warn_only=True)


def versions(device):
    out = {"torch": torch.__version__, "numpy": np.__version__, "device": device}
    if device == "cuda":
        out["gpu"] = torch.cuda.get_device_name()
        out["cuda"] = torch.version.cuda
    return out
