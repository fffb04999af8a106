"""The second family in plain PyTorch: Llama, Qwen3 and their kin. gpt2.py makes, fills and trains it:

    model = new_model(parse_model("m12"))               # of gpt2.py, as its load_params, get_grads, update
    logits, loss = model(x, y)                          # logits (B,T,V), softcapped already

All norms are RMSNorms. No layer has a bias, but Qwen2's qkv. qkvw has the rows of q's heads, then k's, then
v's; query head h reads key head h / (NH / NKV). fcw has the rows of a gated activation's gate, then those it
acts on.

NanoChat turns heads the other way, and norms q and k behind that. With one half of q's and k's rows negated
the first is our rotation, and the products q k stay; a rotation keeps the length of a head, so its norm
without weights may stand before it, as here.
"""
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

from formats import GATE_CHANNELS, rope_divisors, value_layers


def undropped(x, place):
    return x


def rms_norm(dims, size, weights=True):
    return nn.RMSNorm(size, eps=dims.eps, elementwise_affine=weights and dims.norm_weights)


def rotation(dims):
    """{type: (2,maxT,HS/2)} cosines and sines of t theta^(-2i/HS), or of what scaling makes of this
    frequency, in double and rounded once."""
    frequencies = dims.theta ** (-2 * torch.arange(dims.HS // 2, dtype=torch.float64) / dims.HS)
    frequencies = frequencies / torch.from_numpy(rope_divisors(dims)).to(frequencies)
    angles = torch.arange(dims.maxT, dtype=torch.float64)[:, None] * frequencies
    table = torch.stack([angles.cos(), angles.sin()])
    return {torch.float64: table, torch.float32: table.float()}


def rotate(x, table):
    """Turns (B,heads,T,HS) by its positions: element i goes with i + HS/2. In the table's type."""
    cos, sin = table
    first, second = x.to(cos.dtype).chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).type_as(x)


def documents_of(dims, x):
    """(B,T): the number, in its row, of the document that a token of x belongs to. None: a row is one."""
    return (x == dims.document_end).cumsum(1) if dims.document_end >= 0 else None


def hidden(T, window, documents, device):
    """(T,T), or (B,1,T,T) with documents, true where query t does not see key u. window: how many it sees, 0:
    all up to its own."""
    ones = torch.ones(T, T, dtype=torch.bool, device=device)
    unseen = ones.triu(1) | ones.tril(-window) if window else ones.triu(1)
    if documents is None:
        return unseen
    return unseen | (documents[:, None, :, None] != documents[:, None, None, :])


def visible(T, window, documents, device):
    """What scaled_dot_product_attention is told of this."""
    if window or documents is not None:
        return {"attn_mask": ~hidden(T, window, documents, device)}
    return {"is_causal": True}


class Attention(nn.Module):
    """Of layer l"""

    def __init__(self, dims, sdpa, l):
        super().__init__()
        self.dims, self.sdpa, self.window = dims, sdpa, dims.window_of(l)
        self.embeds = l in value_layers(dims)
        if self.embeds:
            self.vew = nn.Parameter(torch.empty(dims.Vp, dims.NKV * dims.HS))
            self.vegw = nn.Parameter(torch.empty(dims.NKV, GATE_CHANNELS))
        self.qkv = nn.Linear(dims.C, (dims.NH + 2 * dims.NKV) * dims.HS, bias=dims.qkv_bias)
        self.proj = nn.Linear(dims.NH * dims.HS, dims.C, bias=False)
        self.qn, self.kn = ((rms_norm(dims, dims.HS) if dims.qk_norm else nn.Identity()) for _ in "qk")

    def values_of(self, x, tokens):
        """(B,NKV,T,HS) what value embeddings add to v: rows by token, each head times a gate of its own that
        reads the first GATE_CHANNELS channels."""
        rows = F.embedding(tokens, self.vew).unflatten(-1, (self.dims.NKV, self.dims.HS))
        gates = 3 * torch.sigmoid(F.linear(x[..., :GATE_CHANNELS].to(self.vegw.dtype), self.vegw))
        return (gates.unsqueeze(-1) * rows).transpose(1, 2)

    def forward(self, x, table, documents, tokens):
        B, T, _ = x.shape
        NH, NKV, HS = self.dims.NH, self.dims.NKV, self.dims.HS
        heads = self.qkv(x).view(B, T, NH + 2 * NKV, HS).transpose(1, 2)
        q, k, v = heads.split([NH, NKV, NKV], dim=1)
        if self.embeds:
            v = v + self.values_of(x, tokens).type_as(v)
        q, k = rotate(self.qn(q), table).type_as(v), rotate(self.kn(k), table).type_as(v)
        if self.sdpa:
            seen = visible(T, self.window, documents, x.device)
            out = F.scaled_dot_product_attention(q, k, v, enable_gqa=NH != NKV, **seen)
        else:
            k, v = (z.repeat_interleave(NH // NKV, dim=1) for z in (k, v))
            scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(HS))
            unseen = hidden(T, self.window, documents, x.device)
            out = F.softmax(scores.masked_fill(unseen, float("-inf")), dim=-1) @ v
        return self.proj(out.transpose(1, 2).reshape(B, T, NH * HS))


ACTS = {"gelu": lambda x: F.gelu(x, approximate="tanh"), "swiglu": lambda gate, up: F.silu(gate) * up,
        "relu2": lambda x: F.relu(x).square()}


class Block(nn.Module):
    def __init__(self, dims, sdpa, l):
        super().__init__()
        self.dims = dims
        self.ln1 = rms_norm(dims, dims.C)
        self.att = Attention(dims, sdpa, l)
        self.ln2 = rms_norm(dims, dims.C)
        self.fc = nn.Linear(dims.C, dims.F * (1 + dims.gated), bias=False)
        self.fcproj = nn.Linear(dims.F, dims.C, bias=False)

    def mlp(self, x):
        return self.fcproj(ACTS[self.dims.mlp](*self.fc(x).chunk(1 + self.dims.gated, dim=-1)))

    def forward(self, x, table, documents, tokens, dropped, place):
        x = x + dropped(self.att(self.ln1(x), table, documents, tokens), place)
        return x + dropped(self.mlp(self.ln2(x)), place + 1)


class Llama(nn.Module):
    """dropped(x, place): as GPT2's."""

    def __init__(self, dims, sdpa=True):
        super().__init__()
        self.dims = dims
        self.wte = nn.Parameter(torch.empty(dims.Vp, dims.C))
        self.blocks = nn.ModuleList(Block(dims, sdpa, l) for l in range(dims.L))
        self.embed_norm = rms_norm(dims, dims.C, weights=False) if dims.embed_norm else nn.Identity()
        self.lnf = rms_norm(dims, dims.C)
        self.headw = self.wte if dims.tied else nn.Parameter(torch.empty(dims.Vp, dims.C))
        self.rotation = rotation(dims)              # no buffers: .to(bfloat16) would round them

    def forward(self, x, y, dropped=undropped):
        wide = torch.float64 if self.wte.dtype == torch.float64 else torch.float32
        table = self.rotation[wide][:, :x.shape[1]]
        h = dropped(self.embed_norm(F.embedding(x, self.wte)), 0)
        for l, block in enumerate(self.blocks):
            h = block(h, table, documents_of(self.dims, x), x, dropped, 1 + 2 * l)
        # the product runs over all Vp rows, which keeps it aligned; the padding is cut off unseen
        logits = F.linear(self.lnf(h), self.headw)[..., :self.dims.V]
        capped = logits.to(wide)
        if self.dims.softcap:
            logits = capped = self.dims.softcap * torch.tanh(capped / self.dims.softcap)
        return logits, F.cross_entropy(capped.reshape(-1, self.dims.V), y.reshape(-1), ignore_index=-1)

    def loss(self, x, y):
        """What a training step compiles: logits that are not returned need not be stored."""
        return self(x, y)[1]
