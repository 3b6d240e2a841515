"""apex's syncbn, bnp and apex_C: the steps as apex's callers take them, against torch."""

import pytest
import torch
from apex_te.compatibility.apex import apex_C, bnp, syncbn
from checks import DTYPES, assert_as_good_as_torch, assert_same_bits, in_pairs

from apex_te.ops.batch_norm import reference

EPS, MOMENTUM = 1e-5, 0.3


def problem(device, dtype, shape=(6, 16, 5, 7)):
    """x, z and dy as [n, c, h, w], weight and bias."""
    data = [torch.randn(shape).to(dtype).to(device) for _ in range(3)]
    data[0] += 2
    return *data, torch.rand(shape[1]).to(device) + 0.5, torch.randn(shape[1]).to(device)


def expected(x, z, dy, weight, bias, relu, kind):
    """(y, dx, dz, dweight, dbias) by the formula in a wide dtype."""
    given = (x, z, weight, bias)
    leaves = [None if t is None else t.cpu().to(kind, copy=True).requires_grad_() for t in given]
    y = reference(leaves[0], *leaves[2:], EPS, z=leaves[1], relu=relu)
    y.backward(dy.cpu().to(kind))
    return [y.detach(), *(None if t is None else t.grad for t in leaves)]


def as_good(found, args, relu):
    exact, same = (expected(*args, relu, kind) for kind in (torch.float64, torch.float32))
    for ours, right, near in zip(found, exact, same, strict=False):
        assert (ours is None) == (right is None)
        if ours is not None:
            assert_as_good_as_torch(ours, right, near.to(ours.dtype))


def last(t):
    return t.movedim(1, -1).contiguous()


def first(t):
    return t.movedim(-1, 1)


@in_pairs(dtype=DTYPES, with_z=[False, True], relu=[False, True])
def test_syncbn_of_two_ranks_channels_last(device, poison, dtype, with_z, relu):
    x, z, dy, weight, bias = problem(device, dtype)
    z = z if with_z else None
    parts = [[None if t is None else last(t[i::2]) for t in (x, z, dy)] for i in range(2)]
    stats = [syncbn.welford_mean_var_c_last(part[0]) for part in parts]
    means, variances = (torch.stack(each) for each in zip(*stats, strict=True))
    count = torch.tensor([105, 105], dtype=torch.int32, device=device)
    mean, var, inv_std = syncbn.welford_parallel(means, variances, count, EPS)
    affine = (mean, inv_std, weight, bias)
    y = [syncbn.batchnorm_forward_c_last(part[0], part[1], *affine, relu) for part in parts]
    grads = [part[2] for part in parts]
    if relu:
        grads = [syncbn.relu_bw_c_last(part[2], part[0], part[1], *affine) for part in parts]
    sums = [
        syncbn.reduce_bn_c_last(grad, part[0], *affine[:3])
        for grad, part in zip(grads, parts, strict=True)
    ]
    sum_dy, sum_dy_xmu, dweight, dbias = (a + b for a, b in zip(*sums, strict=True))
    dx = [
        syncbn.batchnorm_backward_c_last(grad, part[0], *affine[:3], sum_dy, sum_dy_xmu, count)
        for grad, part in zip(grads, parts, strict=True)
    ]
    found = []
    for halves in (y, dx, grads):
        whole = torch.empty_like(x)
        whole[0::2], whole[1::2] = map(first, halves)
        found.append(whole)
    dz = found.pop() if with_z else None
    args = (x, z, dy, weight, bias)
    as_good([*found[:2], dz], args, relu)
    for ours, right in zip((dweight, dbias), expected(*args, relu, torch.float64)[3:], strict=True):
        # Each rank's sum is rounded to float32.
        torch.testing.assert_close(ours.cpu().double(), right, rtol=1e-6, atol=4e-6)
    torch.testing.assert_close(var, x.float().var((0, 2, 3)), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_syncbn_channels_first(device, dtype):
    x, _, dy, weight, bias = problem(device, dtype)
    mean, var = syncbn.welford_mean_var(x)
    count = torch.tensor([210], dtype=torch.int32, device=device)
    mean, _, inv_std = syncbn.welford_parallel(mean[None], var[None], count, EPS)
    y = syncbn.batchnorm_forward(x, mean, inv_std, weight, bias)
    sums = syncbn.reduce_bn(dy, x, mean, inv_std, weight)
    dx = syncbn.batchnorm_backward(dy, x, mean, inv_std, weight, *sums[:2], count)
    as_good([y, dx, None, *sums[2:]], (x, None, dy, weight, bias), False)
    without = syncbn.reduce_bn(dy, x, mean, inv_std, None)
    assert_same_bits(without[:2], sums[:2])
    assert [t.numel() for t in without[2:]] == [0, 0]
    none = syncbn.batchnorm_forward(x, mean, inv_std, None, None)
    assert_same_bits(none, syncbn.batchnorm_forward(x, mean, inv_std, torch.ones_like(mean), None))


class Image:
    """What BatchNorm2d_NHWC passes to bnp."""

    def __init__(self, device, c):
        self.running = [torch.zeros(c, device=device), torch.ones(c, device=device)]
        self.batch = [torch.empty(c, device=device) for _ in range(2)]
        self.ret_cta = torch.zeros(8192, dtype=torch.uint8, device=device)
        self.magic = torch.tensor([254], dtype=torch.int32)
        buffer = torch.zeros(bnp.get_buffer_size(1), dtype=torch.uint8, device=device)
        self.pointers = [
            bnp.get_data_ptr(buffer),
            bnp.get_remote_data_ptr(buffer, None),
            None,
            None,
        ]

    def tail(self):
        return (*self.pointers, 1, self.magic, bnp.bn_fwd_nhwc_occupancy(), 2, False)


@in_pairs(dtype=DTYPES, layout=["nhwc", "channels_last"], relu=[False, True])
def test_bnp(device, dtype, layout, relu):
    x, _, dy, weight, bias = problem(device, dtype)
    memory = torch.channels_last
    given, grad = (last(t) if layout == "nhwc" else t.to(memory_format=memory) for t in (x, dy))
    image = Image(device, 16)
    head = (weight, bias, *image.running, *image.batch, image.ret_cta, MOMENTUM, EPS, relu)
    y = bnp.bn_fwd_nhwc(given, *head, *image.tail())
    assert y.stride() == given.stride()
    dx, dscale, dbias = bnp.bn_bwd_nhwc(given, grad, *head, *image.tail())
    assert image.magic.tolist() == [0]
    back = first if layout == "nhwc" else torch.Tensor.contiguous
    as_good([back(y), back(dx), None, dscale, dbias], (x, None, dy, weight, bias), relu)
    theirs = [torch.zeros(16).double(), torch.ones(16).double()]
    torch.nn.functional.batch_norm(x.cpu().double(), *theirs, training=True, momentum=MOMENTUM)
    for ours, right in zip(image.running, theirs, strict=True):
        torch.testing.assert_close(ours.cpu(), right.float(), rtol=1e-6, atol=1e-6)
    evaluated = bnp.bn_fwd_eval_nhwc(
        given, weight, bias, *image.running, image.ret_cta, 1, MOMENTUM, EPS, relu
    )
    right = torch.nn.functional.batch_norm(
        x.double(), *(t.double() for t in (*image.running, weight, bias)), eps=EPS
    )
    right = right.relu() if relu else right
    assert_as_good_as_torch(back(evaluated), right.cpu(), right.to(dtype))


@in_pairs(dtype=DTYPES, layout=["nhwc", "channels_last"])
def test_bnp_addrelu(device, dtype, layout):
    x, z, dy, weight, bias = problem(device, dtype)
    memory = torch.channels_last
    given, residual, grad = (
        last(t) if layout == "nhwc" else t.to(memory_format=memory) for t in (x, z, dy)
    )
    image = Image(device, 16)
    bitmask = torch.empty(2 * -(-x.numel() // 32), dtype=torch.int32, device=device)
    head = (weight, bias, *image.running, *image.batch, bitmask, image.ret_cta, MOMENTUM, EPS)
    y = bnp.bn_addrelu_fwd_nhwc(given, residual, *head, *image.tail())
    dx, dz, dscale, dbias = bnp.bn_addrelu_bwd_nhwc(given, grad, *head, *image.tail())
    back = first if layout == "nhwc" else torch.Tensor.contiguous
    as_good([back(y), back(dx), back(dz), dscale, dbias], (x, z, dy, weight, bias), True)
    evaluated = bnp.bn_addrelu_fwd_eval_nhwc(
        given, residual, weight, bias, *image.running, image.ret_cta, 1, MOMENTUM, EPS
    )
    plain = bnp.bn_fwd_eval_nhwc(
        given.float(), weight, bias, *image.running, image.ret_cta, 1, MOMENTUM, EPS, False
    )
    assert_same_bits(evaluated, (plain + residual.float()).relu().to(dtype))
    with pytest.raises(ValueError, match=r"bitmask must have 3360 bits or more, got 32"):
        bnp.bn_addrelu_fwd_nhwc(given, residual, *head[:6], bitmask[:1], *head[7:], *image.tail())


def test_bnp_refuses():
    x, _, _, weight, bias = problem("cpu", torch.float32)
    image = Image("cpu", 16)
    head = (weight, bias, *image.running, *image.batch, image.ret_cta, MOMENTUM, EPS, False)
    with pytest.raises(ValueError, match=r"x must be contiguous \[n, h, w, 16\] or channels_last"):
        bnp.bn_fwd_nhwc(x, *head, *image.tail())
    assert bnp.close_remote_data(x) is None


def test_apex_c(device):
    tensors = [torch.randn(3, 4), torch.randn(5), torch.randn(()), torch.randn(0, 2)]
    tensors = [t.to(device) for t in tensors]
    flat = apex_C.flatten(tensors)
    assert torch.equal(flat, torch.cat([t.reshape(-1) for t in tensors]))
    parts = apex_C.unflatten(flat, tensors)
    assert_same_bits(parts, tensors)
    parts[0].zero_()
    assert not flat[:12].any()
    with pytest.raises(
        TypeError, match=r"tensors\[1\] must have dtype torch.float32, got torch.int64"
    ):
        apex_C.flatten([tensors[0], tensors[0].long()])
    with pytest.raises(ValueError, match=r"flat must have shape \[18\], got \[17\]"):
        apex_C.unflatten(flat[1:], tensors)
    with pytest.raises(ValueError, match="tensors must have a tensor at least, got none"):
        apex_C.flatten([])
