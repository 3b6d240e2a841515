"""Recipes with Transformer Engine's names, arguments and manners, over those of ``apex_te.recipe``.

They can be changed after construction, ignore unknown keywords with a warning, and tell their kind
by class methods. A region reads a recipe's values when ``fp8_autocast`` is constructed.
"""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, ClassVar, NamedTuple

from .... import recipe as native
from ....recipe import Format
from .._names import named, neutral, not_served

__all__ = [
    "CustomRecipe", "DelayedScaling", "Float8BlockScaling", "Float8CurrentScaling", "Format",
    "MMParams", "MXFP8BlockScaling", "NVFP4BlockScaling", "QParams", "Recipe", "as_alias",
]  # fmt: skip

_MODULE = "transformer_engine.common.recipe"
_QUANTIZATIONS = ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad")
_GEMMS = ("fp8_gemm_fprop", "fp8_gemm_dgrad", "fp8_gemm_wgrad")
_warned: set[tuple[str, str]] = set()


@named(_MODULE)
class _FormatHelper(NamedTuple):
    """Value of a format in Transformer Engine's pickles, from which ``Format`` finds its member."""

    max_fwd: float
    max_bwd: float


@named(_MODULE)
@dataclass(frozen=True)
class MMParams:
    """Options of one of a layer's three matrix products.

    Args:
        use_split_accumulator: True to keep partial sums in fp32, False to allow cuBLASLt's fast
            accumulation.
    """

    use_split_accumulator: bool = True


_FAST, _SPLIT = MMParams(False), MMParams(True)


@named(_MODULE)
@dataclass(frozen=True)
class QParams:
    """Options of the quantization of inputs, weights or gradients.

    Args:
        power_2_scale: round scales down to powers of two.
        amax_epsilon: lower bound of the amax from which a scale is computed.
        random_hadamard_transform, stochastic_rounding, fp4_2d_quantization: options of FP4, which
            recipes accept at False only.
    """

    power_2_scale: bool = False
    amax_epsilon: float = 0.0
    random_hadamard_transform: bool = False
    stochastic_rounding: bool = False
    fp4_2d_quantization: bool = False


@named(_MODULE)
class Recipe(native.Recipe):
    """Base class of Transformer Engine's recipes.

    Attributes can be set; each change is checked at once, and refused as in the constructor.
    """

    mutable: ClassVar[bool] = True
    # Arguments of the class's constructor with their defaults.
    _defaults: ClassVar[dict[str, Any]] = {}
    # Fields of apex_te's recipe that have no name in Transformer Engine and can be set as they are.
    _options: ClassVar[tuple[str, ...]] = ()
    _plain: native.Recipe

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "_options" in vars(cls):  # not a user's subclass, whose constructor is its own
            parameters = inspect.signature(cls.__init__).parameters.values()
            cls._defaults = {p.name: p.default for p in parameters if p.default is not p.empty}

    @classmethod
    def delayed(cls) -> bool:
        """Returns True for delayed scaling."""
        return issubclass(cls, DelayedScaling)

    @classmethod
    def float8_current_scaling(cls) -> bool:
        """Returns True for current scaling with one scale a tensor."""
        return issubclass(cls, Float8CurrentScaling)

    @classmethod
    def float8_per_tensor_scaling(cls) -> bool:
        """Returns True for delayed and for current scaling, which have one scale a tensor."""
        return issubclass(cls, (DelayedScaling, Float8CurrentScaling))

    @classmethod
    def float8_block_scaling(cls) -> bool:
        """Returns True for scaling in blocks of 128 elements."""
        return issubclass(cls, Float8BlockScaling)

    @classmethod
    def mxfp8(cls) -> bool:
        """Returns True for MXFP8 scaling."""
        return issubclass(cls, MXFP8BlockScaling)

    @classmethod
    def nvfp4(cls) -> bool:
        """Returns True for NVFP4 scaling, which can only be named."""
        return issubclass(cls, NVFP4BlockScaling)

    @classmethod
    def custom(cls) -> bool:
        """Returns True for a recipe with a user's quantizers, which can only be named."""
        return issubclass(cls, CustomRecipe)

    def plain(self) -> native.Recipe:
        """Returns the frozen recipe of ``apex_te.recipe`` that has the present values."""
        return self._plain

    def _start(self, given: dict[str, Any]) -> None:
        """Stores and checks the constructor's arguments, its local variables."""
        values = {name: value for name, value in given.items() if name in self._defaults}
        others, kind = given["others"], type(self).__name__
        for name in [name for name in others if name not in self._options]:
            if (kind, name) not in _warned:
                _warned.add((kind, name))
                warnings.warn(f"{kind}: unknown argument {name} is ignored", stacklevel=3)
        vars(self).update(values, **{n: others[n] for n in self._options if n in others})
        self._settle()

    def _settle(self) -> None:
        """Checks the values, makes the plain recipe of them, and takes its further fields over."""
        plain = self._make()
        names = {field.name for field in fields(plain)} - {"backward"}
        vars(self).update({name: getattr(plain, name) for name in names})
        vars(self)["_plain"] = plain

    def _make(self) -> native.Recipe:
        """Returns the recipe of ``apex_te.recipe`` that has this one's values."""
        raise NotImplementedError(
            f"{type(self).__name__}: the base class of recipes scales nothing"
        )

    def _given(self, *names: str) -> dict[str, Any]:
        """Returns the options of apex_te that were set, and the values called ``names``."""
        own = vars(self)
        given = {name: own[name] for name in (*self._options, *names) if name in own}
        if given.get("interval") == -1:  # the default of versions that deprecate the argument
            given["interval"] = 1
        return dict(given, fp8_dpa=own["fp8_dpa"], fp8_mha=own["fp8_mha"])

    def _backward(self) -> str | None:
        """Returns ``backward_override``, by default from ``NVTE_BACKWARD_OVERRIDE``."""
        own, owner = vars(self), type(self).__name__
        if own["backward_override"] is None:
            own["backward_override"] = os.environ.get("NVTE_BACKWARD_OVERRIDE")
        value: str | None = own["backward_override"]
        if value not in (None, *native.BACKWARDS):
            raise ValueError(
                f"{owner}: backward_override must be None or one of "
                f"{', '.join(native.BACKWARDS)}, got {value!r}"
            )
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        own = vars(self)
        if "_plain" not in own or not (name in self._defaults or name in self._options):
            own[name] = value
            return
        before = dict(own)
        own[name] = value
        try:
            self._changed(name)
            self._settle()
        except BaseException:
            own.clear()
            own.update(before)
            raise

    def __delattr__(self, name: str) -> None:
        object.__delattr__(self, name)

    def _changed(self, name: str) -> None:
        """Changes the values that follow from the value called ``name``, which was set."""

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_plain"}

    def __setstate__(self, values: dict[str, Any]) -> None:
        """Restores a pickled recipe, Transformer Engine's own too, and checks its values."""
        vars(self).update(self._defaults)
        vars(self).update(values)
        self._settle()

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and self._plain == other._plain

    def __hash__(self) -> int:
        return hash(self._plain)

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={getattr(self, name)!r}" for name in self._defaults)
        return f"{type(self).__name__}({shown})"


@named(_MODULE)
class DelayedScaling(Recipe, native.DelayedScaling):
    """Recipe that computes a tensor's scale from its amax values in the last steps.

    Args:
        margin, fp8_format, amax_history_len, amax_compute_algo, scaling_factor_compute_algo,
        reduce_amax: as in ``apex_te.recipe.DelayedScaling``.
        fp8_dpa, fp8_mha: FP8 attention; must be False.
        backward_override: must be None.
        others: further options of ``apex_te.recipe.DelayedScaling``; other keywords are ignored
            with a warning.
    """

    _options = ("interval", "override_linear_precision", "first_step", "use_split_accumulator")

    def __init__(
        self,
        margin: int = 0,
        fp8_format: Format = Format.HYBRID,
        amax_history_len: int = 1024,
        amax_compute_algo: str | Callable[..., Any] = "max",
        scaling_factor_compute_algo: Callable[..., Any] | None = None,
        reduce_amax: bool = True,
        fp8_dpa: bool = False,
        fp8_mha: bool = False,
        backward_override: str | None = None,
        **others: Any,
    ) -> None:
        self._start(locals())

    def _make(self) -> native.Recipe:
        neutral(type(self).__name__, backward_override=(vars(self)["backward_override"], None))
        return native.DelayedScaling(
            **self._given(
                "margin", "fp8_format", "amax_history_len", "amax_compute_algo",
                "scaling_factor_compute_algo", "reduce_amax",
            )
        )  # fmt: skip


class _ScalesOnCast(Recipe):
    """Base of the recipes that compute scales when tensors are cast, from options of each part."""

    # Argument from which power_2_scale of the quantizations follows, whether as its opposite, and
    # the environment variable that gives its default.
    _switch: ClassVar[tuple[str, bool, str]]

    def _changed(self, name: str) -> None:
        switch, opposite, variable = self._switch
        own = vars(self)
        if own[switch] is None:
            own[switch] = os.environ.get(variable, "0") == "1"
        for quantization in _QUANTIZATIONS:
            if name == switch or own[quantization] is None:
                own[quantization] = QParams(power_2_scale=bool(own[switch]) is not opposite)

    def _settle(self) -> None:
        self._changed("")
        super()._settle()

    def _shared(self) -> dict[str, Any]:
        """Returns the arguments of apex_te's recipe that quantizations and products give."""
        owner, own = type(self).__name__, vars(self)
        neutral(owner, margin=(own["margin"], 0))
        first = own[_QUANTIZATIONS[0]]
        for name in _QUANTIZATIONS:
            value = own[name]
            _check_type(owner, name, value, QParams)
            for off in ("random_hadamard_transform", "stochastic_rounding", "fp4_2d_quantization"):
                neutral(f"{owner}.{name}", **{off: (getattr(value, off), False)})
            if value != first:
                raise NotImplementedError(
                    f"{owner}: {name} must equal {_QUANTIZATIONS[0]}, {first!r}, got {value!r}"
                )
        for name in _GEMMS:
            _check_type(owner, name, own[name], MMParams)
        return {
            **self._given("fp8_format"),
            "pow2": first.power_2_scale,
            "eps": first.amax_epsilon,
            "use_split_accumulator": tuple(own[name].use_split_accumulator for name in _GEMMS),
            "backward": self._backward(),
        }


@named(_MODULE)
class Float8CurrentScaling(_ScalesOnCast, native.CurrentScaling):
    """Recipe that computes a tensor's scale from its amax when it is cast.

    Args:
        use_power_2_scales: round scales down to powers of two; None:
            ``NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES``.
        fp8_format: ``Format.HYBRID`` or ``Format.E4M3``.
        fp8_gemm_fprop, fp8_gemm_dgrad, fp8_gemm_wgrad: options of the three products.
        fp8_dpa, fp8_mha: FP8 attention; must be False.
        backward_override: ``backward`` of apex_te's recipe, ``"high_precision"`` or
            ``"dequantized"``; None: ``NVTE_BACKWARD_OVERRIDE``.
        fp8_quant_fwd_inp, fp8_quant_fwd_weight, fp8_quant_bwd_grad: options of the quantization,
            which must be equal; None: as ``use_power_2_scales`` says.
        margin: must be 0.
        others: ``interval`` and ``override_linear_precision`` as in
            ``apex_te.recipe.CurrentScaling``; other keywords are ignored with a warning.
    """

    _options = ("interval", "override_linear_precision")
    _switch = ("use_power_2_scales", False, "NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES")

    def __init__(
        self,
        use_power_2_scales: bool | None = None,
        fp8_format: Format = Format.HYBRID,
        fp8_gemm_fprop: MMParams = _FAST,
        fp8_gemm_dgrad: MMParams = _SPLIT,
        fp8_gemm_wgrad: MMParams = _SPLIT,
        fp8_dpa: bool = False,
        fp8_mha: bool = False,
        backward_override: str | None = None,
        *,
        fp8_quant_fwd_inp: QParams | None = None,
        fp8_quant_fwd_weight: QParams | None = None,
        fp8_quant_bwd_grad: QParams | None = None,
        margin: int = 0,
        **others: Any,
    ) -> None:
        self._start(locals())

    def _make(self) -> native.Recipe:
        return native.CurrentScaling(**self._shared())


@named(_MODULE)
class Float8BlockScaling(_ScalesOnCast, native.BlockScaling):
    """Recipe with a scale for each 1x128 block of activations and gradients, 128x128 of weights.

    Args:
        use_f32_scales: False to round scales down to powers of two; None:
            ``NVTE_FP8_BLOCK_SCALING_FP32_SCALES``.
        fp8_format: ``Format.E4M3`` or ``Format.HYBRID``.
        x_block_scaling_dim, w_block_scaling_dim, grad_block_scaling_dim: must be 1, 2 and 1.
        fp8_gemm_fprop, fp8_gemm_dgrad, fp8_gemm_wgrad: options of the three products; their sums
            are always kept in fp32.
        fp8_dpa, fp8_mha: FP8 attention; must be False.
        backward_override: ``backward`` of apex_te's recipe, ``"high_precision"`` or
            ``"dequantized"``; None: ``NVTE_BACKWARD_OVERRIDE``.
        fp8_quant_fwd_inp, fp8_quant_fwd_weight, fp8_quant_bwd_grad: options of the quantization,
            which must be equal; None: as ``use_f32_scales`` says.
        margin: must be 0.
        others: ``interval``, ``override_linear_precision`` and ``wgrad_input`` (``"1x128"`` by
            default) as in ``apex_te.recipe.BlockScaling``; other keywords are ignored with a
            warning.
    """

    _options = ("interval", "override_linear_precision", "wgrad_input")
    _switch = ("use_f32_scales", True, "NVTE_FP8_BLOCK_SCALING_FP32_SCALES")

    def __init__(
        self,
        use_f32_scales: bool | None = None,
        fp8_format: Format = Format.E4M3,
        x_block_scaling_dim: int = 1,
        w_block_scaling_dim: int = 2,
        grad_block_scaling_dim: int = 1,
        fp8_gemm_fprop: MMParams = _SPLIT,
        fp8_gemm_dgrad: MMParams = _SPLIT,
        fp8_gemm_wgrad: MMParams = _SPLIT,
        fp8_dpa: bool = False,
        fp8_mha: bool = False,
        backward_override: str | None = None,
        *,
        fp8_quant_fwd_inp: QParams | None = None,
        fp8_quant_fwd_weight: QParams | None = None,
        fp8_quant_bwd_grad: QParams | None = None,
        margin: int = 0,
        **others: Any,
    ) -> None:
        self._start(locals())

    def _make(self) -> native.Recipe:
        own = vars(self)
        neutral(
            type(self).__name__,
            x_block_scaling_dim=(own["x_block_scaling_dim"], 1),
            w_block_scaling_dim=(own["w_block_scaling_dim"], 2),
            grad_block_scaling_dim=(own["grad_block_scaling_dim"], 1),
        )
        return native.BlockScaling(**{"wgrad_input": "1x128", **self._shared()})


@named(_MODULE)
class MXFP8BlockScaling(Recipe, native.MXFP8Scaling):
    """Recipe with a power-of-two scale for every 32 elements along a product's inner dimension.

    Args:
        margin: must be 0.
        fp8_format: ``Format.E4M3`` or ``Format.HYBRID``.
        fp8_dpa, fp8_mha: FP8 attention; must be False.
        backward_override: ``backward`` of apex_te's recipe, ``"high_precision"`` or
            ``"dequantized"``; None: ``NVTE_BACKWARD_OVERRIDE``.
        others: further options of ``apex_te.recipe.MXFP8Scaling``; other keywords are ignored with
            a warning.
    """

    _options = ("interval", "override_linear_precision", "rounding", "use_split_accumulator")

    def __init__(
        self,
        margin: int = 0,
        fp8_format: Format = Format.E4M3,
        fp8_dpa: bool = False,
        fp8_mha: bool = False,
        backward_override: str | None = None,
        **others: Any,
    ) -> None:
        self._start(locals())

    def _make(self) -> native.Recipe:
        neutral(type(self).__name__, margin=(vars(self)["margin"], 0))
        return native.MXFP8Scaling(**self._given("fp8_format"), backward=self._backward())


NVFP4BlockScaling = not_served(
    f"{_MODULE}.NVFP4BlockScaling", "it has no FP4 recipe; MXFP8BlockScaling is the nearest", Recipe
)
CustomRecipe = not_served(
    f"{_MODULE}.CustomRecipe",
    "it has no factories of quantizers; docs/new_recipe.md says how a recipe is added",
    Recipe,
)


def _check_type(owner: str, name: str, value: object, kind: type) -> None:
    """Raises TypeError if an argument is no ``kind``."""
    if not isinstance(value, kind):
        raise TypeError(f"{owner}: {name} must be a {kind.__name__}, got {type(value).__name__}")


def as_alias(recipe: native.Recipe) -> native.Recipe:
    """Returns a recipe of this module for one of ``apex_te.recipe``, itself if there is none."""
    kinds: dict[type, type[Recipe]] = {
        native.DelayedScaling: DelayedScaling,
        native.CurrentScaling: Float8CurrentScaling,
        native.BlockScaling: Float8BlockScaling,
        native.MXFP8Scaling: MXFP8BlockScaling,
    }
    kind = kinds.get(type(recipe))
    if kind is None or getattr(recipe, "scales", None) == "server":
        return recipe
    values = {field.name: getattr(recipe, field.name) for field in fields(recipe)}
    values["backward_override"] = values.pop("backward", None)
    if issubclass(kind, _ScalesOnCast):
        values.pop("scales", None)
        values.pop("pow2", None)
        is_pow2: bool = recipe.pow2  # type: ignore[attr-defined]
        options = QParams(is_pow2, values.pop("eps"))
        values.update(dict.fromkeys(_QUANTIZATIONS, options))
        splits = values.pop("use_split_accumulator")
        values.update(zip(_GEMMS, map(MMParams, splits), strict=True))
        switch, opposite, _ = kind._switch
        values[switch] = options.power_2_scale is not opposite
    return kind(**values)
