"""``fp8_autocast`` and the regions that it enters, a linked list for each thread.

A generator that is suspended inside a ``with`` block leaves the block when it is closed. By then
other blocks may have been entered, and the closing thread may be another than the entering one; so
blocks are not always left in reverse order.
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from ..comm.groups import is_process_group
from ..recipe import Recipe, chosen_recipe
from ..runtime.named_arguments import check_flags
from ..runtime.tracing import refuse_state
from .delayed.compiled import enter_traced_region, leave_traced_region
from .delayed.ranks import intern, traced_key
from .delayed.update import enter_region, leave_calibration, preview_scales

if TYPE_CHECKING:
    from .delayed.ranks import AmaxGroup

__all__ = ["autocast", "fp8_autocast", "get_fp8_recipe", "is_fp8_enabled"]


class Entered:
    """Base of an entered context manager: one link of its thread's list.

    ``outer`` is the link that was innermost on entry, or None. ``holder`` is the ``__dict__`` of
    the entering thread's ``threading.local()``, the only way for other threads to its innermost
    link.
    """

    __slots__ = ("holder", "outer")

    outer: Any
    holder: dict[str, Any]


def leave(entered: list[Any], holder: dict[str, Any], name: str) -> Any:
    """Removes the link entered last from ``entered`` and its thread's list; None without one."""
    if not entered:
        return None
    own = entered[-1]
    if own.holder is holder:
        entered.pop()
    else:
        own = next((link for link in reversed(entered) if link.holder is holder), own)
        entered.remove(own)
    innermost = own.holder.get(name)
    if innermost is own:
        own.holder[name] = own.outer
        return own
    while innermost is not None and innermost.outer is not own:
        innermost = innermost.outer
    if innermost is not None:
        innermost.outer = own.outer
    return own


_F = TypeVar("_F", bound=Callable[..., Any])
SAVES = ("all", "small")
_DEFAULT_RECIPE = chosen_recipe("fp8_autocast", "fp8_recipe", None)
# Not -1 while a backward is running in this thread: a forward seen then is a recompute.
graph_task_id: Callable[[], int] = torch._C._current_graph_task_id


class Region(Entered):
    """One entered ``fp8_autocast`` block, which modules that run inside read.

    Attributes:
        last_input: the input that a layer of this region cast last, for the next layer with this
            input.
        grad: True if the outermost region was entered with grad enabled.
        in_fp8: True if this region or a region around it is enabled or calibrating.
        in_backward: True if it was entered during a backward, by a recompute.
        amax_group: the amax group that counts this region; None in evaluation, in a recompute,
            without state, and in traced code, whose graph enters the region by an op.
        previewed: True in an evaluation that reads ``FP8State.pending_scale_fwd``.
        calibrated: the amax group to update on leaving an outermost calibrating region without
            grad.
        traced: pairs of a ``ModuleFP8`` and a recipe key that a graph of torch.compile has used, if
            the graph itself entered the outermost region; else None.
    """

    __slots__ = (
        "amax_group", "calibrated", "calibrating", "enabled", "grad", "in_backward", "in_fp8",
        "keep_columnwise_weights", "last_input", "previewed", "recipe", "recipe_key", "records",
        "save", "traced",
    )  # fmt: skip

    def __init__(
        self,
        outer: Region | None,
        enabled: bool,
        calibrating: bool,
        recipe: Recipe,
        keep_columnwise_weights: bool,
        save: str,
        compiling: bool,
    ) -> None:
        self.outer = outer
        self.save = save
        self.enabled = enabled
        self.calibrating = calibrating
        self.keep_columnwise_weights = keep_columnwise_weights
        self.last_input: Any = None
        # Interned: a compiled region is bound to a recipe's value, not to one of equal objects.
        self.in_backward = False
        if compiling:
            self.recipe_key, self.recipe = traced_key(recipe), recipe
        else:
            self.recipe_key, self.recipe = intern(recipe)
            self.in_backward = graph_task_id() != -1
        # Grad mode counts where the outermost region was entered, not where a module runs:
        # a reentrant checkpoint runs its forward under no_grad.
        if outer is not None:
            self.grad: bool = outer.grad
        else:
            self.grad = torch.is_grad_enabled() or local.is_checkpointed
        outermost = outer is None or not outer.in_fp8
        self.in_fp8: bool = enabled or calibrating or not outermost
        self.records: bool = self.grad or calibrating
        if outer is not None and outer.in_fp8:
            self.records = outer.records
        self.amax_group: AmaxGroup | None = None
        if outer is not None and self.records and self.recipe.keeps_state:
            self.amax_group = outer.amax_group
        self.previewed: bool = outer is not None and outer.previewed
        self.calibrated: AmaxGroup | None = None
        self.traced: list[Any] | None = None if outer is None else outer.traced


class _Local(threading.local):
    """Holds a thread's innermost region, or None."""

    def __init__(self) -> None:
        # Not a class attribute, which torch.compile would take for a constant.
        self.region: Region | None = None
        # True while a reentrant checkpoint called with grad runs its forward, which is under
        # no_grad.
        self.is_checkpointed = False


local = _Local()


class fp8_autocast:
    """Context manager and decorator that runs the modules inside in FP8, for one thread.

    ``fp8_autocast("tensorwise")``, ``fp8_autocast(fp8_recipe="tensorwise")`` and
    ``fp8_autocast(True, "tensorwise")`` are equivalent. Transformer Engine's order ``(enabled,
    calibrating, recipe, group)`` and its newer names ``recipe`` and ``amax_reduction_group`` are
    also accepted.

    Args:
        recipe_or_enabled: a recipe or its name, as ``fp8_recipe``; or a bool, as ``enabled``.
        fp8_recipe: a recipe or its name (``"delayed"``, ``"tensorwise"``, ``"blockwise"``,
            ``"mxfp8"``), default ``DelayedScaling()``. A bool here means ``calibrating``; the next
            two positional arguments are then recipe and group.
        fp8_group: process group over which amax values are reduced by maximum; None is the whole
            world. Nested regions use the outermost region's group. Its ranks must have the same FP8
            modules: data-, tensor- and expert-parallel ranks may share a group, pipeline stages may
            not. The first update raises ``RankMismatchError`` if the ranks' modules differ in
            number, size, class, the ``layer_number`` of their ``TransformerLayer`` or
            ``MultiheadAttention``, or Megatron's pipeline stage. Stages that agree in all of these
            are not detected: amax values of one then make the scales of the other too small.
        amax_reduction_group: another name of ``fp8_group``.
        enabled: run in FP8; False inside an enabled region turns FP8 off there.
        calibrating: record amax values even if ``enabled`` is False; results are then bf16 or fp32.
        recipe: another name of ``fp8_recipe``.
        keep_columnwise_weights: True casts each weight only once, in forward, and keeps the
            transpose of its FP8 data (the columnwise copy) until backward. This costs one byte for
            each element of a weight from forward to backward, and saves a third of the bytes that
            casts of weights move. With False, backward casts the weight again. Weights that are
            cached, held in FP8, sharded by ``fully_shard``, or in a ``GroupedLinear`` without
            ``single_parameter`` are not affected.
        save: what ``LayerNormLinear`` and ``LayerNormMLP``, and modules made of them such as
            ``TransformerLayer``, save for backward in FP8. ``"all"`` saves everything that backward
            reads. ``"small"`` saves less and recomputes more: the FP8 copy of a norm's output is
            recomputed from the norm's input, bitwise identical; the output of an MLP's first GEMM
            (gate and up) is saved in E4M3 with a scale for each 1x128 block, and the activation is
            recomputed from it, which rounds the MLP's gradients; of a weight that is joined from
            several parameters only the columnwise FP8 copy is saved, as with
            ``keep_columnwise_weights``. Outputs do not change. Norm outputs that sequence
            parallelism gathers in FP8, and the input of a GEMM whose recipe has
            ``backward="dequantized"``, are saved as with ``"all"``.

    Regions may be nested. Scales are updated on entry to an outermost region with grad enabled,
    once the recipe's ``interval`` of regions has passed since the last update. They are also
    updated on exit from an outermost calibrating region without grad, unless a region with grad
    awaits its update. Both are collective over ``fp8_group``.

    An evaluation (an outermost region without grad that does not calibrate) changes no state, but
    uses the scales that a pending update will give. Exceptions: it uses the scales of the last
    update if the pending one is collective over several ranks, because these may not all enter the
    evaluation, or if torch.compile or a CUDA graph captures the region with its code. To apply a
    pending update before an evaluation, call ``apex_te.flush_fp8_state()`` on all ranks.

    Regions with different groups, or with different ``reduce_amax``, are counted and updated
    separately; an update covers the modules that last ran in a region with its group and
    ``reduce_amax``.

    A region ends with its ``with`` block; blocks may be left in any order and by any thread. A
    suspended generator leaves its block when it is closed. Until then the thread that ran it stays
    in the region; another thread that resumes the generator is not in a region.

    Delayed scaling counts the regions of all threads together, and an update covers all models of
    the process. Only one thread at a time may train with it; a warning is raised if two are in a
    region at once. Evaluations, and recipes without state, may run in any number of threads.

    Raises:
        TypeError: an argument has a wrong type, or is given twice.
        ValueError: a recipe's name or ``save`` is unknown.
    """

    __slots__ = (
        "_entered", "calibrating", "enabled", "group", "keep_columnwise_weights", "recipe", "save",
    )  # fmt: skip

    def __init__(
        self,
        recipe_or_enabled: Recipe | str | bool = True,
        /,
        fp8_recipe: Recipe | str | bool | None = None,
        fp8_group: Any = None,
        amax_reduction_group: Any = None,
        *,
        enabled: bool = True,
        calibrating: bool = False,
        recipe: Recipe | str | None = None,
        keep_columnwise_weights: bool = False,
        save: str = "all",
    ) -> None:
        recipe_name, group_name = "fp8_recipe", "fp8_group"
        if recipe_or_enabled is not True:
            if isinstance(recipe_or_enabled, (Recipe, str, type)):
                recipe_name = "the first argument"
                if fp8_recipe is not None:
                    raise TypeError(
                        f"{type(self).__name__}: what follows a recipe as the first argument must "
                        f"be given by name, such as enabled=False, got {fp8_recipe!r}"
                    )
                fp8_recipe = recipe_or_enabled
            else:
                enabled = recipe_or_enabled
        if isinstance(fp8_recipe, bool):  # Transformer Engine's order
            fp8_recipe, calibrating = None, fp8_recipe or calibrating
            if isinstance(fp8_group, (Recipe, str)):
                fp8_recipe, fp8_group = fp8_group, None
        if recipe is not None:
            self._refuse_both(recipe_name, fp8_recipe, "recipe")
            fp8_recipe, recipe_name = recipe, "recipe"
        if amax_reduction_group is not None:
            self._refuse_both(group_name, fp8_group, "amax_reduction_group")
            fp8_group, group_name = amax_reduction_group, "amax_reduction_group"
        self._set(
            enabled, calibrating, fp8_recipe, fp8_group, (recipe_name, group_name),
            keep_columnwise_weights, save,
        )  # fmt: skip

    def _refuse_both(self, name: str, value: object, other: str) -> None:
        """Raises the TypeError of an argument that is given by both its names."""
        if value is not None:
            raise TypeError(
                f"{type(self).__name__}: {name} and {other} mean the same; pass only one of them, "
                "got both"
            )

    def _set(
        self,
        enabled: bool,
        calibrating: bool,
        recipe: Recipe | str | None,
        group: Any,
        names: tuple[str, str],
        keep_columnwise_weights: bool = False,
        save: str = "all",
    ) -> None:
        """Checks and stores the arguments of this class's constructor and of its subclasses'."""
        owner = type(self).__name__
        if not (type(enabled) is type(calibrating) is type(keep_columnwise_weights) is bool):
            check_flags(
                owner, enabled=enabled, calibrating=calibrating,
                keep_columnwise_weights=keep_columnwise_weights,
            )  # fmt: skip
        if not (isinstance(save, str) and save in SAVES):
            wanted = " or ".join(map(repr, SAVES))
            kind = ValueError if isinstance(save, str) else TypeError
            raise kind(f"{owner}: save must be {wanted}, got {save!r}")
        self.recipe = chosen_recipe(owner, names[0], recipe)
        if group is not None and not is_process_group(group):
            raise TypeError(
                f"{owner}: {names[1]} must be a torch.distributed.ProcessGroup, "
                f"got {type(group).__name__}"
            )
        self.enabled = enabled
        self.calibrating = calibrating
        self.group = group
        self.keep_columnwise_weights = keep_columnwise_weights
        self.save = save
        self._entered: list[Region] = []

    def __repr__(self) -> str:
        return (
            f"fp8_autocast(enabled={self.enabled}, fp8_recipe={self.recipe!r}, "
            f"fp8_group={self.group!r}, calibrating={self.calibrating}"
            + (", keep_columnwise_weights=True" if self.keep_columnwise_weights else "")
            + (")" if self.save == "all" else f", save={self.save!r})")
        )

    def __enter__(self) -> None:
        outer, compiling = local.region, torch.compiler.is_compiling()
        region = Region(
            outer, self.enabled, self.calibrating, self.recipe, self.keep_columnwise_weights,
            self.save, compiling,
        )  # fmt: skip
        outermost = region.in_fp8 and (outer is None or not outer.in_fp8)
        if outermost and region.records:
            keeps_state = region.recipe.keeps_state
            if keeps_state:
                refuse_state("fp8_autocast")
            if compiling:
                if keeps_state:
                    region.traced = []
                    enter_traced_region(region.recipe_key, self.group, region.grad)
            elif keeps_state and not region.in_backward:
                region.amax_group = enter_region(
                    region.recipe, self.group, region.grad, id(local.__dict__)
                )
                if not region.grad:
                    region.calibrated = region.amax_group
        elif outermost and not compiling and not region.in_backward:
            region.previewed = preview_scales(region.recipe)
        local.region = region
        if not compiling:
            region.holder = local.__dict__
            self._entered.append(region)

    def __exit__(self, *exc: object) -> None:
        if torch.compiler.is_compiling():
            _leave_traced()
            return
        region = leave(self._entered, local.__dict__, "region")
        if region is not None and region.amax_group is not None:
            outer = region.outer
            if outer is None or outer.amax_group is not region.amax_group:
                region.amax_group.inside.discard(id(region.holder))
        if region is not None and region.calibrated is not None and not any(exc):
            leave_calibration(region.recipe, region.calibrated)

    def __call__(self, function: _F) -> _F:
        """Decorates ``function`` so that each call runs in a new region."""

        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            region = self
            if torch.compiler.is_compiling():  # which enters only what was made in its own code
                region = fp8_autocast(
                    self.enabled, self.recipe, self.group, calibrating=self.calibrating,
                    keep_columnwise_weights=self.keep_columnwise_weights, save=self.save,
                )  # fmt: skip
            with region:
                return function(*args, **kwargs)

        return wrapper  # type: ignore[return-value]


def _leave_traced() -> None:
    """Leaves the innermost region in traced code, where no other threads can change the order."""
    region = local.region
    if region is None:
        return
    outer = region.outer
    if region.traced is not None and (outer is None or outer.traced is None):
        leave_traced_region(region.traced)
    local.region = outer


def _run_eagerly(*functions: Any) -> None:
    """Keeps torch.compile from compiling functions by themselves, not as parts of traced callers.

    Where a graph breaks in a ``with`` block, it would compile ``__enter__`` as traced code,
    although no graph holds the region.
    """
    try:
        frames: Any = torch._C._dynamo.eval_frame
        skip = frames._FrameAction.SKIP
        strategy = frames._FrameExecStrategy(skip, skip)
        mark = frames.set_code_exec_strategy
    except AttributeError:  # names that torch 2.11 to 2.14 have
        warnings.warn(
            f"apex_te: torch {torch.__version__} cannot be told to run fp8_autocast eagerly: under "
            "torch.compile, use regions with fullgraph=True alone",
            RuntimeWarning,
            stacklevel=2,
        )
        return
    for function in functions:
        mark(function.__code__, strategy)


class _ModuleNames(type):
    """Metaclass that gives a class this module's names, to replace it in ``sys.modules``."""

    def __getattr__(cls, name: str) -> Any:
        try:
            return globals()[name]
        except KeyError:
            raise AttributeError(f"module 'apex_te.autocast' has no attribute {name!r}") from None

    def __dir__(cls) -> list[str]:
        return sorted({*super().__dir__(), *__all__})


class autocast(fp8_autocast, metaclass=_ModuleNames):
    """``fp8_autocast`` under Transformer Engine's newer name, with the same arguments."""

    __slots__ = ()

    def __repr__(self) -> str:
        return (
            f"autocast(enabled={self.enabled}, calibrating={self.calibrating}, "
            f"recipe={self.recipe!r}, amax_reduction_group={self.group!r})"
        )


_run_eagerly(fp8_autocast.__init__, fp8_autocast.__enter__, fp8_autocast.__exit__)


def is_fp8_enabled() -> bool:
    """Returns True if the innermost ``fp8_autocast`` region of this thread is enabled."""
    region = local.region
    return region is not None and region.enabled


def get_fp8_recipe() -> Recipe:
    """Returns the recipe of this thread's innermost region; outside, ``DelayedScaling()``."""
    region = local.region
    return _DEFAULT_RECIPE if region is None else region.recipe
