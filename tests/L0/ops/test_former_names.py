"""Names that arguments, fields and functions of the ops had before: they work, with a warning."""

from __future__ import annotations

import inspect
import pkgutil
import warnings
from importlib import import_module

import pytest
import torch

import apex_te.ops
from apex_te.ops import (
    activation,
    block_quantize,
    byte_transpose,
    cast_transpose,
    current_scale,
    emulated_gemm,
    grouped_quantize,
    hif8,
    mx_quantize,
    swiglu,
)

E4M3 = torch.float8_e4m3fn
X = torch.arange(64.0).view(8, 8)
ONE = torch.ones(1)


def quiet(function, *args, **kwargs):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return function(*args, **kwargs)


CALLS = {
    "activation": (activation.activation_fwd_fp8, (X, "silu", ONE, E4M3), {"transposed": False}),
    "block": (block_quantize.block_quantize, (X, E4M3), {"transposed": False}),
    "cast": (cast_transpose.cast_transpose, (X, ONE, E4M3), {"transposed": False}),
    "current": (current_scale.current_scale, (X, E4M3), {"transposed": False}),
    "hif8": (hif8.quantize, (X, ONE), {"transposed": False}),
    "mx": (mx_quantize.mx_quantize, (X,), {"transposed": False}),
    "swiglu": (swiglu.swiglu_fwd_fp8, (X, None, ONE, E4M3), {"transposed": False}),
}


@pytest.mark.parametrize("name", CALLS)
def test_former_keyword(name):
    function, args, kwargs = CALLS[name]
    assert quiet(function, *args).columnwise is not None
    with pytest.warns(DeprecationWarning, match=r"transposed is now called columnwise") as seen:
        out = function(*args, **kwargs)
    assert [warning.filename for warning in seen] == [__file__]
    assert out.columnwise is None
    assert out.rowwise is not None


@pytest.mark.parametrize("name", CALLS)
def test_former_field(name):
    function, args, _ = CALLS[name]
    out = quiet(function, *args)
    with pytest.warns(DeprecationWarning, match=r"\.transposed is now called columnwise") as seen:
        assert out.transposed is out.columnwise
    assert [warning.filename for warning in seen] == [__file__]


def test_former_scale_fields():
    block, mx = block_quantize.block_quantize(X, E4M3), mx_quantize.mx_quantize(X)
    with pytest.warns(DeprecationWarning, match="is now called"):
        assert block.transposed_scale_inv is block.columnwise_scale_inv
    with pytest.warns(DeprecationWarning, match="is now called"):
        assert mx.transposed_scale is mx.columnwise_scale


def test_former_names_of_an_output_and_of_fp8_data():
    out = torch.empty(8, 8, dtype=E4M3)
    with pytest.warns(DeprecationWarning, match="out_transposed is now called out_columnwise"):
        made = cast_transpose.cast_transpose(X, ONE, E4M3, out_transposed=out)
    assert made.columnwise is out
    with pytest.warns(DeprecationWarning, match="byte_transpose: codes is now called fp8_data"):
        assert byte_transpose.byte_transpose(codes=out).shape == (8, 8)
    quantized = block_quantize.block_quantize(X, E4M3)
    with pytest.warns(DeprecationWarning, match="is now called"):
        block_quantize.block_dequantize(codes=quantized[0], scale_inv=quantized[1])
    quantized = mx_quantize.mx_quantize(X)
    with pytest.warns(DeprecationWarning, match="is now called"):
        mx_quantize.mx_dequantize(codes=quantized[0], scale=quantized[1])
    for decode, fp8_data in ((hif8.decode, hif8.encode(X)), (grouped_quantize.decode, out)):
        with pytest.warns(DeprecationWarning, match="is now called"):
            decode(codes=fp8_data)


def test_both_names_and_unknown_ones_are_refused():
    for kwargs in ({"transposed": True, "columnwise": True}, {"sideways": True}):
        with pytest.raises(TypeError, match="unexpected argument"):
            quiet(cast_transpose.cast_transpose, X, ONE, E4M3, **kwargs)
    with pytest.raises(TypeError, match="unexpected argument 'transposed'"):
        quiet(activation.activation_fwd, X, "silu", transposed=True)


def test_former_functions():
    for former in ("decoded_fp8_gemm", "decoded_block_gemm"):
        with pytest.warns(DeprecationWarning, match=f"{former} is now called emulated_"):
            function = getattr(emulated_gemm, former)
        assert function is getattr(emulated_gemm, former.replace("decoded", "emulated"))
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        emulated_gemm.nothing  # noqa: B018


def test_no_public_function_has_a_former_name():
    for module in pkgutil.iter_modules(apex_te.ops.__path__):
        for name, value in vars(import_module(f"apex_te.ops.{module.name}")).items():
            if inspect.isfunction(value) and not name.startswith("_"):
                taken = set(inspect.signature(value).parameters)
                assert not taken & {"transposed", "out_transposed", "codes"}, name
