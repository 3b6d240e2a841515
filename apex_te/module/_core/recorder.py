"""Recorder of the ops that a function runs; a ``Program`` made from it runs these ops again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ...ops.binding import WORKSPACE, function_of, launch_of

_aten = torch.ops.aten
_ALLOCATIONS = (
    _aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided,
)  # fmt: skip
# What is made stays in memory while it is recorded. Where it is more, the device is busy for longer
# than the host, for which programs are made.
MAX_BYTES = 256 << 20
_ZEROS = (_aten.zeros, _aten.zeros_like, _aten.new_zeros)
_RESIZES = (_aten.resize_, _aten.resize_as_, _aten.set_)


class Unrecordable(Exception):
    """Error that names the reason why no program can repeat the recorded ops."""


@dataclass(frozen=True)
class Slot:
    """Stand-in for an input of the recorded function: ``inputs[index]`` of the ``Recorder``."""

    index: int


@dataclass(frozen=True)
class Made:
    """Stand-in for a tensor allocated while recording: ``made[index]`` of the ``Recorder``."""

    index: int


class Part(NamedTuple):
    """Stand-in for a tensor in the memory of ``base``, ``offset`` bytes from its first element."""

    base: Slot | Made
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


class Step(NamedTuple):
    """Recorded call of a C function; ``products`` is the number of its quantized GEMMs.

    Stand-ins replace all tensors in ``args`` except those of the FP8 state.
    """

    function: Any
    args: tuple[Any, ...]
    products: int


class PythonStep(NamedTuple):
    """Recorded call of a Python function, such as an op of torch.

    ``result`` is None if the call writes to its arguments; ``kwargs`` has no tensors.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Made | None


class Recorder(TorchDispatchMode):
    """Context manager that records all ops run inside it, without changing what they do.

    A program replaces ``inputs`` by other tensors, but keeps those of ``state``.

    Attributes:
        problem: the reason why the recorded ops cannot be repeated; None if they can.
        made: tensors that ops allocated, empty or of zeros, and results of Python steps.
        computed, zeroed: indices in ``made`` of results of Python steps, and of zeros.
    """

    def __init__(
        self, inputs: Sequence[torch.Tensor | None], state: Sequence[torch.Tensor]
    ) -> None:
        super().__init__()
        self.problem: str | None = None
        self.steps: list[Step | PythonStep] = []
        self.made: list[torch.Tensor] = []
        self.computed: set[int] = set()
        self.zeroed: set[int] = set()
        self.written: list[torch.Tensor] = []
        self.inputs = inputs
        self._bytes = 0
        self._alive: list[Any] = []  # so that no later tensor gets the storage of one seen
        self._slots: dict[int, Slot] = {}
        self._owners: dict[int, tuple[Slot | Made, torch.Tensor] | None] = {}
        self._state = {_storage(t) for t in state}
        for index, tensor in enumerate(inputs):
            if tensor is None:
                continue
            if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or id(tensor) in self._slots:
                self.problem = "an input of another type, or passed twice"
                return
            self._slots[id(tensor)] = Slot(index)
            owner = (Slot(index), tensor)
            key = _storage(tensor)  # None: several share it, and a view may be of any
            self._owners[key] = None if key in self._owners else owner

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Returns False, since Dynamo skips frames under this mode anyway.

        True imports Dynamo at the first recorded op, and torch.fx then keeps the frames of all
        callers of that import, with their tensors, until the next garbage collection.
        """
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self.problem is None:
            try:
                self._note(func, args, kwargs, result)
            except Unrecordable as reason:
                self.problem = str(reason)
                for kept in (self._alive, self.made, self.steps, self._owners):
                    kept.clear()
        return result

    def source(self, tensor: torch.Tensor) -> Slot | Made | Part | torch.Tensor:
        """Returns the stand-in of a tensor; ``tensor`` itself if it belongs to ``state``."""
        if id(tensor) in self._slots:
            return self._slots[id(tensor)]
        key = _storage(tensor)
        owner = self._owners.get(key)
        if owner is None:
            if key in self._state and key not in self._owners:
                return tensor
            raise Unrecordable("a tensor from elsewhere")
        of, base = owner
        if tensor is base:
            return of
        part = Part(
            of, tensor.data_ptr() - base.data_ptr(), tuple(tensor.shape), tensor.stride(),
            tensor.dtype,
        )  # fmt: skip
        whole = (0, tuple(base.shape), base.stride(), base.dtype)
        # Not for an input, whose alias is not the same tensor to autograd.
        return of if isinstance(of, Made) and part[1:] == whole else part

    def _note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Notes one op that has run."""
        self._alive += _tensors_of((*args, result))
        if func.namespace == "apex_te":
            self._note_own(func, args, kwargs)
        elif func.overloadpacket in _ALLOCATIONS:
            self._make(result)
        elif func.overloadpacket in _ZEROS:  # which may as well be made before all else
            self.zeroed.add(self._make(result).index)
        elif func.overloadpacket in _RESIZES:
            raise Unrecordable(f"{func} gives a tensor other memory")
        elif not any(r.alias_info is not None and not r.alias_info.is_write
                     for r in func._schema.returns):  # fmt: skip
            self._note_computed(func, args, kwargs, result)
        # else a view, which is described where it is used

    def _note_own(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Notes an op of apex_te, as a call of its C function if it has one."""
        name = func._schema.name.partition("::")[2]
        if kwargs:
            raise Unrecordable("keyword arguments")
        for argument, value in zip(func._schema.arguments, args, strict=True):
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            if is_written and isinstance(value, (list, tuple)):
                raise Unrecordable("results in a list of tensors")
            if is_written and isinstance(self._sourced(value), torch.Tensor):
                self.written.append(value)
        launch = launch_of(name, args)
        if launch is None:
            self.steps.append(PythonStep(function_of(name), self._sources(args), {}, None))
        else:
            self.steps.append(Step(launch.function, self._sources(launch.args), launch.products))

    def _note_computed(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        """Notes an op of torch that computes a tensor or writes to one, as a ``PythonStep``."""
        if not isinstance(result, torch.Tensor) or torch.Tag.nondeterministic_seeded in func.tags:
            raise Unrecordable(f"{func} has another result")
        if any(isinstance(value, torch.Tensor) for value in kwargs.values()):
            raise Unrecordable(f"{func} has a tensor by keyword")
        sources = self._sources(args)
        made = None
        if _storage(result) not in {_storage(a) for a in _tensors_of(args)}:
            made = self._make(result)
            self.computed.add(made.index)
        self.steps.append(PythonStep(func, sources, kwargs, made))

    def _make(self, tensor: torch.Tensor) -> Made:
        """Adds a newly allocated tensor to ``made`` and returns its stand-in."""
        self._bytes += tensor.untyped_storage().nbytes()
        if self._bytes > MAX_BYTES:
            raise Unrecordable("too much memory")
        made = Made(len(self.made))
        self.made.append(tensor)
        self._owners[_storage(tensor)] = (made, tensor)
        return made

    def _sourced(self, value: Any) -> Any:
        """Returns ``source(value)`` for a tensor, a list of these for several, else the value."""
        if isinstance(value, (list, tuple)) and any(isinstance(v, torch.Tensor) for v in value):
            return [self._sourced(v) for v in value]
        return self.source(value) if isinstance(value, torch.Tensor) else value

    def _sources(self, args: Sequence[Any]) -> tuple[Any, ...]:
        """Returns an op's arguments with stand-ins for tensors, for a step's ``args``."""
        return tuple(value if value is WORKSPACE else self._sourced(value) for value in args)


def _tensors_of(args: Sequence[Any]) -> list[torch.Tensor]:
    """Returns the tensors among the arguments of an op, and those in its arguments' lists."""
    flat = [v for a in args for v in (a if isinstance(a, (list, tuple)) else (a,))]
    return [v for v in flat if isinstance(v, torch.Tensor)]


def _storage(tensor: torch.Tensor) -> int:
    """Returns an id of the storage of ``tensor``, valid as long as the storage exists."""
    return tensor.untyped_storage()._cdata
