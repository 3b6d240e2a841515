"""FP8 recipes: frozen data that says how tensors are scaled.

No tensor is touched here. A recipe with a file of its own in this folder registers itself; its name
is then one of ``make_recipe``, of the command line and of saved weights (docs/new_recipe.md).
"""

from __future__ import annotations

import enum
import functools
import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import KW_ONLY, InitVar, dataclass, fields
from typing import Any, ClassVar, NamedTuple

import torch

__all__ = [
    "BlockScaling",
    "CurrentScaling",
    "DelayedScaling",
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "Format",
    "MXFP8BlockScaling",
    "MXFP8Scaling",
    "Recipe",
    "chosen_recipe",
    "make_recipe",
    "pack_recipe",
    "recipe_kinds",
    "unpack_recipe",
]

# Margins beyond it leave E4M3, 18 powers of two from smallest to largest value, no more than two of
# them above or below a tensor's amax. Within it the scale of every amax up to 2**117 is a normal
# fp32 number, which is where the update keeps that of the smallest amaxes, too.
MAX_MARGIN = 16
# 16 times the default. Bounds what a file can make a module allocate: 320 KiB for a GEMM.
MAX_HISTORY_LENGTH = 16384
_FLT_MAX = torch.finfo(torch.float32).max

# Split accumulation of (fprop, dgrad, wgrad).
GemmFlags = tuple[bool, bool, bool]


class FormatValue(NamedTuple):
    """Element types of a format, and the values to which an amax is scaled.

    Attributes:
        max_fwd, max_bwd: value to which an amax is scaled, in forward and backward.
        fwd_dtype, bwd_dtype: element types in forward and backward.
    """

    max_fwd: float
    max_bwd: float
    fwd_dtype: torch.dtype
    bwd_dtype: torch.dtype


class Format(enum.Enum):
    """Element format of a recipe.

    ``E4M3``: E4M3 everywhere; ``E5M2``: E5M2 everywhere; ``HYBRID``: E4M3 for activations and
    weights, E5M2 for gradients; ``HIF8``: HiFloat8 everywhere, with one scale a tensor.
    An amax is scaled to ``.value.max_fwd`` or ``.value.max_bwd``: the largest finite value (448 or
    57344), for HiF8 15 and 224, which its 3-bit and 2-bit mantissas reach. ``.value.fwd_dtype`` and
    ``.value.bwd_dtype`` are the torch dtypes of the FP8 data.
    """

    E4M3 = FormatValue(448.0, 448.0, torch.float8_e4m3fn, torch.float8_e4m3fn)
    E5M2 = FormatValue(57344.0, 57344.0, torch.float8_e5m2, torch.float8_e5m2)
    HYBRID = FormatValue(448.0, 57344.0, torch.float8_e4m3fn, torch.float8_e5m2)
    HIF8 = FormatValue(15.0, 224.0, torch.uint8, torch.uint8)

    def __repr__(self) -> str:
        return f"Format.{self.name}"


_kinds: dict[str, type[Recipe]] = {}


@dataclass(frozen=True)
class Recipe:
    """Base of all recipes.

    A subclass that is defined with a ``name``, as in ``class MyScaling(Recipe, name="mine")``, is
    found by it.

    Attributes:
        quantizer: name of the scheme, a module of ``apex_te.fp8.scheme``.
        keeps_state: True if scales live on from one region to the next.
        formats: values that ``fp8_format`` may have.
    """

    quantizer: ClassVar[str]
    keeps_state: ClassVar[bool] = False
    formats: ClassVar[tuple[Format, ...]] = (Format.HYBRID, Format.E4M3)

    def __init_subclass__(cls, name: str | None = None) -> None:
        super().__init_subclass__()
        if cls.keeps_state and not any(kind.__name__ == "DelayedScaling" for kind in cls.__mro__):
            raise TypeError(
                f"{cls.__name__}: a recipe with keeps_state must derive from DelayedScaling, whose "
                f"options say how its scales move, got {cls.__bases__[0].__name__}"
            )
        if name is None:
            return
        other = _kinds.setdefault(name, cls)
        if (other.__module__, other.__qualname__) != (cls.__module__, cls.__qualname__):
            raise ValueError(f"{cls.__name__}: name must be a new one, got {name!r} of {other}")
        _kinds[name] = cls  # perhaps of a module that is imported again

    def _check_shared(self, fp8_dpa: bool, fp8_mha: bool) -> None:
        """Checks the arguments that every recipe has."""
        values: Any = self
        for name, value in (("fp8_dpa", fp8_dpa), ("fp8_mha", fp8_mha)):
            if value:
                raise NotImplementedError(
                    f"{self._name}: {name} must be False (FP8 attention is not available), "
                    f"got {value!r}"
                )
        self._check_int("interval", values.interval, 1)
        self._check_format(values.fp8_format)
        override = self._flags("override_linear_precision")
        if override not in ((False, False, False), (False, False, True)):
            raise ValueError(
                f"{self._name}: override_linear_precision must be (False, False, False) or "
                f"(False, False, True), got {override}"
            )
        self._flags("use_split_accumulator")

    @property
    def _name(self) -> str:
        return type(self).__name__

    def __setstate__(self, values: dict[str, Any]) -> None:
        """Restores a pickled recipe, checked as a new one is."""
        self.__dict__.update(values)
        check = getattr(self, "__post_init__", None)
        if check is not None:
            check(False, False)

    def _check_int(
        self, name: str, value: object, minimum: int, maximum: int | None = None
    ) -> None:
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{self._name}: {name} must be an int, got {type(value).__name__}")
        if value < minimum and maximum is None:
            raise ValueError(f"{self._name}: {name} must be at least {minimum}, got {value}")
        if maximum is not None and not minimum <= value <= maximum:
            raise ValueError(
                f"{self._name}: {name} must be from {minimum} to {maximum}, got {value}"
            )

    def _check_bool(self, name: str) -> None:
        value = getattr(self, name)
        if not isinstance(value, bool):
            raise TypeError(f"{self._name}: {name} must be a bool, got {type(value).__name__}")

    def _check_eps(self, value: object) -> None:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise TypeError(f"{self._name}: eps must be a float, got {type(value).__name__}")
        if not 0.0 <= value <= _FLT_MAX:  # an infinite one in fp32 would make every scale 0
            raise ValueError(f"{self._name}: eps must be finite and at least 0, got {value}")

    def _check_format(self, value: object) -> None:
        if not isinstance(value, Format):
            raise TypeError(
                f"{self._name}: fp8_format must be a recipe.Format, got {type(value).__name__}"
            )
        if value not in self.formats:
            wanted = " or ".join(f"Format.{f.name}" for f in self.formats)
            why = " (pure E5M2 training is not supported)" if value is Format.E5M2 else ""
            raise ValueError(
                f"{self._name}: fp8_format must be {wanted}{why}, got Format.{value.name}"
            )

    def _flags(self, name: str) -> GemmFlags:
        """Returns the three bools of an argument, and stores them as a tuple."""
        value: Any = getattr(self, name)
        if not isinstance(value, (tuple, list)) or not all(isinstance(v, bool) for v in value):
            raise TypeError(f"{self._name}: {name} must be a tuple of three bools, got {value!r}")
        if len(value) != 3:
            raise ValueError(f"{self._name}: {name} must have three bools, got {value!r}")
        value = tuple(value)
        object.__setattr__(self, name, value)
        return value


@dataclass(frozen=True)
class DelayedScaling(Recipe, name="delayed"):
    """Recipe that scales each tensor by its largest magnitude over the last steps, in fp32.

    Args:
        margin: the scale is divided by ``2 ** margin``; from -16 to 16.
        interval: regions (microbatches) between two scale updates.
        fp8_format: ``Format.HYBRID`` or ``Format.E4M3``; pure E5M2 is refused.
        amax_history_len: rows of the amax history, the staging row included; at most 16384.
        amax_compute_algo: ``"max"``, ``"most_recent"`` or a callable
            ``(history [length, slots]) -> amax [slots]``; row 0 of the history is the newest amax,
            row 1 the oldest, the last row the one before the newest.
        scaling_factor_compute_algo: None (``fp8_max / amax / 2**margin``), ``"pow2"`` (that ratio
            rounded down to a power of two) or a callable
            ``(amax [slots], old_scale [slots], fp8_max, recipe) -> scale [slots]``. A callable is
            hashable. If it raises, its modules keep their scales, drop the amaxes staged since the
            last update, and the region with this recipe that needed the update raises; modules
            with other recipes are updated all the same.
        override_linear_precision: high precision for (fprop, dgrad, wgrad); only wgrad may be.
        reduce_amax: MAX-reduce the amaxes over the FP8 group before an update.
        first_step: ``"scale_one"`` starts with scale 1; ``"current"`` takes the first scale of
            each tensor from that tensor itself.
        use_split_accumulator: keep partial sums in fp32 in (fprop, dgrad, wgrad), the opposite of
            cuBLASLt's fast accumulation.
        fp8_dpa, fp8_mha: not available yet; True raises.

    Raises:
        TypeError: an argument has a wrong type or is unknown.
        ValueError: an argument has a wrong value.
        NotImplementedError: FP8 attention was asked for.
    """

    margin: int = 0
    interval: int = 1
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: str | Callable[[torch.Tensor], torch.Tensor] = "max"
    scaling_factor_compute_algo: str | Callable[..., torch.Tensor] | None = None
    override_linear_precision: GemmFlags = (False, False, False)
    reduce_amax: bool = True
    first_step: str = "scale_one"
    use_split_accumulator: GemmFlags = (False, True, True)
    fp8_dpa: InitVar[bool] = False
    fp8_mha: InitVar[bool] = False

    quantizer: ClassVar[str] = "delayed"
    keeps_state: ClassVar[bool] = True

    def __post_init__(self, fp8_dpa: bool, fp8_mha: bool) -> None:
        self._check_shared(fp8_dpa, fp8_mha)
        self._check_int("margin", self.margin, -MAX_MARGIN, MAX_MARGIN)
        self._check_int("amax_history_len", self.amax_history_len, 1, MAX_HISTORY_LENGTH)
        self._check_algo("amax_compute_algo", self.amax_compute_algo, ("max", "most_recent"))
        if self.scaling_factor_compute_algo is not None:
            name = "scaling_factor_compute_algo"
            self._check_algo(name, self.scaling_factor_compute_algo, ("pow2",))
        self._check_bool("reduce_amax")
        if self.first_step not in ("scale_one", "current"):
            raise ValueError(
                'DelayedScaling: first_step must be "scale_one" or "current", '
                f"got {self.first_step!r}"
            )

    @property
    def uses_callables(self) -> bool:
        """Returns True if a user's function takes part in the scale update."""
        return callable(self.amax_compute_algo) or callable(self.scaling_factor_compute_algo)

    @staticmethod
    def _check_algo(name: str, value: object, names: tuple[str, ...]) -> None:
        if callable(value):
            try:
                hash(value)
            except TypeError as error:
                raise TypeError(
                    f"DelayedScaling: {name} must be hashable, got {type(value).__name__}"
                ) from error
            return
        wanted = " or ".join(f'"{n}"' for n in names)
        if not isinstance(value, str):
            raise TypeError(
                f"DelayedScaling: {name} must be {wanted} or a callable, got {type(value).__name__}"
            )
        if value not in names:
            raise ValueError(
                f"DelayedScaling: {name} must be {wanted} or a callable, got {value!r}"
            )


@dataclass(frozen=True)
class CurrentScaling(Recipe, name="tensorwise"):
    """Recipe that scales each tensor by its own amax: ``scale = fp8_max / max |x|`` (tensorwise).

    Args:
        fp8_format: ``Format.HYBRID``, ``Format.E4M3`` or ``Format.HIF8``.
        pow2: round scales down to powers of two.
        eps: smallest amax.
        override_linear_precision, use_split_accumulator, fp8_dpa, fp8_mha: as in
            ``DelayedScaling``.
        interval: accepted for interface compatibility; these scales have no interval.

    Raises:
        TypeError, ValueError, NotImplementedError: as for ``DelayedScaling``.
    """

    _: KW_ONLY
    fp8_format: Format = Format.HYBRID
    pow2: bool = False
    eps: float = 0.0
    override_linear_precision: GemmFlags = (False, False, False)
    use_split_accumulator: GemmFlags = (False, True, True)
    interval: int = 1
    fp8_dpa: InitVar[bool] = False
    fp8_mha: InitVar[bool] = False

    formats: ClassVar[tuple[Format, ...]] = (Format.HYBRID, Format.E4M3, Format.HIF8)

    def __post_init__(self, fp8_dpa: bool, fp8_mha: bool) -> None:
        self._check_shared(fp8_dpa, fp8_mha)
        self._check_bool("pow2")
        self._check_eps(self.eps)

    @property
    def quantizer(self) -> str:  # type: ignore[override]
        """Name of the scheme."""
        return "hif8" if self.fp8_format is Format.HIF8 else "current"


@dataclass(frozen=True)
class BlockScaling(Recipe, name="blockwise"):
    """Recipe that scales 1x128 blocks of activations and gradients, 128x128 of weights.

    Source: DeepSeek-V3.

    Args:
        fp8_format: ``Format.E4M3`` or ``Format.HYBRID``.
        pow2: round scales down to powers of two.
        eps: smallest amax.
        use_split_accumulator: must stay True; the sums of blocks are always kept in fp32.
        override_linear_precision, interval, fp8_dpa, fp8_mha: as in ``CurrentScaling``.

    Raises:
        TypeError, ValueError, NotImplementedError: as for ``DelayedScaling``.
    """

    _: KW_ONLY
    fp8_format: Format = Format.E4M3
    pow2: bool = True
    eps: float = 0.0
    override_linear_precision: GemmFlags = (False, False, False)
    use_split_accumulator: GemmFlags = (True, True, True)
    interval: int = 1
    fp8_dpa: InitVar[bool] = False
    fp8_mha: InitVar[bool] = False

    quantizer: ClassVar[str] = "block"

    def __post_init__(self, fp8_dpa: bool, fp8_mha: bool) -> None:
        self._check_shared(fp8_dpa, fp8_mha)
        self._check_bool("pow2")
        self._check_eps(self.eps)
        if self.use_split_accumulator != (True, True, True):
            raise ValueError(
                "BlockScaling: use_split_accumulator must be (True, True, True), "
                f"got {self.use_split_accumulator}"
            )


@dataclass(frozen=True)
class MXFP8Scaling(Recipe, name="mxfp8"):
    """Recipe that scales every 32 elements along a product's inner dimension by a power of two.

    Source: OCP MX v1.0.

    Args:
        fp8_format: ``Format.E4M3`` or ``Format.HYBRID``.
        rounding: of the scale's exponent: ``"up"`` (nothing saturates) or ``"floor"`` (OCP's).
        override_linear_precision, use_split_accumulator, interval, fp8_dpa, fp8_mha: as in
            ``CurrentScaling``.

    Raises:
        TypeError, ValueError, NotImplementedError: as for ``DelayedScaling``.
    """

    _: KW_ONLY
    fp8_format: Format = Format.E4M3
    rounding: str = "up"
    override_linear_precision: GemmFlags = (False, False, False)
    use_split_accumulator: GemmFlags = (False, True, True)
    interval: int = 1
    fp8_dpa: InitVar[bool] = False
    fp8_mha: InitVar[bool] = False

    quantizer: ClassVar[str] = "mx"

    def __post_init__(self, fp8_dpa: bool, fp8_mha: bool) -> None:
        self._check_shared(fp8_dpa, fp8_mha)
        if self.rounding not in ("up", "floor"):
            raise ValueError(
                f'MXFP8Scaling: rounding must be "up" or "floor", got {self.rounding!r}'
            )


Float8CurrentScaling = CurrentScaling
Float8BlockScaling = BlockScaling
MXFP8BlockScaling = MXFP8Scaling

# Made once, so that a name costs nothing where a region is entered.
_by_name = {name: kind() for name, kind in _kinds.items()}


@functools.cache
def _import_files() -> None:
    """Imports the recipes that have files of their own in this folder, which registers them."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")


def recipe_kinds() -> dict[str, type[Recipe]]:
    """Returns the class of each recipe by its name, those above first."""
    _import_files()
    return dict(_kinds)


def make_recipe(name: str, fp8_format: str | Format | None = None, **options: Any) -> Recipe:
    """Returns a new recipe by its command-line name.

    Args:
        name: ``"delayed"``, ``"tensorwise"``, ``"blockwise"``, ``"mxfp8"`` or that of another
            registered recipe.
        fp8_format: ``"e4m3"``, ``"hybrid"`` or ``"hif8"`` (tensorwise only) in any case, or a
            ``Format``; None: the recipe's own default.
        options: further arguments of the recipe.

    Raises:
        ValueError: the name is unknown, or the recipe does not have the format.
        TypeError: an argument has a wrong type.
    """
    if not isinstance(name, str):
        raise TypeError(f"make_recipe: name must be a str, got {type(name).__name__}")
    kinds = recipe_kinds()
    if name not in kinds:
        raise ValueError(f"make_recipe: name must be one of {', '.join(kinds)}, got {name!r}")
    kind = kinds[name]
    if fp8_format is not None:
        if not isinstance(fp8_format, (str, Format)):
            raise TypeError(
                "make_recipe: fp8_format must be a str or a recipe.Format, "
                f"got {type(fp8_format).__name__}"
            )
        wanted = fp8_format.name if isinstance(fp8_format, Format) else fp8_format
        names = {f.name.lower(): f for f in kind.formats}
        if wanted.lower() not in names:
            raise ValueError(
                f"make_recipe: fp8_format must be one of {', '.join(names)} with {name!r}, "
                f"got {fp8_format!r}"
            )
        options["fp8_format"] = names[wanted.lower()]
    return kind(**options)


def chosen_recipe(owner: str, argument: str, value: Recipe | str | None) -> Recipe:
    """Returns the recipe that a caller's argument asks for.

    Args:
        owner, argument: the function and its argument, for the errors.
        value: a recipe, a name that ``make_recipe`` takes, or None for ``DelayedScaling()``.

    Raises:
        ValueError: the name is unknown.
        TypeError: the value is neither a recipe nor a name.
    """
    if isinstance(value, Recipe):
        return value
    if value is None:
        return _by_name["delayed"]
    if not isinstance(value, str):
        raise TypeError(
            f"{owner}: {argument} must be a recipe from apex_te.recipe or its name, "
            f"got {type(value).__name__}"
        )
    found = _by_name.get(value)
    if found is None:
        kinds = recipe_kinds()
        if value not in kinds:
            raise ValueError(
                f"{owner}: {argument} must be a recipe or one of {', '.join(kinds)}, got {value!r}"
            )
        found = _by_name[value] = kinds[value]()
    return found


def pack_recipe(recipe: Recipe) -> tuple[str, dict[str, Any]]:
    """Returns a recipe that keeps no state as plain values: its class's name and its fields."""
    values: dict[str, Any] = {field.name: getattr(recipe, field.name) for field in fields(recipe)}
    values["fp8_format"] = values["fp8_format"].name
    return type(recipe).__name__, values


def unpack_recipe(packed: Any) -> Recipe:
    """Returns the recipe that ``pack_recipe`` was given.

    Raises:
        ValueError: anything else is given.
    """
    try:
        name, values = packed
        kinds = {kind.__name__: kind for kind in recipe_kinds().values() if not kind.keeps_state}
        if name not in kinds:
            raise ValueError(f"{name}, which no recipe is called; is its package imported?")
        return kinds[name](**dict(values, fp8_format=Format[values["fp8_format"]]))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"FP8Parameter: recipe must be what was saved, got {error!r}") from error
