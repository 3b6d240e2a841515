"""Linear layers with a low-rank adapter, and layers that share the cast of an input."""

from __future__ import annotations

import threading
import weakref
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad
from torch.nn import functional

from ...fp8.autocast import local
from ...fp8.tensor import QuantizedTensor
from ...ops.binding import OpFunction, once_differentiable
from ...runtime.tracing import is_traced
from .gemm import FP8Call, GemmOptions, as_matrix
from .plain_functions import HighPrecisionLinearFunction
from .programs import apply_function, take_saved, without_autocast


class Entry(NamedTuple):
    """An input, and the data that a layer made from it.

    Attributes:
        inp: weak reference to the input as the caller passed it.
        key: ``Quantizer.cast_key()`` of the quantizer that made the rowwise copy ``quantized``.
        alias: the input as an output of the autograd function that took it last, or None.
        grad_fn: the input's node in autograd's graph when ``alias`` was made.
        first: the weight of the layer that took the input first.
    """

    inp: weakref.ref
    version: int
    stream: int
    key: tuple | None
    quantized: QuantizedTensor | None
    alias: torch.Tensor | None
    grad_fn: Any
    first: torch.Tensor

    def taken(self, inp: torch.Tensor) -> torch.Tensor:
        """Returns the alias, or ``inp`` if the input was detached after the alias was made."""
        alias = self.alias
        if alias is None or not inp.requires_grad or inp.grad_fn is not self.grad_fn:
            return inp
        return alias


class _InputRef(weakref.ref):
    """Weak reference to an input, which knows the ``LastInput`` whose entry has it."""

    __slots__ = ("owner",)
    owner: weakref.ref


def _forget(ref: Any) -> None:
    """Drops the entry of an input that was freed."""
    owner = ref.owner()
    if owner is not None and owner.entry is not None and owner.entry.inp is ref:
        owner.entry = None


class LastInput:
    """Holder of the ``Entry`` of the input that was noted last.

    The entry is dropped at the end of its region or of the input's life, by the next input, or by
    the first backward of a layer that noted it. Each thread has its own holder, but a backward may
    drop the entry in any thread.
    """

    __slots__ = ("__weakref__", "entry")

    def __init__(self) -> None:
        self.entry: Entry | None = None

    def find(self, inp: torch.Tensor, weight: torch.Tensor) -> Entry | None:
        """Returns the entry if it is for ``inp`` on this stream, and ``inp`` was not written since.

        The layer that took the input first gets None: a collective or the replay of a CUDA graph
        may have written the next batch without a new version.
        """
        entry = self.entry
        if entry is None or entry.inp() is not inp or inp._version != entry.version:
            return None
        if entry.first is weight:
            return None
        return entry if entry.stream == _stream(inp) else None

    def note(
        self,
        inp: torch.Tensor,
        key: tuple | None,
        quantized: QuantizedTensor | None,
        alias: torch.Tensor | None,
        first: torch.Tensor,
    ) -> None:
        """Replaces the entry by one of the ``Entry``'s attributes."""
        ref = _InputRef(inp, _forget)
        ref.owner = weakref.ref(self)
        node = None if alias is None else inp.grad_fn
        self.entry = Entry(ref, inp._version, _stream(inp), key, quantized, alias, node, first)

    def clear(self) -> None:
        """Drops the entry."""
        self.entry = None


class _Recompute(threading.local):
    """Holds the ``LastInput`` of forwards that run outside of a region, in a backward."""

    def __init__(self) -> None:
        self.last = LastInput()


_recompute = _Recompute()


def last_input(inp: torch.Tensor) -> LastInput | None:
    """Returns the holder for an input in this thread and region; None if nothing may be shared.

    Nothing may be shared in inference mode, which counts no versions, and while a CUDA graph is
    captured, because replays do not run what was computed before.
    """
    if inp.is_inference() or (inp.is_cuda and torch.cuda.is_current_stream_capturing()):
        return None
    region = local.region
    if region is None:
        return _recompute.last
    if region.last_input is None:
        region.last_input = LastInput()
    return region.last_input


def cast_once(entry: Entry | None, quantizer: Any, x: torch.Tensor) -> QuantizedTensor:
    """Returns the rowwise copy of an input: the entry's if a cast would be bitwise equal."""
    if entry is not None and entry.quantized is not None:
        key = quantizer.cast_key()
        if key is not None and key == entry.key:
            return entry.quantized
    return quantizer.quantize(x, True, False)[0]


def _stream(x: torch.Tensor) -> int:
    """Returns the handle of the current CUDA stream of a tensor's device; 0 on a CPU."""
    return torch._C._cuda_getCurrentRawStream(x.device.index) if x.is_cuda else 0


class LowRank(NamedTuple):
    """GEMM ``scaling * (inp @ down.T) @ up.T`` that a layer adds to its own.

    ``down`` is ``[rank, in]``, ``up`` ``[out, rank]``. ``inp`` is for example the layer's input
    after a dropout; None stands for the layer's input.
    """

    down: torch.Tensor
    up: torch.Tensor
    scaling: float
    inp: torch.Tensor | None

    def cast_to(self, dtype: torch.dtype) -> LowRank:
        """Returns the low-rank GEMM with all tensors in ``dtype``; differentiable."""
        inp = None if self.inp is None else self.inp.to(dtype)
        return LowRank(self.down.to(dtype), self.up.to(dtype), self.scaling, inp)


def check_low_rank(
    name: str, inp: torch.Tensor, low: LowRank, in_features: int, out_features: int
) -> None:
    """Checks types, devices and shapes of a low-rank GEMM's arguments."""
    if not isinstance(low.scaling, (float, int)):
        raise TypeError(f"{name}: scaling must be a float, got {type(low.scaling).__name__}")
    down, up, low_inp = low.down, low.up, inp if low.inp is None else low.inp
    for label, tensor in (("inp", inp), ("down", down), ("up", up), ("low_rank_inp", low_inp)):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name}: {label} must be a torch.Tensor, got {type(tensor).__name__}")
        if tensor.device != inp.device:  # some of torch's ops take one on the meta device
            raise ValueError(
                f"{name}: {label} must be on the device of inp, {inp.device}, got {tensor.device}"
            )
    rank = down.shape[0] if down.dim() else 0
    for label, tensor, shape in (
        ("down", down, (rank, in_features)),
        ("up", up, (out_features, rank)),
        ("low_rank_inp", low_inp, inp.shape),
    ):
        if tensor.shape != shape:
            raise ValueError(
                f"{name}: {label} must have shape {list(shape)}, got {list(tensor.shape)}"
            )


def low_rank_product(low: LowRank, inp: torch.Tensor, options: GemmOptions) -> torch.Tensor:
    """Computes a low-rank GEMM ``[..., out]`` by torch's ops; ``inp`` is the layer's own input."""
    x = inp if low.inp is None else low.inp
    if options.independent_rows:
        multiply, plain = HighPrecisionLinearFunction.apply, GemmOptions(independent_rows=True)
        small = multiply(x, low.down, None, x.dtype, plain)
        return multiply(small, low.up, None, x.dtype, plain) * low.scaling
    return functional.linear(functional.linear(x, low.down), low.up) * low.scaling


def fits(call: FP8Call, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Returns True if ``fused_product`` can compute a call of a layer.

    It supports FP8 GEMMs of frozen weights that are not split over ranks, outside of tracing.
    """
    options = call.options[0]
    if not call.is_fp8 or options.parallel is not None or options.independent_rows:
        return False
    if is_traced() or forward_ad._current_level >= 0:
        return False
    if not torch.is_grad_enabled():
        return True
    return not weight.requires_grad and (bias is None or not bias.requires_grad)


def fused_product(
    call: FP8Call,
    inp: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    low: LowRank,
) -> torch.Tensor:
    """Computes ``inp @ weight.T + bias`` plus a low-rank GEMM, for a call that ``fits``.

    Layers called one after another with the same input share its cast if the recipe keeps no state.
    Each adds its gradient of the input to that of the next layer.
    """
    low = low.cast_to(call.dtype)
    if low.inp is None and inp.dtype is not call.dtype:
        low = low._replace(inp=inp.to(call.dtype))
    last = last_input(inp)
    entry = None if last is None else last.find(inp, weight)
    assert call.quantizers is not None
    quantizer = call.quantizers[0].input
    x = cast_once(entry, quantizer, as_matrix(inp.detach()))
    taken = inp if entry is None else entry.taken(inp)
    tensors = (taken, low.inp, weight, bias, low.down, low.up)
    rest = (low.scaling, call, x, last)
    if not torch.is_grad_enabled():
        tensors = (inp, *tensors[1:])
    out, alias = apply_function(LowRankLinearFunction, tensors, *rest)
    if last is not None:
        keep = inp.requires_grad and torch.is_grad_enabled()
        key = quantizer.cast_key()
        first = weight if entry is None else entry.first
        last.note(inp, key, None if key is None else x, alias if keep else None, first)
    return out


class LowRankLinearFunction(OpFunction):
    """``inp @ weight.T + bias + scaling * (low_inp @ down.T) @ up.T`` with a quantized first GEMM.

    Weight and bias are frozen. The low-rank GEMMs are in the dtype of ``down``, and scaled before
    rounding. The second output is ``inp``: a later function that takes it returns a gradient for
    it, to which a GEMM of this function adds its own.
    """

    LABEL = "Linear"

    @staticmethod
    def forward(
        ctx: Any,
        inp: torch.Tensor,
        low_inp: torch.Tensor | None,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        down: torch.Tensor,
        up: torch.Tensor,
        scaling: float,
        call: FP8Call,
        quantized: Any,
        last: LastInput | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        gemm = call.gemm(0, weight, ctx.needs_input_grad[0], False, call.keep_columnwise)
        operand, _ = gemm.cast_weight(weight, call.cached[0])
        taken = inp if low_inp is None else low_inp
        x = as_matrix(taken)
        small = x @ down.t()
        c = None
        if gemm.quantizers.backend.adds:
            c = _scaled(small, up.t(), scaling)
        out = gemm.fprop(quantized, weight, operand, bias, call.dtype, inp.shape, c
        )  # fmt: skip
        if c is None:
            out.view(small.shape[0], out.shape[-1]).addmm_(small, up.t(), alpha=scaling)
        needs = ctx.needs_input_grad
        ctx.save_for_backward(
            None if not needs[4] else taken if taken.is_contiguous() else x,
            small if needs[5] else None,
            down if needs[0] or needs[1] else None,
            up if needs[0] or needs[1] or needs[4] else None,
            *gemm.saved(None, None, weight, operand),
        )
        ctx.set_materialize_grads(False)
        ctx.gemm, ctx.scaling = gemm, scaling
        ctx.is_own = low_inp is None
        ctx.input_shape, ctx.input_dtype = inp.shape, inp.dtype
        ctx.device_type = inp.device.type
        ctx.last = None if last is None else weakref.ref(last)
        return out, inp.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor | None, later: torch.Tensor | None) -> tuple:
        last = None if ctx.last is None else ctx.last()
        if last is not None:  # what forward made is of no use from here on
            last.clear()
        if grad is None:
            _keep_saved(ctx)
            return later, *(None,) * 9
        return without_autocast(_low_rank_backward, ctx, grad, later)


def _keep_saved(ctx: Any) -> None:
    """Keeps the saved tensors for a later backward of the output.

    The backward that runs passes only the input's gradient on, and autograd would free them.
    """
    if torch.compiler.is_compiling():
        return
    try:
        saved = ctx.saved_tensors
    except RuntimeError:  # freed by a backward of the output, or kept already
        return
    ctx.taken = saved
    ctx.versions = [0 if t is None or t.is_inference() else t._version for t in saved]


def _take_unchanged(ctx: Any) -> tuple:
    """Returns the saved tensors, as ``take_saved``; those of ``_keep_saved`` if not written to."""
    kept = getattr(ctx, "taken", None) is not None
    saved = take_saved(ctx)
    if kept:
        for tensor, version in zip(saved, ctx.versions, strict=True):
            if tensor is not None and not tensor.is_inference() and tensor._version != version:
                raise RuntimeError(
                    "Linear: a tensor needed for gradient computation has been modified by an "
                    f"inplace operation: {list(tensor.shape)} is at version {tensor._version}; "
                    f"expected version {version}"
                )
    return saved


def _low_rank_backward(ctx: Any, grad: torch.Tensor, later: torch.Tensor | None) -> tuple:
    """Returns the gradients of the arguments; ``later`` is that of the second output."""
    needs, scaling = ctx.needs_input_grad, ctx.scaling
    x, small, down, up, *saved = _take_unchanged(ctx)
    dy = as_matrix(grad)
    grad_inp = grad_low = grad_down = grad_up = None
    d_small: Any = None
    if needs[5]:
        grad_up = _scaled(dy.t(), small, scaling)
    if needs[4] or needs[1] or (needs[0] and ctx.is_own):
        d_small = _scaled(dy, up, scaling)
    if needs[4]:
        grad_down = d_small.t() @ as_matrix(x)
    del x, small
    if needs[1]:
        grad_low = (d_small @ down).view(ctx.input_shape)
    if needs[0]:
        c = None if later is None else as_matrix(later)
        product = (d_small, down) if ctx.is_own else None
        grad_inp = _input_gradient(ctx, tuple(saved), dy, product, c).view(ctx.input_shape)
    return grad_inp, grad_low, None, None, grad_down, grad_up, None, None, None, None


def _input_gradient(
    ctx: Any,
    saved: tuple,
    dy: torch.Tensor,
    product: tuple[torch.Tensor, torch.Tensor] | None,
    c: torch.Tensor | None,
) -> torch.Tensor:
    """Computes ``dy @ weight + product + c`` [rows, in]; ``product`` has two low-rank factors."""
    gemm, dtype = ctx.gemm, ctx.input_dtype
    quantized = gemm.cast_gradient(dy, None)[0]
    adds = gemm.quantizers.backend.adds
    if adds and c is None and product is not None:
        c, product = product[0] @ product[1], None
    dx = gemm.dgrad(saved, quantized, dtype, None, c if adds else None)
    if product is not None:
        dx.addmm_(*product)
    return dx if adds or c is None else dx.add_(c)


def _scaled(a: torch.Tensor, b: torch.Tensor, scaling: float) -> torch.Tensor:
    """Computes ``scaling * a @ b``, rounded once."""
    return torch.addmm(a.new_empty(()), a, b, beta=0, alpha=scaling)
