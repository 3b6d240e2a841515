"""Small latent attention modules, and the same in plain PyTorch from their parameters."""

import torch
from attention_cases import exact_attention, torchs_attention
from torch.nn import functional as F

from apex_te import MultiLatentAttention
from apex_te.ops.rope import reference as rotated

# None is a power of two or fills a block; a head is 12 + 8 elements, a value 10.
HIDDEN, HEADS, Q, KV, N, P, V = 40, 4, 24, 20, 12, 8, 10
TOKENS, BATCH = 5, 2
SHAPES = {"sbhd": (TOKENS, BATCH, HIDDEN), "bshd": (BATCH, TOKENS, HIDDEN)}
YARN = {"rotary_scaling_factor": 40.0, "mscale": 0.707, "mscale_all_dim": 1.0}


def build(q_lora_rank=Q, **options):
    """A module with no parameter at its initial value."""
    torch.manual_seed(3)
    module = MultiLatentAttention(HIDDEN, HEADS, q_lora_rank, KV, N, P, V, **options)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.empty(parameter.shape).uniform_(-0.3, 0.3).to(parameter))
            else:
                parameter.copy_(torch.randn(parameter.shape) * parameter.shape[1] ** -0.5)
    return module


def plain(p, x, freqs=None, hidden=None, device="cpu", **options):
    """The module's result from parameters ``p`` by name, in their dtype; [s, b, h] or [b, s, h]."""

    def norm(x, prefix):
        gamma = p[f"{prefix}weight"] + (1 if options.get("zero_centered_gamma") else 0)
        if f"{prefix}bias" in p:
            return F.layer_norm(x, x.shape[-1:], gamma, p[f"{prefix}bias"], 1e-6)
        return F.rms_norm(x, x.shape[-1:], gamma, 1e-6)

    def linear(x, name):
        if f"{name}.layer_norm_weight" in p:
            x = norm(x, f"{name}.layer_norm_")
        return F.linear(x, p[f"{name}.weight"], p.get(f"{name}.bias"))

    layout = options.get("qkv_format", "sbhd")
    if "norm.weight" in p:
        x = norm(x, "norm.")
    if "linear_q_proj.weight" in p:
        q = linear(x, "linear_q_proj")
        latent, pe = linear(x, "linear_kv_down_proj").split([KV, P], -1)
    else:
        q, latent, pe = linear(x, "linear_qkv_down_proj").split([Q, KV, P], -1)
        q = linear(q, "linear_q_up_proj")
    q = q.unflatten(-1, (-1, N + P))
    kv = linear(latent, "linear_kv_up_proj").unflatten(-1, (-1, N + V))
    pe = pe.unsqueeze(-2)
    scale = (N + P) ** -0.5
    if "mscale" in options:
        log = torch.tensor(options["rotary_scaling_factor"]).double().log().item() / 10
        both = [log * options[name] + 1 for name in ("mscale", "mscale_all_dim")]
        scale *= both[1] ** 2
    if freqs is not None:
        how = {"layout": layout, "interleaved": options.get("rotary_pos_interleaved", True)}
        factor = both[0] / both[1] if "mscale" in options else 1.0
        q = torch.cat((q[..., :N], rotated(q[..., N:], freqs, **how) * factor), -1)
        pe = rotated(pe, freqs, **how) * factor
    k = torch.cat((kv[..., :N], pe.expand(*kv.shape[:-1], P)), -1)
    order = (1, 2, 0, 3) if layout == "sbhd" else (0, 2, 1, 3)
    q, k, v = (t.permute(order) for t in (q * scale * (N + P) ** 0.5, k, kv[..., N:]))
    if hidden is None:
        hidden = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)
    if x.dtype in (torch.float16, torch.bfloat16):
        out = torchs_attention(q, k, v, hidden, device)
    else:
        out = exact_attention(q, k, v, hidden)
    out = out.permute((2, 0, 1, 3) if layout == "sbhd" else (0, 2, 1, 3)).flatten(2)
    return linear(out, "linear_proj")
