"""FP8Parameter, a weight that is held in FP8 only."""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch

from ...ops.binding import OpFunction
from ...recipe import Recipe, chosen_recipe, pack_recipe, unpack_recipe
from ..scheme.base import Layout, layout_of, scheme_of, stored_recipe
from ..scheme.gemm_backend import GemmBackend
from ..scheme.stack import stored_layout, stored_scale_inv
from ..tensor import QuantizedTensor
from .codes import checked_tensors, held_codes, of_file
from .decode import columnwise, quantizers_of, values
from .dispatch import DTYPES, KERNEL_DTYPES, OWN, attributes_of, cloned, dispatch
from .fsdp_gather import Gathered, gathered_fp8_data, replace, shard_fp8_data
from .write import copy_all

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
    """Weight ``[rows, cols]`` with a high-precision dtype, stored as FP8 data and scales.

    It may also be a stack ``[count, rows, cols]`` of weights with separate scales.

    It behaves as a tensor of ``dtype`` (float32, float16, bfloat16 or float64), and becomes a
    ``torch.nn.Parameter`` if wrapped in one; its gradient also has that dtype. GEMMs of modules
    read the FP8 data, all other ops the values. Every write (``copy_``, an optimizer's in-place
    step, ``load_state_dict``) quantizes the new values; float32 values are not rounded to ``dtype``
    before. The scale comes from the new values, even with delayed scaling. A single scale for the
    whole weight comes from the amax rounded to bfloat16, so that loading saved values restores the
    data. A write to an FSDP2 shard of a weight with one scale is collective: the amax is the
    maximum over the ranks that have the shards.

    With ``from_codes`` and ``set_codes_``, FP8 data and scales are given, used and saved unchanged.
    A later write leaves the elements that share a scale unchanged unless it changes one of them.

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
            recipe: a recipe or its name.
            dtype: the nominal dtype, in which the weight is read.
            device: device of the FP8 data; None uses PyTorch's default device.
            preserve_high_precision_init_val: keep the values of ``initialize`` on the CPU, too.

        Raises:
            ValueError: ``shape`` is not that of a matrix or a stack of matrices.
            TypeError: ``dtype``, the nominal one, is not float32, float16, bfloat16 or float64.
        """
        if len(shape) not in (2, 3):
            raise ValueError(
                "FP8Parameter: shape must be [rows, cols] or [count, rows, cols], "
                f"got {list(shape)}"
            )
        _check_dtype(dtype)
        recipe = stored_recipe(chosen_recipe("FP8Parameter", "recipe", recipe))
        fp8_data = torch.empty(shape, dtype=torch.uint8, device=device)
        fp8_data = fp8_data.view(quantizers_of(recipe, fp8_data.device).weight.dtype)
        scale_inv = stored_scale_inv(recipe, shape, fp8_data.device)
        held = QuantizedTensor(fp8_data, scale_inv, None, None, fp8_data.dtype)
        if not scheme_of(recipe).restores(recipe):
            held.free = True
            scale_inv.fill_(math.nan)  # so that the first write changes all values
        return cls(held, recipe, dtype, _Initial(preserve_high_precision_init_val))

    @classmethod
    def from_codes(
        cls,
        codes: torch.Tensor,
        scale_inv: torch.Tensor,
        recipe: Recipe | str,
        dtype: torch.dtype,
    ) -> FP8Parameter:
        """Makes a weight from FP8 data and scales, such as those of a checkpoint.

        Later writes quantize with ``recipe``.

        Args:
            codes: FP8 data [rows, cols], or [count, rows, cols] for a stack, in the dtype of the
                recipe's weights (float8_e4m3fn); contiguous data are not copied.
            scale_inv: float32, by which the data is multiplied: [ceil(rows / 128), ceil(cols /
                128)] with block scaling, [1] or [] with one scale; of a stack, with ``count``
                before.
            recipe: recipe, or its name, with one scale per weight or block scaling.
            dtype: the nominal dtype.

        Returns:
            The weight, not yet wrapped in a ``torch.nn.Parameter``.

        Raises:
            TypeError: an argument has a wrong type or dtype.
            ValueError: a shape is not as described.
            NotImplementedError: ``recipe`` stores separate data in the columnwise copy.
        """
        _check_dtype(dtype)
        recipe = stored_recipe(chosen_recipe("FP8Parameter", "recipe", recipe))
        return cls(held_codes(recipe, codes, scale_inv), recipe, dtype)

    def set_codes_(self, codes: torch.Tensor, scale_inv: torch.Tensor) -> FP8Parameter:
        """Copies FP8 data and scales into the weight, and returns it.

        For an FSDP2 shard, pass this rank's rows and their scales.

        Args:
            codes: FP8 data in the weight's shape, in float8_e4m3fn.
            scale_inv: float32 scales, as in ``from_codes``.

        Raises:
            TypeError: an argument has a wrong type or dtype.
            ValueError: a shape does not match, or this is a view of a part of a weight.
            NotImplementedError: the recipe stores separate data in the columnwise copy.
        """
        new = FP8Parameter(held_codes(self._recipe, codes, scale_inv), self._recipe, self.dtype)
        if new.shape != self.shape:
            raise ValueError(
                f"FP8Parameter: codes must have shape {list(self.shape)}, got {list(codes.shape)}"
            )
        with torch.no_grad():
            self.copy_(new)
        return self

    def codes(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the FP8 data and scales in the layout of checkpoint files.

        Both share the weight's memory; if its scales are padded, both are copies.

        Returns:
            codes: FP8 data [rows, cols], or [count, rows, cols] of a stack.
            scale_inv: float32 scales, in the shape that ``from_codes`` expects.

        Raises:
            NotImplementedError: the recipe stores separate data in the columnwise copy, or this is
                a view of another shape.
        """
        rows, cols = self._rowwise.shape[-2:]
        shape = layout_of(self._recipe).scales_of_file(rows, cols)
        if shape is None or not self._is_whole:
            raise NotImplementedError(
                f"FP8Parameter: a weight must be whole, with one scale or blocks, to have codes, "
                f"got {list(self.shape)} with {self._layout.name}"
            )
        scale_inv = of_file(self._rowwise_scale_inv, shape)
        if scale_inv.is_contiguous():
            return self._rowwise, scale_inv
        return self._rowwise.clone(), scale_inv.contiguous()

    @property
    def has_free_scales(self) -> bool:
        """True if state dicts contain data and scales, because values cannot restore scales."""
        return self._held.free

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
            dtype: dtype of the result; None uses that of the parameter.
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
        held = self._held
        context = (self._recipe, self.dtype, held.dtype, self._writable, held.free)
        return ["_rowwise", "_rowwise_scale_inv"], context

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, torch.Tensor], context: Any, outer_size: Any, outer_stride: Any
    ) -> FP8Parameter:
        recipe, dtype, fp8_dtype, writable, free = context
        rowwise, scale_inv = inner["_rowwise"], inner["_rowwise_scale_inv"]
        held = QuantizedTensor(rowwise, scale_inv, None, None, fp8_dtype)
        held.free = free
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
        held.free = self._held.free
        return FP8Parameter(held, self._recipe, dtype, self._initial, shape, writable)

    def _values(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Returns the values in ``dtype``, default the nominal dtype, not differentiable."""
        dtype = self.dtype if dtype is None else dtype
        kernel = dtype if dtype in KERNEL_DTYPES else torch.float32
        return values(self._recipe, self._held, kernel).to(dtype).view(self.shape)

    copy_all = staticmethod(copy_all)

    def __deepcopy__(self, memo: dict[int, Any]) -> FP8Parameter:
        found = memo.get(id(self))
        if found is not None:
            return found
        initial = _Initial(self._initial.wanted, self._initial.value)
        held = cloned(self)
        held.free = self._held.free
        copy = FP8Parameter(held, self._recipe, self.dtype, initial, self.shape)
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
        flags = (*_flags(self), True) if self._held.free else _flags(self)
        saved = (recipe, self.dtype, tensors, flags, initial)
        # An alias of a parameter has attributes only so that a module can take it.
        attributes = attributes_of(self) if _is_parameter(self) else None
        if not self._is_whole:  # a view, which files of whole weights do not have
            return _rebuild, (*saved, attributes, tuple(self.shape))
        return _rebuild, (*saved, attributes) if attributes else saved

    # FSDP2's hooks.

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[torch.Tensor, ...], Any]:
        """Returns this shard's FP8 data and scales for FSDP2 to gather; only FSDP2 calls it.

        Args:
            mesh: mesh over which the weight is sharded; None for one rank.
            outer_size: shape of the whole weight.
            outer_stride: not used.
            module: FSDP's module, for the check of its ``reshard_after_forward``; None skips it.
            mp_policy: mixed precision policy; its ``param_dtype`` becomes the nominal dtype.

        Returns:
            ``(tensors, context)``: uint8 data padded to equally many rows on each rank, with block
            scaling also ``scale_inv``, and what ``fsdp_post_all_gather`` takes as ``metadata``.

        Raises:
            NotImplementedError: the shard does not consist of whole rows or, with block scaling, of
                whole blocks, equally many on each rank; or ``reshard_after_forward`` is an int.
        """
        return shard_fp8_data(self, mesh, outer_size, module, mp_policy)

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[torch.Tensor, ...],
        metadata: Any,
        param_dtype: torch.dtype,
        *,
        out: torch.Tensor | None = None,
    ) -> Any:
        """Makes the whole weight from the gathered data, or fills ``out``; only FSDP2 calls it.

        Args:
            all_gather_outputs: the gathered tensors of ``fsdp_pre_all_gather``.
            metadata: its context, which has the dtype of FSDP2's policy.
            param_dtype: not read.
            out: weight of an earlier call, to be filled; None makes one.

        Returns:
            ``(weight, tensors)``, with the tensors whose memory FSDP2 manages; None with ``out``.
        """
        held, recipe, dtype = gathered_fp8_data(self, all_gather_outputs, metadata)
        held.free = self._held.free
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
    rowwise, scale_inv = checked_tensors(recipe, tensors)
    if own := sorted(OWN & set(attributes or ())):
        raise ValueError(f"FP8Parameter: attributes must be a user's, got {own}")
    fp8_data = rowwise.view(quantizers_of(recipe, rowwise.device).weight.dtype)
    held = QuantizedTensor(fp8_data, scale_inv, None, None, fp8_data.dtype)
    held.free = len(flags) > 2  # flags of other weights are two, as in files of earlier releases
    size = None if shape is None else torch.Size(shape)
    made = _wrapped(FP8Parameter(held, recipe, dtype, _Initial(*initial), size), *flags[:2])
    made.__dict__.update(attributes or {})
    return made


def _check_dtype(dtype: Any) -> None:
    """Raises TypeError unless a weight can have the nominal ``dtype``."""
    if dtype not in DTYPES:
        raise TypeError(
            f"FP8Parameter: dtype must be float32, float16, bfloat16 or float64, got {dtype}"
        )


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
