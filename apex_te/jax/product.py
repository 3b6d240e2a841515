"""Dense layer without a gradient rule, for layers that fuse their casts with what is in front."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from ..recipe import Recipe
from . import fp8_state
from .first_step import FIRST_DUE
from .fused_casts import FusedCast
from .quantizer import Quantized, quantizer_of
from .region import active_recipe

# Slots of the FP8 state of each product.
_INPUT, _WEIGHT, _GRAD = 0, 1, 0


def can_fuse_activation(state: Mapping[str, jax.Array]) -> bool:
    """Returns True if gated activations write FP8 themselves, with all GEMMs of the layer in FP8.

    No scale may wait for its first tensor; ``state`` is empty for a recipe without state.
    """
    recipe = active_recipe()
    return recipe is not None and quantizer_of(recipe).fuses_activations and _fits(recipe, state)


def can_fuse_norm(state: Mapping[str, jax.Array]) -> bool:
    """Returns True if norms write FP8 themselves; see ``can_fuse_activation``."""
    recipe = active_recipe()
    return recipe is not None and quantizer_of(recipe).fuses_norms and _fits(recipe, state)


def _fits(recipe: Any, state: Mapping[str, jax.Array]) -> bool:
    """Returns True if no GEMM is in bf16 or fp32 and no scale waits for its first tensor."""
    return FIRST_DUE not in state and not any(recipe.override_linear_precision)


def rows_of(q: Quantized) -> tuple[Any, Any]:
    """Returns FP8 data and scales of the rowwise copy."""
    return q.rowwise, q.rowwise_scale_inv


def columns_of(q: Quantized) -> tuple[Any, Any]:
    """Returns FP8 data and scales of the columnwise copy."""
    return q.columnwise, q.columnwise_scale_inv


class Product:
    """Dense layer x @ kernel + bias without a gradient rule; contracts the last dimension of x.

    In the methods, ``part`` is the FP8 state of GEMM number ``gemm`` of a module, as ``entered``
    returns it; None for a recipe without state. ``for_dx`` and ``for_dkernel`` make the copies from
    which the gradients of x and of the kernel are computed.
    """

    def __init__(self, recipe: Recipe, gemm: int) -> None:
        self._recipe: Any = recipe
        self._gemm = gemm
        self._quantizer = quantizer_of(recipe)

    def entered(self, state: Mapping[str, Any]) -> dict[str, Any] | None:
        """Returns this GEMM's part of a module's state with updated scales, or None."""
        if not self._quantizer.keeps_state:
            return None
        part = fp8_state.of_gemm(fp8_state.as_floats(state), self._gemm)
        return fp8_state.entered(part, self._recipe)

    def state_gradient(
        self, part: Mapping[str, Any] | None, before: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Returns what a gradient rule gives for a module's state: the state after the step.

        ``part`` has the amax values recorded in the step, ``before`` is the state before it.
        """
        return {} if part is None else fp8_state.cotangent(part, self._gemm, before)

    def forward(
        self,
        x: jax.Array | FusedCast,
        kernel: jax.Array,
        bias: jax.Array | None,
        part: Mapping[str, Any] | None,
        *,
        for_dx: bool,
        for_dkernel: bool,
    ) -> tuple[jax.Array, Quantized, Quantized]:
        """Returns the output [..., out...] in the kernel's dtype, and the casts of x and kernel.

        Args:
            x: [..., in], or the op that computes it.
            kernel: [in, out...].
            bias: [out...] or None.
            part, for_dx, for_dkernel: see the class.
        """
        qx = self._cast(
            x, "input", -1, self._scale(part, "fwd", _INPUT), rowwise=True, columnwise=for_dkernel
        )
        qkernel = self._cast(
            kernel, "weight", 1, self._scale(part, "fwd", _WEIGHT), rowwise=for_dx, columnwise=True
        )
        y = self._quantizer.multiply(
            "fprop", rows_of(qx), columns_of(qkernel), out_dtype=kernel.dtype, bias=bias, inner=1
        )
        return y, qx, qkernel

    def with_forward_amaxes(
        self, part: dict[str, Any] | None, qx: Quantized, qkernel: Quantized
    ) -> dict[str, Any] | None:
        """Returns ``part`` with the amax values of x and kernel recorded for the next update."""
        return self._staged(part, "fwd", qx.amax, qkernel.amax)

    def cast_gradient(
        self,
        dy: jax.Array | FusedCast,
        columns: int,
        part: dict[str, Any] | None,
        *,
        for_dx: bool,
        for_dkernel: bool,
        with_dbias: bool,
    ) -> tuple[Quantized, dict[str, Any] | None]:
        """Casts the output's gradient; returns the cast, and ``part`` with its amax recorded.

        Args:
            dy: [..., out...], or the op that computes it.
            columns: number of dimensions of "out".
            part, for_dx, for_dkernel: see the class.
            with_dbias: also sum the columns; not read if ``dy`` is an op, which decides this
                itself.
        """
        options = {} if isinstance(dy, FusedCast) else {"with_dbias": with_dbias}
        qdy = self._cast(
            dy, "grad", -columns, self._scale(part, "bwd", _GRAD),
            rowwise=for_dx or not for_dkernel, columnwise=for_dkernel, **options,
        )  # fmt: skip
        return qdy, self._staged(part, "bwd", qdy.amax)

    def input_gradient(self, qdy: Quantized, kernel: Any, columns: int, dtype: Any) -> jax.Array:
        """Computes dy @ kernel.T in ``dtype``.

        ``kernel`` is the pair (FP8 data, scales) of its rowwise copy; ``columns`` is the number of
        dimensions of "out".
        """
        return self._quantizer.multiply(
            "dgrad", rows_of(qdy), kernel, out_dtype=dtype, bias=None, inner=columns
        )

    def kernel_gradient(self, x: Any, qdy: Quantized, rows: int, dtype: Any) -> jax.Array:
        """Computes x.T @ dy in ``dtype``.

        ``x`` is the pair (FP8 data, scales) of its columnwise copy; ``rows`` is the number of
        dimensions before "out" in dy.
        """
        return self._quantizer.multiply(
            "wgrad", x, columns_of(qdy), out_dtype=dtype, bias=None, inner=rows
        )

    def _cast(
        self, x: jax.Array | FusedCast, role: str, flatten_axis: int, scale: Any, **options: Any
    ) -> Quantized:
        """Casts an array or what an op computes."""
        if isinstance(x, FusedCast):
            made = self._quantizer.produce(x, role, scale, **options)
        else:
            made = self._quantizer.cast(x, role, scale, flatten_axis=flatten_axis, **options)
        return made if role == "grad" else made.named()

    def _scale(self, part: Mapping[str, Any] | None, way: str, slot: int) -> Any:
        """Returns the scale of a slot, or None."""
        return None if part is None else part[f"scale_{way}"][slot : slot + 1]

    def _staged(self, part: dict[str, Any] | None, way: str, *amaxes: Any) -> dict[str, Any] | None:
        """Returns the part with the amax values of its first slots staged."""
        if part is None:
            return None
        name = f"amax_history_{way}"
        return {**part, name: fp8_state.with_staged(part[name], *amaxes)}
