"""Every public function with inputs and outputs that lie in memory in other ways."""

import inspect
import re

import pytest
import torch
from checks import DTYPES, assert_adjacent_codes, assert_same_bits
from public_functions import FORMS, UNFILLED, find, in_dtype, make_case
from torch.utils._pytree import tree_leaves, tree_map

SHORT = DTYPES[1:]
every = pytest.mark.parametrize("name", FORMS)
# Arguments that a function does not copy: they must be dense.
DENSE = {
    "block_quantize.block_dequantize": {"scale_inv"},
    "cross_entropy.count_valid": {"target"},
    "cross_entropy.cross_entropy_bwd": {"logits", "stats", "target"},
    "cross_entropy.cross_entropy_fwd": {"logits", "target"},
    "cross_entropy.scale_gradient": {"target"},
    "cross_entropy.sum_losses": {"loss"},
    "dense_gemm.dense_gemm": {"a", "b", "bias"},
    "dense_gemm_gelu.dense_gemm_gelu": {"a", "b", "bias"},
    "dense_gemm_gelu.dense_gemm_gelu_bwd": {"a", "b", "hidden"},
    "dense_gemm_swiglu.dense_gemm_swiglu": {"a", "b", "bias"},
    "dense_gemm_swiglu.dense_gemm_swiglu_held": {"a", "b", "bias"},
    "dense_gemm_swiglu.dense_gemm_swiglu_bwd": {"a", "b", "hidden"},
    "emulated_gemm.emulated_block_gemm": {"a_scale_inv", "b_scale_inv"},
    "emulated_gemm.mx_gemm": {"a_scale", "b_scale"},
    "fp8_gemm.block_scaled_gemm": {"a", "a_scale_inv", "b", "b_scale_inv", "bias"},
    "fp8_gemm.fp8_gemm": {"a", "b", "bias"},
    "grouped_gemm.block_multiply_groups": {"a_scale_inv"},
    "grouped_quantize.finish_rows": {"bias"},
    "grouped_quantize.quantize_groups": {"due"},
    "grouped_quantize.quantize_matrices": {"due"},
    "grouped_quantize.scale_rows": {"factor"},
    "layer_norm.layer_norm_again": {"mean", "rstd"},
    "layer_norm.layer_norm_again_fp8": {"mean", "rstd"},
    "layer_norm.layer_norm_bwd": {"mean", "rstd"},
    "moe_permute.gather_rows": {"rows"},
    "moe_permute.permute": {"row_id_map"},
    "moe_permute.permute_bwd": {"row_id_map"},
    "moe_permute.sort_chunks": {"chunk_map"},
    "moe_permute.tokens_of_rows": {"row_id_map"},
    "moe_permute.unpermute": {"row_id_map"},
    "moe_permute.unpermute_bwd": {"inp", "probs", "row_id_map"},
    "row_quantize.row_quantize": {"column_scale"},
    "rowwise_gemm.rowwise_gemm": {"a", "b"},
    "mx_quantize.mx_dequantize": {"scale"},
    "rms_norm.rms_norm_again": {"rstd"},
    "rms_norm.rms_norm_again_fp8": {"rstd"},
    "rms_norm.rms_norm_bwd": {"rstd"},
    "rope.rope": {"starts"},
}
# Dtypes of x that a function does not take.
OTHER_DTYPES = {"bias_dropout_add.bias_dropout_add_bwd": SHORT, "dense_gemm.dense_gemm": SHORT[:1]}
# On a GPU the elements of a vector are added, or rounded, in another order at another address.
ROUNDED_ON_GPU = (
    "activation.", "attention_sink.attention_sink_bwd", "bias_gelu.", "scaled_softmax.",
    "swiglu.swiglu_bwd",
)  # fmt: skip
# Held against their formulas in their own files: with products' kernels, and other orders of sums.
OWN_FILES_ON_GPU = (
    "cross_entropy", "dense_gemm", "emulated_gemm", "fp8_gemm", "grouped_gemm", "layer_norm",
    "moe_permute", "rms_norm", "wgrad_gemm",
)  # fmt: skip


def views(t):
    """Tensors equal to t in other storage, by name."""
    n = t.shape[-1]
    at = torch.empty(t.numel() + 1, dtype=t.dtype, device=t.device)[1:].view(t.shape)
    wide = torch.empty(*t.shape[:-1], 2 * n + 1, dtype=t.dtype, device=t.device)
    made = {"offset": at, "sliced": wide[..., 1 : n + 1], "strided": wide.clone()[..., : 2 * n : 2]}
    for view in made.values():
        view.copy_(t)
    if t.dim() > 1:
        made["transposed"] = t.transpose(-1, -2).contiguous().transpose(-1, -2)
    return made


def arguments(name, device, dtype):
    case = make_case(name)
    args = tree_map(lambda v: v.to(device) if isinstance(v, torch.Tensor) else v, case.args)
    return in_dtype(name, args, dtype), case.written


def run(name, args, written):
    """Copies of what a function returns and writes, without what has no value."""
    given = tree_map(lambda v: v.clone() if isinstance(v, torch.Tensor) else v, args)
    for key, value in args.items():
        if isinstance(value, torch.Tensor) and key not in written:
            given[key] = value  # as it lies
    results = tree_leaves(find(name)(**given)), tree_leaves([given[key] for key in written])
    found = [t for part in results for t in part if isinstance(t, torch.Tensor)]
    dense = torch.contiguous_format
    return [
        t.clone(memory_format=dense) for i, t in enumerate(found) if i not in UNFILLED.get(name, ())
    ]


def refusal(name, args, written):
    """What a function gives, or the text of its ValueError."""
    try:
        return run(name, args, written)
    except ValueError as error:
        return str(error)


def tolerances(name, t):
    """rtol and atol of a result of the functions above."""
    eps, is_backward = torch.finfo(t.dtype).eps, "bwd" in name
    if name.startswith("activation."):
        return 1e-5, 1e-6 if is_backward else 1e-8
    if name.startswith("bias_gelu."):
        return 2 * eps, 1e-3 if t.dim() == 1 else 1e-6 if is_backward else 1e-8
    if name.startswith("swiglu."):
        return max(4 * eps, 1e-5), 1e-8
    if is_backward:  # a difference of dy and the sum of y * dy, each of which rounds in float32
        return max(4 * eps, 1e-5), 1e-6
    return max(4 * eps, 2e-6), 0


def assert_alike(name, actual, expected):
    """The same bits; on a GPU nearly so for the functions above."""
    if not name.startswith(ROUNDED_ON_GPU) or not actual[0].is_cuda:
        assert_same_bits(actual, expected)
        return
    for a, e in zip(actual, expected, strict=True):
        if a.dtype is torch.float8_e4m3fn:
            assert_adjacent_codes(a, e)
            continue
        rtol, atol = tolerances(name, a)
        assert torch.allclose(a, e, rtol=rtol, atol=atol)


@every
def test_inputs_in_other_storage_give_the_same_or_are_refused(device, name):
    if device.type == "cuda" and name.startswith(OWN_FILES_ON_GPU):
        pytest.skip("compared in its own file")
    refused = set()
    for dtype in DTYPES:
        try:
            args, written = arguments(name, device, dtype)
            expected = run(name, args, written)
        except TypeError:
            assert dtype in OTHER_DTYPES[name]
            continue
        assert dtype not in OTHER_DTYPES.get(name, ())
        for key, value in args.items():
            if not isinstance(value, torch.Tensor) or key in written or not value.dim():
                continue
            for kind, view in views(value).items():
                found = refusal(name, {**args, key: view}, written)
                if isinstance(found, str) and kind != "offset":
                    assert re.search("must (be|have) contiguous", found)
                    refused.add(key)
                else:
                    assert_alike(name, found, expected)
            if value.dim() > 1:
                one = value[:1].expand_as(value)
                found = refusal(name, {**args, key: one}, written)
                if key not in refused:
                    assert_alike(name, found, run(name, {**args, key: one.clone()}, written))
    assert refused == DENSE.get(name, set())


def placed(value, offset):
    """Storage that holds sevens, and in it a tensor of value's form."""
    size = value.numel() * value.element_size()
    flat = torch.full((size + 64,), 7, dtype=torch.uint8, device=value.device)
    begin = offset * value.element_size()
    return flat, flat[begin : begin + size].view(value.dtype).view(value.shape)


def outputs(name):
    """The written arguments for which a function otherwise makes new tensors."""
    parameters = inspect.signature(find(name)).parameters
    written = make_case(name).written
    return [key for key in written if key.startswith("out") and parameters[key].default is None]


@pytest.mark.parametrize("name", [name for name in FORMS if outputs(name)])
def test_a_given_output_gets_what_a_new_one_would(device, name):
    """Wherever it begins, and nothing around it is written."""
    args, _ = arguments(name, device, torch.float32)
    keys = outputs(name)
    rest = {key: value for key, value in args.items() if key not in keys}
    made = {"out_dtype": args["out"].dtype} if "gemm" in name else {}
    if "out_columnwise" in keys:
        made["columnwise"] = True
    expected = [t for t in tree_leaves(find(name)(**rest, **made)) if isinstance(t, torch.Tensor)]
    for offset in (0, 1, 3, 16):
        if device.type == "cuda" and offset and name.startswith(OWN_FILES_ON_GPU):
            break  # compared in its own file
        storages = []

        def place(value, offset=offset, storages=storages):
            if not isinstance(value, torch.Tensor):
                return value
            storages.append((*placed(value, offset), offset * value.element_size()))
            return storages[-1][1]

        given = {key: tree_map(place, args[key]) for key in keys}
        result = [
            t for t in tree_leaves(find(name)(**rest, **given)) if isinstance(t, torch.Tensor)
        ]
        for flat, view, begin in storages:
            assert view.data_ptr() in {t.data_ptr() for t in result}
            assert (flat[:begin] == 7).all()
            assert (flat[begin + view.numel() * view.element_size() :] == 7).all()
        assert_alike(name, result, expected)
