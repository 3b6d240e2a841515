"""Programs of recorded ops, which run a module's forward or backward again with other tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.autograd import forward_ad

from ... import runtime
from ...fp8.autocast import graph_task_id
from ...ops import gemm_common, gemm_tuning
from ...ops.binding import WORKSPACE
from ...ops.fp8_gemm import WORKSPACE_BYTES
from ...runtime.tracing import dispatch_modes, jit_tracing, transforms_active
from .recorder import Made, Part, PythonStep, Recorder, Slot, Step, Unrecordable

if TYPE_CHECKING:
    from ...fp8.scheme import GemmQuantizers


def is_autocast(device_type: str) -> bool:
    """Returns True if ``torch.autocast`` is on for a device type; never for the meta device."""
    return device_type != "meta" and torch.is_autocast_enabled(device_type)


def without_autocast(backward: Any, ctx: Any, *grads: Any) -> Any:
    """Returns ``backward(ctx, *grads)``, run without autocast, in the dtypes of forward."""
    device_type = ctx.device_type
    if not is_autocast(device_type):
        return backward(ctx, *grads)
    with torch.autocast(device_type, enabled=False):
        return backward(ctx, *grads)


def take_saved(ctx: Any) -> tuple:
    """Returns the tensors saved in forward, and drops autograd's references to them.

    Each tensor is then freed with the caller's last reference. With ``retain_graph`` autograd keeps
    them all; without it a second backward raises RuntimeError.
    """
    if torch.compiler.is_compiling() or not isinstance(ctx, torch._C._FunctionBase):
        return ctx.saved_tensors
    of: Any = ctx
    taken = getattr(of, "taken", None)  # by a program that could not use them
    if taken is not None:
        of.taken = None
        return taken
    try:
        saved = of.saved_tensors
    except RuntimeError as error:
        if "a second time" not in str(error):
            raise
        raise RuntimeError(
            f"{of._forward_cls.LABEL}: backward() may run once for each forward, got a second run; "
            "add up losses and call backward() on the sum, or pass retain_graph=True to the first "
            "(torch: Trying to backward through the graph a second time)"
        ) from error
    of.maybe_clear_saved_tensors()
    return saved


def may_overwrite_saved(ctx: Any) -> bool:
    """Returns True if nothing but this run of backward reads what its forward has saved.

    ``ctx.owns_saved`` is what ``second_backward_is_refused`` returned in forward. False if programs
    may run the backward.
    """
    if torch.compiler.is_compiling() or not ctx.owns_saved or ctx.programs is not None:
        return False
    keeps_graph = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return graph_task_id() != -1 and keeps_graph is not None and not keeps_graph()


def apply_function(function: Any, inputs: tuple[torch.Tensor | None, ...], *rest: Any) -> Any:
    """Returns the outputs of an autograd function, run without autograd if grad is disabled."""
    if torch.is_grad_enabled():
        return function.apply(*inputs, *rest)
    return function.forward(_NoContext(len(inputs)), *inputs, *rest)


class _NoContext:
    """Stand-in for autograd's ``ctx`` that needs no gradients and saves no tensors."""

    def __init__(self, inputs: int) -> None:
        self.needs_input_grad = (False,) * inputs

    def save_for_backward(self, *tensors: Any) -> None:
        pass

    def set_materialize_grads(self, value: bool) -> None:
        pass


_casts = runtime.ops("cast_transpose")
_OPERANDS = 6  # arguments of cast_transpose up to scale_inv


def with_paired_casts(steps: Sequence[Step | PythonStep]) -> list[Step | PythonStep]:
    """Returns equivalent steps in which each pair of casts is one step.

    A cast is paired with an earlier one if it casts an input of the program that no step between
    them uses, and sums no columns. No cast moves past a Python step that writes to its arguments.
    """
    found: list[Step | PythonStep] = []
    waiting: int | None = None  # place in `found` of a cast without a partner
    for step in steps:
        if not _is_cast(step):
            if isinstance(step, PythonStep) and step.result is None:
                waiting = None
            found.append(step)
        elif waiting is not None and _can_move(step, found[waiting + 1 :]):
            first = found[waiting].args
            function = _casts.cast_transpose_pair
            found[waiting] = Step(function, (*first[:-1], *step.args[:_OPERANDS]), 0)
            waiting = None
        else:
            waiting = len(found)
            found.append(step)
    return found


def _is_cast(step: Step | PythonStep) -> bool:
    """Returns True if a step is a cast that a flag on the device cannot switch off."""
    if not isinstance(step, Step) or step.function is not _casts.cast_transpose:
        return False
    return step.args[-1] is None


def _can_move(cast: Step | PythonStep, between: Sequence[Step | PythonStep]) -> bool:
    """Returns True if a cast may run before the steps ``between``, as the second of a pair."""
    source = _slot(cast.args[0])
    if source is None or any(arg is not None for arg in cast.args[_OPERANDS:]):
        return False
    return all(_slot(arg) != source for step in between for arg in step.args)


def _slot(arg: Any) -> Slot | None:
    """Returns the stand-in of the input that has an argument's memory; None if no input has."""
    base = arg.base if isinstance(arg, Part) else arg
    return base if isinstance(base, Slot) else None


_empty_like: Any = functools.partial(torch.empty_like, memory_format=torch.contiguous_format)
# What code that torch.compile has made calls for its tensors: half the time of torch.empty.
_guards = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
empty_strided_cuda: Any = getattr(_guards, "_empty_strided_cuda", None)
current_device: Any = getattr(torch._C, "_cuda_getDevice", None)
increment_version: Any = torch._C._increment_version

# Temporaries keep their memory until the program has run. Where they take more, the time of the
# host no longer counts, and memory does.
MAX_SCRATCH = 64 << 20
_ALIGNMENT = 256


class Program:
    """Recorded ops of a forward or backward; ``run`` runs them again with other tensors.

    If ``is_native``, all ops are C functions, and one call from Python runs them.
    """

    __slots__ = ("_later", "_parts", "_places", "_run", "is_native")

    def __init__(self, recorder: Recorder, outputs: Sequence[torch.Tensor | None]) -> None:
        sources = [None if t is None else _known(recorder, t) for t in outputs]
        layout = _Layout(recorder, sources)
        self._places = tuple(-1 if s is None else layout.place(s)[0] for s in sources)
        self._run, self._later = _bound(recorder, layout, self._places)
        self.is_native = not self._later
        parts = [None if s is None else layout.part(s) for s in sources]
        self._parts = [(i, part) for i, part in enumerate(parts) if part is not None]

    def run(self, inputs: Sequence[torch.Tensor | None]) -> Sequence[torch.Tensor | None] | None:
        """Runs the program on ``inputs`` and returns the tensors that stand for its ``outputs``.

        Returns None, with nothing run, if an input differs from the recorded one in shape, strides,
        dtype, device or alignment to 16 bytes.
        """
        outputs = self._run(*inputs)
        if outputs is False:
            return None
        if self._later:
            made = [*outputs]
            for later in self._later:
                later(made)
            made.append(None)
            outputs = [made[place] for place in self._places]
        if self._parts:
            outputs = [*outputs]
            for i, part in self._parts:
                outputs[i] = part.of(outputs[i])
        return outputs


def _known(recorder: Recorder, tensor: torch.Tensor) -> Slot | Made | Part:
    """Returns the stand-in of an output of the recorded run."""
    source = recorder.source(tensor)
    if isinstance(source, torch.Tensor):
        raise Unrecordable("an output that is part of the state")
    return source


class _Layout:
    """Places of a program's tensors in the list that its steps index.

    The list has inputs, memory of outputs and zeros, a scratch tensor of ``scratch`` bytes that
    holds all intermediate tensors, the GEMM workspace if used, and the results of Python steps.
    Unused entries are left out; ``makers`` has one item for each tensor that a run allocates.
    """

    def __init__(self, recorder: Recorder, outputs: Sequence[Any]) -> None:
        self.makers: list[_Maker] = []
        self.scratch = 0
        bases = {_base(source) for source in outputs if source is not None}
        self._given = _given_shapes(recorder, outputs)
        count = len(recorder.inputs)
        device = next(t for t in recorder.inputs if t is not None).device
        self._made: dict[int, tuple[int, int]] = {}  # place and offset
        for index, tensor in enumerate(recorder.made):
            is_zeroed = index in recorder.zeroed
            if index in recorder.computed or not (is_zeroed or Made(index) in bases):
                continue
            if tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size():
                raise Unrecordable("an output with memory of other tensors")
            if not tensor.is_contiguous():
                raise Unrecordable("an output that is not contiguous")
            self._made[index] = (count + len(self.makers), 0)
            shape = self._given.get(index, tuple(tensor.shape))
            self.makers.append(_Maker.of(shape, tensor.dtype, device, is_zeroed))
        place = count + len(self.makers)
        for index, tensor in enumerate(recorder.made):
            if index in recorder.computed or index in self._made:
                continue
            self._made[index] = (place, self.scratch)
            size = tensor.untyped_storage().nbytes()
            self.scratch += -(-size // _ALIGNMENT) * _ALIGNMENT
        if self.scratch > MAX_SCRATCH:
            raise Unrecordable("too much scratch memory")
        if self.scratch:
            self.makers.append(_Maker.of((self.scratch,), torch.uint8, device))
        self._shapes = recorder.made
        self._inputs = recorder.inputs
        self.workspace = place + (self.scratch > 0)
        uses = any(a is WORKSPACE for step in recorder.steps for a in step.args)
        if uses:
            workspace = (runtime.workspace, device, WORKSPACE_BYTES)
            self.makers.append(_Maker(workspace, workspace))
        self.size = self.workspace + uses
        for index in sorted(recorder.computed):
            self._made[index] = (self.size, 0)
            self.size += 1
        self._whole = place  # results and inputs have a place of their own
        self._computed = recorder.computed

    def place(self, source: Any) -> tuple[int, int, Any, Any, torch.dtype] | tuple[int]:
        """Returns ``(index,)`` of a tensor in the list that is whole, else ``(index, offset, shape,
        strides, dtype)``, with the offset in bytes.
        """
        if isinstance(source, Slot):
            return (source.index,)
        if isinstance(source, Made):
            index, offset = self._made[source.index]
            if source.index in self._computed:
                return (index,)
            if index < self._whole and source.index not in self._given:
                return (index,)
            like = self._shapes[source.index]
            return index, offset, tuple(like.shape), like.stride(), like.dtype
        base = self.place(source.base)
        offset = source.offset + (base[1] if len(base) > 1 else 0)
        return base[0], offset, source.shape, source.strides, source.dtype

    def check_words(self, part: Part) -> None:
        """Checks that ``part``, if it has another dtype than its base, can be made in each run."""
        base = self._inputs[part.base.index] if isinstance(part.base, Slot) else None
        if base is not None and base.dtype is not part.dtype and base.data_ptr() % 16:
            raise Unrecordable("another dtype than that of a misaligned input")

    def part(self, source: Any) -> _View | None:
        """Returns the view of its base that an output is; None if it is the whole tensor."""
        if isinstance(source, Made) and source.index in self._given:
            return _View(tuple(self._shapes[source.index].shape), None, 0)
        if not isinstance(source, Part):
            return None
        base = source.base
        if isinstance(base, Made) and self._given.get(base.index) == source.shape:
            return None  # as such an output is the whole tensor
        like = self._shapes[base.index] if isinstance(base, Made) else self._inputs[base.index]
        if like is None or like.dtype is not source.dtype:
            raise Unrecordable("an output of another dtype than its base")
        if _is_reshaped(source, like):
            return _View(source.shape, None, 0)
        return _View(source.shape, source.strides, source.offset // like.element_size())


class _View(NamedTuple):
    """View of a tensor, ``strides`` and ``offset`` in elements; no strides: the reshaped whole."""

    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    offset: int

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the described view, with memory shared, of ``tensor``."""
        if self.strides is None:
            return tensor.view(self.shape)
        return tensor.as_strided(self.shape, self.strides, tensor.storage_offset() + self.offset)


class _Maker(NamedTuple):
    """Calls that allocate a tensor; ``here`` is faster, but requires the current device."""

    here: tuple[Any, ...]
    anywhere: tuple[Any, ...]

    @classmethod
    def of(
        cls, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, zeroed: bool = False
    ) -> _Maker:
        """Returns the calls for a contiguous tensor, uninitialised unless ``zeroed``."""
        # All elements share one element's memory; tensors are made like this one.
        like = torch.empty(1, dtype=dtype, device=device).expand(shape)
        anywhere = (_zeros_like if zeroed else _empty_like, like)
        if zeroed or device.type != "cuda" or empty_strided_cuda is None:
            return cls(anywhere, anywhere)
        strides = torch.empty(shape, device="meta").stride()
        return cls((empty_strided_cuda, shape, strides, dtype), anywhere)


def _zeros_like(like: torch.Tensor) -> torch.Tensor:
    """Returns a contiguous tensor of zeros like ``like``."""
    return _empty_like(like).zero_()


def _is_reshaped(part: Part, base: torch.Tensor) -> bool:
    """Returns True if ``part`` is all of ``base``, contiguous, in another shape or the same."""
    shape = torch.Size(part.shape)
    is_dense = part.strides == torch.empty(shape, device="meta").stride() and base.is_contiguous()
    same_dtype = part.dtype is base.dtype
    return is_dense and same_dtype and part.offset == 0 and shape.numel() == base.numel()


def _given_shapes(recorder: Recorder, outputs: Sequence[Any]) -> dict[int, tuple[int, ...]]:
    """Returns shapes, by index in ``recorder.made``, of tensors that are outputs reshaped.

    A run allocates each in the shape of its first such output, which then is not a view.
    """
    shapes: dict[int, tuple[int, ...]] = {}
    for source in outputs:
        if not isinstance(source, Part) or not isinstance(source.base, Made):
            continue
        index = source.base.index
        if index not in recorder.computed and _is_reshaped(source, recorder.made[index]):
            shapes.setdefault(index, source.shape)
    return shapes


def _base(source: Any) -> Any:
    """Returns the ``base`` of a ``Part``; a ``Slot`` or ``Made`` itself."""
    return source.base if isinstance(source, Part) else source


def _bound(
    recorder: Recorder, layout: _Layout, places: tuple[int, ...]
) -> tuple[Any, list[Callable[[list], None]]]:
    """Groups the steps of a program into as few calls from Python as possible.

    Returns ``(first, later)``: a ``runtime.core().Program`` of the C functions before the first
    Python step, and functions of the list of tensors for the other steps. Without the latter
    ``first`` returns the tensors at ``places``, else all.
    """
    groups: list[list[Step]] = [[]]
    between: list[PythonStep] = []
    for step in with_paired_casts(recorder.steps):
        if isinstance(step, Step):
            groups[-1].append(step)
        else:
            between.append(step)
            groups.append([])
    known = layout.size - len(recorder.computed)
    forms = (*recorder.inputs, *(...,) * (known - len(recorder.inputs)))
    after: list[tuple[Any, ...]] = []
    if recorder.written:
        after.append((increment_version, recorder.written))
    products = sum(s.products for s in recorder.steps if isinstance(s, Step))
    if products:
        after.append((gemm_common.count_gemms, products))
    first_outputs = tuple(-1 if f is None else i for i, f in enumerate(forms))
    makers = tuple(zip(*layout.makers, strict=True)) or ((), ())
    where = current_device if makers[0] != makers[1] else None
    first = _program(
        forms, groups[0], layout, makers[0], tuple(after), first_outputs if between else places,
        where, makers[1],
    )  # fmt: skip
    later: list[Callable[[list], None]] = []
    for step, group in zip(between, groups[1:], strict=True):
        later.append(_python(step, layout))
        known += step.result is not None
        if group:
            later.append(
                _checked(_program((*forms, *(...,) * (known - len(forms))), group, layout))
            )
    return first, later


def _program(forms: tuple[Any, ...], steps: list[Step], layout: _Layout, *options: Any) -> Any:
    """Returns a ``runtime.core().Program`` of successive C functions.

    ``forms`` has for each place a tensor like the one expected, None, or ``...`` for no check.
    """
    try:
        return runtime.core().Program(forms, tuple(
            (step.function, tuple(_argument(a, layout) for a in step.args)) for step in steps
        ), *options)  # fmt: skip
    except TypeError as error:
        raise Unrecordable(str(error)) from error


_aten = torch.ops.aten
# Functions of the same arguments as an op, which cost less host time than ``torch.ops``.
_SHORTER: dict[Any, Callable[..., Any]] = {
    _aten.add.Tensor: torch.add,
    _aten.cat.default: torch.cat,
    _aten.clone.default: torch.clone,
    _aten.stack.default: torch.stack,
    _aten.sum.dim_IntList: torch.sum,
}
_like: dict[torch.dtype, torch.Tensor] = {}


def _argument(value: Any, layout: _Layout) -> Any:
    """Returns what ``runtime.core().Program`` takes for an argument of a ``Step``."""
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
    """Returns a function that runs ``program``; RuntimeError if an input does not fit."""

    def run(made: list) -> None:
        if not program(*made):
            raise RuntimeError("a tensor has changed its form while a module ran")

    return run


def _python(step: PythonStep, layout: _Layout) -> Callable[[list], None]:
    """Returns a function that runs a Python step, and appends its result, if any, to the list."""
    function, kwargs, returns = step.function, step.kwargs, step.result is not None
    function = _SHORTER.get(function, function)
    # Of each argument its place, or its places; not the layout, which holds recorded tensors.
    args = [(a, _placed(a, layout)) for a in step.args]
    args = [(None if at is not None else a, at) for a, at in args]

    def run(made: list) -> None:
        result = function(*[a if at is None else _tensors(made, at) for a, at in args], **kwargs)
        if returns:
            made.append(result)

    return run


def _placed(value: Any, layout: _Layout) -> Any:
    """Returns the place of a stand-in, a list of them for a list; None for any other value."""
    if isinstance(value, list) and any(isinstance(v, (Slot, Made, Part)) for v in value):
        return [_placed(v, layout) for v in value]
    if isinstance(value, Part):
        layout.check_words(value)
    return layout.place(value) if isinstance(value, (Slot, Made, Part)) else None


def _tensors(made: list, place: Any) -> Any:
    """Returns the tensor or part of one at a place of the list ``made``, a list for several."""
    if isinstance(place, list):
        return [None if at is None else _tensors(made, at) for at in place]
    if len(place) == 1:
        return made[place[0]]
    index, offset, shape, strides, dtype = place
    base = made[index]
    if base.dtype is dtype:
        start = base.storage_offset() + offset // dtype.itemsize
        return base.as_strided(shape, strides, start)
    start = base.storage_offset() * base.element_size() + offset
    whole = torch.empty(0, dtype=dtype, device=base.device)
    return whole.set_(base.untyped_storage(), start // dtype.itemsize, shape, strides)


MAX_PROGRAMS = 128  # of one module; more shapes than that do not return soon
MAX_MISSES = 4  # programs made anew for one key, because tensors had another form

_enabled = True
_ONE_GIVEN: tuple[bool, ...] = (False,)  # the key of a backward that gets one gradient


def set_enabled(enabled: bool) -> bool:
    """Turns the use of programs by all modules on (the default) or off."""
    global _enabled
    before, _enabled = _enabled, enabled
    return before


class _Known:
    """Program of one forward or backward for calls with one key, and how often it has run.

    Attributes:
        program: None until one is recorded, or if the ops cannot be repeated.
        misses: number of times that a tensor did not fit the program.
        count: of a forward that returns a tuple, its length; else 0.
        backwards: ``_Known`` of the backward, by a tuple that says which gradients are None.
    """

    __slots__ = ("attributes", "backwards", "count", "misses", "program", "runs")

    def __init__(self, runs: int = 0) -> None:
        self.program: Program | None = None
        self.runs = runs
        self.misses = 0
        self.count = 0
        self.attributes: dict[str, Any] = {}
        self.backwards: dict[tuple[bool, ...], _Known] = {}

    def is_next_recorded(self) -> bool:
        """Counts a run of the function; returns True if it is the second run, which is recorded."""
        self.runs += 1
        return self.runs == 2

    def missed(self) -> None:
        """Drops the program; the next run is recorded unless ``MAX_MISSES`` calls did so."""
        self.program = None
        self.misses += 1
        if self.misses < MAX_MISSES:
            self.runs = 1


class Programs:
    """Programs of one module's forwards and backwards with one set of quantizers.

    Attributes:
        calls: ``FP8Call`` by the dtype to compute in, or ``(dtype, keep_columnwise, small,
            save_original)`` if one of these is True.
        kept: FP8 copies of weights that the ops read besides their arguments.
        is_possible: False if the scheme's casts or GEMMs cannot run in a program.
    """

    __slots__ = ("_due", "_known", "calls", "is_possible", "kept", "quantizers", "state")

    def __init__(
        self, quantizers: tuple[GemmQuantizers, ...], kept: tuple[torch.Tensor, ...] = ()
    ) -> None:
        self.quantizers = quantizers
        self.kept = kept
        self.calls: dict[Any, Any] = {}
        self._known: dict[Any, _Known] = {}
        self._due: list[tuple[list[bool], int]] = []
        self.state: list[torch.Tensor] = []
        self.is_possible = True
        for gemm in quantizers:
            casts = (gemm.input, gemm.weight, gemm.weight_recast, gemm.grad_output)
            found = [cast.repeatable() for cast in casts]
            native = getattr(gemm.backend, "native", False)
            if None in found or gemm.high_precision_wgrad or not native:
                self.is_possible = False
                return
            for one in found:
                self.state += one.tensors
                if one.due is not None:
                    self._due.append(one.due)

    def is_usable(self) -> bool:
        """Returns True if programs may run or be recorded now.

        They may not while GEMMs are tuned, ops are traced, forward-mode differentiation is active,
        or a slot has no first scale yet.
        """
        if (
            not _enabled
            or gemm_tuning.is_active
            or dispatch_modes()
            or transforms_active()
            or jit_tracing()
            or torch.compiler.is_compiling()
            or forward_ad._current_level >= 0
        ):
            return False
        return not self._due or not any(due[index] for due, index in self._due)

    def forward(
        self,
        ctx: Any,
        function: Callable[..., Any],
        tensors: tuple[torch.Tensor | None, ...],
        rest: tuple[Any, ...],
        key: Any,
    ) -> Any:
        """Returns ``function(ctx, *tensors, *rest)``, run by a program if there is one.

        The second call with a key is recorded; the key must differ for calls with other ops, shapes
        or dtypes. The ops may read only ``tensors``, ``kept`` and the FP8 state. Sets
        ``ctx.programs``.
        """
        known = self._known.get(key)
        if known is None:
            if len(self._known) >= MAX_PROGRAMS:
                self._known.clear()
            known = self._known[key] = _Known()
        program = known.program
        if program is not None:
            outputs = program.run((*tensors, *self.kept) if self.kept else tensors)
            if outputs is not None:
                ctx.programs = (self, known)
                if known.count == 0:
                    ctx.save_for_backward(*outputs[1:])
                    return outputs[0]
                ctx.set_materialize_grads(False)
                ctx.save_for_backward(*outputs[known.count :])
                return tuple(outputs[: known.count])
            known.missed()
        if not known.is_next_recorded():
            return function(ctx, *tensors, *rest)
        before = set(vars(ctx))
        recorder = Recorder((*tensors, *self.kept), self.state)
        with recorder:
            result = function(ctx, *tensors, *rest)
        outputs = [*(result if isinstance(result, tuple) else (result,))]
        known.count = len(outputs) if isinstance(result, tuple) else 0
        outputs += ctx.to_save
        known.program = _made(recorder, outputs)
        known.attributes = {
            name: value for name, value in vars(ctx).items()
            if name not in before and name not in ("to_save", "programs")
        }  # fmt: skip
        known.backwards.clear()
        if known.program is not None:
            ctx.programs = (self, known)
        return result


def repeatable(backward: Callable[..., tuple]) -> Callable[..., tuple]:
    """Decorates a backward so that a program may run it, if one recorded or ran the forward.

    The ops read only ``grads``, tensors from ``take_saved`` and the FP8 state; ``torch.autocast``
    is off. ``ctx.programs`` is None, or set by ``Programs.forward``.
    """

    @functools.wraps(backward)
    def run(ctx: Any, *grads: torch.Tensor | None) -> tuple:
        if ctx.programs is None:
            return without_autocast(backward, ctx, *grads)
        return _repeated_backward(ctx, backward, grads)

    return run


def _repeated_backward(
    ctx: Any, backward: Callable[..., tuple], grads: tuple[torch.Tensor | None, ...]
) -> tuple:
    """Returns ``backward(ctx, *grads)``, run by a program if there is one; see ``repeatable``."""
    programs, forward = ctx.programs
    key = _ONE_GIVEN
    if len(grads) > 1 or grads[0] is None:
        key = tuple([grad is None for grad in grads])
    known = forward.backwards.get(key)
    if known is None:  # recorded at once: the forward has returned, and so will this
        known = forward.backwards[key] = _Known(runs=1)
    saved = ctx.saved_tensors
    ctx.maybe_clear_saved_tensors()  # as ``take_saved`` does
    program, usable = known.program, programs.is_usable()
    if usable and program is not None:
        if program.is_native:
            outputs = program.run((*saved, *grads))
        else:
            ctx.device_type = forward.attributes["device_type"]
            outputs = without_autocast(_run, ctx, program, (*saved, *grads))
        if outputs is not None:
            return tuple(outputs)
        known.missed()
    for name, value in forward.attributes.items():
        setattr(ctx, name, value)
    ctx.taken = saved
    if not usable or not known.is_next_recorded():
        del saved
        return without_autocast(backward, ctx, *grads)
    recorder = Recorder((*saved, *grads), programs.state)
    with recorder:
        result = without_autocast(backward, ctx, *grads)
    known.program = _made(recorder, result)
    return result


def _run(_: Any, program: Program, tensors: tuple[torch.Tensor | None, ...]) -> Any:
    """Returns ``program.run(tensors)``, in the signature that ``without_autocast`` calls."""
    return program.run(tensors)


def _made(recorder: Recorder, outputs: Sequence[torch.Tensor | None]) -> Program | None:
    """Returns the program of a recorded run; None if the run cannot be repeated."""
    if recorder.problem is not None:
        return None
    try:
        return Program(recorder, outputs)
    except Unrecordable:
        return None


def programs_of(
    cache: dict[Any, Programs],
    quantizers: tuple[GemmQuantizers, ...],
    kept: tuple[torch.Tensor, ...] = (),
) -> Programs | None:
    """Returns a module's ``Programs`` for quantizers and kept copies, made in ``cache`` if missing.

    Returns None if programs may not be used now, or not with this scheme.
    """
    key: Any = (id(quantizers), *map(id, kept)) if kept else id(quantizers)
    found = cache.get(key)
    if found is None:
        if len(cache) >= 4:  # of the kinds of forward; those of a former state are dropped
            cache.clear()
        found = cache[key] = Programs(quantizers, kept)
    return found if found.is_possible and found.is_usable() else None
