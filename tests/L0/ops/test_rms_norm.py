"""rms_norm against its formula in float64, on each device."""

from norm_cases import NormCases

from apex_te.ops import rms_norm as op


class TestRMSNorm(NormCases):
    op = op
