"""``FP16_Optimizer``, which gives an optimizer float32 master weights and a loss scale."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ....amp._grads import Flags
from ....optimizers._bucket import has_master, new_master
from ..amp._amp_state import maybe_print
from ..amp.scaler import LossScaler
from .fp16util import clip_grad_norm, master_params_to_model_params, paired_grads

_Groups = list[list[torch.Tensor]]


class FP16_Optimizer:
    """Wrapper of an optimizer that updates float32 master weights of 16-bit parameters.

    ``backward`` replaces ``loss.backward()``. The master weights replace the parameters in the
    optimizer's ``param_groups``. Reading ``overflow`` waits for the device, and ``step`` reads it
    with a dynamic scale.

    Args:
        init_optimizer: the optimizer.
        static_loss_scale: the scale, unless it is dynamic.
        dynamic_loss_scale: True for a dynamic scale.
        dynamic_loss_args: arguments of ``apex.amp.scaler.LossScaler``.
        verbose: True to print skipped steps.

    Raises:
        TypeError: ``init_optimizer`` is not an optimizer.
    """

    def __init__(
        self,
        init_optimizer: torch.optim.Optimizer,
        static_loss_scale: float = 1.0,
        dynamic_loss_scale: bool = False,
        dynamic_loss_args: dict[str, Any] | None = None,
        verbose: bool = True,
    ) -> None:
        if not isinstance(init_optimizer, torch.optim.Optimizer):
            raise TypeError(
                "FP16_Optimizer: init_optimizer must be a torch.optim.Optimizer, got "
                f"{type(init_optimizer).__name__}"
            )
        self.optimizer = init_optimizer
        self.verbose = verbose
        self.fp16_groups: _Groups = []
        self.fp32_from_fp16_groups: _Groups = []
        self.fp32_from_fp32_groups: _Groups = []
        for group in init_optimizer.param_groups:
            halves: list[torch.Tensor] = []
            masters: list[torch.Tensor] = []
            others: list[torch.Tensor] = []
            for i, param in enumerate(group["params"]):
                if not (param.requires_grad and has_master(param)):
                    others.append(param)
                    continue
                master = torch.nn.Parameter(new_master(param))
                group["params"][i] = master
                halves.append(param)
                masters.append(master)
                if param in init_optimizer.state:
                    init_optimizer.state[master] = init_optimizer.state.pop(param)
            self.fp16_groups.append(halves)
            self.fp32_from_fp16_groups.append(masters)
            self.fp32_from_fp32_groups.append(others)
        init_optimizer.load_state_dict(init_optimizer.state_dict())  # in the masters' dtype
        self.dynamic_loss_scale = dynamic_loss_scale
        self.loss_scaler = (
            LossScaler("dynamic", **(dynamic_loss_args or {}))
            if dynamic_loss_scale
            else LossScaler(static_loss_scale)
        )
        self._found_inf: torch.Tensor | None = None

    @property
    def overflow(self) -> bool:
        """True if gradients of the last ``update_master_grads`` were not finite."""
        return self._found_inf is not None and bool(self._found_inf.item())

    @overflow.setter
    def overflow(self, value: bool) -> None:
        self._found_inf = torch.tensor(float(value))

    def _flat(self, groups: _Groups) -> list[torch.Tensor]:
        return [param for group in groups for param in group]

    def zero_grad(self, set_grads_to_None: bool = False) -> None:
        """Zeroes or drops the gradients of the parameters and the master weights."""
        masters = [p for group in self.optimizer.param_groups for p in group["params"]]
        for param in (*masters, *self._flat(self.fp16_groups)):
            if set_grads_to_None:
                param.grad = None
            elif param.grad is not None:
                param.grad = torch.zeros_like(param.grad)

    def backward(
        self, loss: torch.Tensor, update_master_grads: bool = True, retain_graph: bool = False
    ) -> None:
        """Runs the backward of the scaled loss.

        Args:
            loss: the loss, one element.
            update_master_grads: True to move the gradients to the master weights at once; False
                for further backwards before ``update_master_grads``.
            retain_graph: as in ``torch.Tensor.backward``.
        """
        self.loss_scaler.scale(loss).backward(retain_graph=retain_graph)
        if update_master_grads:
            self.update_master_grads()

    @torch.no_grad()
    def update_master_grads(self) -> None:
        """Copies the gradients, divided by the loss scale, to those of the master weights."""
        scaler = self.loss_scaler
        sources, targets = paired_grads(
            self._flat(self.fp16_groups), self._flat(self.fp32_from_fp16_groups)
        )
        for param in self._flat(self.fp32_from_fp32_groups):
            if param.grad is not None:
                sources.append(param.grad)
                targets.append(param.grad)
        flags = Flags(None if scaler.is_one else scaler.inv_scale())
        flags.scale(sources, targets)
        if self.dynamic_loss_scale and sources:
            params = [p for group in self.optimizer.param_groups for p in group["params"]]
            self._found_inf = flags.combined(sources[0].device, params)
            scaler.update(self._found_inf)

    def clip_master_grads(self, max_norm: float, norm_type: float = 2) -> Any:
        """Clips the optimizer's gradients; returns their norm, -1 after an overflow.

        Args:
            max_norm: largest norm that the gradients keep.
            norm_type: p of the norm, also ``math.inf``.
        """
        if self.overflow:
            return -1
        params = [p for group in self.optimizer.param_groups for p in group["params"]]
        return clip_grad_norm(params, max_norm, norm_type)

    def inspect_master_grad_data(self) -> list[list[torch.Tensor | None]] | None:
        """Returns the gradients that the optimizer reads, by group; None after an overflow."""
        if self.overflow:
            maybe_print("FP16_Optimizer: gradients are not finite; they are not returned")
            return None
        return [
            [None if p.grad is None else p.grad.detach() for p in group["params"]]
            for group in self.optimizer.param_groups
        ]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates master weights and parameters, unless gradients were not finite.

        Args:
            closure: runs ``zero_grad``, the forward and this object's ``backward``; returns the
                loss.

        Returns:
            The result of the optimizer's step.

        Raises:
            RuntimeError: a closure is given with a dynamic scale.
        """
        if closure is not None and self.dynamic_loss_scale:
            raise RuntimeError(
                "FP16_Optimizer: closure must be None with dynamic_loss_scale=True, got one"
            )
        if self.dynamic_loss_scale and self.overflow:
            if self.verbose:
                maybe_print(
                    "FP16_Optimizer: step skipped, the loss scale is now "
                    f"{self.loss_scaler.loss_scale()}"
                )
            return None
        if closure is None:
            result = self.optimizer.step()
        else:
            result = self.optimizer.step(lambda: self._evaluated(closure))
        self._copy_masters()
        return result

    def _evaluated(self, closure: Callable[[], Any]) -> Any:
        """Returns a closure's result, for parameters equal to the master weights of this moment."""
        self._copy_masters()
        return closure()

    def _copy_masters(self) -> None:
        """Copies master weights to their parameters."""
        master_params_to_model_params(
            self._flat(self.fp16_groups), self._flat(self.fp32_from_fp16_groups)
        )

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the scaler, the optimizer and the master weights."""
        return {
            "loss_scaler": self.loss_scaler.state_dict(),
            "dynamic_loss_scale": self.dynamic_loss_scale,
            "overflow": self.overflow,
            "optimizer_state_dict": self.optimizer.state_dict(),
            "fp32_from_fp16": [[m.detach() for m in group] for group in self.fp32_from_fp16_groups],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the result of ``state_dict``; the model's own state is to be loaded, too.

        Raises:
            ValueError: the master weights do not match.
        """
        self.loss_scaler.load_state_dict(state_dict["loss_scaler"])
        self.dynamic_loss_scale = state_dict["dynamic_loss_scale"]
        self.overflow = state_dict["overflow"]
        self.optimizer.load_state_dict(state_dict["optimizer_state_dict"])
        with torch.no_grad():
            pairs = zip(self.fp32_from_fp16_groups, state_dict["fp32_from_fp16"], strict=True)
            for current, saved in pairs:
                for master, value in zip(current, saved, strict=True):
                    master.copy_(value)

    @property
    def loss_scale(self) -> float:
        """The loss scale; reading it waits for the device."""
        return self.loss_scaler.loss_scale()

    @loss_scale.setter
    def loss_scale(self, value: float) -> None:
        self.loss_scaler._loss_scale = value

    @property
    def state(self) -> Any:
        """The optimizer's state."""
        return self.optimizer.state

    @state.setter
    def state(self, value: Any) -> None:
        self.optimizer.state = value

    @property
    def param_groups(self) -> Any:
        """The optimizer's parameter groups, with master weights."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, value: Any) -> None:
        self.optimizer.param_groups = value
