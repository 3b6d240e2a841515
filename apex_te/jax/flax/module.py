"""Flax Linen modules: dense layers, norms and the MLP, in FP8 inside of ``fp8_autocast``."""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen import partitioning
from jax.sharding import PartitionSpec

from ...recipe import DelayedScaling, Recipe
from ...runtime.named_arguments import check_count
from .. import _partition, fp8_state
from ..activation import Function, Params, ordered
from ..boxes import unbox
from ..dense import dense_with_state
from ..fused_casts import Norm
from ..layernorm import in_dtype, normalised
from ..layernorm_dense import norm_dense
from ..layernorm_mlp import Between, norm_mlp
from ..low_rank import adapted
from ..ops import _checks
from ..ops._checks import FLOATS
from ..places import Axes, placed
from ..quantize import QuantizerFactory, QuantizerSet
from ..region import active_recipe

__all__ = [
    "DenseGeneral", "LayerNorm", "LayerNormDenseGeneral", "LayerNormMLP", "TransformerEngineBase",
]  # fmt: skip

Initializer = Callable[..., Any]
_zeros = nn.initializers.zeros
_norm_axes = ("embed",)


def kernel_init_of(given: Initializer | None) -> Initializer:
    """Returns an initializer of kernels, or the default for None."""
    return given or nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal")


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

    def _shared(self, own: Any, kind: Any) -> dict[str, Any]:
        """Returns the fields, by name, that this module's class ``own`` and a submodule's have."""
        first, second = ({f.name for f in dataclasses.fields(each)} for each in (own, kind))
        return {name: getattr(self, name) for name in first & second - {"parent", "name"}}

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
        _checks.has_dtype(type(self).__name__, name, x, FLOATS)
        if x.ndim == 0:
            raise ValueError(
                f"{type(self).__name__}: {name} must have at least one dimension, got a scalar"
            )
        return x

    def _parameter(
        self, name: str, init: Initializer, shape: Sequence[int], axes: Any, dtype: Any = None
    ) -> Any:
        """Returns a parameter, by default of the field ``dtype``; its box carries its axes."""
        dtype, axes = dtype or self._dtype(), tuple(axes or ())
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

    def _check_made(self, collection: str, name: str, needed: str) -> None:
        """Checks that ``init`` made a variable; ``needed`` is what the variables must have."""
        if not self.is_initializing() and not self.has_variable(collection, name):
            raise ValueError(
                f"{type(self).__name__}: variables must have {needed}, got none of this module"
            )

    def _delayed(self, name: str) -> DelayedScaling | None:
        """Returns a region's recipe with delayed scaling, which needs state ``name``, or None."""
        recipe, collection = active_recipe(), fp8_state.FP8_COLLECTION_NAME
        if not isinstance(recipe, DelayedScaling):
            return None
        where = f"the collection {collection!r} in a region with DelayedScaling"
        self._check_made(collection, name, f"{where} (make them inside of the region)")
        return recipe

    def _fp8_state(self, gemms: int = 1) -> dict[str, jax.Array] | None:
        """Returns the module's FP8 state inside of a region with delayed scaling, else None."""
        recipe, name = self._delayed("uses"), fp8_state.FP8_COLLECTION_NAME
        if recipe is None:
            return None
        made = fp8_state.initial(recipe, gemms)
        found = {
            key: self.variable(name, key, lambda value=value: value).value
            for key, value in made.items()
            if self.is_initializing() or self.has_variable(name, key)
        }
        return fp8_state.checked(type(self).__name__, found, made)

    def generate_quantizer_set(
        self, postfix: str = "", variable_collection: str | None = None,
        quantization_checkpoint_name: None = None, fp8_recipe: Recipe | str | None = None,
        n_groups: int | None = None,
    ) -> Any:  # fmt: skip
        """Returns the ``QuantizerSet`` of one GEMM, for methods of modules that derive from this.

        With ``DelayedScaling`` the module keeps the set's FP8 state.

        Args:
            postfix: tells the sets of a module apart.
            variable_collection: the collection of the state; None: ``FP8_COLLECTION_NAME``.
            quantization_checkpoint_name, fp8_recipe, n_groups: see
                ``QuantizerFactory.create_set``; the first must be None.

        Raises:
            ValueError: the variables do not have the state, or in other shapes.
            TypeError, NotImplementedError: as ``create_set``.
        """
        made = QuantizerFactory.create_set(
            n_groups=n_groups, checkpoint_name=quantization_checkpoint_name, fp8_recipe=fp8_recipe
        )
        if not made.state:
            return made
        collection = variable_collection or fp8_state.FP8_COLLECTION_NAME
        owner, name = type(self).__name__, f"quantizer_set{postfix}"
        where = f"{name!r} in the collection {collection!r} with DelayedScaling"
        self._check_made(collection, name, f"{where} (call init with the same recipe)")
        found = self.variable(collection, name, lambda: made.state).value
        return QuantizerSet(made.recipe, fp8_state.checked(owner, found, made.state))

    def _dense(
        self, x: jax.Array, kernel: Any, bias: Any, state: Any, gemm: int, inner: int = 1
    ) -> jax.Array:
        """Multiplies by a parameter [in..., out...] in x's dtype; see ``dense``."""
        bias = None if bias is None else bias.astype(x.dtype)
        return dense_with_state(x, kernel.astype(x.dtype), bias, state, gemm, inner)

    def _low_rank(
        self, name: str, inner: Sequence[int], features: Any, init: Initializer | None
    ) -> Callable[[jax.Array], jax.Array] | None:
        """Returns what adapts a linear layer in low rank, made of its parameters, or None.

        The parameters' names begin with ``name``; ``inner`` are the extents of the last dimensions
        of its argument.
        """
        layer: Any = self
        if not layer.enable_low_rank_adaptation:
            return None
        rank, alpha = layer.low_rank_adaptation_dim, layer.low_rank_adaptation_alpha
        check_count(type(self).__name__, "low_rank_adaptation_dim", rank)
        lead, last = features[:-1], features[-1]

        def first(key: Any, shape: Any, dtype: Any) -> jax.Array:
            # As many inputs as a kernel has, whatever is beside the rank.
            whole = math.prod(inner), math.prod(lead) * rank
            return kernel_init_of(init)(key, whole, dtype).reshape(shape)

        shapes = (*inner, *lead, rank), (*lead, rank, last)
        a, b = (
            self._parameter(f"{name}lora_{each}_kernel", how, shape, (None,) * len(shape))
            for each, how, shape in zip("ab", (first, _zeros), shapes, strict=True)
        )
        return functools.partial(adapted, a=a, b=b, inner=len(inner), alpha=alpha)


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
        enable_low_rank_adaptation: add x @ ``lora_a_kernel`` @ ``lora_b_kernel`` in x's dtype.
        low_rank_adaptation_dim: the rank, the width between these kernels.
        low_rank_adaptation_alpha: what is added is multiplied by alpha / rank; None: by 1.
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
        x = self._input(inputs)
        axes = contracted_axes("DenseGeneral", self.axis, x.shape)
        rest = tuple(i for i in range(x.ndim) if i not in axes)
        x = x.transpose(*rest, *axes)
        inner = x.shape[len(rest) :]
        kernel, bias = dense_parameters(self, inner)
        y = self._dense(x, kernel, bias, self._fp8_state(), 0, len(axes))
        adapter = self._low_rank("", inner, kernel.shape[len(inner) :], self.kernel_init)
        return y if adapter is None else y + adapter(x)


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

    def _norm_with_parameters(self, x: jax.Array) -> tuple[Norm, jax.Array, jax.Array | None]:
        """Returns norm, scale, and bias, None for an RMS norm, in x's dtype or float32."""
        width = x.shape[-1]
        layer: Any = self
        if layer.layernorm_type not in ("layernorm", "rmsnorm"):
            raise ValueError(
                f'{type(self).__name__}: layernorm_type must be "layernorm" or "rmsnorm", got'
                f" {layer.layernorm_type!r}"
            )
        centered = layer.zero_centered_gamma
        init = layer.scale_init or (_zeros if centered else nn.initializers.ones)
        scale = self._parameter("scale", init, (width,), layer.scale_axes)
        if layer.layernorm_type == "rmsnorm":
            return Norm("rms_norm", layer.epsilon, centered), *in_dtype(x, scale, None)
        init = getattr(layer, "ln_bias_init", None) or layer.bias_init
        axes = layer.ln_bias_axes if hasattr(layer, "ln_bias_axes") else layer.bias_axes
        bias = self._parameter("ln_bias", init, (width,), axes)
        return Norm("layer_norm", layer.epsilon, centered), *in_dtype(x, scale, bias)


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
        return normalised(x, *self._norm_with_parameters(x))


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
        x, norm, kernel, bias, adapter = self._operands(inputs)
        y, normed = norm_dense(
            x, norm, kernel, bias, state, self.dot_input_axes,
            returns_norm=self._returns_norm or adapter is not None,
        )  # fmt: skip
        y = y if adapter is None else y + adapter(normed)
        if self.depth_scaling is not None:
            y = y / self.depth_scaling
        return y, normed if self._returns_norm else None

    @property
    def _returns_norm(self) -> bool:
        """Returns True if the norm's output is returned, too."""
        return self.return_layernorm_output and self.enable_layernorm

    def _operands(self, inputs: jax.Array) -> tuple[Any, ...]:
        """Returns the input; the norm with its parameters, the bias and what adapts the GEMM, or
        None; and before the last two the kernel.
        """
        x = placed(self._last_axis_input(inputs), self.layernorm_input_axes)
        norm = self._norm_with_parameters(x) if self.enable_layernorm else None
        return x, norm, *adapted_parameters(self, x.shape[-1])


_ADAPTED = ("qkv_proj", "output_proj", "mlp")


def adapts(layer: Any, part: str) -> bool:
    """Returns True if the field ``low_rank_adaptation_scope`` includes a part of a layer."""
    scope = layer.low_rank_adaptation_scope
    found = str(scope or "none").lower()
    scopes = ("none", "all", *_ADAPTED, *(f"exclude_{each}" for each in _ADAPTED))
    if found not in scopes:
        raise ValueError(
            f"{type(layer).__name__}: low_rank_adaptation_scope must be one of"
            f" {', '.join(scopes)}, got {scope!r}"
        )
    return found in ("all", part) or (found.startswith("exclude_") and found != f"exclude_{part}")


def adapted_parameters(layer: Any, width: int) -> tuple[Any, Any, Any]:
    """Returns the kernel [width, *features] of a layer, its bias or None, and what adapts it or
    None.
    """
    kernel, bias = dense_parameters(layer, (width,))
    return kernel, bias, layer._low_rank("", (width,), kernel.shape[1:], layer.kernel_init)


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
        activations, activation_params: as ``activation_type`` and ``act_params`` in
            ``apex_te.jax.activation.activation``: one name; for a gated MLP the gate's and
            "linear".
        intermediate_dropout_rng_name: name of Flax's random number stream for dropout.
        intermediate_dropout_rate: probability of dropout after the activation.
        intermediate_hidden_dropout_dims: dimensions along which the dropout mask is broadcast.
        enable_low_rank_adaptation, low_rank_adaptation_dim, low_rank_adaptation_alpha: as in
            ``DenseGeneral``, for both linear layers: "wi_lora_a_kernel" and so on.
        axis: must be the last dimension.
        dtype: dtype of the parameters; the layer computes in that of its input.
        transpose_batch_sequence: no effect; the layer is the same for both layouts.
        ffn1_ckpt_name, ffn2_ckpt_name: as in ``apex_te.jax.layernorm_mlp.layernorm_mlp``.
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
    activations: Sequence[str | Function] = ("gelu",)
    activation_params: Params = None
    intermediate_dropout_rng_name: str = "dropout"
    intermediate_dropout_rate: float = 0.0
    intermediate_hidden_dropout_dims: Sequence[int] = ()
    enable_low_rank_adaptation: bool = False
    low_rank_adaptation_dim: int = 32
    low_rank_adaptation_alpha: float | None = None
    axis: int | Sequence[int] = -1
    dtype: Any = jnp.float32
    transpose_batch_sequence: bool = False
    layernorm_input_axes: Axes | None = None
    dot_1_input_axes: Axes | None = None
    dot_2_input_axes: Axes | None = None
    ffn1_ckpt_name: str = "ffn1"
    ffn2_ckpt_name: str = "ffn2"

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
        norm = self._norm_with_parameters(x) if self.enable_layernorm else None
        kernels = self._kernels(width)
        inner, outer = kernels[0].shape[1:], kernels[2].shape
        adapters = (
            self._low_rank("wi_", (width,), inner, self.kernel_init),
            self._low_rank("wo_", outer[:1], outer[1:], self.kernel_init),
        )
        drop: Any = None
        if self.intermediate_dropout_rate > 0.0 and not deterministic:
            drop = nn.Dropout(
                self.intermediate_dropout_rate,
                broadcast_dims=tuple(self.intermediate_hidden_dropout_dims),
                deterministic=False,
                rng_collection=self.intermediate_dropout_rng_name,
            )
        returned = self.return_layernorm_output and self.enable_layernorm
        between = Between(
            ordered("LayerNormMLP", self.activations),
            self.activation_params,
            self.dot_1_input_axes,
            self.dot_2_input_axes,
            (self.ffn1_ckpt_name, self.ffn2_ckpt_name),
            drop,
            tuple(each for each in adapters if each is not None),
        )
        y, normed = norm_mlp("LayerNormMLP", x, norm, kernels, state, between, returned)
        return y, normed if returned else None

    def _kernels(self, width: int) -> tuple[Any, Any, Any, Any]:
        """Returns the kernels of the linear layers, each followed by its bias or None."""
        acts = len(ordered(type(self).__name__, self.activations))
        dim, init = self.intermediate_dim, self.kernel_init
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
