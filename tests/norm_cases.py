"""The tests that layer_norm and rms_norm have in common; each op's file has a class of them."""

import math

import checks
import pytest
import torch
from checks import DTYPES, FP8, assert_as_good_as_torch, assert_same_bits, in_pairs, needs_cuda, one

from apex_te.ops.reference_codec import encode_fp8

EPS = 1e-5
SHAPES = [
    (1, 1), (37, 7), (65, 8), (17, 127), (129, 129), (33, 256), (40, 1000), (17, 4095), (2, 16392),
    *checks.on_gpus(
        (60, 15), (8, 128), (64, 3584), (48, 4096), (2, 8192), (2, 32768), (1, 131072),
        (531, 1032), (515, 3584),
    ),
]  # fmt: skip
FP8_SHAPES = [
    (1, 1), (17, 129), (64, 8), (48, 256), (144, 264), (16, 4095), (7, 1000),
    *checks.on_gpus(
        (144, 3584), (128, 4096), (32, 8192), (16, 16384), (16, 16392), (528, 1536),
    ),
]  # fmt: skip


def optional(t, device):
    return None if t is None else t.to(device)


class NormCases:
    """`op` is the op's module, `has_bias` whether it centres and has a bias."""

    op = None
    has_bias = False

    @property
    def name(self):
        return self.op.__name__.rpartition(".")[2]

    def function(self, suffix=""):
        return getattr(self.op, self.name + suffix)

    def make(self, rows, cols, dtype, param_dtype=None):
        """x, weight and, if the op has one, bias."""
        x = (torch.randn(rows, cols) * 2 + 0.5).to(dtype)
        params = [torch.randn(cols).to(param_dtype or dtype) for _ in range(1 + self.has_bias)]
        return x, *params

    def exact(self, x, *params, **options):
        return self.op.reference(
            x.double(), *(None if p is None else p.double() for p in params), EPS, **options
        )

    def statistics(self, x, params):
        """The arguments of backward that follow x."""
        out = self.function("_fwd")(x, *params, EPS)
        return (params[0], out.mean, out.rstd) if self.has_bias else (params[0], out.rstd)

    def check_fwd(self, device, x, *params, **options):
        out = self.function("_fwd")(
            x.to(device), *(optional(p, device) for p in params), EPS, **options
        )
        exact = self.exact(x, *params, **options)
        same = self.op.reference(x, *params, EPS, **options)
        assert_as_good_as_torch(out.y, exact.y, same.y)
        self.check_statistics(out, x, exact)
        return out

    def check_statistics(self, out, x, exact):
        """rstd to a few roundings; the mean to that of the values it is the sum of."""
        checks.assert_close_amax(out.rstd, exact.rstd)
        if self.has_bias:
            rounding = 2.0**-22 * x.double().abs().amax(-1)
            assert ((out.mean.cpu().double() - exact.mean).abs() <= rounding).all()

    def check_grads(self, device, x, *params, residual=None, zero_centered_gamma=False):
        """Every gradient of the public function, with the residual's own if there is one."""
        inputs = [x, *params] + ([] if residual is None else [residual])
        dy, d_sum = torch.randn_like(x), torch.randn_like(x)
        options = {"zero_centered_gamma": zero_centered_gamma}

        def leaves(tensors):
            return [t.detach().clone().requires_grad_() for t in tensors]

        ours = leaves([t.to(device) for t in inputs])
        if residual is None:
            y = self.function()(*ours, EPS, **options)
            grads = torch.autograd.grad(y, ours, dy.to(device))
        else:
            y, total = self.function()(*ours[:-1], EPS, residual=ours[-1], **options)
            expected = (x.float() + residual.float()).to(x.dtype)
            assert torch.equal(total.cpu(), expected)
            grads = torch.autograd.grad((y, total), ours, (dy.to(device), d_sum.to(device)))
            x = expected  # what backward has
        found = []
        for cast in (torch.float64, None):
            args = leaves([t if cast is None else t.to(cast) for t in (x, *params)])
            y = self.op.reference(*args, EPS, **options).y
            dx, *others = torch.autograd.grad(y, args, dy.to(y.dtype))
            if residual is not None:
                dx = (dx.to(cast or torch.float32) + d_sum).to(y.dtype)
                others.append(dx)
            found.append([dx, *others])
        for actual, exact, same in zip(grads, *found, strict=True):
            assert_as_good_as_torch(actual, exact, same)

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("shape", SHAPES, ids=str)
    def test_fwd(self, device, poison, shape, dtype):
        self.check_fwd(device, *self.make(*shape, dtype))

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("shape", SHAPES, ids=str)
    def test_bwd(self, device, poison, shape, dtype):
        self.check_grads(device, *self.make(*shape, dtype))

    @pytest.mark.cuda
    @needs_cuda
    @pytest.mark.parametrize(
        ("dtype", "param_dtype"),
        [(torch.float32, None), (torch.bfloat16, None), (torch.bfloat16, torch.float32)],
    )
    @pytest.mark.parametrize(
        ("cols", "repeats"),
        [(256, 16385), (1024, 4097), (1032, 4097), (3584, 1171), (4096, 1025), (5128, 40),
         (8192, 513), (12288, 40), (16384, 257), (32768, 40), (131072, 40),
         (13, 4097), (1001, 1025), (4095, 513), (5001, 40), (16383, 40)],
    )  # fmt: skip
    def test_many_rows(self, poison, cols, repeats, dtype, param_dtype):
        """More rows than a multiprocessor has at a time: each as if it were alone."""
        x, *params = self.make(16, cols, dtype, param_dtype)
        exact, same = self.exact(x, *params), self.op.reference(x, *params, EPS)
        y = self.op.reference(x.float(), *(p.float() for p in params), EPS).y
        many, params = x.cuda().repeat(repeats, 1), [p.cuda() for p in params]

        def check_all_alike(t):
            assert t is None or (t.view(repeats, -1) == t.view(repeats, -1)[0]).all()

        for options in ({}, {"residual": torch.zeros_like(many)}):
            out = self.function("_fwd")(many, *params, EPS, **options)
            assert_as_good_as_torch(out.y[:16], exact.y, same.y)
            for t in out:
                check_all_alike(t)
        for columnwise in (False, True):
            amax = one(0, "cuda")
            out = self.function("_fwd_fp8")(
                many, *params, EPS, one(3.5, "cuda"), FP8[0], columnwise=columnwise, amax=amax
            )
            checks.assert_close_amax(amax, y.abs().max())
            checks.assert_adjacent_codes(out.y.rowwise[:16], encode_fp8(y * 3.5, FP8[0]))
            rows = out.y.rowwise.view(torch.uint8)
            check_all_alike(rows)
            assert not columnwise or torch.equal(rows.t(), out.y.columnwise.view(torch.uint8))

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    @pytest.mark.parametrize("shape", [(40, 1000), (9, 129)], ids=str)
    def test_fp32_params(self, device, poison, shape, dtype):
        self.check_fwd(device, *self.make(*shape, dtype, torch.float32))
        self.check_grads(device, *self.make(*shape, dtype, torch.float32))

    @pytest.mark.parametrize("shape", [(40, 1000), (9, 129), (16, 4096)], ids=str)
    def test_zero_centered_gamma(self, device, shape):
        case = self.make(*shape, torch.bfloat16)
        self.check_fwd(device, *case, zero_centered_gamma=True)
        self.check_grads(device, *case, zero_centered_gamma=True)

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize(
        "shape", [(37, 7), (129, 129), (40, 1000), (48, 4096), (3, 8192), (2, 16392), (4, 24576)],
        ids=str,
    )  # fmt: skip
    def test_residual(self, device, poison, shape, dtype):
        x, *params = self.make(*shape, dtype)
        residual = torch.randn(shape).to(dtype)
        out = self.function("_fwd")(
            x.to(device), *(p.to(device) for p in params), EPS, residual=residual.to(device)
        )
        total = (x.float() + residual.float()).to(dtype)
        assert_same_bits(out.residual_sum, total)
        same = self.op.reference(total, *params, EPS)
        assert_as_good_as_torch(out.y, self.exact(total, *params).y, same.y)
        self.check_grads(device, x, *params, residual=residual)

    def test_only_one_output_used(self, device):
        x, *params = (t.to(device) for t in self.make(6, 64, torch.float32))
        residual = torch.randn_like(x, requires_grad=True)
        y, total = self.function()(x, *params, EPS, residual=residual)
        (grad,) = torch.autograd.grad(total, residual, torch.ones_like(x), retain_graph=True)
        assert torch.equal(grad, torch.ones_like(x))
        (grad,) = torch.autograd.grad(y, residual, torch.ones_like(x))
        alone = self.function("_bwd")(
            torch.ones_like(x), total.detach(), *self.statistics(total.detach(), params)
        )
        assert torch.equal(grad, alone.dx)

    def test_no_params_and_frozen_params(self, device):
        x, *params = self.make(20, 264, torch.bfloat16)
        self.check_fwd(device, x, *[None] * len(params))
        x, *params = (t.to(device) for t in (x, *params))
        x.requires_grad_()
        full = self.function("_bwd")(x.detach(), x.detach(), *self.statistics(x.detach(), params))
        y = self.function()(x, *params, EPS)
        (dx,) = torch.autograd.grad(y, x, x.detach())
        assert torch.equal(dx, full.dx)

    def test_leading_dims_and_layouts(self, device):
        x, *params = self.make(24, 136, torch.float32)
        exact = self.exact(x, *params).y
        same = self.op.reference(x, *params, EPS).y
        params = [p.to(device) for p in params]
        for _, view in checks.layouts(x.to(device)):
            y = self.function()(view, *params, EPS)
            assert y.is_contiguous()
            assert_as_good_as_torch(y, exact, same)
        y = self.function()(x.to(device).view(2, 3, 4, 136).transpose(0, 1), *params, EPS)
        expected = exact.view(2, 3, 4, 136).transpose(0, 1)
        assert_as_good_as_torch(y, expected, same.view(2, 3, 4, 136).transpose(0, 1))
        y = self.function()(x[:1].to(device).expand(5, 136), *params, EPS)
        assert_as_good_as_torch(y, exact[:1].expand(5, 136), same[:1].expand(5, 136))
        y = self.function()(x[0].to(device), *params, EPS)
        assert_as_good_as_torch(y, exact[0], same[0])
        offset = torch.empty(137, device=device)[1:].copy_(params[0])
        y = self.function()(x.to(device), offset, *params[1:], EPS)
        assert_as_good_as_torch(y, exact, same)

    def test_bwd_offset_storage(self, device):
        x, *params = self.make(50, 264, torch.bfloat16)
        exact = x.double().requires_grad_()
        same = x.clone().requires_grad_()
        dy = torch.randn_like(x)
        for leaf in (exact, same):
            options = [p.to(leaf.dtype) for p in params]
            self.op.reference(leaf, *options, EPS).y.backward(dy.to(leaf.dtype))
        x, dy, *params = (t.to(device) for t in (x, dy, *params))
        shifted = torch.empty(dy.numel() + 1, dtype=dy.dtype, device=device)[1:].view(dy.shape)
        shifted.copy_(dy)
        out = self.function("_bwd")(shifted, x, *self.statistics(x, params))
        assert_as_good_as_torch(out.dx, exact.grad, same.grad)

    @in_pairs(fp8=FP8, dtype=DTYPES, shape=FP8_SHAPES)
    def test_fwd_fp8(self, device, poison, shape, dtype, fp8):
        x, *params = self.make(*shape, dtype)
        expected = self.op.reference(x.float(), *(p.float() for p in params), EPS)
        codes = encode_fp8(expected.y * 3.5, fp8)
        exact = self.exact(x, *params)
        x, *params = (t.to(device) for t in (x, *params))
        for rowwise, columnwise in ((True, True), (True, False), (False, True), (False, False)):
            amax = one(0, device)
            out = self.function("_fwd_fp8")(
                x, *params, EPS, one(3.5, device), fp8, rowwise=rowwise, columnwise=columnwise,
                amax=amax,
            )  # fmt: skip
            checks.assert_close_amax(amax, expected.y.abs().max())
            assert out.y.scale_inv.item() == (1 / one(3.5, "cpu")).item()
            assert (out.y.rowwise is None, out.y.columnwise is None) == (
                not rowwise,
                not columnwise,
            )
            if rowwise:
                checks.assert_adjacent_codes(out.y.rowwise, codes)
            if columnwise:
                checks.assert_adjacent_codes(out.y.columnwise, codes.t().contiguous())
            if rowwise and columnwise:
                assert torch.equal(checks.codes(out.y.rowwise).t(), checks.codes(out.y.columnwise))
            self.check_statistics(out, x.cpu(), exact)

    @pytest.mark.cuda
    @needs_cuda
    @pytest.mark.parametrize("with_residual", [False, True])
    @pytest.mark.parametrize(
        ("rows", "dtype", "fp8"),
        [(4097, torch.bfloat16, FP8[0]), (5600, torch.float16, FP8[1]),
         (7112, torch.bfloat16, FP8[1]), (8190, torch.float32, FP8[0])],
    )  # fmt: skip
    @pytest.mark.parametrize(
        "cols",
        [8, 264, 1001, 1016, 2112, 2304, 4095, 4480, 5120, 6144, 7168, 8448, 12288, 16384, 24576],
    )
    def test_fwd_fp8_tiles(self, poison, cols, rows, dtype, fp8, with_residual):
        """Rows that are whole tiles or not, with and without padding; a NaN stays in its row."""
        rows = min(rows, (64 << 20) // cols - rows % 16)
        x, *params = (t.cuda() for t in self.make(rows, cols, dtype))
        options, total = {}, x
        if with_residual:
            options = {"residual": torch.randn(rows, cols, device="cuda").to(dtype)}
            total = (x.float() + options["residual"].float()).to(dtype)
        expected = self.op.reference(total.float(), *(p.float() for p in params), EPS)

        def quantized(x, amax, pads=True):
            return self.function("_fwd_fp8")(
                x, *params, EPS, one(3.5, "cuda"), fp8, pad_columnwise=pads, amax=amax, **options
            )

        amax = one(0, "cuda")
        out = quantized(x, amax)
        checks.assert_close_amax(amax, expected.y.abs().max())
        checks.assert_adjacent_codes(out.y.rowwise, encode_fp8(expected.y * 3.5, fp8))
        torch.testing.assert_close(out.rstd, expected.rstd, rtol=1e-5, atol=0)
        rowwise, columns = (t.view(torch.uint8) for t in (out.y.rowwise, out.y.columnwise))
        assert columns.shape == (cols, rows + -rows % 16)
        assert torch.equal(columns[:, :rows], rowwise.t())
        assert not columns[:, rows:].any()
        if with_residual:
            assert_same_bits(out.residual_sum, total)
        unpadded = quantized(x, amax, pads=False).y
        checks.assert_adjacent_codes(unpadded.rowwise, encode_fp8(expected.y * 3.5, fp8))
        found = (t.view(torch.uint8) for t in (unpadded.rowwise, unpadded.columnwise))
        assert torch.equal(next(found).t(), next(found))
        x[rows // 2, cols // 2] = float("nan")
        out = quantized(x, amax)
        assert torch.isnan(amax).all()
        others = torch.arange(rows, device="cuda") != rows // 2
        assert torch.equal(out.y.rowwise.view(torch.uint8)[others], rowwise[others])
        columns = out.y.columnwise.view(torch.uint8)[:, :rows]
        assert torch.equal(columns, out.y.rowwise.view(torch.uint8).t())
        assert (columns[:, rows // 2] & 0x7F > 0x7C).all()

    @pytest.mark.parametrize("shape", [(48, 1024), (32, 4096), (5, 129)], ids=str)
    def test_fwd_fp8_residual(self, device, poison, shape):
        x, *params = self.make(*shape, torch.bfloat16, torch.float32)
        residual = torch.randn(shape).bfloat16()
        total = (x.float() + residual.float()).bfloat16()
        expected = self.op.reference(total.float(), *params, EPS, zero_centered_gamma=True).y
        args = [t.to(device) for t in (x, *params)]
        for columnwise in (True, False):
            amax, scale_inv = one(2.0**40, device), one(0, device)
            out = self.function("_fwd_fp8")(
                *args, EPS, one(2, device), FP8[0], columnwise=columnwise, amax=amax,
                scale_inv=scale_inv, zero_centered_gamma=True, residual=residual.to(device),
            )  # fmt: skip
            assert_same_bits(out.residual_sum, total)
            codes = encode_fp8(expected * 2, FP8[0])
            checks.assert_adjacent_codes(out.y.rowwise, codes)
            if columnwise:
                checks.assert_adjacent_codes(out.y.columnwise, codes.t().contiguous())
            assert amax.item() == 2.0**40  # accumulated, not replaced
            assert out.y.scale_inv is scale_inv
            assert scale_inv.item() == 0.5

    @pytest.mark.parametrize("with_residual", [False, True])
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("shape", SHAPES, ids=str)
    def test_again(self, device, poison, shape, dtype, with_residual):
        """From the statistics of any kernel of forward the same bits, in all forms."""
        x, *params = (t.to(device) for t in self.make(*shape, dtype, torch.float32))
        options = {"zero_centered_gamma": True}
        residual = {"residual": x.flip(0).contiguous()} if with_residual else {}
        scale = one(0.7, device)

        def statistics(out):
            rest = (out.mean, out.rstd) if self.has_bias else (out.rstd,)
            return x if out.residual_sum is None else out.residual_sum, rest

        out = self.function("_fwd")(x, *params, EPS, **options, **residual)
        total, rest = statistics(out)
        kept = [t.clone() for t in rest]
        assert_same_bits(self.function("_again")(total, *params, *rest, **options), out.y)
        assert_same_bits(rest, kept)
        for fp8 in FP8:
            for form in (
                {}, {"columnwise": False}, {"rowwise": False, "pad_columnwise": True},
                {"rowwise": False, "columnwise": False},
            ):  # fmt: skip
                amaxes = one(0.0, device), one(0.0, device)
                out = self.function("_fwd_fp8")(
                    x, *params, EPS, scale, fp8, amax=amaxes[0], **form, **options, **residual
                )
                total, rest = statistics(out)
                y = self.function("_again_fp8")(
                    total, *params, *rest, scale, fp8, amax=amaxes[1], **form, **options
                )
                for found, expected in zip(y, out.y, strict=True):
                    assert (found is None) == (expected is None)
                    assert found is None or torch.equal(found.float(), expected.float())
                assert_same_bits(*amaxes)

    @pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
    @pytest.mark.parametrize("cols", [64, 4096, 129, 16392])
    def test_nan_and_inf_stay_in_their_row(self, device, value, cols):
        clean, *params = (t.to(device) for t in self.make(48, cols, torch.float32))
        x = clean.clone()
        x[17, cols // 2] = value
        others = torch.arange(48, device=device) != 17
        before, after = (self.function("_fwd")(t, *params, EPS).y for t in (clean, x))
        assert_same_bits(after[others], before[others])
        keeps_rest = math.isinf(value) and not self.has_bias
        bad = torch.isnan(after[17])
        assert bad[cols // 2]
        assert keeps_rest or bad.all()
        assert not keeps_rest or after[17].nan_to_num().count_nonzero() == 0
        amax = one(0, device)
        out = self.function("_fwd_fp8")(x, *params, EPS, one(1, device), FP8[0], amax=amax)
        assert torch.isnan(amax).all()
        assert torch.equal(checks.codes(out.y.rowwise)[17] == 0x7F, bad.cpu())
        dx = self.function("_bwd")(clean, x, *self.statistics(x, params)).dx
        assert torch.isnan(dx[17, cols // 2])
        assert torch.isfinite(dx[others]).all()

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
        checks.needs_memory(32)
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
