"""Updates delayed scaling: appends staged amax values to the histories and computes new scales."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

from .. import runtime
from ..runtime.op_options import is_most_recent
from ..runtime.tracing import dispatch_modes, jit_tracing, transforms_active
from .binding import bind, checked, note_written

_update = bind("amax_scale_update", "amax_scale_update")

_increment_version: Any = torch._C._increment_version
_FLOAT_MAX = torch.finfo(torch.float32).max


@checked
def amax_scale_update(
    histories: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor],
    scale_invs: Sequence[torch.Tensor],
    fp8_max: list[float],
    *,
    margin: int = 0,
    algo: str = "max",
    pow2: bool = False,
    nonfinite_count: torch.Tensor | None = None,
) -> None:
    """Updates every history, scale and scale_inv in place; one launch per 1,000 histories.

    A slot (column) belongs to one quantized tensor. Row 0 of a history holds the amax values that
    casts have recorded since the last update; row 1 is the oldest amax, the last row the newest.
    For each slot the update reads the recorded amax and sets row 0 to 0. An amax of 0, infinity or
    NaN changes nothing else, except that infinity and NaN add 1 to ``nonfinite_count``. Any other
    amax becomes the last row, after the oldest has dropped out and later rows moved up. Then
    scale = fp8_max * 2**-margin / amax, at most the largest float32, and scale_inv = 1 / scale. For
    "max" this amax is the maximum of the recorded amax and the history before the update, for
    "most_recent" it is the recorded amax.

    Args:
        histories: [length, slots] float32 each. ``histories``, ``scales`` and ``scale_invs`` may
            also be prepared lists (``apex_te.runtime.tensor_list``).
        scales: [slots] float32, one tensor for each history.
        scale_invs: [slots] float32, one tensor for each history.
        fp8_max: the format's largest value for each history, 448 (E4M3) or 57344 (E5M2).
        margin: exponent of a power of two that scales are divided by, as headroom.
        algo: "max" or "most_recent".
        pow2: round fp8_max / amax down to a power of two; the scale is at most 2**127.
        nonfinite_count: one int32 element, increased by the number of infinite and NaN amax values;
            None does not count them.

    Raises:
        TypeError: an argument has a dtype that is not listed.
        ValueError: a shape or list length does not match.
    """
    most_recent = is_most_recent("amax_scale_update", algo)
    if not len(histories) and not len(scales) and not len(scale_invs):
        return
    _update(histories, scales, scale_invs, fp8_max, nonfinite_count, margin, most_recent, pow2)
    note_written(*histories, *scales, *scale_invs)


class PreparedUpdate:
    """Prepares repeated calls of ``amax_scale_update`` with the same arguments, to save host time.

    The constructor's arguments are those of ``amax_scale_update``.
    """

    __slots__ = ("_args", "_function", "_options", "_written")

    def __init__(
        self,
        histories: Sequence[torch.Tensor],
        scales: Sequence[torch.Tensor],
        scale_invs: Sequence[torch.Tensor],
        fp8_max: Sequence[float],
        *,
        margin: int,
        algo: str,
        pow2: bool,
        nonfinite_count: torch.Tensor | None,
    ) -> None:
        self._written = [*histories, *scales, *scale_invs]
        lists = map(runtime.tensor_list, (histories, scales, scale_invs))
        self._options: dict[str, Any] = {
            "margin": margin, "algo": algo, "pow2": pow2, "nonfinite_count": nonfinite_count,
        }  # fmt: skip
        rest = (tuple(fp8_max), nonfinite_count, margin, algo == "most_recent", pow2)
        self._args: tuple[Any, ...] = (*lists, *rest)
        self._function = runtime.function("amax_scale_update", "amax_scale_update")

    def run(self) -> None:
        """Updates every history, scale and scale_inv in place; see ``amax_scale_update``."""
        if (
            dispatch_modes()
            or transforms_active()
            or jit_tracing()
            or torch.compiler.is_compiling()
            or forward_ad._current_level >= 0
        ):
            histories, scales, scale_invs, fp8_max, *_ = self._args
            amax_scale_update(histories, scales, scale_invs, list(fp8_max), **self._options)
            return
        self._function(*self._args)
        _increment_version(self._written)


def reference(
    history: torch.Tensor,
    scale: torch.Tensor,
    fp8_max: float,
    *,
    margin: int = 0,
    algo: str = "max",
    pow2: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes the update of one history in plain PyTorch; returns new (history, scale).

    ``history`` is float32 [length, slots], ``scale`` float32 [slots]; other arguments are as in
    ``amax_scale_update``.
    """
    history, scale = history.clone(), scale.clone()
    for slot in range(history.shape[1]):
        column = history[:, slot].clone()
        last = column[0].clone()
        column[0] = 0
        if last != 0 and torch.isfinite(last):
            window = torch.cat([last.reshape(1), column[1:]]) if algo == "max" else last.reshape(1)
            amax = window.max()
            if len(column) > 1:
                column[1:-1] = column[2:].clone()
                column[-1] = last
            limit = torch.tensor(fp8_max, dtype=torch.float32)
            if pow2:
                ratio = (limit / amax).clamp(max=_FLOAT_MAX)
                exponent = torch.frexp(ratio).exponent - 1
                power = torch.ldexp(torch.tensor(1.0), exponent) * 2.0**-margin
                scale[slot] = power.clamp(max=2.0**127)
            else:
                scale[slot] = (limit * 2.0**-margin / amax).clamp(max=_FLOAT_MAX)
        history[:, slot] = column
    return history, scale
