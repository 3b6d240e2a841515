"""FP8Parameter: a weight that is held in low precision only."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch

from ...ops.op_function import OpFunction
from ...recipe import Recipe, pack_recipe, unpack_recipe
from ..scheme import GemmQuantizers
from ..scheme.base import GemmBackend, Layout, layout_of, stored_recipe
from ..tensor import QuantizedTensor
from .decode import columnwise, quantizers_of, values
from .dispatch import DTYPES, KERNEL_DTYPES, attributes_of, cloned, dispatch
from .fsdp_gather import Gathered, gathered_codes, replace, shard_codes

__all__ = ["FP8Parameter", "dequantized", "fp8_operands", "record_weight"]


class _Initial:
    """The value before quantization, which all aliases of a parameter share."""

    __slots__ = ("value", "wanted")

    def __init__(self, wanted: bool, value: torch.Tensor | None = None) -> None:
        self.wanted = wanted
        self.value = value


class FP8Parameter(torch.Tensor):
    """A weight [rows, cols] of a high-precision dtype whose values are low-precision codes.

    To its user it is a tensor of ``dtype`` (float32, float16, bfloat16 or float64), and a
    ``torch.nn.Parameter`` once wrapped in one; its gradient arrives in that dtype. Ops that modules
    do not run on the codes see its values. Whatever writes to it (``copy_``, an optimizer's
    in-place step, ``load_state_dict``) quantizes what it then is, from the widest value at hand;
    with delayed scaling, too, by its own amax (rounded to bfloat16, so that loading values that
    were saved restores the codes). Its scales travel with its codes.

    The columnwise codes that backward needs are made there from the codes and dropped, or kept
    while a module's weight cache wants them.

    ``float()``, ``half()``, ``bfloat16()``, ``double()`` and ``to(dtype)`` of a
    ``torch.nn.Parameter`` change its nominal dtype, as converting a module does. Of any other
    FP8Parameter, such as ``detach().clone()`` of one, they give plain values. Attributes that are
    set on a parameter go with it where it or its module is moved, converted, deep-copied or
    pickled.

    ``view`` shares the codes, as do slices and splits of rows, which cannot be written to; other
    parts are to be taken of ``dequantize()``.
    """

    _held: QuantizedTensor
    _recipe: Recipe
    _initial: _Initial
    _writable: bool
    _codes: torch.dtype
    _read_by: type[GemmBackend]
    _is_matrix: bool
    _gathered: Gathered | None = None  # of a whole weight that FSDP2 made of shards

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls: type[FP8Parameter],
        held: QuantizedTensor,
        recipe: Recipe,
        dtype: torch.dtype,
        initial: _Initial | None = None,
        shape: torch.Size | None = None,
        writable: bool = True,
    ) -> FP8Parameter:
        codes = held.rowwise
        assert codes is not None
        shape = codes.shape if shape is None else shape
        self = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=codes.device)
        self._held = held
        self._recipe = recipe
        self._codes = held.dtype
        self._is_matrix = shape == codes.shape
        self._read_by = type(quantizers_of(recipe, codes.device).backend)
        self._initial = _Initial(False) if initial is None else initial
        self._writable = writable
        return self

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    @classmethod
    def empty(
        cls,
        shape: tuple[int, ...],
        recipe: Recipe,
        dtype: torch.dtype,
        device: torch.device | str | int | None = None,
        preserve_high_precision_init_val: bool = False,
    ) -> FP8Parameter:
        """One without values yet, to be quantized by ``recipe``.

        Errors: ValueError unless ``shape`` is a matrix's, TypeError for a dtype.
        """
        if len(shape) != 2:
            raise ValueError(f"FP8Parameter: shape must be [rows, cols], got {list(shape)}")
        if dtype not in DTYPES:
            raise TypeError(
                f"FP8Parameter: dtype must be float32, float16, bfloat16 or float64, got {dtype}"
            )
        recipe = stored_recipe(recipe)
        codes = torch.empty(shape, dtype=torch.uint8, device=device)
        codes = codes.view(quantizers_of(recipe, codes.device).weight.dtype)
        scale_inv = layout_of(recipe).scale_inv(*shape, codes.device)
        held = QuantizedTensor(codes, scale_inv, None, None, codes.dtype)
        return cls(held, recipe, dtype, _Initial(preserve_high_precision_init_val))

    def initialize(self, init_method: Callable[[torch.Tensor], Any]) -> None:
        """Take the values that ``init_method`` puts into a plain tensor, and keep a copy if asked.

        The copy, on the CPU, is what ``get_high_precision_init_val`` gives.
        """
        value = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        init_method(value)
        self.copy_(value)
        if self._initial.wanted and value.device.type != "meta":
            self._initial.value = value.cpu()

    def get_high_precision_init_val(self) -> torch.Tensor | None:
        """The values before quantization, on the CPU; None unless they were to be preserved."""
        return self._initial.value

    def clear_high_precision_init_val(self) -> None:
        """Free the values before quantization."""
        self._initial.value = None

    @property
    def recipe(self) -> Recipe:
        """The recipe by which the values are quantized."""
        return self._recipe

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The values as a plain tensor, default in the parameter's own dtype; differentiable."""
        dtype = self.dtype if dtype is None else dtype
        if torch.is_grad_enabled() and self.requires_grad:
            return _Dequantize.apply(self, dtype)
        return self._values(dtype)

    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """A tensor of another dtype or device; plain values if this is no parameter.

        A dtype that is given, or another tensor's, asks for values, also if it is the present one.
        """
        dtype = kwargs.get("dtype")
        for arg in (*args, kwargs.get("other")):
            if isinstance(arg, torch.dtype):
                dtype = arg
            elif isinstance(arg, torch.Tensor):
                dtype = arg.dtype
        if dtype not in DTYPES or _is_parameter(self):
            return super().to(*args, **kwargs)
        return self.dequantize(dtype).to(*args, **kwargs)

    def float(self, **options: Any) -> torch.Tensor:
        """``to(torch.float32)``."""
        return self.to(torch.float32, **options)

    def half(self, **options: Any) -> torch.Tensor:
        """``to(torch.float16)``."""
        return self.to(torch.float16, **options)

    def bfloat16(self, **options: Any) -> torch.Tensor:
        """``to(torch.bfloat16)``."""
        return self.to(torch.bfloat16, **options)

    def double(self, **options: Any) -> torch.Tensor:
        """``to(torch.float64)``."""
        return self.to(torch.float64, **options)

    @property
    def data(self) -> torch.Tensor:
        """The same weight without its history; what is assigned is quantized into it."""
        return super().data

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if value.shape != self.shape or value.device != self.device:
            raise ValueError(
                f"FP8Parameter: data must have shape {list(self.shape)} on {self.device}, "
                f"got {list(value.shape)} on {value.device}"
            )
        with torch.no_grad():
            self.copy_(value)

    def data_ptr(self) -> int:
        """The address of the codes."""
        assert self._held.rowwise is not None
        return self._held.rowwise.data_ptr()

    def __repr__(self) -> str:  # type: ignore[override]
        return (
            f"FP8Parameter(shape={list(self.shape)}, dtype={self.dtype}, device={self.device}, "
            f"codes={self._held.dtype}, {self._layout.name})"
        )

    # What torch needs of a wrapper subclass.

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        context = (self._recipe, self.dtype, self._held.dtype, self._writable)
        return ["_rowwise", "_rowwise_scale_inv"], context

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, torch.Tensor], context: Any, outer_size: Any, outer_stride: Any
    ) -> FP8Parameter:
        recipe, dtype, codes, writable = context
        rowwise, scale_inv = inner["_rowwise"], inner["_rowwise_scale_inv"]
        held = QuantizedTensor(rowwise, scale_inv, None, None, codes)
        return FP8Parameter(held, recipe, dtype, None, outer_size, writable)

    @property
    def _rowwise(self) -> torch.Tensor | None:
        return self._held.rowwise

    @property
    def _rowwise_scale_inv(self) -> torch.Tensor | None:
        return self._held.rowwise_scale_inv

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        return dispatch(cls, func, args, kwargs or {})

    @property
    def _layout(self) -> Layout:
        return layout_of(self._recipe)

    def _transposed(self) -> tuple[torch.Tensor, torch.Tensor]:
        return columnwise(self._recipe, self._held)

    def _like(
        self,
        held: QuantizedTensor,
        dtype: torch.dtype | None = None,
        shape: torch.Size | None = None,
        writable: bool = True,
    ) -> FP8Parameter:
        """Another over ``held``, of the same recipe and with the same initial values."""
        dtype = self.dtype if dtype is None else dtype
        return FP8Parameter(held, self._recipe, dtype, self._initial, shape, writable)

    def _values(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        dtype = self.dtype if dtype is None else dtype
        kernel = dtype if dtype in KERNEL_DTYPES else torch.float32
        return values(self._recipe, self._held, kernel).to(dtype).view(self.shape)

    def _write(self, source: torch.Tensor) -> None:
        """Quantize ``source``, or take over its codes; addresses stay."""
        if not self._writable and self.numel():
            raise NotImplementedError(
                "FP8Parameter: only a whole weight can be written to, got a part of one"
            )
        if self.device.type == "meta" or not self.numel():
            return
        held = self._held
        codes, scale_inv = held.rowwise, held.rowwise_scale_inv
        assert codes is not None
        assert scale_inv is not None
        if isinstance(source, FP8Parameter):
            same_kind = source._recipe == self._recipe and source._is_matrix
            if same_kind and source.shape == codes.shape:
                new = source._held
            else:
                new = self._quantized(source._values(torch.float32))
        else:
            new = self._quantized(source)
        assert new.rowwise is not None
        assert new.rowwise_scale_inv is not None
        if new is not held:
            codes.copy_(new.rowwise)
            scale_inv.copy_(new.rowwise_scale_inv)
            held.columnwise = held.columnwise_scale_inv = None

    def _quantized(self, value: torch.Tensor) -> QuantizedTensor:
        assert self._held.rowwise is not None
        dtype = torch.float32 if value.dtype not in KERNEL_DTYPES else value.dtype
        value = value.to(self.device, dtype).expand(self.shape)
        value = value.reshape(self._held.rowwise.shape).contiguous()
        return self._layout.quantize(quantizers_of(self._recipe, self.device).weight, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> FP8Parameter:
        found = memo.get(id(self))
        if found is not None:
            return found
        initial = _Initial(self._initial.wanted, self._initial.value)
        copy = FP8Parameter(cloned(self), self._recipe, self.dtype, initial)
        memo[id(self)] = copy = _wrapped(copy, *_flags(self))
        copy.__dict__.update(deepcopy(attributes_of(self), memo))
        return copy

    def __reduce_ex__(self, protocol: Any) -> tuple:
        held = self._held
        assert held.rowwise is not None
        assert held.rowwise_scale_inv is not None
        # Codes as bytes, which every version of torch can load.
        tensors = (held.rowwise.view(torch.uint8), held.rowwise_scale_inv)
        initial = (self._initial.wanted, self._initial.value)
        recipe = pack_recipe(self._recipe)
        saved = (recipe, self.dtype, tensors, _flags(self), initial)
        # An alias of a parameter has them only so that a module can take it.
        attributes = attributes_of(self) if _is_parameter(self) else None
        return _rebuild, (*saved, attributes) if attributes else saved

    # FSDP2: what a shard sends, and what is made of all shards.

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[torch.Tensor, ...], Any]:
        """The codes as bytes and the scales of this shard; all shards hold as many rows."""
        return shard_codes(self, mesh, outer_size, module, mp_policy)

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[torch.Tensor, ...],
        metadata: Any,
        param_dtype: torch.dtype,
        *,
        out: torch.Tensor | None = None,
    ) -> Any:
        """The whole weight over the gathered codes; into ``out`` from the second time on."""
        held, recipe, dtype = gathered_codes(self, all_gather_outputs, metadata)
        if out is not None:
            replace(out, held, Gathered())
            return None
        whole = FP8Parameter(held, recipe, dtype)
        whole._gathered = Gathered()
        return whole, (all_gather_outputs[0],)


def fp8_operands(
    weight: FP8Parameter, quantizers: GemmQuantizers, with_columnwise: bool, keep: bool = False
) -> QuantizedTensor | None:
    """The codes of ``weight``, if the products of ``quantizers`` read them; else None.

    ``with_columnwise``: the columnwise copy, too, made for this call or, with ``keep``, until the
    next write. Without it a forward reads them.

    Errors: ValueError for gathered codes that are not those of ``quantizers``.
    """
    if weight._gathered is not None:
        if torch.compiler.is_compiling():
            raise NotImplementedError(
                "FP8Parameter: a weight that FSDP2 gathers in FP8 must be read outside of a graph "
                "of torch.compile"
            )
        weight._gathered.read_by(quantizers, not with_columnwise)
    dtype = quantizers.weight.dtype
    if weight._read_by is not type(quantizers.backend) or weight._codes is not dtype:
        return None
    if not weight._is_matrix:
        return None
    if torch.compiler.is_compiling():
        rowwise = torch.ops.apex_te.fp8_parameter_rowwise(weight)
        other: Any = (None, None)
        if with_columnwise:
            other = torch.ops.apex_te.fp8_parameter_transposed(weight)
        return QuantizedTensor(rowwise[0], rowwise[1], other[0], other[1], dtype)
    held = weight._held
    if not with_columnwise or held.columnwise is not None:
        return held
    copy = weight._transposed()
    if not keep:
        return QuantizedTensor(held.rowwise, held.rowwise_scale_inv, *copy, held.dtype)
    held.columnwise, held.columnwise_scale_inv = copy
    return held


def dequantized(weight: torch.Tensor) -> torch.Tensor:
    """``weight``, of an FP8Parameter its values."""
    return weight.dequantize() if type(weight) is FP8Parameter else weight


def record_weight(weight: torch.Tensor, quantizer: Any) -> None:
    """Stage the amax of ``weight`` without a cast."""
    gathered = weight._gathered if type(weight) is FP8Parameter else None
    if gathered is None or gathered.settings is None:
        quantizer.record(dequantized(weight).contiguous())
    elif gathered.amax is not None:
        quantizer.stage(gathered.amax, gathered.group)


class _Dequantize(OpFunction):
    """The values of an FP8Parameter; the gradient passes as it is."""

    LABEL = "FP8Parameter"

    @staticmethod
    def forward(ctx: Any, weight: FP8Parameter, dtype: torch.dtype) -> torch.Tensor:
        ctx.dtype = weight.dtype
        return weight._values(dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:
        return grad.to(ctx.dtype), None


def _rebuild(
    packed: tuple,
    dtype: torch.dtype,
    tensors: tuple,
    flags: tuple,
    initial: tuple,
    attributes: dict[str, Any] | None = None,
) -> FP8Parameter:
    """What ``__reduce_ex__`` saved: plain values, so that ``weights_only=True`` loads it."""
    recipe = unpack_recipe(packed)
    rowwise, scale_inv = tensors
    codes = rowwise.view(quantizers_of(recipe, rowwise.device).weight.dtype)
    held = QuantizedTensor(codes, scale_inv, None, None, codes.dtype)
    made = _wrapped(FP8Parameter(held, recipe, dtype, _Initial(*initial)), *flags)
    made.__dict__.update(attributes or {})
    return made


def _is_parameter(x: FP8Parameter) -> bool:
    return bool(getattr(x, "_is_param", False))


def _flags(x: FP8Parameter) -> tuple[bool, bool]:
    return _is_parameter(x), x.requires_grad


def _wrapped(x: Any, is_parameter: bool, requires_grad: bool) -> Any:
    """``x`` as a torch.nn.Parameter, or not."""
    if is_parameter:
        return torch.nn.Parameter(x, requires_grad)
    return x.requires_grad_(requires_grad)


# Saved files name it so; it is not to change with the file.
_rebuild.__module__ = "apex_te.parameter"
torch.serialization.add_safe_globals([_rebuild])
