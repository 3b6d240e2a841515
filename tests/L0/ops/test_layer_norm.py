"""layer_norm against its formula in float64, on each device."""

import torch
from checks import assert_as_good_as_torch
from norm_cases import EPS, NormCases
from torch.nn import functional as F

from apex_te.ops import layer_norm as op


class TestLayerNorm(NormCases):
    op = op
    has_bias = True

    def test_variance_is_of_centred_values(self, device):
        """A mean far above the deviation, where mean(x^2) - mean^2 has no digit left."""
        for shape in ((16, 1024), (16, 24576), (5, 333)):
            x = 4000 + torch.randn(shape)
            weight, bias = torch.ones(shape[1]), torch.zeros(shape[1])
            exact = op.reference(x.double(), weight.double(), bias.double(), EPS)
            same = F.layer_norm(x, shape[1:], weight, bias, EPS)
            out = op.layer_norm_fwd(x.to(device), weight.to(device), bias.to(device), EPS)
            assert_as_good_as_torch(out.y, exact.y, same)
        x, weight, bias = (t.to(device) for t in (x, weight, bias))
        codes = op.layer_norm_fwd_fp8(
            x, weight, bias, EPS, torch.ones(1, device=device), torch.float8_e4m3fn
        )
        assert torch.allclose(codes.rstd.cpu().double(), exact.rstd, rtol=1e-5)

    def test_statistics_of_a_cluster_are_of_centred_values(self, device):
        x = (4000 + torch.randn(64, 4096)).to(device)
        exact = op.reference(x.cpu().double(), None, None, EPS)
        out = op.layer_norm_fwd_fp8(
            x, None, None, EPS, torch.ones(1, device=device), torch.float8_e4m3fn
        )
        assert torch.allclose(out.rstd.cpu().double(), exact.rstd, rtol=1e-5)
        assert torch.allclose(out.mean.cpu().double(), exact.mean, rtol=1e-6)

    def test_bias_without_weight(self, device):
        x, _, bias = self.make(9, 72, torch.bfloat16)
        self.check_fwd(device, x, None, bias)
