"""The parts that every scheme is made of, and the registry of schemes."""

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
    """An op that can write its result in FP8.

    Attributes:
        x: the op's input, ``[rows, ..]``.
        can_fuse: ``fp8`` exists; otherwise only ``plain``.
        with_dbias: the column sums of the result are wanted in ``dbias``.
        dbias: set by ``plain`` or ``fp8`` where the op can, else by the quantizer.
    """

    x: torch.Tensor
    can_fuse: bool
    with_dbias: bool
    dbias: torch.Tensor | None

    def scalars(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns three fp32 elements on the op's device: a zero, and two without values."""

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
        """Returns the result quantized with ``scale``; without any copy only folds ``amax``."""


class Quantizer:
    """Turns matrices into low precision by one scheme; a subclass defines ``quantize``.

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
            ``(quantized, sums)``: the copies, and the sums ``[cols]`` in the dtype of ``x``
            or None.
        """
        raise NotImplementedError

    def produce(
        self, producer: FusedCast, rowwise: bool = True, columnwise: bool = True
    ) -> QuantizedTensor:
        """Quantizes an op's result; the op writes the FP8 data itself where it can."""
        x = producer.plain()
        sums = producer.with_dbias and producer.dbias is None
        quantized, dbias = self.quantize(x, rowwise, columnwise, sums)
        if sums:
            producer.dbias = dbias
        return quantized

    def shared(self, group: Any) -> Quantizer | None:
        """Returns a quantizer like this one whose scale all ranks of ``group`` share.

        Rows that several ranks quantized with it can be gathered as FP8 data. None for a scheme
        without such a scale, whose values are gathered instead.
        """
        return None

    def settings(self) -> tuple:
        """Returns the settings that, besides amaxes, decide the FP8 data of a matrix."""
        return (type(self).__name__, self.dtype)

    def needs_whole_amax(self) -> bool:
        """Returns True if the FP8 data of some rows depend on the amax of the whole matrix."""
        return False

    def quantize_rows(
        self, x: torch.Tensor, amax: torch.Tensor | None, keep: bool
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Quantizes some rows of a matrix to what they are in the quantized matrix.

        Args:
            x: ``[rows, cols]``, the rows.
            amax: fp32 ``[1]``, of the whole matrix; None where ``needs_whole_amax`` is False.
            keep: a state keeps the scale that it computes from ``amax``.

        Returns:
            ``(fp8_data, scale_inv, amax)``: rowwise data, their ``scale_inv``, and for ``stage``
            the amax of ``x``, or None.
        """
        raise NotImplementedError(
            f"{type(self).__name__}: rows of a weight can not be quantized before they are "
            "gathered, because its columnwise copy is made of the values"
        )

    def scales_of_rows(
        self, quantizers: Sequence[Any], amaxes: torch.Tensor | None
    ) -> tuple[Sequence[torch.Tensor], torch.Tensor | None] | None:
        """Computes scales with which ``multi_tensor.quantize`` does what ``quantize_rows`` does.

        Args:
            quantizers: one for each matrix; this is the first.
            amaxes: fp32 ``[quantizers]``, of the whole matrices; None where they do not count.

        Returns:
            ``(scales, scale_invs)``: fp32 ``[1]`` each, and ``[quantizers]`` or None where each is
            ``1 / scale``. None in place of both where one launch cannot quantize the rows.
        """
        return None

    def stage(self, amax: torch.Tensor, group: Any) -> None:
        """Records ``amax`` fp32 ``[1]`` of this rank's rows of a matrix sharded over ``group``."""

    def grouped(self, quantizers: Sequence[Any]) -> GroupQuantizer | None:
        """Returns one quantizer for groups of rows whose sizes only the device knows.

        ``quantizers``: of one role, one for each GEMM of a module; this is the first. None for a
        scheme without one.
        """
        return None

    def can_fuse(self, producer: FusedCast) -> bool:
        """Returns True if the op can write the FP8 data itself; no op writes fnuz formats."""
        return producer.can_fuse and self.dtype in FP8_DTYPES

    def record(self, x: torch.Tensor) -> None:
        """Stages what a later scale needs of ``x`` without quantizing it; nothing by default."""

    def dequantize(
        self, quantized: QuantizedTensor, dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        """Returns the values of ``quantized`` ``[rows, cols]``, decoded from a copy that it has."""
        if quantized.rowwise is not None:
            return self._decode(quantized.rowwise, quantized.rowwise_scale_inv, dtype)
        if quantized.columnwise is None:
            raise ValueError("dequantize: rowwise or columnwise must be present, got neither")
        return self._decode(quantized.columnwise, quantized.columnwise_scale_inv, dtype).t()

    def _decode(self, fp8_data: torch.Tensor, scale_inv: Any, dtype: torch.dtype) -> torch.Tensor:
        """Returns the values of FP8 data, here with a ``scale_inv`` that broadcasts."""
        return (fp8_data.to(torch.float32) * scale_inv).to(dtype)

    def known_scale(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """Returns ``(scale, amax)`` with which to cast ``x`` and where to stage its amax.

        None for a scheme that computes the scale from ``x``.
        """
        return None

    def rewrite(self, x: torch.Tensor, held: QuantizedTensor, noop: torch.Tensor | None) -> bool:
        """Writes both copies of ``x`` and their scales into ``held``, which ``quantize`` made.

        ``noop`` is an int32 element on the device: non-zero leaves ``held``, and what would be
        staged, unchanged. Returns False, and writes nothing, for a scheme that gives the same
        result when it quantizes again.
        """
        return False

    def state_tensors(self) -> tuple[torch.Tensor, ...]:
        """Returns the tensors of a state that a cast reads and writes."""
        return ()

    def snapshot(self) -> torch.Tensor | None:
        """Returns the scale with which ``requantize`` can repeat a cast later, if it is kept."""
        return None

    def requantize(self, x: torch.Tensor, snapshot: torch.Tensor | None) -> QuantizedTensor:
        """Returns the columnwise copy of ``x`` that ``quantize`` made at the ``snapshot``."""
        return self.quantize(x, False, True)[0]


def shared_scale(out: Any, dtype: torch.dtype) -> QuantizedTensor:
    """Returns the copies in an op's output that has one scale for both layouts."""
    return QuantizedTensor(out.rowwise, out.scale_inv, out.columnwise, out.scale_inv, dtype)


class GemmBackend:
    """Multiplies quantized operands; a subclass defines ``multiply``.

    Args:
        split: split accumulation of (fprop, dgrad, wgrad), ignored by a scheme that has no choice.
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
        """Returns ``a [M, K] @ b [N, K].T``; ``product`` is FPROP, DGRAD or WGRAD."""
        raise NotImplementedError

    def fprop(
        self,
        x: QuantizedTensor,
        weight: QuantizedTensor,
        out_dtype: torch.dtype,
        bias: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Returns ``x [rows, in] @ weight [out, in].T + bias``."""
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
        """Returns ``dy [rows, out] @ weight [out, in]``."""
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
        """Returns ``dy [rows, out].T @ x [rows, in]``, added to ``out`` with ``accumulate``."""
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
        """Returns ``b[g] @ a[r]`` in bfloat16 for each row r of ``a`` and its group g.

        As ``scaled_multiply_groups``; ``product`` is FPROP or DGRAD.
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
        """Returns WGRAD of each group, ``[groups, M, N]``, as ``scaled_contract_groups``."""
        raise NotImplementedError


def warn_emulated(what: str, needed: str) -> None:
    """Warns, once, that ``what`` need hardware that is not there and are emulated."""
    if what not in _warned:
        _warned.add(what)
        warnings.warn(
            f"apex_te: {what} need {needed}; operands are decoded and multiplied in high "
            "precision: the numbers are those of the recipe, the speed is not",
            stacklevel=2,
        )


class FP8Gemm(GemmBackend):
    """Multiplies operands of one scale each by cuBLASLt's FP8 GEMMs, or emulates them."""

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
    """Warns where grouped products of ``a`` and ``b`` are emulated."""
    if not grouped_gemm.multiplies_codes(a, b):
        what = "FP8 matrix products of groups whose sizes are on the device"
        warn_emulated(what, "sm_90 and sizes that are multiples of 16")


class Layout:
    """Stored form of a weight ``[rows, cols]`` that is held in FP8 only: rowwise data and scales.

    The weight's values are those of its rowwise data. Writing the values back gives the same data
    and scales, or others of the same values, in whichever dtype they were read: a weight that is
    saved as values and loaded again is unchanged.

    Attributes:
        name: the scheme's, for messages.
        block_rows: rows that share a scale; 0 where all do.
        exact: the columnwise data made from the rowwise data are those made from the values.
        decoded: dtype in which the values are exact, from which columnwise data are made.
    """

    name: ClassVar[str]
    block_rows: ClassVar[int]
    exact: ClassVar[bool] = True
    decoded: ClassVar[torch.dtype] = torch.float32

    def scale_inv(self, rows: int, cols: int, device: torch.device) -> torch.Tensor:
        """Returns a ``scale_inv`` for ``[rows, cols]``, without values."""
        raise NotImplementedError

    def quantize(self, quantizer: Any, x: torch.Tensor) -> QuantizedTensor:
        """Returns the rowwise copy of ``x`` by the weight quantizer of the scheme."""
        return quantizer.quantize(x, True, False)[0]

    def columnwise(
        self, quantizer: Any, held: QuantizedTensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Makes the columnwise copy, here by quantizing the values again.

        Returns:
            ``(fp8_data, scale_inv)``: data ``[cols, rows]`` and their ``scale_inv``.
        """
        made = quantizer.quantize(quantizer.dequantize(held, self.decoded), False, True)[0]
        assert made.columnwise is not None
        assert made.columnwise_scale_inv is not None
        return made.columnwise, made.columnwise_scale_inv

    def rows(self, held: QuantizedTensor, start: int, stop: int) -> QuantizedTensor | None:
        """Returns rows as views; None where they would cut a block."""
        fp8_data, scale_inv, block = held.rowwise, held.rowwise_scale_inv, self.block_rows
        assert fp8_data is not None
        assert scale_inv is not None
        if block:
            if start % block or (stop % block and stop != fp8_data.shape[0]):
                return None
            scale_inv = scale_inv[start // block : -(-stop // block)]
        return QuantizedTensor(fp8_data[start:stop], scale_inv, None, None, held.dtype)

    def joined(self, parts: list[QuantizedTensor]) -> QuantizedTensor | None:
        """Returns copies of the rows of ``parts`` as one weight; None where they cut a block.

        Parts with one scale for all rows must have the same one.
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
        """Returns the weight whose shards' data ``[rows, cols]`` and scales were put together."""
        return QuantizedTensor(fp8_data, scale_inv, None, None, dtype)


class GemmQuantizers(NamedTuple):
    """The quantizers of one GEMM and its gradients, and the backend that multiplies their results.

    ``weight_recast`` records nothing: it casts a weight whose amax was staged in the forward.
    """

    input: Any
    weight: Any
    weight_recast: Any
    grad_output: Any
    backend: GemmBackend
    high_precision_wgrad: bool


class GroupQuantizers(NamedTuple):
    """The quantizers of all GEMMs of a module whose groups of rows only the device can size."""

    input: GroupQuantizer
    weight: GroupQuantizer
    weight_recast: GroupQuantizer
    grad_output: GroupQuantizer
    backend: GemmBackend
    high_precision_wgrad: bool


class QuantizerSets(NamedTuple):
    """The ways in which a module may quantize; one entry for each of its GEMMs.

    ``recording`` stages every amax; ``recompute`` repeats a recorded forward, so that only its
    gradients are new; ``frozen`` stages nothing; ``previewed`` stages nothing either, and reads the
    scales that a pending update will give.
    """

    recording: tuple[GemmQuantizers, ...]
    recompute: tuple[GemmQuantizers, ...]
    frozen: tuple[GemmQuantizers, ...]
    previewed: tuple[GemmQuantizers, ...]


def group_quantizers(sets: Sequence[GemmQuantizers]) -> GroupQuantizers | None:
    """Returns the quantizers of all groups of a module; None for a scheme that has none."""
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
    """Says which ranks compute a state's scales together."""

    def over(self, group: Any) -> bool:
        """Returns True if the scales are equal on all ranks of ``group``, and will stay so."""

    def reduced_over(self, group: Any) -> bool:
        """Returns True if the next scales come from the amaxes of all ranks of ``group``."""


class Slot(NamedTuple):
    """Views, fp32 ``[1]``, of what an FP8 state keeps for one tensor of a GEMM.

    Attributes:
        scale, scale_inv: multiplier to FP8 and its inverse.
        amax: element of the staging row of the amax history, into which casts fold max |x|.
        pending_scale: the scale after the update that is due; None for gradients.
        number: the place of the slot in the module, forward slots first.
    """

    scale: torch.Tensor
    scale_inv: torch.Tensor
    amax: torch.Tensor
    pending_scale: torch.Tensor | None
    number: int


class GemmSlots(NamedTuple):
    """Slots of the tensors that one GEMM and its gradients quantize."""

    input: Slot
    weight: Slot
    grad_output: Slot


@dataclass(frozen=True)
class Slots:
    """Views of a module's FP8 state for the quantizers of a scheme that keeps state.

    Attributes:
        gemms: one entry for each GEMM of the module.
        first_due: for each slot, True while its first scale has still to be computed from data.
        first_on_device: int32 flags ``[slots]`` for those whose data only the device counts, for
            each tuple of slot numbers.
        sync: the ranks that compute the scales together.
        update_scales: rolls histories and sets scales and their inverses by the recipe's formula:
            ``(histories, scales, scale_invs, fp8_max, recipe, nonfinite_count)``.
    """

    gemms: tuple[GemmSlots, ...]
    first_due: list[bool]
    first_on_device: dict[tuple[int, ...], torch.Tensor]
    sync: ScaleSharing
    update_scales: Callable[..., None]


class Scheme:
    """A scheme of scaling; its file defines one subclass, which registers itself by its ``name``.

    A scheme without state defines ``gemm_quantizers``, one with state ``build``.

    Attributes:
        name: the ``quantizer`` of the recipes that use the scheme, and the name of its file.
        backend: multiplies what the quantizers make.
        layout: stored form of weights held in FP8 only; None where ``stored_recipe`` gives a
            recipe of another scheme, or there is none.
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
        """Builds the quantizers of a module, here the same for every GEMM and use."""
        inp, weight, grad_output = self.gemm_quantizers(recipe, device)
        backend = self.backend(recipe.use_split_accumulator, device)
        override = recipe.override_linear_precision[2]
        same = (GemmQuantizers(inp, weight, weight, grad_output, backend, override),) * gemms
        return QuantizerSets(same, same, same, same)

    def gemm_quantizers(
        self, recipe: Any, device: torch.device
    ) -> tuple[Quantizer, Quantizer, Quantizer]:
        """Makes the quantizers of a GEMM without state.

        Returns:
            ``(input, weight, grad_output)``.
        """
        raise NotImplementedError

    def stored_recipe(self, recipe: Any) -> Recipe:
        """Returns the recipe by which a weight that is held in FP8 only is quantized."""
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
    """Builds the quantizers of ``recipe`` for the ``gemms`` GEMMs of a module on ``device``.

    ``slots`` are views of the module's FP8 state; None for a recipe that keeps no state.
    """
    return scheme_of(recipe).build(recipe, slots, gemms, device)


def stored_recipe(recipe: Recipe) -> Recipe:
    """Returns the recipe by which a weight that is held in FP8 only is quantized when written.

    A recipe that keeps state scales by earlier amaxes; a weight that is written once a step, from
    its master value, is scaled by its own. The scales of blocks are powers of two.
    """
    return scheme_of(recipe).stored_recipe(recipe)


def layout_of(recipe: Recipe) -> Layout:
    """Returns the stored form of weights quantized by ``recipe``, a ``stored_recipe``.

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
