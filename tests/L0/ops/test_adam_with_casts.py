"""adam_with_casts: bits of adam, and of cast_transpose or block_quantize of its result."""

import pytest
import torch
from checks import DTYPES, assert_same_bits, codes, one

from apex_te.ops import multi_tensor_optim as op
from apex_te.ops.block_quantize import block_quantize, scale_shape
from apex_te.ops.cast_transpose import cast_transpose
from apex_te.runtime.fp8_copies import Casts
from apex_te.runtime.op_options import scales_number

SHAPES = [(16, 16), (128, 128), (144, 272), (48, 400), (0, 32), (512, 128), (272, 1040)]
OPTIONS = {
    "step": 3, "lr": 0.3, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1, "adamw": True,
    "bias_correction": True, "inv_scale": None, "found_inf": None, "unscale_grads": False,
}  # fmt: skip
RULES = {"one scale": None, "fp32": 0.0, "pow2": 0.0, "server": 1e-4}


def lists(device, dtype, grad_dtype, with_masters, shapes=SHAPES):
    """Parameters, gradients, moments and masters."""
    generator = torch.Generator().manual_seed(5)

    def made(*factors):
        values = [torch.randn(shape, generator=generator) for shape in shapes]
        for i, value in enumerate(values):
            value *= factors[i % len(factors)]
        return [value.to(device) for value in values]

    masters = made(1.0, 1e-3, 100.0)
    if shapes is SHAPES:
        masters[1][:, :64] = 0.0
        masters[3][0, 5] = float("inf")
        masters[5][3, 7] = float("nan")
        masters[6][:128] = 0.0
    params = [m.to(dtype, copy=True) for m in masters]
    grads = [g.to(grad_dtype) for g in made(1.0, 1e-2)]
    moments = made(0.3), [v.abs() for v in made(0.5)]
    return [params, grads, *moments, masters if with_masters else None]


def empty_casts(params, rule, scales):
    """Returns outputs of a cast, filled with values that no cast writes."""
    made = []
    for param, scale in zip(params, scales, strict=True):
        (rows, cols), device = param.shape, param.device

        def floats(*shape, device=device):
            return torch.full(shape, -7.0, device=device)

        both = [
            torch.full(shape, 0x5A, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
            for shape in ((rows, cols), (cols, rows))
        ]
        if rule == "one scale":
            made.append(Casts(*both, floats(1), None, scale, floats(1), None))
        else:
            inverses = [floats(*scale_shape(*shape, 128)) for shape in ((rows, cols), (cols, rows))]
            number = scales_number("test", rule, None)
            made.append(Casts(*both, *inverses, None, None, (RULES[rule], number)))
    return made


def flat(values):
    return [t for tensors in values if tensors is not None for t in tensors]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("with_masters", [False, True])
@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "changed",
    [{}, {"adamw": False, "bias_correction": False}, {"inv_scale": 0.25, "unscale_grads": True},
     {"step": one(7), "lr": one(0.2), "found_inf": one(0)}],
    ids=["adamw", "l2", "unscaled", "on the device"],
)  # fmt: skip
def test_bits(device, changed, dtype, grad_dtype, with_masters, rule):
    options = OPTIONS | {
        name: v.to(device) if isinstance(v, torch.Tensor) else v for name, v in changed.items()
    }
    if "inv_scale" in changed:
        options["inv_scale"] = one(changed["inv_scale"], device)
    found = lists(device, dtype, grad_dtype, with_masters)
    expected = lists(device, dtype, grad_dtype, with_masters)
    scales = [one(2.0 ** (i - 2) * 1.3, device) for i in range(len(SHAPES))]
    casts = empty_casts(found[0], rule, scales)
    op.adam_with_casts(*found[:4], casts, masters=found[4], **options)
    op.adam(*expected[:4], masters=expected[4], **options)
    assert_same_bits(flat(found), flat(expected))
    for param, cast, scale in zip(expected[0], casts, scales, strict=True):
        if not param.numel():
            continue
        if rule == "one scale":
            amax = one(0.0, device)
            made = cast_transpose(param, scale, torch.float8_e4m3fn, amax=amax)
            assert_same_bits([cast.scale_inv, cast.amax], [made.scale_inv, amax])
        else:
            made = block_quantize(
                param, torch.float8_e4m3fn, block_rows=128, scales=rule, eps=RULES[rule]
            )
            assert_same_bits(
                [cast.scale_inv, cast.columnwise_scale_inv],
                [made.rowwise_scale_inv, made.columnwise_scale_inv],
            )
        assert torch.equal(codes(cast.rowwise), codes(made.rowwise))
        assert torch.equal(codes(cast.columnwise), codes(made.columnwise))


@pytest.mark.parametrize("rule", RULES)
def test_many(device, rule):
    """More parameters than a launch takes."""
    shapes = [(16 * (1 + i % 3), 16 * (1 + i % 5)) for i in range(75)]
    found = lists(device, torch.bfloat16, torch.bfloat16, True, shapes)
    expected = lists(device, torch.bfloat16, torch.bfloat16, True, shapes)
    scales = [one(1.0 + i, device) for i in range(len(shapes))]
    casts = empty_casts(found[0], rule, scales)
    op.adam_with_casts(*found[:4], casts, masters=found[4], **OPTIONS)
    op.adam(*expected[:4], masters=expected[4], **OPTIONS)
    assert_same_bits(flat(found), flat(expected))
    for param, cast, scale in zip(expected[0], casts, scales, strict=True):
        if rule == "one scale":
            made = cast_transpose(param, scale, torch.float8_e4m3fn)
        else:
            made = block_quantize(
                param, torch.float8_e4m3fn, block_rows=128, scales=rule, eps=RULES[rule]
            )
        assert torch.equal(codes(cast.columnwise), codes(made.columnwise))


@pytest.mark.parametrize("rule", ["one scale", "pow2"])
def test_a_skipped_step_writes_nothing(device, rule):
    found = lists(device, torch.bfloat16, torch.float32, True)
    before = [t.clone() for t in flat(found)]
    casts = empty_casts(found[0], rule, [one(1.0, device)] * len(SHAPES))
    kept = [[t.clone() for t in cast if isinstance(t, torch.Tensor)] for cast in casts]
    options = OPTIONS | {"found_inf": one(1.0, device)}
    op.adam_with_casts(*found[:4], casts, masters=found[4], **options)
    assert_same_bits(flat(found), before)
    for cast, old in zip(casts, kept, strict=True):
        now = [t for t in cast if isinstance(t, torch.Tensor)]
        assert_same_bits([t.view(torch.uint8) for t in now], [t.view(torch.uint8) for t in old])


def test_refused(device):
    def call(shape=(32, 32), dtype=torch.float8_e4m3fn, count=1, offset=0, rule="one scale"):
        found = lists(device, torch.float32, torch.float32, False, [shape])
        (cast,) = empty_casts(found[0], rule, [one(1.0, device)])
        cast = cast._replace(rowwise=cast.rowwise.view(torch.uint8).view(dtype))
        if offset:
            memory = torch.zeros(shape[0] * shape[1] + offset, device=device)
            found[1] = [memory[offset:].view(shape)]
        op.adam_with_casts(*found[:4], [cast] * count, masters=None, **OPTIONS)

    call()
    call(rule="pow2")
    with pytest.raises(ValueError, match="multiples of 16, got 32 x 40"):
        call((32, 40))
    with pytest.raises(TypeError, match=r"rowwise\[0\]"):
        call(dtype=torch.float8_e5m2)
    with pytest.raises(ValueError, match="rowwise must have 1 entries like params, got 2"):
        call(count=2)
    with pytest.raises(ValueError, match="aligned to 16 bytes"):
        call(offset=1)


def test_kept_scales(device):
    scales = [one(v, device) for v in (2.0, 3.0, 0.7, 1.0)]
    inverses = [one(v, device) for v in (0.5, 0.5, 0.0, 1.0)]
    inverses[2] = 1.0 / scales[2]
    kept = [one(v, device) for v in (4.0, 1.0, float("nan"), 0.0)]
    amaxes = [one(v, device) for v in (1.0, 2.0, 5.0, 3.0)]
    flags = [torch.full((1,), 9, dtype=torch.int32, device=device) for _ in scales]
    op.check_kept_scales(scales, inverses, kept, amaxes, flags)
    assert [int(flag) for flag in flags] == [1, 0, 1, 1]
    assert torch.cat(amaxes).nan_to_num(-1.0).tolist() == [4.0, 2.0, -1.0, 3.0]
    many = [one(2.0, device)] * 70
    flags = [torch.zeros(1, dtype=torch.int32, device=device) for _ in many]
    op.check_kept_scales(many, [one(0.5, device)] * 70, many, [], flags)
    assert all(int(flag) == 1 for flag in flags)
