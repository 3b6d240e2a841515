"""Torch ops on FP8 parameters, also those of collectives and views."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from ...runtime.tracing import is_traced
from ..tensor import QuantizedTensor
from .codes import joined_codes
from .fsdp_gather import joined

# Ops that write to their first argument what a weight can take: as many values as it has.
_WRITING = ("allreduce_", "allreduce_coalesced_", "broadcast_", "reduce_")


def run_collective(cls: type[Any], func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Runs an op of ``torch.ops.c10d`` on the values of its FP8Parameters.

    The schemas of these ops do not say what they write. Written values are quantized before this
    returns, even with ``async_op=True``.
    """
    name = func._schema.name.removeprefix("c10d::")
    written = [x for x in tree_leaves(args[0]) if isinstance(x, cls)] if name[-1] == "_" else []
    if written and name not in _WRITING:
        raise NotImplementedError(
            f"FP8Parameter: c10d.{name} must write to a plain tensor, which copy_ then writes to "
            "the FP8 weight, got an FP8Parameter"
        )
    values = {id(x): x._values() for x in tree_leaves((args, kwargs)) if isinstance(x, cls)}
    originals = {id(values[id(x)]): x for x in written}
    plain_args, plain_kwargs = tree_map_only(cls, lambda x: values[id(x)], (args, kwargs))
    out = func(*plain_args, **plain_kwargs)
    if written:
        work = out[-1] if isinstance(out, tuple) else out
        torch.distributed.Work.unbox(work).wait()
        cls.copy_all(written, [values[id(x)] for x in written])
    return tree_map_only(torch.Tensor, lambda t: originals.get(id(t), t), out)


# Methods whose names end as those of writes do, and which leave the values alone.
_HARMLESS = frozenset({"requires_grad_", "detach_", "share_memory_"})
_OPERATORS = frozenset({"__setitem__", *(f"__i{name}__" for name in (
    "add", "sub", "mul", "div", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift",
    "rshift",
))})  # fmt: skip


class ValuesView(torch.Tensor):
    """Values of an FP8 weight, transposed, expanded or with a further dimension."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(isinstance(written, cls) for written in _written(func, args, kwargs)):
            raise NotImplementedError(
                f"FP8Parameter: {func.__name__} must write to the whole weight, by copy_ for "
                "example, got a transposed or expanded view of it, whose values are a copy"
            )
        with torch._C.DisableTorchFunctionSubclass():
            out = func(*args, **kwargs)
        if getattr(func, "__name__", "") == "numpy":
            out.flags.writeable = False
            return out
        given = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, cls)]
        if type(out) in (list, tuple):  # views by chunk, split and unbind
            return type(out)(_as_given(part, given) for part in out)
        return _as_given(out, given)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return copy.deepcopy(_plain(self), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _plain(self).__reduce_ex__(protocol)


def _as_given(out: Any, given: list[ValuesView]) -> Any:
    """Returns a plain tensor over the memory of one of ``given`` as a ValuesView, else ``out``."""
    alias: Any = torch._C._is_alias_of  # type: ignore[attr-defined]
    if type(out) is torch.Tensor and any(alias(out, view) for view in given):
        return out.as_subclass(ValuesView)
    return out


def guarded(values: torch.Tensor) -> torch.Tensor:
    """Returns a ``ValuesView`` over plain values; in traced code the argument itself."""
    if type(values) is not torch.Tensor or is_traced():
        return values
    return values.as_subclass(ValuesView)


def _written(func: Any, args: tuple, kwargs: dict[str, Any]) -> Iterator[Any]:
    """Yields the arguments that a function of torch writes to, told by its name."""
    name = getattr(func, "__name__", "").partition(".")[0]  # of an overload, its op
    is_write = name in _OPERATORS or (
        name.endswith("_") and not name.endswith("__") and name not in _HARMLESS
    )
    first = (*args[:1], kwargs.get("tensor")) if is_write else ()  # torch.nn.init names it
    for given in (*first, kwargs.get("out")):
        if isinstance(given, (list, tuple)):
            yield from given
        else:
            yield given


def _plain(values: torch.Tensor) -> torch.Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return values.as_subclass(torch.Tensor)


# dtypes that casts read and write, and nominal dtypes of a parameter.
KERNEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
DTYPES = (*KERNEL_DTYPES, torch.float64)
_aten = torch.ops.aten
# Ops by which a compiled region reads the FP8 data.
_library = torch.library.Library("apex_te", "FRAGMENT")
_library.define("fp8_parameter_rowwise(Tensor weight) -> (Tensor, Tensor)")
_library.define("fp8_parameter_transposed(Tensor weight) -> (Tensor, Tensor)")
# View ops whose result is a copy of the values that refuses writes: linear layers read weights
# through them.
_READING_VIEWS = {
    _aten.t.default, _aten.transpose.int, _aten.permute.default, _aten.expand.default,
    _aten.unsqueeze.default,
}  # fmt: skip
# Ops that need only the shape, dtype and device of their tensor argument.
_FACTORIES = {
    _aten.zeros_like.default, _aten.ones_like.default, _aten.full_like.default,
    _aten.rand_like.default, _aten.randn_like.default, _aten.new_empty.default,
    _aten.new_empty_strided.default, _aten.new_full.default, _aten.new_ones.default,
}  # fmt: skip

# Attributes that FP8Parameter and torch.nn.Parameter keep in __dict__ themselves.
OWN = {
    "_held", "_recipe", "_fp8_dtype", "_is_whole", "_read_by", "_initial", "_writable",
    "_gathered", "_is_param", "_is_padded_shard", "_shard_groups",
}  # fmt: skip

_Handler = Callable[..., Any]
_HANDLERS: dict[Any, _Handler] = {}


HeldWeight = Any  # an FP8Parameter, whose file imports this one


def dispatch(cls: type[HeldWeight], func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Runs an op of torch for ``FP8Parameter.__torch_dispatch__``."""
    if torch.is_inference_mode_enabled():
        return _in_inference_mode(cls, func, args, kwargs)
    return _run(cls, func, args, kwargs)


def _in_inference_mode(
    cls: type[HeldWeight], func: Any, args: tuple, kwargs: dict[str, Any]
) -> Any:
    """Runs an op in inference mode as ``dispatch`` runs it under ``no_grad``."""
    if func not in _HANDLERS:
        # Elsewhere torch has decomposed such ops before.
        out = func.decompose(*args, **kwargs)
        if out is not NotImplemented:
            return out
    if _returns_view(func) and any(type(x) is cls and not x.is_inference() for x in args):
        # torch gives a view the version of its base, which a tensor made in this mode cannot have.
        with torch.inference_mode(False), torch.no_grad():
            return _run(cls, func, args, kwargs)
    return _run(cls, func, args, kwargs)


def _run(cls: type[HeldWeight], func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Runs an op by its handler, else on the values."""
    handler = _HANDLERS.get(func)
    if handler is not None:
        return handler(cls, *args, **kwargs)
    if func in _FACTORIES:
        x = args[0]
        like = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        return func(like, *args[1:], **kwargs)
    if func.namespace == "c10d":
        return run_collective(cls, func, args, kwargs)
    return _on_values(cls, func, args, kwargs)


def attributes_of(x: HeldWeight) -> dict[str, Any]:
    """Returns the attributes that users have set on ``x``, such as ``tensor_model_parallel``."""
    return {key: value for key, value in x.__dict__.items() if key not in OWN}


def _with_attributes(new: HeldWeight, x: HeldWeight) -> Any:
    """Copies users' attributes of ``x`` to ``new``: a moved module takes the data of an alias."""
    new.__dict__.update(attributes_of(x))
    return new


def cloned(x: HeldWeight) -> QuantizedTensor:
    """Returns a copy of the rowwise data and scales of ``x``."""
    return _changed(x, torch.clone)


def _changed(x: HeldWeight, change: Callable[[torch.Tensor], torch.Tensor]) -> QuantizedTensor:
    """Returns the rowwise data and scales of ``x``, each passed through the function ``change``."""
    fp8_data, scale_inv = change(x._rowwise), change(x._rowwise_scale_inv)
    return QuantizedTensor(fp8_data, scale_inv, None, None, x._held.dtype)


def _handles(*funcs: Any) -> Callable[[_Handler], _Handler]:
    """Returns a decorator that registers a function as the handler of the ops ``funcs``."""

    def register(handler: _Handler) -> _Handler:
        for func in funcs:
            _HANDLERS[func] = handler
        return handler

    return register


def _writes(func: Any) -> bool:
    """Returns True if an op writes to an argument."""
    return any(a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments)


def _returns_view(func: Any) -> bool:
    """Returns True if an op returns a view of an argument."""
    return not _writes(func) and any(r.alias_info is not None for r in func._schema.returns)


def _on_values(cls: type[HeldWeight], func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Runs an op on the values of its FP8Parameters, and quantizes values that the op writes."""
    arguments = func._schema.arguments
    writes, views = _writes(func), _returns_view(func)
    if views and func not in _READING_VIEWS:
        raise NotImplementedError(
            f"FP8Parameter: {func} would be a view of values that are not there; use "
            "dequantize() first"
        )
    values: dict[int, tuple[HeldWeight, torch.Tensor]] = {}

    def value(x: HeldWeight) -> torch.Tensor:
        if id(x) not in values:
            values[id(x)] = x, x._values()
        return values[id(x)][1]

    plain_args, plain_kwargs = tree_map_only(cls, value, (args, kwargs))
    out = func(*plain_args, **plain_kwargs)
    if not writes:
        return guarded(out) if views else out
    written: list[HeldWeight] = []
    for i, argument in enumerate(arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        given = args[i] if i < len(args) else kwargs.get(argument.name)
        many = given if isinstance(given, (list, tuple)) else (given,)
        written += [x for x in many if isinstance(x, cls)]
    cls.copy_all(written, [value(x) for x in written])
    originals = {id(plain): x for x, plain in values.values()}
    return tree_map_only(torch.Tensor, lambda t: originals.get(id(t), t), out)


@_handles(_aten.detach.default, _aten.alias.default)
def _detach(cls: type[HeldWeight], x: HeldWeight) -> Any:
    """Returns an alias with the same FP8 data and attributes."""
    alias = x._like(x._held, shape=x.shape, writable=x._writable)
    alias._gathered = x._gathered
    return _with_attributes(alias, x)


@_handles(_aten.cat.default)
def _cat(cls: type[HeldWeight], tensors: Any, dim: int = 0) -> torch.Tensor:
    """Concatenates tensors; weights that FSDP2 gathered, or with free scales, stay in FP8."""
    if dim == 0 and all(type(t) is cls for t in tensors):
        whole = joined(tensors)
        if whole is not None:
            new = tensors[0]._like(whole[0])
            new._gathered = whole[1]
            return new
        held = joined_codes(tensors)
        if held is not None:
            return cls(held, tensors[0]._recipe, tensors[0].dtype)
    return _on_values(cls, _aten.cat.default, (tensors, dim), {})


@_handles(_aten.clone.default)
def _clone(cls: type[HeldWeight], x: HeldWeight, memory_format: Any = None) -> Any:
    """Returns an FP8Parameter over a copy of the FP8 data."""
    return x._like(cloned(x), shape=x.shape)


@_handles(_aten._to_copy.default)
def _to_copy(
    cls: type[HeldWeight],
    x: HeldWeight,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    non_blocking: bool = False,
    **options: Any,
) -> torch.Tensor:
    """Returns a copy with nominal dtype ``dtype`` on ``device``; None keeps that of ``x``."""
    dtype = x.dtype if dtype is None else dtype
    device = x.device if device is None else device
    if dtype not in DTYPES:
        return x._values().to(device, dtype, non_blocking=non_blocking)

    def moved(t: torch.Tensor) -> torch.Tensor:
        return t.to(device, non_blocking=non_blocking, copy=True)

    copy = x._like(_changed(x, moved), dtype=dtype, shape=x.shape)
    copy._is_padded_shard = x._is_padded_shard
    return _with_attributes(copy, x)


@_handles(_aten.copy_.default)
def _copy_(
    cls: type[HeldWeight], x: torch.Tensor, source: torch.Tensor, non_blocking: bool = False
) -> torch.Tensor:
    """Copies ``source`` to ``x``: quantized if ``x`` is an FP8Parameter, else decoded."""
    if isinstance(x, cls):
        cls.copy_all([x], [source])
        return x
    assert isinstance(source, cls)
    return x.copy_(source._values(x.dtype if x.dtype in DTYPES else None))


@_handles(_aten.view.default, _aten._unsafe_view.default)
def _view(cls: type[HeldWeight], x: HeldWeight, size: Any) -> Any:
    """Returns an alias of another shape over the same data; GEMMs then read its values."""
    return x._like(x._held, shape=x._rowwise.view(size).shape, writable=x._writable)


@_handles(_aten.as_strided.default)
def _as_strided(
    cls: type[HeldWeight], x: HeldWeight, size: Any, stride: Any, storage_offset: int = 0
) -> Any:
    """Returns an alias if neither sizes nor strides change, as when FSDP2 ends a gather."""
    if tuple(size) != x.shape or tuple(stride) != x.stride() or storage_offset:
        raise NotImplementedError(
            f"FP8Parameter: as_strided must keep shape {list(x.shape)} and strides, got "
            f"{list(size)} and {list(stride)}"
        )
    return _detach(cls, x)


def _rows(cls: type[HeldWeight], x: HeldWeight, start: int, stop: int) -> Any:
    """Returns rows ``start`` to ``stop`` of the weight, which cannot be written to.

    Rows of a flattened weight are its elements. Of a shard that FSDP2 has padded, the first rows
    are this rank's, and writable.
    """
    if start == 0 and stop == x.shape[0]:
        return _detach(cls, x)
    layout, shape, held = x._layout, None, None
    is_shard = x._is_padded_shard and start == 0
    if x._is_whole:
        held = layout.rows(x._held, start, stop)
    elif x.dim() == 1 and not layout.block_rows and not layout.block_cols:
        fp8_data = x._rowwise.view(1, -1)[:, start:stop]
        held = QuantizedTensor(fp8_data, x._rowwise_scale_inv, None, None, x._held.dtype)
        shape = torch.Size((stop - start,))
    if held is None:
        raise NotImplementedError(
            f"FP8Parameter: rows {start} to {stop} of {list(x.shape)} cut what shares a scale "
            f"({x._layout.name}); use dequantize() first"
        )
    return x._like(held, shape=shape, writable=is_shard)


@_handles(_aten.slice.Tensor)
def _slice(
    cls: type[HeldWeight],
    x: HeldWeight,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> Any:
    """Returns an alias if the slice is the whole weight, else a view of its rows."""
    length = x.shape[dim]
    start, stop, step = slice(start, end, step).indices(length)
    if (start, stop, step) == (0, length, 1):
        return _detach(cls, x)
    _check_rows(x, dim)
    if step != 1:
        raise NotImplementedError(f"FP8Parameter: a slice must have step 1, got {step}")
    return _rows(cls, x, start, max(start, stop))


@_handles(_aten.split.Tensor)
def _split(cls: type[HeldWeight], x: HeldWeight, size: int, dim: int = 0) -> tuple[Any, ...]:
    """Returns views of ``size`` rows each; the last view may have fewer."""
    _check_rows(x, dim)
    length = x.shape[dim]
    starts = range(0, length, size) if length else (0,)
    return tuple([_rows(cls, x, start, min(start + size, length)) for start in starts])


@_handles(_aten.split_with_sizes.default)
def _split_with_sizes(
    cls: type[HeldWeight], x: HeldWeight, sizes: list[int], dim: int = 0
) -> tuple[Any, ...]:
    """Returns consecutive views of rows; view ``i`` has ``sizes[i]`` rows."""
    _check_rows(x, dim)
    parts, start = [], 0
    for size in sizes:
        parts.append(_rows(cls, x, start, start + size))
        start += size
    return tuple(parts)


@_handles(_aten.select.int)
def _select(cls: type[HeldWeight], x: HeldWeight, dim: int, index: int) -> Any:
    """Returns a view of one weight of a stack, which cannot be written to."""
    if not x._is_whole or x.dim() != 3 or dim % 3:
        return _on_values(cls, _aten.select.int, (x, dim, index), {})
    part = _changed(x, lambda t: t[index])
    part.free = x._held.free
    # Without the initial values, which are those of the stack.
    return cls(part, x._recipe, x.dtype, writable=False)


@_handles(_aten.unbind.int)
def _unbind(cls: type[HeldWeight], x: HeldWeight, dim: int = 0) -> tuple[Any, ...]:
    """Returns views of all weights of a stack, as ``_select`` does."""
    return tuple([_select(cls, x, dim, index) for index in range(x.shape[dim])])


def _check_rows(x: HeldWeight, dim: int) -> None:
    """Raises NotImplementedError unless ``dim`` is the dimension of rows, 0."""
    if dim % x.dim():
        raise NotImplementedError(
            f"FP8Parameter: a part must be of rows (dimension 0), got dimension {dim}; use "
            "dequantize() first"
        )


@_handles(_aten.new_zeros.default)
def _new_zeros(
    cls: type[HeldWeight],
    x: HeldWeight,
    size: Any,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    **options: Any,
) -> torch.Tensor:
    """Returns zeros as an FP8Parameter, or as a plain tensor if size or dtype allows none."""
    dtype = x.dtype if dtype is None else dtype
    device = x.device if device is None else device
    if len(size) != x._rowwise.dim() or dtype not in DTYPES:
        return torch.zeros(size, dtype=dtype, device=device)
    if x._layout.block_rows and 0 < size[0] < x.shape[0] and x.shape[0] % size[0]:
        # On every rank, also on those that would find their rows whole.
        raise NotImplementedError(
            "FP8Parameter: FSDP2 shards must be of as many rows on each rank with "
            f"{x._layout.name}, got {list(x.shape)} in shards of {size[0]} rows"
        )
    new = cls.empty(tuple(size), x._recipe, dtype, device)
    # The byte 0 is the value 0 in every format, at any scale.
    new._rowwise.view(torch.uint8).zero_()
    if x._layout.block_rows:
        new._rowwise_scale_inv.fill_(1.0)
    else:  # of the weight, so that an empty shard has it as well
        new._rowwise_scale_inv.copy_(x._rowwise_scale_inv)
    new._held.free = x._held.free
    new._is_padded_shard = True
    return new


@_handles(_aten.empty_like.default)
def _empty_like(
    cls: type[HeldWeight],
    x: HeldWeight,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    **options: Any,
) -> torch.Tensor:
    """Returns an uninitialized FP8Parameter, or a plain tensor if dtype or shape allows none."""
    dtype = x.dtype if dtype is None else dtype
    device = x.device if device is None else device
    if dtype not in DTYPES or not x._is_whole:
        return torch.empty(x.shape, dtype=dtype, device=device)
    made = x._like(cls.empty(tuple(x.shape), x._recipe, dtype, device)._held, dtype=dtype)
    if x._held.free:
        made._rowwise_scale_inv.fill_(math.nan)  # so that the first write changes all values
    return _with_attributes(made, x)


@_handles(_aten.dequantize.self)
def _dequantize(cls: type[HeldWeight], x: HeldWeight) -> torch.Tensor:
    """Returns the values as a plain tensor."""
    return x._values()


@_handles(torch.ops.apex_te.fp8_parameter_rowwise.default)
def _rowwise(cls: type[HeldWeight], x: HeldWeight) -> tuple[Any, Any]:
    """Returns the rowwise FP8 data and ``scale_inv``; op for compiled code."""
    return x._rowwise, x._rowwise_scale_inv


@_handles(torch.ops.apex_te.fp8_parameter_transposed.default)
def _transposed(cls: type[HeldWeight], x: HeldWeight) -> tuple[Any, Any]:
    """Returns the columnwise FP8 data and ``scale_inv``; op for compiled code."""
    return x._transposed()
