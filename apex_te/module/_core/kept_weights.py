"""FP8 copies of weights that stay between steps and are cast again only if they would differ."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import increment_version

from ... import runtime
from ...fp8.delayed.state import FORWARD_SLOTS
from ...fp8.delayed.update import next_scales
from ...fp8.module_fp8 import ModuleFP8
from ...fp8.scheme.block import BlockQuantizer
from ...fp8.scheme.current import CurrentScalingQuantizer
from ...fp8.scheme.delayed import DelayedScalingQuantizer
from ...fp8.scheme.observed import ObservedQuantizer
from ...fp8.tensor import QuantizedTensor
from ...ops.block_quantize import BlockQuantized, scale_shape
from ...ops.fp8_output import MAX_AMAXES
from ...ops.multi_tensor_optim import check_kept_scales
from ...runtime.fp8_copies import Casts, preparations, set_keeper
from ...runtime.named_arguments import check_flags, check_model, named_arguments
from ...runtime.op_options import scales_number
from ...runtime.stamp import stamp

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_BLOCK = 128
_WEIGHT_SLOT = 1  # of a GEMM's forward slots
_casts = runtime.ops("cast_transpose")
_current = runtime.ops("current_scale")
_scaled: weakref.WeakSet[KeptCopies] = weakref.WeakSet()  # with scales of the FP8 state


def _renew_scales() -> None:
    """Computes, before an optimizer's step, the scales with which the next forward will cast."""
    if any(keeper.is_read and not keeper.is_released for keeper in _scaled):
        next_scales(renew=True)


class Rule(NamedTuple):
    """Named tuple of what the scales of a cast depend on besides the weight.

    Attributes:
        scheme: the quantizer's class; delayed scaling has its scale in the FP8 state.
        scales: ``block_quantize``'s ``scales``, or ``current_scale``'s ``pow2``; None for delayed
            scaling.
    """

    scheme: type
    scales: Any = None
    eps: float = 0.0

    @classmethod
    def of(cls, quantizer: Any) -> Rule | None:
        """Returns the rule of a weight's quantizer; None if its copies cannot be kept."""
        scheme = type(quantizer)
        if quantizer.dtype is not torch.float8_e4m3fn:
            return None
        if scheme is DelayedScalingQuantizer:
            return cls(scheme)
        if scheme is CurrentScalingQuantizer and quantizer.group is None:
            return cls(scheme, quantizer.pow2, quantizer.eps)
        if scheme is BlockQuantizer and quantizer.block_rows == _BLOCK:
            return cls(scheme, quantizer.options.scales, quantizer.options.eps)
        return None


class KeptCopies:
    """Both FP8 copies of one weight, with the stamp of the values from which they were made.

    With delayed scaling the device compares the scale at each forward, as only the device knows
    it, and casts again where it has changed.

    Attributes:
        amax: fp32 ``[1]``, of the weight that was cast; None in blocks.
        is_cached: a module's cache for microbatches has the copies, which must not change then.
        is_read: a forward has used the copies since the last step.
        is_released: the weight changes unseen by the host, so that nothing can be kept.
    """

    __slots__ = (
        "__weakref__", "_fp8", "_is_equal", "_slot", "_stamp", "_was_current", "_weight", "amax",
        "copies", "is_cached", "is_read", "is_released", "rule",
    )  # fmt: skip

    def __init__(self, weight: torch.Tensor, fp8: ModuleFP8, gemm: int, rule: Rule) -> None:
        self._weight, self._fp8 = weakref.ref(weight), weakref.ref(fp8)
        self._slot = FORWARD_SLOTS * gemm + _WEIGHT_SLOT
        self.rule = rule
        (rows, cols), device, dtype = weight.shape, weight.device, torch.float8_e4m3fn

        def floats(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.float32, device=device)

        # Inference tensors could not be saved for backward.
        with torch.inference_mode(False):
            codes = torch.empty(rows, cols, dtype=dtype, device=device)
            columnwise = torch.empty(cols, rows, dtype=dtype, device=device)
            self.amax = self._is_equal = None
            if rule.scheme is not BlockQuantizer:
                scale_inv = other = floats(1)
                self.amax = floats(1)
                self._is_equal = torch.zeros(1, dtype=torch.int32, device=device)
            else:
                scale_inv = floats(*scale_shape(rows, cols, _BLOCK))
                other = floats(*scale_shape(cols, rows, _BLOCK))
        self.copies = BlockQuantized(codes, scale_inv, columnwise, other)
        self._stamp: tuple[int, int, int] | None = None
        self._was_current = self.is_cached = self.is_read = self.is_released = False

    def belongs_to(self, weight: torch.Tensor, rule: Rule) -> bool:
        """Returns True if these are copies of ``weight`` that were cast by ``rule``."""
        return self._weight() is weight and self.rule == rule

    def current(
        self, weight: torch.Tensor, quantizer: Any, for_cache: bool
    ) -> QuantizedTensor | None:
        """Returns the copies as ``quantizer`` would make them, and stages the weight's amax.

        None while a cache for microbatches needs them as they are; ``for_cache`` is for this cache.
        """
        now = stamp(weight)
        if self.is_cached and self._stamp == now:
            return None
        self.is_cached = for_cache
        with torch.inference_mode(False), torch.no_grad():
            if self.rule.scheme is DelayedScalingQuantizer:
                self._delayed(weight, quantizer, self._stamp != now)
            elif self._stamp != now:
                if self.rule.scheme is BlockQuantizer:
                    quantizer.quantize_into(weight, self.copies)
                else:
                    self._cast_whole(weight)
        self._stamp, self.is_read = now, True
        return QuantizedTensor(*self.copies, quantizer.dtype)

    def _cast_whole(self, weight: torch.Tensor) -> None:
        """Casts the weight with a scale made of its amax."""
        assert self.amax is not None
        rowwise, scale_inv, columnwise, _ = self.copies
        amaxes = weight.new_empty(MAX_AMAXES, dtype=torch.float32)
        scale, pow2, eps = torch.empty_like(self.amax), self.rule.scales, self.rule.eps
        _current.current_scale_fwd(
            weight, rowwise, columnwise, self.amax, scale, scale_inv, amaxes, eps, pow2
        )
        self._changed()

    def _delayed(self, weight: torch.Tensor, quantizer: Any, is_new: bool) -> None:
        """Casts the weight with the quantizer's scale if weight or scale have changed."""
        scale, staged = quantizer.known_scale(weight)
        rowwise, scale_inv, columnwise, _ = self.copies
        amax, is_equal = self.amax, self._is_equal
        assert amax is not None
        assert scale_inv is not None
        assert is_equal is not None
        if is_new:
            amax.zero_()
            _casts.cast_transpose(
                weight, scale, rowwise, columnwise, amax, scale_inv, None, None, None
            )
            self._changed()
        if is_new and staged is None:
            return
        check_kept_scales(
            [scale], [scale_inv], [amax], [] if staged is None else [staged], [is_equal]
        )
        if not is_new:
            # The same values, so versions do not change: a backward may still read the copies.
            _casts.cast_transpose(
                weight, scale, rowwise, columnwise, None, scale_inv, None, None, is_equal
            )

    def _changed(self) -> None:
        """Tells autograd that the copies are those of another weight."""
        increment_version([copy for copy in self.copies if copy is not None])

    def begin(self) -> Casts | None:
        """Returns where to cast the weight that is about to change; None if nobody reads it."""
        weight, fp8 = self._weight(), self._fp8()
        if not self.is_read or self.is_released or weight is None or fp8 is None:
            return None
        if self.rule.scheme is CurrentScalingQuantizer:  # whose scale needs all new values
            return None
        self._was_current = self._stamp == stamp(weight)
        self._stamp = None  # in case of an error
        rowwise, scale_inv, columnwise, other = self.copies
        assert rowwise is not None
        assert columnwise is not None
        assert scale_inv is not None
        if self.rule.scheme is DelayedScalingQuantizer:
            scale = next_scales(renew=False).of(fp8, self._slot)
            return Casts(rowwise, columnwise, scale_inv, None, scale, self.amax, None)
        rule = self.rule.eps, scales_number("keep_fp8_weights", self.rule.scales, None)
        return Casts(rowwise, columnwise, scale_inv, other, None, None, rule)

    def end(self, is_certain: bool) -> None:
        """Notes that the copies were written, or, unless ``is_certain``, perhaps all left as is."""
        weight = self._weight()
        self._changed()
        self.is_cached = False
        if weight is not None and (is_certain or self._was_current):
            self._stamp = stamp(weight)
        self.is_read = False

    def release(self) -> None:
        """Ends the use of copies, because the weight will change unseen by the host."""
        self.is_released = True


class KeptWeights:
    """``KeptCopies`` of one module's weights, by GEMM."""

    __slots__ = ("_found",)

    def __init__(self) -> None:
        self._found: dict[int, KeptCopies] = {}

    def copies(
        self, fp8: ModuleFP8, gemm: int, weight: torch.Tensor, quantizer: Any, for_cache: bool
    ) -> QuantizedTensor | None:
        """Returns FP8 copies of ``weight``, as ``KeptCopies.current``; None if it must be cast."""
        observed = quantizer if isinstance(quantizer, ObservedQuantizer) else None
        if observed is not None:
            quantizer = observed.inner
        rule = Rule.of(quantizer)
        if rule is None or not _fits(weight):
            return None
        found = self._found.get(gemm)
        if found is None or not found.belongs_to(weight, rule):
            found = self._found[gemm] = KeptCopies(weight, fp8, gemm, rule)
            set_keeper(weight, found)
            if rule.scheme is DelayedScalingQuantizer:
                _scaled.add(found)
            if _renew_scales not in preparations:
                preparations.append(_renew_scales)
        copies = None if found.is_released else found.current(weight, quantizer, for_cache)
        if observed is not None and copies is not None:
            observed.report(weight, copies)
        return copies


def tensors_of(cached: Sequence[QuantizedTensor | None]) -> tuple[torch.Tensor, ...]:
    """Returns the tensors of FP8 copies, each once."""
    found: dict[int, torch.Tensor] = {}
    for copies in cached:
        if copies is not None:
            for tensor in (copies.rowwise, copies.rowwise_scale_inv, copies.columnwise,
                           copies.columnwise_scale_inv):  # fmt: skip
                assert tensor is not None
                found[id(tensor)] = tensor
    return tuple(found.values())


def _fits(weight: torch.Tensor) -> bool:
    """Returns True for a plain matrix that the kernels of optimizers can cast."""
    return (
        type(weight) is torch.nn.Parameter
        and weight.dim() == 2
        and weight.dtype in _DTYPES
        and weight.shape[0] % 16 == weight.shape[1] % 16 == 0
        and weight.numel() > 0
        and weight.is_contiguous()
        and not weight.is_inference()
    )


@named_arguments()
def keep_fp8_weights(model: torch.nn.Module, enabled: bool = True) -> None:
    """Keeps FP8 copies of the model's weights between steps, which ``FusedAdam`` can write.

    In training with delayed, current and block scaling, a layer then casts a weight only if the
    weight, its scale or the recipe has changed since the last cast, and makes both copies, rowwise
    and columnwise, in one pass. With delayed and block scaling, ``apex_te.optimizers.FusedAdam``
    writes the copies in its step, with the scale that this rank expects for the next forward; with
    current scaling the first forward after a step casts. Results are bitwise identical to casts at
    each forward. This costs two bytes per weight element, from the first forward on.

    It applies to weights that are plain contiguous Parameters, not FP8 Parameters or DTensors,
    whose sizes are multiples of 16, in layers other than ``GroupedLinear`` and outside
    ``fully_shard``. Other weights are cast as before, as are all weights with other recipes and in
    evaluations, compiled forwards and CUDA graphs. With ``is_first_microbatch=True`` a layer's
    cached copies are the kept ones.

    A change of a weight is detected by its version, address and storage. Writes through ``.data``,
    or through another tensor that shares its memory, are not detected: do not use this with
    optimizers that write in this way, such as Megatron's distributed optimizer, or call this
    function again after such a write, which drops the copies. The same holds for steps in CUDA
    graphs, except those of ``apex_te.optimizers``, which drop the copies.

    Args:
        model: a model or one module. Copies and pickles of it do not keep copies.
        enabled: False drops the copies and casts weights as before.

    Raises:
        TypeError: ``model`` is not a module, or ``enabled`` is not a bool.
    """
    check_model("keep_fp8_weights", model)
    check_flags("keep_fp8_weights", enabled=enabled)
    found = [getattr(module, "_keep_fp8_weights", None) for module in model.modules()]
    if not any(found):
        warnings.warn(
            f"keep_fp8_weights: model must contain FP8 layers, got {type(model).__name__}; "
            "convert it with apex_te.from_torch first",
            stacklevel=3,
        )
    for keep in found:
        if keep is not None:
            keep(enabled)
