"""The weight and bias of a linear layer: whole, or in named parts that are joined in forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from . import arguments as _arguments
from .parallel import ParallelModule, divided, tag

__all__ = ["LinearParameters"]


class LinearParameters(ParallelModule):
    """An FP8 module with ``weight`` [out, in] and ``bias`` [out], whole or in named parts.

    Split over ranks, ``weight`` is [out / ranks, in] (column) or [out, in / ranks] (row), and so
    are ``in_features`` and ``out_features``.
    """

    in_features: int
    out_features: int
    parallel_mode: str | None
    use_bias: bool
    init_method: Callable[[torch.Tensor], Any] | None
    split: dict[str, int] | None

    def _make_linear(
        self, parameters_split: Any, dtype: torch.dtype, device: Any, own: bool = True
    ) -> None:
        """Register the parameters, with no values yet; none where the module is to own none."""
        owner = type(self).__name__
        column = self.parallel_mode == "column"
        if column:
            self.out_features = divided(owner, "out_features", self.out_features, self.tp_size)
        elif self.parallel_mode == "row":
            self.in_features = divided(owner, "in_features", self.in_features, self.tp_size)
        self.split = _arguments.split_names(
            owner, self._split_over_ranks(parameters_split), self.out_features
        )
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
                tag(weight, 0 if column else 1, False)
                tag(bias, 0 if column else None, not column and self.sequence_parallel)
            prefix = f"{part}_" if part else ""
            self.register_parameter(f"{prefix}weight", weight)
            self.register_parameter(f"{prefix}bias", bias)

    def _split_over_ranks(self, parameters_split: Any) -> Any:
        """This rank's rows of named parts; names alone share its rows anyway."""
        if self.parallel_mode != "column" or not isinstance(parameters_split, dict):
            return parameters_split
        owner = type(self).__name__
        return {
            name: divided(owner, "parameters_split", rows, self.tp_size)
            for name, rows in parameters_split.items()
        }

    def _linear_names(self, kind: str) -> list[str]:
        """Names of the parameters that make up ``weight`` or ``bias``."""
        return [kind] if self.split is None else [f"{part}_{kind}" for part in self.split]

    def _reset_linear(self) -> None:
        """The weight by ``init_method``, the bias 0."""
        with self._forked(self.parallel_mode is not None):
            for name in self._linear_names("weight"):
                _arguments.fill(self._parameters[name], self.init_method)
        for name in self._linear_names("bias"):
            bias = self._parameters[name]
            if bias is not None:
                torch.nn.init.zeros_(bias)

    def _linear_operands(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The weight and the bias of this forward."""
        weight: torch.Tensor | None = self._parameters.get("weight")
        if weight is None:
            weight = self._required("weight")
        if not self.use_bias:
            return weight, None
        bias: torch.Tensor | None = self._parameters.get("bias")
        return weight, self._required("bias") if bias is None else bias

    def _required(self, name: str) -> torch.Tensor:
        """A parameter that is not in place: in parts, made by a parametrization, or missing."""
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
        return tuple(getattr(self, name) for name in self._linear_names("weight"))
