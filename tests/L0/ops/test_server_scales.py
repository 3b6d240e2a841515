"""Block scales of inference engines: their rules restated in torch, bit for bit, on each device."""

import ctypes
import subprocess
from pathlib import Path

import pytest
import torch
from apex_te.op_builder.jit.backends.library import BASE_CXX_ARGS
from apex_te.op_builder.jit.backends.toolchain import find_cxx
from checks import assert_same_bits, codes
from group_layouts import made

from apex_te import Linear, fp8_model_init
from apex_te.fp8.parameter.sharded_write import write_parts
from apex_te.ops import block_quantize as op
from apex_te.ops.block_quantize import block_dequantize, block_quantize
from apex_te.ops.grouped_quantize import block_quantize_groups, block_quantize_matrices
from apex_te.ops.swiglu_block import swiglu_fwd_block
from apex_te.recipe import BlockScaling

E4M3 = torch.float8_e4m3fn
NAN, INF = float("nan"), float("inf")


def engine_cast(x, block_rows, pow2=False):
    """Codes and scales [blocks of rows, blocks of columns] as vLLM's per_token_group_quant has."""
    rows, cols = x.shape
    blocks = x.float().view(rows // block_rows, block_rows, cols // 128, 128)
    amax = blocks.abs().amax((1, 3), keepdim=True).clamp(min=1e-10)
    scale = amax / torch.full_like(amax, 448.0)
    if pow2:
        mantissa, exponent = torch.frexp(scale.clamp(min=1e-10))
        scale = torch.ldexp(torch.ones_like(scale), exponent - (mantissa == 0.5).int())
    made = (blocks / scale).clamp(-448.0, 448.0).to(E4M3)
    return made.view(rows, cols), scale[:, 0, :, 0]


def own_cast(x, block_rows, **options):
    """Codes and scales of ``block_quantize`` in the form of ``engine_cast``."""
    made = block_quantize(x, E4M3, block_rows=block_rows, columnwise=False, **options)
    scale = made.rowwise_scale_inv.t() if block_rows == 1 else made.rowwise_scale_inv
    return made.rowwise, scale[: x.shape[0] // block_rows, : x.shape[1] // 128].contiguous()


def values(rows, cols, dtype, seed):
    """Rows of any size, from 1e-14 to 1e30, in which values span 12 octaves."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, cols, generator=generator)
    x *= torch.exp2(-12 * torch.rand(rows, cols, generator=generator))
    largest = 3e4 if dtype is torch.float16 else 1e30
    sizes = torch.exp(torch.empty(rows // 128, 1).uniform_(-32, 69, generator=generator))
    return (x.view(-1, 128 * cols) * sizes).clamp(-largest, largest).view(rows, cols).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("block_rows", [1, 128])
@pytest.mark.parametrize("count", [2, pytest.param(200, marks=pytest.mark.long)])
def test_equals_the_casts_of_engines(device, block_rows, dtype, count):
    """10^6 values, 10^8 in the long form; with powers of two, too."""
    for seed in range(count):
        x = values(512, 1024, dtype, seed).to(device)
        assert_same_bits(own_cast(x, block_rows, scales="server"), engine_cast(x, block_rows))
        pow2 = own_cast(x, block_rows, scales="pow2", eps=448e-10)
        assert_same_bits(pow2, engine_cast(x, block_rows, pow2=True))


@pytest.mark.parametrize("block_rows", [1, 128])
@pytest.mark.parametrize("through", [torch.float32, torch.bfloat16])
def test_a_released_weight_is_cast_to_itself(device, block_rows, through):
    """Scales that are any numbers are those of the decoded weight, unlike with "fp32"."""
    weight = (torch.randn(1024, 1024) * 0.02).bfloat16().to(device)
    released = block_quantize(weight, E4M3, block_rows=block_rows, scales="server")
    decoded = block_dequantize(*released[:2], block_rows=block_rows, dtype=through)
    again = block_quantize(decoded, E4M3, block_rows=block_rows, scales="server")
    assert_same_bits(again[:2], released[:2])
    other = block_quantize(decoded, E4M3, block_rows=block_rows, scales="fp32")
    assert not torch.equal(other.rowwise_scale_inv, released.rowwise_scale_inv)


@pytest.mark.parametrize(
    ("amax", "scale"),
    [
        (0.0, 1e-10 / 448),
        (2.0**-140, 1e-10 / 448),
        (9e-11, 1e-10 / 448),
        (1e-3, 1e-3 / 448),
        (449.0, 449.0 / 448),
        (1e30, 1e30 / 448),
        (torch.finfo(torch.float32).max, torch.finfo(torch.float32).max / 448),
        (INF, INF),
        (NAN, 1.0),
    ],
)
def test_edges(device, amax, scale):
    x = torch.zeros(256, 256)
    x[129, 130] = -amax
    x[129, 131] = amax / 448
    for block_rows in (1, 128):
        out = block_quantize(x.to(device), E4M3, block_rows=block_rows, scales="server")
        assert_same_bits(out, op.reference(x, E4M3, block_rows=block_rows, scales="server"))
        found = out.rowwise_scale_inv[(1, 129) if block_rows == 1 else (1, 1)].cpu()
        # The quotient of the float32 amax: of doubles it could be rounded twice.
        whole = torch.tensor(max(amax, 1e-10) if amax == amax else amax) / torch.tensor(448.0)
        expected = torch.tensor(scale) if amax in (INF,) or amax != amax else whole
        assert found.item() == expected.item()
        assert found.item() == pytest.approx(scale, rel=1e-6)
        code = codes(out.rowwise)[129, 130].item()
        assert code == {0.0: 0x80, 2.0**-140: 0x80}.get(amax, 0x7F if amax != amax else code)
        if amax >= 1e-3:
            assert code == 0xFE


def test_eps_and_contradictions(device):
    x = torch.full((4, 128), 1e-3, device=device)
    assert own_cast(x, 1, scales="server", eps=448.0)[1].eq(1.0).all()
    for options, error, text in (
        ({"scales": "server", "pow2": False}, ValueError, "pow2 must be None with scales='serv"),
        ({"scales": "pow2", "pow2": False}, ValueError, "pow2 must be None with scales='pow2', "),
        ({"scales": "engine"}, ValueError, "scales must be one of fp32, pow2, server"),
        ({"scales": 2}, TypeError, "scales must be a str or None, got int"),
    ):
        for cast in (
            lambda **given: block_quantize(x, E4M3, **given),
            lambda **given: block_quantize_groups(x, made(4, [4], device), E4M3, **given),
            lambda **given: block_quantize_matrices([x], E4M3, **given),
            lambda **given: swiglu_fwd_block(x, x, E4M3, **given),
        ):
            with pytest.raises(error, match=text):
                cast(**options)


def test_weights_held_in_fp8(device):
    """Written as a whole and in parts they have the bits of an engine's cast, too."""
    values = (torch.randn(384, 256, device=device) * 0.02).bfloat16()
    expected = [codes(engine_cast(values, 128)[0]), engine_cast(values, 128)[1]]
    with fp8_model_init(True, BlockScaling(scales="server")):
        weight = Linear(256, 384, params_dtype=torch.bfloat16, device=device).weight
    with torch.no_grad():
        weight.copy_(values)
    held = [codes(weight.codes()[0]), weight.codes()[1]]
    assert_same_bits(held, expected)
    with torch.no_grad():
        weight.zero_()
    write_parts([weight], [values.flatten()], [0], None)
    assert_same_bits([codes(weight.codes()[0]), weight.codes()[1]], expected)


SWEEP = """
#include "common/numerics/block_rule.h"

// Divisors of all mantissas from `first` on, each `step`th, and elements of all mantissas of `bits`
// bits: how many quotients differ from x / s, at a size of s and of x.
template <int kBytes>
long long differing(int first, int step, int bits, float s_unit, float x_unit) {
  long long count = 0;
  for (uint32_t s = first; s < 1u << 23; s += step) {
    const float scale = apex_te::bits_float(0x3F800000u | s) * s_unit;
    const apex_te::Divisor divisor(scale);
    for (const float x : {0.0f, -0.0f, INFINITY, -INFINITY})
      count += apex_te::float_bits(x) != apex_te::float_bits(divisor.quotient<kBytes>(x));
    for (uint32_t i = 0; i < 1u << bits; ++i) {
      // Of longer mantissas as many, spread over all.
      const uint32_t m = bits < 11 ? i << (23 - bits) : (i * 2654435761u ^ s * 40503u) & 0x7FFFFFu;
      const float x = apex_te::bits_float(0x3F800000u | m) * (i & 1 ? -x_unit : x_unit);
      const float q = x / scale, found = divisor.quotient<kBytes>(x);
      count += apex_te::float_bits(q) != apex_te::float_bits(found);
    }
  }
  return count;
}
extern "C" __attribute__((visibility("default"))) long long sweep(int bytes, int first, int step,
                                                                  int bits, float s, float x) {
  return (bytes == 2 ? differing<2> : differing<4>)(first, step, bits, s, x);
}
"""


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    """Counts quotients of the formula of the CUDA kernels that are not the rounded ones."""
    folder = tmp_path_factory.mktemp("sweep")
    source, library = folder / "sweep.cpp", folder / "sweep.so"
    source.write_text(SWEEP)
    flags = [*BASE_CXX_ARGS, "-O3", "-march=native", "-ffp-contract=off"]
    flags += ["-I", str(Path(__file__).parents[3] / "csrc"), "-shared", "-o", str(library)]
    subprocess.run([*find_cxx(), str(source), *flags], check=True)
    counted = ctypes.CDLL(str(library)).sweep
    counted.restype = ctypes.c_longlong
    counted.argtypes = [ctypes.c_int] * 4 + [ctypes.c_float] * 2
    return counted


# Sizes of scales and elements: the least and the largest of both formats, and one between.
SIZES = [(2.0**-49, 2.0**-34), (2.0**-49, 2.0**-66), (2.0**-8, 2.0), (2.0**118, 2.0**127),
         (2.0**118, 2.0**101)]  # fmt: skip


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("form", ["bfloat16", "float16", "float32"])
def test_the_kernels_quotients_are_rounded_to_nearest(sweep, form, sizes):
    """Of a part of the divisors; the long test takes all."""
    bits, step = {"bfloat16": (7, 13), "float16": (10, 97), "float32": (12, 389)}[form]
    assert sweep(4 if form == "float32" else 2, 5, step, bits, *sizes) == 0


@pytest.mark.long
@pytest.mark.parametrize("form", ["bfloat16", "float16", "float32"])
def test_quotients_by_every_mantissa(sweep, form):
    bits = {"bfloat16": 7, "float16": 10, "float32": 11}[form]
    assert sweep(4 if form == "float32" else 2, 0, 1, bits, 2.0**-8, 1.0) == 0
