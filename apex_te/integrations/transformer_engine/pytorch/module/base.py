"""Base classes of the alias modules, and buffers that frameworks ask Transformer Engine for."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from .....fp8.delayed.update import flush_fp8_state
from .....fp8.parameter.parameter import FP8Parameter
from .....module._core.fp8_module import FP8Module
from ..._arguments import constructor
from ..._device import current_gpu
from ..._extra_state import ExtraState
from ..._names import named, not_served
from ...common.recipe import DelayedScaling, as_alias

__all__ = [
    "GemmModule", "TransformerEngineBaseModule", "UserBufferQuantizationMode", "destroy_ub",
    "get_dummy_wgrad", "get_workspace", "initialize_ub",
]  # fmt: skip

_MODULE = "transformer_engine.pytorch.module.base"
# Attributes that belong to one object in one process, and not to its copies and pickles.
_OWN = ("_fp8_meta", "_fp8_meta_of", "_wgrad_hooks", "cp_group", "cp_stream", "_context")
_WORKSPACE_BYTES = {True: 32 << 20, False: 4 << 20}  # from sm_90 on, and before

_NO_USERBUFFERS = (
    "collectives do not overlap with products through userbuffers; leave ub_* and "
    "tp_comm_overlap off"
)

initialize_ub = not_served(f"{_MODULE}.initialize_ub", _NO_USERBUFFERS)
destroy_ub = not_served(f"{_MODULE}.destroy_ub", _NO_USERBUFFERS)
UserBufferQuantizationMode = not_served(f"{_MODULE}.UserBufferQuantizationMode", _NO_USERBUFFERS)


class ParameterMeta(NamedTuple):
    """Named tuple of what frameworks ask about a parameter that is on the meta device."""

    fp8_meta_index: int | None


class Scaling:
    """Scales and amax values of a module's delayed scaling, to be read.

    ``constants.FP8FwdTensorIdx`` and ``FP8BwdTensorIdx`` say which tensor each number is of. Scales
    are updated on entering a region, so that they are those of the region entered last.
    """

    def __init__(self, state: Any, direction: str) -> None:
        self._state = state
        self._direction = direction

    @property
    def scale(self) -> torch.Tensor:
        """Returns a copy of the scales, float32, three a GEMM forward and two backward."""
        return self._read("scale")

    @property
    def scale_inv(self) -> torch.Tensor:
        """Returns a copy of the scales' inverses, in the shape of ``scale``."""
        return self._read("scale_inv")

    @property
    def amax_history(self) -> torch.Tensor:
        """Returns a copy of the amax values, float32 [length, scales]; row 0 is that of this
        region."""
        return self._read("amax_history")

    def _read(self, name: str) -> torch.Tensor:
        value: torch.Tensor = getattr(self._state, f"{name}_{self._direction}")
        return value.detach().clone()


@named(_MODULE)
class TransformerEngineBaseModule(ExtraState):
    """Base of all alias modules, by which frameworks tell Transformer Engine's modules.

    It comes before the class of apex_te that computes, in a class's bases.
    """

    name: str | None = None
    ub_name: str | None = None
    is_first_microbatch: bool | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Makes Megatron's ``sharded_state_dict`` apply pending scale updates."""
        super().__init_subclass__(**kwargs)
        method = cls.__dict__.get("sharded_state_dict")
        if method is not None:
            cls.sharded_state_dict = _after_update(method)  # type: ignore[attr-defined]

    @property
    def fp8_meta(self) -> dict[str, Any]:
        """Returns a dict that describes the module's FP8 state, to which callers may add.

        Its entries ``recipe`` (of the state or the last forward in FP8) and ``fp8_checkpoint``
        (``_extra_state`` has content) are brought up to date when they change. After a forward with
        delayed scaling it has ``scaling_fwd`` and ``scaling_bwd``, a ``Scaling`` each.
        """
        meta = self.__dict__.get("_fp8_meta")
        if meta is None:
            meta = self.__dict__["_fp8_meta"] = {"fp8_checkpoint": False, "recipe": None}
            meta["num_gemms"] = self.fp8_state.gemms if isinstance(self, FP8Module) else 0
        if "scaling_fwd" not in meta and isinstance(self, FP8Module) and self.fp8_state.allocated:
            meta["scaling_fwd"] = Scaling(self.fp8_state, "fwd")
            meta["scaling_bwd"] = Scaling(self.fp8_state, "bwd")
        recipe = self._fp8.recipe if isinstance(self, FP8Module) else None
        meta["fp8_checkpoint"] = recipe is not None
        if meta["recipe"] is None:
            meta["recipe"] = DelayedScaling() if recipe is None else as_alias(recipe)
            self.__dict__["_fp8_meta_of"] = recipe
        elif recipe is not None and recipe is not self.__dict__["_fp8_meta_of"]:
            meta["recipe"] = as_alias(recipe)
            self.__dict__["_fp8_meta_of"] = recipe
        return meta

    @property
    def fp8(self) -> bool:
        """Returns True if the module's last forward that recorded amax values ran in FP8."""
        return (
            isinstance(self, FP8Module)
            and self._modes.recompute_fp8
            and self._fp8.recipe is not None
        )

    @property
    def fp8_calibration(self) -> bool:
        """Returns True if the module's last forward recorded amax values without FP8."""
        return isinstance(self, FP8Module) and self._modes.recompute is not None and not self.fp8

    @property
    def primary_weights_in_fp8(self) -> bool:
        """Returns True if weights of the module are held in FP8."""
        return any(type(p) is FP8Parameter for p in self._parameters.values())

    @property
    def param_init_meta(self) -> dict[str, ParameterMeta]:
        """Returns a ``ParameterMeta`` for each of the module's own parameters, by name."""
        found, index = {}, 0
        for name, parameter in self._parameters.items():
            held = type(parameter) is FP8Parameter
            found[name] = ParameterMeta(index if held else None)
            index += held
        return found

    def init_fp8_metadata(self, num_gemms: int = 1) -> None:
        """Checks the number of GEMMs; the FP8 state exists from the constructor on."""
        own = self.fp8_state.gemms if isinstance(self, FP8Module) else num_gemms
        if num_gemms != own:
            raise ValueError(
                f"{type(self).__name__}: num_gemms must be {own}, that of the constructor, "
                f"got {num_gemms}"
            )

    def _validate_name(self) -> None:
        """Gives the module a name if it has none, and checks it."""
        if self.name is None:
            number = self._fp8.number if isinstance(self, FP8Module) else id(self)
            self.name = f"{type(self).__name__}_{number}"
        if not isinstance(self.name, str):
            raise TypeError(
                f"{type(self).__name__}: name must be a string, got {type(self.name).__name__}"
            )

    def reset_parameters(self, defer_init: bool = False) -> None:
        """Gives the parameters new initial values, in place.

        Parameters on the meta device are first made on PyTorch's default device, or on the current
        GPU if that device is the CPU and there is a GPU.
        """
        reset = getattr(super(), "reset_parameters", None)  # there may be no parameters
        if reset is not None and not defer_init:
            reset()

    def _constructed(self, values: dict[str, Any]) -> None:
        """Sets the attributes that constructors of apex_te do not, from all arguments by name."""

    def __getstate__(self) -> dict[str, Any]:
        """Returns the attributes for a copy or pickle, without hooks and ``fp8_meta``."""
        above = getattr(super(), "__getstate__", None)  # Python 3.10's object has none
        kept = dict(self.__dict__ if above is None else above())
        for name in _OWN:
            kept.pop(name, None)
        return kept


def norm_constructor(owner: str, native: Any) -> Any:
    """Returns the constructor of a norm, for which ``sequence_parallel=None`` stands for False."""

    def prepare(values: dict[str, Any]) -> None:
        values["sequence_parallel"] = bool(values["sequence_parallel"])

    return constructor(
        owner,
        native,
        "normalized_shape, eps, sequence_parallel: bool | None = None, params_dtype, "
        "zero_centered_gamma, hidden_size, *, device, dtype",
        prepare,
    )


def _after_update(method: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a method that all ranks call together, with the pending scale update before it."""

    @functools.wraps(method)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        flush_fp8_state()
        return method(*args, **kwargs)

    return wrapped


class GemmModule(TransformerEngineBaseModule):
    """Base of the alias modules that have weights of GEMMs themselves."""

    apply_bias: bool
    use_bias: bool
    return_bias: bool

    def _constructed(self, values: dict[str, Any]) -> None:
        assert isinstance(self, FP8Module)
        self.ub_name = values.get("ub_name")
        self.apply_bias = self.use_bias and not self.return_bias
        self._mark_weights()

    def reset_parameters(self, defer_init: bool = False) -> None:
        """Gives the parameters new initial values; see ``TransformerEngineBaseModule``."""
        super().reset_parameters(defer_init)
        self._mark_weights()  # those that left the meta device are new

    def _mark_weights(self) -> None:
        """Tells data-parallel wrappers which gradients ``backward_dw`` makes."""
        assert isinstance(self, FP8Module)
        if not self.delay_wgrad_compute:
            return
        for names in self._gemm_weights():
            for name in names:
                weight: Any = self._parameters[name]
                weight.skip_backward_post_hook = True

    def need_backward_dw(self) -> bool:
        """Returns True if ``backward_dw`` makes the weight gradients (``delay_wgrad_compute``)."""
        assert isinstance(self, FP8Module)
        return self.delay_wgrad_compute

    def register_wgrad_accumulation_and_reduce_hooks(
        self, wgrad_accumulation_and_reduce_hook: Callable[[], Any]
    ) -> None:
        """Registers a function that ``backward_dw`` calls when it has made the weight gradients."""
        hooks = self.__dict__.setdefault("_wgrad_hooks", [])
        hooks.append(wgrad_accumulation_and_reduce_hook)

    def backward_dw(self) -> None:
        """Makes the weight gradients that backward left out, then calls the registered hooks."""
        assert isinstance(self, FP8Module)
        if not self._modes.wgrad_store:
            return
        FP8Module.backward_dw(self)
        for hook in self.__dict__.get("_wgrad_hooks", ()):
            hook()


_dummies: dict[tuple[tuple[int, ...], torch.dtype, torch.device], torch.Tensor] = {}
_workspaces: dict[torch.device, torch.Tensor] = {}


@named(_MODULE)
def get_dummy_wgrad(shape: Sequence[int], dtype: torch.dtype, zero: bool = False) -> torch.Tensor:
    """Returns a tensor to give to autograd for a weight whose gradient went into ``main_grad``.

    Returns:
        A tensor on the current GPU, or on the CPU where there is none. Tensors of one shape and
        dtype share their memory.
    """
    key = (tuple(shape), dtype, current_gpu() or torch.device("cpu"))
    dummy = _dummies.get(key)
    if dummy is None:
        dummy = _dummies[key] = torch.zeros(key[0], dtype=dtype, device=key[2])
    if zero:
        dummy.zero_()
    return dummy.detach()


@named(_MODULE)
def get_workspace() -> torch.Tensor:
    """Returns a buffer of bytes on the current GPU, or the CPU, for callers of cuBLASLt."""
    device = current_gpu() or torch.device("cpu")
    found = _workspaces.get(device)
    if found is None:
        is_new = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
        size = _WORKSPACE_BYTES[is_new]
        found = _workspaces[device] = torch.empty(size, dtype=torch.uint8, device=device)
    return found
