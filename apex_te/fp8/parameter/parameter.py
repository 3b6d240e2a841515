"""FP8Parameter, a weight that is held in FP8 only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

import torch

from ...comm.collectives import max_over_ranks
from ...ops import multi_tensor
from ...ops.binding import OpFunction
from ...recipe import Recipe, chosen_recipe, pack_recipe, unpack_recipe
from ..scheme.base import Layout, stored_recipe
from ..scheme.gemm_backend import GemmBackend
from ..scheme.stack import stored_layout, stored_scale_inv
from ..tensor import QuantizedTensor
from .decode import columnwise, quantizers_of, values
from .dispatch import DTYPES, KERNEL_DTYPES, OWN, attributes_of, cloned, dispatch
from .fsdp_gather import Gathered, gathered_fp8_data, replace, shard_fp8_data, shard_groups

__all__ = ["FP8Parameter"]


class _Initial:
    """Values before quantization, on the CPU, which all aliases of a parameter share."""

    __slots__ = ("value", "wanted")

    def __init__(self, wanted: bool, value: torch.Tensor | None = None) -> None:
        self.wanted = wanted
        self.value = value

    def clear(self) -> None:
        """Frees the values from before quantization."""
        self.value = None


class FP8Parameter(torch.Tensor):
    """A weight ``[rows, cols]`` of a high-precision dtype that is stored as FP8 data and scales.

    It may also be a stack of such weights, ``[count, rows, cols]``, each with its own scales.

    It behaves as a tensor of ``dtype`` (float32, float16, bfloat16 or float64), and becomes a
    ``torch.nn.Parameter`` if wrapped in one; its gradient also has that dtype. GEMMs of modules
    read the FP8 data, all other ops the values. Every write (``copy_``, an optimizer's in-place
    step, ``load_state_dict``) quantizes the new values; float32 values are not rounded to
    ``dtype`` before. The scale comes from the new values, even with delayed scaling. A single scale
    for the whole weight comes from the amax rounded to bfloat16, so that loading saved values
    restores the data. A write to an FSDP2 shard of a weight with one scale is collective: the amax
    is the maximum over the ranks that have the shards.

    For its GEMMs, backward makes the transpose of the FP8 data (the columnwise copy, [cols, rows]),
    and drops it afterwards unless a module's weight cache keeps it.

    ``float()``, ``half()``, ``bfloat16()``, ``double()`` and ``to(dtype)`` of a
    ``torch.nn.Parameter`` change its nominal dtype, as converting a module does. Called on any
    other FP8Parameter, such as ``detach().clone()`` of one, they return plain values. Attributes
    set on a parameter are kept when it or its module is moved, converted, deep-copied or pickled.

    ``view`` shares the data. So do slices and splits of rows, and the weights of a stack, but they
    cannot be written to. Take other parts from ``dequantize()``.
    """

    _held: QuantizedTensor
    _recipe: Recipe
    _initial: _Initial
    _writable: bool
    _fp8_dtype: torch.dtype
    _read_by: type[GemmBackend]
    _is_whole: bool
    _gathered: Gathered | None = None  # of a whole weight that FSDP2 made of shards
    _is_padded_shard: bool = False  # padded memory; FSDP2 uses its first rows as the shard
    _shard_groups: tuple[Any, ...] = ()  # of a shard, once ``shard_groups`` has found them

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
        data = held.rowwise
        assert data is not None
        shape = data.shape if shape is None else shape
        self = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=data.device)
        self._held = held
        self._recipe = recipe
        self._fp8_dtype = held.dtype
        self._is_whole = shape == data.shape
        self._read_by = type(quantizers_of(recipe, data.device).backend)
        self._initial = _Initial(False) if initial is None else initial
        self._writable = writable
        return self

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    @classmethod
    def empty(
        cls,
        shape: tuple[int, ...],
        recipe: Recipe | str,
        dtype: torch.dtype,
        device: torch.device | str | int | None = None,
        preserve_high_precision_init_val: bool = False,
    ) -> FP8Parameter:
        """Makes a weight without values; the recipe's ``stored_recipe`` quantizes it.

        Args:
            shape: [rows, cols], or [count, rows, cols] for a stack.

        Raises:
            ValueError: ``shape`` is not that of a matrix or a stack of matrices.
            TypeError: ``dtype``, the nominal one, is not float32, float16, bfloat16 or float64.
        """
        if len(shape) not in (2, 3):
            raise ValueError(
                "FP8Parameter: shape must be [rows, cols] or [count, rows, cols], "
                f"got {list(shape)}"
            )
        if dtype not in DTYPES:
            raise TypeError(
                f"FP8Parameter: dtype must be float32, float16, bfloat16 or float64, got {dtype}"
            )
        recipe = stored_recipe(chosen_recipe("FP8Parameter", "recipe", recipe))
        fp8_data = torch.empty(shape, dtype=torch.uint8, device=device)
        fp8_data = fp8_data.view(quantizers_of(recipe, fp8_data.device).weight.dtype)
        scale_inv = stored_scale_inv(recipe, shape, fp8_data.device)
        held = QuantizedTensor(fp8_data, scale_inv, None, None, fp8_data.dtype)
        return cls(held, recipe, dtype, _Initial(preserve_high_precision_init_val))

    def initialize(self, init_method: Callable[[torch.Tensor], Any]) -> None:
        """Quantizes the values with which ``init_method`` fills a plain tensor in place.

        With ``preserve_high_precision_init_val`` a copy of the values is kept on the CPU.
        """
        value = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        init_method(value)
        self.copy_(value)
        if self._initial.wanted and value.device.type != "meta":
            self._initial.value = value.cpu()

    @property
    def get_high_precision_init_val(self) -> Callable[[], torch.Tensor]:
        """Function that returns the initial values before quantization, on the CPU; a property.

        Raises:
            AttributeError: no initial values are kept; Megatron-Core tests this by ``hasattr``.
        """
        value = self._kept("get_high_precision_init_val")
        return lambda: value

    @property
    def clear_high_precision_init_val(self) -> Callable[[], None]:
        """Function that frees the kept initial values; a property.

        Raises:
            AttributeError: no initial values are kept, or they were freed already.
        """
        self._kept("clear_high_precision_init_val")
        return self._initial.clear

    def _kept(self, name: str) -> torch.Tensor:
        """Returns the initial values; raises AttributeError for ``name`` if none are kept."""
        if self._initial.value is None:
            raise AttributeError(
                f"FP8Parameter: {name} needs initial values that are kept, which "
                "fp8_model_init(preserve_high_precision_init_val=True) does until they are cleared"
            )
        return self._initial.value

    @property
    def recipe(self) -> Recipe:
        """Recipe with which the values are quantized."""
        return self._recipe

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Returns the values as a plain tensor; differentiable.

        Args:
            dtype: dtype of the result; None takes that of the parameter.
        """
        dtype = self.dtype if dtype is None else dtype
        if torch.is_grad_enabled() and self.requires_grad:
            return _Dequantize.apply(self, dtype)
        return self._values(dtype)

    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Returns this weight with another dtype or on another device, as ``torch.Tensor.to`` does.

        For a ``torch.nn.Parameter`` the result is an FP8Parameter. For any other FP8Parameter it is
        a plain tensor of the values if a dtype or a tensor is passed, even one with its own dtype,
        and an FP8Parameter if only a device is. A dtype that an FP8Parameter cannot have always
        gives a plain tensor.
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
        """Converts the weight to float32, as ``to(torch.float32, **options)`` does."""
        return self.to(torch.float32, **options)

    def half(self, **options: Any) -> torch.Tensor:
        """Converts the weight to float16, as ``float`` does to float32."""
        return self.to(torch.float16, **options)

    def bfloat16(self, **options: Any) -> torch.Tensor:
        """Converts the weight to bfloat16, as ``float`` does to float32."""
        return self.to(torch.bfloat16, **options)

    def double(self, **options: Any) -> torch.Tensor:
        """Converts the weight to float64, as ``float`` does to float32."""
        return self.to(torch.float64, **options)

    @property
    def data(self) -> torch.Tensor:
        """The FP8 weight itself, without autograd history; assigning a tensor quantizes it into it.

        Raises:
            ValueError: an assigned tensor's shape or device differs from the weight's.
        """
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
        """Returns the address of the rowwise FP8 data."""
        return self._rowwise.data_ptr()

    def share_memory_(self) -> FP8Parameter:
        """Moves FP8 data and scales to shared memory, for other processes; returns ``self``."""
        self._rowwise.share_memory_()
        self._rowwise_scale_inv.share_memory_()
        return self

    def is_shared(self) -> bool:
        """Returns True if the FP8 data are in shared memory; always True on a GPU."""
        return self._rowwise.is_shared()

    def __repr__(self) -> str:  # type: ignore[override]
        return (
            f"FP8Parameter(shape={list(self.shape)}, dtype={self.dtype}, device={self.device}, "
            f"fp8_data={self._held.dtype}, {self._layout.name})"
        )

    # The protocol of torch's wrapper subclasses.

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        context = (self._recipe, self.dtype, self._held.dtype, self._writable)
        return ["_rowwise", "_rowwise_scale_inv"], context

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, torch.Tensor], context: Any, outer_size: Any, outer_stride: Any
    ) -> FP8Parameter:
        recipe, dtype, fp8_dtype, writable = context
        rowwise, scale_inv = inner["_rowwise"], inner["_rowwise_scale_inv"]
        held = QuantizedTensor(rowwise, scale_inv, None, None, fp8_dtype)
        return FP8Parameter(held, recipe, dtype, None, outer_size, writable)

    @property
    def _rowwise(self) -> torch.Tensor:
        assert self._held.rowwise is not None
        return self._held.rowwise

    @property
    def _rowwise_scale_inv(self) -> torch.Tensor:
        assert self._held.rowwise_scale_inv is not None
        return self._held.rowwise_scale_inv

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        return dispatch(cls, func, args, kwargs or {})

    @property
    def _layout(self) -> Layout:
        return stored_layout(self._recipe, self._rowwise.dim())

    def _transposed(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the columnwise FP8 data ``[.., cols, rows]`` and their ``scale_inv``."""
        return columnwise(self._recipe, self._held)

    def _like(
        self,
        held: QuantizedTensor,
        dtype: torch.dtype | None = None,
        shape: torch.Size | None = None,
        writable: bool = True,
    ) -> FP8Parameter:
        """Returns an FP8Parameter over ``held``, with the recipe and initial values of ``self``."""
        dtype = self.dtype if dtype is None else dtype
        return FP8Parameter(held, self._recipe, dtype, self._initial, shape, writable)

    def _values(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Returns the values in ``dtype``, default the nominal dtype, not differentiable."""
        dtype = self.dtype if dtype is None else dtype
        kernel = dtype if dtype in KERNEL_DTYPES else torch.float32
        return values(self._recipe, self._held, kernel).to(dtype).view(self.shape)

    @staticmethod
    def copy_all(weights: Sequence[FP8Parameter], sources: Sequence[torch.Tensor]) -> None:
        """Copies each source to the weight at the same index, as ``copy_`` does.

        If weights are FSDP2 shards, of the same weights on all ranks, one collective per process
        group reduces the amax values of all its weights over the ranks.
        """
        shared: dict[Any, list[tuple[FP8Parameter, torch.Tensor]]] = {}
        for weight, source in zip(weights, sources, strict=True):
            if not weight._writable and weight.numel():
                raise NotImplementedError(
                    "FP8Parameter: only a whole weight can be written to, got a part of one"
                )
            if weight.device.type == "meta":
                continue
            weight._is_padded_shard = False
            groups = () if weight._layout.block_rows else shard_groups(weight)
            if groups:
                item = weight, weight._kernel_values(source)
                shared.setdefault((weight.device, groups), []).append(item)
            elif weight.numel():
                weight._write(source)
        for (_, groups), items in shared.items():
            amaxes = multi_tensor.amax([value for _, value in items])
            for group in groups:
                max_over_ranks(amaxes, group)
            for (weight, value), amax in zip(items, amaxes.split(1), strict=True):
                quantizer = quantizers_of(weight._recipe, weight.device).weight
                weight._store(weight._layout.quantize_part(quantizer, value, amax))

    def _write(self, source: torch.Tensor) -> None:
        """Writes ``source`` to the data in place; quantizes it, or copies FP8 data that fit."""
        if isinstance(source, FP8Parameter):
            same_kind = source._recipe == self._recipe and source._is_whole
            if same_kind and source.shape == self._rowwise.shape:
                self._store(source._held)
                return
        quantizer = quantizers_of(self._recipe, self.device).weight
        self._store(self._layout.quantize(quantizer, self._kernel_values(source)))

    def _store(self, new: QuantizedTensor) -> None:
        """Copies a rowwise copy of new values to the data in place."""
        held = self._held
        if new is not held:
            assert new.rowwise is not None
            assert new.rowwise_scale_inv is not None
            self._rowwise.copy_(new.rowwise)
            self._rowwise_scale_inv.copy_(new.rowwise_scale_inv)
            held.columnwise = held.columnwise_scale_inv = None

    def _kernel_values(self, source: torch.Tensor) -> torch.Tensor:
        """Returns ``source`` as values that casts read, broadcast to the data's shape."""
        if isinstance(source, FP8Parameter):
            source = source._values(torch.float32)
        dtype = torch.float32 if source.dtype not in KERNEL_DTYPES else source.dtype
        value = source.to(self.device, dtype).expand(self.shape)
        return value.reshape(self._rowwise.shape).contiguous()

    def __deepcopy__(self, memo: dict[int, Any]) -> FP8Parameter:
        found = memo.get(id(self))
        if found is not None:
            return found
        initial = _Initial(self._initial.wanted, self._initial.value)
        copy = FP8Parameter(cloned(self), self._recipe, self.dtype, initial, self.shape)
        memo[id(self)] = copy = _wrapped(copy, *_flags(self))
        copy.__dict__.update(deepcopy(attributes_of(self), memo))
        return copy

    def __reduce_ex__(self, protocol: Any) -> tuple:
        # FP8 data as bytes, which every version of torch can load, and plain pickle.
        scale_inv = self._rowwise_scale_inv
        if scale_inv.dtype is torch.float8_e8m0fnu:
            scale_inv = scale_inv.view(torch.uint8)
        tensors = (self._rowwise.view(torch.uint8), scale_inv)
        initial = (self._initial.wanted, self._initial.value)
        recipe = pack_recipe(self._recipe)
        saved = (recipe, self.dtype, tensors, _flags(self), initial)
        # An alias of a parameter has attributes only so that a module can take it.
        attributes = attributes_of(self) if _is_parameter(self) else None
        if not self._is_whole:  # a view, which files of whole weights do not have
            return _rebuild, (*saved, attributes, tuple(self.shape))
        return _rebuild, (*saved, attributes) if attributes else saved

    # FSDP2's hooks.

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[torch.Tensor, ...], Any]:
        """Returns this shard's FP8 data and scales, which FSDP2 gathers; a hook of FSDP2."""
        return shard_fp8_data(self, mesh, outer_size, module, mp_policy)

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[torch.Tensor, ...],
        metadata: Any,
        param_dtype: torch.dtype,
        *,
        out: torch.Tensor | None = None,
    ) -> Any:
        """Makes the whole weight from the gathered data, or fills ``out``; a hook of FSDP2.

        Also returns the tensors whose memory FSDP2 manages. ``metadata`` has the dtype of FSDP2's
        policy, so that ``param_dtype`` is not read.
        """
        held, recipe, dtype = gathered_fp8_data(self, all_gather_outputs, metadata)
        if out is not None:
            replace(out, held, Gathered())
            return None
        whole = FP8Parameter(held, recipe, dtype)
        whole._gathered = Gathered()
        return whole, (all_gather_outputs[0],)


class _Dequantize(OpFunction):
    """Autograd function for the values of an FP8Parameter; the gradient passes unchanged."""

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
    shape: tuple[int, ...] | None = None,
) -> FP8Parameter:
    """Rebuilds a pickled FP8Parameter from values that ``weights_only=True`` loading accepts."""
    recipe = unpack_recipe(packed)
    rowwise, scale_inv = _checked_tensors(recipe, tensors)
    if own := sorted(OWN & set(attributes or ())):
        raise ValueError(f"FP8Parameter: attributes must be a user's, got {own}")
    fp8_data = rowwise.view(quantizers_of(recipe, rowwise.device).weight.dtype)
    held = QuantizedTensor(fp8_data, scale_inv, None, None, fp8_data.dtype)
    size = None if shape is None else torch.Size(shape)
    made = _wrapped(FP8Parameter(held, recipe, dtype, _Initial(*initial), size), *flags)
    made.__dict__.update(attributes or {})
    return made


def _checked_tensors(recipe: Recipe, tensors: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns saved data and scales, after checking that the scales are those of such data."""
    if len(tensors) != 2 or not all(isinstance(each, torch.Tensor) for each in tensors):
        raise ValueError(f"FP8Parameter: tensors must be two tensors, got {len(tensors)} values")
    rowwise, scale_inv = tensors
    if rowwise.dim() not in (2, 3) or rowwise.element_size() != 1:
        raise ValueError(
            "FP8Parameter: data must be a matrix of bytes, or a stack of them, "
            f"got {list(rowwise.shape)} of {rowwise.dtype}"
        )
    if scale_inv.dtype is torch.uint8:
        scale_inv = scale_inv.view(torch.float8_e8m0fnu)
    due = stored_scale_inv(recipe, rowwise.shape, torch.device("meta"))
    if scale_inv.shape != due.shape or scale_inv.dtype != due.dtype:
        raise ValueError(
            f"FP8Parameter: scale_inv must have shape {list(due.shape)} of {due.dtype} for data "
            f"{list(rowwise.shape)}, got {list(scale_inv.shape)} of {scale_inv.dtype}"
        )
    return rowwise, scale_inv


def _is_parameter(x: FP8Parameter) -> bool:
    """Returns True if ``x`` is a ``torch.nn.Parameter``."""
    return bool(getattr(x, "_is_param", False))


def _flags(x: FP8Parameter) -> tuple[bool, bool]:
    """Returns two bools: whether ``x`` is a ``torch.nn.Parameter``, and its ``requires_grad``."""
    return _is_parameter(x), x.requires_grad


def _wrapped(x: Any, is_parameter: bool, requires_grad: bool) -> Any:
    """Returns ``x`` with ``requires_grad`` set, as a ``torch.nn.Parameter`` if asked for."""
    if is_parameter:
        return torch.nn.Parameter(x, requires_grad)
    return x.requires_grad_(requires_grad)


# Saved files name it so; it is not to change with the file.
_rebuild.__module__ = "apex_te.parameter"
torch.serialization.add_safe_globals([_rebuild])
