"""Fused Adam and AdamW, which update all parameters in a few launches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from ..ops import multi_tensor_optim
from ..runtime.fp8_copies import preparations
from ..runtime.named_arguments import named_arguments
from ._base import FusedOptimizer, Work
from ._bucket import MASTER
from ._scalars import Scalars

__all__ = ["FusedAdam"]


class FusedAdam(FusedOptimizer):
    """Adam with decoupled (AdamW) or L2 weight decay, equal to torch.optim's up to fp32 rounding.

    Interface and defaults follow apex's and TransformerEngine's FusedAdam. State of each parameter:
    ``step``, ``exp_avg``, ``exp_avg_sq`` and, with master weights, ``master_param``. As in
    torch.optim, a parameter's step count leaves out the steps at which it has no gradient. Training
    resumed from a state dict is bitwise equal to uninterrupted training.

    Args:
        params: parameters or parameter groups. Parameters may be float32, float16, bfloat16 and
            FP8, in any combination and on any devices. FP8 parameters need master weights; a step
            updates them by ``param.copy_(master)``. Parameters may be DTensors, sharded or
            replicated over any meshes. A rank then updates its local tensor, bitwise as in an
            update of the whole tensor, and the state consists of DTensors with the parameter's
            placements. A gradient with other placements is redistributed.
        lr: learning rate; a number or a tensor of one element.
        bias_correction: divide the moments by ``1 - beta**step``.
        betas: decay of the two moments, each in [0, 1).
        eps: added to the denominator.
        adam_w_mode: decoupled weight decay (AdamW); False adds it to the gradient (Adam).
        weight_decay: coefficient of the weight decay; 0 turns it off.
        amsgrad: not available; True raises NotImplementedError.
        set_grad_none: True makes ``zero_grad()`` drop gradients, False makes it fill them with 0.
        capturable: keep the step count and ``group["lr"]`` as float32 tensors on the device, so
            that a CUDA graph can capture the step. One step must run before, outside the graph.
            Change the rate by ``group["lr"].fill_``, as torch's schedulers do.
        master_weights: True keeps a float32 copy of every 16-bit or FP8 parameter. The step updates
            the copy, and the parameter is its rounded value. The first step makes the copies: load
            a model's weights before it, or together with this optimizer's state. False or None
            keeps none. A list gives the caller's float32 copies, one for each parameter in order,
            with None or the parameter itself for plain float32 parameters; the step updates these
            tensors.
        master_weight_dtype: dtype of master weights between steps: torch.float32, or torch.float16
            with a scale for each tensor.
        exp_avg_dtype, exp_avg_sq_dtype: dtypes of the moments between steps: torch.float32 or
            torch.bfloat16; or torch.float16 or torch.uint8 (FP8, E4M3), with a scale for each
            tensor, the least power of two that keeps its amax in range. The arithmetic is always in
            float32, on float32 copies of at most 2**25 elements (or one parameter) at a time;
            rounding is to nearest. A bfloat16 number loses changes below 1/512 of itself, and some
            below 1/256: with ``betas[1]`` of 0.999, ``exp_avg_sq`` in bfloat16 loses small updates
            once gradients shrink; use 0.99 or less. FP8 keeps four significant bits, and nothing
            below 2**-17 of a tensor's amax.
        use_decoupled_grad: read gradients from ``param.decoupled_grad`` (float32, float16 or
            bfloat16) instead of ``param.grad``. A ``torch.amp.GradScaler`` does not see them.
        store_param_remainders: with float32 master weights, store only the low 16 bits of the
            master weight of a bfloat16 parameter, in an int16 tensor. The parameter has the rest:
            it is the master weight rounded to nearest, ties away from zero. Training equals that
            with whole master weights, except for parameters at ties. Write to such a parameter only
            together with its state.

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
        """Creates a parameter's state, as the first step would.

        Args:
            param: one of the parameters.
            store_param_remainders: whether the state stores only the low 16 bits of the master
                weight; compared with the constructor's options, which decide. None: not compared.

        Raises:
            ValueError: ``store_param_remainders`` contradicts the constructor's options.
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
        """Returns a state tensor of a parameter as float32, from the dtype in which it is stored.

        Args:
            param: one of the parameters.
            state_name: "exp_avg", "exp_avg_sq" or "master_param".

        Returns:
            The state tensor itself if it is float32, else a float32 copy. Exception: where the low
            half of a master weight is stored (``store_param_remainders``), the int16 tensor itself.

        Raises:
            ValueError: the parameter has no state of this name.
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
        """Sets a state tensor of a parameter from float32 numbers, stored in the state's dtype.

        Args:
            param: one of the parameters.
            state_name: "exp_avg", "exp_avg_sq" or "master_param".
            unscaled_state: the numbers, in the parameter's shape. If the low half of the master
                weight is stored, "master_param" takes the low half as int16, or the whole master
                weight as float32, to which the parameter must already be equal after rounding.

        Raises:
            ValueError: the name or the shape does not match, or the parameter is without a master
                weight or differs from the rounded one.
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

    def _update(self, work: list[Work], scalars: Scalars) -> None:
        names = ("betas", "eps", "weight_decay", "bias_correction")
        for prepare in preparations:
            prepare()
        for group, bucket, grads in work:
            options = self._options(group, bucket, scalars, *names)
            options |= {"step": self._step_of(group, bucket), "adamw": self.adam_w_mode}
            bucket.run(multi_tensor_optim.adam, grads, options, multi_tensor_optim.adam_with_casts)
