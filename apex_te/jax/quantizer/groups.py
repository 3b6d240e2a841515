"""Quantizers of groups of rows, such as experts' tokens, whose sizes are on the device."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ...recipe import Recipe
from .. import _library
from ..checkpoint_policies import FP8_CAST_NAME, named
from ..ops import grouped_cast, grouped_gemm, grouped_quantize
from ..ops.grouped_cast import Gather, Source
from ..ops.grouped_quantize import Alignment, GroupedOutput, Groups
from ..ops.mx_quantize import mx_dequantize, mx_quantize


class GroupCast(NamedTuple):
    """FP8 copies of groups' rows or weights, each with its scales, None if not asked for.

    ``amax`` is float32 [groups], None for schemes without state; ``factor_grad`` and ``bias_grad``
    are gradients of a source.
    """

    rowwise: tuple[jax.Array, jax.Array] | None
    columnwise: tuple[jax.Array, jax.Array] | None
    amax: jax.Array | None = None
    factor_grad: jax.Array | None = None
    bias_grad: jax.Array | None = None

    def named(self) -> GroupCast:
        """Returns the same under a name for policies of checkpoints."""
        return GroupCast(*jax.tree.map(functools.partial(named, FP8_CAST_NAME), tuple(self)))


def _pair(data: Any, scale_inv: Any) -> tuple[jax.Array, jax.Array] | None:
    return None if data is None else (data, scale_inv)


def _cast_of(made: GroupedOutput, grads: Any = None) -> GroupCast:
    """Returns what an op made; a cast without block scales has ``scale_inv`` for both copies."""
    of_rows = made.scale_inv if made.row_scale_inv is None else made.row_scale_inv
    copies = _pair(made.rowwise, of_rows), _pair(made.columnwise, made.scale_inv)
    return GroupCast(*copies, made.amax, *(grads or ()))


class GroupQuantizer:
    """Casts the rows and weights of all groups, and multiplies the copies.

    Attributes:
        keeps_state: True if casts need scales, float32 [groups], and return amax values.
    """

    keeps_state = False

    def __init__(self, recipe: Any) -> None:
        forward, backward = recipe.fp8_format.value.dtype_names
        self._dtypes = {"input": forward, "weight": forward, "grad": backward}

    def rows(
        self, source: Source, role: str, groups: Groups, scale: Any, **options: Any
    ) -> GroupCast:
        """Casts a source's rows; ``options`` are the copies and gradients to make."""
        raise NotImplementedError

    def matrices(self, stack: jax.Array, groups: Groups, scale: Any, **copies: bool) -> GroupCast:
        """Casts weights [groups, in, out]; rowwise copies are [in, out], columnwise [out, in]."""
        raise NotImplementedError

    def multiply(self, product: str, a: Any, b: Any, groups: Groups, dtype: Any) -> jax.Array:
        """Returns ``b[g] @ a[r]`` for each row r of group g, in ``dtype``."""
        raise NotImplementedError

    def contract(self, x: Any, dy: Any, groups: Groups, dtype: Any) -> jax.Array:
        """Returns each group's weight gradient [groups, in, out], of columnwise copies."""
        raise NotImplementedError


class Delayed(GroupQuantizer):
    """Quantizer with a scale for each group from earlier steps; notes the amax values."""

    keeps_state = True

    def __init__(self, recipe: Any) -> None:
        super().__init__(recipe)
        names = ("fprop", "dgrad", "wgrad")
        self._split = dict(zip(names, recipe.use_split_accumulator, strict=True))

    def amax(self, source: Source | jax.Array, role: str, groups: Groups) -> jax.Array:
        """Returns the amax of each group of a source's rows, or of its weight, without a cast."""
        start = jnp.zeros(groups.num_groups, jnp.float32)
        nothing: dict[str, Any] = {"rowwise": False, "columnwise": False, "amax": start}
        given = (groups, start, self._dtypes[role])
        if not isinstance(source, tuple):
            _, *rest = given
            made = grouped_quantize.quantize_matrices(source, *rest, groups=groups, **nothing)
        else:
            if isinstance(source, Gather) and _repeats_rows(source):
                largest = jnp.abs(source.x).max(1, keepdims=True)
                source = source._replace(x=jnp.tile(largest, (1, 8)))
            made, _ = grouped_cast.quantize_source(source, *given, **nothing)
        assert made.amax is not None
        return made.amax

    def rows(
        self, source: Source, role: str, groups: Groups, scale: Any, **options: Any
    ) -> GroupCast:
        found = self._scaling(source, role, groups, scale)
        made = grouped_cast.quantize_source(source, groups, fp8_dtype=self._dtypes[role],
                                            **found, **options)  # fmt: skip
        return _cast_of(*made)

    def matrices(self, stack: jax.Array, groups: Groups, scale: Any, **copies: bool) -> GroupCast:
        found = self._scaling(stack, "weight", groups, scale)
        return _cast_of(
            grouped_quantize.quantize_matrices(
                stack, fp8_dtype=self._dtypes["weight"], groups=groups, **found, **copies
            )
        )

    def _scaling(self, source: Any, role: str, groups: Groups, scale: Any) -> dict[str, Any]:
        return {"scale": scale, "amax": jnp.zeros(groups.num_groups, jnp.float32)}

    def multiply(self, product: str, a: Any, b: Any, groups: Groups, dtype: Any) -> jax.Array:
        fast = not self._split[product]
        return grouped_gemm.scaled_multiply_groups(*a, *b, groups, fast).astype(dtype)

    def contract(self, x: Any, dy: Any, groups: Groups, dtype: Any) -> jax.Array:
        fast = not self._split["wgrad"]
        made = grouped_gemm.scaled_contract_groups(*x, *dy, groups.column_ends, fast)
        return made.astype(dtype)


class Current(Delayed):
    """Quantizer with a scale for each group, from the group itself."""

    keeps_state = False

    def __init__(self, recipe: Any) -> None:
        super().__init__(recipe)
        self._options: dict[str, Any] = {"eps": recipe.eps, "pow2": recipe.pow2}

    def _scaling(self, source: Any, role: str, groups: Groups, scale: Any) -> dict[str, Any]:
        amax, dtype = self.amax(source, role, groups), self._dtypes[role]
        found, inverse = grouped_quantize.scales_of(amax, dtype, **self._options)
        return {"scale": found, "scale_inv": inverse}


def _repeats_rows(source: Gather) -> bool:
    """Returns True if it is faster to read each row once for the amax values: on GPUs."""
    is_gpu = _library.gpu_capability() is not None
    return is_gpu and 2 * source.x.shape[0] <= source.row_of.shape[0]


class Block(GroupQuantizer):
    """Quantizer with 1x128 blocks of rows and 128x128 blocks of weights."""

    def __init__(self, recipe: Any) -> None:
        super().__init__(recipe)
        self._options: dict[str, Any] = {"eps": recipe.eps, "scales": recipe.scales}
        self._wgrad_rows = 128 if recipe.wgrad_input == "128x128" else 1

    def rows(
        self, source: Source, role: str, groups: Groups, scale: Any, **options: Any
    ) -> GroupCast:
        block_rows = self._wgrad_rows if role == "input" else 1
        made = grouped_cast.block_quantize_source(
            source, groups, self._dtypes[role], columnwise_block_rows=block_rows, **self._options,
            **options,
        )  # fmt: skip
        return _cast_of(*made)

    def matrices(self, stack: jax.Array, groups: Groups, scale: Any, **copies: bool) -> GroupCast:
        return _cast_of(
            grouped_quantize.block_quantize_matrices(
                stack, self._dtypes["weight"], groups=groups, **self._options, **copies
            )
        )

    def multiply(self, product: str, a: Any, b: Any, groups: Groups, dtype: Any) -> jax.Array:
        return grouped_gemm.block_multiply_groups(*a, *b, groups).astype(dtype)

    def contract(self, x: Any, dy: Any, groups: Groups, dtype: Any) -> jax.Array:
        # The gradient, whose columnwise blocks are 1x128, is the second operand.
        return grouped_gemm.block_contract_groups(*x, *dy, groups).astype(dtype)


class MX(GroupQuantizer):
    """Quantizer with a power-of-two scale per 32 elements along a GEMM's inner dimension.

    Columnwise copies of rows are aligned to 32 rows a group. Products are emulated.
    """

    _block = 32

    def __init__(self, recipe: Any) -> None:
        super().__init__(recipe)
        self._rounding = recipe.rounding

    def _cast(self, x: jax.Array, role: str, columnwise: bool) -> tuple[Any, Any]:
        sides = {"rowwise": not columnwise, "columnwise": columnwise}
        made = mx_quantize(x, self._dtypes[role], rounding=self._rounding, **sides)
        return (made[2], made[3]) if columnwise else (made[0], made[1])

    def rows(
        self, source: Source, role: str, groups: Groups, scale: Any, *, rowwise: bool,
        columnwise: bool, **wanted: bool,
    ) -> GroupCast:  # fmt: skip
        rows, grads = grouped_cast.rows_of(source, groups, **wanted)
        by_row = by_column = None
        if rowwise:
            by_row = self._cast(rows, role, False)
        if columnwise:
            aligned = Alignment.of(groups, self._block).copies(rows)
            by_column = self._cast(aligned, role, True)
        return GroupCast(by_row, by_column, None, *grads)

    def matrices(
        self, stack: jax.Array, groups: Groups, scale: Any, *, rowwise: bool, columnwise: bool
    ) -> GroupCast:
        count, rows, cols = stack.shape
        by_row = by_column = None
        if rowwise:
            made = self._cast(stack.reshape(-1, cols), "weight", False)
            by_row = tuple(x.reshape(count, rows, -1) for x in made)
        if columnwise:
            padded = jnp.pad(stack, ((0, 0), (0, -rows % self._block), (0, 0)))
            made = self._cast(padded.reshape(-1, cols), "weight", True)
            data, scales = (jnp.moveaxis(x.reshape(cols, count, -1), 1, 0) for x in made)
            by_column = data[..., :rows], scales
        return GroupCast(by_row, by_column)  # type: ignore[arg-type]

    def multiply(self, product: str, a: Any, b: Any, groups: Groups, dtype: Any) -> jax.Array:
        flat = [x.reshape(-1, x.shape[-1]) for x in b]
        weights = _decoded(*flat).reshape(b[0].shape)
        return grouped_gemm.multiply_groups(_decoded(*a), weights, groups).astype(dtype)

    def contract(self, x: Any, dy: Any, groups: Groups, dtype: Any) -> jax.Array:
        aligned = Alignment.of(groups, self._block)
        whole = aligned.as_groups()
        made = grouped_gemm.contract_groups(_decoded(*x), _decoded(*dy).T, whole, True)
        return made.astype(dtype)


def _decoded(fp8_data: jax.Array, scale: jax.Array) -> jax.Array:
    """Returns values of MXFP8 data; on GPUs in bfloat16, which holds them."""
    dtype = jnp.float32 if _library.gpu_capability() is None else jnp.bfloat16
    return mx_dequantize(fp8_data, scale, dtype=dtype)


_SCHEMES: dict[str, type[GroupQuantizer]] = {
    "delayed": Delayed, "current": Current, "block": Block, "mx": MX,
}  # fmt: skip


@functools.lru_cache(maxsize=64)
def group_quantizer_of(recipe: Recipe) -> GroupQuantizer:
    """Returns the quantizer of groups of a recipe that ``fp8_autocast`` has accepted."""
    chosen: Any = recipe
    if chosen.quantizer not in _SCHEMES:
        raise NotImplementedError(
            f"moe: fp8_recipe must not have HiF8 as its format in JAX, got {recipe!r}"
        )
    if any(chosen.override_linear_precision):
        raise NotImplementedError(
            "moe: override_linear_precision must be (False, False, False) in JAX, got"
            f" {chosen.override_linear_precision}"
        )
    return _SCHEMES[chosen.quantizer](recipe)
