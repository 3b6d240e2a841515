"""Quantizers and GEMM backends of a module's GEMMs, for each kind of forward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from .gemm_backend import GemmBackend

if TYPE_CHECKING:
    from .grouped import GroupQuantizer


class GemmQuantizers(NamedTuple):
    """Named tuple of the quantizers of one GEMM's operands, and of their GEMM backend.

    ``weight_recast`` casts the weight in backward and records no amax, because forward recorded it.
    """

    input: Any
    weight: Any
    weight_recast: Any
    grad_output: Any
    backend: GemmBackend
    high_precision_wgrad: bool


class GroupQuantizers(NamedTuple):
    """Named tuple like ``GemmQuantizers``, for groups of rows whose sizes only the device knows."""

    input: GroupQuantizer
    weight: GroupQuantizer
    weight_recast: GroupQuantizer
    grad_output: GroupQuantizer
    backend: GemmBackend
    high_precision_wgrad: bool


class QuantizerSets(NamedTuple):
    """Named tuple of a module's quantizers: for each of four kinds of forward a tuple by GEMM.

    Attributes:
        recording: for training and calibration; every cast records its amax for the next update.
        recompute: for a recompute of a recorded forward; only amax values of gradients are
            recorded.
        frozen: for evaluation; no cast records an amax.
        previewed: like ``frozen``, with the scales that the pending update will give.
    """

    recording: tuple[GemmQuantizers, ...]
    recompute: tuple[GemmQuantizers, ...]
    frozen: tuple[GemmQuantizers, ...]
    previewed: tuple[GemmQuantizers, ...]


def group_quantizers(sets: Sequence[GemmQuantizers]) -> GroupQuantizers | None:
    """Returns the group quantizers of a grouped module's GEMMs; None if the scheme has none."""
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
