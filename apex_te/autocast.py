"""fp8_autocast: where FP8 is on. The only global state is one linked region per thread."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from ._process_groups import is_process_group
from ._registry import intern, registry, traced_key
from ._traced_region import enter_traced_region, leave_traced_region
from .recipe import DelayedScaling, Recipe

if TYPE_CHECKING:
    from ._scale_scope import Scope

__all__ = ["fp8_autocast", "get_fp8_recipe", "is_fp8_enabled"]

_F = TypeVar("_F", bound=Callable[..., Any])
_DEFAULT_RECIPE = DelayedScaling()
# Not -1 while a backward is running in this thread: a forward seen then is a recompute.
graph_task_id: Callable[[], int] = torch._C._current_graph_task_id


class Region:
    """One entered fp8_autocast, as the modules inside see it."""

    __slots__ = (
        "calibrating", "enabled", "grad", "in_fp8", "outer", "recipe", "recipe_key", "records",
        "scope", "traced",
    )  # fmt: skip

    def __init__(
        self,
        outer: Region | None,
        enabled: bool,
        calibrating: bool,
        recipe: Recipe,
    ) -> None:
        self.outer = outer
        self.enabled = enabled
        self.calibrating = calibrating
        # Interned: a compiled region is bound to a recipe's value, not to one of equal objects.
        if torch.compiler.is_compiling():
            self.recipe_key, self.recipe = traced_key(recipe), recipe
        else:
            self.recipe_key, self.recipe = intern(recipe)
        # Grad mode counts where the outermost region was entered, not where a module runs:
        # a reentrant checkpoint runs its forward under no_grad.
        self.grad: bool = torch.is_grad_enabled() if outer is None else outer.grad
        outermost = outer is None or not outer.in_fp8
        self.in_fp8: bool = enabled or calibrating or not outermost
        self.records: bool = self.grad or calibrating
        if outer is not None and outer.in_fp8:
            self.records = outer.records
        # Where what is staged inside is reduced; None where nothing is counted.
        self.scope: Scope | None = None
        if outer is not None and self.records and self.recipe.keeps_state:
            self.scope = outer.scope
        # The states that compiled code has used since it entered the outermost region itself.
        self.traced: list[Any] | None = None if outer is None else outer.traced


class _Local(threading.local):
    def __init__(self) -> None:
        # Not a class attribute, which torch.compile would take for a constant.
        self.region: Region | None = None


local = _Local()


class fp8_autocast:
    """Runs the modules inside in FP8; a context manager and a decorator, nestable, per thread.

    Args:
        enabled: run in FP8; False inside an enabled region switches it off.
        fp8_recipe: a recipe, default ``DelayedScaling()``; read on entry. A bool here is taken as
            ``calibrating``.
        fp8_group: process group over which amaxes are MAX-reduced; None is the whole world. That of
            the outermost region counts. Its ranks have the same FP8 modules: data-, tensor- and
            expert-parallel ones, never those of another pipeline stage. Ranks whose modules differ
            in number, size, class, the ``layer_number`` of their TransformerLayer or
            MultiheadAttention, or the pipeline stage that Megatron knows get a RankMismatchError at
            the first update. Stages that are equal in all of these cannot be told apart: each
            other's amaxes would then set their scales, which are too small for one of them.
        calibrating: collect amaxes even where ``enabled`` is False (results in high precision).

    Scales move in one place: on entering an outermost region with grad enabled, once ``interval``
    regions have passed since the last update. ``apex_te.flush_fp8_state()`` applies a pending one.
    Regions with different groups, or with ``reduce_amax`` and without, count and update on their
    own: each the modules that ran in its like last.

    Errors: TypeError for an argument of a wrong type.
    """

    __slots__ = ("calibrating", "enabled", "group", "recipe")

    def __init__(
        self,
        enabled: bool = True,
        fp8_recipe: Recipe | bool | None = None,
        fp8_group: Any = None,
        *,
        calibrating: bool = False,
    ) -> None:
        if isinstance(fp8_recipe, bool):
            fp8_recipe, calibrating = None, fp8_recipe or calibrating
        for name, value in (("enabled", enabled), ("calibrating", calibrating)):
            if not isinstance(value, bool):
                raise TypeError(f"fp8_autocast: {name} must be a bool, got {type(value).__name__}")
        if fp8_recipe is not None and not isinstance(fp8_recipe, Recipe):
            raise TypeError(
                "fp8_autocast: fp8_recipe must be a recipe from apex_te.recipe, "
                f"got {type(fp8_recipe).__name__}"
            )
        if fp8_group is not None and not is_process_group(fp8_group):
            raise TypeError(
                "fp8_autocast: fp8_group must be a torch.distributed.ProcessGroup, "
                f"got {type(fp8_group).__name__}"
            )
        self.enabled = enabled
        self.calibrating = calibrating
        self.recipe = _DEFAULT_RECIPE if fp8_recipe is None else fp8_recipe
        self.group = fp8_group

    def __enter__(self) -> None:
        outer = local.region
        region = Region(outer, self.enabled, self.calibrating, self.recipe)
        outermost = region.in_fp8 and (outer is None or not outer.in_fp8)
        if outermost and region.records:
            if torch.compiler.is_compiling():
                if region.recipe.keeps_state:
                    region.traced = []
                    enter_traced_region(region.recipe_key, self.group, region.grad)
            elif graph_task_id() == -1:
                region.scope = registry.enter_region(region.recipe, self.group, region.grad)
        local.region = region

    def __exit__(self, *exc: object) -> None:
        region = local.region
        if region is None:
            return
        outer = region.outer
        if region.traced is not None and (outer is None or outer.traced is None):
            leave_traced_region(region.traced)
        local.region = outer

    def __call__(self, function: _F) -> _F:
        """Decorate ``function`` so that each call runs in a region of its own."""

        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            region = self
            if torch.compiler.is_compiling():  # which enters only what was made in its own code
                region = fp8_autocast(
                    self.enabled, self.recipe, self.group, calibrating=self.calibrating
                )
            with region:
                return function(*args, **kwargs)

        return wrapper  # type: ignore[return-value]


def is_fp8_enabled() -> bool:
    """True inside an enabled ``fp8_autocast`` region of this thread."""
    region = local.region
    return region is not None and region.enabled


def get_fp8_recipe() -> Recipe:
    """The recipe of the innermost region of this thread, else the default one."""
    region = local.region
    return _DEFAULT_RECIPE if region is None else region.recipe
