"""FP8 weights that stay between calls: cached for microbatches, or captured in a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from ...fp8.autocast import graph_task_id, local
from ...fp8.parameter.operands import dequantized, fp8_operands
from ...fp8.parameter.parameter import FP8Parameter
from ...fp8.scheme import GemmQuantizers
from ...fp8.tensor import QuantizedTensor


class WeightCache(dict[Any, tuple[tuple, Any]]):
    """Dict of ``(key, copies)`` by GEMM index: FP8 copies of weights, made in training.

    The key's first item tells if the weight is up to date. Evaluations read these copies, but keep
    their own in ``evaluated``, so that later microbatches of a step find the scales of the first
    one.
    """

    __slots__ = ("evaluated",)

    def __init__(self) -> None:
        super().__init__()
        self.evaluated: dict[Any, tuple[tuple, Any]] = {}

    def clear(self) -> None:
        """Drops all copies."""
        super().clear()
        self.evaluated.clear()

    def copies(self, gemm: Any, key: tuple, fill: bool | None, make: Callable[[], Any]) -> Any:
        """Returns FP8 copies of a weight: cached ones with key ``key``, unless ``fill`` is True."""
        region = local.region
        evaluates = region is not None and not region.records
        own, other = (self.evaluated, self) if evaluates else (self, self.evaluated)
        if not fill:
            found = own.get(gemm)
            if found is not None and found[0] == key:
                return found[1]
            # Training reads none of an evaluation, but for a recompute of one, as torch's
            # reentrant checkpoint runs its forward.
            found = other.get(gemm) if evaluates or graph_task_id() != -1 else None
            if found is not None and found[0] == key:
                own.pop(gemm, None)
                return found[1]
        made = make()
        own[gemm] = key, made
        # What evaluations keep of other values, and training, no call will read again.
        if not evaluates or (gemm in other and other[gemm][0][0] != key[0]):
            other.pop(gemm, None)
        return made


_ALL = -1  # in place of the number of a GEMM: the weights of all of them as one


class KeptWeight:
    """FP8 copies of one weight that a graph's replays either rewrite or leave unchanged.

    ``held`` is allocated outside the graph, because a replay may overwrite any memory of the graph.
    ``noop``, int32 ``[1]`` on the device, is 1 to leave the copies and 0 to cast; None in the
    warm-up.
    """

    __slots__ = ("held", "noop", "sources")

    def __init__(self, held: Any, sources: Sequence[torch.Tensor]) -> None:
        self.held = held
        self.sources = tuple(sources)
        self.noop: torch.Tensor | None = None


class CapturedWeights:
    """FP8 weights of one module while it is warmed up for a CUDA graph and captured.

    The first run allocates the FP8 copies that replays keep. Schemes whose scale comes from the
    weight itself keep nothing: each replay casts the weight, to the same FP8 data. Each replay also
    casts a weight made of tensors that are not ``known``, as these may move from run to run.
    """

    __slots__ = ("_made", "is_settled", "is_shared", "kept", "known", "owner")

    def __init__(self, owner: str, known: Collection[int], is_shared: bool = False) -> None:
        self.owner = owner
        self.is_shared = is_shared
        self.known = known
        self.kept: dict[tuple, KeptWeight] = {}
        self.is_settled = False  # the warm-up is over
        self._made: dict[tuple, Any] = {}

    def begin(self) -> None:
        """Begins a run of the module, which casts every weight at most once."""
        self._made.clear()

    def quantized(
        self,
        gemm: int,
        weight: torch.Tensor,
        sources: Sequence[torch.Tensor],
        quantizers: GemmQuantizers,
    ) -> QuantizedTensor | None:
        """Returns both FP8 copies of ``weight``; None if it is stored in FP8 or not ``known``."""
        if type(weight) is FP8Parameter and fp8_operands(weight, quantizers, False) is not None:
            return None

        def quantize() -> QuantizedTensor:
            return quantizer.quantize(values(), True, True)[0]

        def rewrite(held: QuantizedTensor, noop: torch.Tensor | None) -> bool:
            return quantizer.rewrite(values(), held, noop)

        def values() -> torch.Tensor:
            return dequantized(weight).contiguous()

        quantizer = quantizers.weight
        return self._once(gemm, sources, quantize, rewrite)

    def quantized_matrices(
        self, sources: Sequence[torch.Tensor], matrices: Any, quantizer: Any
    ) -> Any:
        """Returns both FP8 copies of all groups' weights; None if a source is not ``known``."""
        return self._once(
            _ALL,
            sources,
            lambda: quantizer.quantize_matrices(matrices, None, True, True),
            lambda held, noop: quantizer.rewrite_matrices(matrices, held, noop),
        )

    def _once(
        self,
        gemm: int,
        sources: Sequence[torch.Tensor],
        quantize: Callable[[], Any],
        rewrite: Callable[[Any, torch.Tensor | None], bool],
    ) -> Any:
        """Returns this run's copies of a weight, made once; None if a source is not ``known``.

        ``rewrite(copies, noop)`` casts the weight into ``copies`` unless ``noop`` is 1, and returns
        False for a scheme that needs no rewriting.
        """
        key = (gemm, *[id(source) for source in sources])
        if not all(known in self.known for known in key[1:]):
            return None
        found = self._made.get(key)
        if found is None:
            with torch.no_grad():
                found = self._made[key] = self._make(key, sources, quantize, rewrite)
        return found

    def _make(
        self,
        key: tuple,
        sources: Sequence[torch.Tensor],
        quantize: Callable[[], Any],
        rewrite: Callable[[Any, torch.Tensor | None], bool],
    ) -> Any:
        """Casts a weight for this run, into its kept copies if there are any."""
        kept = self.kept.get(key)
        if kept is not None:
            rewrite(kept.held, kept.noop)
            return _alias(kept.held) if self.is_shared else kept.held
        held = quantize()
        if rewrite(held, None):
            if self.is_settled:
                raise RuntimeError(
                    f"{self.owner}: each weight must be used in the warm-up as in the capture with "
                    "fp8_weight_caching=True, got one that was not"
                )
            self.kept[key] = KeptWeight(held, sources)
        return held


def _alias(held: Any) -> Any:
    """Returns FP8 copies over the same memory, whose versions a later cast does not change."""
    names = getattr(held, "_fields", ("rowwise", "rowwise_scale_inv", "columnwise",
                                      "columnwise_scale_inv"))  # fmt: skip
    values = [getattr(held, name) for name in names]
    # A scale that serves both copies stays one tensor.
    aliases = {id(value): value.data for value in values if value is not None}
    found = [None if value is None else aliases[id(value)] for value in values]
    if isinstance(held, QuantizedTensor):
        found.append(held.dtype)
    return type(held)(*found)
