"""Blocks with the structure, names and maths of Hugging Face's Llama and GPT-2, without it."""

import math

import torch
from torch import nn

LLAMA = "transformers.models.llama.modeling_llama"
GPT2 = "transformers.models.gpt2.modeling_gpt2"


class LlamaRMSNorm(nn.Module):
    def __init__(self, size, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(size) + 0.5)
        self.variance_epsilon = eps

    def forward(self, x):
        h = x.float()
        h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * h.to(x.dtype)


class LlamaMLP(nn.Module):
    def __init__(self, size, inner, bias):
        super().__init__()
        self.gate_proj = nn.Linear(size, inner, bias=bias)
        self.up_proj = nn.Linear(size, inner, bias=bias)
        self.down_proj = nn.Linear(inner, size, bias=bias)
        self.act_fn = nn.SiLU()

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def attention(q, k, v, heads, kv_heads):
    batch, length, _ = q.shape
    q = q.view(batch, length, heads, -1).transpose(1, 2)
    k, v = (t.view(batch, length, kv_heads, -1).transpose(1, 2) for t in (k, v))
    k, v = (t.repeat_interleave(heads // kv_heads, 1) for t in (k, v))
    out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return out.transpose(1, 2).reshape(batch, length, -1)


class LlamaAttention(nn.Module):
    def __init__(self, size, heads, kv_heads, bias):
        super().__init__()
        self.heads, self.kv_heads = heads, kv_heads
        inner = size // heads * kv_heads
        self.q_proj = nn.Linear(size, size, bias=bias)
        self.k_proj = nn.Linear(size, inner, bias=bias)
        self.v_proj = nn.Linear(size, inner, bias=bias)
        self.o_proj = nn.Linear(size, size, bias=bias)

    def forward(self, x):
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        return self.o_proj(attention(q, k, v, self.heads, self.kv_heads))


class LlamaDecoderLayer(nn.Module):
    def __init__(self, size, bias):
        super().__init__()
        self.self_attn = LlamaAttention(size, 4, 2, bias)
        self.mlp = LlamaMLP(size, 3 * size, bias)
        self.input_layernorm = LlamaRMSNorm(size)
        self.post_attention_layernorm = LlamaRMSNorm(size, eps=1e-5)

    def forward(self, x):
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    """Ids [batch, length] to logits; the head shares the embedding's weight."""

    def __init__(self, size=32, vocabulary=24, layers=2, bias=False):
        super().__init__()
        self.embed_tokens = nn.Embedding(vocabulary, size)
        self.layers = nn.ModuleList(LlamaDecoderLayer(size, bias) for _ in range(layers))
        self.norm = LlamaRMSNorm(size)
        self.lm_head = nn.Linear(size, vocabulary, bias=False)
        self.lm_head.weight = self.embed_tokens.weight

    def forward(self, ids):
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


class Conv1D(nn.Module):
    def __init__(self, nf, nx):
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight = nn.Parameter(torch.randn(nx, nf) / math.sqrt(nx))
        self.bias = nn.Parameter(torch.randn(nf) / 10)

    def forward(self, x):
        out = torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight)
        return out.view(*x.shape[:-1], self.nf)


class NewGELUActivation(nn.Module):
    def forward(self, x):
        return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


class GPT2Attention(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.size = size
        self.c_attn = Conv1D(3 * size, size)
        self.c_proj = Conv1D(size, size)

    def forward(self, x):
        q, k, v = self.c_attn(x).split(self.size, dim=2)
        return self.c_proj(attention(q, k, v, 4, 4))


class GPT2MLP(nn.Module):
    def __init__(self, size, dropout):
        super().__init__()
        self.c_fc = Conv1D(4 * size, size)
        self.c_proj = Conv1D(size, 4 * size)
        self.act = NewGELUActivation()
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return self.dropout(self.c_proj(self.act(self.c_fc(x))))


class GPT2Block(nn.Module):
    def __init__(self, size, dropout):
        super().__init__()
        self.ln_1 = nn.LayerNorm(size)
        self.attn = GPT2Attention(size)
        self.ln_2 = nn.LayerNorm(size, eps=1e-6)
        self.mlp = GPT2MLP(size, dropout)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT2Model(nn.Module):
    """Ids [batch, length] to logits; the head shares the embedding's weight."""

    def __init__(self, size=32, vocabulary=24, layers=2, dropout=0.0):
        super().__init__()
        self.wte = nn.Embedding(vocabulary, size)
        self.h = nn.ModuleList(GPT2Block(size, dropout) for _ in range(layers))
        self.ln_f = nn.LayerNorm(size)
        self.lm_head = nn.Linear(size, vocabulary, bias=False)
        self.lm_head.weight = self.wte.weight
        for norm in [m for m in self.modules() if isinstance(m, nn.LayerNorm)]:
            nn.init.uniform_(norm.weight, 0.5, 1.5)
            nn.init.normal_(norm.bias, std=0.1)

    def forward(self, ids):
        x = self.wte(ids)
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


# What the conversion goes by.
for kind in (LlamaRMSNorm, LlamaMLP, LlamaAttention, LlamaDecoderLayer):
    kind.__module__ = LLAMA
for kind in (GPT2Attention, GPT2MLP, GPT2Block):
    kind.__module__ = GPT2
Conv1D.__module__ = "transformers.pytorch_utils"
NewGELUActivation.__module__ = "transformers.activations"
