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
from ...fp8.scheme.quantizer import FusedCast, Quantizer
from ...fp8.tensor import QuantizedTensor
from ...ops.byte_transpose import byte_transpose

# Computes the GEMM [rows, ...] of the rows of a slice, into a tensor if one is given.
Product = Callable[[slice, torch.Tensor | None], torch.Tensor]


class TensorParallel:
    """Collectives of one GEMM over a group of ranks.

    Args:
        column: True if the weight's rows are split over the ranks, False if its columns are.
        sequence_parallel: the rows of the input (column) or of the output (row) are split over the
            ranks.

    Attributes:
        gathers_input: this rank has only some rows of the input, and gathers the others.
        gathers_gradient: this rank has only some rows of the output's gradient.
        ranks: number of ranks.
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
        """Returns the shape of this rank's output ``[..., features]`` for an input of ``shape``.

        Raises:
            ValueError: the ranks do not divide the rows.
        """
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
        """Sums the output of a row-parallel GEMM over ranks.

        Args:
            out: memory for this rank's result ``[..., out]``: all rows, or a share of them with
                sequence parallelism.

        Returns:
            ``out``, or in a graph of torch.compile a new tensor of its shape.
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

        Args:
            like: a tensor with the gradient's columns, dtype and device; its rows do not count.
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
        """Begins to sum GEMMs over ranks, each of which gets its share of the rows.

        Args:
            out: memory for this rank's rows of the sum; None makes a new tensor.
        """
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

        Args:
            x: this rank's rows ``[rows, ...]``.
            whole: True if the result is read as one tensor, not only by ``Pending.pieces``.
            late: True if other gatherings may begin before the result is read; the result then
                does not occupy the buffers of peer memory.

        Returns:
            The gathering of a tensor ``[rows * ranks, ...]``.
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
        """Quantizes the input's rows of all ranks.

        Args:
            shared: a quantizer whose scale all ranks share, which ``quantizer.shared(group)``
                returned; or None.
            source: this rank's rows ``[rows, in]``, or the op that computes them.

        Returns:
            ``(operand, local)``: the operand of fprop with all rows, and the rowwise copy of this
            rank's rows; ``local`` is None if rows were gathered in bf16 or fp32.
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
        """Quantizes the output gradient's rows of all ranks.

        Args:
            dy: this rank's rows ``[rows, out]``.
            rowwise, columnwise: the copies to make.
            need_bias: also sum the columns.

        Returns:
            ``(quantized, sums)``: the gradient in FP8 with the rows of all ranks, and the column
            sums ``[out]`` of this rank's rows; ``sums`` is None without ``need_bias``.
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
        """Begins to gather all ranks' rows of a matrix that was quantized with one scale.

        Args:
            local: the rowwise copy of this rank's rows; only its FP8 data travel, a byte for each
                element.
            rowwise, columnwise: the copies that are wanted of the gathered matrix.
            pad_columnwise: pad the columnwise copy for the weight gradient.
        """
        assert local.rowwise is not None
        gathered = GatheredRows(
            self.gathered_rows(local.rowwise, columnwise), local, self.ranks, columnwise,
            pad_columnwise,
        )  # fmt: skip
        return gathered.arrived(rowwise) if torch.compiler.is_compiling() else gathered


class GatheredRows:
    """Quantized operand whose rows, all of one scale, are on their way from the ranks.

    Args:
        local: the rowwise copy of this rank's rows.
        columnwise: True if ``arrived`` will be called after the GEMMs, for a columnwise copy.
        pad_columnwise: pad the columnwise copy for the weight gradient, to a multiple of 16 rows.

    Attributes:
        rows: the number of rows of all ranks.
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
        """Multiplies the rows piece by piece as they arrive.

        Args:
            product: what ``GemmBackend.bound`` returns; writes the result for a piece, given by its
                FP8 data and their scale, into the tensor it is given.
            out: ``[rows, ...]`` for the results of all pieces.
        """
        scale_inv = self._local.rowwise_scale_inv
        for rows, fp8_data in self._fp8_data.pieces():
            product(fp8_data, scale_inv, out[rows])
        if not self._transposed:
            self._fp8_data.release()
        return out

    def arrived(self, rowwise: bool) -> QuantizedTensor:
        """Waits for all rows, and returns them as one quantized operand.

        Args:
            rowwise: True to return the rowwise copy.

        Returns:
            The operand, with the columnwise copy if the constructor's ``columnwise`` is True.
        """
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
