"""The quantizers: bandwidth over the floor's bytes, against torch eager and torch.compile.

Floor in bytes an element of bf16: read 2, write 1 for each layout, and its scales: with 1x128
blocks 4 for 128 elements, MX 1/32, rows one each. A current scale reads 2 once more for the amax;
what the second kernel finds in the L2 cache is not subtracted, so a figure may exceed a copy's.
Decoding to bf16: read 1 and the scales, write 2. row_quantize reads x twice for columns, which is
not counted: beyond the L2 cache both copies move 6 bytes for 4, columns alone 5 for 3. An element's
HiF8 encoding takes a product, a shift and a look-up of one byte in shared memory. qkv_cast is
beside copies and a cast of torch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import harness
import torch

from apex_te.module._core.heads import HeadLayout
from apex_te.ops import hif8
from apex_te.ops.block_quantize import block_dequantize, block_quantize
from apex_te.ops.byte_transpose import byte_transpose
from apex_te.ops.cast_transpose import cast_transpose
from apex_te.ops.current_scale import current_scale, tensor_amax
from apex_te.ops.mx_quantize import mx_dequantize, mx_quantize
from apex_te.ops.qkv_cast import qkv_cast_grad, qkv_cast_weight
from apex_te.ops.row_quantize import row_quantize

SHAPES = [(16384, 4096), (16384, 14336), (4096, 4096), (16384, 3584)]
TENSOR_SHAPES = [(16384, 4096), (16384, 14336), (14336, 4096), (4096, 4096), (2048, 4096)]
BYTE_SHAPES = [(16384, 4096), (16384, 14336), (8192, 4096), (4096, 4096), (16383, 4095)]
CAST_SHAPES = [(16384, 4096), (16384, 14336), (14336, 4096), (4096, 4096), (16384, 3584)]
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# Of qkv_cast: Llama-3-8B's, with 8 groups of 4 queries, and GPT's 32 heads.
SIZE, HIDDEN = 128, 4096
BLOCKS = ((1, "1x128"), (128, "128x128"))


def block_codes(x: torch.Tensor, block_rows: int) -> list[torch.Tensor]:
    """The formula in PyTorch, both layouts, for extents that are multiples of 128."""
    out = []
    for t in (x, x.t()):
        blocks = t.reshape(t.shape[0] // block_rows, block_rows, t.shape[1] // 128, 128).float()
        scale = 448.0 / blocks.abs().amax((1, 3), keepdim=True)
        codes = (blocks * scale).clamp(-448, 448).to(E4M3).view(t.shape)
        inverse = (1.0 / scale).squeeze(3).squeeze(1)
        out += [codes, inverse.t().contiguous() if block_rows == 1 else inverse]
    return out


def mx_codes(x: torch.Tensor) -> list[torch.Tensor]:
    """The formula in PyTorch, both layouts, for finite values and multiples of 32."""
    out = []
    for t in (x, x.t()):
        blocks = t.reshape(t.shape[0], t.shape[1] // 32, 32).float()
        bits = (blocks.abs().amax(2) / 448.0).view(torch.int32)
        code = ((bits + 0x7FFFFF) >> 23).clamp(max=254)
        multiplier = ((254 - code) << 23).view(torch.float32)
        codes = (blocks * multiplier[..., None]).clamp(-448, 448).to(torch.float8_e4m3fn)
        out += [codes.view(t.shape), code.to(torch.uint8)]
    return out


def row_codes(x: torch.Tensor) -> list[torch.Tensor]:
    out = []
    for t in (x, x.t()):
        scale_inv = t.abs().amax(1, keepdim=True).float() / 448.0
        out += [(t.float() / scale_inv).clamp(-448, 448).to(E4M3).contiguous(), scale_inv]
    return out


def current_codes(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    amax = x.abs().max().float()
    scale = 448.0 / amax
    codes = (x.float() * scale).clamp(-448, 448).to(E4M3)
    return codes, codes.t().contiguous(), scale, 1.0 / scale


def hif8_codes(x: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Encoding in PyTorch's integer arithmetic, both layouts, for finite values."""
    bits = (x.float() * scale).clamp(-32768.0, 32768.0).view(torch.int32)
    sign = (bits >> 24) & 0x80
    a = bits & 0x7FFFFFFF
    e = ((a >> 23) - 127).abs()
    width = torch.where(e < 4, 3, torch.where(e < 8, 2, torch.where(e < 16, 1, 0)))
    a = a + (1 << (22 - width))
    exponent = (a >> 23) - 127
    e = exponent.abs()
    width = torch.where(e < 4, 3, torch.where(e < 8, 2, 1))
    mantissa = (a & 0x7FFFFF) >> (23 - width)
    negative = (exponent < 0).int()
    base = torch.where(e < 4, 0x20, torch.where(e < 8, 0x40, 0x60))
    first = torch.where(e < 4, 2, torch.where(e < 8, 4, 8))
    code = base + (negative << 4) + ((e - first) << width) + mantissa
    code = torch.where(e == 1, 0x10 + (negative << 3) + mantissa, code)
    code = torch.where(e == 0, 0x08 + mantissa, code)
    code = torch.where(exponent <= -16, (exponent + 23).clamp(min=1), code) | sign
    code = torch.where((bits & 0x7FFFFFFF) < (127 - 23) << 23, 0, code).to(torch.uint8)
    return code, code.t().contiguous()


def peers_of(
    shape: tuple[int, int], layout: str, formula: Callable[..., Any], *args: Any
) -> harness.Peers:
    """The formula as it is and compiled, for both layouts of one shape."""
    return harness.formula_peers(formula, *args) if (shape, layout) == (SHAPES[0], "both") else {}


@harness.case("block_quantize", SHAPES)
def block_rows(shape: tuple[int, int]) -> Iterator[harness.Row]:
    x = harness.normal(*shape)
    n, back = x.numel(), torch.empty_like(x)
    for size, blocks in BLOCKS:
        scales = n // 128 * 4 if size == 1 else 0
        for layout, options in harness.LAYOUTS.items():
            out = block_quantize(x, E4M3, block_rows=size, **options)
            cast = partial(block_quantize, x, E4M3, block_rows=size, out=out, **options)
            peers = peers_of(shape, layout, block_codes, x, size)
            num_bytes = 2 * n + (n + scales) * sum(options.values())
            name = f"block_quantize {blocks} {layout}"
            yield harness.measure(name, shape, num_bytes, cast, peers)
        out = block_quantize(x, E4M3, block_rows=size, columnwise=False)
        decode = partial(block_dequantize, *out[:2], block_rows=size, out=back)
        yield harness.measure(f"block_dequantize {blocks}", shape, 3 * n + scales, decode)


@harness.graph_case("block_quantize")
def small_blocks(x: torch.Tensor) -> harness.Peers:
    calls = {}
    for size, blocks in BLOCKS:
        out = block_quantize(x, E4M3, block_rows=size)
        cast = partial(block_quantize, x, E4M3, block_rows=size, out=out)
        calls[f"block_quantize {blocks} both"] = cast
    decode = partial(block_dequantize, *block_quantize(x, E4M3)[:2], out=torch.empty_like(x))
    return {**calls, "block_dequantize 1x128": decode}


@harness.case("mx_quantize", SHAPES)
def mx_rows(shape: tuple[int, int]) -> Iterator[harness.Row]:
    x = harness.normal(*shape)
    n, back = x.numel(), torch.empty_like(x)
    for layout, options in harness.LAYOUTS.items():
        cast = partial(mx_quantize, x, out=mx_quantize(x, **options), **options)
        peers = peers_of(shape, layout, mx_codes, x)
        num_bytes = 2 * n + (n + n // 32) * sum(options.values())
        yield harness.measure(f"mx_quantize {layout}", shape, num_bytes, cast, peers)
    decode = partial(mx_dequantize, *mx_quantize(x, columnwise=False)[:2], out=back)
    yield harness.measure("mx_dequantize", shape, 3 * n + n // 32, decode)


@harness.graph_case("mx_quantize")
def small_mx(x: torch.Tensor) -> harness.Peers:
    out, back = mx_quantize(x), torch.empty_like(x)
    cast, decode = partial(mx_quantize, x, out=out), partial(mx_dequantize, *out[:2], out=back)
    return {"mx_quantize both": cast, "mx_dequantize": decode}


@harness.case("row_quantize", SHAPES)
def row_rows(shape: tuple[int, int]) -> Iterator[harness.Row]:
    x = harness.normal(*shape)
    scale = torch.rand(shape[1], device=x.device)
    for layout, options in harness.LAYOUTS.items():
        cast = partial(row_quantize, x, E4M3, out=row_quantize(x, E4M3, **options), **options)
        peers = peers_of(shape, layout, row_codes, x)
        scales = 4 * (shape[0] * options["rowwise"] + shape[1] * options["columnwise"])
        num_bytes = x.numel() * (2 + sum(options.values())) + scales
        yield harness.measure(f"row_quantize {layout}", shape, num_bytes, cast, peers)
        if layout == "rowwise":
            scaled = partial(cast, column_scale=scale)
            yield harness.measure("row_quantize of scaled columns", shape, num_bytes, scaled)


@harness.case("current_scale", TENSOR_SHAPES)
def current_rows(shape: tuple[int, int]) -> Iterator[harness.Row]:
    x = harness.normal(*shape)
    n, amax = x.numel(), tensor_amax(x)
    for layout, copies, outputs in harness.layouts(x, E4M3):
        peers = peers_of(shape, layout, current_codes, x)
        cast, name = partial(current_scale, x, E4M3, **outputs), f"current_scale {layout}"
        given = partial(cast, amax=amax)
        yield harness.measure(name, shape, n * (4 + copies), cast, peers)
        yield harness.measure(f"{name}, amax given", shape, n * (2 + copies), given)
    yield harness.measure("tensor_amax", shape, 2 * n, partial(tensor_amax, x))


@harness.graph_case("current_scale")
def small_current(x: torch.Tensor) -> harness.Peers:
    cast = partial(current_scale, x, E4M3)
    return {"current_scale both": cast, "current_scale rowwise": partial(cast, columnwise=False)}


@harness.case("hif8", SHAPES)
def hif8_rows(shape: tuple[int, int]) -> Iterator[harness.Row]:
    x = harness.normal(*shape)
    n, scale = x.numel(), torch.full((1,), 3.1, device="cuda")
    for layout, copies, outputs in harness.layouts(x, torch.uint8):
        peers = peers_of(shape, layout, hif8_codes, x, scale)
        given = partial(hif8.quantize, x, scale, **outputs)
        current = partial(hif8.quantize_current, x, **outputs)
        yield harness.measure(f"hif8 {layout}", shape, n * (2 + copies), given, peers)
        yield harness.measure(f"hif8 current {layout}", shape, n * (4 + copies), current)
    decode = partial(hif8.decode, hif8.encode(x), scale_inv=scale, out=torch.empty_like(x))
    yield harness.measure("hif8 decode", shape, 3 * n, decode)


@harness.graph_case("hif8")
def small_hif8(x: torch.Tensor) -> harness.Peers:
    one = torch.ones(1, device="cuda")
    calls = {"": partial(hif8.quantize, x, one), " current": partial(hif8.quantize_current, x)}
    return {f"hif8{kind} both": call for kind, call in calls.items()}


@harness.case("byte_transpose", BYTE_SHAPES)
def byte_rows(shape: tuple[int, int]) -> Iterator[harness.Row]:
    codes = torch.randint(0, 256, shape, dtype=torch.uint8, device="cuda")
    out = codes.new_empty(shape[::-1])
    peers = {"torch": partial(out.copy_, codes.t())}
    call = partial(byte_transpose, codes, out=out)
    yield harness.measure("byte_transpose", shape, 2 * codes.numel(), call, peers)


@harness.graph_case("byte_transpose")
def small_bytes(x: torch.Tensor) -> harness.Peers:
    return {"byte_transpose": partial(byte_transpose, x.to(E4M3).view(torch.uint8))}


@harness.case("cast_transpose", CAST_SHAPES)
def cast_rows(shape: tuple[int, int]) -> Iterator[harness.Row]:
    x = harness.normal(*shape)
    one, amax = torch.ones(1, device="cuda"), torch.zeros(1, device="cuda")
    scale_inv = torch.empty(1, device="cuda")
    layouts = {name: (copies, outputs) for name, copies, outputs in harness.layouts(x, E4M3)}
    layouts["both + dbias"] = (2, {**layouts["both"][1], "with_dbias": True})
    for name, (copies, options) in layouts.items():
        num_bytes = x.numel() * (2 + copies)
        call = partial(cast_transpose, x, one, E4M3, amax=amax, scale_inv=scale_inv, **options)
        ours, copy = harness.kernel_us(call), harness.copy_us(num_bytes)
        yield {
            "shape": harness.text_of(shape),
            "outputs": name,
            **ours,
            "TB/s": harness.terabytes_per_second(num_bytes, ours["us"]),
            "copy us": copy["us"],
            "of copy": copy["us"] / ours["us"],
        }


Calls = tuple[int, Callable[[], Any], Callable[[], Any]]


def gradient_calls(tokens: int, groups: int, repeats: int, with_dbias: bool) -> Calls:
    """Bytes that a cast of gradients moves, the cast, and torch's way to the same copies."""
    layout = HeadLayout("thd", repeats, groups, SIZE, True)
    heads = [harness.normal(tokens, n, SIZE) for n in (groups * repeats, groups, groups)]
    features = groups * (repeats + 2) * SIZE
    one, amax = torch.ones(1, device="cuda"), torch.zeros(1, device="cuda")
    given: dict[str, Any] = {"amax": amax, "with_dbias": with_dbias}

    def torchs() -> None:
        cast_transpose(layout.joined(heads, (tokens, features)), one, E5M2, **given)

    padded = {"interleaved": True, "pad_columnwise": True}
    ours = partial(qkv_cast_grad, *heads, one, E5M2, **given, **padded)
    return 4 * tokens * features, ours, torchs


def weight_calls(groups: int, repeats: int, columnwise: bool) -> Calls:
    """Bytes that a cast of the weight moves, the cast, and the cast without another order."""
    weight = harness.normal(groups * (repeats + 2) * SIZE, HIDDEN)
    one, amax = torch.ones(1, device="cuda"), torch.zeros(1, device="cuda")
    given: Any = {"columnwise": columnwise, "amax": amax}
    ours = partial(qkv_cast_weight, weight, one, E4M3, repeats=repeats, groups=groups, **given)
    plain = partial(cast_transpose, weight, one, E4M3, **given)
    return (3 + columnwise) * weight.numel(), ours, plain


@harness.case("qkv_cast")
def qkv_rows() -> Iterator[harness.Row]:
    calls: dict[str, Calls] = {}
    cases = itertools.product((8192, 8190), ((8, 4), (32, 1)), (False, True))
    for tokens, (groups, repeats), dbias in cases:
        name = f"gradient {tokens} x {groups} x {repeats + 2}{' + dbias' * dbias}"
        calls[name] = gradient_calls(tokens, groups, repeats, dbias)
    calls["weight 8 x 6, rowwise"] = weight_calls(8, 4, False)
    calls["weight 8 x 6, both"] = weight_calls(8, 4, True)
    for name, (num_bytes, call, other) in calls.items():
        ours = harness.kernel_us(call)
        row = {"case": name, **ours, **harness.rates(num_bytes, ours["us"])}
        yield {**row, "other way us": harness.kernel_us(other)["us"]}
