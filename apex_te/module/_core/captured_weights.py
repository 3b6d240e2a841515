"""FP8 weights that the CUDA graphs of a module keep from one replay to the next."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from ...fp8.parameter.parameter import FP8Parameter, dequantized, fp8_operands
from ...fp8.scheme import GemmQuantizers
from ...fp8.tensor import QuantizedTensor

__all__ = ["CapturedWeights", "KeptWeight"]

_ALL = -1  # of the GEMMs of a module: one weight that is made of all of them


class KeptWeight:
    """The FP8 copies of one weight, which replays of a graph write or keep.

    Attributes:
        held: the FP8 data and ``scale_inv``, in memory that was allocated outside of the graph.
            In the graph's own memory something else may have lain before them, which every replay
            would write again.
        sources: the parameters and inputs that the weight is made of.
        noop: int32 ``[1]`` on the device; set, it makes a replay keep what is held. None until the
            warm-up is over.
    """

    __slots__ = ("held", "noop", "sources")

    def __init__(self, held: Any, sources: Sequence[torch.Tensor]) -> None:
        self.held = held
        self.sources = tuple(sources)
        self.noop: torch.Tensor | None = None


class CapturedWeights:
    """The FP8 weights of one module while it is warmed up for a CUDA graph and captured.

    The first run allocates what is to be kept. Schemes whose scale comes from the weight itself
    keep nothing: each replay makes the same codes again.

    Args:
        owner: the name of the module in errors.
        known: ids of the parameters and inputs that stay where they are from run to run; a weight
            that is made of others is made again in each replay.
    """

    __slots__ = ("_made", "is_settled", "kept", "known", "owner")

    def __init__(self, owner: str, known: Collection[int]) -> None:
        self.owner = owner
        self.known = known
        self.kept: dict[tuple, KeptWeight] = {}
        self.is_settled = False  # the warm-up is over
        self._made: dict[tuple, Any] = {}

    def begin(self) -> None:
        """Begin a run of the module, in which every weight is made once."""
        self._made.clear()

    def quantized(
        self,
        gemm: int,
        weight: torch.Tensor,
        sources: Sequence[torch.Tensor],
        quantizers: GemmQuantizers,
    ) -> QuantizedTensor | None:
        """Returns both FP8 copies of ``weight``; None where the GEMM makes its own.

        A GEMM does so for a weight that is held in FP8, and for one made of tensors not known.
        """
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

    def quantized_matrices(self, weights: Sequence[torch.Tensor], quantizer: Any) -> Any:
        """Returns both FP8 copies of all ``weights`` by a ``GroupQuantizer``, or None."""
        return self._once(
            _ALL,
            weights,
            lambda: quantizer.quantize_matrices(weights, None, True, True),
            lambda held, noop: quantizer.rewrite_matrices(weights, held, noop),
        )

    def _once(
        self,
        gemm: int,
        sources: Sequence[torch.Tensor],
        quantize: Callable[[], Any],
        rewrite: Callable[[Any, torch.Tensor | None], bool],
    ) -> Any:
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
        kept = self.kept.get(key)
        if kept is not None:
            rewrite(kept.held, kept.noop)
            return kept.held
        held = quantize()
        if rewrite(held, None):
            if self.is_settled:
                raise RuntimeError(
                    f"{self.owner}: each weight must be used in the warm-up as in the capture with "
                    "fp8_weight_caching=True, got one that was not"
                )
            self.kept[key] = KeptWeight(held, sources)
        return held
