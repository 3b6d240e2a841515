"""Amax, norm, scale, axpby and quantize over a list of tensors, many tensors in one launch.

A launch takes up to 1,623 tensors (amax, l2norm), 1,159 (scale), 901 (axpby) or 624 (quantize), of
any sizes and of mixed float32, float16 and bfloat16; empty ones may stand anywhere. Arithmetic is
in float32. Each list may also be ``apex_te.runtime.tensor_list(tensors)``, a prepared list, which
costs less to convert at each call. Tensors that are only read may be strided in a plain list; those
in a prepared list, and all that are written, must be contiguous.

The optimizer steps are in ``multi_tensor_optim``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.autograd.graph import increment_version

from ..runtime import scratch_sizes
from . import reference_codec
from .binding import bind, checked, note_written
from .fp8_output import check_fp8_dtype

Tensors = Sequence[torch.Tensor]

_amax = bind("multi_tensor", "multi_tensor_amax")
_l2norm = bind("multi_tensor", "multi_tensor_l2norm")
_scale = bind("multi_tensor", "multi_tensor_scale")
_axpby = bind("multi_tensor", "multi_tensor_axpby")
_quantize = bind("multi_tensor", "multi_tensor_quantize")

_CHECKS = {"result": -1, "x": 0, "y": 1}


def dense(tensors: Tensors) -> Tensors:
    """Returns a plain list's tensors made contiguous; returns a ``tensor_list()`` as it is."""
    if not isinstance(tensors, (list, tuple)):
        return tensors
    try:
        return [t.contiguous() for t in tensors]
    except AttributeError:  # not a tensor: the kernel's check names it
        return tensors


def workspace(like: torch.Tensor, count: int, sums: int) -> torch.Tensor:
    """Returns uninitialised float32 scratch to reduce ``count`` tensors to ``sums`` sums each."""
    words = scratch_sizes.list_words(count, sums)
    return torch.empty(words, dtype=torch.float32, device=like.device)


@checked
def amax(tensors: Tensors, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Computes the amax of each tensor; NaN counts as largest, and an empty tensor gives 0.

    Args:
        tensors: list of float32, float16 or bfloat16 tensors in any shapes, on one device.
        out: [len(tensors)] float32, updated to max(out, amax); a new tensor unless given.

    Returns:
        [len(tensors)] float32: ``out`` or the new tensor.

    Raises:
        TypeError: an argument has a dtype that is not listed.
        ValueError: a shape or device does not match.
    """
    if not len(tensors):
        return torch.zeros(0) if out is None else out
    result = out
    if result is None:
        result = torch.zeros(len(tensors), dtype=torch.float32, device=tensors[0].device)
    _amax(dense(tensors), result)
    note_written(out)
    return result


@checked
def l2norm(
    tensors: Tensors, *, per_tensor: bool = False
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Computes the L2 norm over all tensors and, if requested, of each one, deterministically.

    Squares are added in float32 over blocks of 2,048 elements or more, and the blocks' sums in
    float64. A magnitude above 1.8e19 overflows to infinity.

    Args:
        tensors: list of float32, float16 or bfloat16 tensors in any shapes, on one device.
        per_tensor: also return each tensor's norm.

    Returns:
        The total, a float32 scalar; with ``per_tensor`` also the norms, [len(tensors)] float32.

    Raises:
        TypeError: an argument has a dtype that is not listed.
        ValueError: a device does not match.
    """
    count = len(tensors)
    if not count:
        return (torch.zeros(()), torch.zeros(0)) if per_tensor else torch.zeros(())
    total = torch.empty((), dtype=torch.float32, device=tensors[0].device)
    norms = torch.empty(count, dtype=torch.float32, device=total.device) if per_tensor else None
    _l2norm(dense(tensors), total, norms, workspace(total, count, 1))
    return total if norms is None else (total, norms)


@checked
def scale(
    inputs: Tensors,
    outputs: Tensors,
    factor: float | torch.Tensor,
    *,
    found_inf: torch.Tensor | None = None,
) -> None:
    """Computes output = input * factor for each pair; an output may be its input.

    Args:
        inputs: list of float32, float16 or bfloat16 tensors.
        outputs: tensors to write, in the inputs' shapes; each in any of the three dtypes.
        factor: a number, or one float32 element on the device, such as 1 / loss scale.
        found_inf: one float32 or int32 element; becomes 1 if a result, as stored, is not finite,
            and is not written otherwise.

    Raises:
        TypeError: an argument has a dtype that is not listed.
        ValueError: a shape, device or list length does not match.
    """
    if not len(inputs) and not len(outputs):
        return
    is_tensor = isinstance(factor, torch.Tensor)
    number, tensor = (1.0, factor) if is_tensor else (factor, None)
    _scale(dense(inputs), outputs, number, tensor, found_inf)
    mark_written(outputs, found_inf)


@checked
def axpby(
    xs: Tensors,
    ys: Tensors,
    outputs: Tensors,
    a: float,
    b: float,
    *,
    check: str = "result",
    found_inf: torch.Tensor | None = None,
) -> None:
    """Computes output = a * x + b * y for each triple; an output may be its x or its y.

    Args:
        xs: list of float32, float16 or bfloat16 tensors.
        ys: tensors in xs' shapes; each in any of the three dtypes.
        outputs: tensors to write, in xs' shapes; each in any of the three dtypes.
        a: factor of each x.
        b: factor of each y.
        check: the values to check for NaN and infinity: "result" (as stored), "x" or "y".
        found_inf: one float32 or int32 element; becomes 1 if a checked value is not finite, and is
            not written otherwise.

    Raises:
        TypeError: an argument has a dtype that is not listed.
        ValueError: a shape, device or list length does not match, or ``check`` is not listed.
    """
    if check not in _CHECKS:
        raise ValueError(f"multi_tensor_axpby: check must be 'result', 'x' or 'y', got {check!r}")
    if not len(xs) and not len(ys) and not len(outputs):
        return
    _axpby(dense(xs), dense(ys), outputs, a, b, _CHECKS[check], found_inf)
    mark_written(outputs, found_inf)


@checked
def quantize(
    tensors: Tensors,
    scales: Tensors,
    fp8_dtype: torch.dtype = torch.float8_e4m3fn,
    *,
    amaxes: Tensors | None = None,
    scale_invs: Tensors | None = None,
    outputs: Tensors | None = None,
) -> Tensors:
    """Quantizes each tensor: q = saturating_cast(float(x) * scale).

    Values are rounded to nearest even; NaN stays NaN.

    Args:
        tensors: list of float32, float16 or bfloat16 tensors in any shapes.
        scales: one float32 element for each tensor.
        fp8_dtype: dtype of new outputs, torch.float8_e4m3fn or torch.float8_e5m2.
        amaxes: one float32 element for each tensor x; becomes max(amax, max |x|), before scaling;
            NaN counts as largest. None computes no amax.
        scale_invs: one float32 element for each tensor, receives 1 / scale; None computes none.
        outputs: tensors in the inputs' shapes to write, each float8_e4m3fn or float8_e5m2; new ones
            unless given.

    Returns:
        The FP8 tensors: ``outputs`` or the new ones.

    Raises:
        TypeError: an argument has a dtype that is not listed.
        ValueError: a shape, device or list length does not match.
    """
    check_fp8_dtype("multi_tensor_quantize", fp8_dtype)
    made = outputs
    if made is None:
        made = [torch.empty(t.shape, dtype=fp8_dtype, device=t.device) for t in tensors]
    if not len(tensors) and not len(made):
        return made
    _quantize(dense(tensors), made, scales, amaxes or [], scale_invs or [])
    for written in (outputs, amaxes, scale_invs):
        if written:
            mark_written(written, None)
    return made


def mark_written(tensors: Tensors, flag: torch.Tensor | None) -> None:
    """Increments the version counters of overwritten tensors, for autograd.

    In a compiled region it does nothing, since torch derives writes from the op's schema.
    """
    if not torch.compiler.is_compiling():
        increment_version(tensors)
        if flag is not None:
            increment_version(flag)


def reference_amax(tensors: Tensors) -> torch.Tensor:
    """Computes ``amax`` in plain PyTorch: [len(tensors)] float32."""
    return torch.cat([reference_codec.amax_of(t) for t in tensors])


def reference_l2norm(tensors: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes the norm over all tensors and of each in plain PyTorch, in float32 or float64."""
    wide = [t if t.dtype is torch.float64 else t.float() for t in tensors]
    norms = torch.stack([torch.linalg.vector_norm(t) for t in wide])
    return torch.linalg.vector_norm(norms), norms


def reference_axpby(x: torch.Tensor, y: torch.Tensor, a: float, b: float) -> torch.Tensor:
    """Computes a * x + b * y in float32 (float64 for a float64 x), rounded to x's dtype."""
    if x.dtype is torch.float64:
        return a * x + b * y
    return (a * x.float() + b * y.float()).to(x.dtype)


def reference_quantize(
    x: torch.Tensor, scale: torch.Tensor, fp8_dtype: torch.dtype
) -> torch.Tensor:
    """Computes ``quantize`` of one tensor in plain PyTorch, as its specification."""
    return reference_codec.encode_fp8(x.float() * scale, fp8_dtype)
