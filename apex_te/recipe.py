"""FP8 recipes: frozen data that says how tensors are scaled. No tensor is touched here."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import InitVar, dataclass
from typing import Any, ClassVar, NamedTuple

import torch

__all__ = ["DelayedScaling", "Format", "Recipe"]


class FormatValue(NamedTuple):
    """Largest finite values and element types of a format, forward and backward."""

    max_fwd: float
    max_bwd: float
    fwd_dtype: torch.dtype
    bwd_dtype: torch.dtype


class Format(enum.Enum):
    """FP8 element format of a recipe.

    ``E4M3``: E4M3 everywhere; ``E5M2``: E5M2 everywhere; ``HYBRID``: E4M3 for activations and
    weights, E5M2 for gradients. ``.value.max_fwd`` and ``.value.max_bwd`` are the largest finite
    values (448 or 57344), ``.value.fwd_dtype`` and ``.value.bwd_dtype`` the torch dtypes.
    """

    E4M3 = FormatValue(448.0, 448.0, torch.float8_e4m3fn, torch.float8_e4m3fn)
    E5M2 = FormatValue(57344.0, 57344.0, torch.float8_e5m2, torch.float8_e5m2)
    HYBRID = FormatValue(448.0, 57344.0, torch.float8_e4m3fn, torch.float8_e5m2)


class Recipe:
    """Base of all recipes; ``quantizer`` names the module of ``apex_te.quantizer`` to use."""

    quantizer: ClassVar[str]


def _check_int(name: str, value: object, minimum: int | None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"DelayedScaling: {name} must be an int, got {type(value).__name__}")
    if minimum is not None and value < minimum:
        raise ValueError(f"DelayedScaling: {name} must be at least {minimum}, got {value}")


@dataclass(frozen=True)
class DelayedScaling(Recipe):
    """Scales each tensor by the largest magnitude seen over the last steps (numbers: fp32).

    Args:
        margin: the scale is divided by ``2 ** margin``.
        interval: regions (microbatches) between two scale updates.
        fp8_format: ``Format.HYBRID`` or ``Format.E4M3``; pure E5M2 is refused.
        amax_history_len: rows of the amax history, the staging row included.
        amax_compute_algo: ``"max"``, ``"most_recent"`` or a callable
            ``(history [length, slots]) -> amax [slots]``; row 0 of the history is the newest amax,
            row 1 the oldest, the last row the one before the newest.
        scaling_factor_compute_algo: None (``fp8_max / amax / 2**margin``), ``"pow2"`` (that ratio
            rounded down to a power of two) or a callable
            ``(amax [slots], old_scale [slots], fp8_max, recipe) -> scale [slots]``.
        override_linear_precision: high precision for (fprop, dgrad, wgrad); only wgrad may be.
        reduce_amax: MAX-reduce the amaxes over the FP8 group before an update.
        first_step: ``"scale_one"`` starts with scale 1; ``"current"`` takes the first scale of
            each tensor from that tensor itself.
        fp8_dpa, fp8_mha: not available yet; True raises.

    Errors: TypeError for a wrong type or an unknown argument, ValueError for a wrong value,
    NotImplementedError for what is not available.
    """

    margin: int = 0
    interval: int = 1
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: str | Callable[[torch.Tensor], torch.Tensor] = "max"
    scaling_factor_compute_algo: str | Callable[..., torch.Tensor] | None = None
    override_linear_precision: tuple[bool, bool, bool] = (False, False, False)
    reduce_amax: bool = True
    first_step: str = "scale_one"
    fp8_dpa: InitVar[bool] = False
    fp8_mha: InitVar[bool] = False

    quantizer: ClassVar[str] = "delayed"

    def __post_init__(self, fp8_dpa: bool, fp8_mha: bool) -> None:
        for name, value in (("fp8_dpa", fp8_dpa), ("fp8_mha", fp8_mha)):
            if value:
                raise NotImplementedError(
                    f"DelayedScaling: {name} must be False (FP8 attention is not available), "
                    f"got {value!r}"
                )
        _check_int("margin", self.margin, None)
        _check_int("interval", self.interval, 1)
        _check_int("amax_history_len", self.amax_history_len, 1)
        if not isinstance(self.fp8_format, Format):
            raise TypeError(
                "DelayedScaling: fp8_format must be a recipe.Format, "
                f"got {type(self.fp8_format).__name__}"
            )
        if self.fp8_format is Format.E5M2:
            raise ValueError(
                "DelayedScaling: fp8_format must be Format.HYBRID or Format.E4M3 "
                "(pure E5M2 training is not supported), got Format.E5M2"
            )
        _check_algo("amax_compute_algo", self.amax_compute_algo, ("max", "most_recent"))
        if self.scaling_factor_compute_algo is not None:
            _check_algo("scaling_factor_compute_algo", self.scaling_factor_compute_algo, ("pow2",))
        object.__setattr__(self, "override_linear_precision", self._override())
        if not isinstance(self.reduce_amax, bool):
            raise TypeError(
                f"DelayedScaling: reduce_amax must be a bool, got {type(self.reduce_amax).__name__}"
            )
        if self.first_step not in ("scale_one", "current"):
            raise ValueError(
                'DelayedScaling: first_step must be "scale_one" or "current", '
                f"got {self.first_step!r}"
            )

    def _override(self) -> tuple[bool, bool, bool]:
        value: Any = self.override_linear_precision
        if not isinstance(value, (tuple, list)) or not all(isinstance(v, bool) for v in value):
            raise TypeError(
                "DelayedScaling: override_linear_precision must be a tuple of three bools, "
                f"got {value!r}"
            )
        value = tuple(value)
        if value not in ((False, False, False), (False, False, True)):
            raise ValueError(
                "DelayedScaling: override_linear_precision must be (False, False, False) or "
                f"(False, False, True), got {value}"
            )
        return value

    @property
    def uses_callables(self) -> bool:
        """True when a user's function takes part in the scale update."""
        return callable(self.amax_compute_algo) or callable(self.scaling_factor_compute_algo)


def _check_algo(name: str, value: object, names: tuple[str, ...]) -> None:
    if callable(value):
        return
    wanted = " or ".join(f'"{n}"' for n in names)
    if not isinstance(value, str):
        raise TypeError(
            f"DelayedScaling: {name} must be {wanted} or a callable, got {type(value).__name__}"
        )
    if value not in names:
        raise ValueError(f"DelayedScaling: {name} must be {wanted} or a callable, got {value!r}")
