"""Delayed scaling: scales computed from the amax values of earlier steps; each cast stages an
amax."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...comm.collectives import max_over_ranks
from ...ops.cast_transpose import cast_transpose
from ...ops.fp8_output import FP8_DTYPES
from ...ops.grouped_quantize import (
    GroupedOutput,
    Groups,
    first_scales,
    groups_of,
    quantize_matrices,
)
from ...ops.qkv_cast import qkv_cast_weight
from ...recipe import CurrentScaling, DelayedScaling
from ..tensor import QuantizedTensor, formats_of
from .base import (
    FusedCast,
    GemmQuantizers,
    GemmSlots,
    GroupMatrices,
    GroupQuantizer,
    GroupRows,
    GroupSource,
    Matrices,
    Quantizer,
    QuantizerSets,
    Repeatable,
    ScaleSharing,
    Scheme,
    Slot,
    Slots,
    shared_scale,
)
from .gemm_backend import FP8Gemm


class FirstStep:
    """Computes a slot's first scale from the first tensor cast with it (``first_step="current"``).

    Until then the slot is due: its flag in ``due`` is True, and its flag in ``on_device``, if any,
    is not 0. Only the device knows whether a group of rows is empty.
    """

    __slots__ = (
        "due", "fp8_max", "group", "handle", "index", "on_device", "recipe", "scale", "scale_inv",
        "update_scales",
    )  # fmt: skip

    def __init__(self, slots: Slots, slot: Slot, fp8_max: float, recipe: DelayedScaling) -> None:
        self.due = slots.first_due
        self.handle = slots.handle
        self.on_device = slots.first_on_device
        self.update_scales = slots.update_scales
        self.index = slot.number
        self.scale = slot.scale
        self.scale_inv = slot.scale_inv
        self.fp8_max = fp8_max
        self.recipe = recipe
        self.group: Any = None  # ranks whose largest amax counts

    def over(self, group: Any) -> FirstStep:
        """Returns a copy that reduces the amax by maximum over the process group ``group``."""
        other = copy.copy(self)
        other.group = group
        return other

    def run(self, measure: Callable[[torch.Tensor], object]) -> None:
        """Sets the slot's first scale from the amax that ``measure`` writes to its argument."""
        amax = torch.zeros(1, 1, dtype=torch.float32, device=self.scale.device)
        measure(amax[0])
        if self.group is not None:
            max_over_ranks(amax, self.group)
        flag = self._flag()
        if flag is None:
            self.take(amax, self.scale, self.scale_inv)
        else:
            scale, scale_inv = self.scale.clone(), self.scale_inv.clone()
            self.take(amax, scale, scale_inv)
            due = flag != 0
            self.scale.copy_(torch.where(due, scale, self.scale))
            self.scale_inv.copy_(torch.where(due, scale_inv, self.scale_inv))
            flag.zero_()
        # Last, because a recipe's function may raise.
        if torch.compiler.is_compiling():
            torch.ops.apex_te.end_first_step(self.handle, self.index)
        else:
            self.due[self.index] = False

    def _flag(self) -> torch.Tensor | None:
        """Returns a view ``[1]`` of the slot's int32 flag on the device; None if it has none."""
        if self.on_device and not torch.compiler.is_compiling():
            for slots, flags in self.on_device.items():
                if self.index in slots:
                    at = slots.index(self.index)
                    return flags[at : at + 1]
        return None

    def take(self, amax: torch.Tensor, scale: torch.Tensor, scale_inv: torch.Tensor) -> None:
        """Computes a scale as an update does; overwrites ``amax``, fp32 ``[1, 1]``."""
        # A history of one row is this tensor alone: the same formula and guards as an update.
        self.update_scales([amax], [scale], [scale_inv], [self.fp8_max], self.recipe, None)


class DelayedScalingQuantizer(Quantizer):
    """Casts a matrix to FP8 with the scale of a slot in the FP8 state.

    ``scale`` and ``amax`` are views of the state. A cast updates ``amax`` to the maximum with its
    own amax, unless it is None. ``first`` computes the first scale; None if that is 1, or computed
    elsewhere.
    """

    __slots__ = ("amax", "first", "pad_columnwise", "scale", "sync")

    keeps_scale = True
    transposes = True

    def __init__(
        self,
        dtype: torch.dtype,
        scale: torch.Tensor,
        amax: torch.Tensor | None = None,
        first: FirstStep | None = None,
        sync: ScaleSharing | None = None,
        pad_columnwise: bool = False,
    ) -> None:
        self.dtype = dtype
        self.scale = scale
        self.amax = amax
        self.first = first
        self.sync = sync
        self.pad_columnwise = pad_columnwise

    def quantize(
        self,
        x: torch.Tensor,
        rowwise: bool = True,
        columnwise: bool = True,
        with_dbias: bool = False,
    ) -> tuple[QuantizedTensor, torch.Tensor | None]:
        first = self.first
        if first is not None and first.due[first.index] and x.numel():
            first.run(lambda amax: self._measure(x, amax))
        dtype = self.dtype
        out = cast_transpose(
            x,
            self.scale,
            dtype,
            rowwise=rowwise,
            columnwise=columnwise,
            pad_columnwise=self.pad_columnwise,
            amax=self.amax,
            with_dbias=with_dbias,
        )
        scale_inv = out[2]
        return QuantizedTensor(out[0], scale_inv, out[1], scale_inv, dtype), out[3]

    def repeatable(self) -> Repeatable:
        first = self.first
        tensors = (self.scale,) if self.amax is None else (self.scale, self.amax)
        return Repeatable(tensors, None if first is None else (first.due, first.index))

    def quantize_heads(
        self, weight: torch.Tensor, repeats: int, groups: int, columnwise: bool
    ) -> tuple[QuantizedTensor, bool]:
        first = self.first
        if first is not None and first.due[first.index] and weight.numel():
            first.run(lambda amax: self._measure(weight, amax))
        out = qkv_cast_weight(
            weight, self.scale, self.dtype, repeats=repeats, groups=groups, columnwise=columnwise,
            amax=self.amax,
        )  # fmt: skip
        return shared_scale(out, self.dtype), True

    def rewrite(self, x: torch.Tensor, held: QuantizedTensor, noop: torch.Tensor | None) -> bool:
        # One launch writes the FP8 data, their inverse scale and the amax, or none of them.
        cast_transpose(
            x,
            self.scale,
            self.dtype,
            amax=self.amax,
            scale_inv=held.rowwise_scale_inv,
            noop=noop,
            out_rowwise=held.rowwise,
            out_columnwise=held.columnwise,
        )
        return True

    def needs_whole_amax(self) -> bool:
        first = self.first
        return first is not None and first.due[first.index]

    def quantize_rows(
        self, x: torch.Tensor, amax: torch.Tensor | None, keep: bool
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Quantizes rows, with the first scale computed from ``amax`` if that is not None.

        The slot stays due until a forward records an amax, because the weight may change before.
        """
        scale = self.scale
        if amax is not None and self.first is not None:
            scale_inv = self.first.scale_inv
            if not keep:
                scale, scale_inv = scale.clone(), scale_inv.clone()
            self.first.take(amax.clone().view(1, 1), scale, scale_inv)
        own = torch.zeros(1, dtype=torch.float32, device=x.device)
        out = cast_transpose(x, scale, self.dtype, columnwise=False, amax=own)
        assert out.rowwise is not None
        return out.rowwise, out.scale_inv, own

    def scales_of_rows(
        self, quantizers: Sequence[Any], amaxes: torch.Tensor | None
    ) -> tuple[Sequence[torch.Tensor], None] | None:
        if self.dtype not in FP8_DTYPES or any(q.needs_whole_amax() for q in quantizers):
            return None
        return [q.scale for q in quantizers], None

    def stage(self, amax: torch.Tensor, group: Any) -> None:
        """Records the amax of this rank's rows of a matrix that is sharded over ``group``."""
        if self.amax is None:
            return
        sync = self.sync
        if group is not None and (sync is None or not sync.reduced_over(group)):
            raise ValueError(
                "fp8_autocast: amaxes of weights that are gathered in FP8 must be reduced over "
                "the ranks that have the shards (reduce_amax=True and an fp8_group with all of "
                "them), got " + ("reduce_amax=False" if sync is None else "another fp8_group")
            )
        first = self.first
        if first is not None:
            first.due[first.index] = False
        torch.maximum(self.amax, amax, out=self.amax)

    def produce(
        self, producer: FusedCast, rowwise: bool = True, columnwise: bool = True
    ) -> QuantizedTensor:
        if not self.can_fuse(producer):
            return super().produce(producer, rowwise, columnwise)
        first, scale, dtype = self.first, self.scale, self.dtype
        if first is not None and first.due[first.index] and producer.x.numel():
            first.run(lambda amax: producer.fp8(scale, dtype, False, False, amax))
        out = producer.fp8(scale, dtype, rowwise, columnwise, self.amax, self.pad_columnwise)
        return shared_scale(out, dtype)

    def shared(self, group: Any) -> DelayedScalingQuantizer | None:
        sync = self.sync
        if sync is None or not sync.over(group):
            return None
        first = None if self.first is None else self.first.over(group)
        return DelayedScalingQuantizer(
            self.dtype, self.scale, self.amax, first, sync, self.pad_columnwise
        )

    def grouped(self, quantizers: Sequence[Any]) -> GroupQuantizer | None:
        return DelayedGroups(quantizers) if self.dtype in FP8_DTYPES else None

    def record(self, x: torch.Tensor) -> None:
        """Records the amax of ``x`` ``[rows, cols]`` without quantizing ``x``."""
        first = self.first
        if first is not None and first.due[first.index] and x.numel():
            first.run(lambda amax: self._measure(x, amax))
        if self.amax is not None:
            self._measure(x, self.amax)

    def known_scale(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        first = self.first
        if first is not None and first.due[first.index]:
            first.run(lambda amax: self._measure(x, amax))
        return self.scale, self.amax

    def scale_in_advance(self) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        first = self.first
        if first is not None and first.due[first.index]:
            return None
        return self.scale, self.amax

    def state_tensors(self) -> tuple[torch.Tensor, ...]:
        assert self.amax is not None
        scale_inv = () if self.first is None else (self.first.scale_inv,)
        return (self.scale, self.amax, *scale_inv)

    def snapshot(self, made: QuantizedTensor | None = None) -> torch.Tensor:
        return self.scale.clone()

    def requantize(
        self, x: torch.Tensor | FusedCast, snapshot: torch.Tensor | None
    ) -> QuantizedTensor:
        assert snapshot is not None
        quantizer = DelayedScalingQuantizer(
            self.dtype, snapshot, pad_columnwise=self.pad_columnwise
        )
        if isinstance(x, torch.Tensor):
            return quantizer.quantize(x, False, True)[0]
        return quantizer.produce(x, False, True)

    def _measure(self, x: torch.Tensor, amax: torch.Tensor) -> None:
        """Replaces ``amax`` by its maximum with the amax of ``x``."""
        cast_transpose(x, self.scale, self.dtype, rowwise=False, columnwise=False, amax=amax)


class DelayedGroups(GroupQuantizer):
    """Quantizes groups of rows, each with the slot of one GEMM in the module's FP8 state.

    The device computes first scales, because only the device knows which groups have rows. Slots of
    groups without rows stay due.
    """

    __slots__ = ("amax", "firsts", "scale", "slots")

    keeps_state = True

    def __init__(self, quantizers: Sequence[DelayedScalingQuantizer]) -> None:
        super().__init__(quantizers[0].dtype)
        self.scale = _column([q.scale for q in quantizers])
        staged = [q.amax for q in quantizers if q.amax is not None]
        self.amax = _column(staged) if staged else None
        self.firsts = [q.first for q in quantizers if q.first is not None]
        self.slots = tuple(first.index for first in self.firsts)

    def scaling(
        self, source: GroupRows | GroupSource | GroupMatrices
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        self._set_first(source)
        return self.scale, None, self.amax

    def rewrite_matrices(
        self, matrices: Matrices, held: GroupedOutput, noop: torch.Tensor | None
    ) -> bool:
        scale, _, amax = self.scaling(GroupMatrices(matrices, None))
        due = None
        if noop is not None:  # read when the graph runs
            due = (noop == 0).to(torch.int32).expand(scale.numel()).contiguous()
        quantize_matrices(matrices, scale, self.dtype, amax=amax, due=due, out=held)
        return True

    def record(self, x: torch.Tensor, groups: Groups) -> None:
        self._record(GroupRows(x, groups))

    def record_matrices(self, matrices: Matrices, groups: Groups) -> None:
        self._record(GroupMatrices(matrices, groups))

    def _record(self, source: GroupRows | GroupSource | GroupMatrices) -> None:
        """Stages the groups' amax values without quantizing ``source``."""
        self._set_first(source)
        if self.amax is not None:
            source.measure(self.amax, self.dtype)

    def _set_first(self, source: GroupRows | GroupSource | GroupMatrices) -> None:
        """Computes, from the groups in ``source``, the first scales that are due."""
        firsts = self.firsts
        if not any(first.due[first.index] for first in firsts):
            return
        first = firsts[0]
        recipe: Any = first.recipe
        if recipe.uses_callables:
            raise NotImplementedError(
                "GroupedLinear: first_step='current' with a function that computes scales needs "
                "m_splits as a list of ints, got a tensor"
            )
        due = first.on_device.get(self.slots)
        if due is None:
            due = self._hand_over()
        groups = source.groups
        if groups is None:  # all matrices are wanted
            groups = groups_of(torch.ones_like(due), len(firsts))
        amax = torch.zeros_like(due, dtype=torch.float32)
        source.measure(amax, self.dtype, due)
        first_scales(
            amax, groups, due, self.scale, self._scale_inv(), first.fp8_max,
            margin=recipe.margin, pow2=recipe.scaling_factor_compute_algo == "pow2",
        )  # fmt: skip

    def _hand_over(self) -> torch.Tensor:
        """Copies the host's list of due slots to new flags on the device, int32 ``[groups]``."""
        firsts = self.firsts
        if self.scale.is_cuda and torch.cuda.is_current_stream_capturing():
            raise NotImplementedError(
                "GroupedLinear: first_step='current' with m_splits as a tensor needs one step "
                "before the capture of a CUDA graph, got none"
            )
        wanted = [int(first.due[first.index]) for first in firsts]
        with torch.inference_mode(False):
            due = torch.zeros(len(firsts), dtype=torch.int32, device=self.scale.device)
        for i, flag in enumerate(wanted):
            if flag:
                due[i : i + 1].fill_(1)
        firsts[0].on_device[self.slots] = due
        return due

    def _scale_inv(self) -> torch.Tensor:
        """Returns the groups' ``scale_inv`` as one view of the state, fp32 ``[groups]``."""
        return _column([first.scale_inv for first in self.firsts])


def _column(slots: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns equidistant views ``[1]`` of one tensor as one strided view, ``[len(slots)]``."""
    first = slots[0]
    if len(slots) == 1:
        return first
    return first.as_strided((len(slots),), (slots[1].storage_offset() - first.storage_offset(),))


class DelayedScheme(Scheme):
    """Scheme of delayed scaling; weights stored in FP8 only use current scaling instead."""

    name = "delayed"
    backend = FP8Gemm

    def build(
        self, recipe: DelayedScaling, slots: Slots | None, gemms: int, device: torch.device
    ) -> QuantizerSets:
        assert slots is not None
        backend = FP8Gemm(recipe.use_split_accumulator, device)
        sets = [_build_gemm(recipe, slots, backend, gemm) for gemm in slots.gemms]
        return QuantizerSets(*zip(*sets, strict=True))

    def stored_recipe(self, recipe: DelayedScaling) -> CurrentScaling:
        pow2 = recipe.scaling_factor_compute_algo == "pow2"
        return CurrentScaling(fp8_format=recipe.fp8_format, pow2=pow2)


def _build_gemm(
    recipe: DelayedScaling, slots: Slots, backend: FP8Gemm, gemm: GemmSlots
) -> tuple[GemmQuantizers, ...]:
    """Builds the quantizers of one GEMM for each field of ``QuantizerSets``, in their order."""
    formats = formats_of(recipe.fp8_format, gemm.input.scale.device)
    forward = (formats.fwd_dtype, formats.max_fwd)
    sync = slots.sync if recipe.reduce_amax else None

    def recording(
        dtype: torch.dtype, fp8_max: float, slot: Slot, pad: bool
    ) -> DelayedScalingQuantizer:
        with_first = recipe.first_step == "current"
        first = FirstStep(slots, slot, fp8_max, recipe) if with_first else None
        return DelayedScalingQuantizer(dtype, slot.scale, slot.amax, first, sync, pad)

    def reading(
        dtype: torch.dtype, scale: torch.Tensor | None, pad: bool
    ) -> DelayedScalingQuantizer:
        assert scale is not None
        return DelayedScalingQuantizer(dtype, scale, sync=sync, pad_columnwise=pad)

    # Rows of a weight are contracted over in dgrad, with a gradient that is not padded.
    inp, weight = recording(*forward, gemm.input, True), recording(*forward, gemm.weight, False)
    inp_frozen = reading(formats.fwd_dtype, gemm.input.scale, True)
    weight_frozen = reading(formats.fwd_dtype, gemm.weight.scale, False)
    inp_later = reading(formats.fwd_dtype, gemm.input.pending_scale, True)
    weight_later = reading(formats.fwd_dtype, gemm.weight.pending_scale, False)
    grad = recording(formats.bwd_dtype, formats.max_bwd, gemm.grad_output, True)
    grad_frozen = reading(formats.bwd_dtype, gemm.grad_output.scale, True)
    rest = (backend, recipe.override_linear_precision[2])
    return (
        GemmQuantizers(inp, weight, weight_frozen, grad, *rest),
        GemmQuantizers(inp_frozen, weight_frozen, weight_frozen, grad, *rest),
        GemmQuantizers(inp_frozen, weight_frozen, weight_frozen, grad_frozen, *rest),
        GemmQuantizers(inp_later, weight_later, weight_later, grad_frozen, *rest),
    )
