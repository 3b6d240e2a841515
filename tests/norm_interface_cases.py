"""Tests of layer_norm's and rms_norm's interface: what both refuse, compile, capture and repeat."""

import checks
import pytest
import torch
from checks import FP8, assert_as_good_as_torch, needs_cuda, needs_memory, one
from norm_cases import EPS, NormBase

from apex_te.ops.reference_codec import encode_fp8


class NormInterfaceCases(NormBase):
    @pytest.mark.parametrize("shape", [(0, 16), (16, 0), (0, 0), (0, 129), (2, 0, 3)], ids=str)
    def test_empty(self, device, shape):
        cols = shape[-1]
        x = torch.empty(shape, device=device, requires_grad=True)
        params = [
            torch.ones(cols, device=device, requires_grad=True) for _ in range(1 + self.has_bias)
        ]
        y = self.function()(x, *params, EPS)
        assert y.shape == shape
        y.sum().backward()
        assert x.grad.shape == shape
        assert all(torch.equal(p.grad, torch.zeros_like(p)) for p in params)
        rows, amax = x.detach().flatten(0, -2), one(3, device)
        for transposed in (True, False):
            out = self.function("_fwd_fp8")(
                rows, *params, EPS, one(4, device), FP8[0], columnwise=transposed, amax=amax
            )
            assert out.y.rowwise.shape == rows.shape
            assert out.y.scale_inv.item() == 0.25
            assert amax.item() == 3

    @pytest.mark.parametrize(
        ("change", "error", "message"),
        [
            ({"x": torch.zeros(2, 4).double()}, TypeError,
             "x must have dtype float32, float16 or bfloat16, got float64"),
            ({"x": torch.zeros(())}, ValueError, "x must have at least 1 dimension, got shape []"),
            ({"weight": torch.zeros(5)}, ValueError, "weight must have shape [4], got [5]"),
            ({"weight": torch.zeros(4).half()}, TypeError,
             "weight must have dtype float32, got float16"),
            ({"weight": 1.0}, TypeError, "weight must be a torch.Tensor, got float"),
            ({"residual": torch.zeros(2, 5)}, ValueError,
             "residual must have shape [2, 4], got [2, 5]"),
            ({"residual": torch.zeros(2, 4).half()}, TypeError,
             "residual must have dtype float32, got float16"),
        ],
    )  # fmt: skip
    def test_rejects(self, change, error, message):
        args = {"x": torch.zeros(2, 4), "weight": torch.zeros(4), "residual": None, **change}
        bias = [torch.zeros(4)] if self.has_bias else []
        with pytest.raises(error) as raised:
            self.function()(args["x"], args["weight"], *bias, EPS, residual=args["residual"])
        assert message in str(raised.value)

    @pytest.mark.parametrize(
        ("change", "error", "message"),
        [
            ({"fp8_dtype": torch.bfloat16}, TypeError, "fp8_dtype must be float8_e4m3fn"),
            ({"scale": torch.ones(2)}, ValueError, "scale must have one element, got [2]"),
            ({"amax": torch.ones(1).double()}, TypeError, "amax must have dtype float32"),
        ],
    )
    def test_fwd_fp8_rejects(self, change, error, message):
        x, *params = self.make(2, 4, torch.float32)
        options = {"scale": torch.ones(1), "fp8_dtype": FP8[0], **change}
        with pytest.raises(error) as raised:
            self.function("_fwd_fp8")(x, *params, EPS, **options)
        assert message in str(raised.value)

    def test_bwd_rejects(self):
        x, *params = self.make(3, 4, torch.float32)
        rest = self.statistics(x, params)
        with pytest.raises(ValueError, match=r"x must have shape \[2, 4\], got \[3, 4\]"):
            self.function("_bwd")(x[:2], x, *rest)
        with pytest.raises(ValueError, match=r"rstd must have shape \[3\], got \[2\]"):
            self.function("_bwd")(x, x, *rest[:-1], rest[-1][:2])
        with pytest.raises(TypeError, match="d_residual must have dtype float32, got float16"):
            self.function("_bwd")(x, x, *rest, d_residual=x.half())

    def test_portable_gives_same_bits(self):
        call = f"""
import torch
from apex_te.ops import {self.name} as op
has_bias = {self.has_bias}
def run():
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        torch.manual_seed(0)
        x, dy = torch.randn(70, 203).to(dtype), torch.randn(70, 203).to(dtype)
        params = [torch.randn(203).to(dtype) for _ in range(1 + has_bias)]
        out = op.{self.name}_fwd(x, *params, 1e-5, residual=dy)
        yield from (t for t in out if t is not None)
        for fp8 in (torch.float8_e4m3fn, torch.float8_e5m2):
            out8 = op.{self.name}_fwd_fp8(x, *params, 1e-5, torch.ones(1), fp8)
            yield from out8.y
        stats = (out.mean, out.rstd) if has_bias else (out.rstd,)
        grads = op.{self.name}_bwd(dy, out.residual_sum, params[0], *stats, d_residual=x)
        yield from (t for t in grads if t is not None)
"""
        checks.assert_portable_gives_same_bits(call)

    @needs_cuda
    def test_device_mismatch_is_named(self):
        x, *params = self.make(2, 8, torch.float32)
        with pytest.raises(ValueError, match="weight must be on cuda:0 like x, got cpu"):
            self.function("_fwd")(x.cuda(), *params, EPS)

    @needs_cuda
    @pytest.mark.parametrize("shape", [(524304, 4096), (65552, 32784)], ids=str)
    def test_more_than_2_to_31_elements(self, shape):
        needs_memory(32)
        rows, cols = shape
        x = torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_()
        params = [torch.randn(cols, device="cuda").bfloat16() for _ in range(1 + self.has_bias)]
        ends = [slice(b, b + 16) for b in (0, rows // 2, rows - 16)]
        on_cpu = [p.cpu() for p in params]
        out = self.function("_fwd")(x, *params, EPS)
        for part in ends:
            exact = self.exact(x[part].cpu(), *on_cpu).y
            same = self.op.reference(x[part].cpu(), *on_cpu, EPS).y
            assert_as_good_as_torch(out.y[part], exact, same)
        rest = self.statistics(x, params)
        grads = self.function("_bwd")(out.y, x, *rest)
        for part in ends:
            dy, leaf = out.y[part].cpu(), x[part].cpu()
            found = []
            for dtype in (torch.float64, torch.bfloat16):
                t = leaf.to(dtype).requires_grad_()
                y = self.op.reference(t, *(p.to(dtype) for p in on_cpu), EPS).y
                found.append(torch.autograd.grad(y, t, dy.to(dtype))[0])
            assert_as_good_as_torch(grads.dx[part], *found)
        del grads, out
        fp8 = self.function("_fwd_fp8")(x, *params, EPS, one(2, "cuda"), FP8[0]).y
        for part in ends:
            floats = [p.float() for p in on_cpu]
            y = self.op.reference(x[part].float().cpu(), *floats, EPS).y
            codes = encode_fp8(y * 2, FP8[0])
            checks.assert_adjacent_codes(fp8.rowwise[part], codes)
            columns = fp8.columnwise.view(torch.uint8)[:, part].contiguous().view(FP8[0])
            checks.assert_adjacent_codes(columns, codes.t().contiguous())
