"""RowwiseScaling: a scale for each token, and for each output channel of a weight."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, InitVar, dataclass
from typing import ClassVar

from ..runtime.op_options import block_scales
from . import Format, FormatOrName, GemmFlags, Recipe

__all__ = ["RowwiseScaling"]


@dataclass(frozen=True)
class RowwiseScaling(Recipe, name="rowwise"):
    """Recipe with one scale for each token and each output channel of a weight.

    Checkpoints with a scale per channel (FBGEMM, compressed-tensors' ``FP8_DYNAMIC``) and engines
    with dynamic scales per token use it. Forward uses the scales of the weight's rows. dgrad
    multiplies the output gradient by these scales, casts it with a scale for each token, and
    multiplies it by the same FP8 data, so that the weight is not rounded again. In wgrad both
    operands have a scale for each column.

    Args:
        fp8_format: ``Format.E4M3`` or ``Format.HYBRID``, or its name.
        scales: ``"server"``, ``"fp32"`` or ``"pow2"``, as in ``BlockScaling``.
        eps: lower bound of the amax from which a row's scale is computed; with ``"server"`` it is
            at least 1e-10.
        activation_scale_ub: upper bound of the amax of a token, as in FBGEMM's checkpoints; larger
            values saturate. None does not limit it.
        override_linear_precision, use_split_accumulator, interval, backward, fp8_dpa, fp8_mha: as
            in ``CurrentScaling``.

    Raises:
        TypeError: an argument has a wrong type or is unknown.
        ValueError: an argument has a wrong value; ``activation_scale_ub`` must be finite and above
            0.
        NotImplementedError: FP8 attention was requested.
    """

    _: KW_ONLY
    fp8_format: FormatOrName = Format.E4M3  # type: ignore[assignment]
    scales: str = "server"
    eps: float = 0.0
    activation_scale_ub: float | None = None
    override_linear_precision: GemmFlags = (False, False, False)
    use_split_accumulator: GemmFlags = (False, True, True)
    interval: int = 1
    backward: str | None = None
    fp8_dpa: InitVar[bool] = False
    fp8_mha: InitVar[bool] = False

    quantizer: ClassVar[str] = "rowwise"

    def __post_init__(self, fp8_dpa: bool, fp8_mha: bool) -> None:
        self._check_shared(fp8_dpa, fp8_mha)
        object.__setattr__(self, "scales", block_scales(self._name, self.scales, None))
        self._check_eps(self.eps)
        bound = self.activation_scale_ub
        if bound is None:
            return
        if isinstance(bound, bool) or not isinstance(bound, (int, float)):
            raise TypeError(
                f"{self._name}: activation_scale_ub must be a float, got {type(bound).__name__}"
            )
        if not 0.0 < bound < math.inf:
            raise ValueError(
                f"{self._name}: activation_scale_ub must be finite and above 0, got {bound}"
            )
