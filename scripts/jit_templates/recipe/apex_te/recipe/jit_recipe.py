"""JitRecipeScaling: a power of two for each row of an operand."""

from __future__ import annotations

from dataclasses import KW_ONLY, InitVar, dataclass
from typing import ClassVar

from . import Format, GemmFlags, Recipe

__all__ = ["JitRecipeScaling"]


@dataclass(frozen=True)
class JitRecipeScaling(Recipe, name="jit_recipe"):
    """Scales each row of a GEMM's operand by a power of two, from the row's own amax.

    Args:
        fp8_format: ``Format.HYBRID`` or ``Format.E4M3``.
        eps: smallest amax.
        override_linear_precision, use_split_accumulator, interval, fp8_dpa, fp8_mha: as in
            ``CurrentScaling``.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: an argument has a wrong value.
        NotImplementedError: ``fp8_dpa`` or ``fp8_mha`` is True.
    """

    _: KW_ONLY
    fp8_format: Format = Format.HYBRID
    eps: float = 0.0
    override_linear_precision: GemmFlags = (False, False, False)
    use_split_accumulator: GemmFlags = (False, True, True)
    interval: int = 1
    fp8_dpa: InitVar[bool] = False
    fp8_mha: InitVar[bool] = False

    quantizer: ClassVar[str] = "jit_recipe"  # the file in apex_te/fp8/scheme

    def __post_init__(self, fp8_dpa: bool, fp8_mha: bool) -> None:
        self._check_shared(fp8_dpa, fp8_mha)
        self._check_eps(self.eps)
