"""FP8 recipes: frozen dataclasses that say how tensors are scaled; no tensor is touched here.

A recipe with a file of its own in this folder registers itself by a name, which is then valid in
``make_recipe``, on the command line and in saved weights (docs/new_recipe.md).
"""

from __future__ import annotations

import enum
import functools
import importlib
import inspect
import pkgutil
from collections.abc import Callable
from dataclasses import KW_ONLY, InitVar, dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from ..runtime.imports import attach
from ..runtime.named_arguments import binding_error, did_you_mean
from ..runtime.op_options import block_scales

if TYPE_CHECKING:
    import torch

    from .rowwise import RowwiseScaling as RowwiseScaling

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
    "RowwiseScaling",
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
_FLT_MAX = float.fromhex("0x1.fffffep127")  # of float32

# Values of the field ``backward`` beside None.
BACKWARDS = ("dequantized", "high_precision")

# Split accumulation of (fprop, dgrad, wgrad).
GemmFlags = tuple[bool, bool, bool]


class _FormatFields(NamedTuple):
    """Fields of ``FormatValue``; a dtype may be given by its name."""

    max_fwd: float
    max_bwd: float
    fwd_dtype: torch.dtype | str
    bwd_dtype: torch.dtype | str


class FormatValue(_FormatFields):
    """Named tuple of a format's element types, and of the values to which amax values are scaled.

    torch is imported when a dtype is first read, so that other frameworks can do without it.

    Attributes:
        max_fwd: value to which the amax of an input or weight is scaled, ``fp8_max`` in forward.
        max_bwd: value to which the amax of a gradient is scaled, ``fp8_max`` in backward.
        fwd_dtype: torch dtype of the FP8 data of inputs and weights.
        bwd_dtype: torch dtype of the FP8 data of gradients.
    """

    __slots__ = ()

    @property
    def fwd_dtype(self) -> torch.dtype:
        """torch dtype of the FP8 data of inputs and weights."""
        return _torch_dtype(self[2])

    @property
    def bwd_dtype(self) -> torch.dtype:
        """torch dtype of the FP8 data of gradients."""
        return _torch_dtype(self[3])

    @property
    def dtype_names(self) -> tuple[str, str]:
        """Names of ``fwd_dtype`` and ``bwd_dtype``, such as "float8_e4m3fn"."""
        forward, backward = (str(dtype).removeprefix("torch.") for dtype in self[2:])
        return forward, backward


def _torch_dtype(dtype: torch.dtype | str) -> torch.dtype:
    """Returns a torch dtype that is given by itself or by its name."""
    if not isinstance(dtype, str):
        return dtype
    import torch

    return getattr(torch, dtype)


class Format(enum.Enum):
    """Enum of the FP8 element formats of a recipe; each member's value is a ``FormatValue``.

    Amax values are scaled to the largest finite value of the element type (448 for E4M3, 57344 for
    E5M2). With HiFloat8 they are scaled to 15 in forward, up to which its mantissa has 3 bits, and
    to 224 in backward, up to which it has 2.

    Attributes:
        E4M3: E4M3 for inputs, weights and gradients.
        E5M2: E5M2 for inputs, weights and gradients; no recipe accepts it.
        HYBRID: E4M3 for inputs and weights, E5M2 for gradients.
        HIF8: HiFloat8 for inputs, weights and gradients, with one scale per tensor.
    """

    E4M3 = FormatValue(448.0, 448.0, "float8_e4m3fn", "float8_e4m3fn")
    E5M2 = FormatValue(57344.0, 57344.0, "float8_e5m2", "float8_e5m2")
    HYBRID = FormatValue(448.0, 57344.0, "float8_e4m3fn", "float8_e5m2")
    HIF8 = FormatValue(15.0, 224.0, "uint8", "uint8")

    @classmethod
    def _missing_(cls, value: object) -> Format | None:
        """Returns the member whose first two values are those of ``value``, a tuple.

        Pickles hold a pair of Transformer Engine's, or a ``FormatValue`` with dtypes, not names.
        """
        if isinstance(value, (tuple, list)) and len(value) in (2, 4):
            return next((f for f in cls if f.value[:2] == tuple(value)[:2]), None)
        return None

    def __repr__(self) -> str:
        return f"Format.{self.name}"


_FORMATS = dict(Format.__members__)  # the property itself does not trace in torch 2.11


def chosen_format(owner: str, value: object, formats: tuple[Format, ...]) -> Format:
    """Returns the ``Format`` that ``value``, a ``Format`` or its name, stands for."""
    if not isinstance(value, (Format, str)):
        raise TypeError(
            f"{owner}: fp8_format must be a recipe.Format or its name, got {type(value).__name__}"
        )
    found = _FORMATS.get(value.upper()) if isinstance(value, str) else value
    if found not in formats:
        wanted = " or ".join(
            f'"{f.name.lower()}"' if isinstance(value, str) else repr(f) for f in formats
        )
        why = " (pure E5M2 training is not supported)" if found is Format.E5M2 else ""
        raise ValueError(f"{owner}: fp8_format must be {wanted}{why}, got {value!r}")
    return found


if TYPE_CHECKING:

    class FormatOrName:
        """Type of a field that is set to a ``Format`` or its name, and read as a ``Format``."""

        def __get__(self, recipe: Any, kind: Any) -> Format: ...

        def __set__(self, recipe: Any, value: Format | str) -> None: ...
else:
    FormatOrName = Format | str

_kinds: dict[str, type[Recipe]] = {}


@dataclass(frozen=True)
class Recipe:
    """Base class of recipes: frozen dataclasses that are passed to ``fp8_autocast``.

    A subclass defined as ``class MyScaling(Recipe, name="mine")`` is registered under that name:
    ``make_recipe("mine")`` makes it.

    Attributes:
        quantizer: name of the scheme, a module of ``apex_te.fp8.scheme``.
        keeps_state: True if scales and amax values are kept from one region to the next.
        formats: the values that the field ``fp8_format`` accepts.
        mutable: True if attributes can be set; a region then uses the copy that ``plain()``
            returns.
    """

    quantizer: ClassVar[str]
    keeps_state: ClassVar[bool] = False
    formats: ClassVar[tuple[Format, ...]] = (Format.HYBRID, Format.E4M3)
    mutable: ClassVar[bool] = False

    def plain(self) -> Recipe:
        """Returns an immutable recipe with the current values."""
        return self

    def __init_subclass__(cls, name: str | None = None) -> None:
        super().__init_subclass__()
        if cls.keeps_state and not any(kind.__name__ == "DelayedScaling" for kind in cls.__mro__):
            raise TypeError(
                f"{cls.__name__}: a recipe with keeps_state must derive from DelayedScaling, whose "
                f"options control its scale updates, got {cls.__bases__[0].__name__}"
            )
        if name is None:
            return
        other = _kinds.setdefault(name, cls)
        if (other.__module__, other.__qualname__) != (cls.__module__, cls.__qualname__):
            raise ValueError(f"{cls.__name__}: name must be new, got {name!r} of {other}")
        _kinds[name] = cls  # perhaps of a module that is imported again

    def __new__(cls, *args: Any, **options: Any) -> Recipe:
        if args or not options.keys() <= cls.__dataclass_fields__.keys():
            error = binding_error(cls.__name__, cls, args, options)
            if error is not None:
                raise error
        return super().__new__(cls)

    def _check_shared(self, fp8_dpa: bool, fp8_mha: bool) -> None:
        """Checks the fields that every recipe has, and that FP8 attention is not asked for."""
        values: Any = self
        for name, value in (("fp8_dpa", fp8_dpa), ("fp8_mha", fp8_mha)):
            if value:
                raise NotImplementedError(
                    f"{self._name}: {name} must be False (FP8 attention is not available), "
                    f"got {value!r}"
                )
        self._check_int("interval", values.interval, 1)
        if getattr(self, "backward", None) is not None:
            self._check_backward()
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
        """Restores a pickled recipe, and checks its fields as the constructor does."""
        self.__dict__.update(values)
        check = getattr(self, "__post_init__", None)
        if check is not None:
            check(False, False)

    def _check_int(
        self, name: str, value: object, minimum: int, maximum: int | None = None
    ) -> None:
        """Checks the field ``name``, an int or a float without a fraction; stores it as an int."""
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{self._name}: {name} must be an int, got {type(value).__name__}")
        if value < minimum and maximum is None:
            raise ValueError(f"{self._name}: {name} must be at least {minimum}, got {value}")
        if maximum is not None and not minimum <= value <= maximum:
            raise ValueError(
                f"{self._name}: {name} must be from {minimum} to {maximum}, got {value}"
            )
        object.__setattr__(self, name, value)

    def _check_backward(self) -> None:
        """Checks the field ``backward``, which recipes without a state have."""
        value = self.backward  # type: ignore[attr-defined]
        if not isinstance(value, str):
            raise TypeError(f"{self._name}: backward must be a str, got {type(value).__name__}")
        if value not in BACKWARDS:
            raise ValueError(
                f"{self._name}: backward must be None or one of {', '.join(BACKWARDS)}, "
                f"got {value!r}"
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
        """Checks the field ``fp8_format``, a ``Format`` or its name; stores it as a ``Format``."""
        object.__setattr__(self, "fp8_format", chosen_format(self._name, value, self.formats))

    def _flags(self, name: str) -> GemmFlags:
        """Checks the field ``name``, three bools; stores it as a tuple, and returns the tuple."""
        value: Any = getattr(self, name)
        if not isinstance(value, (tuple, list)) or not {bool} >= {*map(type, value)}:
            raise TypeError(f"{self._name}: {name} must be a tuple of three bools, got {value!r}")
        if len(value) != 3:
            raise ValueError(f"{self._name}: {name} must have three bools, got {value!r}")
        value = tuple(value)
        object.__setattr__(self, name, value)
        return value


@dataclass(frozen=True)
class DelayedScaling(Recipe, name="delayed"):
    """Recipe that computes a tensor's scale from its amax values in earlier steps.

    Args:
        margin: the scale is divided by ``2 ** margin``; from -16 to 16.
        interval: number of regions (microbatches) from one scale update to the next.
        fp8_format: ``Format.HYBRID`` or ``Format.E4M3``, or its name, ``"hybrid"`` or ``"e4m3"``.
        amax_history_len: rows of the amax history; at most 16384. One row holds the amax values of
            the current step.
        amax_compute_algo: ``"max"``, ``"most_recent"`` or a callable ``(history [length, slots]) ->
            amax [slots]``; row 0 of the history is the newest amax, row 1 the oldest, the last row
            the one before the newest.
        scaling_factor_compute_algo: None (``fp8_max / amax / 2**margin``), ``"pow2"`` (that ratio
            rounded down to a power of two) or a callable ``(amax [slots], old_scale [slots],
            fp8_max, recipe) -> scale [slots]``. A callable must be hashable. If a callable raises,
            modules with this recipe keep their scales and drop the amax values recorded since the
            last update, and the region that caused the update raises the error. Modules with other
            recipes are still updated.
        override_linear_precision: three bools, for fprop, dgrad and wgrad: True runs this GEMM in
            bf16 or fp32. Only wgrad's may be True.
        reduce_amax: reduce the amax values by maximum over ``fp8_group`` before an update.
        first_step: ``"scale_one"`` starts with scale 1; ``"current"`` computes the first scale of
            each tensor from the tensor itself.
        use_split_accumulator: three bools, for fprop, dgrad and wgrad: True keeps partial sums in
            fp32, False allows cuBLASLt's fast accumulation.
        fp8_dpa: FP8 dot-product attention; not available yet, True raises.
        fp8_mha: FP8 multi-head attention; not available yet, True raises.

    Raises:
        TypeError: an argument has a wrong type or is unknown.
        ValueError: an argument has a wrong value.
        NotImplementedError: FP8 attention was requested.
    """

    margin: int = 0
    interval: int = 1
    fp8_format: FormatOrName = Format.HYBRID  # type: ignore[assignment]
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
        """Returns True if the amax or the scale is computed by a user's function."""
        return callable(self.amax_compute_algo) or callable(self.scaling_factor_compute_algo)

    @staticmethod
    def _check_algo(name: str, value: object, names: tuple[str, ...]) -> None:
        """Checks that an algorithm is one of ``names`` or a hashable callable."""
        if callable(value):
            try:
                hash(value)
            except TypeError as error:
                raise TypeError(
                    f"DelayedScaling: {name} must be hashable, got {type(value).__name__}"
                ) from error
            return
        wanted = '"' + '" or "'.join(names) + '"'
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
    """Recipe that computes a tensor's scale from its amax when it is cast: ``fp8_max / max |x|``.

    Args:
        fp8_format: ``Format.HYBRID``, ``Format.E4M3`` or ``Format.HIF8``, or its name.
        pow2: round scales down to powers of two.
        eps: lower bound of the amax from which a scale is computed.
        override_linear_precision: three bools, for fprop, dgrad and wgrad: True runs this GEMM in
            bf16 or fp32. Only wgrad's may be True.
        use_split_accumulator: three bools, for fprop, dgrad and wgrad: True keeps partial sums in
            fp32, False allows cuBLASLt's fast accumulation. ``Format.HIF8`` ignores it.
        interval: ignored, accepted for compatibility; every cast computes its scale.
        backward: None computes gradients from FP8 operands. Otherwise gradients are not quantized,
            and the GEMMs of backward run in the gradient's dtype: ``"high_precision"`` with the
            original input and weight, ``"dequantized"`` with the values of forward's FP8 operands.
        fp8_dpa, fp8_mha: FP8 attention; not available yet, True raises.

    Raises:
        TypeError: an argument has a wrong type or is unknown.
        ValueError: an argument has a wrong value.
        NotImplementedError: FP8 attention was requested.
    """

    _: KW_ONLY
    fp8_format: FormatOrName = Format.HYBRID  # type: ignore[assignment]
    pow2: bool = False
    eps: float = 0.0
    override_linear_precision: GemmFlags = (False, False, False)
    use_split_accumulator: GemmFlags = (False, True, True)
    interval: int = 1
    backward: str | None = None
    fp8_dpa: InitVar[bool] = False
    fp8_mha: InitVar[bool] = False

    formats: ClassVar[tuple[Format, ...]] = (Format.HYBRID, Format.E4M3, Format.HIF8)

    def __post_init__(self, fp8_dpa: bool, fp8_mha: bool) -> None:
        self._check_shared(fp8_dpa, fp8_mha)
        self._check_bool("pow2")
        self._check_eps(self.eps)

    @property
    def quantizer(self) -> str:  # type: ignore[override]
        """Name of the scheme: ``"hif8"`` with ``Format.HIF8``, else ``"current"``."""
        return "hif8" if self.fp8_format is Format.HIF8 else "current"


@dataclass(frozen=True)
class BlockScaling(Recipe, name="blockwise"):
    """Recipe with one scale for each block of a tensor, as in DeepSeek-V3.

    Blocks are 1x128 for activations and gradients, 128x128 for weights.

    Args:
        fp8_format: ``Format.E4M3`` or ``Format.HYBRID``, or its name.
        scales: ``"pow2"`` rounds scales down to powers of two, as vLLM does on sm_90 by default;
            ``"fp32"`` does not; ``"server"`` divides by scale_inv, ``amax / fp8_max`` rounded to
            nearest, which gives the bits of inference engines with such scales. None is ``"pow2"``.
        pow2: former form of ``scales``: True is ``"pow2"``, False ``"fp32"``.
        eps: lower bound of the amax from which a block's scale is computed; with ``"server"`` it is
            at least 1e-10.
        wgrad_input: blocks in which inputs are cast for weight gradients: ``"128x128"``, whose
            GEMMs are faster, or ``"1x128"``, along the tokens, as in Transformer Engine.
        use_split_accumulator: must be all True; block sums are always kept in fp32.
        override_linear_precision, interval, backward, fp8_dpa, fp8_mha: as in ``CurrentScaling``.

    Raises:
        TypeError: an argument has a wrong type or is unknown.
        ValueError: an argument has a wrong value.
        NotImplementedError: FP8 attention was requested.
    """

    _: KW_ONLY
    fp8_format: FormatOrName = Format.E4M3  # type: ignore[assignment]
    scales: str = None  # type: ignore[assignment]
    eps: float = 0.0
    wgrad_input: str = "128x128"
    override_linear_precision: GemmFlags = (False, False, False)
    use_split_accumulator: GemmFlags = (True, True, True)
    interval: int = 1
    backward: str | None = None
    fp8_dpa: InitVar[bool] = False
    fp8_mha: InitVar[bool] = False

    quantizer: ClassVar[str] = "block"

    def __post_init__(self, fp8_dpa: bool, fp8_mha: bool) -> None:  # type: ignore[override]
        self._check_shared(fp8_dpa, fp8_mha)
        object.__setattr__(self, "scales", block_scales(self._name, self.scales, None))
        self._check_eps(self.eps)
        if self.wgrad_input not in ("1x128", "128x128"):
            raise ValueError(
                f"BlockScaling: wgrad_input must be '1x128' or '128x128', got {self.wgrad_input!r}"
            )
        if self.use_split_accumulator != (True, True, True):
            raise ValueError(
                "BlockScaling: use_split_accumulator must be (True, True, True), "
                f"got {self.use_split_accumulator}"
            )

    if TYPE_CHECKING:
        pow2: InitVar[bool | None] = None
    else:

        @property
        def pow2(self) -> bool:
            """True if scales are powers of two."""
            return self.scales == "pow2"

    def __setstate__(self, values: dict[str, Any]) -> None:
        """Restores a pickled recipe, also one that has ``pow2`` instead of ``scales``."""
        values = dict(values)
        if "pow2" in values:
            values["scales"] = block_scales(self._name, None, values.pop("pow2"))
        super().__setstate__(values)


def _take_pow2(constructor: Callable[..., None]) -> Callable[..., None]:
    """Returns the constructor of ``BlockScaling`` with ``pow2``, which is no field, as an argument.

    ``dataclasses.replace`` passes all fields; ``scales`` beside ``pow2`` is then the former value.
    """
    names = {field.name for field in fields(BlockScaling)}

    @functools.wraps(constructor)
    def __init__(self: BlockScaling, *args: Any, pow2: bool | None = None, **options: Any) -> None:
        if pow2 is not None:
            given = None if names <= options.keys() else options.get("scales")
            options["scales"] = block_scales(self._name, given, pow2)
        constructor(self, *args, **options)

    signature = inspect.signature(constructor)
    added = inspect.Parameter("pow2", inspect.Parameter.KEYWORD_ONLY, default=None,
                              annotation="bool | None")  # fmt: skip
    parameters = [*signature.parameters.values(), added]
    __init__.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return __init__


BlockScaling.__init__ = _take_pow2(BlockScaling.__init__)  # type: ignore[method-assign]


@dataclass(frozen=True)
class MXFP8Scaling(Recipe, name="mxfp8"):
    """Recipe with a power-of-two scale for every 32 elements along a GEMM's inner dimension.

    Source: OCP MX v1.0.

    Args:
        fp8_format: ``Format.E4M3`` or ``Format.HYBRID``, or its name.
        rounding: how the scale's exponent is rounded: ``"up"`` (nothing saturates) or ``"floor"``
            (OCP's rule).
        override_linear_precision, interval, backward, fp8_dpa, fp8_mha: as in ``CurrentScaling``.
        use_split_accumulator: ignored; MXFP8 GEMMs do not have this option.

    Raises:
        TypeError: an argument has a wrong type or is unknown.
        ValueError: an argument has a wrong value.
        NotImplementedError: FP8 attention was requested.
    """

    _: KW_ONLY
    fp8_format: FormatOrName = Format.E4M3  # type: ignore[assignment]
    rounding: str = "up"
    override_linear_precision: GemmFlags = (False, False, False)
    use_split_accumulator: GemmFlags = (False, True, True)
    interval: int = 1
    backward: str | None = None
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
    """Imports all recipes that have files of their own in this folder, which registers them."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")


def recipe_kinds() -> dict[str, type[Recipe]]:
    """Returns each recipe class by its registered name; the four built-in ones come first."""
    _import_files()
    return dict(_kinds)


def make_recipe(name: str, fp8_format: str | Format | None = None, **options: Any) -> Recipe:
    """Returns a recipe by its registered name.

    Args:
        name: ``"delayed"``, ``"tensorwise"``, ``"blockwise"``, ``"mxfp8"`` or the name of another
            registered recipe.
        fp8_format: ``"e4m3"``, ``"hybrid"`` or ``"hif8"`` (only for tensorwise), in upper or lower
            case, or a ``Format``; None uses the recipe's default.
        options: further arguments of the recipe's class.

    Raises:
        ValueError: the name is unknown, or the recipe does not have the format.
        TypeError: an argument has a wrong type or is unknown.
    """
    if not isinstance(name, str):
        raise TypeError(f"make_recipe: name must be a str, got {type(name).__name__}")
    kinds = recipe_kinds()
    if name not in kinds:
        raise ValueError(
            f"make_recipe: name must be one of {', '.join(kinds)}, got {name!r}"
            f"{did_you_mean(name, kinds)}"
        )
    kind = kinds[name]
    if fp8_format is not None:
        owner = f"make_recipe({name!r})"
        options["fp8_format"] = chosen_format(owner, fp8_format, kind.formats)
    return kind(**options)


def chosen_recipe(owner: str, argument: str, value: Recipe | str | None) -> Recipe:
    """Returns the recipe that an argument of a public function stands for.

    One name always gives the same object.

    Args:
        owner, argument: name of the function and of its argument, for errors.
        value: a recipe, a recipe's name, or None for delayed scaling.

    Raises:
        TypeError: ``value`` is something else, such as a recipe's class.
        ValueError: no recipe has the name.
    """
    if isinstance(value, Recipe):
        return value.plain() if value.mutable else value
    if value is None:
        return _by_name["delayed"]
    if not isinstance(value, str):
        got = type(value).__name__
        if isinstance(value, type) and issubclass(value, Recipe):
            got = f"the class {value.__name__}; call it: {value.__name__}()"
        raise TypeError(
            f"{owner}: {argument} must be a recipe from apex_te.recipe or its name, got {got}"
        )
    found = _by_name.get(value)
    if found is None:
        kinds = recipe_kinds()
        if value not in kinds:
            raise ValueError(
                f"{owner}: {argument} must be a recipe or one of {', '.join(kinds)}, got {value!r}"
                f"{did_you_mean(value, kinds)}"
            )
        found = _by_name[value] = kinds[value]()
    return found


def stateless_recipe(owner: str, argument: str, value: Recipe | str | None) -> Recipe | None:
    """Returns the recipe that an argument stands for, which must keep no state; None for None."""
    if value is None:
        return None
    found = chosen_recipe(owner, argument, value)
    if found.keeps_state:
        names = [f'"{name}"' for name, kind in recipe_kinds().items() if not kind.keeps_state]
        got = repr(value) if isinstance(value, str) else type(value).__name__
        raise ValueError(
            f"{owner}: {argument} must be a recipe without state, such as {', '.join(names)}, "
            f"got {got}"
        )
    return found


def pack_recipe(recipe: Recipe) -> tuple[str, dict[str, Any]]:
    """Returns the name of a recipe's class and its fields by name, as plain values for saving."""
    values: dict[str, Any] = {field.name: getattr(recipe, field.name) for field in fields(recipe)}
    values["fp8_format"] = values["fp8_format"].name
    return type(recipe).__name__, values


def unpack_recipe(packed: Any) -> Recipe:
    """Returns the recipe that ``pack_recipe`` described.

    Args:
        packed: ``(class name, values of fields by name)``.

    Raises:
        ValueError: ``packed`` is something else, or no registered recipe without state is called
            so.
    """
    try:
        name, values = packed
        kinds = {kind.__name__: kind for kind in recipe_kinds().values() if not kind.keeps_state}
        if name not in kinds:
            raise ValueError(f"{name}, which no recipe is called; is its package imported?")
        return kinds[name](**dict(values, fp8_format=Format[values["fp8_format"]]))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"FP8Parameter: recipe must be what was saved, got {error!r}") from error


if not TYPE_CHECKING:  # type checkers know the names above, and no others
    __getattr__, __dir__ = attach(__name__, {"RowwiseScaling": "rowwise"})
