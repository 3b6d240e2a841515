"""Modules whose GEMMs are split over ranks, and modules made of other modules."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.nn.modules.module import _has_any_global_hook as has_global_hook

from ...comm.agreement import check_same
from ...comm.collectives import world_size
from ...comm.shards import note_group
from ...fp8.autocast import is_process_group, local
from ...runtime.named_arguments import check_count, check_flags, check_ints, did_you_mean, renamed
from .arguments import params_dtype_of, shown_name
from .fp8_module import FP8Module
from .gemm import GemmOptions
from .tensor_parallel import TensorParallel

# Arguments of constructors that become attributes of the module as they are.
_OPTIONS = (
    "return_bias", "fuse_wgrad_accumulation", "delay_wgrad_compute", "save_original_input",
    "init_method", "output_layer_init_method", "name", "num_gemms", "in_features", "out_features",
    "hidden_size", "ffn_hidden_size", "activation", "activation_params", "set_parallel_mode",
    "checkpoint",
)  # fmt: skip


class CompositeModule(torch.nn.Module):
    """Module that has parameters only in its child modules."""

    _get_name = shown_name

    def reset_parameters(self) -> None:
        """Sets the parameters of all child modules to new initial values, in place.

        Parameters on the meta device first get memory; see ``Linear.reset_parameters``.
        """
        self._call_children("reset_parameters")

    def set_tensor_parallel_group(self, tp_group: Any) -> None:
        """Sets the ranks over which the child modules are split; call it before the first forward.

        Args:
            tp_group: a ``torch.distributed.ProcessGroup`` of ``tp_size`` ranks. None removes the
                group; forward then raises ValueError if it needs one.

        Raises:
            TypeError: ``tp_group`` is neither a process group nor None.
            ValueError: ``tp_group`` does not have ``tp_size`` ranks.
        """
        try:
            self._call_children("set_tensor_parallel_group", tp_group)
        except (TypeError, ValueError) as error:
            better = renamed(error, type(self).__name__, ("tp_group",), {})
            if better is None:
                raise
            raise better from error.__cause__

    def _call_children(self, method: str, *args: Any) -> None:
        """Calls the method named ``method`` on each child module that has one."""
        for child in self.children():
            call: Any = getattr(child, method, None)
            if call is not None:
                call(*args)


def is_observed(module: torch.nn.Module, ran_hooks: bool = False) -> bool:
    """Returns True if the module has a hook or a replaced ``forward`` that must see its calls.

    ``ran_hooks``: the caller has run the module's hooks before a forward.
    """
    return bool(
        module._forward_hooks
        or (module._forward_pre_hooks and not ran_hooks)
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in module.__dict__
        or has_global_hook()
    )


def takes_residual(module: torch.nn.Module) -> bool:
    """Returns True if ``module.forward_with_residual`` may be called instead of the module.

    Wrappers (for checkpointing, sharding, compiling) pass this method through, and a call of it
    would bypass them.
    """
    return hasattr(type(module), "forward_with_residual") and not is_observed(module)


# Attributes of a module that decide on its collectives.
_COMPARED = (
    "parallel_mode", "set_parallel_mode", "sequence_parallel", "activation", "normalization",
    "fuse_wgrad_accumulation", "delay_wgrad_compute", "save_original_input",
)  # fmt: skip


def checked_mode(owner: str, parallel_mode: Any) -> str | None:
    """Returns ``parallel_mode`` in lower case: None, ``"column"`` or ``"row"``."""
    mode = parallel_mode.lower() if isinstance(parallel_mode, str) else parallel_mode
    if mode not in (None, "column", "row"):
        raise ValueError(
            f"{owner}: parallel_mode must be None, 'column' or 'row', got {parallel_mode!r}"
            + did_you_mean(parallel_mode, ("column", "row"))
        )
    return mode


def checked_tp_size(owner: str, tp_group: Any, tp_size: Any) -> int:
    """Returns the number of tensor-parallel ranks: that of ``tp_group``, or ``tp_size``."""
    check_ints(owner, tp_size=tp_size)
    if tp_group is None:
        return tp_size
    if not is_process_group(tp_group):
        raise TypeError(
            f"{owner}: tp_group must be a torch.distributed.ProcessGroup, "
            f"got {type(tp_group).__name__}"
        )
    ranks = world_size(tp_group)
    if tp_size not in (1, ranks):
        raise ValueError(
            f"{owner}: tp_size must be the {ranks} ranks of tp_group or left out, got {tp_size}"
        )
    return ranks


def divided(owner: str, name: str, value: int, ranks: int) -> int:
    """Returns ``value / ranks``; ValueError if ``ranks`` does not divide the size ``name``."""
    if value % ranks:
        raise ValueError(
            f"{owner}: {name} must be a multiple of the {ranks} tensor-parallel ranks, got {value}"
        )
    return value // ranks


def tag(
    parameter: torch.Tensor | None, dim: int | None, sequence_parallel: bool, group: Any = None
) -> None:
    """Sets the attributes of a parameter that Megatron-style trainers read.

    ``dim`` is the dimension split over ranks, or None. With ``sequence_parallel`` a parameter that
    is not split sees only this rank's rows, so that each rank's gradient is a part of the sum.
    """
    if parameter is None:
        return
    parameter.tensor_model_parallel = dim is not None  # type: ignore[attr-defined]
    parameter.partition_dim = -1 if dim is None else dim  # type: ignore[attr-defined]
    parameter.partition_stride = 1  # type: ignore[attr-defined]
    parameter.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]
    if dim is not None:
        note_group(parameter, group)


_TAGS = (
    "tensor_model_parallel", "partition_dim", "partition_stride", "sequence_parallel",
    "tensor_parallel_group", "allreduce",
)  # fmt: skip


class GroupHolder:
    """Holder of a process group, which ``copy.deepcopy`` shares and pickle replaces by None."""

    def __init__(self, group: Any) -> None:
        self.group = group

    def __deepcopy__(self, memo: Any) -> GroupHolder:
        return self

    def __reduce__(self) -> Any:
        return GroupHolder, (None,)


_Group = GroupHolder  # its name in saved files


class ParallelModule(FP8Module):
    """FP8 module whose GEMMs may be split over tensor-parallel ranks.

    Attributes:
        tp_group: the ``torch.distributed.ProcessGroup`` of the ranks, None until it is known.
        tp_size: the number of the ranks.
        sequence_parallel: True if dimension 0 of the module's input or output is split over several
            ranks.
        get_rng_state_tracker: function that returns the tracker of random states from which split
            weights are drawn; or None.
        rng_tracker_name: the name of the sequence of random numbers in the tracker; or None.
    """

    tp_group: Any
    tp_size: int
    sequence_parallel: bool
    get_rng_state_tracker: Callable[[], Any] | None
    rng_tracker_name: str | None
    use_bias: bool
    return_bias: bool
    init_method: Callable[[torch.Tensor], Any] | None
    name: str | None
    # The last arguments and result of _split_options: (options, modes, options of each GEMM).
    _split: tuple[GemmOptions, tuple[str | None, ...], tuple[GemmOptions, ...]] | None = None

    def _take_options(self, given: dict[str, Any], *sizes: str, gemms: int = 1) -> torch.dtype:
        """Initialises the module from its constructor's arguments; returns the parameters' dtype.

        ``given`` has the arguments by name, ``locals()`` of the constructor; ``sizes`` names those
        that must be counts.
        """
        owner = type(self).__name__
        dtype = params_dtype_of(owner, given["params_dtype"], given["dtype"])
        for name in sizes:
            check_count(owner, name, given[name])
        torch.nn.Module.__init__(self)
        self.use_bias = bool(given["bias"])
        for name in _OPTIONS:
            if name in given:
                setattr(self, name, given[name])
        if "parallel_mode" in given:
            self.parallel_mode = checked_mode(owner, given["parallel_mode"])
        self._make_parallel(
            given["tp_group"], given["tp_size"], given["sequence_parallel"],
            given["get_rng_state_tracker"], given.get("rng_tracker_name"),
        )  # fmt: skip
        self._make_fp8_state(gemms)
        return dtype

    def _shown_options(self) -> str:
        """Returns the options for ``extra_repr`` that are set."""
        names = ("return_bias", "fuse_wgrad_accumulation", "delay_wgrad_compute",
                 "save_original_input")  # fmt: skip
        return "".join(f", {name}=True" for name in names if getattr(self, name))

    def _make_parallel(
        self,
        tp_group: Any,
        tp_size: int,
        sequence_parallel: bool,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        rng_tracker_name: str | None = None,
    ) -> None:
        """Checks and sets the attributes; the arguments are those of ``Linear``."""
        owner = type(self).__name__
        check_flags(owner, sequence_parallel=sequence_parallel)
        if get_rng_state_tracker is not None and not callable(get_rng_state_tracker):
            raise TypeError(
                f"{owner}: get_rng_state_tracker must be a callable, "
                f"got {type(get_rng_state_tracker).__name__}"
            )
        self.tp_size = checked_tp_size(owner, tp_group, tp_size)
        if tp_size > 1 and vars(self).get("parallel_mode", "") is None:
            warnings.warn(
                f"{owner}: tp_size={tp_size} is ignored without parallel_mode='column' or 'row'",
                stacklevel=5,
            )
        self.tp_group = tp_group
        self.sequence_parallel = sequence_parallel and self.tp_size > 1
        self.get_rng_state_tracker = get_rng_state_tracker
        self.rng_tracker_name = rng_tracker_name
        self._collectives: dict[bool, TensorParallel] = {}
        self._split = None
        self._compared = self.tp_size == 1

    def set_tensor_parallel_group(self, tp_group: Any) -> None:
        """Sets the ranks over which the module is split; call it before the first forward.

        Args:
            tp_group: a ``torch.distributed.ProcessGroup`` of ``tp_size`` ranks. None removes the
                group; forward then raises ValueError if it needs one.

        Raises:
            TypeError: ``tp_group`` is neither a process group nor None.
            ValueError: ``tp_group`` does not have ``tp_size`` ranks.
        """
        owner = type(self).__name__
        if tp_group is not None:
            ranks = checked_tp_size(owner, tp_group, 1)
            if ranks != self.tp_size:
                raise ValueError(
                    f"{owner}: tp_group must have the {self.tp_size} ranks of tp_size, got {ranks}"
                )
        self.tp_group = tp_group
        for parameter in self._parameters.values():
            if parameter is not None and getattr(parameter, "tensor_model_parallel", False):
                note_group(parameter, tp_group)
        self._collectives = {}
        self._split = None
        self._compared = self.tp_size == 1

    def _parallel(self, mode: str | None) -> TensorParallel | None:
        """Returns the collectives of a GEMM with parallel mode ``mode``; None if it has none."""
        if mode is None or self.tp_size == 1:
            return None
        column = mode == "column"
        found = self._collectives.get(column)
        if found is None:
            if self.tp_group is None:
                raise ValueError(
                    f"{type(self).__name__}: set_tensor_parallel_group must be called before "
                    f"forward with tp_size={self.tp_size} and no tp_group"
                )
            found = TensorParallel(column, self.tp_group, self.sequence_parallel)
            self._collectives[column] = found
        return found

    def _split_modes(self) -> tuple[str | None, ...]:
        """Returns the parallel mode of each GEMM, or an empty tuple if none has collectives."""
        return ()

    def _split_options(self, options: GemmOptions, gemms: int) -> tuple[GemmOptions, ...]:
        modes = self._split_modes() or (None,) * gemms
        compiling, known = torch.compiler.is_compiling(), self._split
        if not compiling and known is not None and known[0] == options and known[1] == modes:
            return known[2]
        found = tuple(options._replace(parallel=self._parallel(mode)) for mode in modes)
        if not compiling:
            self._split = options, modes, found
        return found

    def _agreed_dtype(
        self,
        inp: torch.Tensor,
        features: int,
        parameters: tuple[torch.Tensor | None, ...],
        autocast: bool,
    ) -> torch.dtype:
        """Returns the dtype to compute in; the first call with gradients compares it over ranks."""
        # Asked in this order, compiled code does not depend on what only eager code changes.
        if torch.compiler.is_compiling() or self._compared or not self._may_compare(inp):
            return self._compute_dtype(inp, features, parameters, autocast)
        error = None
        try:
            dtype = self._compute_dtype(inp, features, parameters, autocast)
        except (TypeError, ValueError) as refusal:
            error = refusal
        values = {} if error is not None else self._description(inp, parameters, dtype)
        check_same(type(self).__name__, "tp_group", self.tp_group, values, inp.device, error)
        self._compared = True
        return dtype

    def _may_compare(self, inp: torch.Tensor) -> bool:
        """Returns True if this call has collectives and gradients, and the host may wait."""
        if not torch.is_grad_enabled() or self.tp_group is None or not any(self._split_modes()):
            return False
        return not (inp.is_cuda and torch.cuda.is_current_stream_capturing())

    def _description(
        self, inp: torch.Tensor, parameters: tuple[torch.Tensor | None, ...], dtype: torch.dtype
    ) -> dict[str, object]:
        """Returns, by name, the values that must be equal on all ranks for collectives to fit."""
        own = self._parameters
        trained = [name for name, p in own.items() if p is not None and p.requires_grad]
        given = [p for p in parameters if p is not None and not any(p is q for q in own.values())]
        trained += [f"operand {i}" for i, p in enumerate(given) if p.requires_grad]
        region = local.region
        if region is not None and not (region.enabled or region.calibrating):
            region = None
        values: dict[str, object] = {"class": type(self).__name__}
        values |= {name: getattr(self, name, None) for name in _COMPARED}
        values |= {
            "weight shapes": [list(p.shape) for p in parameters if p is not None and p.dim() > 1],
            "inp shape": list(inp.shape),
            "inp dtype": inp.dtype,
            "dtype": dtype,
            "inp requires_grad": inp.requires_grad,
            "trained parameters": ", ".join(trained) or "none",
            "fp8_autocast enabled": region is not None and region.enabled,
        }
        if region is None:
            return values | {"recipe": "none"}
        options = {f"recipe.{name}": value for name, value in vars(region.recipe).items()}
        return values | {"recipe": type(region.recipe).__name__} | options

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        """Moves or casts the module; parameters that leave the meta device keep their tags."""
        own = self._parameters
        tags = {
            name: {tag: getattr(p, tag) for tag in _TAGS if hasattr(p, tag)}
            for name, p in own.items()
            if p is not None and p.is_meta
        }
        result = super()._apply(fn, recurse)
        for name, kept in tags.items():
            for tag, value in kept.items():
                setattr(own[name], tag, value)
        return result

    def _forked(self, split: bool) -> AbstractContextManager[Any]:
        """Returns a context in which a parameter's values are drawn; split ones use the tracker."""
        make = self.get_rng_state_tracker
        if make is None or not split:
            return contextlib.nullcontext()
        tracker = make()
        return tracker.fork(self.rng_tracker_name) if self.rng_tracker_name else tracker.fork()

    def __getstate__(self) -> dict[str, Any]:
        """Returns the attributes for a copy or pickle, ``tp_group`` in a ``GroupHolder``."""
        kept = super().__getstate__()
        kept["tp_group"] = GroupHolder(self.tp_group)
        kept["_collectives"] = {}
        kept.pop("_split", None)
        kept["_compared"] = self.tp_size == 1
        return kept

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({**state, "tp_group": state["tp_group"].group})
