"""Quantization, in one kernel launch, of all parameters that one all-gather of FSDP2 carries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...fp8.autocast import local
from ...fp8.parameter.fsdp_gather import fsdp_groups
from ...fp8.scheme.observed import ObservedQuantizer
from ...ops import multi_tensor
from .gather_set import GatheredParam
from .sharded_weight import ShardedWeight

_ALIGNED = 4  # numbers between values of scale_inv, which GEMMs read at 16 bytes


def params_gathered_with(param: GatheredParam) -> list[GatheredParam]:
    """Returns the parameters that FSDP2 gathers in one all-gather with ``param``, in its order.

    Parameters of other ``GatherSet``s are left out. Returns ``[param]`` if FSDP2
    does not know ``param``.
    """
    module = param.unit.module()
    for group in fsdp_groups():
        infos = [parameter._module_info for parameter in group.fsdp_params]
        if any(info.module is module and info.param_name == param.name for info in infos):
            found = []
            for info in infos:
                modes = getattr(info.module, "_modes", None)
                other = None if modes is None else modes.gathered.get(info.param_name)
                if other is not None and other.unit.gather_set is param.unit.gather_set:
                    found.append(other)
            return found
    return [param]


class GatherGroup:
    """Parameters that FSDP2 gathers together and that are quantized in one launch.

    FSDP2 calls their hooks one by one before each gather; the first hook quantizes all of them.
    Gathers reuse scales and contexts until a weight or a scale changes, so they allocate no tensor
    that two streams use. That memory belongs to FSDP2's copy stream. This stream waits for GEMMs
    before it reads changed weights, so it never overwrites data that a GEMM still reads.
    """

    def __init__(self, params: list[GatheredParam]) -> None:
        self.params = params
        self._token: list[Any] = []  # stamp of what the scales were made of
        self._scales: Sequence[torch.Tensor] = ()
        self._contexts: list[Any] = []
        self._outlived: list[Any] = []  # the contexts before
        self._made: tuple[Any, Any] | None = None  # stream, and event at which they are there

    def quantize(self, first: torch.Tensor, dtype: torch.dtype | None) -> bool:
        """Quantizes this rank's rows of all parameters into ``ready`` of each parameter.

        Returns False, with nothing stored, if the caller must quantize each parameter alone.
        """
        shards = self._shards(first)
        if shards is None:
            return False
        device, gather_set = first.device, self.params[0].unit.gather_set
        keeps_state = gather_set.recipe.keeps_state
        quantizers = [_quantizer(param, device) for param in self.params]
        token: list[Any] = [
            (quantizer, param.unit.scales, param.changes, shard._version)
            for quantizer, param, shard in zip(quantizers, self.params, shards, strict=True)
        ]
        amaxes = None
        if not keeps_state and quantizers[0].needs_whole_amax():  # blocks have their own
            amaxes = [gather_set.amax_of(p, device) for p in self.params]
        token += [dtype, gather_set.passes]
        is_new = token != self._token
        if is_new and not self._renew(quantizers, amaxes, dtype or first.dtype, device):
            return False
        values: Sequence[torch.Tensor] = shards
        if dtype is not None and dtype is not first.dtype:
            values = _cast(shards, dtype)
        sent = self._fp8_data(values, quantizers[0].dtype, is_new and keeps_state)
        self._token = token
        if first.is_cuda:
            self._order(is_new)
        for param, fp8_data, context in zip(self.params, sent, self._contexts, strict=True):
            context[0].region = local.region
            param.ready = ((fp8_data,), context)
        return True

    def _shards(self, first: torch.Tensor) -> list[ShardedWeight] | None:
        """Returns this rank's rows of each parameter, and resets all ``ready`` to None.

        Returns None if one launch cannot quantize them: this rank's shard of a parameter is
        empty, a parameter was never gathered, or ``first`` is not the first shard.
        """
        shards = []
        for param in self.params:
            param.ready = None
            shard = param.shard()
            if shard is None or param.size is None or not shard.numel():
                return None
            shards.append(shard)
        return shards if shards[0] is first else None  # a copy may be on another device

    def _renew(
        self,
        quantizers: list[Any],
        amaxes: list[torch.Tensor] | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> bool:
        """Computes scales and contexts anew; False if parameters must be quantized one by one.

        ``amaxes`` are fp32 ``[1]`` of each whole weight, None with delayed scaling.
        """
        params = self.params
        of_values = None if amaxes is None else torch.cat(amaxes).to(dtype).float()
        made = quantizers[0].scales_of_rows(quantizers, of_values)
        self._token = []
        if made is None:
            return False
        self._scales, inverses = made
        own: Any = [None] * len(params)
        column = torch.empty(len(params), _ALIGNED, dtype=torch.float32, device=device)[:, 0]
        if inverses is None:
            own = torch.zeros(len(params), dtype=torch.float32, device=device).split(1)
        else:
            column.copy_(inverses)
        self._outlived = self._contexts
        self._contexts = [
            (param.unit.note(quantizer, amax, param.group), scale_inv, param.size, True)
            for param, quantizer, amax, scale_inv in zip(
                params, quantizers, own, column.split(1), strict=True
            )
        ]
        return True

    def _fp8_data(
        self, values: Sequence[torch.Tensor], dtype: torch.dtype, with_amaxes: bool
    ) -> list[torch.Tensor]:
        """Casts ``[rows, cols]`` values to uint8 in one launch; FSDP2's padding is zeros."""
        written: dict[str, Any] = {}
        if with_amaxes:
            written["amaxes"] = [note.amax for note, *_ in self._contexts]
            written["scale_invs"] = [scale_inv for _, scale_inv, *_ in self._contexts]
        if not any(_padding(p, value) for p, value in zip(self.params, values, strict=True)):
            made = multi_tensor.quantize(values, self._scales, dtype, **written)
            return [fp8_data.view(torch.uint8) for fp8_data in made]
        sent = [_buffer(p, value) for p, value in zip(self.params, values, strict=True)]
        written["outputs"] = [
            buffer[: value.shape[0]].view(dtype) for buffer, value in zip(sent, values, strict=True)
        ]
        multi_tensor.quantize(values, self._scales, dtype, **written)
        return sent

    def _order(self, is_new: bool) -> None:
        """Makes the current stream wait for scales that an earlier gather made on another."""
        stream = torch.cuda.current_stream()
        if is_new or self._made is None:
            self._made = (stream, stream.record_event())
        elif self._made[0] != stream:
            stream.wait_event(self._made[1])


def _quantizer(param: GatheredParam, device: torch.device) -> Any:
    """Returns the quantizer of the weight of ``param``, unwrapped from an ``ObservedQuantizer``."""
    quantizer = param.unit.quantizer(device)[0]
    return quantizer.inner if type(quantizer) is ObservedQuantizer else quantizer


def _cast(shards: list[ShardedWeight], dtype: torch.dtype) -> list[torch.Tensor]:
    """Returns the values of each shard in ``dtype``, as views of one new buffer."""
    plain = [shard.plain() for shard in shards]
    flat = torch.empty(sum(x.numel() for x in plain), dtype=dtype, device=plain[0].device)
    pieces = flat.split([x.numel() for x in plain])
    values = [piece.view(x.shape) for piece, x in zip(pieces, plain, strict=True)]
    torch._foreach_copy_(values, plain)
    return values


def _padding(param: GatheredParam, value: torch.Tensor) -> int:
    """Returns the number of padding rows that FSDP2 expects after this rank's ``[rows, cols]``.

    It is 0 for a parameter split by columns, which FSDP2 splits evenly only.
    """
    if value.shape[1] != param.size[1]:
        return 0
    return -(-param.size[0] // param.ranks) - value.shape[0]


def _buffer(param: GatheredParam, value: torch.Tensor) -> torch.Tensor:
    """Returns uint8 ``[rows + padding, cols]``: uninitialised rows, then zeros as padding."""
    rows, padding = value.shape[0], _padding(param, value)
    buffer = torch.empty(rows + padding, value.shape[1], dtype=torch.uint8, device=value.device)
    if padding:
        buffer[rows:].zero_()
    return buffer
