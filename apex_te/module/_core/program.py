"""Program: repeats the ops that a ``Recorder`` has noted, with other tensors, in one call of C."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ... import runtime
from ...ops import product_count
from ...ops.fp8_gemm import WORKSPACE_BYTES
from ...ops.registration import WORKSPACE
from .recorder import Made, Part, PythonStep, Recorder, Slot, Step, Unrecordable

__all__ = ["Program"]

empty_like, contiguous = torch.empty_like, torch.contiguous_format
increment_version: Any = torch._C._increment_version

# Temporaries keep their memory until the program has run. Where they take more, the time of the
# host no longer counts, and memory does.
MAX_SCRATCH = 64 << 20
_ALIGNMENT = 256


class Program:
    """Ops on tensors of fixed shapes and dtypes, run in order, with memory for what they make.

    Args:
        recorder: has noted the ops and has no ``problem``.
        outputs: tensors, or None, that a run returns.

    Attributes:
        is_native: no op of torch and no other Python code runs.

    Raises:
        Unrecordable: the ops cannot be repeated.
    """

    __slots__ = (
        "_device", "_later", "_parts", "_places", "_products", "_results", "_run",
        "_uses_workspace", "_written", "_zeroed", "is_native",
    )  # fmt: skip

    def __init__(self, recorder: Recorder, outputs: Sequence[torch.Tensor | None]) -> None:
        first = next(t for t in recorder.inputs if t is not None)
        self._device = first.device
        self._written = recorder.written
        sources = [None if t is None else _known(recorder, t) for t in outputs]
        layout = _Layout(recorder, sources)
        # One element each, which stands for all: tensors are made like these.
        self._results = [_template(*made, self._device) for made in layout.results]
        self._zeroed = [len(recorder.inputs) + place for place in layout.zeroed]
        if layout.scratch:
            self._results.append(_template((layout.scratch,), torch.uint8, self._device))
        self._products = sum(s.products for s in recorder.steps if isinstance(s, Step))
        self._uses_workspace = any(
            argument is WORKSPACE for step in recorder.steps for argument in step.args
        )
        self._run, self._later = _bound(recorder, layout)
        self.is_native = not self._later
        self._places = [-1 if s is None else layout.place(s)[0] for s in sources]
        parts = [None if s is None else layout.part(s) for s in sources]
        self._parts = [(i, part) for i, part in enumerate(parts) if part is not None]

    def run(self, inputs: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None] | None:
        """Runs the ops.

        Args:
            inputs: tensors in place of those that were recorded.

        Returns:
            The outputs; None, with nothing run, if an input has not the form of the recorded one.
        """
        made: list[Any] = [*inputs]
        for like in self._results:
            made.append(empty_like(like, memory_format=contiguous))
        for place in self._zeroed:
            made[place].zero_()
        if self._uses_workspace:
            made.append(runtime.workspace(self._device, WORKSPACE_BYTES))
        if not self._run(*made):
            return None
        for later in self._later:
            later(made)
        if self._written:
            increment_version(self._written)
        if self._products:
            product_count.add(self._products)
        made.append(None)
        outputs = [made[place] for place in self._places]
        for i, part in self._parts:
            outputs[i] = part.of(outputs[i])
        return outputs


def _known(recorder: Recorder, tensor: torch.Tensor) -> Slot | Made | Part:
    source = recorder.source(tensor)
    if isinstance(source, torch.Tensor):
        raise Unrecordable("an output that is part of the state")
    return source


class _Layout:
    """Places of the tensors of a program in the list that its steps read.

    The list has the inputs, the results, one scratch tensor if it is needed, the workspace if one
    is, and what Python steps return.

    Args:
        recorder: has noted the ops.
        outputs: what stands for each output, or None.

    Attributes:
        results: shape and dtype of each tensor that is made for an output, and of those of zeros.
        zeroed: places in ``results`` of those of zeros.
        scratch: bytes of the scratch tensor, which holds all other tensors that are made.
        workspace: place of the workspace.
        size: number of places.
    """

    def __init__(self, recorder: Recorder, outputs: Sequence[Any]) -> None:
        self.results: list[tuple[tuple[int, ...], torch.dtype]] = []
        self.zeroed: list[int] = []
        self.scratch = 0
        bases = {_base(source) for source in outputs if source is not None}
        count = len(recorder.inputs)
        self._made: dict[int, tuple[int, int]] = {}  # place and offset
        for index, tensor in enumerate(recorder.made):
            is_zeroed = index in recorder.zeroed
            if index in recorder.computed or not (is_zeroed or Made(index) in bases):
                continue
            if tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size():
                raise Unrecordable("an output with memory of other tensors")
            if not tensor.is_contiguous():
                raise Unrecordable("an output that is not contiguous")
            if is_zeroed:
                self.zeroed.append(len(self.results))
            self._made[index] = (count + len(self.results), 0)
            self.results.append((tuple(tensor.shape), tensor.dtype))
        place = count + len(self.results)
        for index, tensor in enumerate(recorder.made):
            if index in recorder.computed or index in self._made:
                continue
            self._made[index] = (place, self.scratch)
            size = tensor.untyped_storage().nbytes()
            self.scratch += -(-size // _ALIGNMENT) * _ALIGNMENT
        if self.scratch > MAX_SCRATCH:
            raise Unrecordable("too much scratch memory")
        self._shapes = recorder.made
        self._inputs = recorder.inputs
        self.workspace = place + (self.scratch > 0)
        uses = any(a is WORKSPACE for step in recorder.steps for a in step.args)
        self.size = self.workspace + uses
        for index in sorted(recorder.computed):
            self._made[index] = (self.size, 0)
            self.size += 1
        self._whole = place  # results and inputs have a place of their own
        self._computed = recorder.computed

    def place(self, source: Any) -> tuple[int, int, Any, Any, torch.dtype] | tuple[int]:
        """Returns the place of a tensor: its index alone, or with what tells a part from it.

        Args:
            source: a ``Slot``, ``Made`` or ``Part``.
        """
        if isinstance(source, Slot):
            return (source.index,)
        if isinstance(source, Made):
            index, offset = self._made[source.index]
            if source.index in self._computed or index < self._whole:
                return (index,)
            like = self._shapes[source.index]
            return index, offset, tuple(like.shape), like.stride(), like.dtype
        base = self.place(source.base)
        offset = source.offset + (base[1] if len(base) > 1 else 0)
        return base[0], offset, source.shape, source.strides, source.dtype

    def part(self, source: Any) -> _View | None:
        """Returns the view that an output is of the tensor at its place; None if it is that tensor.

        Raises:
            Unrecordable: it has another dtype than that tensor.
        """
        if not isinstance(source, Part):
            return None
        base = source.base
        like = self._shapes[base.index] if isinstance(base, Made) else self._inputs[base.index]
        if like is None or like.dtype is not source.dtype:
            raise Unrecordable("an output of another dtype than its base")
        shape, strides = torch.Size(source.shape), source.strides
        is_dense = strides == torch.empty(shape, device="meta").stride() and like.is_contiguous()
        if is_dense and not source.offset and like.numel() == shape.numel():
            return _View(shape, None, 0)
        return _View(shape, strides, source.offset // like.element_size())


class _View(NamedTuple):
    """Named tuple that describes a view of a tensor.

    Attributes:
        shape: its shape.
        strides: its strides; None if it is the whole tensor in that shape.
        offset: number of elements of the tensor before its first.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    offset: int

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns this view of ``tensor``."""
        if self.strides is None:
            return tensor.view(self.shape)
        return tensor.as_strided(self.shape, self.strides, tensor.storage_offset() + self.offset)


def _template(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Returns a tensor of this shape and dtype, all of whose elements share one element's memory.

    It only serves as the argument of ``empty_like``; its values are uninitialised.
    """
    return torch.empty(1, dtype=dtype, device=device).expand(shape)


def _base(source: Any) -> Any:
    return source.base if isinstance(source, Part) else source


def _bound(recorder: Recorder, layout: _Layout) -> tuple[Any, list[Callable[[list], None]]]:
    """Returns the steps of a program, as few calls as possible.

    Returns:
        first: ``runtime.core().Program`` of the first C functions, perhaps of none.
        later: functions of the list of tensors that run the rest.
    """
    groups: list[list[Step]] = [[]]
    between: list[PythonStep] = []
    for step in recorder.steps:
        if isinstance(step, Step):
            groups[-1].append(step)
        else:
            between.append(step)
            groups.append([])
    known = layout.size - len(recorder.computed)
    forms = (*recorder.inputs, *(...,) * (known - len(recorder.inputs)))
    first = _program(forms, groups[0], layout)
    later: list[Callable[[list], None]] = []
    for step, group in zip(between, groups[1:], strict=True):
        later.append(_python(step, layout))
        known += step.result is not None
        if group:
            later.append(
                _checked(_program((*forms, *(...,) * (known - len(forms))), group, layout))
            )
    return first, later


def _program(forms: tuple[Any, ...], steps: list[Step], layout: _Layout) -> Any:
    try:
        return runtime.core().Program(forms, tuple(
            (step.function, tuple(_argument(a, layout) for a in step.args)) for step in steps
        ))  # fmt: skip
    except TypeError as error:
        raise Unrecordable(str(error)) from error


_like: dict[torch.dtype, torch.Tensor] = {}


def _argument(value: Any, layout: _Layout) -> Any:
    """Returns an argument in the form that ``runtime.core().Program`` takes."""
    if value is WORKSPACE:
        return (layout.workspace,)
    if not isinstance(value, (Slot, Made, Part)):
        return value
    place = layout.place(value)
    if len(place) == 1:
        return place
    dtype = place[4]
    if dtype not in _like:
        _like[dtype] = torch.empty(0, dtype=dtype, device="cpu")
    return (*place[:4], _like[dtype])


def _checked(program: Any) -> Callable[[list], None]:
    def run(made: list) -> None:
        if not program(*made):
            raise RuntimeError("a tensor has changed its form while a module ran")

    return run


def _python(step: PythonStep, layout: _Layout) -> Callable[[list], None]:
    """Returns a function of the list of tensors that runs a Python step, and adds its result."""
    function, kwargs, returns = step.function, step.kwargs, step.result is not None
    # Each an argument, or the place of one; not the layout, which holds recorded tensors.
    args = [
        (None, layout.place(a)) if isinstance(a, (Slot, Made, Part)) else (a, None)
        for a in step.args
    ]

    def run(made: list) -> None:
        result = function(*[a if at is None else _tensor(made, at) for a, at in args], **kwargs)
        if returns:
            made.append(result)

    return run


def _tensor(made: list, place: tuple) -> torch.Tensor:
    """Returns the tensor at a place of the list, or the part of it."""
    if len(place) == 1:
        return made[place[0]]
    index, offset, shape, strides, dtype = place
    base = made[index]
    if base.dtype is dtype:
        start = base.storage_offset() + offset // dtype.itemsize
        return base.as_strided(shape, strides, start)
    base = base.view(-1).view(torch.uint8)
    elements = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    size = 0 if 0 in shape else elements * dtype.itemsize
    return base[offset : offset + size].view(dtype).as_strided(shape, strides)
