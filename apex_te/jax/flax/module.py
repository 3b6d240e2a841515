"""Flax Linen modules: dense layers, norms and the MLP, in FP8 inside of ``fp8_autocast``."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen import partitioning
from jax.sharding import PartitionSpec

from ...recipe import DelayedScaling
from ...runtime.named_arguments import check_count
from .. import _partition, fp8_state
from ..boxes import unbox
from ..dense import dense
from ..fused_casts import Norm
from ..fused_dense import fused_dense
from ..gated_mlp import gated_mlp
from ..joined_columns import JoinedColumns
from ..ops._checks import FLOATS
from ..ops.activation import KINDS, activation
from ..ops.layer_norm import layer_norm
from ..ops.rms_norm import rms_norm
from ..ops.swiglu import ACTIVATIONS, swiglu
from ..product import can_fuse_activation, can_fuse_norm
from ..region import active_recipe

__all__ = [
    "DenseGeneral", "LayerNorm", "LayerNormDenseGeneral", "LayerNormMLP", "TransformerEngineBase",
]  # fmt: skip

Initializer = Callable[..., Any]
Axes = tuple[str | None, ...]
_zeros = nn.initializers.zeros
_norm_axes = ("embed",)


def kernel_init_of(given: Initializer | None) -> Initializer:
    """Returns an initializer of kernels, or the default for None."""
    return given or nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal")


def _is_placed(axes: Axes | None) -> bool:
    """Returns True if ``placed`` places arrays on the mesh axes of logical axes."""
    return axes is not None and bool(nn.get_logical_axis_rules())


def placed(x: jax.Array, axes: Axes | None) -> jax.Array:
    """Constrains ``x`` to the mesh axes of logical axes; no-op without them or Flax's rules."""
    rules = nn.get_logical_axis_rules()
    if axes is None or not rules:
        return x
    spec = nn.logical_to_mesh_axes(axes, rules)
    return _partition.constrained(x, spec, lambda x: nn.with_logical_constraint(x, axes))


def last_dimension_parts(x: jax.Array, axes: Axes | None) -> int:
    """Returns the number of shards of an array's last dimension, as far as it is known."""
    rules = nn.get_logical_axis_rules()
    spec = nn.logical_to_mesh_axes(axes, rules) if axes and rules else PartitionSpec()
    return _partition.last_dimension_parts(x, spec)


class LogicallyPartitioned(nn.LogicallyPartitioned):
    """Flax's box of a parameter, changed so that ``nnx.bridge.ToNNX`` works without a mesh."""

    def to_nnx_metadata(self) -> dict[str, Any]:
        """Returns the metadata of an ``nnx.Variable``; without a mesh, it is not sharded."""
        found = {"value": self.value, "out_sharding": self.names, "sharding_rules": self.rules}
        is_placed = not jax.sharding.get_abstract_mesh().empty
        return {**found, "mesh": self.mesh} | ({} if is_placed else {"eager_sharding": False})


def contracted_axes(owner: str, axis: Any, shape: Sequence[int]) -> tuple[int, ...]:
    """Returns the checked dimensions of an input that a layer contracts, in ascending order."""
    given = tuple(axis) if isinstance(axis, Sequence) and not isinstance(axis, str) else (axis,)
    found = []
    for each in given:
        try:
            number = None if isinstance(each, bool) else operator.index(each)
        except TypeError:
            number = None
        if number is None:
            raise TypeError(
                f"{owner}: axis must be an int or a sequence of ints, got {type(each).__name__}"
            )
        if not -len(shape) <= number < len(shape):
            raise ValueError(
                f"{owner}: axis must be from {-len(shape)} to {len(shape) - 1} for inputs of shape"
                f" {list(shape)}, got {number}"
            )
        found.append(number % len(shape))
    if not found or len(set(found)) < len(found):
        raise ValueError(f"{owner}: axis must be one or several different dimensions, got {axis}")
    if not all(shape[each] for each in found):
        raise ValueError(
            f"{owner}: inputs must have at least one element along axis {axis}, got shape"
            f" {list(shape)}"
        )
    return tuple(sorted(found))


@functools.cache
def _as_v1(kind: Any) -> Any:
    """Returns a module's class with the semantics of Transformer Engine 1, its defaults apart."""
    names = {"_is_v1": True, "__module__": kind.__module__, "__doc__": kind.__doc__}
    return type(kind)(kind.__name__, (kind,), names)


class TransformerEngineBase(nn.Module):
    """Base of the modules: parameters with logical axes and the collection "fp8_metas"."""

    _is_v1: ClassVar[bool] = False

    def _kind(self, kind: Any) -> Any:
        """Returns the class of a submodule, which treats dtypes and axes as this module does."""
        return _as_v1(kind) if self._is_v1 else kind

    def _dtype(self) -> Any:
        """Returns the field ``dtype``, in which a layer can compute."""
        given = getattr(self, "dtype", None)
        try:
            name = "float32" if given is None else jnp.dtype(given).name
        except TypeError:
            name = repr(given)
        if name not in FLOATS:
            raise TypeError(
                f"{type(self).__name__}: dtype must be float32, float16 or bfloat16, got {name}"
            )
        return jnp.dtype(name)

    def _check_counts(self, *names: str) -> None:
        """Checks that fields are ints of at least 1, or None."""
        for name in names:
            if getattr(self, name) is not None:
                check_count(type(self).__name__, name, getattr(self, name))

    def _input(self, inputs: Any, name: str = "inputs") -> jax.Array:
        """Returns an input in the dtype in which the layer computes; it has a dimension."""
        dtype = self._dtype()
        x = jnp.asarray(inputs, dtype if self._is_v1 and self.dtype is not None else None)
        if x.dtype.name not in FLOATS:
            raise TypeError(
                f"{type(self).__name__}: {name} must have dtype float32, float16 or bfloat16, got"
                f" {x.dtype.name}"
            )
        if x.ndim == 0:
            raise ValueError(
                f"{type(self).__name__}: {name} must have at least one dimension, got a scalar"
            )
        return x

    def _parameter(self, name: str, init: Initializer, shape: Sequence[int], axes: Any) -> Any:
        """Returns a parameter; its box carries its logical axes."""
        dtype, axes = self._dtype(), tuple(axes or ())
        if not self._is_v1:

            def boxed(*given: Any) -> Any:
                return LogicallyPartitioned(init(*given), axes)

            value = unbox(self.param(name, boxed, tuple(shape), dtype, unbox=False))
            return placed(value, axes) if axes else value
        value = self.param(name, init, tuple(shape), jnp.float32)
        if not axes:
            return value
        self.sow(
            "params_axes", f"{name}_axes", partitioning.AxisMetadata(axes),
            reduce_fn=lambda _, new: new,
        )  # fmt: skip
        return placed(value, axes)

    def _fp8_state(self, gemms: int = 1) -> dict[str, jax.Array] | None:
        """Returns the module's FP8 state inside of a region with delayed scaling, else None."""
        recipe = active_recipe()
        if not isinstance(recipe, DelayedScaling):
            return None
        name = fp8_state.FP8_COLLECTION_NAME
        if not self.is_initializing() and not self.has_variable(name, "uses"):
            raise ValueError(
                f"{type(self).__name__}: variables must have the collection {name!r} in a region"
                " with DelayedScaling (call init inside of the region), got none of this module"
            )
        made = fp8_state.initial(recipe, gemms)
        found = {
            key: self.variable(name, key, lambda value=value: value).value
            for key, value in made.items()
            if self.is_initializing() or self.has_variable(name, key)
        }
        return fp8_state.checked(type(self).__name__, found, made)

    def _dense(
        self, x: jax.Array, kernel: Any, bias: Any, state: Any, gemm: int, inner: int = 1
    ) -> jax.Array:
        """Multiplies by a parameter [in..., out...] in x's dtype; see ``dense``."""
        bias = None if bias is None else bias.astype(x.dtype)
        return dense(x, kernel.astype(x.dtype), bias, state, gemm, inner)


class DenseGeneral(TransformerEngineBase):
    """Linear layer over one or several dimensions: x @ kernel + bias.

    Attributes:
        features: sizes of the output's new last dimensions; an int for one.
        kernel_init: initializer of the kernel; None: variance_scaling(1.0, fan_in,
            truncated_normal).
        kernel_axes: logical axes of the kernel.
        use_bias: add a bias.
        bias_init: initializer of the bias.
        bias_axes: logical axes of the bias.
        enable_low_rank_adaptation: must be False.
        low_rank_adaptation_dim, low_rank_adaptation_alpha: not used.
        axis: dimensions of the input that are contracted.
        dtype: dtype of the parameters; the layer computes in that of its input.
        transpose_batch_sequence: no effect; the layer is the same for both layouts.
    """

    features: int | Sequence[int]
    kernel_init: Initializer | None = None
    kernel_axes: Axes = ()
    use_bias: bool = True
    bias_init: Initializer = _zeros
    bias_axes: Axes = ()
    enable_low_rank_adaptation: bool = False
    low_rank_adaptation_dim: int = 32
    low_rank_adaptation_alpha: float | None = None
    axis: int | Sequence[int] = -1
    dtype: Any = jnp.float32
    transpose_batch_sequence: bool = False

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Returns the output: dimensions of ``inputs`` that are not contracted, then new ones."""
        if self.enable_low_rank_adaptation:
            raise NotImplementedError(
                "DenseGeneral: enable_low_rank_adaptation must be False, got True"
            )
        x = self._input(inputs)
        axes = contracted_axes("DenseGeneral", self.axis, x.shape)
        rest = tuple(i for i in range(x.ndim) if i not in axes)
        x = x.transpose(*rest, *axes)
        inner = x.shape[len(rest) :]
        kernel, bias = dense_parameters(self, inner)
        return self._dense(x, kernel, bias, self._fp8_state(), 0, len(axes))


def dense_parameters(layer: Any, inner: Sequence[int]) -> tuple[jax.Array, jax.Array | None]:
    """Returns the kernel [*inner, *features] of a dense layer and its bias [*features] or None."""
    given = layer.features
    features = tuple(given) if isinstance(given, Sequence) else (given,)
    if not features:
        raise ValueError(f"{type(layer).__name__}: features must have an extent, got {given}")
    for extent in features:
        check_count(type(layer).__name__, "features", extent)
    shape = math.prod(inner), math.prod(features)

    def init(key: Any, whole: Any, dtype: Any) -> jax.Array:
        return kernel_init_of(layer.kernel_init)(key, shape, dtype).reshape(whole)

    kernel = layer._parameter("kernel", init, (*inner, *features), layer.kernel_axes)
    bias = None
    if layer.use_bias:
        bias = layer._parameter("bias", layer.bias_init, features, layer.bias_axes)
    return kernel, bias


class _Normed(TransformerEngineBase):
    """Base of modules that begin with a norm."""

    def _last_axis_input(self, inputs: Any) -> jax.Array:
        """Returns the input of a layer whose field ``axis`` must be the last dimension."""
        layer: Any = self
        name, x = type(self).__name__, self._input(inputs)
        if contracted_axes(name, layer.axis, x.shape) != (x.ndim - 1,):
            raise ValueError(f"{name}: axis must be -1, got {layer.axis}")
        return x

    def _norm(self, x: jax.Array) -> jax.Array:
        """Normalises over the last dimension with the parameters ``scale`` and ``ln_bias``."""
        norm, scale, bias = self._norm_with_parameters(x.shape[-1], x.dtype)
        options = {"zero_centered_gamma": norm.zero_centered_gamma}
        if bias is None:
            return rms_norm(x, scale, norm.epsilon, **options)
        return layer_norm(x, scale, bias, norm.epsilon, **options)

    def _norm_with_parameters(
        self, width: int, dtype: Any
    ) -> tuple[Norm, jax.Array, jax.Array | None]:
        """Returns norm, scale, and bias, None for an RMS norm, in ``dtype`` or float32."""

        def in_dtype(p: jax.Array) -> jax.Array:
            return p if p.dtype == jnp.float32 else p.astype(dtype)

        layer: Any = self
        if layer.layernorm_type not in ("layernorm", "rmsnorm"):
            raise ValueError(
                f'{type(self).__name__}: layernorm_type must be "layernorm" or "rmsnorm", got'
                f" {layer.layernorm_type!r}"
            )
        centered = layer.zero_centered_gamma
        init = layer.scale_init or (_zeros if centered else nn.initializers.ones)
        scale = in_dtype(self._parameter("scale", init, (width,), layer.scale_axes))
        if layer.layernorm_type == "rmsnorm":
            return Norm("rms_norm", layer.epsilon, centered), scale, None
        init = getattr(layer, "ln_bias_init", None) or layer.bias_init
        axes = layer.ln_bias_axes if hasattr(layer, "ln_bias_axes") else layer.bias_axes
        bias = self._parameter("ln_bias", init, (width,), axes)
        return Norm("layer_norm", layer.epsilon, centered), scale, in_dtype(bias)


class LayerNorm(_Normed):
    """Layer or RMS normalisation over the last dimension.

    Attributes:
        epsilon: added to the variance.
        layernorm_type: "layernorm" or "rmsnorm".
        zero_centered_gamma: multiply by 1 + scale instead of scale.
        scale_init: initializer of the scale; None: ones, or zeros with ``zero_centered_gamma``.
        scale_axes: logical axes of the scale.
        bias_init: initializer of the bias, which "rmsnorm" does not have.
        bias_axes: logical axes of the bias.
        dtype: dtype of the parameters; the layer computes in that of its input.
        transpose_batch_sequence: no effect; the layer is the same for both layouts.
    """

    epsilon: float = 1e-6
    layernorm_type: str = "layernorm"
    zero_centered_gamma: bool = False
    scale_init: Initializer | None = None
    scale_axes: Axes = _norm_axes
    bias_init: Initializer = _zeros
    bias_axes: Axes = _norm_axes
    dtype: Any = jnp.float32
    transpose_batch_sequence: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns the normalised input."""
        x = self._input(x, "x")
        contracted_axes("LayerNorm", -1, x.shape)
        return self._norm(x)


class Prepared(NamedTuple):
    """Operands of the GEMM of a ``LayerNormDenseGeneral``.

    Without ``norm``, ``x`` is the GEMM's input, and ``normed`` the norm's output or the input. Else
    ``x`` is the input of ``norm``, which has not run yet because it writes FP8 itself, with its
    scale and its bias or None.
    """

    x: jax.Array
    normed: jax.Array | None
    norm: tuple[Norm, jax.Array, jax.Array | None] | None
    kernel: jax.Array
    bias: jax.Array | None


class LayerNormDenseGeneral(_Normed):
    """Norm followed by a linear layer.

    Attributes:
        features, kernel_init, kernel_axes, use_bias, bias_init, bias_axes, axis,
        enable_low_rank_adaptation, low_rank_adaptation_dim, low_rank_adaptation_alpha: as in
            ``DenseGeneral``; ``axis`` must be the last dimension.
        enable_layernorm: False to leave the norm out.
        layernorm_type, epsilon, zero_centered_gamma, scale_init, scale_axes: as in ``LayerNorm``.
        ln_bias_init, ln_bias_axes: initializer and logical axes of the norm's bias.
        return_layernorm_output: also return the norm's output.
        dtype: dtype of the parameters; the layer computes in that of its input.
        transpose_batch_sequence: no effect; the layer is the same for both layouts.
        layernorm_input_axes, dot_input_axes: logical axes to which the inputs of the norm and of
            the GEMM are constrained; None does not constrain them.
        depth_scaling: divisor of the output; None does not divide.
    """

    features: int | Sequence[int]
    enable_layernorm: bool = True
    layernorm_type: str = "layernorm"
    epsilon: float = 1e-6
    zero_centered_gamma: bool = False
    scale_init: Initializer | None = None
    scale_axes: Axes = _norm_axes
    ln_bias_init: Initializer = _zeros
    ln_bias_axes: Axes = _norm_axes
    kernel_init: Initializer | None = None
    kernel_axes: Axes = ()
    use_bias: bool = False
    bias_init: Initializer = _zeros
    bias_axes: Axes = ()
    return_layernorm_output: bool = False
    enable_low_rank_adaptation: bool = False
    low_rank_adaptation_dim: int = 32
    low_rank_adaptation_alpha: float | None = None
    axis: int | Sequence[int] = -1
    dtype: Any = jnp.float32
    transpose_batch_sequence: bool = False
    layernorm_input_axes: Axes | None = None
    dot_input_axes: Axes | None = None
    depth_scaling: float | None = None

    @nn.compact
    def __call__(self, inputs: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """Returns the output, and the norm's output or None; ``inputs`` are [..., in]."""
        state = self._fp8_state() or {}
        found = self._prepared(inputs, state)
        if found.norm is None:
            y = self._dense(found.x, found.kernel, found.bias, state, 0)
        else:
            y = self._fused(found, state)
        if self.depth_scaling is not None:
            y = y / self.depth_scaling
        return y, found.normed if self._returns_norm else None

    def _fused(
        self, found: Prepared, state: Mapping[str, jax.Array], columns: JoinedColumns | None = None
    ) -> Any:
        """Returns the GEMM, or those of several kernels; see ``fused_dense``."""
        norm, *of_norm = found.norm or (None, None, None)
        given = (None if p is None else p.astype(found.x.dtype) for p in (found.kernel, found.bias))
        return fused_dense(found.x, (*of_norm, *given), state, norm, columns)

    @property
    def _returns_norm(self) -> bool:
        """Returns True if the norm's output is returned, too."""
        return self.return_layernorm_output and self.enable_layernorm

    def _prepared(self, inputs: jax.Array, state: Mapping[str, jax.Array]) -> Prepared:
        """Returns what the GEMM needs; the norm has run unless it writes FP8 itself."""
        if self.enable_low_rank_adaptation:
            raise NotImplementedError(
                "LayerNormDenseGeneral: enable_low_rank_adaptation must be False, got True"
            )
        x = placed(self._last_axis_input(inputs), self.layernorm_input_axes)
        fuses = can_fuse_norm(state) and x.ndim > 1 and not _is_placed(self.dot_input_axes)
        if fuses and self.enable_layernorm and not self._returns_norm:
            norm = self._norm_with_parameters(x.shape[-1], x.dtype)
            return Prepared(x, None, norm, *dense_parameters(self, x.shape[-1:]))
        normed = self._norm(x) if self.enable_layernorm else x
        x = placed(normed, self.dot_input_axes)
        return Prepared(x, normed, None, *dense_parameters(self, x.shape[-1:]))


class LayerNormMLP(_Normed):
    """Norm, linear layer, activation, dropout and linear layer; the output has the input's width.

    Attributes:
        intermediate_dim: width between the linear layers.
        enable_layernorm, layernorm_type, epsilon, zero_centered_gamma, scale_init, scale_axes,
        ln_bias_init, ln_bias_axes: as in ``LayerNormDenseGeneral``.
        kernel_init: initializer of both kernels.
        kernel_axes_1, kernel_axes_2: logical axes of ``wi_kernel`` [in, activations, dim] and of
            ``wo_kernel`` [dim, out].
        use_bias: add biases.
        bias_init, bias_axes_1, bias_axes_2: initializer and logical axes of the biases.
        return_layernorm_output: also return the norm's output.
        activations: one activation; for a gated MLP the gate's activation and "linear".
        intermediate_dropout_rng_name: name of Flax's random number stream for dropout.
        intermediate_dropout_rate: probability of dropout after the activation.
        intermediate_hidden_dropout_dims: dimensions along which the dropout mask is broadcast.
        axis: must be the last dimension.
        dtype: dtype of the parameters; the layer computes in that of its input.
        transpose_batch_sequence: no effect; the layer is the same for both layouts.
        layernorm_input_axes, dot_1_input_axes, dot_2_input_axes: logical axes to which the inputs
            of the norm and of both GEMMs are constrained; None does not constrain them.
    """

    intermediate_dim: int = 2048
    enable_layernorm: bool = True
    layernorm_type: str = "layernorm"
    epsilon: float = 1e-6
    zero_centered_gamma: bool = False
    scale_init: Initializer | None = None
    scale_axes: Axes = _norm_axes
    ln_bias_init: Initializer = _zeros
    ln_bias_axes: Axes = _norm_axes
    kernel_init: Initializer | None = None
    kernel_axes_1: Axes = ("embed", "act", "mlp")
    kernel_axes_2: Axes = ("mlp", "embed")
    use_bias: bool = False
    bias_init: Initializer = _zeros
    bias_axes_1: Axes = ("act", "mlp")
    bias_axes_2: Axes = ("embed",)
    return_layernorm_output: bool = False
    activations: Sequence[str] = ("gelu",)
    intermediate_dropout_rng_name: str = "dropout"
    intermediate_dropout_rate: float = 0.0
    intermediate_hidden_dropout_dims: Sequence[int] = ()
    axis: int | Sequence[int] = -1
    dtype: Any = jnp.float32
    transpose_batch_sequence: bool = False
    layernorm_input_axes: Axes | None = None
    dot_1_input_axes: Axes | None = None
    dot_2_input_axes: Axes | None = None

    def _act(self, x: jax.Array) -> jax.Array:
        """Applies the activations to [..., activations, dim]."""
        names = tuple(self.activations)
        if len(names) == 1 and names[0] in KINDS:
            return activation(x[..., 0, :], names[0])
        if len(names) == 2 and names[1] == "linear" and names[0] in ACTIVATIONS:
            return swiglu(x, activation=names[0], axis=-2)
        raise ValueError(
            f"LayerNormMLP: activations must be one of {', '.join(KINDS)}, or one of"
            f' {", ".join(ACTIVATIONS)} and "linear", got {names}'
        )

    def _is_fused(self, x: jax.Array, state: Any, deterministic: bool) -> bool:
        """Returns True if nothing but a gated activation is between the linear layers."""
        names = tuple(self.activations)
        is_gated = len(names) == 2 and names[1] == "linear" and names[0] in ACTIVATIONS
        drops = self.intermediate_dropout_rate > 0.0 and not deterministic
        is_placed = _is_placed(self.dot_2_input_axes)
        return (
            x.ndim > 1 and is_gated and not drops and not is_placed and can_fuse_activation(state)
        )

    @nn.compact
    def __call__(
        self, inputs: jax.Array, deterministic: bool = False
    ) -> tuple[jax.Array, jax.Array | None]:
        """Returns the output, and the norm's output or None.

        Args:
            inputs: [..., embed].
            deterministic: True turns dropout off.
        """
        x = placed(self._last_axis_input(inputs), self.layernorm_input_axes)
        state, width = self._fp8_state(2) or {}, x.shape[-1]
        returned = self.return_layernorm_output and self.enable_layernorm
        if self._is_fused(x, state, deterministic):
            norm: Norm | None = None
            of_norm: list[Any] = [None, None]
            is_fused = can_fuse_norm(state) and not _is_placed(self.dot_1_input_axes)
            if self.enable_layernorm and not returned and is_fused:
                norm, *of_norm = self._norm_with_parameters(width, x.dtype)
                normed = h = x
            else:
                normed = self._norm(x) if self.enable_layernorm else x
                h = placed(normed, self.dot_1_input_axes)
            given = (None if p is None else p.astype(h.dtype) for p in self._kernels(width))
            y = gated_mlp(h, (*of_norm, *given), state, self.activations[0], norm)
            return y, normed if returned else None
        normed = self._norm(x) if self.enable_layernorm else x
        wi, wi_bias, wo, wo_bias = self._kernels(width)
        h = placed(normed, self.dot_1_input_axes)
        h = self._dense(h, wi, wi_bias, state, 0)
        h = nn.Dropout(
            self.intermediate_dropout_rate,
            broadcast_dims=tuple(self.intermediate_hidden_dropout_dims),
            rng_collection=self.intermediate_dropout_rng_name,
        )(self._act(h), deterministic=deterministic)
        h = placed(h, self.dot_2_input_axes)
        y = self._dense(h, wo, wo_bias, state, 1)
        return y, normed if returned else None

    def _kernels(self, width: int) -> tuple[Any, Any, Any, Any]:
        """Returns the kernels of the linear layers, each followed by its bias or None."""
        acts, dim, init = len(self.activations), self.intermediate_dim, self.kernel_init
        check_count(type(self).__name__, "intermediate_dim", dim)

        def init_wi(key: Any, whole: Any, dtype: Any) -> jax.Array:
            parts = jax.random.split(key, acts)
            kernels = [kernel_init_of(init)(part, (width, dim), dtype) for part in parts]
            return jnp.stack(kernels, axis=1)

        wi = self._parameter("wi_kernel", init_wi, (width, acts, dim), self.kernel_axes_1)
        wo = self._parameter("wo_kernel", kernel_init_of(init), (dim, width), self.kernel_axes_2)
        wi_bias = wo_bias = None
        if self.use_bias:
            wi_bias = self._parameter("wi_bias", self.bias_init, (acts, dim), self.bias_axes_1)
            wo_bias = self._parameter("wo_bias", self.bias_init, (width,), self.bias_axes_2)
        return wi, wi_bias, wo, wo_bias
