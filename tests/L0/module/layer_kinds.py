"""Two or three layers of each kind of FP8 module, and batches for them whose amaxes move."""

import contextlib

import torch

from apex_te.module.attention.multihead import MultiheadAttention
from apex_te.module.grouped.linear import GroupedLinear
from apex_te.module.layer_norm_linear import LayerNormLinear
from apex_te.module.layer_norm_mlp import LayerNormMLP
from apex_te.module.linear import Linear
from apex_te.module.transformer_layer import TransformerLayer

TOKENS, BATCH, HEADS = 16, 2, 4
SPLITS = [7, 0, 20, 5]


class Layers(torch.nn.Module):
    """Layers one after the other: what one frees may become another's weight."""

    def __init__(self, layers, splits=None):
        super().__init__()
        self.layers = torch.nn.ModuleList(layers)
        self.splits = splits

    def forward(self, x, is_first_microbatch=None):
        rest = () if self.splits is None else (self.splits,)
        for layer in self.layers:
            x = layer(x, *rest, is_first_microbatch=is_first_microbatch)
        return x


def build(kind, device):
    """Layers of a kind in the dtype that is quick on ``device``."""
    options = {"params_dtype": dtype_on(device), "device": device}
    width = width_on(device)
    splits, count = None, 2
    torch.manual_seed(3)

    def make():
        if kind == "MultiheadAttention":
            attention = {"attention_dropout": 0.0, "input_layernorm": True}
            return MultiheadAttention(width, HEADS, **attention, **options)
        if kind == "TransformerLayer":
            dropouts = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
            return TransformerLayer(width, width, HEADS, **dropouts, **options)
        if kind.startswith("GroupedLinear"):
            return GroupedLinear(len(SPLITS), width, width, **options)
        return PLAIN[kind](width, width, **options)

    if kind == "Linear":
        count = 3
    elif kind == "GroupedLinear":
        splits = SPLITS
    elif kind == "GroupedLinear, tensor":
        splits = torch.tensor(SPLITS, dtype=torch.int32, device=device)
    return Layers([make() for _ in range(count)], splits)


PLAIN = {"Linear": Linear, "LayerNormLinear": LayerNormLinear, "LayerNormMLP": LayerNormMLP}
KINDS = (
    *PLAIN, "GroupedLinear", "GroupedLinear, tensor", "MultiheadAttention", "TransformerLayer",
)  # fmt: skip


def dtype_on(device):
    return torch.bfloat16 if device.type == "cuda" else torch.float32


@contextlib.contextmanager
def repeatable(device, kind="attention"):
    """Where ``kind`` attends on a GPU: by kernels whose gradients can be repeated."""
    attends = kind in ("MultiheadAttention", "TransformerLayer", "attention")
    if device.type == "cuda" and attends:
        torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def width_on(device):
    return 128 if device.type == "cuda" else 32


def shape_of(kind, device):
    attends = kind in ("MultiheadAttention", "TransformerLayer")
    return (*((TOKENS, BATCH) if attends else (TOKENS * BATCH,)), width_on(device))


def sample(shape, device):
    return torch.randn(shape).to(device, dtype_on(device)).requires_grad_()


def draw(shape, device, steps, microbatches):
    """Inputs and output gradients whose amaxes grow and shrink, so that scales always move."""
    torch.manual_seed(5)
    batches = torch.randn(steps, microbatches, 2, *shape)
    batches *= torch.rand(steps, microbatches, 2, *[1] * len(shape)).mul(6).sub(3).exp2()
    return batches.to(device, dtype_on(device))


def with_repeatable_core(module, device):
    """Returns ``module`` with a repeatable core of its attention on a GPU.

    The gradients of PyTorch's attention kernels differ there from run to run.
    """
    for part in module.modules():
        if isinstance(part, MultiheadAttention) and torch.device(device).type == "cuda":
            part.core_attention.forward = mixed
    return module


def mixed(q, k, v, *args, **kwargs):
    """Mixes heads element by element, which gives the same bits each time."""
    repeats = q.shape[-2] // k.shape[-2]

    def grown(t):
        return t.unsqueeze(-2).expand(*t.shape[:-1], repeats, t.shape[-1]).flatten(-3, -2)

    return ((q * 0.5 + grown(k)).tanh() * grown(v)).flatten(-2)
