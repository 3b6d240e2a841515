"""Ops as torch sees them: registered C functions, autograd functions, errors about arguments.

Plain eager calls go to the C functions directly. Compiled regions, dispatch modes and torch.func's
transforms call the registered op ``torch.ops.apex_te.<name>``, which they can see.
"""

from __future__ import annotations

import functools
import inspect
import re
import string
import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar

import torch
from torch._C import _increment_version as increment_version
from torch._C._functorch import unwrap_if_dead
from torch.autograd import forward_ad

from .. import runtime
from ..contract import parse
from ..runtime.dispatcher import signature
from ..runtime.named_arguments import former_keywords, named_arguments, op_function_name
from ..runtime.tracing import dispatch_modes, is_compiling, jit_tracing, transforms_active

_library = torch.library.Library("apex_te", "DEF")


class Launch(NamedTuple):
    """One call of a C function that has the effect of a registered op.

    Attributes:
        function: the callable of ``runtime.function``.
        args: its arguments; ``WORKSPACE`` stands for scratch memory of the current stream.
        products: number of GEMMs of quantized operands in the call.
    """

    function: Any
    args: tuple[Any, ...]
    products: int


WORKSPACE = object()
_launches: dict[str, Callable[..., Launch | None]] = {}
_functions: dict[str, Any] = {}


def launch_of(name: str, args: Sequence[Any]) -> Launch | None:
    """Returns the one C call that op ``name`` makes for ``args``; None if it does more."""
    launch = _launches.get(name)
    return None if launch is None else launch(*args)


def function_of(name: str) -> Callable[..., None]:
    """Returns the function that runs the registered op ``name`` in plain eager mode."""
    return getattr(_functions[name], name)


def register(schema: str, call: Callable[..., Any]) -> Any:
    """Defines ``torch.ops.apex_te.<name>`` for CPU and CUDA tensors.

    The op writes its results into arguments and returns nothing. Its implementation for fake
    tensors therefore does nothing, and tracing triggers no build. Under ``torch.func.vmap`` the op
    runs once for each sample.

    Args:
        schema: torch.library schema that begins with the op's name and ends in ``-> ()``.
        call: function that is called with the op's arguments.

    Returns:
        The overload packet ``torch.ops.apex_te.<name>``.
    """
    name = schema.partition("(")[0]
    _library.define(schema)

    def run(*args: Any) -> None:
        _runs.count += 1
        call(*args)

    def fake(*args: Any) -> None:
        _runs.count += 1

    def batched(*args: Any) -> None:
        from . import transforms  # here, because importing it takes a while

        transforms.run_samples(registered, args)

    for key in ("CPU", "CUDA"):
        _library.impl(name, run, key)
    _library.impl(name, batched, "FuncTorchBatched")
    torch.library.register_fake(f"apex_te::{name}", fake, lib=_library)
    registered = getattr(torch.ops.apex_te, name)
    return registered


def bind(
    op: str,
    name: str,
    function: Callable[..., None] | None = None,
    *,
    without: Sequence[str] = (),
    launch: Callable[..., Launch | None] | None = None,
) -> Callable[..., None]:
    """Registers a C function of an op with ``torch.library``; returns a callable that returns None.

    It takes arguments by position. ``name`` is a function that the op's header declares, or a whole
    schema. ``function`` is called instead of the C function, which it calls itself; the registered
    schema omits the parameters ``without``, which ``function`` supplies. ``launch`` returns the
    ``Launch`` for the arguments of ``function``, or None if that does more than launch one kernel.
    """
    schema = name if "(" in name else _schema(name, signature(op, name), without)
    short = schema.partition("(")[0]
    if function is not None:
        if launch is not None:
            _launches[short] = launch
        return bind_call(schema, function)
    _launches[short] = lambda *args: Launch(runtime.function(op, short), args, 0)
    return _bind(schema, runtime.ops(op))


def bind_call(schema: str, function: Callable[..., None]) -> Callable[..., None]:
    """Registers a Python function as the op of a torch.library schema that ends in ``-> ()``.

    ``function`` takes the schema's arguments by position and writes its results into them.
    """
    return _bind(schema, SimpleNamespace(**{schema.partition("(")[0]: function}))


def _schema(name: str, signature: str, without: Sequence[str] = ()) -> str:
    """Returns a C signature's torch.library schema: "out: Tensor!" becomes "Tensor(a!) out"."""
    aliases = iter(string.ascii_lowercase)
    arguments = []
    for p in parse(signature).params.values():
        if p.name not in without:
            written = f"Tensor({next(aliases)}!)" if p.is_written else "Tensor"
            kind = p.kind.replace("Tensor", written)
            arguments.append(f"{kind}{'?' * p.is_optional} {p.name}")
    return f"{name}({', '.join(arguments)}) -> ()"


def _bind(schema: str, functions: Any) -> Callable[..., None]:
    """Registers a function and returns a callable that skips ``torch.ops`` in plain eager mode.

    Compiled regions, dispatch modes, ``torch.jit.trace`` and transforms go through ``torch.ops``.
    """
    name = schema.partition("(")[0]
    registered = register(schema, lambda *args: getattr(functions, name)(*args))
    _functions[name] = functions

    def call(*args: Any) -> None:
        if is_compiling():
            registered(*args)
        elif (
            dispatch_modes()
            or transforms_active()
            or jit_tracing()
            or forward_ad._current_level >= 0
        ):
            _observed(registered, args)
        else:
            try:
                getattr(functions, name)(*args)
            except (TypeError, RuntimeError):  # the latter from torch, if a function reads values
                if not _without_data(args):
                    raise
                registered(*args)

    return call


class _Runs(threading.local):
    """Count, for each thread, of registered ops that were run with real or with fake tensors."""

    count = 0


_runs = _Runs()


def _observed(registered: Any, args: tuple[Any, ...]) -> None:
    """Calls a registered op through ``torch.ops``, so that active tracers and transforms see it.

    Refuses a call whose results would be lost or that needs a derivative. Prepared lists
    (``runtime.tensor_list``) are passed on as plain lists.
    """
    name = registered.__name__
    if jit_tracing() and any(_writes_list(a) for a in registered.default._schema.arguments):
        raise NotImplementedError(
            f"{name}: torch.jit.trace drops what is written into tensors of lists; "
            "torch.export and make_fx keep it"
        )
    if transforms_active() or forward_ad._current_level >= 0:
        from . import transforms

        transforms.refuse_derivatives(name, args)
    before = _runs.count
    # The schema knows lists, not the prepared lists of ``tensor_list``.
    registered(*(list(a) if isinstance(a, runtime.core().TensorList) else a for a in args))
    if _runs.count == before and dispatch_modes() and not _without_data(args):
        raise NotImplementedError(
            f"{name}: a torch dispatch mode must run it, as its results are written into its "
            "arguments; a policy of selective activation checkpointing must have it recomputed"
        )


def _writes_list(argument: Any) -> bool:
    """Returns True if an argument of a torch.library schema is a list whose tensors are written."""
    is_written = argument.alias_info is not None and argument.alias_info.is_write
    return is_written and "List" in str(argument.type)


def _without_data(args: Sequence[Any]) -> bool:
    """Returns True if every tensor is a meta or fake one, which has a shape and no values."""
    tensors = [t for a in args for t in (a if isinstance(a, (list, tuple)) else (a,))]
    tensors = [t for t in tensors if isinstance(t, torch.Tensor)]
    return bool(tensors) and all(t.is_meta or _is_fake(t) for t in tensors)


def _is_fake(t: torch.Tensor) -> bool:
    if type(t) in (torch.Tensor, torch.nn.Parameter):
        return False
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(t, FakeTensor)


def note_written(*tensors: torch.Tensor | None) -> None:
    """Increments version counters of tensors (or None) that an op has overwritten, for autograd.

    Under torch.compile it does nothing, since torch derives writes from the op's schema.
    """
    given = [t for t in tensors if t is not None]
    if given and not is_compiling():
        increment_version(given)


def unwrapped(value: Any) -> Any:
    """Removes from a tensor the wrapper of a transform that has ended; returns other values as is.

    A tensor that has left a transform keeps its wrapper until the tensor is used.
    """
    return unwrap_if_dead(value) if isinstance(value, torch.Tensor) else value


def eager_apply(cls: Any, *args: Any) -> Any:
    """Calls an ``OpFunction`` like ``torch.autograd.Function.apply`` in half the host time.

    The caller must have checked that no transform of torch.func is active.
    """
    return cls.direct(*[unwrap_if_dead(a) if isinstance(a, torch.Tensor) else a for a in args])


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates a ``backward`` that has no derivative, so that asking for one raises an error.

    If autograd records the backward (``create_graph=True``), its results depend on a node that
    raises NotImplementedError. torch's decorator of this name adds the node only if an output's
    gradient requires a derivative. A penalty on the gradient of ``op(x).sum()`` would then
    silently have no gradient.
    """
    recorded = torch.autograd.function.once_differentiable(backward)

    @functools.wraps(backward)
    def call(ctx: Any, *grads: Any) -> Any:
        if not torch.is_grad_enabled():
            return backward(ctx, *grads)
        if torch.compiler.is_compiling() or transforms_active():
            return recorded(ctx, *grads)
        with torch.no_grad():
            results = backward(ctx, *grads)
        label = getattr(ctx._forward_cls, "LABEL", "") or ctx._forward_cls.__name__
        # Autograd runs the node only on a way to a tensor that it was asked for. An input that is
        # neither a leaf nor saved is not known here.
        leaves = [getattr(node, "variable", None) for node, _ in ctx.next_functions]
        ends = [t for t in (*grads, *leaves, *_saved(ctx)) if t is not None and t.requires_grad]
        ends.append(torch.empty(0, requires_grad=True))
        if not isinstance(results, tuple):
            return _NoDerivative.apply(label, 1, results, *ends)[0]
        return _NoDerivative.apply(label, len(results), *results, *ends)

    return call


def _saved(ctx: Any) -> tuple[torch.Tensor | None, ...]:
    """Returns what a context has saved, with its history; nothing where it cannot be read again.

    A backward may have freed or overwritten it, and a checkpoint gives it once.
    """
    try:
        return ctx.saved_tensors
    except RuntimeError:
        return ()


class _NoDerivative(torch.autograd.Function):
    """Identity of the first ``count`` of some tensors, whose derivative raises an error."""

    @staticmethod
    def forward(ctx: Any, label: str, count: int, *tensors: Any) -> tuple[Any, ...]:
        ctx.label = label
        return tuple(t.detach() if isinstance(t, torch.Tensor) else t for t in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise NotImplementedError(
            f"{ctx.label}: a second derivative is not supported, as its backward is "
            "once_differentiable"
        )


class OpFunction(torch.autograd.Function):
    """Autograd function with ``forward(ctx, ...)`` that runs under torch.func's transforms.

    ``grad``, ``vjp`` and ``vmap`` work and may be nested around each other; a second derivative and
    ``jvp`` raise NotImplementedError.

    Attributes:
        LABEL: the op's name in error messages; each subclass sets it.
        direct: like ``apply`` in less host time. Only for calls without an active transform of
            torch.func or forward-mode differentiation, and without tensors that have left a
            transform.
    """

    LABEL = ""
    direct: Any

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.direct = super(torch.autograd.Function, cls).apply  # type: ignore[misc]

    @classmethod
    def apply(cls, *args: Any) -> Any:
        """Calls the function with its forward's arguments, also under torch.func's transforms.

        Raises NotImplementedError if an argument has a forward-mode tangent.
        """
        # torch.compile does not call this method: it traces forward and backward itself.
        if transforms_active() or forward_ad._current_level >= 0:
            from . import transforms  # here, because importing it takes a while

            transforms.refuse_tangents(cls.LABEL, args)
            if transforms_active():
                return transforms.apply(cls, args)
        return eager_apply(cls, *args)


def second_backward_is_refused(ctx: Any) -> bool:
    """Returns True if autograd will detect that backward overwrote a tensor saved by this forward.

    Normally autograd compares version counters and refuses a second backward. It makes no such
    check if hooks such as ``torch.autograd.graph.save_on_cpu`` unpack the saved tensors, or under
    torch.func's transforms, whose ``vjp`` function may be called repeatedly. In these cases the
    result is False, and backward must copy saved tensors instead of overwriting them.
    """
    if torch.compiler.is_compiling():  # a compiler makes functions of its own without writes
        return True
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is None and isinstance(ctx, torch.autograd.function.FunctionCtx)


def needs_autograd(*tensors: torch.Tensor | None) -> bool:
    """Returns True if autograd may ask for a derivative with respect to one of the tensors."""
    if not torch.is_grad_enabled():
        return False
    if any(t is not None and t.requires_grad for t in tensors):
        return True
    # Under a transform ``requires_grad`` tells nothing of the tensors that a tensor wraps.
    return not torch.compiler.is_compiling() and transforms_active()


_F = TypeVar("_F", bound=Callable[..., Any])
_OWN_ERROR = re.compile(r"[A-Za-z_][\w.]*: ")
_NUMBER_OF = {"int": "an int", "float": "a float", "bool": "a bool", "str": "a str"}
# What torch and Python raise for an argument that does not fit.
_VAGUE = (
    AssertionError, AttributeError, IndexError, OverflowError, RuntimeError, TypeError, ValueError,
)  # fmt: skip


def checked(function: _F) -> _F:
    """Decorates a public function so that a failed call raises an error naming the bad argument.

    A bad argument that the function does not check itself causes some error of torch or Python. The
    decorator catches it and compares the arguments with their annotations. A call that succeeds
    is not checked. Former keywords of arguments are accepted, too.
    """
    owner = op_function_name(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except _VAGUE as error:
            named = former_keywords(function, kwargs, owner) if kwargs else None
            if named is not None:
                return call(*args, **named)
            better = _explained(owner, function, args, kwargs, error)
            if better is None:
                raise
            raise better from error

    return call  # type: ignore[return-value]


def check_dense(owner: str, **tensors: torch.Tensor | None) -> None:
    """Checks tensors of ``owner`` that no kernel checks: dense, of a real dtype, on one device.

    None is skipped. In a compiled region it does nothing, because torch checks them there.
    """
    if torch.compiler.is_compiling():
        return  # a compiler refuses layouts in a backward, and traces tensors that it checks itself
    device = first = None
    for name, value in tensors.items():
        if value is None:
            continue
        problem = _tensor_problem(f"{owner}: {name}", value, may_be_meta=True)
        if problem is not None:
            raise problem
        if device is None:
            device, first = value.device, name
        elif value.device != device:
            raise ValueError(
                f"{owner}: {name} must be on {device} like {first}, got {value.device}"
            )


def under_name(owner: str, error: Exception) -> Exception:
    """Returns the error of an op that ran instead of ``owner``, which it then names as the op."""
    text = str(error)
    own = _OWN_ERROR.match(text)
    return type(error)(f"{owner}: {text[own.end() if own else 0 :]}")


def _explained(
    owner: str,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    error: Exception,
) -> Exception | None:
    """Returns an error that names a failed call's wrong argument, or None to keep ``error``."""
    if isinstance(error, RuntimeError) and type(error) not in (RuntimeError, NotImplementedError):
        return None  # of a build, a device or its memory: no argument's doing
    try:
        given = inspect.signature(function).bind(*args, **kwargs).arguments
    except TypeError:
        try:  # arguments that do not bind run nothing
            named_arguments(owner)(function)(*args, **kwargs)
        except TypeError as refused:
            return refused
        return None
    scope = function.__globals__
    own = _OWN_ERROR.match(str(error))
    is_own = own is not None
    for argument, value in given.items():
        wanted = function.__annotations__.get(argument, "Any")
        better = _problem(f"{owner}: {argument}", str(wanted), value, scope)
        # For a value out of range, or of a tensor, the function's own error says more.
        is_told = own is not None and str(error).startswith(f"{own[0]}{argument} ")
        is_tensor = isinstance(value, torch.Tensor) and isinstance(error, ValueError)
        is_range = is_own and isinstance(better, ValueError)
        if better is not None and not (is_range or (is_told and is_tensor)):
            return better
    if is_own or runtime.is_traced():
        return None
    if isinstance(error, RuntimeError) and not _is_of_shapes(error):
        return None
    described = ", ".join(f"{k} {_described(v)}" for k, v in given.items() if _described(v))
    return ValueError(f"{owner}: the arguments must fit to each other, got {described}")


def _is_of_shapes(error: RuntimeError) -> bool:
    """Returns True if an argument may have caused the error, False if memory or device did."""
    text = str(error)
    return type(error) is RuntimeError and "CUDA" not in text and "allocate" not in text


def _problem(place: str, wanted: str, value: Any, scope: dict[str, Any]) -> Exception | None:
    """Returns the error for an argument that its annotation does not allow, or None if it does."""
    kinds = [kind.strip() for kind in wanted.split(" | ")]
    if value is None and "None" in kinds:
        return None
    if isinstance(value, torch.Tensor) and "torch.Tensor" in kinds:
        return _tensor_problem(place, value)
    if any(kind in ("Tensors", "Sequence[torch.Tensor]") for kind in kinds):
        return _list_problem(place, value)
    if "tuple[float, float]" in kinds:
        is_pair = isinstance(value, (list, tuple)) and len(value) == 2
        if not is_pair or any(_number_problem(place, ["float"], v) for v in value):
            return TypeError(f"{place} must be a tuple of two floats, got {value!r}")
        return None
    if "list[float]" in kinds:
        if not isinstance(value, (list, tuple)):
            return TypeError(f"{place} must be a list of floats, got {_type(value)}")
        found = (_number_problem(f"{place}[{i}]", ["float"], v) for i, v in enumerate(value))
        return next(filter(None, found), None)
    is_instance = any(isinstance(value, _class(kind, scope) or ()) for kind in kinds)
    if any(kind in _NUMBER_OF for kind in kinds) and not is_instance:
        return _number_problem(place, kinds, value)
    for kind in filter("None".__ne__, kinds):
        expected = _class(kind, scope)
        if expected is None or isinstance(value, expected):
            break
    else:
        return TypeError(f"{place} must be a {kinds[0]}, got {_type(value)}")
    # A tuple of tensors, such as an op's output given back to be written again.
    for name in getattr(value, "_fields", ()):
        part = getattr(value, name)
        if isinstance(part, torch.Tensor):
            better = _tensor_problem(f"{place}.{name}", part)
            if better is not None:
                return better
    return None


def _class(kind: str, scope: dict[str, Any]) -> Any:
    """Returns the class that ``kind``, a dotted name, denotes in ``scope``, or None if none."""
    value: Any = None
    for part in kind.split("."):
        value = scope.get(part) if value is None else getattr(value, part, None)
    return value if isinstance(value, type) else None


def _tensor_problem(place: str, value: Any, may_be_meta: bool = False) -> Exception | None:
    """Returns the error for a value that is not a dense tensor of a real dtype, else None."""
    actual = None
    if not isinstance(value, torch.Tensor):
        return TypeError(f"{place} must be a torch.Tensor, got {_type(value)}")
    if value.is_nested:
        actual = "a nested one"
    elif value.is_quantized:
        actual = f"a quantized one ({value.dtype})"
    elif value.layout is not torch.strided:
        actual = f"one of layout {value.layout}"
    elif value.is_meta and not may_be_meta and not runtime.is_traced():
        actual = "one without values, on the meta device, beside others that have them"
    elif value.is_complex():
        return TypeError(f"{place} must have a real dtype, got {value.dtype}")
    return None if actual is None else TypeError(f"{place} must be a dense tensor, got {actual}")


def _list_problem(place: str, value: Any) -> Exception | None:
    """Returns the error for an argument that is not a list of dense tensors; None if it is one."""
    if not isinstance(value, (list, tuple, runtime.core().TensorList)):
        return TypeError(f"{place} must be a list or tuple of tensors, got {_type(value)}")
    if not len(value):
        return ValueError(f"{place} must have a tensor at least, got none")
    found = (_tensor_problem(f"{place}[{i}]", item) for i, item in enumerate(value))
    return next(filter(None, found), None)


def _number_problem(place: str, kinds: list[str], value: Any) -> Exception | None:
    """Returns the error for a value that is of none of some plain types, else None."""
    expected = " or ".join(_NUMBER_OF.get(kind, kind) for kind in kinds)
    is_int = isinstance(value, int) and not isinstance(value, bool)
    if is_int and "float" in kinds:
        try:
            float(value)
        except OverflowError:
            return ValueError(f"{place} must be in the range of float, got {_large(value)}")
        return None
    if is_int and "int" in kinds:
        if not -(2**63) <= value < 2**63:
            return ValueError(f"{place} must be in the range of int64, got {_large(value)}")
        return None
    python = {"bool": bool, "float": float, "str": str}
    if any(kind in kinds and isinstance(value, python[kind]) for kind in python):
        return None
    return TypeError(f"{place} must be {expected}, got {_type(value)}")


def _large(value: int) -> str:
    return str(value) if value.bit_length() <= 128 else f"an int of {value.bit_length()} bits"


def _type(value: Any) -> str:
    return type(value).__name__


def _described(value: Any) -> str:
    """Returns dtype and shape of a tensor, or of each in a list, for messages; else ""."""
    if isinstance(value, torch.Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return f"{dtype} {list(value.shape)}"
    if isinstance(value, (list, tuple)) and value and isinstance(value[0], torch.Tensor):
        return f"[{', '.join(map(_described, value[:4]))}{', ..' if len(value) > 4 else ''}]"
    return ""
