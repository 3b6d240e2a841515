"""Regions, availability and global state of FP8 under Transformer Engine's names."""

from __future__ import annotations

import threading
from typing import Any

import torch

from ....fp8 import autocast as _regions
from ....fp8 import model_init as _model_init
from ....fp8.delayed.update import flush_fp8_state
from .._names import named, neutral, not_served
from ..common.recipe import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
    as_alias,
)
from .constants import DType, dist_group_type
from .utils import get_device_compute_capability

__all__ = [
    "CustomRecipe", "DelayedScaling", "DelayedScalingRequest", "FP8GlobalStateManager",
    "Float8BlockScaling", "Float8CurrentScaling", "Format", "MXFP8BlockScaling",
    "NVFP4BlockScaling", "QuantizerRequest", "QuantizerRole", "Recipe", "apply_recipe", "autocast",
    "check_fp8_block_scaling_support", "check_fp8_support", "check_mxfp8_support",
    "check_nvfp4_support", "check_recipe_support", "dist_group_type", "fp8_autocast",
    "fp8_model_init", "get_align_size_for_quantization", "get_default_fp8_recipe",
    "get_default_recipe", "get_device_compute_capability", "get_fp8_max", "get_fp8_recipe",
    "get_fp8_te_dtype", "get_fp8_torch_dtype", "is_fp8_available", "is_fp8_block_scaling_available",
    "is_mxfp8_available", "is_nvfp4_available", "quantization_backward_scope",
    "quantized_model_init",
]  # fmt: skip

_MODULE = "transformer_engine.pytorch.quantization"
_NO_ROLES = "quantizers follow from the recipe; CustomRecipe is not available either"
QuantizerRole = not_served(f"{_MODULE}.QuantizerRole", _NO_ROLES)
QuantizerRequest = not_served(f"{_MODULE}.QuantizerRequest", _NO_ROLES)
DelayedScalingRequest = not_served(f"{_MODULE}.DelayedScalingRequest", _NO_ROLES, QuantizerRequest)
apply_recipe = not_served(
    f"{_MODULE}.apply_recipe", "a region says the recipe: autocast(recipe=...) around the modules"
)
quantization_backward_scope = not_served(
    f"{_MODULE}.quantization_backward_scope", "a backward has the recipe of its forward"
)
_NO_NVFP4 = "apex_te has no NVFP4 recipe; use one of FP8"


# Recipes.


def get_default_fp8_recipe() -> Recipe:
    """Returns the recipe of a region that is given none: ``DelayedScaling()``."""
    return DelayedScaling()


def get_default_recipe() -> Recipe:
    """Returns the recipe of a region that is given none: ``DelayedScaling()``."""
    return get_default_fp8_recipe()


def get_fp8_recipe() -> Recipe:
    """Returns the recipe of this thread's innermost region; outside, ``DelayedScaling()``."""
    return FP8GlobalStateManager.get_fp8_recipe()


def _is_e4m3(recipe: Recipe, fprop_tensor: bool) -> bool:
    """Returns True if tensors of ``recipe`` are E4M3, False if they are E5M2."""
    value = recipe.fp8_format  # type: ignore[attr-defined]
    return value == Format.E4M3 or (value == Format.HYBRID and fprop_tensor)


def get_fp8_torch_dtype(fp8_recipe: Recipe, fprop_tensor: bool = True) -> torch.dtype:
    """Returns the FP8 dtype of a recipe's tensors.

    Args:
        fp8_recipe: a recipe.
        fprop_tensor: True for inputs and weights, False for gradients, which are E5M2 in HYBRID.
    """
    return torch.float8_e4m3fn if _is_e4m3(fp8_recipe, fprop_tensor) else torch.float8_e5m2


def get_fp8_te_dtype(fp8_recipe: Recipe, fprop_tensor: bool = True) -> DType:
    """Returns Transformer Engine's number of the FP8 dtype of a recipe's tensors.

    Args:
        fp8_recipe, fprop_tensor: as in ``get_fp8_torch_dtype``.
    """
    return DType.kFloat8E4M3 if _is_e4m3(fp8_recipe, fprop_tensor) else DType.kFloat8E5M2


def get_fp8_max(fp8_recipe: Recipe, fprop_tensor: bool = True) -> float:
    """Returns the largest finite FP8 value of a recipe's tensors: 448 (E4M3) or 57344 (E5M2).

    Args:
        fp8_recipe, fprop_tensor: as in ``get_fp8_torch_dtype``.
    """
    return torch.finfo(get_fp8_torch_dtype(fp8_recipe, fprop_tensor)).max


def get_align_size_for_quantization(recipe: Recipe) -> int:
    """Returns the multiple to which rows of grouped GEMMs are padded: 32 for MXFP8, else 16."""
    return 32 if recipe.mxfp8() else 16


# Availability.


def check_fp8_support() -> tuple[bool, str]:
    """Returns ``(True, "")``: apex_te computes with FP8 data on every device, decoded or not."""
    return True, ""


def check_mxfp8_support() -> tuple[bool, str]:
    """Returns ``(True, "")``: apex_te computes with MXFP8 data on every device, decoded or not."""
    return True, ""


def check_fp8_block_scaling_support() -> tuple[bool, str]:
    """Returns ``(True, "")``: apex_te computes with block scaling on every device."""
    return True, ""


def check_nvfp4_support() -> tuple[bool, str]:
    """Returns False and the reason: apex_te has no NVFP4 recipe."""
    return False, _NO_NVFP4


def check_recipe_support(recipe: Recipe) -> None:
    """Checks that apex_te computes with ``recipe``.

    Raises:
        RuntimeError: it is an ``NVFP4BlockScaling`` or a ``CustomRecipe``.
    """
    if isinstance(recipe, (NVFP4BlockScaling, CustomRecipe)):
        raise RuntimeError(
            f"check_recipe_support: recipe must be one of FP8, got {type(recipe).__name__}"
        )


def _answer(support: tuple[bool, str], return_reason: bool) -> Any:
    """Returns ``support``, or its first item unless ``return_reason``."""
    return support if return_reason else support[0]


def is_fp8_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """Returns True; with ``return_reason`` the result of ``check_fp8_support``."""
    return _answer(check_fp8_support(), return_reason)


def is_mxfp8_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """Returns True; with ``return_reason`` the result of ``check_mxfp8_support``."""
    return _answer(check_mxfp8_support(), return_reason)


def is_fp8_block_scaling_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """Returns True; with ``return_reason`` the result of ``check_fp8_block_scaling_support``."""
    return _answer(check_fp8_block_scaling_support(), return_reason)


def is_nvfp4_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """Returns False; with ``return_reason`` the result of ``check_nvfp4_support``."""
    return _answer(check_nvfp4_support(), return_reason)


# Regions.


def _flag(value: Any) -> Any:
    """Returns a number or numpy flag as a bool; other types are left to be refused."""
    return bool(value) if isinstance(value, int) else value


@named(_MODULE)
class autocast(_regions.fp8_autocast):
    """Runs modules inside in FP8; ``apex_te.fp8_autocast`` with Transformer Engine's arguments.

    Args:
        enabled: run in FP8.
        calibrating: collect amax values also if ``enabled`` is False.
        recipe: a recipe; None for ``get_default_recipe()``.
        amax_reduction_group: process group over which amax values are reduced; None is the world.

    Raises:
        TypeError: an argument has a wrong type.
    """

    __slots__ = ()

    def __init__(
        self,
        enabled: bool = True,
        calibrating: bool = False,
        recipe: Recipe | None = None,
        amax_reduction_group: dist_group_type | None = None,
        _graph: bool = False,
    ) -> None:
        neutral("autocast", _graph=(_graph, False))
        recipe = get_default_recipe() if recipe is None else recipe
        names = ("recipe", "amax_reduction_group")
        self._set(_flag(enabled), _flag(calibrating), recipe, amax_reduction_group, names)


@named(_MODULE)
class fp8_autocast(_regions.fp8_autocast):
    """Runs modules inside in FP8, under the earlier names of ``autocast`` and its arguments.

    Args:
        enabled, calibrating: as in ``autocast``.
        fp8_recipe: ``recipe`` of ``autocast``.
        fp8_group: ``amax_reduction_group`` of ``autocast``.

    Raises:
        TypeError: an argument has a wrong type.
    """

    __slots__ = ()

    def __init__(
        self,
        enabled: bool = True,
        calibrating: bool = False,
        fp8_recipe: Recipe | None = None,
        fp8_group: dist_group_type | None = None,
        _graph: bool = False,
    ) -> None:
        neutral("fp8_autocast", _graph=(_graph, False))
        recipe = get_default_recipe() if fp8_recipe is None else fp8_recipe
        names = ("fp8_recipe", "fp8_group")
        self._set(_flag(enabled), _flag(calibrating), recipe, fp8_group, names)


@named(_MODULE)
class quantized_model_init(_model_init.fp8_model_init):
    """Context manager that constructs modules with the weights of their GEMMs in FP8 only.

    Args:
        enabled: False turns off an enabled block around this one.
        recipe: recipe by which weights are quantized; None for ``get_default_recipe()``.
        preserve_high_precision_init_val: keep the values before quantization on the CPU, for an
            optimizer's master weights.

    Raises:
        TypeError: an argument has a wrong type.
    """

    __slots__ = ()

    def __init__(
        self,
        enabled: bool = True,
        recipe: Recipe | None = None,
        preserve_high_precision_init_val: bool = False,
    ) -> None:
        recipe = get_default_recipe() if recipe is None else recipe
        super().__init__(_flag(enabled), recipe, _flag(preserve_high_precision_init_val))


@named(_MODULE)
class fp8_model_init(quantized_model_init):
    """Context manager that constructs modules with FP8 weights; ``quantized_model_init``."""

    __slots__ = ()


# Global state.


class _AutocastState(tuple[Any, ...]):
    """Tuple of what ``get_autocast_state`` returns, with the region that it describes."""

    region: Any


class _Seen(threading.local):
    """Holds the region of this thread whose first module has asked, or None."""

    region: Any = None


@named(_MODULE)
class FP8GlobalStateManager:
    """Answers about the present region, ``fp8_model_init`` and graph capture of this thread."""

    _seen = _Seen()

    @classmethod
    def reset(cls) -> None:
        """Leaves all regions of this thread, as a test does that was broken off inside one."""
        _regions.local.region = None
        cls._seen.region = None

    is_fp8_available = staticmethod(check_fp8_support)
    is_mxfp8_available = staticmethod(check_mxfp8_support)
    is_fp8_block_scaling_available = staticmethod(check_fp8_block_scaling_support)
    is_nvfp4_available = staticmethod(check_nvfp4_support)

    @staticmethod
    def get_meta_tensor_key(forward: bool = True) -> str:
        """Returns the key in ``fp8_meta`` of the forward's or the backward's scales."""
        return "scaling_fwd" if forward else "scaling_bwd"

    @classmethod
    def is_fp8_enabled(cls) -> bool:
        """Returns True if this thread's innermost region is enabled."""
        return _regions.is_fp8_enabled()

    @classmethod
    def is_fp8_calibration(cls) -> bool:
        """Returns True if this thread's innermost region is calibrating."""
        region = _regions.local.region
        return region is not None and region.calibrating

    @classmethod
    def with_fp8_parameters(cls) -> bool:
        """Returns True inside an enabled ``fp8_model_init``."""
        return _model_init.settings() is not None

    @classmethod
    def with_high_precision_init_val(cls) -> bool:
        """Returns True if ``fp8_model_init`` keeps the values before quantization."""
        settings = _model_init.settings()
        return settings is not None and settings.preserve_high_precision_init_val

    @classmethod
    def get_fp8_recipe(cls) -> Recipe:
        """Returns the recipe of this thread's innermost region; outside, ``DelayedScaling()``."""
        region = _regions.local.region
        if region is None:
            return get_default_fp8_recipe()
        return as_alias(region.recipe)  # type: ignore[return-value]

    @classmethod
    def get_fp8_group(cls) -> dist_group_type | None:
        """Returns the process group over which the present region reduces amax values.

        None stands for the whole world, and for regions that record no amax values.
        """
        region = _regions.local.region
        amax_group = None if region is None else region.amax_group
        return None if amax_group is None else amax_group.group

    @classmethod
    def is_first_fp8_module(cls) -> bool:
        """Returns True for the first call in a region, False for later calls and outside."""
        region = _regions.local.region
        if region is None or region is cls._seen.region:
            return False
        cls._seen.region = region
        return True

    @classmethod
    def fp8_graph_capturing(cls) -> bool:
        """Returns True while a CUDA graph is captured on the current stream."""
        return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()

    @classmethod
    def get_autocast_state(cls) -> tuple[Any, ...]:
        """Returns the present region as a tuple for ``set_autocast_state``.

        Returns:
            enabled: True if the region is enabled.
            recipe: its recipe, None outside a region.
            calibrating: True if it is calibrating.
            group: process group of its amax values, or None.
            is_first_fp8_module: True if no module has asked ``is_first_fp8_module`` yet.
            graph_capturing: True while a CUDA graph is captured.
        """
        region = _regions.local.region
        state = _AutocastState(
            (
                cls.is_fp8_enabled(),
                None if region is None else as_alias(region.recipe),
                cls.is_fp8_calibration(),
                cls.get_fp8_group(),
                region is not None and region is not cls._seen.region,
                cls.fp8_graph_capturing(),
            )
        )
        state.region = region
        return state

    @classmethod
    def set_autocast_state(cls, state: tuple[Any, ...]) -> None:
        """Makes the region that ``get_autocast_state`` described the present one again.

        Args:
            state: a result of ``get_autocast_state``, unchanged.

        Raises:
            TypeError: ``state`` is not such a result.
        """
        if not isinstance(state, _AutocastState):
            raise TypeError(
                "set_autocast_state: state must be a result of get_autocast_state, "
                f"got {type(state).__name__}"
            )
        _regions.local.region = state.region
        cls._seen.region = None if state[4] else state.region

    @classmethod
    def reduce_and_update_fp8_tensors(cls, forward: bool = True) -> None:
        """Applies a pending update of the scales after a backward; collective.

        apex_te updates the scales of forward and backward together, on entering the next region,
        so nothing has to be done for the forward alone.
        """
        if not forward:
            flush_fp8_state()

    @classmethod
    def add_fp8_tensors_to_global_buffer(cls, fp8_meta: dict[str, Any]) -> None:
        """Does nothing: modules register their FP8 state themselves."""

    set_skip_fp8_weight_update_tensor = staticmethod(
        not_served(
            f"{_MODULE}.FP8GlobalStateManager.set_skip_fp8_weight_update_tensor",
            "make_graphed_callables(cache_quantized_params=True) decides which casts of weights a "
            "replay runs",
        )
    )

    @classmethod
    def get_skip_fp8_weight_update_tensor(cls) -> None:
        """Returns None: no tensor on the device decides whether weights are cast."""
        return None
