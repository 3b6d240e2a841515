"""Tests of layer_norm's and rms_norm's arguments: what both refuse, and the largest they take."""

import checks
import pytest
import torch
from checks import FP8, assert_as_good_as_torch, needs_cuda, needs_memory, one
from norm_cases import EPS, NormBase

from apex_te.ops.reference_codec import encode_fp8


class NormInterfaceCases(NormBase):
    def test_rejects_a_scalar(self):
        params = [torch.zeros(4) for _ in range(1 + self.has_bias)]
        with pytest.raises(ValueError, match=r"x must have at least 1 dimension, got shape \[\]"):
            self.function()(torch.zeros(()), *params, EPS)

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
