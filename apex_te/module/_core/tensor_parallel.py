"""Collectives around a GEMM of a tensor-parallel layer: rows gathered, sums reduced.

A column-parallel weight is [out / ranks, in], a row-parallel one [out, in / ranks]. With sequence
parallelism the rows between layers are split over ranks (dimension 0):

    column forward    gather the input's rows         backward    reduce the input's gradient
    row    forward    reduce the output               backward    gather the output gradient's rows

Without sequence parallelism nothing is gathered, and a reduction leaves the sum on every rank.
Gathered rows travel as FP8 data where a scheme has a scale that all ranks share. Between GPUs of
one host rows travel piece by piece (``comm.peer_memory``): a piece is multiplied while the others
are on their way, and sent while the next is computed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...comm.collectives import (
    Pending,
    all_gather_rows,
    all_reduce,
    reduce_scatter_rows,
    world_size,
)
from ...comm.peer_memory import peer_memory
from ...fp8.scheme import GemmQuantizers
from ...fp8.scheme.base import FusedCast, Quantizer
from ...fp8.tensor import QuantizedTensor
from ...ops.byte_transpose import byte_transpose

# Computes the GEMM [rows, ...] of the rows of a slice, into a tensor if one is given.
Product = Callable[[slice, torch.Tensor | None], torch.Tensor]


class TensorParallel:
    """Collectives of one GEMM over a group of ranks.

    With ``column``, the weight's rows are split over ranks, else its columns. With
    ``sequence_parallel``, the rows of the input (column) or of the output (row) are also split.
    """

    __slots__ = (
        "column", "gathers_gradient", "gathers_input", "group", "ranks", "sequence_parallel"
    )  # fmt: skip

    def __init__(self, column: bool, group: Any, sequence_parallel: bool) -> None:
        self.column = column
        self.group = group
        self.sequence_parallel = sequence_parallel
        self.ranks = world_size(group)
        self.gathers_input = column and sequence_parallel
        self.gathers_gradient = not column and sequence_parallel

    def output_shape(self, shape: tuple[int, ...], features: int) -> tuple[int, ...]:
        """Returns this rank's output shape; ValueError if ranks do not divide the rows."""
        first = shape[0]
        if self.gathers_input:
            first *= self.ranks
        elif self.sequence_parallel:
            if first % self.ranks:
                raise ValueError(
                    f"sequence_parallel: inp must have a first dimension that the {self.ranks} "
                    f"ranks of tp_group divide, got {list(shape)}"
                )
            first //= self.ranks
        return (first, *shape[1:-1], features)

    def reduced_output(
        self, product: Product, rows: int, out: torch.Tensor, divisible: bool
    ) -> torch.Tensor:
        """Sums a row-parallel GEMM over ranks into ``out``, this rank's share of the rows.

        Without sequence parallelism the share is all rows. In a torch.compile graph the result is a
        new tensor.
        """
        into = out.view(-1, out.shape[-1])
        if self.sequence_parallel:
            reduced = self._scattered(product, rows, into, into, divisible).wait()
        else:
            reduced = all_reduce(product(slice(0, rows), into), self.group).wait()
        return reduced.view(out.shape) if torch.compiler.is_compiling() else out

    def start_input_gradient(
        self, product: Product, rows: int, like: torch.Tensor, divisible: bool
    ) -> Pending:
        """Begins to sum the gradient of a column-parallel GEMM's input over ranks.

        The result has the columns, dtype and device of ``like``, whose rows are ignored.
        """
        if self.sequence_parallel:
            return self._scattered(product, rows, None, like, divisible)
        return all_reduce(product(slice(0, rows), None), self.group)

    def _scattered(
        self,
        product: Product,
        rows: int,
        out: torch.Tensor | None,
        like: torch.Tensor,
        divisible: bool,
    ) -> Pending:
        """Begins to sum GEMMs over ranks; each rank gets its rows, in ``out`` if given."""
        if divisible and rows % self.ranks == 0:
            part = rows // self.ranks
            memory = peer_memory(self.group, like, part * like.shape[1] * like.element_size())
            if memory is not None:
                into = like.new_empty(part, like.shape[1]) if out is None else out
                pending = memory.reduce(into, product)
                if pending is not None:
                    return pending
        return reduce_scatter_rows(product(slice(0, rows), None), self.group, out)

    def gathered_rows(self, x: torch.Tensor, whole: bool = True, late: bool = False) -> Pending:
        """Begins to gather all ranks' rows of ``x``, high-precision values or FP8 data.

        Without ``whole``, read the result only by ``Pending.pieces``. With ``late``, other gathers
        may begin before it is read, and it does not occupy the peer memory buffers.
        """
        memory = None if late else peer_memory(self.group, x, x.nbytes)
        if memory is not None:
            pending = memory.gather(x.contiguous(), whole)
            if pending is not None:
                return pending
        return all_gather_rows(x, self.group)

    def gathered_input(
        self, quantizer: Quantizer, shared: Quantizer | None, source: torch.Tensor | FusedCast
    ) -> tuple[QuantizedTensor | GatheredRows, QuantizedTensor | None]:
        """Returns all ranks' quantized input ``[rows, in]``, and this rank's rowwise copy.

        With ``shared``, a quantizer that has one scale on all ranks, FP8 data are gathered. Without
        it, rows are gathered in bf16 or fp32, and the second item is None.
        """
        if shared is None:
            values = source if isinstance(source, torch.Tensor) else source.plain()
            gathered = self.gathered_rows(values)
            quantized = quantizer.quantize(gathered.borrow(), True, False)[0]
            gathered.release()
            return quantized, None
        if isinstance(source, torch.Tensor):
            local = shared.quantize(source, True, False)[0]
        else:
            local = shared.produce(source, True, False)
        return self._gathering(local, True, False, False), local

    def quantized_gradient(
        self,
        quantizers: GemmQuantizers,
        dy: torch.Tensor,
        rowwise: bool,
        columnwise: bool,
        need_bias: bool,
    ) -> tuple[QuantizedTensor | GatheredRows, torch.Tensor | None]:
        """Quantizes the output gradient's rows of all ranks, given this rank's ``[rows, out]``.

        With ``need_bias`` also returns the column sums ``[out]`` of this rank's rows.
        """
        quantizer = quantizers.grad_output
        shared = quantizer.shared(self.group)
        if shared is not None:
            local, grad_bias = shared.quantize(dy, True, False, need_bias)
            pad = quantizer.pad_columnwise
            return self._gathering(local, rowwise, columnwise, pad), grad_bias
        gathered = self.gathered_rows(dy)
        quantized = quantizer.quantize(gathered.borrow(), rowwise, columnwise)[0]
        gathered.release()
        return quantized, dy.sum(0) if need_bias else None

    def _gathering(
        self, local: QuantizedTensor, rowwise: bool, columnwise: bool, pad_columnwise: bool
    ) -> QuantizedTensor | GatheredRows:
        """Begins to gather all ranks' rows of a matrix of one scale; only its FP8 data travel.

        ``rowwise`` and ``columnwise`` are the copies wanted of the gathered matrix.
        """
        assert local.rowwise is not None
        gathered = GatheredRows(
            self.gathered_rows(local.rowwise, columnwise), local, self.ranks, columnwise,
            pad_columnwise,
        )  # fmt: skip
        return gathered.arrived(rowwise) if torch.compiler.is_compiling() else gathered


class GatheredRows:
    """Quantized operand whose rows, which have one scale, are being gathered from the ranks.

    With ``columnwise``, ``arrived`` will be called after the GEMMs, for a columnwise copy ``[cols,
    rows]``; ``pad_columnwise`` pads that with zeros to a multiple of 16 columns.
    """

    __slots__ = ("_fp8_data", "_local", "_pad", "_transposed", "rows")

    def __init__(
        self,
        fp8_data: Pending,
        local: QuantizedTensor,
        ranks: int,
        columnwise: bool,
        pad_columnwise: bool,
    ) -> None:
        assert local.rowwise is not None
        self._fp8_data = fp8_data
        self._local = local
        self._transposed = columnwise
        self._pad = pad_columnwise
        self.rows = local.rowwise.shape[0] * ranks

    def multiplied(
        self, product: Callable[[Any, Any, torch.Tensor], Any], out: torch.Tensor
    ) -> torch.Tensor:
        """Multiplies the rows piece by piece as they arrive, and writes the results to ``out``."""
        scale_inv = self._local.rowwise_scale_inv
        for rows, fp8_data in self._fp8_data.pieces():
            product(fp8_data, scale_inv, out[rows])
        if not self._transposed:
            self._fp8_data.release()
        return out

    def arrived(self, rowwise: bool) -> QuantizedTensor:
        """Waits for all rows; adds a columnwise copy if the constructor asked for it."""
        local = self._local
        scale_inv = local.rowwise_scale_inv
        fp8_data = self._fp8_data.borrow()
        columnwise = None
        if self._transposed:
            columnwise = byte_transpose(fp8_data, pad_columnwise=self._pad)
        self._fp8_data.release()
        return QuantizedTensor(
            fp8_data if rowwise else None, scale_inv, columnwise, scale_inv, local.dtype
        )
