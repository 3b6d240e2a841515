"""Linear: torch.nn.Linear that computes in FP8 inside ``fp8_autocast``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from ..ops.binding import OpFunction, once_differentiable, unwrapped
from ..runtime.named_arguments import named_arguments
from ._core import arguments as _arguments
from ._core.arguments import VAGUE, explain, initialize, materialize
from ._core.gemm import FP8Call, adds_in_product, as_matrix
from ._core.heads import HeadGradients, HeadLayout, filled_gradients, sorted_bias, split_output
from ._core.low_rank import LowRank, check_low_rank, fits, fused_product, low_rank_product
from ._core.parallel import ParallelModule, divided, tag
from ._core.programs import apply_function, repeatable, take_saved

__all__ = ["Linear", "LinearLayer", "LinearParameters"]


class LinearParameters(ParallelModule):
    """FP8 module with a weight [out, in] and a bias [out], each of one parameter or several.

    Base of ``Linear``, ``LayerNormLinear`` and Megatron's layers, not to be constructed itself. If
    the layer is split over ranks, the weight is [out / ranks, in] (``"column"``) or [out, in /
    ranks] (``"row"``).

    Attributes:
        in_features, out_features: columns and rows of this rank's weight.
        parallel_mode: ``"column"``, ``"row"`` or None.
        split: names of the parameters with the rows of each; None for one parameter.
    """

    in_features: int
    out_features: int
    parallel_mode: str | None
    split: dict[str, int] | None
    can_separate_rows = True

    def _make_linear(
        self, parameters_split: Any, dtype: torch.dtype, device: Any, own: bool = True
    ) -> None:
        """Registers weight and bias, with no values yet; both as None unless ``own``."""
        owner = type(self).__name__
        column = self.parallel_mode == "column"
        if column:
            self.out_features = divided(owner, "out_features", self.out_features, self.tp_size)
        elif self.parallel_mode == "row":
            self.in_features = divided(owner, "in_features", self.in_features, self.tp_size)
        own_split = parameters_split
        if column and isinstance(parameters_split, dict):  # with this rank's numbers of rows
            own_split = {
                name: divided(owner, "parameters_split", rows, self.tp_size)
                for name, rows in parameters_split.items()
            }
        self.split = _arguments.split_names(owner, own_split, self.out_features)
        if self.split is not None:
            for name, other in (
                ("skip_weight_param_allocation", not own),
                ("fuse_wgrad_accumulation", self.fuse_wgrad_accumulation),
                ("delay_wgrad_compute", self.delay_wgrad_compute),
            ):
                if other:
                    raise ValueError(
                        f"{owner}: parameters_split must be None with {name}=True, "
                        f"got {parameters_split!r}"
                    )
        parts = {"": self.out_features} if self.split is None else self.split
        for part, rows in parts.items():
            weight = bias = None
            if own:
                weight = _arguments.parameter((rows, self.in_features), dtype, device)
                if self.use_bias:
                    bias = _arguments.parameter((rows,), dtype, device)
            if self.parallel_mode is not None:
                tag(weight, 0 if column else 1, False, self.tp_group)
                own_rows = not column and self.sequence_parallel
                tag(bias, 0 if column else None, own_rows, self.tp_group)
            prefix = f"{part}_" if part else ""
            self.register_parameter(f"{prefix}weight", weight)
            self.register_parameter(f"{prefix}bias", bias)

    @property
    def joins_weights(self) -> bool:  # type: ignore[override]
        """Returns True if each forward makes the weight from several parameters."""
        return self.split is not None

    def _split_modes(self) -> tuple[str | None, ...]:
        return (self.parallel_mode,)

    def _linear_names(self, kind: str) -> list[str]:
        """Returns the parameter names of the parts of ``kind``, ``"weight"`` or ``"bias"``."""
        return [kind] if self.split is None else [f"{part}_{kind}" for part in self.split]

    def _reset_linear(self) -> None:
        """Fills the weight with ``init_method`` and the bias with 0."""
        with self._forked(self.parallel_mode is not None):
            for name in self._linear_names("weight"):
                _arguments.fill(self._parameters[name], self.init_method)
        for name in self._linear_names("bias"):
            bias = self._parameters[name]
            if bias is not None:
                torch.nn.init.zeros_(bias)

    def _linear_operands(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns the module's own weight [out, in] and its bias [out] or None."""
        weight: torch.Tensor | None = self._parameters.get("weight")
        if weight is None:
            weight = self._required("weight")
        if not self.use_bias:
            return weight, None
        bias: torch.Tensor | None = self._parameters.get("bias")
        return weight, self._required("bias") if bias is None else bias

    def _required(self, name: str) -> torch.Tensor:
        """Returns a weight or bias, joined from its parts, or made by a parametrization."""
        if self.split is not None:
            return torch.cat([getattr(self, part) for part in self._linear_names(name)])
        value = getattr(self, name, None)
        if value is None:
            raise ValueError(
                f"{type(self).__name__}: {name} must be passed to forward when the module owns "
                "none (skip_weight_param_allocation=True), got None"
            )
        return value

    def _weight_sources(self, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if self.split is None:
            return (weight,)
        parts = [self._parameters.get(name) for name in self._linear_names("weight")]
        # A part that a parametrization makes would be made once more, and be another one.
        whole = any(part is None for part in parts)
        return (weight,) if whole else tuple(parts)  # type: ignore[arg-type]


class LinearLayer(LinearParameters):
    """``y = x @ weight.T + bias``, in FP8 inside an enabled ``fp8_autocast`` region.

    Elsewhere it computes as ``torch.nn.Linear`` does. Initial values follow TransformerEngine, not
    torch: the weight is drawn from N(0, 0.023^2), the bias is 0.

    Args:
        in_features, out_features: global sizes of input and output, over all ranks. Any size works;
            multiples of 16 are fastest.
        bias: learn a bias ``[out_features]``.
        fuse_wgrad_accumulation: add the weight gradient to ``weight.main_grad`` instead of
            ``weight.grad``; with ``is_first_microbatch=True`` overwrite it. The caller allocates
            ``main_grad``, ``[out_features, in_features]``; its dtype may differ from the weight's.
        init_method: fills a new weight in place; default N(0, 0.023^2). The bias starts at 0.
        return_bias: return ``(y, bias)``; the bias, in the dtype of ``y``, is not added.
        params_dtype: dtype of the parameters, default ``torch.get_default_dtype()``; another name:
            ``dtype``.
        skip_weight_param_allocation: allocate no parameters; ``weight`` (and ``bias``) must then be
            passed to ``forward``.
        parameters_split: split the weight by rows into parameters ``<name>_weight`` (and
            ``<name>_bias``), joined in each forward: a list of names for equal parts, or a dict
            from names to numbers of rows.
        delay_wgrad_compute: do not compute the weight gradient in backward; ``backward_dw()`` does.
        save_original_input: save the input in bf16 or fp32 for backward instead of its FP8 copy,
            and cast it again in backward. This saves memory if the op that produced the input saves
            it anyway.
        name: name of the module in reports.
        device: device of the parameters; those on ``"meta"`` get memory by ``reset_parameters()``.
        parallel_mode: None, ``"column"`` (each rank has out_features / ranks rows of the weight) or
            ``"row"`` (in_features / ranks columns).
        tp_group: the ``ProcessGroup`` of the ranks that the layer is split over.
        tp_size: number of those ranks; needed only if ``tp_group`` is None and set later by
            ``set_tensor_parallel_group``.
        sequence_parallel: also split dimension 0 of a column-parallel layer's input, or of a
            row-parallel layer's output, over the ranks. The input's rows are gathered as FP8 data
            if all ranks have the same scale (delayed scaling reduced over the ranks, tensorwise
            recipes).
        get_rng_state_tracker: function that returns a tracker of random states such as
            ``CudaRNGStatesTracker``. Initial values of split weights are drawn inside its
            ``fork(name)``; None uses PyTorch's global random state.
        rng_tracker_name: name of the random state to fork; None uses the tracker's default.

    Its parameters are ``weight`` ``[out_features, in_features]`` and ``bias`` ``[out_features]``.
    Interface and defaults follow TransformerEngine's Linear.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: the ranks do not divide a size, ``parallel_mode`` is unknown, or arguments
            exclude each other.
    """

    @named_arguments()
    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        rng_tracker_name: str | None = None,
        init_method: Callable[[torch.Tensor], Any] | None = None,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        skip_weight_param_allocation: bool = False,
        parameters_split: Any = None,
        delay_wgrad_compute: bool = False,
        save_original_input: bool = False,
        name: str | None = None,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        wanted = self._take_options(locals(), "in_features", "out_features")
        own = not skip_weight_param_allocation
        self._make_linear(parameters_split, wanted, device, own)
        if own:
            initialize(self)

    def reset_parameters(self) -> None:
        """Fills the weight with ``init_method`` (default N(0, 0.023^2)) and the bias with 0.

        Parameters on the meta device first get memory on PyTorch's default device, or on the
        current GPU if the default device is the CPU and there is a GPU. To choose another device,
        call ``to_empty`` first.
        """
        materialize(self)
        self._reset_linear()

    def extra_repr(self) -> str:
        text = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{text}, bias={self.use_bias}{self._shown_options()}"

    def forward(
        self,
        inp: torch.Tensor,
        weight: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        is_first_microbatch: bool | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Applies the layer to ``inp`` [..., in_features].

        Args:
            inp: in the dtype of the parameters; in FP8, fp32, fp16 or bf16. Under
                ``torch.autocast`` it may have any floating-point dtype (in FP8 one of these three),
                and the output has autocast's dtype; FP8 data is then cast directly from ``inp``,
                without rounding to autocast's dtype first.
            weight, bias: used instead of the module's own, in their shapes.
            is_first_microbatch: None quantizes the weight on each call, True caches its FP8 copies,
                False reuses these while the weight is unchanged. Writes to ``weight.data``, or
                through another tensor that shares its memory, are not noticed: call with True or
                None after them.

        Returns:
            ``out`` [..., out_features], or ``(out, bias)`` with ``return_bias``. A layer without a
            bias returns an empty tensor for it.

        Raises:
            TypeError: a tensor has another dtype than those above.
            ValueError: a shape does not match, or a weight or bias is missing.
        """
        try:
            if weight is None and bias is None:
                weight, bias = self._linear_operands()
                if is_first_microbatch is None and not self.return_bias:
                    call = self._known_call(inp, self.in_features, (weight, bias))
                    if call is not None:
                        if call.is_fp8:
                            return LinearFunction.direct(unwrapped(inp), weight, bias, call, None)
                        return functional.linear(inp, weight, bias)
            else:
                weight, bias = self._operands(weight, bias)
            applied = None if self.return_bias else bias
            out = self._call(
                inp, self.in_features, (weight, bias), (weight,), is_first_microbatch, weight,
                applied,
            )  # fmt: skip
        except VAGUE as error:
            explain(self, error, {"inp": inp}, {"weight": weight, "bias": bias})
            raise
        if not self.return_bias:
            return out
        return out, out.new_empty(0) if bias is None else bias.to(out.dtype)

    # Python's own errors about a call then name the class that users construct.
    forward.__qualname__ = "Linear.forward"

    def forward_to_heads(
        self,
        inp: torch.Tensor,
        heads: HeadLayout,
        is_first_microbatch: bool | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Applies a layer whose output is attention heads; in FP8 also splits the output.

        Args:
            inp, is_first_microbatch: as in ``forward``.
            heads: layout of the heads in the output features.

        Returns:
            In FP8 ``(queries, keys, values)``, each [..., heads, size], or ``(keys, values)`` if
            ``heads.repeats`` is 0; else the output [..., out_features], not split.

        Raises:
            TypeError: ``inp`` has another dtype than ``forward`` takes.
            ValueError: a shape does not match.
        """
        weight, bias = self._linear_operands()
        return self._call(
            inp, self.in_features, (weight, bias), (weight,), is_first_microbatch, weight, bias,
            heads,
        )  # fmt: skip

    def forward_adding(
        self,
        inp: torch.Tensor,
        residual: torch.Tensor,
        is_first_microbatch: bool | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Applies the layer with its bias, and adds a residual if the GEMM can.

        Args:
            inp, is_first_microbatch: as in ``forward``.
            residual: [..., out_features].

        Returns:
            ``(out, None)`` with the sum, which an FP8 GEMM rounds once, or ``(out, residual)`` for
            the caller to add, as in a layer split over ranks and for a residual of another dtype.

        Raises:
            TypeError: ``inp`` has another dtype than ``forward`` takes.
            ValueError: a shape does not match.
        """
        if self.parallel_mode is not None:  # the ranks' GEMMs are summed first
            return self(inp, is_first_microbatch=is_first_microbatch), residual
        weight, bias = self._linear_operands()
        if residual.shape[:-1] != inp.shape[:-1] or residual.shape[-1] != self.out_features:
            raise ValueError(
                f"{type(self).__name__}: residual must have shape "
                f"{[*inp.shape[:-1], self.out_features]}, got {list(residual.shape)}"
            )
        if is_first_microbatch is None:
            call = self._known_call(inp, self.in_features, (weight, bias))
            if call is not None:
                if call.is_fp8 and adds_in_product(call, 0, residual):
                    operands = (unwrapped(inp), weight, bias, call, None, unwrapped(residual))
                    return LinearFunction.direct(*operands), None
                if call.is_fp8:
                    return self._run(call, inp, weight, bias), residual
                return functional.linear(inp, weight, bias), residual
        return self._call(
            inp, self.in_features, (weight, bias), (weight,), is_first_microbatch, weight, bias,
            None, residual,
        )  # fmt: skip

    def _operands(
        self, weight: torch.Tensor | None, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns the weight and bias of a call that is given one of them, or both."""
        if weight is None:
            weight = self._parameters.get("weight")
            weight = self._required("weight") if weight is None else weight
        else:
            if self.split is not None:  # its cache belongs to the parts
                raise ValueError("Linear: weight must be None with parameters_split, got a tensor")
            self._check_given("weight", weight, (self.out_features, self.in_features))
        if not self.use_bias:
            if bias is not None:
                raise ValueError("Linear: bias must be None with bias=False, got one")
            return weight, None
        if bias is None:
            bias = self._parameters.get("bias")
            return weight, self._required("bias") if bias is None else bias
        self._check_given("bias", bias, (self.out_features,))
        return weight, bias

    def _run(
        self,
        call: FP8Call,
        inp: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        heads: HeadLayout | None = None,
        residual: torch.Tensor | LowRank | None = None,
    ) -> Any:
        """Computes the output; with a residual or ``LowRank``, that of the method that adds it."""
        if residual is not None:
            if isinstance(residual, LowRank):
                if fits(call, weight, bias):
                    return fused_product(call, inp, weight, bias, residual)
                out = self._run(call, inp, weight, bias)
                low = residual.cast_to(call.dtype)
                return out + low_rank_product(low, inp.to(call.dtype), call.options[0])
            if not adds_in_product(call, 0, residual):
                return self._run(call, inp, weight, bias), residual
            return apply_function(LinearFunction, (inp, weight, bias), call, heads, residual), None
        if not call.is_fp8:
            return self._linear(inp, weight, bias, call)
        return apply_function(LinearFunction, (inp, weight, bias), call, heads)

    def _check_given(self, name: str, value: torch.Tensor, shape: tuple[int, ...]) -> None:
        """Checks that an argument of ``forward`` is a tensor of a given shape."""
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"Linear: {name} must be a tensor, got {type(value).__name__}")
        if tuple(value.shape) != shape:
            raise ValueError(
                f"Linear: {name} must have shape {list(shape)}, got {list(value.shape)}"
            )


class Linear(LinearLayer, torch.nn.Linear):  # type: ignore[misc]
    """``LinearLayer`` as a ``torch.nn.Linear``, for tools that look for that class."""

    __doc__ = LinearLayer.__doc__

    def forward_low_rank(
        self,
        inp: torch.Tensor,
        down: torch.Tensor,
        up: torch.Tensor,
        scaling: float = 1.0,
        low_rank_inp: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Applies the layer and adds a low-rank GEMM, as a LoRA adapter does.

        In FP8 with a frozen weight and bias, the layer's GEMM adds the low-rank result before
        rounding, and the dgrad GEMM does the same in backward. Otherwise torch's ops add it.

        In FP8, layers with frozen weight and bias that are called in a row with the same tensor,
        such as query, key and value projections, also share work: they cast the tensor once if the
        recipe keeps no state, and accumulate its gradient in their GEMMs. A write to the tensor
        ends the sharing. Writes through ``data``, by a collective, or through another tensor that
        shares its memory are not noticed: layers then reuse the old cast until the first of them is
        called again.

        Args:
            inp: [..., in_features], as in ``forward``.
            down: ``[rank, in_features]``, in a dtype that ``forward`` accepts.
            up: ``[out_features, rank]``, in a dtype that ``forward`` accepts.
            scaling: factor of the added result.
            low_rank_inp: input of the added GEMM, in the shape of ``inp``, such as ``inp`` after
                dropout; None uses ``inp``.

        Returns:
            ``forward(inp) + scaling * (low_rank_inp @ down.T) @ up.T``, [..., out_features].

        Raises:
            TypeError: an argument has a wrong type, or a tensor has a dtype that ``forward`` does
                not allow with these parameters.
            ValueError: a shape does not match, or a tensor is on another device than ``inp``.
            NotImplementedError: the layer returns its bias, or is split over ranks.
        """
        name = type(self).__name__
        if self.return_bias or self.parallel_mode is not None:
            what = "return_bias" if self.return_bias else "parallel_mode"
            raise NotImplementedError(
                f"{name}: {what} must not be set for forward_low_rank, got {getattr(self, what)!r}"
            )
        low = LowRank(down, up, scaling, low_rank_inp)
        check_low_rank(name, inp, low, self.in_features, self.out_features)
        weight, bias = self._linear_operands()
        parameters = (weight, bias, down, up, low_rank_inp)
        return self._call(
            inp, self.in_features, parameters, (weight,), None, weight, bias, None, low
        )


class LinearFunction(OpFunction):
    """``inp @ weight.T + bias [+ residual]`` [..., out] with quantized fprop, dgrad and wgrad.

    A residual requires ``adds_in_product``. With ``heads``, returns queries, keys and values.
    """

    LABEL = "Linear"

    @staticmethod
    def forward(
        ctx: Any,
        inp: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        call: FP8Call,
        heads: HeadLayout | None,
        residual: torch.Tensor | None = None,
    ) -> Any:
        if call.programs is None:
            return _linear_forward(ctx, inp, weight, bias, residual, call, heads)
        key = (
            ctx.needs_input_grad, call.dtype, inp.shape, heads, call.keep_columnwise,
            call.options[0].save_original, residual is None,
        )  # fmt: skip
        tensors = (inp, weight, bias, residual)
        return call.programs.forward(ctx, _linear_forward, tensors, (call, heads), key)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple:
        found = _linear_backward(ctx, *grads)
        needs = ctx.needs_input_grad  # shorter without a residual
        return found if len(needs) == len(found) else (*found, grads[0] if needs[5] else None)


def _linear_forward(
    ctx: Any,
    inp: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    call: FP8Call,
    heads: HeadLayout | None,
) -> Any:
    need_input, need_weight, need_bias = ctx.needs_input_grad[:3]
    gemm = call.gemm(0, weight, need_input, need_weight, call.keep_columnwise)
    x = as_matrix(inp)
    quantized, part = gemm.cast_input(x)
    operand, is_sorted = gemm.cast_weight(weight, call.cached[0], heads)
    applied = sorted_bias(bias, heads) if is_sorted else bias
    c = None if residual is None else as_matrix(residual)
    out = gemm.fprop(quantized, weight, operand, applied, call.dtype, inp.shape, c)
    original = inp if inp.is_contiguous() else x
    ctx.save_for_backward(*gemm.saved(original, part, weight, operand))
    ctx.gemm, ctx.programs, ctx.heads = gemm, None, heads
    ctx.bias_dtype = bias.dtype if need_bias and bias is not None else None
    ctx.input_shape = inp.shape
    ctx.input_dtype = inp.dtype
    ctx.device_type = inp.device.type
    if heads is None:
        return out
    parts = split_output(out, heads, is_sorted)
    ctx.output_shapes = [part.shape for part in parts]
    return parts


@repeatable
def _linear_backward(ctx: Any, *grads: Any) -> tuple:
    gemm, saved = ctx.gemm, take_saved(ctx)
    if saved[0] is not None and saved[0].dim() != 2:  # the original input
        saved = (as_matrix(saved[0]), *saved[1:])
    gathered = gemm.start_gather(saved)
    if ctx.heads is None:
        grad_output: Any = as_matrix(grads[0])
    else:
        filled = filled_gradients(ctx.output_shapes, grads, *grads)
        grad_output = HeadGradients(ctx.heads, filled)
    quantized, grad_bias, dy = gemm.cast_gradient(grad_output, ctx.bias_dtype)
    grad_input = grad_weight = pending = None
    if gemm.need_input:
        grad_input, pending = gemm.reduced_dgrad(saved, quantized, ctx.input_dtype)
    if gemm.need_weight:
        grad_weight = gemm.wgrad(saved, dy, quantized, gathered)
    if pending is not None:
        grad_input = pending.wait()
    if grad_input is not None and len(ctx.input_shape) != 2:
        grad_input = grad_input.view(ctx.input_shape)
    return grad_input, grad_weight, grad_bias, None, None
