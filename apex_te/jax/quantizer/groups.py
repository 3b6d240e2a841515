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
from ..ops.grouped_cast import BlockRule, Gather, GroupScales, Source
from ..ops.grouped_quantize import Alignment, GroupedOutput, Groups
from ..ops.mx_quantize import mx_dequantize, mx_quantize


class GroupCast(NamedTuple):
    """FP8 copies of groups' rows or weights, each with its scales, None if not requested.

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


def _cast_of(made: GroupedOutput, grads: Any = None) -> GroupCast:
    """Returns what an op made; a cast without block scales has ``scale_inv`` for both copies."""
    of_rows = made.scale_inv if made.row_scale_inv is None else made.row_scale_inv
    pairs: Any = (made.rowwise, of_rows), (made.columnwise, made.scale_inv)
    by_row, by_column = (None if pair[0] is None else pair for pair in pairs)
    of_factor, of_bias = grads or (None, None)
    return GroupCast(by_row, by_column, made.amax, of_factor, of_bias)


class GroupQuantizer:
    """Casts the rows and weights of all groups, and multiplies the copies."""

    keeps_state = False

    def __init__(self, recipe: Any) -> None:
        self._recipe = recipe
        forward, backward = recipe.fp8_format.value.dtype_names
        self._dtypes = {"input": forward, "weight": forward, "grad": backward}

    def rows(
        self, source: Source, role: str, groups: Groups, scale: Any, **options: Any
    ) -> GroupCast:
        """Casts a source's rows for a role; ``options`` are the copies and gradients to make.

        ``scale`` is float32 [groups] if ``keeps_state``.
        """
        scaling = self._scaling(source, role, groups, scale)
        return _cast_of(
            *grouped_cast.cast_source(source, groups, self._dtypes[role], scaling, **options)
        )

    def matrices(
        self, stack: jax.Array, groups: Groups, scale: Any, *, rowwise: bool, columnwise: bool
    ) -> GroupCast:
        """Casts weights [groups, in, out]."""
        raise NotImplementedError

    def multiply(self, product: str, a: Any, b: Any, groups: Groups, dtype: Any) -> jax.Array:
        """Returns ``b[g] @ a[r]`` of rowwise copies a and copies b [groups, N, K]."""
        raise NotImplementedError

    def contract(self, x: Any, dy: Any, groups: Groups, dtype: Any, wide: bool) -> jax.Array:
        """Returns weight gradients [groups, in, out] of columnwise copies, ``wide`` unrounded."""
        raise NotImplementedError

    def _scaling(self, source: Any, role: str, groups: Groups, scale: Any) -> Any:
        """Returns the scales of a cast, or the rule of those of blocks."""
        raise NotImplementedError


class Delayed(GroupQuantizer):
    """Quantizer with a scale for each group from earlier steps; records amax values."""

    keeps_state = True

    def __init__(self, recipe: Any) -> None:
        super().__init__(recipe)
        names = ("fprop", "dgrad", "wgrad")
        self._fast = {n: not s for n, s in zip(names, recipe.use_split_accumulator, strict=True)}

    def amax(self, source: Source | jax.Array, role: str, groups: Groups) -> jax.Array:
        """Returns max |value| of each group, float32 [groups], without a cast.

        ``source`` is a source of rows, or the weights [groups, in, out]; ``role`` is "input",
        "weight" or "grad".
        """
        start = jnp.zeros(groups.num_groups, jnp.float32)
        nothing: dict[str, Any] = {"rowwise": False, "columnwise": False}
        dtype = self._dtypes[role]
        given: Any = source
        if not isinstance(source, tuple):
            cast = grouped_quantize.quantize_matrices
            made = cast(given, start, dtype, groups=groups, amax=start, **nothing)
        else:
            if isinstance(source, Gather) and _repeats_rows(source):
                largest = jnp.abs(source.x).max(1, keepdims=True)
                given = source._replace(x=jnp.tile(largest, (1, 8)))
            scales = GroupScales(start, amax=start)
            made, _ = grouped_cast.cast_source(given, groups, dtype, scales, **nothing)
        assert made.amax is not None
        return made.amax

    def matrices(self, stack: jax.Array, groups: Groups, scale: Any, **copies: Any) -> GroupCast:
        found = self._scaling(stack, "weight", groups, scale)._asdict()
        dtype = self._dtypes["weight"]
        cast = grouped_quantize.quantize_matrices
        return _cast_of(cast(stack, fp8_dtype=dtype, groups=groups, **found, **copies))

    def _scaling(self, source: Any, role: str, groups: Groups, scale: Any) -> Any:
        return GroupScales(scale, amax=jnp.zeros(groups.num_groups, jnp.float32))

    def multiply(self, product: str, a: Any, b: Any, groups: Groups, dtype: Any) -> jax.Array:
        operands = *a, *b, groups, self._fast[product]
        return grouped_gemm.scaled_multiply_groups(*operands).astype(dtype)

    def contract(self, x: Any, dy: Any, groups: Groups, dtype: Any, wide: bool) -> jax.Array:
        operands = *x, *dy, groups.column_ends, self._fast["wgrad"], wide
        return grouped_gemm.scaled_contract_groups(*operands).astype(dtype)


class Current(Delayed):
    """Quantizer with a scale for each group, from the group itself."""

    keeps_state = False

    def _scaling(self, source: Any, role: str, groups: Groups, scale: Any) -> Any:
        amax, dtype, recipe = self.amax(source, role, groups), self._dtypes[role], self._recipe
        made = grouped_quantize.scales_of(amax, dtype, eps=recipe.eps, pow2=recipe.pow2)
        return GroupScales(*made)


def _repeats_rows(source: Gather) -> bool:
    """Returns True if it is faster to read each row once for the amax values: on GPUs."""
    is_gpu = _library.gpu_capability() is not None
    return is_gpu and 2 * source.x.shape[0] <= source.row_of.shape[0]


class Block(GroupQuantizer):
    """Quantizer with 1x128 blocks of rows and 128x128 blocks of weights."""

    def __init__(self, recipe: Any) -> None:
        super().__init__(recipe)
        self._options: dict[str, Any] = {"scales": recipe.scales, "eps": recipe.eps}
        self._wgrad_rows = 128 if recipe.wgrad_input == "128x128" else 1

    def _scaling(self, source: Any, role: str, groups: Groups, scale: Any) -> Any:
        rows = self._wgrad_rows if role == "input" else 1
        return BlockRule(**self._options, columnwise_block_rows=rows)

    def matrices(self, stack: jax.Array, groups: Groups, scale: Any, **copies: Any) -> GroupCast:
        cast, dtype = grouped_quantize.block_quantize_matrices, self._dtypes["weight"]
        return _cast_of(cast(stack, dtype, groups=groups, **self._options, **copies))

    def multiply(self, product: str, a: Any, b: Any, groups: Groups, dtype: Any) -> jax.Array:
        operands = *a, *b, groups
        return grouped_gemm.block_multiply_groups(*operands).astype(dtype)

    def contract(self, x: Any, dy: Any, groups: Groups, dtype: Any, wide: bool) -> jax.Array:
        operands = *x, *dy, groups, wide
        return grouped_gemm.block_contract_groups(*operands).astype(dtype)


class MX(GroupQuantizer):
    """Quantizer with a power-of-two scale per 32 elements along a GEMM's inner dimension.

    Columnwise copies of rows are aligned to 32 rows a group. Products are emulated.
    """

    _block = 32

    def _cast(self, x: jax.Array, role: str, columnwise: bool) -> tuple[Any, Any]:
        sides = {"rowwise": not columnwise, "columnwise": columnwise}
        made = mx_quantize(x, self._dtypes[role], rounding=self._recipe.rounding, **sides)
        return (made[2], made[3]) if columnwise else (made[0], made[1])

    def rows(
        self, source: Source, role: str, groups: Groups, scale: Any, **options: Any
    ) -> GroupCast:
        rowwise, columnwise = options.pop("rowwise"), options.pop("columnwise")
        rows, grads = grouped_cast.rows_of(source, groups, **options)
        by_row = self._cast(rows, role, False) if rowwise else None
        by_column = None
        if columnwise:
            aligned = Alignment.of(groups, self._block).copies(rows)
            by_column = self._cast(aligned, role, True)
        return GroupCast(by_row, by_column, None, *grads)

    def matrices(
        self, stack: jax.Array, groups: Groups, scale: Any, *, rowwise: bool, columnwise: bool
    ) -> GroupCast:
        count, rows, cols = stack.shape
        by_row: Any = None
        by_column: Any = None
        if rowwise:
            made = self._cast(stack.reshape(-1, cols), "weight", False)
            by_row = tuple(x.reshape(count, rows, -1) for x in made)
        if columnwise:
            padded = jnp.pad(stack, ((0, 0), (0, -rows % self._block), (0, 0)))
            made = self._cast(padded.reshape(-1, cols), "weight", True)
            data, scales = (jnp.moveaxis(x.reshape(cols, count, -1), 1, 0) for x in made)
            by_column = data[..., :rows], scales
        return GroupCast(by_row, by_column)

    def multiply(self, product: str, a: Any, b: Any, groups: Groups, dtype: Any) -> jax.Array:
        flat = [x.reshape(-1, x.shape[-1]) for x in b]
        weights = _decoded(*flat).reshape(b[0].shape)
        return grouped_gemm.multiply_groups(_decoded(*a), weights, groups).astype(dtype)

    def contract(self, x: Any, dy: Any, groups: Groups, dtype: Any, wide: bool) -> jax.Array:
        aligned = Alignment.of(groups, self._block)
        whole = grouped_quantize.groups_of(aligned.ends - aligned.begins, aligned.rows)
        made = grouped_gemm.contract_groups(_decoded(*x), _decoded(*dy).T, whole, True)
        return made.astype(dtype)


def _decoded(fp8_data: jax.Array, scale: jax.Array) -> jax.Array:
    """Returns values of MXFP8 data; on GPUs in bfloat16, which holds them."""
    dtype = jnp.float32 if _library.gpu_capability() is None else jnp.bfloat16
    return mx_dequantize(fp8_data, scale, dtype=dtype)


_SCHEMES: dict[str, Any] = {
    "delayed": Delayed, "current": Current, "block": Block, "mx": MX,
}  # fmt: skip


@functools.lru_cache(maxsize=64)
def group_quantizer_of(op: str, recipe: Recipe) -> Any:
    """Returns the quantizer of groups of a recipe that ``fp8_autocast`` accepted; for ``op``."""
    chosen: Any = recipe
    if chosen.quantizer not in _SCHEMES:
        raise NotImplementedError(
            f"{op}: fp8_recipe must not have HiF8 as its format in JAX, got {recipe!r}"
        )
    if any(chosen.override_linear_precision):
        raise NotImplementedError(
            f"{op}: override_linear_precision must be (False, False, False) in JAX, got "
            f"{chosen.override_linear_precision}"
        )
    return _SCHEMES[chosen.quantizer](recipe)
