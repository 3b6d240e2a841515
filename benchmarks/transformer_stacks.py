"""Transformer layers of one shape from PyTorch, apex_te and Transformer Engine, and their steps."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import apex_te
from apex_te import recipe
from apex_te.ops import dense_gemm_swiglu

DTYPE = torch.bfloat16
RECIPES: dict[str, recipe.Recipe | None] = {
    "bf16": None,
    "delayed": recipe.DelayedScaling(),
    "tensorwise": recipe.CurrentScaling(),
    "blockwise": recipe.BlockScaling(),
    "blockwise 1x128": recipe.BlockScaling(wgrad_input="1x128"),
}
SHAPES: dict[str, dict[str, Any]] = {
    "Llama-3-8B": {"hidden": 4096, "ffn": 14336, "heads": 32, "groups": 8, "llama": True},
    "GPT": {"hidden": 4096, "ffn": 16384, "heads": 32, "groups": 32, "llama": False},
}
TRANSFORMER_ENGINE = "Transformer Engine"
Autocast = Callable[[], contextlib.AbstractContextManager[Any]]


def recipes(*names: str) -> dict[str, recipe.Recipe | None]:
    return {name: RECIPES[name] for name in names}


def _arguments(
    hidden: int, ffn: int, heads: int, groups: int, llama: bool, **options: Any
) -> dict[str, Any]:
    """Returns arguments of a layer; Llama: RMSNorm, SwiGLU, no bias, grouped queries."""
    return {
        "hidden_size": hidden,
        "ffn_hidden_size": ffn,
        "num_attention_heads": heads,
        "num_gqa_groups": groups,
        "normalization": "RMSNorm" if llama else "LayerNorm",
        "activation": "swiglu" if llama else "gelu",
        "bias": not llama,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "self_attn_mask_type": "causal",
        "fuse_qkv_params": True,
        "attn_input_format": "bshd",
        "params_dtype": DTYPE,
        "device": "cuda",
        **options,
    }


def layer(**shape: Any) -> torch.nn.Module:
    torch.manual_seed(0)
    return apex_te.TransformerLayer(**_arguments(**shape))


class Plain(torch.nn.Module):
    """Transformer layer of PyTorch's own modules, of the shape of the FP8 layer that is timed."""

    def __init__(self, hidden: int, ffn: int, heads: int, groups: int, llama: bool) -> None:
        super().__init__()
        norm = torch.nn.RMSNorm if llama else torch.nn.LayerNorm
        bias, size = not llama, hidden // heads
        self.split = (heads * size, groups * size, groups * size)
        self.size, self.grouped, self.llama = size, heads != groups, llama
        self.norm1, self.norm2 = norm(hidden, 1e-5), norm(hidden, 1e-5)
        self.qkv = torch.nn.Linear(hidden, sum(self.split), bias)
        self.proj = torch.nn.Linear(hidden, hidden, bias)
        self.fc1 = torch.nn.Linear(hidden, ffn * (2 if llama else 1), bias)
        self.fc2 = torch.nn.Linear(ffn, hidden, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(self.norm1(x)).split(self.split, -1)
        q, k, v = (p.unflatten(-1, (-1, self.size)).transpose(1, 2) for p in parts)
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.grouped)
        x = x + self.proj(out.transpose(1, 2).flatten(-2))
        hidden = self.fc1(self.norm2(x))
        if self.llama:
            gate, up = hidden.chunk(2, -1)
            return x + self.fc2(F.silu(gate) * up)
        return x + self.fc2(F.gelu(hidden, approximate="tanh"))


def torchao_layer(**shape: Any) -> torch.nn.Module:
    """Makes PyTorch's layer with torchao's tensorwise FP8 training, to be compiled."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    torch.manual_seed(0)
    config = Float8LinearConfig.from_recipe_name("tensorwise")
    plain = Plain(**shape).to("cuda", DTYPE)
    return torch.compile(convert_to_float8_training(plain, config=config))


def transformer_engine() -> Any:
    """Returns Transformer Engine's package for torch; None, and says why, if it cannot be used."""
    try:
        import transformer_engine.pytorch as te
    except Exception as error:  # its own libraries fail in many ways
        print(f"{TRANSFORMER_ENGINE} is not measured: {type(error).__name__}: {error}")
        return None
    return te


def their_autocast(te: Any, key: str) -> Autocast | None:
    """Returns Transformer Engine's context for one of ``RECIPES``; None if it has none."""
    from transformer_engine.common import recipe as theirs

    if key == "bf16":
        return contextlib.nullcontext
    kinds = {"delayed": "Delayed", "tensorwise": "Float8Current", "blockwise": "Float8Block"}
    kind = getattr(theirs, f"{kinds.get(key)}Scaling", None)
    if kind is None:
        return None
    made = kind()
    if hasattr(te, "autocast"):
        return lambda: te.autocast(enabled=True, recipe=made)
    return lambda: te.fp8_autocast(enabled=True, fp8_recipe=made)


def their_layer(te: Any, **shape: Any) -> torch.nn.Module:
    torch.manual_seed(0)
    return te.TransformerLayer(**_arguments(**shape))


def our_autocast(scaling: recipe.Recipe | None, **options: Any) -> Autocast:
    """Returns apex_te's context for a recipe; None is bf16."""
    return lambda: apex_te.fp8_autocast(scaling is not None, fp8_recipe=scaling, **options)


def step(
    module: torch.nn.Module, autocast: Autocast, size: tuple[int, ...], **options: Any
) -> Callable[[], None]:
    """Returns a forward and backward on random data of ``size``, gradients dropped before."""
    x = torch.randn(*size, device="cuda", dtype=DTYPE, requires_grad=True)
    dy = torch.randn_like(x)
    parameters = list(module.parameters())

    def run() -> None:
        x.grad = None
        for parameter in parameters:
            parameter.grad = None
        with autocast():
            y = module(x, **options)
        y.backward(dy)

    return run


def peak_bytes(run: Callable[[], Any], module: torch.nn.Module) -> tuple[int, int]:
    """Returns what is allocated at a step's peak and before it, without parameters' gradients."""
    for parameter in module.parameters():
        parameter.grad = None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated(), before


def with_fused_swiglu(fused: bool, run: Callable[[], None]) -> Callable[[], None]:
    """Returns a step whose MLPs have SwiGLU or GELU in products' epilogues, always or never."""
    sizes = ("_MIN_ROWS", "_MIN_DEPTH", "_MIN_WORK")

    def step() -> None:
        before = {name: getattr(dense_gemm_swiglu, name) for name in ("is_active", *sizes)}
        try:
            dense_gemm_swiglu.is_active = fused
            for name in sizes:
                setattr(dense_gemm_swiglu, name, 0)
            run()
        finally:
            for name, value in before.items():
                setattr(dense_gemm_swiglu, name, value)

    return step
