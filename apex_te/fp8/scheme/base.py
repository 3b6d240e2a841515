"""Base classes of schemes, their quantizers, GEMM backends and layouts; the registry of schemes."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

import torch

from ...ops import emulated_gemm, fp8_gemm, grouped_gemm
from ...ops.fp8_output import FP8_DTYPES, FP8Output
from ...runtime.gpu_arch import has_fp8_products
from ..tensor import QuantizedTensor

if TYPE_CHECKING:
    from ...ops.grouped_quantize import Groups
    from ...recipe import Recipe
    from .grouped import GroupQuantizer

__all__ = [
    "DGRAD",
    "FPROP",
    "WGRAD",
    "FP8Gemm",
    "FusedCast",
    "GemmBackend",
    "GemmQuantizers",
    "GemmSlots",
    "GroupQuantizers",
    "Layout",
    "Quantizer",
    "QuantizerSets",
    "ScaleSharing",
    "Scheme",
    "Slot",
    "Slots",
    "build_quantizers",
    "group_quantizers",
    "layout_of",
    "scheme_of",
    "shared_scale",
    "stored_recipe",
    "warn_emulated",
]

FPROP, DGRAD, WGRAD = range(3)
_warned: set[str] = set()


class FusedCast(Protocol):
    """Protocol of an op whose result a quantizer wants, and which may write that in FP8 itself.

    Attributes:
        x: the op's input, ``[rows, ...]``.
        can_fuse: True if the op has ``fp8``; otherwise it has only ``plain``.
        with_dbias: True if the column sums of the result are wanted in ``dbias``.
        dbias: column sums ``[cols]``, or None; set by ``plain`` or ``fp8`` where the op can compute
            them, else by the quantizer.
    """

    x: torch.Tensor
    can_fuse: bool
    with_dbias: bool
    dbias: torch.Tensor | None

    def scalars(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns three fp32 tensors ``[1]`` on the op's device: one zero, two uninitialized."""

    def plain(self) -> torch.Tensor:
        """Returns the result ``[rows, cols]`` in high precision."""

    def fp8(
        self,
        scale: torch.Tensor,
        dtype: torch.dtype,
        rowwise: bool,
        columnwise: bool,
        amax: torch.Tensor | None,
    ) -> FP8Output:
        """Returns the result ``[rows, cols]`` quantized with one scale.

        Args:
            scale: fp32 ``[1]``.
            dtype: FP8 dtype of the data.
            rowwise, columnwise: the copies to write; with neither the op only computes the amax.
            amax: fp32 ``[1]``, replaced by its maximum with the result's amax; None: not computed.
        """


class Quantizer:
    """Casts matrices to FP8 by one scheme; a subclass defines ``quantize``.

    Attributes:
        dtype: element type of the FP8 data; ``torch.uint8`` for HiF8.
    """

    __slots__ = ("dtype",)

    dtype: torch.dtype

    def quantize(
        self,
        x: torch.Tensor,
        rowwise: bool = True,
        columnwise: bool = True,
        with_dbias: bool = False,
    ) -> tuple[QuantizedTensor, torch.Tensor | None]:
        """Quantizes a matrix.

        Args:
            x: ``[rows, cols]``, contiguous fp32, fp16 or bf16.
            rowwise, columnwise: the copies to make.
            with_dbias: also sum the columns.

        Returns:
            quantized: the copies with their scales.
            sums: column sums ``[cols]`` in the dtype of ``x``, or None without ``with_dbias``.
        """
        raise NotImplementedError

    def produce(
        self, producer: FusedCast, rowwise: bool = True, columnwise: bool = True
    ) -> QuantizedTensor:
        """Runs an op and quantizes its result ``[rows, cols]``.

        The op writes the FP8 data itself where both it and the scheme can, else its result is cast.
        Column sums that ``producer.with_dbias`` asks for are left in ``producer.dbias``.

        Args:
            producer: the op, ready to run.
            rowwise, columnwise: the copies to make.
        """
        x = producer.plain()
        sums = producer.with_dbias and producer.dbias is None
        quantized, dbias = self.quantize(x, rowwise, columnwise, sums)
        if sums:
            producer.dbias = dbias
        return quantized

    def shared(self, group: Any) -> Quantizer | None:
        """Returns a quantizer like this one whose scale is equal on all ranks of ``group``.

        Rows that several ranks quantize with it can be gathered as FP8 data. None for a scheme
        without such a scale: the caller then gathers values in high precision.
        """
        return None

    def settings(self) -> tuple:
        """Returns the settings that, together with amaxes, determine the FP8 data of a matrix."""
        return (type(self).__name__, self.dtype)

    def needs_whole_amax(self) -> bool:
        """Returns True if the next ``quantize_rows`` needs the amax of the whole matrix."""
        return False

    def quantize_rows(
        self, x: torch.Tensor, amax: torch.Tensor | None, keep: bool
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Quantizes some rows of a matrix to the data that they have in the quantized matrix.

        Args:
            x: ``[rows, cols]``, the rows.
            amax: fp32 ``[1]``, of the whole matrix; None where ``needs_whole_amax`` is False.
            keep: True to write a scale that is computed from ``amax`` into the FP8 state.

        Returns:
            fp8_data: rowwise FP8 data ``[rows, cols]``.
            scale_inv: multipliers of the data to high precision.
            amax: fp32 ``[1]``, that of ``x``, to be passed to ``stage``; None for a scheme that
                stages none.
        """
        raise NotImplementedError(
            f"{type(self).__name__}: rows of a weight can not be quantized before they are "
            "gathered, because its columnwise copy is made of the values"
        )

    def scales_of_rows(
        self, quantizers: Sequence[Any], amaxes: torch.Tensor | None
    ) -> tuple[Sequence[torch.Tensor], torch.Tensor | None] | None:
        """Computes scales by which ``multi_tensor.quantize`` casts several matrices' rows at once.

        The data are those that ``quantize_rows`` makes of each.

        Args:
            quantizers: one for each matrix; this one is the first.
            amaxes: fp32 ``[len(quantizers)]``, of the whole matrices; None for a scheme with state,
                which does not use them.

        Returns:
            scales: fp32 ``[1]`` for each matrix.
            scale_invs: fp32 ``[len(quantizers)]``, or None where each is ``1 / scale``.

            None in place of the pair where one launch cannot quantize the rows; the caller then
            calls ``quantize_rows`` for each matrix.
        """
        return None

    def stage(self, amax: torch.Tensor, group: Any) -> None:
        """Stages the amax of this rank's rows of a sharded matrix; does nothing without a state.

        Args:
            amax: fp32 ``[1]``.
            group: process group over which the matrix is sharded.
        """

    def grouped(self, quantizers: Sequence[Any]) -> GroupQuantizer | None:
        """Returns a quantizer for groups of rows whose sizes only the device knows.

        Args:
            quantizers: those of one role (such as input) of all GEMMs of a module; this one is the
                first.

        Returns:
            The quantizer; None for a scheme that has none, with which the caller needs sizes on the
            host.
        """
        return None

    def can_fuse(self, producer: FusedCast) -> bool:
        """Returns True if ``producer`` can write FP8 data of this quantizer's dtype itself.

        No op writes fnuz formats.
        """
        return producer.can_fuse and self.dtype in FP8_DTYPES

    def record(self, x: torch.Tensor) -> None:
        """Stages the amax of ``x`` without quantizing it; nothing for a scheme without state."""

    def dequantize(
        self, quantized: QuantizedTensor, dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        """Returns the values ``[rows, cols]`` of ``quantized``, decoded from a copy that it has."""
        if quantized.rowwise is not None:
            return self._decode(quantized.rowwise, quantized.rowwise_scale_inv, dtype)
        if quantized.columnwise is None:
            raise ValueError("dequantize: rowwise or columnwise must be present, got neither")
        return self._decode(quantized.columnwise, quantized.columnwise_scale_inv, dtype).t()

    def _decode(self, fp8_data: torch.Tensor, scale_inv: Any, dtype: torch.dtype) -> torch.Tensor:
        """Returns the values of FP8 data, here with a ``scale_inv`` that broadcasts."""
        return (fp8_data.to(torch.float32) * scale_inv).to(dtype)

    def known_scale(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """Returns the scale with which to cast ``x``, for code that keeps the copies between calls.

        Returns:
            scale: fp32 ``[1]``.
            amax: fp32 ``[1]``, the element into which to stage the amax of ``x``, or None.

            None in place of the pair for a scheme that computes the scale from ``x``: its casts of
            one ``x`` are all equal, so the caller need not keep copies.
        """
        return None

    def rewrite(self, x: torch.Tensor, held: QuantizedTensor, noop: torch.Tensor | None) -> bool:
        """Quantizes ``x`` into the copies that an earlier ``quantize`` made, as a capture needs.

        Args:
            x: ``[rows, cols]``.
            held: rowwise and columnwise copies, which are overwritten with their scales.
            noop: int32 ``[1]`` on the device; if it is not zero, neither ``held`` nor a staged amax
                changes. None: always write.

        Returns:
            True if the copies were written, or are when a capture replays. False, with nothing
            written, for a scheme without state: its casts of one ``x`` are all equal, so the caller
            need not keep copies between replays.
        """
        return False

    def state_tensors(self) -> tuple[torch.Tensor, ...]:
        """Returns the tensors of the FP8 state that a cast reads or writes."""
        return ()

    def snapshot(self) -> torch.Tensor | None:
        """Returns a copy of the scale, for ``requantize``; None for a scheme without state."""
        return None

    def requantize(self, x: torch.Tensor, snapshot: torch.Tensor | None) -> QuantizedTensor:
        """Returns the columnwise copy that ``quantize`` made of ``x`` earlier.

        Args:
            x: ``[rows, cols]``.
            snapshot: what ``snapshot`` returned at the earlier cast.
        """
        return self.quantize(x, False, True)[0]


def shared_scale(out: Any, dtype: torch.dtype) -> QuantizedTensor:
    """Returns an op's output, in which one scale serves both copies, as a QuantizedTensor.

    Args:
        out: ``FP8Output`` or a similar tuple with ``rowwise``, ``columnwise`` and ``scale_inv``.
        dtype: element type of the FP8 data.
    """
    return QuantizedTensor(out.rowwise, out.scale_inv, out.columnwise, out.scale_inv, dtype)


class GemmBackend:
    """Multiplies operands quantized by one scheme; a subclass defines ``multiply``.

    Args:
        split: True to keep partial sums in fp32, for (fprop, dgrad, wgrad); ignored by a scheme
            without that choice.
        device: the operands' device.
    """

    __slots__ = ("split",)

    def __init__(self, split: tuple[bool, bool, bool], device: torch.device) -> None:
        self.split = split

    def multiply(
        self,
        product: int,
        a: Any,
        b: Any,
        a_scale_inv: Any,
        b_scale_inv: Any,
        **options: Any,
    ) -> torch.Tensor:
        """Returns the product ``a @ b.T``, ``[M, N]``.

        Args:
            product: FPROP, DGRAD or WGRAD.
            a: FP8 data ``[M, K]``.
            b: FP8 data ``[N, K]``.
            a_scale_inv, b_scale_inv: multipliers of the operands, in the scheme's shape.
            options: ``out``, ``out_dtype``, ``bias`` and ``accumulate``, as for ``fp8_gemm``.
        """
        raise NotImplementedError

    def fprop(
        self,
        x: QuantizedTensor,
        weight: QuantizedTensor,
        out_dtype: torch.dtype,
        bias: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Returns ``x [rows, in] @ weight [out, in].T + bias``, from both rowwise copies."""
        return self.multiply(
            FPROP, x.rowwise, weight.rowwise, x.rowwise_scale_inv, weight.rowwise_scale_inv,
            out=out, out_dtype=out_dtype, bias=bias,
        )  # fmt: skip

    def dgrad(
        self,
        dy: QuantizedTensor,
        weight: QuantizedTensor,
        out_dtype: torch.dtype,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Returns ``dy [rows, out] @ weight [out, in]``, from the weight's columnwise copy."""
        return self.multiply(
            DGRAD, dy.rowwise, weight.columnwise, dy.rowwise_scale_inv, weight.columnwise_scale_inv,
            out=out, out_dtype=out_dtype,
        )  # fmt: skip

    def wgrad(
        self,
        dy: QuantizedTensor,
        x: QuantizedTensor,
        out_dtype: torch.dtype,
        out: torch.Tensor | None = None,
        accumulate: bool = False,
    ) -> torch.Tensor:
        """Returns ``dy [rows, out].T @ x [rows, in]``, from both columnwise copies.

        Args:
            dy: gradient of the output.
            x: input.
            out_dtype: dtype of the result.
            out: tensor ``[out, in]`` to write to, or None for a new one.
            accumulate: add the product to ``out``.
        """
        return self.multiply(
            WGRAD, dy.columnwise, x.columnwise, dy.columnwise_scale_inv, x.columnwise_scale_inv,
            out=out, out_dtype=out_dtype, accumulate=accumulate,
        )  # fmt: skip

    def multiply_groups(
        self,
        product: int,
        a: Any,
        b: Any,
        a_scale_inv: Any,
        b_scale_inv: Any,
        groups: Groups,
    ) -> torch.Tensor:
        """Returns ``b[g] @ a[r]`` for each row ``r`` of ``a``, of group ``g``: bf16 ``[rows, N]``.

        Args:
            product: FPROP or DGRAD.
            a: FP8 data ``[rows, K]``.
            b: FP8 data ``[groups, N, K]``.
            a_scale_inv: fp32 ``[rows]``.
            b_scale_inv: fp32 ``[groups]``.
            groups: which rows belong to which group, on the device.
        """
        raise NotImplementedError

    def contract_groups(
        self,
        a: Any,
        b: Any,
        a_scale_inv: Any,
        b_scale_inv: Any,
        groups: Groups,
        wide: bool = False,
    ) -> torch.Tensor:
        """Returns the wgrad product of each group, ``[groups, M, N]``.

        Args:
            a: FP8 data ``[M, K]``, columns of a group behind those of the group before.
            b: FP8 data ``[N, K]``, with the columns of ``a``.
            a_scale_inv, b_scale_inv: fp32 ``[groups]``.
            groups: which columns belong to which group, on the device.
            wide: return fp32, else bf16.
        """
        raise NotImplementedError


def warn_emulated(what: str, needed: str) -> None:
    """Warns, once for each ``what``, that products are emulated.

    Args:
        what: the products, in the plural, e.g. "FP8 matrix products".
        needed: the hardware that would compute them.
    """
    if what not in _warned:
        _warned.add(what)
        warnings.warn(
            f"apex_te: {what} need {needed}; operands are decoded and multiplied in high "
            "precision: the numbers are those of the recipe, the speed is not",
            stacklevel=2,
        )


class FP8Gemm(GemmBackend):
    """Multiplies operands with one scale each by cuBLASLt's FP8 GEMMs, or emulates the product."""

    __slots__ = ("native",)

    def __init__(self, split: tuple[bool, bool, bool], device: torch.device) -> None:
        super().__init__(split, device)
        self.native = has_fp8_products(device)
        if not self.native:
            warn_emulated("FP8 matrix products", "sm_89 or later, or gfx94x or later")

    def multiply(self, product, a, b, a_scale_inv, b_scale_inv, **options):
        if not self.native:
            return emulated_gemm.emulated_fp8_gemm(a, b, a_scale_inv, b_scale_inv, **options)
        return fp8_gemm.fp8_gemm(
            a, b, a_scale_inv, b_scale_inv, use_split_accumulator=self.split[product], **options
        )

    def multiply_groups(self, product, a, b, a_scale_inv, b_scale_inv, groups):
        _check_grouped(a, b)
        fast = not self.split[product]
        return grouped_gemm.scaled_multiply_groups(a, a_scale_inv, b, b_scale_inv, groups, fast)

    def contract_groups(self, a, b, a_scale_inv, b_scale_inv, groups, wide=False):
        _check_grouped(a, b)
        ends, fast = groups.column_ends, not self.split[WGRAD]
        return grouped_gemm.scaled_contract_groups(a, a_scale_inv, b, b_scale_inv, ends, fast, wide)


def _check_grouped(a: torch.Tensor, b: torch.Tensor) -> None:
    """Warns if grouped products of ``a`` and ``b`` are emulated."""
    if not grouped_gemm.multiplies_codes(a, b):
        what = "FP8 matrix products of groups whose sizes are on the device"
        warn_emulated(what, "sm_90 and sizes that are multiples of 16")


class Layout:
    """Form in which a scheme stores a weight ``[rows, cols]`` in FP8 only: rowwise data and scales.

    The weight's values are those of its rowwise data. Quantizing these values again, from any dtype
    in which they were read, gives data and scales of equal values: a weight that is saved as values
    and loaded is unchanged.

    Attributes:
        name: name of the form, for messages.
        block_rows: number of rows that share a scale; 0 if all do.
        exact: True if columnwise data made from the rowwise data equal those made from the
            high-precision values.
        decoded: dtype that represents the values exactly, from which columnwise data are made.
    """

    name: ClassVar[str]
    block_rows: ClassVar[int]
    exact: ClassVar[bool] = True
    decoded: ClassVar[torch.dtype] = torch.float32

    def scale_inv(self, rows: int, cols: int, device: torch.device) -> torch.Tensor:
        """Returns an uninitialized ``scale_inv`` for a weight ``[rows, cols]``."""
        raise NotImplementedError

    def quantize(self, quantizer: Any, x: torch.Tensor) -> QuantizedTensor:
        """Returns the rowwise copy of ``x`` ``[rows, cols]``.

        Args:
            quantizer: the scheme's quantizer of weights.
            x: high-precision values.
        """
        return quantizer.quantize(x, True, False)[0]

    def columnwise(
        self, quantizer: Any, held: QuantizedTensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Makes the columnwise copy of a stored weight, here by quantizing its values again.

        Args:
            quantizer: the scheme's quantizer of weights.
            held: the weight's rowwise copy.

        Returns:
            fp8_data: ``[cols, rows]``.
            scale_inv: multipliers of these data.
        """
        made = quantizer.quantize(quantizer.dequantize(held, self.decoded), False, True)[0]
        assert made.columnwise is not None
        assert made.columnwise_scale_inv is not None
        return made.columnwise, made.columnwise_scale_inv

    def rows(self, held: QuantizedTensor, start: int, stop: int) -> QuantizedTensor | None:
        """Returns views of rows ``start`` to ``stop`` and their scales; None if cutting a block."""
        fp8_data, scale_inv, block = held.rowwise, held.rowwise_scale_inv, self.block_rows
        assert fp8_data is not None
        assert scale_inv is not None
        if block:
            if start % block or (stop % block and stop != fp8_data.shape[0]):
                return None
            scale_inv = scale_inv[start // block : -(-stop // block)]
        return QuantizedTensor(fp8_data[start:stop], scale_inv, None, None, held.dtype)

    def joined(self, parts: list[QuantizedTensor]) -> QuantizedTensor | None:
        """Returns copies of the rows of ``parts`` as one weight; None if a part ends in a block.

        Args:
            parts: rowwise copies; where all rows of a weight share a scale, the caller ensures that
                all parts have that scale.
        """
        dtype = parts[0].dtype
        fp8_data: list[torch.Tensor] = []
        scales: list[torch.Tensor] = []
        for part in parts:
            assert part.rowwise is not None
            assert part.rowwise_scale_inv is not None
            if self.block_rows and fp8_data and fp8_data[-1].shape[0] % self.block_rows:
                return None
            fp8_data.append(part.rowwise.view(torch.uint8))
            scales.append(part.rowwise_scale_inv)
        scale_inv = torch.cat(scales) if self.block_rows else scales[0]
        return QuantizedTensor(torch.cat(fp8_data).view(dtype), scale_inv, None, None, dtype)

    def gathered(
        self, fp8_data: torch.Tensor, scale_inv: torch.Tensor, dtype: torch.dtype
    ) -> QuantizedTensor:
        """Returns the weight made of all ranks' shards.

        Args:
            fp8_data: ``[rows, cols]``, the shards' data.
            scale_inv: the shards' scales, one after the other.
            dtype: element type of the data.
        """
        return QuantizedTensor(fp8_data, scale_inv, None, None, dtype)


class GemmQuantizers(NamedTuple):
    """Named tuple of the quantizers of one GEMM's operands, and the backend of its products.

    Attributes:
        input: quantizer of the input.
        weight: quantizer of the weight in forward.
        weight_recast: quantizer that casts the weight again in backward, and stages no amax because
            the forward has.
        grad_output: quantizer of the output's gradient.
        backend: multiplies what the quantizers make.
        high_precision_wgrad: True if wgrad is computed from unquantized operands.
    """

    input: Any
    weight: Any
    weight_recast: Any
    grad_output: Any
    backend: GemmBackend
    high_precision_wgrad: bool


class GroupQuantizers(NamedTuple):
    """Named tuple like ``GemmQuantizers``, for all GEMMs of a grouped module at once.

    It is used where the sizes of the groups of rows are known to the device only.

    Attributes:
        input: quantizer of the groups' rows of the input.
        weight: quantizer of all weights in forward.
        weight_recast: quantizer of all weights in backward, which stages no amax.
        grad_output: quantizer of the groups' rows of the output's gradient.
        backend: multiplies what the quantizers make.
        high_precision_wgrad: True if wgrad is computed from unquantized operands.
    """

    input: GroupQuantizer
    weight: GroupQuantizer
    weight_recast: GroupQuantizer
    grad_output: GroupQuantizer
    backend: GemmBackend
    high_precision_wgrad: bool


class QuantizerSets(NamedTuple):
    """Named tuple of a module's quantizers for four kinds of forward, one entry for each GEMM.

    Attributes:
        recording: for training and calibration; every cast stages its amax.
        recompute: for a recompute of a recorded forward; only gradients stage amaxes.
        frozen: for evaluation; no cast stages an amax.
        previewed: for evaluation with an update pending; as ``frozen``, with the scales that the
            update will give.
    """

    recording: tuple[GemmQuantizers, ...]
    recompute: tuple[GemmQuantizers, ...]
    frozen: tuple[GemmQuantizers, ...]
    previewed: tuple[GemmQuantizers, ...]


def group_quantizers(sets: Sequence[GemmQuantizers]) -> GroupQuantizers | None:
    """Returns the group quantizers of a grouped module's GEMMs; None if the scheme has none.

    Args:
        sets: the quantizers of each GEMM, for one kind of forward.
    """
    made: dict[str, Any] = {}
    for role in ("input", "weight", "weight_recast", "grad_output"):
        quantizers = [getattr(gemm, role) for gemm in sets]
        made[role] = quantizers[0].grouped(quantizers)
        if made[role] is None:
            return None
    first = sets[0]
    return GroupQuantizers(
        **made, backend=first.backend, high_precision_wgrad=first.high_precision_wgrad
    )


class ScaleSharing(Protocol):
    """Protocol of an object that knows which ranks compute a state's scales together."""

    def over(self, group: Any) -> bool:
        """Returns True if all ranks of ``group`` have equal scales, and updates keep them equal."""

    def reduced_over(self, group: Any) -> bool:
        """Returns True if the next scales come from the amaxes of all ranks of ``group``."""


class Slot(NamedTuple):
    """Named tuple of the views, fp32 ``[1]``, of what an FP8 state keeps for one tensor of a GEMM.

    Attributes:
        scale, scale_inv: multiplier to FP8 and its reciprocal.
        amax: element of the staging row of the amax history; a cast replaces it by its maximum with
            max |x|.
        pending_scale: the scale that a pending update will give; None for gradients.
        number: index of the slot in the module, all forward slots before the backward ones.
    """

    scale: torch.Tensor
    scale_inv: torch.Tensor
    amax: torch.Tensor
    pending_scale: torch.Tensor | None
    number: int


class GemmSlots(NamedTuple):
    """Named tuple of the slots of a GEMM's three quantized tensors in forward and backward."""

    input: Slot
    weight: Slot
    grad_output: Slot


@dataclass(frozen=True)
class Slots:
    """Views of a module's FP8 state, over which a scheme with state builds quantizers.

    Attributes:
        gemms: one entry for each GEMM of the module.
        first_due: a bool for each slot, True while its first scale has still to be computed from
            data (``first_step="current"``).
        first_on_device: int32 flags ``[len(key)]`` by a tuple of slot numbers, for groups of rows
            of which only the device knows whether they are empty; non-zero while the slot's first
            scale is due.
        sync: knows the ranks that compute the scales together.
        update_scales: ``scale_formula.update_scales``, which computes scales by the recipe's
            formula: ``(histories, scales, scale_invs, fp8_max, recipe, nonfinite_count)``.
    """

    gemms: tuple[GemmSlots, ...]
    first_due: list[bool]
    first_on_device: dict[tuple[int, ...], torch.Tensor]
    sync: ScaleSharing
    update_scales: Callable[..., None]


class Scheme:
    """Base class of a scheme, which makes the quantizers of a recipe.

    A scheme's file defines one subclass, which registers itself by its ``name``. A scheme without
    state defines ``gemm_quantizers``, one with state ``build``.

    Attributes:
        name: the ``quantizer`` of the recipes that use the scheme, and the name of its file.
        backend: multiplies what the quantizers make.
        layout: form of weights held in FP8 only; None where ``stored_recipe`` gives a recipe of
            another scheme, or such weights are not supported.
        row_alignment: multiple to which ``Fp8Padding`` fills the rows of a group by default.
    """

    name: ClassVar[str]
    backend: ClassVar[type[GemmBackend]]
    layout: ClassVar[Layout | None] = None
    row_alignment: ClassVar[int] = 16  # rows that cuBLASLt reads at a time

    def __init_subclass__(cls) -> None:
        _schemes[cls.name] = cls()

    def build(
        self, recipe: Any, slots: Slots | None, gemms: int, device: torch.device
    ) -> QuantizerSets:
        """Builds the quantizers of a module, here stateless ones that all GEMMs and kinds share.

        Args:
            recipe: a recipe whose ``quantizer`` is this scheme's name.
            slots: views of the module's FP8 state; None for a recipe without state.
            gemms: number of GEMMs of the module.
            device: the module's device.
        """
        inp, weight, grad_output = self.gemm_quantizers(recipe, device)
        backend = self.backend(recipe.use_split_accumulator, device)
        override = recipe.override_linear_precision[2]
        same = (GemmQuantizers(inp, weight, weight, grad_output, backend, override),) * gemms
        return QuantizerSets(same, same, same, same)

    def gemm_quantizers(
        self, recipe: Any, device: torch.device
    ) -> tuple[Quantizer, Quantizer, Quantizer]:
        """Makes the quantizers of a GEMM, for a scheme without state.

        Returns:
            input: quantizer of inputs.
            weight: quantizer of weights.
            grad_output: quantizer of gradients.
        """
        raise NotImplementedError

    def stored_recipe(self, recipe: Any) -> Recipe:
        """Returns the recipe that quantizes weights held in FP8 only, given a region's recipe."""
        return recipe


_schemes: dict[str, Scheme] = {}


def scheme_of(recipe: Recipe) -> Scheme:
    """Returns the scheme of ``recipe``, importing its file where that has not been needed yet.

    Raises:
        ValueError: no scheme has the name that the recipe's ``quantizer`` is.
    """
    name = recipe.quantizer
    if name not in _schemes:
        where = f"{__package__}.{name}"
        try:
            importlib.import_module(where)
        except ModuleNotFoundError as error:
            if error.name != where:
                raise
        if name not in _schemes:
            raise ValueError(
                f"{type(recipe).__name__}: quantizer must be the name of a scheme, one of "
                f"{', '.join(sorted(_schemes))} or a file of {__package__}, got {name!r}"
            )
    return _schemes[name]


def build_quantizers(
    recipe: Recipe, slots: Slots | None, gemms: int, device: torch.device
) -> QuantizerSets:
    """Builds the quantizers of ``recipe`` for a module.

    Args:
        recipe: recipe of a region.
        slots: views of the module's FP8 state; None for a recipe that keeps no state.
        gemms: number of GEMMs of the module.
        device: the module's device.
    """
    return scheme_of(recipe).build(recipe, slots, gemms, device)


def stored_recipe(recipe: Recipe) -> Recipe:
    """Returns the recipe by which a weight that is held in FP8 only is quantized when written.

    Delayed scaling becomes current scaling: such a weight is written once a step, from its master
    weight, and is scaled by its amax at that time. Block scaling gets power-of-two scales.
    """
    return scheme_of(recipe).stored_recipe(recipe)


def layout_of(recipe: Recipe) -> Layout:
    """Returns the form in which weights are stored that ``recipe`` quantizes.

    Args:
        recipe: what ``stored_recipe`` returned.

    Raises:
        NotImplementedError: the scheme stores no weights.
    """
    layout = scheme_of(recipe).layout
    if layout is None:
        raise NotImplementedError(
            "FP8Parameter: recipe must have a stored form for weights that are held in FP8 only, "
            f"got {type(recipe).__name__}"
        )
    return layout
