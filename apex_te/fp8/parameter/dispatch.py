"""What torch's ops do to an FP8Parameter: on the codes where they can, else on its values."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_map_only

from ..tensor import QuantizedTensor
from .fsdp_gather import joined

if TYPE_CHECKING:
    from .parameter import FP8Parameter

__all__ = ["DTYPES", "KERNEL_DTYPES", "attributes_of", "cloned", "dispatch"]

# Of what casts read and write, and of a parameter.
KERNEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
DTYPES = (*KERNEL_DTYPES, torch.float64)
_aten = torch.ops.aten
# What a compiled region calls to read the codes.
_library = torch.library.Library("apex_te", "FRAGMENT")
_library.define("fp8_parameter_rowwise(Tensor weight) -> (Tensor, Tensor)")
_library.define("fp8_parameter_transposed(Tensor weight) -> (Tensor, Tensor)")
# View ops whose result may be a copy of the values: linear layers read weights through them.
_READING_VIEWS = {
    _aten.t.default, _aten.transpose.int, _aten.permute.default, _aten.expand.default,
    _aten.unsqueeze.default,
}  # fmt: skip
# Of their tensor argument these need the shape, dtype and device only.
_FACTORIES = {
    _aten.zeros_like.default, _aten.ones_like.default, _aten.full_like.default,
    _aten.rand_like.default, _aten.randn_like.default, _aten.new_empty.default,
    _aten.new_empty_strided.default, _aten.new_full.default, _aten.new_ones.default,
}  # fmt: skip

# What an FP8Parameter itself, and torch.nn.Parameter, keeps in its __dict__.
_OWN = {
    "_held", "_recipe", "_codes", "_is_matrix", "_read_by", "_initial", "_writable", "_gathered",
    "_is_param",
}  # fmt: skip

_Handler = Callable[..., Any]
_HANDLERS: dict[Any, _Handler] = {}


def dispatch(cls: type[FP8Parameter], func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Run ``func``, one or more of whose arguments are FP8Parameters (``cls``)."""
    handler = _HANDLERS.get(func)
    if handler is not None:
        return handler(cls, *args, **kwargs)
    if func in _FACTORIES:
        x = args[0]
        like = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        return func(like, *args[1:], **kwargs)
    return _on_values(cls, func, args, kwargs)


def attributes_of(x: FP8Parameter) -> dict[str, Any]:
    """Attributes that others have set on ``x``, such as ``tensor_model_parallel``."""
    return {key: value for key, value in x.__dict__.items() if key not in _OWN}


def _with_attributes(new: FP8Parameter, x: FP8Parameter) -> FP8Parameter:
    """``new`` with the attributes of ``x``.

    A module that is moved or converted takes a detached alias of what its parameter becomes.
    """
    new.__dict__.update(attributes_of(x))
    return new


def cloned(x: FP8Parameter) -> QuantizedTensor:
    """Copies of the codes of ``x``."""
    return _changed(x, torch.clone)


def _changed(x: FP8Parameter, change: Callable[[torch.Tensor], torch.Tensor]) -> QuantizedTensor:
    held = x._held
    assert held.rowwise is not None
    assert held.rowwise_scale_inv is not None
    codes, scale_inv = change(held.rowwise), change(held.rowwise_scale_inv)
    return QuantizedTensor(codes, scale_inv, None, None, held.dtype)


def _handles(*funcs: Any) -> Callable[[_Handler], _Handler]:
    def register(handler: _Handler) -> _Handler:
        for func in funcs:
            _HANDLERS[func] = handler
        return handler

    return register


def _on_values(cls: type[FP8Parameter], func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """``func`` on plain tensors; what it writes to is quantized again."""
    arguments, returns = func._schema.arguments, func._schema.returns
    writes = any(a.alias_info is not None and a.alias_info.is_write for a in arguments)
    views = not writes and any(r.alias_info is not None for r in returns)
    if views and func not in _READING_VIEWS:
        raise NotImplementedError(
            f"FP8Parameter: {func} would be a view of values that are not there; use "
            "dequantize() first"
        )
    values: dict[int, tuple[FP8Parameter, torch.Tensor]] = {}

    def value(x: FP8Parameter) -> torch.Tensor:
        if id(x) not in values:
            values[id(x)] = x, x._values()
        return values[id(x)][1]

    plain_args, plain_kwargs = tree_map_only(cls, value, (args, kwargs))
    out = func(*plain_args, **plain_kwargs)
    if not writes:
        return out
    for i, argument in enumerate(arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        given = args[i] if i < len(args) else kwargs.get(argument.name)
        for x in given if isinstance(given, (list, tuple)) else (given,):
            if isinstance(x, cls):
                x._write(value(x))
    originals = {id(plain): x for x, plain in values.values()}
    return tree_map_only(torch.Tensor, lambda t: originals.get(id(t), t), out)


@_handles(_aten.detach.default, _aten.alias.default)
def _detach(cls: type[FP8Parameter], x: FP8Parameter) -> FP8Parameter:
    alias = x._like(x._held, shape=x.shape, writable=x._writable)
    alias._gathered = x._gathered
    return _with_attributes(alias, x)


@_handles(_aten.cat.default)
def _cat(cls: type[FP8Parameter], tensors: Any, dim: int = 0) -> torch.Tensor:
    """Rows of gathered parts as one weight, which a layer of several parameters computes with."""
    if dim == 0 and all(type(t) is cls for t in tensors):
        whole = joined(tensors)
        if whole is not None:
            new = tensors[0]._like(whole[0])
            new._gathered = whole[1]
            return new
    return _on_values(cls, _aten.cat.default, (tensors, dim), {})


@_handles(_aten.clone.default)
def _clone(cls: type[FP8Parameter], x: FP8Parameter, memory_format: Any = None) -> FP8Parameter:
    return x._like(cloned(x), shape=x.shape)


@_handles(_aten._to_copy.default)
def _to_copy(
    cls: type[FP8Parameter],
    x: FP8Parameter,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    non_blocking: bool = False,
    **options: Any,
) -> torch.Tensor:
    """Another device or nominal dtype; a dtype that cannot be nominal gives plain values."""
    dtype = x.dtype if dtype is None else dtype
    device = x.device if device is None else device
    if dtype not in DTYPES:
        return x._values().to(device, dtype, non_blocking=non_blocking)

    def moved(t: torch.Tensor) -> torch.Tensor:
        return t.to(device, non_blocking=non_blocking, copy=True)

    return _with_attributes(x._like(_changed(x, moved), dtype=dtype, shape=x.shape), x)


@_handles(_aten.copy_.default)
def _copy_(
    cls: type[FP8Parameter], x: torch.Tensor, source: torch.Tensor, non_blocking: bool = False
) -> torch.Tensor:
    if isinstance(x, cls):
        x._write(source)
        return x
    assert isinstance(source, cls)
    return x.copy_(source._values(x.dtype if x.dtype in DTYPES else None))


@_handles(_aten.view.default, _aten._unsafe_view.default)
def _view(cls: type[FP8Parameter], x: FP8Parameter, size: Any) -> FP8Parameter:
    """The same weight, and the same codes, under another shape; a GEMM then takes its values."""
    assert x._held.rowwise is not None
    return x._like(x._held, shape=x._held.rowwise.view(size).shape, writable=x._writable)


@_handles(_aten.as_strided.default)
def _as_strided(
    cls: type[FP8Parameter], x: FP8Parameter, size: Any, stride: Any, storage_offset: int = 0
) -> FP8Parameter:
    """For what is no change only, with which FSDP2 ends its gathering."""
    if tuple(size) != x.shape or tuple(stride) != x.stride() or storage_offset:
        raise NotImplementedError(
            f"FP8Parameter: as_strided must keep shape {list(x.shape)} and strides, got "
            f"{list(size)} and {list(stride)}"
        )
    return _detach(cls, x)


def _rows(cls: type[FP8Parameter], x: FP8Parameter, start: int, stop: int) -> FP8Parameter:
    if start == 0 and stop == x.shape[0]:
        return _detach(cls, x)
    held = x._layout.rows(x._held, start, stop) if x._is_matrix else None
    if held is None:
        raise NotImplementedError(
            f"FP8Parameter: rows {start} to {stop} of {list(x.shape)} cut what shares a scale "
            f"({x._layout.name}); use dequantize() first"
        )
    return x._like(held, writable=False)


@_handles(_aten.slice.Tensor)
def _slice(
    cls: type[FP8Parameter],
    x: FP8Parameter,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> FP8Parameter:
    length = x.shape[dim]
    start, stop, step = slice(start, end, step).indices(length)
    if (start, stop, step) == (0, length, 1):
        return _detach(cls, x)
    _check_rows(x, dim)
    if step != 1:
        raise NotImplementedError(f"FP8Parameter: a slice must have step 1, got {step}")
    return _rows(cls, x, start, max(start, stop))


@_handles(_aten.split.Tensor)
def _split(
    cls: type[FP8Parameter], x: FP8Parameter, size: int, dim: int = 0
) -> tuple[FP8Parameter, ...]:
    _check_rows(x, dim)
    length = x.shape[dim]
    starts = range(0, length, size) if length else (0,)
    return tuple([_rows(cls, x, start, min(start + size, length)) for start in starts])


@_handles(_aten.split_with_sizes.default)
def _split_with_sizes(
    cls: type[FP8Parameter], x: FP8Parameter, sizes: list[int], dim: int = 0
) -> tuple[FP8Parameter, ...]:
    _check_rows(x, dim)
    parts, start = [], 0
    for size in sizes:
        parts.append(_rows(cls, x, start, start + size))
        start += size
    return tuple(parts)


def _check_rows(x: FP8Parameter, dim: int) -> None:
    if dim % x.dim():
        raise NotImplementedError(
            f"FP8Parameter: a part must be of rows (dimension 0), got dimension {dim}; use "
            "dequantize() first"
        )


@_handles(_aten.new_zeros.default)
def _new_zeros(
    cls: type[FP8Parameter],
    x: FP8Parameter,
    size: Any,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    **options: Any,
) -> torch.Tensor:
    """Another of this kind, which is how FSDP2 makes a shard; plain for what cannot be one."""
    dtype = x.dtype if dtype is None else dtype
    device = x.device if device is None else device
    if len(size) != 2 or dtype not in DTYPES:
        return torch.zeros(size, dtype=dtype, device=device)
    if 0 < size[0] < x.shape[0] and x.shape[0] % size[0]:
        # On every rank, also on those that would find their rows whole.
        raise NotImplementedError(
            "FP8Parameter: FSDP2 shards must be of as many rows on each rank, got "
            f"{list(x.shape)} in shards of {size[0]} rows"
        )
    new = cls.empty(tuple(size), x._recipe, dtype, device)

    assert new._held.rowwise is not None
    assert new._held.rowwise_scale_inv is not None
    # The code 0 is the value 0 in every format, at any scale.
    new._held.rowwise.view(torch.uint8).zero_()
    new._held.rowwise_scale_inv.fill_(1.0)
    return new


@_handles(_aten.empty_like.default)
def _empty_like(
    cls: type[FP8Parameter],
    x: FP8Parameter,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    **options: Any,
) -> torch.Tensor:
    """Another of this kind, which is how a module leaves the meta device."""
    dtype = x.dtype if dtype is None else dtype
    device = x.device if device is None else device
    if dtype not in DTYPES or not x._is_matrix:
        return torch.empty(x.shape, dtype=dtype, device=device)
    made = x._like(cls.empty(tuple(x.shape), x._recipe, dtype, device)._held, dtype=dtype)
    return _with_attributes(made, x)


@_handles(_aten.dequantize.self)
def _dequantize(cls: type[FP8Parameter], x: FP8Parameter) -> torch.Tensor:
    return x._values()


@_handles(torch.ops.apex_te.fp8_parameter_rowwise.default)
def _rowwise(cls: type[FP8Parameter], x: FP8Parameter) -> tuple[Any, Any]:
    return x._held.rowwise, x._held.rowwise_scale_inv


@_handles(torch.ops.apex_te.fp8_parameter_transposed.default)
def _transposed(cls: type[FP8Parameter], x: FP8Parameter) -> tuple[Any, Any]:
    return x._transposed()
