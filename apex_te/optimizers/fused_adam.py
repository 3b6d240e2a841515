"""Fused Adam and AdamW, which update all parameters in a few launches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from ..ops import multi_tensor_optim
from ..runtime.named_arguments import named_arguments
from ._base import FusedOptimizer, Work
from ._bucket import MASTER, Bucket
from ._scalars import Scalars

__all__ = ["FusedAdam"]


class FusedAdam(FusedOptimizer):
    """Adam with decoupled (AdamW) or L2 weight decay, equal to torch.optim's to fp32 rounding.

    Interface and defaults follow apex's and TransformerEngine's FusedAdam. State of each parameter:
    ``step``, ``exp_avg``, ``exp_avg_sq`` and, with master weights, ``master_param``. As in
    torch.optim, a parameter's step count leaves out the steps at which it has no gradient. Training
    resumed from a loaded state dict is bitwise equal to training that went on.

    Args:
        params: parameters or groups, float32, float16 or bfloat16, mixed, on any devices; FP8
            parameters, each updated by ``param.copy_(master)``, for which ``step`` wants master
            weights.
            Parameters may be DTensors, sharded or replicated over any meshes: a rank updates its
            local tensor, bitwise as it would be in an update of the whole, and the state is
            DTensors with the parameter's placements. A gradient with other placements is
            redistributed.
        lr: learning rate; a number or a tensor of one element.
        bias_correction: divide the moments by ``1 - beta**step``.
        betas: decay of the two moments, each in [0, 1).
        eps: added to the denominator.
        adam_w_mode: decoupled weight decay (AdamW); False adds it to the gradient (Adam).
        weight_decay: coefficient of the weight decay; 0 turns it off.
        amsgrad: not available; True raises NotImplementedError.
        set_grad_none: True makes ``zero_grad()`` drop gradients, False fill them with 0.
        capturable: keep the step count and ``group["lr"]`` as float32 tensors on the device, so
            that the step can be captured in a CUDA graph, after one outside it. Change the rate
            by ``group["lr"].fill_``, as torch's schedulers do.
        master_weights: keep a float32 copy of every 16-bit or FP8 parameter, which the step
            updates; the parameter is the copy's rounded value. Copies are made at the first step:
            load a model's weights before it, or load this optimizer's state with them. A list has
            such a tensor for each parameter in their order, for plain float32 ones None or the
            parameter; the step updates these tensors.
        master_weight_dtype: torch.float32; or torch.float16, in which master weights are kept
            between steps with a scale for each tensor.
        exp_avg_dtype, exp_avg_sq_dtype: dtype in which the moments are kept between steps:
            torch.float32, torch.bfloat16, or torch.float16 or torch.uint8 (FP8, E4M3) with a scale
            for each tensor, the least power of two that keeps its amax in range. The arithmetic is
            in float32 in any case, through float32 copies of at most 2**25 elements (or one
            parameter) at a time; rounding is to nearest. A bfloat16 number cannot change by less
            than 1/512 of itself, nor always by less than 1/256: ``exp_avg_sq`` in bfloat16 loses
            small updates with ``betas[1]`` of 0.999 once gradients shrink; use 0.99 or less. FP8
            keeps four bits, and nothing below 2**-17 of a tensor's amax.
        use_decoupled_grad: read gradients from ``param.decoupled_grad``, of any of the dtypes, in
            place of ``param.grad``. A ``torch.amp.GradScaler`` does not see them.
        store_param_remainders: with float32 master weights, keep of that of a bfloat16 parameter
            the low 16 bits alone, an int16 tensor. The parameter is the rest: the master weight
            rounded to nearest, ties away from zero. Training equals that with whole master weights
            but for parameters at ties. Write to such a parameter only together with its state.

    Raises:
        TypeError: a dtype is not supported.
        ValueError: a value is out of range.
        NotImplementedError: an option is not available.
    """

    _required_state: ClassVar[tuple[str, ...]] = ("step", "exp_avg", "exp_avg_sq")
    _moment_choices = (torch.float32, torch.bfloat16, torch.float16, torch.uint8)
    _master_choices = (torch.float32, torch.float16)

    @named_arguments()
    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
        capturable: bool = False,
        master_weights: bool | Sequence[torch.Tensor | None] | None = False,
        *,
        master_weight_dtype: torch.dtype = torch.float32,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        use_decoupled_grad: bool = False,
        store_param_remainders: bool = False,
    ) -> None:
        if amsgrad:
            raise NotImplementedError("FusedAdam: amsgrad must be False, got True")
        self.adam_w_mode = adam_w_mode
        self.use_decoupled_grad = use_decoupled_grad
        self.store_param_remainders = store_param_remainders
        super().__init__(
            params,
            {
                "lr": lr,
                "bias_correction": bias_correction,
                "betas": betas,
                "eps": eps,
                "weight_decay": weight_decay,
            },
            capturable=capturable,
            master_weights=master_weights,
            master_weight_dtype=master_weight_dtype,
            set_grad_none=set_grad_none,
            moment_dtypes={"exp_avg": exp_avg_dtype, "exp_avg_sq": exp_avg_sq_dtype},
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "adam_w_mode": self.adam_w_mode}

    def initialize_state(
        self, param: torch.Tensor, store_param_remainders: bool | None = None
    ) -> None:
        """Makes the state of a parameter that the first step would make.

        Args:
            param: one of the parameters.
            store_param_remainders: None, or what the constructor was told.

        Raises:
            ValueError: ``store_param_remainders`` is another than the constructor's.
        """
        keeps = self._keeps_remainder(param)
        if store_param_remainders is not None and bool(store_param_remainders) != keeps:
            raise ValueError(
                f"{self._name}: store_param_remainders must be {keeps} for a parameter of "
                f"{param.dtype} of this optimizer, got {store_param_remainders}"
            )
        self._state_of(param, tuple(self._moment_dtypes), self._counts_steps({}))
        self._plans.clear()

    def get_unscaled_state(self, param: torch.Tensor, state_name: str) -> torch.Tensor:
        """Returns state of a parameter in float32, whatever dtype it is stored in.

        Args:
            param: one of the parameters.
            state_name: "exp_avg", "exp_avg_sq" or "master_param".

        Returns:
            The state itself if it is float32, else a copy; for the low half of a master weight the
            int16 tensor itself.

        Raises:
            ValueError: there is no such state.
        """
        self._check_state_name(state_name)
        if state_name not in self.state.get(param, ()):
            raise ValueError(
                f"{self._name}: state_name must be one of the parameter's states, "
                f"{sorted(self.state.get(param, ()))}, got {state_name!r}"
            )
        return self._number(param, state_name)

    def set_scaled_state(
        self, param: torch.Tensor, state_name: str, unscaled_state: torch.Tensor
    ) -> None:
        """Sets state of a parameter from float32 numbers, and stores them in the state's dtype.

        Args:
            param: one of the parameters.
            state_name: "exp_avg", "exp_avg_sq" or "master_param".
            unscaled_state: the numbers; for the low half of a master weight int16 or, if the
                parameter is the rounded master weight, float32.

        Raises:
            ValueError: a name, or a shape, that does not match, or a parameter that has no master
                weight.
        """
        self._check_state_name(state_name)
        if state_name == MASTER:
            if self._master_dtype_of(param) is None:
                raise ValueError(
                    f"{self._name}: state_name must not be 'master_param' for a parameter of "
                    f"{param.dtype} with master_weights={self.master_weights}, got it"
                )
            self._load_master(param, unscaled_state)
        else:
            self._load(param, state_name, unscaled_state, self._moment_dtypes[state_name])
        self._plans.clear()

    def _check_state_name(self, state_name: str) -> None:
        """Raises ValueError unless ``state_name`` is a key of tensors in a parameter's state."""
        names = (*self._moment_dtypes, MASTER)
        if state_name not in names:
            raise ValueError(
                f"{self._name}: state_name must be one of {', '.join(names)}, got {state_name!r}"
            )

    def _step_of(self, group: dict[str, Any], bucket: Bucket) -> int | torch.Tensor | None:
        """Returns the number of the step that updates ``bucket``."""
        return bucket.step

    def _update(self, work: list[Work], scalars: Scalars) -> None:
        names = ("betas", "eps", "weight_decay", "bias_correction")
        for group, bucket, grads in work:
            options = self._options(group, bucket, scalars, *names)
            options |= {"step": self._step_of(group, bucket), "adamw": self.adam_w_mode}
            bucket.run(multi_tensor_optim.adam, grads, options)
