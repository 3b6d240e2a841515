"""Base of the fused optimizers: options, master weights, buckets and the step."""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from typing import Any, ClassVar, NamedTuple

import torch

from ..runtime import moved
from ..runtime.fp8_copies import keepers_of
from ..runtime.named_arguments import nearest, renamed
from ._bucket import (
    MASTER,
    STEP,
    Bucket,
    State,
    follow_format,
    has_master,
    needs_copy,
    new_master,
    new_state,
    refuse_shared,
)
from ._bucket import partition as _partition
from ._narrow_state import SCALED, stored_dtype
from ._saved_state import SavingOptimizer
from ._scalars import Scalars
from ._sharded import local

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_GRAD, _LAYOUT = operator.attrgetter("grad"), operator.attrgetter("layout")


class Work(NamedTuple):
    """Bucket that a step updates, its parameter group, and this rank's gradients in its order."""

    group: dict[str, Any]
    bucket: Bucket
    grads: list[torch.Tensor]


def _check_container(owner: str, params: Any) -> None:
    """Raises TypeError unless ``params`` is what parameters can be taken from, one by one."""
    instead = None
    if isinstance(params, torch.nn.Module):
        instead = "pass its parameters()"
    elif isinstance(params, torch.Tensor):
        instead = "pass a list of it"
    elif isinstance(params, dict):
        instead = "pass its values()"
    elif callable(params):
        instead = "call it"
    elif isinstance(params, str) or not isinstance(params, Iterable):
        instead = "pass model.parameters()"
    if instead is not None:
        raise TypeError(
            f"{owner}: params must be a list or generator of parameters or groups, "
            f"got {type(params).__name__}; {instead}"
        )


class FusedOptimizer(SavingOptimizer):
    """Base of the fused optimizers, whose subclasses define ``_update``, which updates parameters.

    ``defaults`` are a group's options by name, ``moment_dtypes`` the dtypes of moments by their
    keys in a parameter's state; the other arguments are those of ``FusedAdam``.
    """

    # Dtypes in which an optimizer of the class can keep its state.
    _moment_choices: ClassVar[tuple[torch.dtype, ...]] = (torch.float32, torch.bfloat16)
    _master_choices: ClassVar[tuple[torch.dtype, ...]] = (torch.float32,)

    # torch.amp.GradScaler leaves unscaling and skipping to step(), so nothing waits for the device.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: Any,
        defaults: dict[str, Any],
        *,
        capturable: bool,
        master_weights: bool | Sequence[torch.Tensor | None] | None,
        master_weight_dtype: torch.dtype,
        set_grad_none: bool,
        moment_dtypes: dict[str, torch.dtype],
    ) -> None:
        self._check("master_weight_dtype", master_weight_dtype, self._master_choices)
        for name, dtype in moment_dtypes.items():
            self._check(f"{name}_dtype", dtype, self._moment_choices)
        _check_container(self._name, params)
        params = list(params)
        if not params:
            raise ValueError(
                f"{self._name}: params must hold a parameter at least, got none (a generator "
                "gives its items once)"
            )
        is_flag = master_weights is None or isinstance(master_weights, (bool, int))
        if isinstance(master_weights, str):
            raise TypeError(
                f"{self._name}: master_weights must be a bool or a list of tensors, "
                f"got {master_weights!r}"
            )
        given = None if is_flag else list(master_weights)  # type: ignore[arg-type]
        self.capturable = capturable
        self.set_grad_none = set_grad_none
        self.master_weights = bool(master_weights) if given is None else True
        self._moment_dtypes = {n: stored_dtype(d) for n, d in moment_dtypes.items()}
        self._master_dtype = master_weight_dtype
        self._scales, self._given = {}, {}
        self._plans, self._planned = {}, []
        super().__init__(params, defaults)
        if given is not None:
            self._take_masters(given)

    def _take_masters(self, given: list[torch.Tensor | None]) -> None:
        """Makes the tensors of a list the master weights of the parameters, in their order."""
        self._check("master_weight_dtype", self._master_dtype, (torch.float32,))
        params = [param for group in self.param_groups for param in group["params"]]
        if len(given) != len(params):
            raise ValueError(
                f"{self._name}: master_weights must be a list of {len(params)} tensors, one for "
                f"each parameter, got {len(given)}"
            )
        if self.store_param_remainders:
            raise ValueError(
                f"{self._name}: master_weights must be a bool with store_param_remainders=True, "
                "got a list"
            )
        for param, master in zip(params, given, strict=True):
            if id(master) == id(param) and not has_master(param):
                continue  # param.float()
            if (master is not None) != has_master(param):
                raise ValueError(
                    f"{self._name}: master_weights must have None for plain float32 parameters, "
                    "or the parameter itself, and a tensor for others, got "
                    f"{type(master).__name__} for one of {param.dtype}"
                )
            if master is None:
                continue
            self._check("master_weights", master.dtype, (torch.float32,))
            if master.shape != param.shape or master.device != param.device:
                raise ValueError(
                    f"{self._name}: master_weights must have shape {list(param.shape)} on "
                    f"{param.device}, got {list(master.shape)} on {master.device}"
                )
            self.state[param][MASTER] = self._given[param] = master

    # What each optimizer defines.

    def _moments(self, group: dict[str, Any]) -> tuple[str, ...]:
        """Returns the keys of the moments in the state of each parameter of ``group``."""
        return tuple(self._moment_dtypes)

    def _counts_steps(self, group: dict[str, Any]) -> bool:
        """Returns True if the state of each parameter of ``group`` has a step count."""
        return True

    def _step_of(self, group: dict[str, Any], bucket: Bucket) -> int | torch.Tensor | None:
        """Returns the number of the step that updates ``bucket``."""
        return bucket.step

    def _check_group(self, group: dict[str, Any]) -> None:
        """Raises TypeError or ValueError if an option of ``group`` is not a number in its range."""
        for name in ("lr", "weight_decay", "eps"):
            if name == "lr" and isinstance(group[name], torch.Tensor):
                if group[name].numel() != 1:
                    raise ValueError(
                        f"{self._name}: lr must be a float or a tensor of one element, got a "
                        f"tensor of shape {list(group[name].shape)}"
                    )
            elif name in group:
                self._at_least_zero(name, group[name])
                if math.isinf(group[name]):
                    raise ValueError(f"{self._name}: {name} must be finite, got {group[name]}")
        if "betas" not in group:
            return
        betas = group["betas"]
        if not isinstance(betas, (tuple, list)) or len(betas) != 2:
            raise ValueError(f"{self._name}: betas must be a tuple of two floats, got {betas!r}")
        for beta in betas:
            self._check_number("betas", beta)
            if not 0.0 <= beta < 1.0:
                raise ValueError(f"{self._name}: betas must be at least 0 and below 1, got {beta}")

    def _update(self, work: list[Work], scalars: Scalars) -> None:
        """Updates every bucket of ``work``, its gradients unscaled by ``scalars``."""
        raise NotImplementedError

    # The step.

    def step(self, closure: Callable[[], Any] | None = None, **options: Any) -> Any:
        """Updates the parameters that have a gradient.

        Args:
            closure: re-evaluates the model and returns the loss.
            grad_scaler: keyword only; a ``torch.amp.GradScaler``. The gradients are divided by the
                scaler's scale, and the step is skipped if the scaler found non-finite gradients;
                the host does not wait. ``grad_scaler.step(optimizer)`` has the same effect. As with
                torch's fused optimizers, a step that is taken leaves the gradients unscaled, and
                one that is skipped leaves them scaled.

        Returns:
            The result of ``closure``, None without a closure.

        Raises:
            NotImplementedError: a gradient is sparse, or ``grad_scaler`` is given with
                ``use_decoupled_grad``.
            RuntimeError: a CUDA graph is being captured, but ``capturable`` is False or no step has
                run outside the graph; or ``grad_scaler.update()`` was not called since the last
                step.
            TypeError: an argument is unknown, or a gradient is a DTensor but its parameter is not.
            ValueError: a gradient is on another mesh than its parameter, FP8 parameters have no
                master weights, parameters share memory, or a parameter is on the meta device.
        """
        # Not in the signature: GradScaler would hand itself over, and warn that it stops doing so.
        grad_scaler = options.pop("grad_scaler", None)
        if options:
            raise TypeError(f"{self._name}: step has no argument {next(iter(options))!r}")
        loss = None
        if closure is not None:
            if not callable(closure):
                raise TypeError(
                    f"{self._name}: closure must be a function that returns the loss, "
                    f"got {type(closure).__name__}"
                )
            with torch.enable_grad():
                loss = closure()
        if self.use_decoupled_grad:
            self._refuse_scaler(grad_scaler)
        with torch.no_grad():
            if self.use_decoupled_grad and not self.state:
                self._make_states_to_load()
            scalars = Scalars.of(self, grad_scaler)
            if not self._is_planned():
                self._plans.clear()
            work = [
                Work(group, bucket, bucket.grads(self._name))
                for index, group in enumerate(self.param_groups)
                for bucket in self._buckets(index, group)
            ]
            if not self._planned:
                refuse_shared(self._name, [item.bucket for item in work])
                self._planned = list(self.state.values())
            try:
                self._update(work, scalars)
            except Exception as error:
                for item in work:
                    item.bucket.retreat()
                better = renamed(error, self._name, self.defaults, {})
                if better is None:
                    raise
                raise better from error.__cause__
        return loss

    def _make_states_to_load(self) -> None:
        """Makes the states of parameters in a step that torch takes to have a state to load into.

        ``torch.distributed.checkpoint.state_dict`` takes it with rates of 0 and a ``.grad`` of
        zeros for each parameter, which an optimizer of decoupled gradients does not read.
        """
        params = [param for group in self.param_groups for param in group["params"]]
        if any(_decoupled_grad(param) is not None for param in params):
            return
        if any(float(group["lr"]) != 0.0 for group in self.param_groups):
            return
        for group in self.param_groups:
            names, counts = self._moments(group), self._counts_steps(group)
            for param in group["params"]:
                if param.grad is not None:
                    self._state_of(param, names, counts)

    def _is_planned(self) -> bool:
        """Returns True if the parameters have the states for which the buckets were prepared."""
        states = self.state.values()
        return len(states) == len(self._planned) and all(map(operator.is_, states, self._planned))

    def _refuse_scaler(self, grad_scaler: Any) -> None:
        """Raises NotImplementedError if a GradScaler takes part in a step."""
        values = (grad_scaler, *(getattr(self, n, None) for n in ("grad_scale", "found_inf")))
        if any(value is not None for value in values):
            raise NotImplementedError(
                f"{self._name}: grad_scaler must be None with use_decoupled_grad=True, since it "
                "does not see decoupled gradients, got one"
            )

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Drops or zeroes gradients, also decoupled ones, of parameters and their master weights.

        Args:
            set_to_none: True drops them, False zeroes them; None uses the constructor's
                ``set_grad_none``.
        """
        to_none = self.set_grad_none if set_to_none is None else set_to_none
        super().zero_grad(to_none)
        if self.use_decoupled_grad:
            for param in (param for group in self.param_groups for param in group["params"]):
                grad = getattr(param, "decoupled_grad", None)
                if grad is not None:
                    param.decoupled_grad = None if to_none else grad.zero_()
        for state in self.state.values():
            master = state.get(MASTER)
            if master is not None and master.grad is not None:
                master.grad = None if to_none else master.grad.zero_()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a parameter group, a dict of ``params`` and options, as ``torch.optim`` does.

        After an error the optimizer keeps the groups that it had before.

        Raises:
            TypeError: a parameter is not a tensor, or has a dtype that is not supported.
            ValueError: an option is out of range or misspelt, or a parameter is already in a group
                or is not a leaf.
        """
        self._check_new_group(param_group)
        super().add_param_group(param_group)
        try:
            self._prepare_group(self.param_groups[-1])
        except Exception:
            self.param_groups.pop()
            raise

    def _check_new_group(self, group: Any) -> None:
        """Checks the parameters and the names of a group's options, and lists the parameters."""
        name = self._name
        if not isinstance(group, dict):
            raise TypeError(
                f"{name}: param_group must be a dict of params and options, "
                f"got {type(group).__name__}"
            )
        if "params" not in group:
            raise ValueError(
                f"{name}: params must be given in each group, got one of {', '.join(group)}"
            )
        for option in group:
            meant = nearest(option, self.defaults, 0.85)
            if option != "params" and option not in self.defaults and meant is not None:
                raise ValueError(
                    f"{name}: unexpected option {option!r} in a group; did you mean {meant!r}?"
                )
        params = group["params"]
        if isinstance(params, torch.Tensor):
            params = [params]
        _check_container(name, params)
        group["params"] = list(params)
        known = {id(param) for other in self.param_groups for param in other["params"]}
        for param in group["params"]:
            if isinstance(param, tuple) and len(param) == 2:  # of named_parameters()
                param = param[1]
            if not isinstance(param, torch.Tensor):
                raise TypeError(
                    f"{name}: params must hold torch.nn.Parameters, got {type(param).__name__}"
                )
            if not (param.is_leaf or param.retains_grad):
                raise ValueError(
                    f"{name}: params must hold leaf tensors, such as a module's parameters, got "
                    f"the result of {type(param.grad_fn).__name__}"
                )
            if id(param) in known:
                raise ValueError(
                    f"{name}: params must be in one group each, got a parameter of shape "
                    f"{list(param.shape)} in two"
                )

    def enable_master_weights(self) -> None:
        """Turns on float32 master weights, like ``master_weights=True`` of the constructor.

        They are made from the parameters at the next step, or earlier by ``master_weight``.
        """
        self.master_weights = True
        self.renew()

    def renew(self) -> None:
        """Makes the next step regroup the parameters into buckets, one for each kernel call.

        Call it after parameters have changed their dtype.
        """
        self._plans.clear()

    def master_weight(self, param: torch.Tensor) -> torch.Tensor | None:
        """Returns the float32 master weight of ``param``; makes it if it is missing.

        If the ``.grad`` of the master weight is set, the step reads that instead of ``param.grad``.

        Returns:
            The master weight; None for a plain float32 parameter, with ``master_weights=False``, or
            if the master weight is not stored in float32.
        """
        if self._master_dtype_of(param) is not torch.float32:
            return None
        return self._made_master(param)

    def _made_master(self, param: torch.Tensor) -> torch.Tensor:
        """Returns the master weight of ``param`` as stored, after making it if it is missing."""
        state = self.state[param]
        if MASTER not in state:
            if param in self._given:
                state[MASTER] = self._given[param]
            elif self._keeps_remainder(param):
                state[MASTER] = new_state(param, torch.int16)
            else:
                self._put(param, MASTER, new_master(param), self._master_dtype)
            self._plans.clear()
        return state[MASTER]

    def _check_number(self, name: str, value: Any) -> None:
        """Raises TypeError if an option is not a number; a kernel takes no tensor for it."""
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise TypeError(f"{self._name}: {name} must be a float, got {type(value).__name__}")

    def _at_least_zero(self, name: str, value: Any) -> None:
        self._check_number(name, value)
        if not value >= 0.0:
            raise ValueError(f"{self._name}: {name} must be at least 0, got {value}")

    def _check(self, name: str, dtype: torch.dtype, allowed: tuple[torch.dtype, ...]) -> None:
        if dtype not in allowed:
            names = " or ".join(str(d) for d in allowed)
            raise TypeError(f"{self._name}: {name} must be {names}, got {dtype}")

    def _lr(self, group: dict[str, Any], device: torch.device) -> float | torch.Tensor:
        """Returns the learning rate of ``group``; a tensor is moved to ``device`` as float32."""
        lr = group["lr"]
        if not isinstance(lr, torch.Tensor):
            return lr
        return moved(lr, device, torch.float32)

    def _options(
        self, group: dict[str, Any], bucket: Bucket, scalars: Scalars, *names: str
    ) -> dict[str, Any]:
        """Adds 1 to the step count of ``bucket`` and returns keyword arguments for its op."""
        inv_scale, found_inf = scalars.on(bucket.device)
        bucket.advance(found_inf)
        return {
            "lr": self._lr(group, bucket.device),
            "inv_scale": inv_scale,
            "found_inf": found_inf,
            "unscale_grads": inv_scale is not None,
            **{name: group[name] for name in names},
        }

    # Buckets.

    def _grad(self, param: torch.Tensor) -> torch.Tensor | None:
        """Returns the gradient of the master weight if it has one, else that of ``param``."""
        if self.master_weights:
            state = self.state.get(param)
            master = state.get(MASTER) if state else None
            if master is not None and master.grad is not None:
                return master.grad
        return param.grad

    def _live(self, params: list[torch.Tensor]) -> list[torch.Tensor]:
        """Returns the parameters that have a gradient."""
        grads: list[Any]
        if self.use_decoupled_grad:
            grads = list(map(_decoupled_grad, params))
        else:
            grads = list(map(self._grad if self.master_weights else _GRAD, params))
        if not all(map(operator.is_not, grads, repeat(None))):
            params = [param for param, grad in zip(params, grads, strict=True) if grad is not None]
            grads = [grad for grad in grads if grad is not None]
        if not all(map(operator.is_, map(_LAYOUT, grads), repeat(torch.strided))):
            layout = next(grad.layout for grad in grads if grad.layout is not torch.strided)
            raise NotImplementedError(
                f"{self._name}: gradients must be dense, got one of layout {layout}"
            )
        return params

    def _buckets(self, index: int, group: dict[str, Any]) -> list[Bucket]:
        """Returns the buckets of the parameters of ``group`` that have a gradient.

        Buckets serve later steps until other parameters have gradients, the group has other
        moments, a parameter's memory has moved, or someone has replaced or dropped its state.
        """
        live = self._live(group["params"])
        if not live:
            if any(param.is_meta for param in group["params"]):
                raise ValueError(
                    f"{self._name}: params must have values, got one on the meta device; construct "
                    "the optimizer after reset_parameters() or to_empty(), which make other tensors"
                )
            return []
        names = self._moments(group)
        capturing = live[0].is_cuda and torch.cuda.is_current_stream_capturing()
        if capturing and not self.capturable:
            raise RuntimeError(
                f"{self._name}: capturable must be True for a step in a CUDA graph, got False"
            )
        if capturing:  # replays change the parameters unseen
            for _, keeper in keepers_of(live):
                keeper.release()
        plan = self._plans.get(index)
        if (
            plan is None
            or plan[0] != names
            or len(plan[1]) != len(live)
            or not all(map(operator.is_, plan[1], live))
            or not all(bucket.has_state() for bucket in plan[2])
            or not all(address() == known for address, known in plan[3])
        ):
            if capturing:
                raise RuntimeError(
                    f"{self._name}: the captured step must follow one outside the graph that "
                    "updates the same parameters"
                )
            buckets = self._prepare(group, live, names)
            plan = (names, list(live), buckets, [w for b in buckets for w in b.watched()])
            self._plans[index] = plan
            self._planned = []  # the step notes them when all groups have their states
        return plan[2]

    def _prepare(
        self, group: dict[str, Any], live: list[torch.Tensor], names: tuple[str, ...]
    ) -> list[Bucket]:
        """Makes the buckets of a group, and the missing state of the group's parameters."""
        for param in live:
            if needs_copy(param) and not self.master_weights:
                raise ValueError(
                    f"{self._name}: master_weights must be True for parameters of type "
                    f"{type(local(param)).__name__}, got False"
                )
        counts = self._counts_steps(group)
        states = [self._state_of(param, names, counts) for param in live]
        holders = Counter(id(state.get(STEP)) for state in self.state.values())
        buckets = []
        for indices in _partition(live, states, names):
            kept = [states[i] for i in indices]
            scales = [self._scales.get(live[i], {}) for i in indices]
            members = [live[i] for i in indices]
            bucket = Bucket(members, kept, names, scales, self.use_decoupled_grad)
            step = bucket.step
            if isinstance(step, torch.Tensor):
                # Parameters without a gradient keep the old tensor, with the count they stopped at.
                if holders[id(step)] != len(kept):
                    bucket.set_step(step.clone())
            elif step is not None and self.capturable:
                bucket.set_step(torch.full((), step, dtype=torch.float32, device=bucket.device))
            buckets.append(bucket)
        return buckets

    def _state_of(self, param: torch.Tensor, names: tuple[str, ...], counts: bool) -> State:
        """Returns the state of ``param`` after adding the entries that are missing."""
        state = self.state[param]
        if counts and STEP not in state:
            # torch.optim's SGD counts no steps: a loaded buffer has taken at least one.
            state[STEP] = 1 if any(name in state for name in names) else 0
        for name in names:
            dtype = self._moment_dtypes[name]
            if name in state:
                if state[name].dtype is not dtype:  # someone has put it there
                    self._load(param, name, state[name], dtype)
                follow_format(state[name], param)
            else:
                state[name] = new_state(param, dtype)
                if dtype in SCALED:
                    scale = torch.ones((), dtype=torch.float32, device=local(param).device)
                    self._scales.setdefault(param, {})[name] = scale
        if self._master_dtype_of(param) is None:
            state.pop(MASTER, None)  # the parameter had 16 bits before
        else:
            master = self._made_master(param)
            if param not in self._given:  # which may be a view of the user's memory
                follow_format(master, param)
        return state

    # Options of groups.

    def _prepare_group(self, group: dict[str, Any]) -> None:
        """Fills in and checks ``group``; ``capturable`` makes ``lr`` a float32 device tensor."""
        for name, value in self.defaults.items():
            group.setdefault(name, value)
        self._check_group(group)
        for param in group["params"]:
            self._check("params", param.dtype, _DTYPES)
            placements = getattr(param, "placements", ())
            if any(placement.is_partial() for placement in placements):
                raise ValueError(
                    f"{self._name}: params must be sharded or replicated if they are DTensors, "
                    f"got {placements}"
                )
        if self.capturable and group["params"]:
            rate = torch.as_tensor(group["lr"], dtype=torch.float32)
            group["lr"] = rate.to(group["params"][0].device)
        self._plans.clear()


def _decoupled_grad(param: torch.Tensor) -> torch.Tensor | None:
    """Returns ``param.decoupled_grad``, None if it has none."""
    return getattr(param, "decoupled_grad", None)
