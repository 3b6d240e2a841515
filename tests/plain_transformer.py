"""Attention blocks and Transformer layers in plain PyTorch from the modules' own parameters."""

import torch
from attention_cases import assert_layer_matches, exact_attention, torchs_attention
from torch.nn import functional as F

from apex_te.module.attention.multihead import MultiheadAttention
from apex_te.module.transformer_layer import TransformerLayer
from apex_te.ops.rope import reference as rotated

HIDDEN, FFN, HEADS, GROUPS, SIZE = 32, 48, 4, 2, 8
SHAPES = {"sbhd": (5, 2, HIDDEN), "bshd": (2, 5, HIDDEN)}
ACTIVATIONS = {
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "swiglu": lambda x: F.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1],
    "geglu": lambda x: F.gelu(x.chunk(2, -1)[0], approximate="tanh") * x.chunk(2, -1)[1],
}


def build_attention(**options):
    """A small MultiheadAttention with no parameter at its initial value."""
    return _randomized(MultiheadAttention(HIDDEN, HEADS, **_defaults(options)), 0.3)


def build_layer(**options):
    """A small TransformerLayer with no parameter at its initial value."""
    options.setdefault("hidden_dropout", 0.0)
    return _randomized(TransformerLayer(HIDDEN, FFN, HEADS, **_defaults(options)), 0.2)


def _defaults(options):
    return {"attention_dropout": 0.0, "num_gqa_groups": GROUPS, **options}


def _randomized(module, std):
    with torch.no_grad():
        for name, p in module.named_parameters():
            if p.is_meta:
                continue
            if name.endswith("bias"):
                p.uniform_(-0.5, 0.5)
            elif p.dim() == 1:  # gammas
                p.add_(torch.empty_like(p).uniform_(-0.3, 0.3))
            else:
                torch.nn.init.normal_(p, 0, std)
    return module


class Plain:
    """Runs on ``parameters`` (name -> tensor) in their dtype.

    ``options``: the module's constructor arguments besides sizes.
    """

    device = torch.device("cpu")  # of the module that is compared

    def __init__(self, parameters, heads, groups, size, layout="sbhd", **options):
        self.p = parameters
        self.heads, self.groups, self.size, self.layout = heads, groups, size, layout
        self.options = options

    def norm(self, x, prefix):
        gamma = self.p[f"{prefix}weight"] + (1 if self.options.get("zero_centered_gamma") else 0)
        if self.options.get("normalization") == "RMSNorm":
            return F.rms_norm(x, x.shape[-1:], gamma, 1e-5)
        return F.layer_norm(x, x.shape[-1:], gamma, self.p[f"{prefix}bias"], 1e-5)

    def linear(self, x, prefix):
        return F.linear(x, self.p[f"{prefix}weight"], self.p.get(f"{prefix}bias"))

    def projections(self, x, prefix, repeats):
        """Heads (queries,) keys, values of a fused or split projection."""
        names = ("query", "key", "value") if repeats else ("key", "value")
        if f"{prefix}.{names[-1]}_weight" in self.p:
            parts = [self.linear(x, f"{prefix}.{name}_") for name in names]
        else:
            whole = self.linear(x, f"{prefix}.")
            counts = (repeats, 1, 1) if repeats else (1, 1)
            if self.options.get("qkv_weight_interleaved", True):
                heads = whole.unflatten(-1, (self.groups, repeats + 2, self.size))
                parts = [part.flatten(-3) for part in heads.split(counts, -2)]
            else:
                parts = whole.split([n * self.groups * self.size for n in counts], -1)
        return [part.unflatten(-1, (-1, self.size)) for part in parts]

    def attention(self, x, prefix="", hidden=None, other=None, freqs=None, qk_norm=None):
        """x [s, b, h] or [b, s, h]; hidden broadcasts over [b, heads, sq, sk]; also the norm."""
        normed, source = None, x
        first = "qkv" if other is None else "query_layer"
        if f"{prefix}layernorm_{'qkv' if other is None else 'query'}.layer_norm_weight" in self.p:
            first = "layernorm_qkv" if other is None else "layernorm_query"
            normed = source = self.norm(x, f"{prefix}{first}.layer_norm_")
        repeats = self.heads // self.groups
        if other is None:
            q, k, v = self.projections(source, f"{prefix}{first}", repeats)
        else:
            name = "query_" if f"{prefix}{first}.query_weight" in self.p else ""
            q = self.linear(source, f"{prefix}{first}.{name}").unflatten(-1, (-1, self.size))
            k, v = self.projections(other, f"{prefix}key_value", 0)

        def turn(q, k):
            if freqs is None:
                return q, k
            options = {
                "layout": self.layout,
                "interleaved": self.options.get("rotary_pos_interleaved", False),
            }
            return rotated(q, freqs, **options), rotated(k, freqs, **options)

        if qk_norm is not None and self.options.get("qk_norm_before_rope"):
            q, k = turn(qk_norm(q, f"{prefix}q_norm."), qk_norm(k, f"{prefix}k_norm."))
        else:
            q, k = turn(q, k)
            if qk_norm is not None:
                q, k = qk_norm(q, f"{prefix}q_norm."), qk_norm(k, f"{prefix}k_norm.")
        order = (1, 2, 0, 3) if self.layout == "sbhd" else (0, 2, 1, 3)
        heads = [t.permute(order) for t in (q, k, v)]
        if hidden is None:
            n, m = heads[0].shape[2], heads[1].shape[2]
            hidden = torch.arange(m) > torch.arange(n)[:, None]
        if x.dtype in (torch.float16, torch.bfloat16):
            out = torchs_attention(*heads, hidden, self.device)
        else:
            out = exact_attention(*heads, hidden)
        back = (2, 0, 1, 3) if self.layout == "sbhd" else (0, 2, 1, 3)
        return self.linear(out.permute(back).flatten(2), f"{prefix}proj."), normed

    def mlp(self, x, prefix="layernorm_mlp."):
        normed = self.norm(x, f"{prefix}layer_norm_")
        activation = ACTIVATIONS[self.options.get("activation", "gelu")]
        return self.linear(
            activation(self.linear(normed, f"{prefix}fc1_")), f"{prefix}fc2_"
        ), normed

    def layer(self, x, hidden=None, other=None, other_hidden=None, freqs=None):
        """The whole layer, in evaluation mode."""
        post = self.options.get("apply_residual_connection_post_layernorm")
        last = self.options.get("output_layernorm")
        out, normed = self.attention(x, "self_attention.", hidden, freqs=freqs)
        if self.options.get("parallel_attention_mlp"):
            return x + out + self.mlp(x)[0]
        x = out + (normed if post and not last else x)
        if other is not None:
            if other_hidden is None:
                other_hidden = torch.zeros(1, 1, 1, 1, dtype=torch.bool)
            out, normed = self.attention(x, "inter_attention.", other_hidden, other)
            x = out + (normed if post else x)
        out, normed = self.mlp(x)
        x = out + (normed if post else x)
        return self.norm(x, "layernorm.") if last else x


def compare(module, call, plain, *inputs, grad=None):
    """``call(module, *inputs)`` against ``plain(parameters, *inputs)``: result and all gradients.

    ``inputs`` and what ``plain`` gives lie on the CPU. In 16 bits five draws count together where
    one is not enough: of few elements one says little.
    """
    draws = [_results(module, call, plain, inputs, grad)]
    try:
        _check(*draws)
    except AssertionError:
        if draws[0][0][1].dtype is torch.float32:
            raise
        for _ in range(4):
            drawn = [t.flatten()[torch.randperm(t.numel())].view(t.shape) for t in inputs]
            draws.append(_results(module, call, plain, drawn, grad))
        _check(*draws)


def _check(*draws):
    for each in zip(*draws, strict=True):
        label, *results = each[0][0], *(torch.stack([e[i] for e in each]) for i in (1, 2, 3))
        try:
            assert_layer_matches(*results)
        except AssertionError as error:
            raise AssertionError(f"{label}: {error}") from error


def _results(module, call, plain, inputs, grad):
    """For each result its label, and values of the module, in float64 and in plain PyTorch."""
    device = Plain.device = next(module.parameters()).device
    leaves = [t.detach().to(device).requires_grad_() for t in inputs]
    out = call(module, *leaves)
    grad = torch.randn(out.shape).to(out.dtype) / 4 if grad is None else grad
    names = [name for name, _ in module.named_parameters()]
    actual = torch.autograd.grad(out, [*leaves, *module.parameters()], grad.to(device))

    def run(dtype):
        parameters = {
            name: p.detach().cpu().to(dtype).requires_grad_()
            for name, p in module.named_parameters()
        }
        tensors = [t.detach().cpu().to(dtype).requires_grad_() for t in inputs]
        expected = plain(parameters, *tensors)
        return [expected, *torch.autograd.grad(
            expected, [*tensors, *parameters.values()], grad.to(dtype)
        )]  # fmt: skip

    exact, same = run(torch.float64), run(out.dtype)
    labels = ["output", *(f"input {i}" for i in range(len(inputs))), *names]
    return list(zip(labels, [out, *actual], exact, same, strict=True))
