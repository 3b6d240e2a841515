"""Linear: torch.nn.Linear that computes in FP8 inside ``fp8_autocast``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ._core import arguments as _arguments
from ._core.linear_function import LinearFunction, without_autograd
from ._core.linear_parameters import LinearParameters
from ._core.materialize import initialize, materialize
from ._core.parallel import checked_mode
from ._core.torch_autocast import is_autocast

__all__ = ["Linear", "LinearLayer"]


class LinearLayer(LinearParameters):
    """``y = x @ weight.T + bias``, in FP8 inside an enabled ``fp8_autocast`` region.

    Elsewhere it computes as ``torch.nn.Linear`` does. Its initial values are not that class's but
    TransformerEngine's: the weight is drawn from N(0, 0.023), the bias is 0.

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
        parameters_split: names (equal parts) or a dict name -> rows: the weight and the bias are
            then parameters ``<name>_weight``, ``<name>_bias``, joined in each forward.
        delay_wgrad_compute: leave the weight gradient out of backward; ``backward_dw()`` makes it.
        save_original_input: save the input as it came instead of its FP8 copy, which is made again
            in backward: less memory where the input is saved by its producer anyway.
        name: names the module in reports.
        device: where the parameters live; on ``"meta"`` until ``reset_parameters()``.
        parallel_mode: None, ``"column"`` (the rank has out_features / ranks rows of the weight) or
            ``"row"`` (in_features / ranks columns).
        tp_group, tp_size: the ranks that the layer is split over, or their number, with
            ``set_tensor_parallel_group`` to be called before forward.
        sequence_parallel: dimension 0 of what enters a column-parallel layer, or leaves a
            row-parallel one, is split over the ranks, too. It is gathered as FP8 codes where all
            ranks have the same scale (delayed scaling reduced over them, tensorwise recipes).
        get_rng_state_tracker, rng_tracker_name: a tracker, and the name in it of the sequence that
            new values of split weights are drawn from.

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
        wanted = _arguments.params_dtype_of("Linear", params_dtype, dtype)
        torch.nn.Module.__init__(self)
        self.in_features = in_features
        self.out_features = out_features
        self.use_bias = bool(bias)
        self.return_bias = return_bias
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.delay_wgrad_compute = delay_wgrad_compute
        self.save_original_input = save_original_input
        self.parallel_mode = checked_mode("Linear", parallel_mode)
        self._make_parallel(
            tp_group, tp_size, sequence_parallel, get_rng_state_tracker, rng_tracker_name
        )
        self.init_method = init_method
        self.name = name
        self._make_fp8_state()
        own = not skip_weight_param_allocation
        self._make_linear(parameters_split, wanted, device, own)
        if own:
            initialize(self)

    def reset_parameters(self) -> None:
        """Fill the weight by ``init_method`` (default N(0, 0.023)) and the bias with 0.

        Parameters on the meta device are made on the current one first: the current GPU, or
        PyTorch's default device where that is no CPU or there is no GPU (``to_empty`` before makes
        them elsewhere).
        """
        materialize(self)
        self._reset_linear()

    def extra_repr(self) -> str:
        text = f"in_features={self.in_features}, out_features={self.out_features}"
        text += f", bias={self.use_bias}"
        for name in (
            "return_bias",
            "fuse_wgrad_accumulation",
            "delay_wgrad_compute",
            "save_original_input",
        ):
            if getattr(self, name):
                text += f", {name}=True"
        return text

    def forward(
        self,
        inp: torch.Tensor,
        weight: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        is_first_microbatch: bool | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Apply the layer to ``inp`` [..., in_features]; gives [..., out_features].

        ``inp`` has the dtype of the parameters (fp32, fp16 or bf16 for FP8), or any of these
        under ``torch.autocast``, whose dtype the output then has (FP8 codes are made of the input
        as it is, without rounding it to that dtype first). ``weight`` and ``bias`` replace the
        module's own. ``is_first_microbatch``: None quantizes the weight on each call, True
        keeps its FP8 copies, False reuses them while the weight is unchanged. Writes to
        ``weight.data`` or through other memory of the weight do not count in its version and are
        not noticed: call with True or None after them.

        Errors: TypeError for a dtype, ValueError for a shape or a missing weight or bias.
        """
        if weight is None and bias is None:
            weight, bias = self._linear_operands()
        else:
            weight, bias = self._operands(weight, bias)
        dtype = self._compute_dtype(inp, self.in_features, (weight, bias))
        applied = None if self.return_bias else bias
        device_type = inp.device.type
        if is_autocast(device_type):
            with torch.autocast(device_type, enabled=False):
                out = self._run(inp, weight, applied, dtype, is_first_microbatch)
        else:
            out = self._run(inp, weight, applied, dtype, is_first_microbatch)
        if not self.return_bias:
            return out
        return out, out.new_empty(0) if bias is None else bias.to(dtype)

    def _operands(
        self, weight: torch.Tensor | None, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The weight and bias of this forward where some are given."""
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
        inp: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        dtype: torch.dtype,
        is_first_microbatch: bool | None,
    ) -> torch.Tensor:
        sets, fp8, recomputed = self._select(weight.device)
        options = self._split_options(self._options(is_first_microbatch), self.parallel_mode)
        if sets is None or not fp8:
            return self._linear(
                inp, weight, bias, dtype, options, None if sets is None else sets[0]
            )
        quantizers = sets[0]
        (cached,) = self._cached_weights((weight,), sets, is_first_microbatch, recomputed)
        rest = (quantizers, cached, dtype, options)
        if not torch.is_grad_enabled():
            return without_autograd(LinearFunction, (inp, weight, bias), *rest)
        return LinearFunction.apply(inp, weight, bias, *rest)

    def _check_given(self, name: str, value: torch.Tensor, shape: tuple[int, ...]) -> None:
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"Linear: {name} must be a tensor, got {type(value).__name__}")
        if tuple(value.shape) != shape:
            raise ValueError(
                f"Linear: {name} must have shape {list(shape)}, got {list(value.shape)}"
            )


class Linear(LinearLayer, torch.nn.Linear):  # type: ignore[misc]
    __doc__ = LinearLayer.__doc__
