"""Every public function with no rows, no columns, and with many of both."""

import pytest
import torch
from checks import assert_same_bits
from public_functions import DIFFERENTIABLE, FORMS, Call, find, make_case
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_map

every = pytest.mark.parametrize("name", FORMS)
# A mean of nothing, and statistics of no columns.
NOT_A_NUMBER = ("cross_entropy.cross_entropy", "cross_entropy.sum_losses")
OF_FIXED_DIMENSIONS = {
    "index_mul_2d.index_mul_2d", "transducer_joint.transducer_joint",
    "transducer_loss.transducer_loss",
}  # fmt: skip
OF_OWN_SIZES = {"transducer_loss.transducer_loss"}  # which must have frames
OF_HEADS = {"rope.rope", "scaled_softmax.scaled_softmax"}
NOT_WITHOUT_COLUMNS = ("layer_norm.", "rms_norm.")

# Their scale is computed from an amax, here of 0.
SCALED_BY_AMAX = (
    "current_scale.current_scale:required", "current_scale.tensor_amax",
    "hif8.quantize_current:required",
)  # fmt: skip


def results(name, device, rows, cols):
    """An amax that is written over a 3, and what a function returns by its place or name."""
    case = make_case(name, rows, cols)
    args = tree_map(lambda v: v.to(device) if isinstance(v, torch.Tensor) else v, case.args)
    written = args["amax"].fill_(3) if "amax" in case.written else None
    leaves, _ = tree_flatten_with_path({name: find(name)(**args)})
    return written, {keystr(path): t for path, t in leaves if isinstance(t, torch.Tensor)}


@every
def test_without_elements_all_results_have_their_shape_and_value(device, poison, name):
    sizes = (512, 512), (1024, 512), (512, 1024)
    usual, taller, wider = (results(name, device, *size)[1] for size in sizes)
    for rows, cols in ((0, 512), (512, 0), (0, 0)):
        if rows and name.startswith("cross_entropy.cross_entropy"):
            with pytest.raises(ValueError, match=r"logits must have 1 to 2\^31 - 4097 columns"):
                results(name, device, rows, cols)
            continue
        if not cols and name == "moe_router.moe_router_fwd":
            with pytest.raises(ValueError, match="index must have at most the columns of logits"):
                results(name, device, rows, cols)
            continue
        written, found = results(name, device, rows, cols)
        assert found.keys() == usual.keys()
        for key, t in found.items():
            extents = zip(usual[key].shape, taller[key].shape, wider[key].shape, strict=True)
            # Each extent is a sum of multiples of the numbers of rows and of columns.
            per = [(size, (tall - size) / 512, (wide - size) / 512) for size, tall, wide in extents]
            assert list(t.shape) == [n + a * (rows - 512) + b * (cols - 512) for n, a, b in per]
            assert t.dtype == usual[key].dtype
            if name in SCALED_BY_AMAX and t.numel() == 1:
                assert t.item() == (0 if "amax" in key.rpartition(".")[2] else 1)
            elif key.endswith("scale_inv") and t.dim() == 1:
                assert_same_bits(t, usual[key][: t.numel()])
            if not rows and key.endswith(("dbias", "dweight")):
                assert not t.any()
            if name not in NOT_A_NUMBER and (cols or not name.startswith(NOT_WITHOUT_COLUMNS)):
                assert not t.isnan().any()
        assert rows or written is None or (written == 3).all(), "an amax of nothing"


@pytest.mark.parametrize("name", sorted(DIFFERENTIABLE - OF_HEADS - OF_FIXED_DIMENSIONS))
def test_more_dimensions_without_elements(device, name):
    call = Call(name, device, 0, 512)
    leading = {(0, 512): (2, 0, 512), (0,): (2, 0)}
    leaves = [t.view(leading.get(tuple(t.shape), t.shape)) for t in call.fresh()]
    leaves[0].requires_grad_()
    out, *_ = call(*leaves)
    assert out.shape in ((2, 0, 512), (2, 0, 256), ())
    out.sum().backward()
    assert leaves[0].grad.shape == (2, 0, 512)


@pytest.mark.parametrize("name", sorted(DIFFERENTIABLE - OF_OWN_SIZES))
def test_without_rows_gradients_of_parameters_are_zero(device, name):
    call = Call(name, device, 0, 512)
    leaves = [t.requires_grad_(t.is_floating_point()) for t in call.fresh()]
    if name == "rope.rope":
        leaves[1].requires_grad_(False)
    outputs = call(*leaves)
    sum(t.sum() for t in outputs if t.requires_grad).backward()
    for leaf in leaves:
        if leaf.requires_grad:
            assert leaf.grad.shape == leaf.shape
            assert not leaf.grad.any()


@every
def test_repeated_with_other_numbers_of_threads_it_gives_the_same_bits(device, name):
    if name == "wgrad_gemm.wgrad_gemm" and device.type == "cpu":
        pytest.skip("torch's GEMM of float32 may sum in another order")
    call, before = Call(name, device, 1024, 288), torch.get_num_threads()
    expected = call.filled(call.expected)
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            assert_same_bits(call.filled(call(*call.fresh())), expected)
    finally:
        torch.set_num_threads(before)
