"""Linear: torch.nn.Linear that computes in FP8 inside ``fp8_autocast``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from ..quantizer import GemmQuantizers
from ..tensor import QuantizedTensor
from ._fp8_module import FP8Module
from ._linear_backward import as_matrix
from ._linear_forward import FP8LinearFunction, HighPrecisionLinearFunction, forward_fp8

__all__ = ["Linear"]

INIT_STD = 0.023


class Linear(FP8Module, torch.nn.Linear):
    """``y = x @ weight.T + bias``, in FP8 inside an enabled ``fp8_autocast`` region.

    Args:
        in_features, out_features: sizes; any, multiples of 16 are fastest.
        bias: learn a bias ``[out_features]``.
        fuse_wgrad_accumulation: add the weight gradient to ``weight.main_grad`` (preallocated
            ``[out_features, in_features]``, its own dtype) instead of making ``weight.grad``;
            ``is_first_microbatch=True`` overwrites it.
        init_method: fills a new weight in place; default N(0, 0.023). The bias starts at 0.
        return_bias: return ``(y, bias)`` with the bias not added, in the dtype of ``y``.
        params_dtype: dtype of the parameters, default ``torch.get_default_dtype()``; ``dtype`` is
            the same.
        skip_weight_param_allocation: own no parameters; ``weight`` (and ``bias``) must then be
            passed to ``forward``.
        device: where the parameters live, ``"meta"`` included.
        sequence_parallel, tp_group, tp_size, get_rng_state_tracker, parallel_mode: not available
            yet; anything but the default raises NotImplementedError.

    Parameters: ``weight`` ``[out_features, in_features]``, ``bias`` ``[out_features]``.
    Interface and defaults follow TransformerEngine's Linear.
    """

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
        init_method: Callable[[torch.Tensor], Any] | None = None,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        skip_weight_param_allocation: bool = False,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        _refuse_parallelism(
            sequence_parallel, tp_group, tp_size, get_rng_state_tracker, parallel_mode
        )
        if params_dtype is not None and dtype is not None and params_dtype != dtype:
            raise ValueError(
                f"Linear: dtype must equal params_dtype, got {dtype} and {params_dtype}"
            )
        torch.nn.Module.__init__(self)
        self.in_features = in_features
        self.out_features = out_features
        self.use_bias = bool(bias)
        self.return_bias = return_bias
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.tp_size = tp_size
        self.parallel_mode = parallel_mode
        self.init_method = init_method
        self._make_fp8_state()
        if skip_weight_param_allocation:
            self.register_parameter("weight", None)
            self.register_parameter("bias", None)
            return
        wanted = params_dtype if params_dtype is not None else dtype
        options: dict[str, Any] = {"device": device, "dtype": wanted}
        self.weight = torch.nn.Parameter(torch.empty(out_features, in_features, **options))
        if bias:
            self.bias = torch.nn.Parameter(torch.empty(out_features, **options))
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Fill the weight by ``init_method`` (default N(0, 0.023)) and the bias with 0."""
        weight, bias = self._parameters["weight"], self._parameters["bias"]
        with torch.no_grad():
            if weight is not None:
                if self.init_method is None:
                    torch.nn.init.normal_(weight, 0.0, INIT_STD)
                else:
                    self.init_method(weight)
            if bias is not None:
                bias.zero_()

    def set_tensor_parallel_group(self, tp_group: Any) -> None:
        """Not available yet: raises NotImplementedError for anything but None."""
        _refuse_parallelism(tp_group=tp_group)

    def extra_repr(self) -> str:
        text = f"in_features={self.in_features}, out_features={self.out_features}"
        text += f", bias={self.use_bias}"
        for name in ("return_bias", "fuse_wgrad_accumulation"):
            if getattr(self, name):
                text += f", {name}=True"
        return text

    def forward(  # type: ignore[override]
        self,
        inp: torch.Tensor,
        weight: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        is_first_microbatch: bool | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Apply the layer to ``inp`` [..., in_features]; gives [..., out_features].

        ``inp`` has the dtype of the parameters (fp32, fp16 or bf16 for FP8), or any of these
        under ``torch.autocast``, whose dtype the output then has. ``weight`` and ``bias`` replace
        the module's own. ``is_first_microbatch``: None quantizes the weight on each call, True
        keeps its FP8 copies, False reuses them while the weight is unchanged.

        Errors: TypeError for a dtype, ValueError for a shape or a missing weight or bias.
        """
        if weight is None:
            weight = self._parameters.get("weight")
            if weight is None:
                weight = self._required("weight")
        else:
            self._check_given("weight", weight, (self.out_features, self.in_features))
        if not self.use_bias:
            bias = None
        elif bias is None:
            bias = self._parameters.get("bias")
            if bias is None:
                bias = self._required("bias")
        else:
            self._check_given("bias", bias, (self.out_features,))
        shape = inp.shape
        if not shape or shape[-1] != self.in_features:
            raise ValueError(
                f"Linear: inp must have a last dimension of {self.in_features}, got {list(shape)}"
            )
        applied = None if self.return_bias else bias
        device_type = inp.device.type
        if torch.is_autocast_enabled(device_type):
            dtype = torch.get_autocast_dtype(device_type)
            with torch.autocast(device_type, enabled=False):
                out = self._run(inp, weight, applied, dtype, is_first_microbatch)
        else:
            dtype = inp.dtype
            if dtype is not weight.dtype or (bias is not None and dtype is not bias.dtype):
                wrong = weight if dtype is not weight.dtype else bias
                raise TypeError(
                    "Linear: inp must have the dtype of the parameters outside torch.autocast, "
                    f"{wrong.dtype}, got {dtype}"  # type: ignore[union-attr]
                )
            out = self._run(inp, weight, applied, dtype, is_first_microbatch)
        if not self.return_bias:
            return out
        return out, out.new_empty(0) if bias is None else bias.to(dtype)

    def _run(
        self,
        inp: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        dtype: torch.dtype,
        is_first_microbatch: bool | None,
    ) -> torch.Tensor:
        quantizers, fp8, recomputed = self._select(weight)
        if quantizers is None or not fp8:
            return self._high_precision(inp, weight, bias, dtype, is_first_microbatch, quantizers)
        cached = None
        if is_first_microbatch is not None:
            # A recompute repeats the forward that filled the cache.
            fill = is_first_microbatch and not recomputed
            cached = self._cached_weight(weight, quantizers, fill)
        if not torch.is_grad_enabled():
            return forward_fp8(inp, weight, bias, quantizers, cached, dtype, False)[0]
        accumulate = None
        if self.fuse_wgrad_accumulation:
            accumulate = is_first_microbatch is not True
        return FP8LinearFunction.apply(inp, weight, bias, quantizers, cached, dtype, accumulate)

    def _high_precision(
        self,
        inp: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        dtype: torch.dtype,
        is_first_microbatch: bool | None,
        quantizers: GemmQuantizers | None,
    ) -> torch.Tensor:
        """Plain maths; with ``quantizers`` the amaxes are staged on the way (calibration)."""
        if quantizers is not None:
            with torch.no_grad():
                quantizers.input.record(as_matrix(inp))
                quantizers.weight.record(weight.contiguous())
        if self.fuse_wgrad_accumulation and weight.requires_grad and torch.is_grad_enabled():
            accumulate = is_first_microbatch is not True
            out = HighPrecisionLinearFunction.apply(inp, weight, bias, dtype, accumulate)
        else:
            inp, weight = inp.to(dtype), weight.to(dtype)
            out = functional.linear(inp, weight, None if bias is None else bias.to(dtype))
        if quantizers is not None and out.requires_grad:
            grad_output = quantizers.grad_output
            out.register_hook(lambda grad: grad_output.record(as_matrix(grad.detach())))
        return out

    def _cached_weight(
        self, weight: torch.Tensor, quantizers: GemmQuantizers, fill: bool
    ) -> QuantizedTensor:
        """Both FP8 copies of ``weight``, made again when asked for or when the weight changed."""
        version = 0 if weight.is_inference() else weight._version
        key = (version, weight.data_ptr(), quantizers.weight.dtype)
        cache = self._modes.weight_cache
        if not fill and cache is not None and cache[0] == key:
            return cache[1]
        # A later training step may need what an evaluation in inference mode cached.
        with torch.inference_mode(False), torch.no_grad():
            quantized, _ = quantizers.weight.quantize(weight.contiguous(), True, True)
        self._modes.weight_cache = (key, quantized)
        return quantized

    def _state_device(self) -> torch.device:
        weight = self._parameters.get("weight")
        if weight is not None:
            return weight.device
        return self._fp8.device if self._fp8.allocated else torch.device("cpu")

    def _required(self, name: str) -> torch.Tensor:
        """A parameter that is not in place: made by a parametrization, or to be passed in."""
        value = getattr(self, name, None)
        if value is None:
            raise ValueError(
                f"Linear: {name} must be passed to forward when the module owns none "
                "(skip_weight_param_allocation=True), got None"
            )
        return value

    def _check_given(self, name: str, value: torch.Tensor, shape: tuple[int, ...]) -> None:
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"Linear: {name} must be a tensor, got {type(value).__name__}")
        if tuple(value.shape) != shape:
            raise ValueError(
                f"Linear: {name} must have shape {list(shape)}, got {list(value.shape)}"
            )


def _refuse_parallelism(
    sequence_parallel: bool = False,
    tp_group: Any = None,
    tp_size: int = 1,
    get_rng_state_tracker: Any = None,
    parallel_mode: str | None = None,
) -> None:
    if parallel_mode not in (None, "column", "row", "Column", "Row"):
        raise ValueError(
            f"Linear: parallel_mode must be None, 'column' or 'row', got {parallel_mode!r}"
        )
    for name, value, default in (
        ("sequence_parallel", sequence_parallel, False),
        ("tp_group", tp_group, None),
        ("tp_size", tp_size, 1),
        ("get_rng_state_tracker", get_rng_state_tracker, None),
        ("parallel_mode", parallel_mode, None),
    ):
        if value is not default and value != default:
            raise NotImplementedError(
                f"Linear: {name} must be {default!r} (parallelism is not available), got {value!r}"
            )
