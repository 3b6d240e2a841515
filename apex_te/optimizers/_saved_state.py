"""State of the fused optimizers as it is stored, saved and loaded."""

from __future__ import annotations

from collections import defaultdict
from typing import Any, ClassVar

import torch

from ._bucket import MASTER, STEP, State, has_master, needs_copy, new_state
from ._narrow_state import SCALED, master_of_halves, remainder_of, scaled, unscaled
from ._sharded import local, placed, with_part

# Attributes that are pickled besides those of ``torch.optim.Optimizer``.
_OPTIONS = ("capturable", "master_weights", "set_grad_none", "_moment_dtypes", "_master_dtype",
            "_scales", "_given", "use_decoupled_grad", "store_param_remainders")  # fmt: skip


class _Kept:
    """Box that keeps torch's ``load_state_dict`` from casting a tensor to the parameter's dtype."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class SavingOptimizer(torch.optim.Optimizer):
    """Base of ``FusedOptimizer`` that stores, saves and loads the state of parameters.

    A subclass defines ``_prepare_group``, and sets the attributes in ``_OPTIONS``.
    """

    capturable: bool
    master_weights: bool
    set_grad_none: bool
    _moment_dtypes: dict[str, torch.dtype]
    # Scales of scaled state, by parameter and key.
    _scales: dict[torch.Tensor, dict[str, torch.Tensor]]
    # Master weights that the user has passed, by parameter.
    _given: dict[torch.Tensor, torch.Tensor]
    # What steps have prepared, by the position of the group; a load drops it.
    _plans: dict[int, Any]
    # The states for which the plans were made, in the order of ``self.state``.
    _planned: list[State]

    # What an optimizer that was pickled by an earlier release does not have.
    use_decoupled_grad: bool = False
    store_param_remainders: bool = False
    _master_dtype: torch.dtype = torch.float32

    # Keys that the loaded state of a parameter must have.
    _required_state: ClassVar[tuple[str, ...]] = ()

    @property
    def _name(self) -> str:
        return type(self).__name__

    def _prepare_group(self, group: dict[str, Any]) -> None:
        """Fills in and checks the options of a group that was added or loaded."""
        raise NotImplementedError

    # State as it is stored.

    def _master_dtype_of(self, param: torch.Tensor) -> torch.dtype | None:
        """Returns the stored dtype of the master weight, int16 for a low half, None without one."""
        if not self.master_weights or not has_master(param):
            return None
        if self._keeps_remainder(param):
            return torch.int16
        return self._master_dtype

    def _keeps_remainder(self, param: torch.Tensor) -> bool:
        """Returns True if the state of ``param`` has the low half of its master weight alone."""
        is_half = param.dtype is torch.bfloat16 and not needs_copy(param)
        return self.store_param_remainders and is_half and self._master_dtype is torch.float32

    def _put(
        self, param: torch.Tensor, name: str, number: torch.Tensor, dtype: torch.dtype
    ) -> None:
        """Stores float32 numbers as new state of ``param``, in ``dtype``."""
        part = local(number)
        if dtype in SCALED:
            stored = torch.zeros_like(part, dtype=dtype)
            scale = torch.ones((), dtype=torch.float32, device=part.device)
            scaled(part, stored, scale)
            self._scales.setdefault(param, {})[name] = scale
            part = stored
        else:
            part = part.to(dtype)
        self.state[param][name] = with_part(param, part)

    # Saving and loading.

    def __getstate__(self) -> dict[str, Any]:
        kept = {**super().__getstate__(), **{name: getattr(self, name) for name in _OPTIONS}}
        # As bytes: pickle.loads cannot make an FP8 tensor of what pickle.dumps has written.
        states = {param: dict(state) for param, state in self.state.items()}
        for param, name, value in self._fp8_moments():
            states[param][name] = with_part(param, local(value).view(torch.uint8))
        return {**kept, "state": defaultdict(dict, states)}

    def _fp8_moments(self, stored: torch.dtype = torch.float8_e4m3fn) -> list[tuple[Any, str, Any]]:
        """Returns parameter, key and tensor of each FP8 moment whose dtype is ``stored``."""
        narrow = [n for n, dtype in self._moment_dtypes.items() if dtype is torch.float8_e4m3fn]
        found = [(param, n, state.get(n)) for param, state in self.state.items() for n in narrow]
        return [each for each in found if isinstance(each[2], torch.Tensor)
                and each[2].dtype is stored]  # fmt: skip

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for name in ("_scales", "_given"):  # which earlier releases did not pickle
            self.__dict__.setdefault(name, {})
        self._plans, self._planned = {}, []
        for param, name, value in self._fp8_moments(torch.uint8):
            self.state[param][name] = with_part(param, local(value).view(torch.float8_e4m3fn))
        for param, kept in self.state.items():
            if any(isinstance(value, _Kept) for value in kept.values()):
                self._take(param, kept)
        for group in self.param_groups:
            self._prepare_group(group)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state dict in the form of ``torch.optim``.

        State that is stored scaled in a narrower dtype is returned as float32. If a bf16 parameter
        holds the high half of its master weight (``store_param_remainders``), ``master_param`` is
        the low half as an int16 tensor.
        """
        found = super().state_dict()
        states = found["state"]
        for saved, group in zip(found["param_groups"], self.param_groups, strict=True):
            for key, param in zip(saved["params"], group["params"], strict=True):
                scales = self._scales.get(param)
                if scales and key in states:
                    wide = {name: self._number(param, name) for name in scales}
                    states[key] = {**states[key], **wide}
        return found

    def _number(self, param: torch.Tensor, name: str) -> torch.Tensor:
        """Returns state of ``param`` in float32; an int16 remainder as it is."""
        stored = self.state[param][name]
        if stored.dtype in (torch.float32, torch.int16):
            return stored
        part = local(stored)
        with torch.no_grad():
            scale = self._scales.get(param, {}).get(name)
            return with_part(param, part.float() if scale is None else unscaled(part, scale))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state dict of this class, or of the same algorithm in ``torch.optim``.

        Moments and master weights are converted to the dtypes that this optimizer was made with.
        Low halves (``store_param_remainders``) and whole master weights are converted to each
        other; the model's weights must then be loaded first. Step counts may be stored for each
        parameter or, as in Transformer Engine, for each group. A missing master weight is made from
        its parameter at the next step. The state of a DTensor parameter must be DTensors; use
        ``torch.distributed.checkpoint.state_dict`` to load whole tensors. After an error the
        optimizer is unchanged.

        Args:
            state_dict: result of ``state_dict()``.

        Raises:
            TypeError: ``state_dict`` is not a dict, or the state is a DTensor but its parameter is
                not, or the reverse.
            ValueError: the state has another shape, mesh or number of parameters, is that of
                another optimizer, or has a master weight to be stored as a low half that does not
                round to its parameter.
        """
        self._check_saved(state_dict)
        # The last of the hooks, so that the others see tensors.
        handle = self.register_load_state_dict_pre_hook(_keep_dtypes)
        names = ("state", "param_groups", "defaults", "_plans", "_planned")
        before = {name: getattr(self, name) for name in names}  # which a load replaces
        before["_scales"] = {param: dict(scales) for param, scales in self._scales.items()}
        try:
            super().load_state_dict(self._adapted(state_dict))
        except BaseException:
            self.__dict__.update(before)
            raise
        finally:
            handle.remove()

    def _check_saved(self, state_dict: Any) -> None:
        """Checks that a state dict is a dict as of an optimizer."""
        if not isinstance(state_dict, dict):
            raise TypeError(
                f"{self._name}: state_dict must be a dict, got {type(state_dict).__name__}"
            )
        missing = [key for key in ("state", "param_groups") if key not in state_dict]
        if missing:
            raise ValueError(
                f"{self._name}: state_dict must be that of an optimizer, with state and "
                f"param_groups, got one without {' and '.join(missing)}"
            )

    def _adapted(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Returns a state dict with its step counts where this class keeps them."""
        return _steps_of_groups(state_dict)

    def _take(self, param: torch.Tensor, kept: State) -> None:
        """Converts the loaded state of ``param`` to the dtypes of this optimizer, in place."""
        if "max_exp_avg_sq" in kept:
            raise ValueError(f"{self._name}: state_dict must be without amsgrad, got its state")
        for name in (n for n in self._required_state if n not in kept):
            raise ValueError(f"{self._name}: state_dict must have {name}, got {sorted(kept)}")
        for name, value in list(kept.items()):
            tensor = value.tensor if isinstance(value, _Kept) else value
            if name == STEP:
                kept[name] = int(tensor)
            elif name == MASTER:
                if self._master_dtype_of(param) is None:
                    raise ValueError(
                        f"{self._name}: state_dict must be without master weights for a parameter "
                        f"of {param.dtype} with master_weights={self.master_weights}"
                    )
                self._load_master(param, tensor)
            elif name in self._moment_dtypes:
                if tensor is None:  # torch.optim.SGD without momentum
                    del kept[name]
                else:
                    self._load(param, name, tensor, self._moment_dtypes[name])
            else:
                kept[name] = tensor

    def _load_master(self, param: torch.Tensor, value: torch.Tensor) -> None:
        """Stores a loaded float32 master weight of ``param``, or the int16 low half of one."""
        self._check_shape(param, MASTER, value)
        dtype = self._master_dtype_of(param)
        assert dtype is not None
        with torch.no_grad():
            given, part = local(placed(self._name, MASTER, value, param)), local(param)
            given = given.to(part.device)
            if given.dtype is torch.int16 and dtype is not torch.int16:
                if part.dtype is not torch.bfloat16 or needs_copy(part):
                    raise ValueError(
                        f"{self._name}: state_dict must have whole master weights for a parameter "
                        f"of {param.dtype}, got low halves"
                    )
                given = master_of_halves(part, given)
            elif dtype is torch.int16 and given.dtype is not torch.int16:
                given = remainder_of(self._name, part, given.float())
            self._load(param, MASTER, with_part(param, given), dtype)
            users = self._given.get(param)
            if users is not None:
                users.copy_(self.state[param][MASTER])
                self.state[param][MASTER] = users

    def _load(
        self, param: torch.Tensor, name: str, value: torch.Tensor, dtype: torch.dtype
    ) -> None:
        """Stores loaded state of ``param`` in new memory, in ``dtype``."""
        self._check_shape(param, name, value)
        with torch.no_grad():
            state = new_state(param, torch.float32 if dtype in SCALED else dtype)
            local(state).copy_(local(placed(self._name, name, value, param)))
            self._put(param, name, state, dtype)

    def _check_shape(self, param: torch.Tensor, name: str, value: torch.Tensor) -> None:
        """Raises ValueError if loaded state has another shape than its parameter."""
        if value.shape != param.shape:
            raise ValueError(
                f"{self._name}: {name} must have shape {list(param.shape)}, got {list(value.shape)}"
            )


def _keep_dtypes(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Puts the tensors of a state dict in boxes, which torch does not cast (a pre-hook)."""
    groups = (optimizer.param_groups, state_dict["param_groups"])
    sizes, saved = ([len(group["params"]) for group in each] for each in groups)
    if saved != sizes:
        raise ValueError(
            f"{type(optimizer).__name__}: state_dict must have groups of {sizes} parameters, "
            f"got {saved}"
        )

    def kept(values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        return {n: _Kept(v) if isinstance(v, torch.Tensor) else v for n, v in values.items()}

    known = {key for group in state_dict["param_groups"] for key in group["params"]}
    states = {k: kept(v) if k in known else v for k, v in state_dict["state"].items()}
    return {**state_dict, "state": states}


def _steps_of_groups(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Returns a state dict with the step counts of groups moved to the parameters' states."""
    groups = state_dict["param_groups"]
    if not any(STEP in group for group in groups):
        return state_dict
    states = dict(state_dict["state"])
    for group in groups:
        for key in group["params"]:
            if STEP in group and states.get(key):
                states[key] = {STEP: group[STEP], **states[key]}
    groups = [{n: v for n, v in group.items() if n != STEP} for group in groups]
    return {**state_dict, "state": states, "param_groups": groups}
