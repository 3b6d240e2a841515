"""The weights that one all-gather of FSDP2 carries as codes, quantized in one launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from ...fp8.parameter.fsdp_gather import fsdp_groups
from ...fp8.scheme.observed import ObservedQuantizer
from ...ops import multi_tensor

if TYPE_CHECKING:
    from .fp8_all_gather import Part

__all__ = ["GatherGroup", "parts_gathered_with"]

_ALIGNED = 4  # numbers between inverse scales, which products read at 16 bytes


def parts_gathered_with(part: Part) -> list[Part]:
    """The parts of one ``enable_fp8_all_gather`` that FSDP2 gathers with ``part``, in its order.

    ``part`` alone where torch does not tell.
    """
    module = part.unit.module()
    for group in fsdp_groups():
        infos = [parameter._module_info for parameter in group.fsdp_params]
        if any(info.module is module and info.param_name == part.name for info in infos):
            found = []
            for info in infos:
                modes = getattr(info.module, "_modes", None)
                other = None if modes is None else modes.gathered.get(info.param_name)
                if other is not None and other.unit.weights is part.unit.weights:
                    found.append(other)
            return found
    return [part]


class GatherGroup:
    """Parts whose hooks FSDP2 calls one after the other, before each gather.

    Inverse scales and amaxes are made as a weight or a scale has changed, and serve all gathers
    until the next change, which keeps tensors that two streams use out of every gather. FSDP2's
    stream of copies, to which their memory belongs, waits for the stream of products before it
    reads what has changed, and so does not write to what is still read.
    """

    def __init__(self, parts: list[Part]) -> None:
        self.parts = parts
        self._token: list[Any] = []  # of what the scales are
        self._scales: Sequence[torch.Tensor] = ()
        self._contexts: list[Any] = []
        self._outlived: list[Any] = []  # the contexts before
        self._made: tuple[Any, Any] | None = None  # stream, and event at which they are there

    def quantize(self, first: torch.Tensor, dtype: torch.dtype | None) -> bool:
        """Make the codes of all parts, of their values in ``dtype``, and leave them with the parts.

        ``first``: the shard that FSDP2 gathers as the first part's. False, and nothing is left,
        where each part has to be quantized alone.
        """
        parts, shards = self.parts, []
        for part in parts:
            part.ready = None
            shard = part.shard()
            if shard is None or part.size is None or not shard.numel():
                return False
            shards.append(shard)
        if shards[0] is not first:  # but a copy, on another device
            return False
        device, weights = first.device, parts[0].unit.weights
        quantizers: list[Any] = []
        token: list[Any] = [dtype]
        for part, shard in zip(parts, shards, strict=True):
            quantizer = part.unit.quantizer(device)[0]
            if type(quantizer) is ObservedQuantizer:
                quantizer = quantizer.inner
            quantizers.append(quantizer)
            token.append((quantizer, part.unit.scales, part.changes, shard._version))
        amaxes: Any = None
        if not weights.recipe.keeps_state:
            amaxes = [weights.amax_of(p.unit, p, p.group, device, p.size) for p in parts]
        token.append(weights.passes)
        new = token != self._token
        if new and not self._renew(quantizers, amaxes, dtype or first.dtype, device):
            return False
        values = shards if dtype is None or dtype is first.dtype else _cast(shards, dtype)
        written: dict[str, Any] = {}
        if new and weights.recipe.keeps_state:
            written["amaxes"] = [note.amax for note, *_ in self._contexts]
            written["scale_invs"] = [scale_inv for _, scale_inv, *_ in self._contexts]
        codes_dtype = quantizers[0].dtype
        if any(_padding(part, value) for part, value in zip(parts, values, strict=True)):
            sent = [_buffer(part, value) for part, value in zip(parts, values, strict=True)]
            written["outputs"] = [
                buffer[: value.shape[0]].view(codes_dtype)
                for buffer, value in zip(sent, values, strict=True)
            ]
            multi_tensor.quantize(values, self._scales, codes_dtype, **written)
        else:
            made = multi_tensor.quantize(values, self._scales, codes_dtype, **written)
            sent = [codes.view(torch.uint8) for codes in made]
        self._token = token
        if first.is_cuda:
            self._order(new)
        for part, codes, context in zip(parts, sent, self._contexts, strict=True):
            part.ready = ((codes,), context)
        return True

    def _renew(
        self,
        quantizers: list[Any],
        amaxes: list[torch.Tensor] | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> bool:
        """Scales for what the weights are now, and tensors for what is made with the codes."""
        parts = self.parts
        of_values = None if amaxes is None else torch.cat(amaxes).to(dtype).float()
        made = quantizers[0].scales_of_rows(quantizers, of_values)
        self._token = []
        if made is None:
            return False
        self._scales, inverses = made
        own: Any = [None] * len(parts)
        column = torch.empty(len(parts), _ALIGNED, dtype=torch.float32, device=device)[:, 0]
        if inverses is None:
            own = torch.zeros(len(parts), dtype=torch.float32, device=device).split(1)
        else:
            column.copy_(inverses)
        self._outlived = self._contexts
        self._contexts = [
            (part.unit.note(quantizer, amax, part.group), scale_inv, part.size, True)
            for part, quantizer, amax, scale_inv in zip(
                parts, quantizers, own, column.split(1), strict=True
            )
        ]
        return True

    def _order(self, new: bool) -> None:
        """Have a gather on another stream than that of the first see what that one made."""
        stream = torch.cuda.current_stream()
        if new or self._made is None:
            self._made = (stream, stream.record_event())
        elif self._made[0] != stream:
            stream.wait_event(self._made[1])


def _cast(shards: list[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    """The values of ``shards`` in ``dtype``."""
    plain = [shard.plain() for shard in shards]  # type: ignore[attr-defined]
    flat = torch.empty(sum(x.numel() for x in plain), dtype=dtype, device=plain[0].device)
    pieces = flat.split([x.numel() for x in plain])
    values = [piece.view(x.shape) for piece, x in zip(pieces, plain, strict=True)]
    torch._foreach_copy_(values, plain)
    return values


def _padding(part: Part, value: torch.Tensor) -> int:
    """Rows that FSDP2 gathers beyond those of ``value``; it splits other dimensions evenly."""
    if value.shape[1] != part.size[1]:
        return 0
    return -(-part.size[0] // part.ranks) - value.shape[0]


def _buffer(part: Part, value: torch.Tensor) -> torch.Tensor:
    """Bytes for the codes of ``value``, then zeros for FSDP2's padding."""
    rows, padding = value.shape[0], _padding(part, value)
    buffer = torch.empty(rows + padding, value.shape[1], dtype=torch.uint8, device=value.device)
    if padding:
        buffer[rows:].zero_()
    return buffer
