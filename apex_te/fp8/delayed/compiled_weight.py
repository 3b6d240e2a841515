"""FP8 weights that compiled code keeps between calls, for ``is_first_microbatch``."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ... import runtime
from ...ops.registration import register
from ...runtime.stamp import stamp
from ..tensor import QuantizedTensor

_lib = runtime.ops("cast_transpose")


class TracedWeight:
    """FP8 copies of a weight ``[rows, cols]``, with a stamp of the parameters it was made from.

    ``seen``, int64 ``[1 + 3 * parameters]`` on the CPU, begins with 1 once there are copies; the
    ``stamp`` of each parameter follows.
    """

    __slots__ = ("columnwise", "rowwise", "scale_inv", "seen")

    def __init__(
        self, rows: int, cols: int, dtype: torch.dtype, sources: int, device: torch.device
    ) -> None:
        with torch.inference_mode(False):
            self.rowwise = torch.zeros(rows, cols, dtype=dtype, device=device)
            self.columnwise = torch.zeros(cols, rows, dtype=dtype, device=device)
            self.scale_inv = torch.ones(1, dtype=torch.float32, device=device)
            self.seen = torch.zeros(1 + 3 * sources, dtype=torch.int64, device="cpu")

    def quantized(
        self,
        weight: torch.Tensor,
        sources: Sequence[torch.Tensor],
        scale: torch.Tensor,
        amax: torch.Tensor | None,
        fill: bool,
    ) -> QuantizedTensor:
        """Returns the copies, cast again if ``fill`` is True or a parameter has changed."""
        torch.ops.apex_te.keep_weight(
            weight, list(sources), scale, self.rowwise, self.columnwise, self.scale_inv, amax,
            self.seen, fill,
        )  # fmt: skip
        return QuantizedTensor(
            self.rowwise, self.scale_inv, self.columnwise, self.scale_inv, self.rowwise.dtype
        )


def _keep(
    weight: torch.Tensor,
    sources: Sequence[torch.Tensor],
    scale: torch.Tensor,
    rowwise: torch.Tensor,
    columnwise: torch.Tensor,
    scale_inv: torch.Tensor,
    amax: torch.Tensor | None,
    seen: torch.Tensor,
    fill: bool,
) -> None:
    """Casts ``weight`` into the kept copies if ``fill`` is True or ``seen`` is out of date."""
    now = [1]
    for source in sources:
        now += stamp(source)
    if fill or seen.tolist() != now:
        _lib.cast_transpose(weight, scale, rowwise, columnwise, amax, scale_inv, None, None, None)
        seen.copy_(torch.tensor(now))


register(
    "keep_weight(Tensor weight, Tensor[] sources, Tensor scale, Tensor(a!) rowwise, "
    "Tensor(b!) columnwise, Tensor(c!) scale_inv, Tensor(d!)? amax, Tensor(e!) seen, "
    "bool fill) -> ()",
    _keep,
)
