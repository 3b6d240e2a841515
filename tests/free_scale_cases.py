"""Released FP8 weights: random data and scales that no cast of their values would give."""

import torch

from apex_te.fp8.parameter.parameter import FP8Parameter
from apex_te.recipe import BlockScaling, CurrentScaling, DelayedScaling, RowwiseScaling
from tests.checks import codes

E4M3 = torch.float8_e4m3fn
FORMS = {
    "block fp32": BlockScaling(pow2=False),
    "block pow2": BlockScaling(),
    "tensor": CurrentScaling(),
    "delayed": DelayedScaling(),
    "channel": RowwiseScaling(),
}
# 576 rows as in DeepSeek-V3's kv_a_proj_with_mqa; no size is a multiple of 128 in the others.
SHAPES = [(576, 160), (300, 100), (1, 7168), (7168, 1), (128, 256)]


def block_of(recipe):
    """Rows and columns that share a scale; 0 for all."""
    return (
        (128, 128)
        if isinstance(recipe, BlockScaling)
        else ((1, 0) if isinstance(recipe, RowwiseScaling) else (0, 0))
    )


def scales_of_rows(scale_inv, start, stop, form):
    """The scales of some rows of a weight."""
    high = block_of(FORMS[form])[0]
    return scale_inv[start // high : -(-stop // high)] if high else scale_inv


def release(recipe, shape, count=None, device="cpu"):
    """Codes and scales of a file; most blocks do not reach the largest code, 448."""
    rows, cols = shape
    lead = () if count is None else (count,)
    values = torch.randn(*lead, rows, cols) * 60
    high, wide = block_of(recipe)
    scales = (-(-rows // high), -(-cols // wide) if wide else 1) if high else (1,)
    scale_inv = torch.rand(*lead, *scales) * 1e-3 + 1e-4
    if getattr(recipe, "pow2", False):
        scale_inv = scale_inv.log2().floor().exp2()
    return values.clamp(-448, 448).to(E4M3).to(device), scale_inv.to(device)


def decoded(data, scale_inv):
    """float64 values of codes and their scales, as a file's format defines them."""
    value = data.double()
    if scale_inv.dim() < data.dim():
        return value * scale_inv.double()[..., None]
    if scale_inv.shape[-2:] == (data.shape[-2], 1):
        return value * scale_inv.double()
    each = scale_inv.double().repeat_interleave(128, -2).repeat_interleave(128, -1)
    return value * each[..., : data.shape[-2], : data.shape[-1]]


def made(recipe, shape, count=None, dtype=torch.bfloat16, device="cpu"):
    """A Parameter of a release, and the release."""
    file = release(recipe, shape, count, device)
    return torch.nn.Parameter(FP8Parameter.from_codes(*file, recipe, dtype)), file


def assert_holds(weight, file):
    """The weight's data and scales are those of ``file``, byte by byte."""
    assert type(weight) is FP8Parameter
    assert weight.has_free_scales
    data, scale_inv = weight.codes()
    assert torch.equal(codes(data), codes(file[0]))
    assert torch.equal(scale_inv.cpu(), file[1].cpu())
