"""FP8 producers at row counts that are not multiples of 16, against their speed at the next one.

Both layouts, the columnwise copy padded (``pad_columnwise=True``), bf16 in. Each op runs in turn at
both row counts; beside them its columnwise copy without padding, which is stored by element. An op
that cannot pad its columnwise copy is named and left out.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import harness
import torch

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
Producer = Callable[[torch.Tensor], partial[Any]]  # the op's call for an x [rows, cols]


def producers() -> dict[str, Producer]:
    """The ops that write a columnwise FP8 copy, by name."""
    one, amax = torch.ones(1, device="cuda"), {"amax": torch.zeros(1, device="cuda")}
    dbias = {"with_dbias": True}
    call, like, current = partial, torch.randn_like, hif8.quantize_current
    layer, rms = layer_norm.layer_norm_fwd_fp8, rms_norm.rms_norm_fwd_fp8
    act, act_bwd = activation.activation_fwd_fp8, activation.activation_bwd_fp8
    gelu, gelu_bwd = bias_gelu.bias_gelu_fwd_fp8, bias_gelu.bias_gelu_bwd_fp8
    gated, gated_bwd = swiglu.swiglu_fwd_fp8, swiglu.swiglu_bwd_fp8

    def norm(function: Any, params: int, x: torch.Tensor, **more: Any) -> partial[Any]:
        return call(function, x, *like(x[:params]), 1e-5, one, E4M3, **amax, **more)

    def gate(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([like(x), like(x)], 1)

    def codes(x: torch.Tensor) -> torch.Tensor:
        return cast_transpose(x, one, E4M3, columnwise=False).rowwise

    return {
        "cast_transpose": lambda x: call(cast_transpose, x, one, E5M2, **amax),
        "cast_transpose + dbias": lambda x: call(cast_transpose, x, one, E5M2, **amax, **dbias),
        "current_scale": lambda x: call(current_scale, x, E4M3),
        "byte_transpose": lambda x: call(byte_transpose, codes(x)),
        "block_quantize 1x128": lambda x: call(block_quantize, x, E4M3, block_rows=1),
        "mx_quantize": lambda x: call(mx_quantize, x, E4M3),
        "hif8": lambda x: call(hif8.quantize, x, one),
        "hif8 current": lambda x: call(current, x),
        "layer_norm": lambda x: norm(layer, 2, x),
        "layer_norm + residual": lambda x: norm(layer, 2, x, residual=like(x)),
        "rms_norm": lambda x: norm(rms, 1, x),
        "rms_norm + residual": lambda x: norm(rms, 1, x, residual=like(x)),
        "gelu": lambda x: call(act, x, "gelu", one, E4M3),
        "gelu backward": lambda x: call(act_bwd, like(x), x, "gelu", one, E5M2),
        "bias_gelu": lambda x: call(gelu, x, x[0].clone(), one, E4M3),
        "bias_gelu backward + dbias": lambda x: call(gelu_bwd, x, x, None, one, E5M2, **dbias),
        "swiglu": lambda x: call(gated, gate(x), None, one, E4M3),
        "swiglu backward": lambda x: call(gated_bwd, x, gate(x), None, one, E5M2),
    }


def measure(name: str, producer: Producer, rows: int, cols: int) -> dict[str, Any]:
    """One row: the op at ``rows`` padded, at the next multiple of 16, and without padding."""
    x = harness.normal(rows, cols)
    whole = harness.normal(rows + -rows % 16, cols + -cols % 16)
    odd, even = producer(x), producer(whole)
    pad = {"pad_columnwise": True}
    calls = [partial(odd, **pad), partial(even, **pad), odd]
    padded, multiple, plain = harness.paired_us(calls, repeats=30)
    return {
        "function": name,
        "shape": f"{rows}x{cols}",
        **padded,
        "next multiple us": multiple["us"],
        "of next multiple": multiple["us"] / padded["us"],
        "not padded us": plain["us"],
        "of next multiple, not padded": multiple["us"] / plain["us"],
    }


def sums(rows: list[harness.Row]) -> dict[str, float]:
    tokens = set(map(harness.text_of, SHAPES))
    ratios = [row["of next multiple"] for row in rows if row["shape"] in tokens]
    return {"least of next multiple": round(min(ratios), 3)}


@harness.case("odd_tokens", sums=sums)
def rows() -> Iterator[harness.Row]:
    sample = harness.normal(16, 16)
    for name, producer in producers().items():
        if "pad_columnwise" not in inspect.signature(producer(sample)).parameters:
            print(f"{name}: has no padded columnwise copy")
            continue
        shapes = SHAPES + (ODD_COLUMNS if name in SHIFTED else [])
        for shape in shapes:
            yield measure(name, producer, *shape)
