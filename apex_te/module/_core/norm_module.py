"""Base of the LayerNorm and RMSNorm modules: construction, dtypes, shapes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...runtime.named_arguments import named_arguments
from .arguments import (
    autocast_dtype,
    checked_eps,
    initialize,
    materialize,
    parameter,
    params_dtype_of,
    shown_name,
)


class NormModule(torch.nn.Module):
    """Base of LayerNormLayer and RMSNormLayer.

    A subclass names its parameters in ``_PARAMETERS``, ``weight`` and perhaps ``bias``, and calls
    ``_normalize`` with its op in ``forward``.
    """

    _get_name = shown_name
    _PARAMETERS: tuple[str, ...]
    eps: Any

    @named_arguments()
    def __init__(
        self,
        normalized_shape: int | Sequence[int] | None = None,
        eps: float = 1e-5,
        *,
        hidden_size: int | None = None,
        sequence_parallel: bool = False,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        torch.nn.Module.__init__(self)
        name = type(self).__name__
        self.normalized_shape = _resolved_shape(name, normalized_shape, hidden_size)
        self.eps = checked_eps(name, "eps", eps)
        self.elementwise_affine = True
        self.sequence_parallel = sequence_parallel
        self.zero_centered_gamma = zero_centered_gamma
        dtype = params_dtype_of(name, params_dtype, dtype)
        for key in self._PARAMETERS:
            value = parameter(self.normalized_shape, dtype, device, gemm_weight=False)
            self.register_parameter(key, value)
        self._tag_parameters()
        initialize(self)

    def reset_parameters(self) -> None:
        """Sets gamma to 1 and the bias, if the norm has one, to 0.

        Parameters on the meta device get memory first; see ``Linear.reset_parameters``. Parameters
        that were replaced get the attribute ``sequence_parallel`` again.
        """
        materialize(self)
        for key in self._PARAMETERS:
            value = self._parameters[key]
            if value is not None:
                one = key == "weight" and not self.zero_centered_gamma
                with torch.no_grad():
                    value.fill_(1.0 if one else 0.0)
        self._tag_parameters()

    def _tag_parameters(self) -> None:
        """Sets ``sequence_parallel`` on each parameter, for trainers that sum gradients."""
        for key in self._PARAMETERS:
            value = self._parameters[key]
            if value is not None:
                value.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]

    def extra_repr(self) -> str:
        text = super().extra_repr() or f"{self.normalized_shape}, eps={self.eps}"
        return text + ", zero_centered_gamma=True" if self.zero_centered_gamma else text

    def _plain_forward(self) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """Returns what computes an input of another dtype than the parameters'; None: the op."""
        return None

    def _mixes(self, dtype: torch.dtype, given: set[torch.dtype]) -> bool:
        """Returns True if an input of ``dtype`` may come with parameters of ``given`` dtypes."""
        return False

    def _normalize(
        self, op: Callable[..., Any], inp: torch.Tensor, *parameters: torch.Tensor | None
    ) -> torch.Tensor:
        """Checks ``inp`` and applies the op, with parameters in its order, to the last dims."""
        shape, normalized = inp.shape, self.normalized_shape
        if shape[len(shape) - len(normalized) :] != normalized:
            raise ValueError(
                f"{type(self).__name__}: inp must have shape "
                f"[..., {', '.join(map(str, normalized))}], got {list(shape)}"
            )
        dtype, autocast = inp.dtype, autocast_dtype(type(self).__name__, "inp", inp)
        if autocast is not None:
            dtype = autocast
            inp = inp.to(dtype)
            # The op takes fp32 parameters beside any input.
            parameters = tuple(
                p if p is None or p.dtype is torch.float32 else p.to(dtype) for p in parameters
            )
        else:
            given = {p.dtype for p in parameters if p is not None}
            if given - {dtype}:
                plain = self._plain_forward()
                if plain is not None:
                    return plain(inp)
                if not self._mixes(dtype, given):
                    raise TypeError(
                        f"{type(self).__name__}: inp must have the dtype of the parameters outside "
                        f"torch.autocast, {next(iter(given - {dtype}))}, got {dtype}"
                    )
                parameters = tuple(p if p is None else p.float() for p in parameters)
        zero_centered = self.zero_centered_gamma
        if len(normalized) == 1:
            return op(inp, *parameters, self.eps, zero_centered_gamma=zero_centered)
        flat = [None if p is None else p.flatten() for p in parameters]
        inp = inp.flatten(len(shape) - len(normalized))
        return op(inp, *flat, self.eps, zero_centered_gamma=zero_centered).view(shape)


def _resolved_shape(
    name: str, normalized_shape: int | Sequence[int] | None, hidden_size: int | None
) -> tuple[int, ...]:
    """Returns ``normalized_shape``, or its other name ``hidden_size``, as a tuple of ints."""
    if (normalized_shape is None) == (hidden_size is None):
        raise ValueError(
            f"{name}: normalized_shape (or hidden_size) must be given once, "
            f"got {normalized_shape} and {hidden_size}"
        )
    given: Any = hidden_size if normalized_shape is None else normalized_shape
    several = isinstance(given, Sequence) and not isinstance(given, str)
    shape = tuple(given) if several else (given,)
    if not shape or any(isinstance(n, bool) or not isinstance(n, int) for n in shape):
        raise TypeError(f"{name}: normalized_shape must be an int or several ints, got {given!r}")
    if min(shape) < 1:
        raise ValueError(f"{name}: normalized_shape must be at least 1, got {given!r}")
    return shape
