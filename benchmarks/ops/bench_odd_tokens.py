"""FP8 producers at row counts that are not multiples of 16, against their speed at the next one.

Both layouts, the columnwise copy padded (``pad_columnwise=True``), bf16 in. Each op runs in turn at
both row counts; beside them its columnwise copy without padding, which is stored by element. An op
that cannot pad its columnwise copy is named and left out.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import harness

from apex_te.ops import activation, bias_gelu, hif8, layer_norm, rms_norm, swiglu
from apex_te.ops.block_quantize import block_quantize
from apex_te.ops.byte_transpose import byte_transpose
from apex_te.ops.cast_transpose import cast_transpose
from apex_te.ops.current_scale import current_scale
from apex_te.ops.mx_quantize import mx_quantize

SHAPES = [(8190, 3584), (4095, 8192), (8190, 4096), (8193, 14336)]
# Of casts with one scale also columns that are not multiples of 16, against the next one.
ODD_COLUMNS = [(8192, 4095), (8190, 4095), (8192, 4090)]
SHIFTED = ("cast_transpose", "cast_transpose + dbias", "current_scale", "hif8", "hif8 current")
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# An op's function, and its call with options for an x [rows, cols].
Producer = tuple[Callable[..., Any], Callable[[torch.Tensor], Callable[..., Any]]]


def producers() -> dict[str, Producer]:
    """The ops that write a columnwise FP8 copy, by name."""
    one = torch.ones(1, device="cuda")

    def norm(function: Any, with_bias: bool, with_residual: bool) -> Any:
        def bound(x: torch.Tensor) -> Callable[..., Any]:
            parameters = [torch.randn_like(x[0]) for _ in range(1 + with_bias)]
            residual = {"residual": torch.randn_like(x)} if with_residual else {}
            amax = torch.zeros(1, device="cuda")
            return lambda **k: function(x, *parameters, 1e-5, one, E4M3, amax=amax, **residual, **k)

        return bound

    def cast(**options: Any) -> Any:
        def bound(x: torch.Tensor) -> Callable[..., Any]:
            amax = torch.zeros(1, device="cuda")
            return lambda **k: cast_transpose(x, one, E5M2, amax=amax, **options, **k)

        return bound

    def gate(x: torch.Tensor) -> torch.Tensor:
        return torch.randn(x.shape[0], 2 * x.shape[1], device="cuda", dtype=x.dtype)

    def swiglu_bwd(x: torch.Tensor) -> Callable[..., Any]:
        both = gate(x)
        return lambda **k: swiglu.swiglu_bwd_fp8(x, both, None, one, E5M2, **k)

    def swiglu_fwd(x: torch.Tensor) -> Callable[..., Any]:
        both = gate(x)
        return lambda **k: swiglu.swiglu_fwd_fp8(both, None, one, E4M3, **k)

    def backward(function: Any, *middle: Any) -> Any:
        def bound(x: torch.Tensor) -> Callable[..., Any]:
            dy = torch.randn_like(x)
            return lambda **k: function(dy, x, *middle, one, E5M2, **k)

        return bound

    def bytes_of(x: torch.Tensor) -> Callable[..., Any]:
        data = cast_transpose(x, one, E4M3, columnwise=False).rowwise
        return lambda **k: byte_transpose(data, **k)

    def blocks(block_rows: int) -> Any:
        return lambda x: lambda **k: block_quantize(x, E4M3, block_rows=block_rows, **k)

    current = hif8.quantize_current
    layer, rms = layer_norm.layer_norm_fwd_fp8, rms_norm.rms_norm_fwd_fp8
    act, act_bwd = activation.activation_fwd_fp8, activation.activation_bwd_fp8
    gelu, gelu_bwd = bias_gelu.bias_gelu_fwd_fp8, bias_gelu.bias_gelu_bwd_fp8
    return {
        "cast_transpose": (cast_transpose, cast()),
        "cast_transpose + dbias": (cast_transpose, cast(with_dbias=True)),
        "current_scale": (current_scale, lambda x: lambda **k: current_scale(x, E4M3, **k)),
        "byte_transpose": (byte_transpose, bytes_of),
        "block_quantize 1x128": (block_quantize, blocks(1)),
        "mx_quantize": (mx_quantize, lambda x: lambda **k: mx_quantize(x, E4M3, **k)),
        "hif8": (hif8.quantize, lambda x: lambda **k: hif8.quantize(x, one, **k)),
        "hif8 current": (current, lambda x: lambda **k: current(x, **k)),
        "layer_norm": (layer, norm(layer, True, False)),
        "layer_norm + residual": (layer, norm(layer, True, True)),
        "rms_norm": (rms, norm(rms, False, False)),
        "rms_norm + residual": (rms, norm(rms, False, True)),
        "gelu": (act, lambda x: lambda **k: act(x, "gelu", one, E4M3, **k)),
        "gelu backward": (act_bwd, backward(act_bwd, "gelu")),
        "bias_gelu": (gelu, lambda x: lambda **k: gelu(x, x[0].clone(), one, E4M3, **k)),
        "bias_gelu backward + dbias": (
            gelu_bwd,
            lambda x: lambda **k: gelu_bwd(x, x, None, one, E5M2, with_dbias=True, **k),
        ),
        "swiglu": (swiglu.swiglu_fwd_fp8, swiglu_fwd),
        "swiglu backward": (swiglu.swiglu_bwd_fp8, swiglu_bwd),
    }


def measure(name: str, producer: Producer, rows: int, cols: int) -> dict[str, Any]:
    """One row: the op at ``rows`` padded, at the next multiple of 16, and without padding."""
    bound = producer[1]
    x = harness.normal(rows, cols)
    whole = harness.normal(rows + -rows % 16, cols + -cols % 16)
    odd, even = bound(x), bound(whole)
    padded, multiple, plain = harness.paired_us(
        [lambda: odd(pad_columnwise=True), lambda: even(pad_columnwise=True), odd], repeats=30
    )
    return {
        "function": name,
        "shape": f"{rows}x{cols}",
        **padded,
        "next multiple us": multiple["us"],
        "of next multiple": multiple["us"] / padded["us"],
        "not padded us": plain["us"],
        "of next multiple, not padded": multiple["us"] / plain["us"],
    }


def rows() -> Iterator[harness.Row]:
    for name, producer in producers().items():
        if "pad_columnwise" not in inspect.signature(producer[0]).parameters:
            print(f"{name}: has no padded columnwise copy")
            continue
        shapes = SHAPES + (ODD_COLUMNS if name in SHIFTED else [])
        for shape in shapes:
            yield measure(name, producer, *shape)


if __name__ == "__main__":
    table = harness.run("odd_tokens", rows())
    tokens = set(map(harness.text_of, SHAPES))
    least = min(row["of next multiple"] for row in table if row["shape"] in tokens)
    print(f"least of next multiple: {least:.3f}")
