"""What surrounds a GEMM of a tensor-parallel layer: which rows are gathered, what is reduced.

A column-parallel weight is [out / ranks, in], a row-parallel one [out, in / ranks]. With sequence
parallelism the rows between layers are split over ranks (dimension 0):

    column forward    gather the input's rows         backward    reduce the input's gradient
    row    forward    reduce the output               backward    gather the output gradient's rows

Without it nothing is gathered, and a reduction leaves the sum on every rank. What is gathered
travels as FP8 codes where a scheme has a scale that all ranks share.
"""

from __future__ import annotations

from typing import Any

import torch

from ..distributed.collectives import (
    Pending,
    all_gather_rows,
    all_reduce,
    done,
    reduce_scatter_rows,
    world_size,
)
from ..ops.byte_transpose import byte_transpose
from ..quantizer import GemmQuantizers
from ..quantizer.base import Producer
from ..tensor import QuantizedTensor

__all__ = ["TensorParallel", "gather_codes"]


class TensorParallel:
    """The collectives of one GEMM over ``group``.

    Args:
        column: the weight's rows are split, else its columns.
        sequence_parallel: the rows of what enters (column) or leaves (row) are split.
    """

    __slots__ = ("column", "group", "ranks", "sequence_parallel")

    def __init__(self, column: bool, group: Any, sequence_parallel: bool) -> None:
        self.column = column
        self.group = group
        self.sequence_parallel = sequence_parallel
        self.ranks = world_size(group)

    @property
    def gathers_input(self) -> bool:
        return self.column and self.sequence_parallel

    @property
    def gathers_gradient(self) -> bool:
        return not self.column and self.sequence_parallel

    def output_shape(self, shape: tuple[int, ...], features: int) -> tuple[int, ...]:
        """Shape of the layer's output for an input of ``shape``.

        Errors: ValueError for rows that the ranks do not divide.
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

    def reduce_output(self, partial: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """The reduction of a row-parallel GEMM's ``partial`` [rows, out]: ``out``, written to.

        In a graph of torch.compile a new tensor.
        """
        if self.sequence_parallel:
            return reduce_scatter_rows(partial, self.group, out).wait()
        return all_reduce(partial, self.group).wait()

    def start_input_gradient(self, grad: torch.Tensor) -> Pending:
        """The reduction of the gradient of a column-parallel GEMM's input [rows, in]."""
        if not self.column:
            return done(grad)
        if self.sequence_parallel:
            return reduce_scatter_rows(grad, self.group)
        return all_reduce(grad, self.group)

    def gathered_rows(self, x: torch.Tensor) -> Pending:
        """All ranks' rows of ``x``, codes or values."""
        return all_gather_rows(x, self.group)

    def gathered_input(
        self, quantizers: GemmQuantizers, source: torch.Tensor | Producer
    ) -> tuple[QuantizedTensor, QuantizedTensor | None]:
        """The quantized rows of all ranks, from this rank's rows or from the op that makes them.

        Also this rank's codes, where those travelled.
        """
        quantizer = quantizers.input
        shared = quantizer.shared(self.group)
        if shared is None:
            values = source if isinstance(source, torch.Tensor) else source.plain()
            return quantizer.quantize(self.gathered_rows(values).wait(), True, False)[0], None
        if isinstance(source, torch.Tensor):
            local = shared.quantize(source, True, False)[0]
        else:
            local = shared.produce(source, True, False)
        return gather_codes(local, self.group, True, False), local

    def quantized_gradient(
        self,
        quantizers: GemmQuantizers,
        dy: torch.Tensor,
        rowwise: bool,
        transposed: bool,
        need_bias: bool,
    ) -> tuple[QuantizedTensor, torch.Tensor | None]:
        """The quantized rows of all ranks of ``dy`` [rows, out], and the sums of this rank's."""
        quantizer = quantizers.grad_output
        shared = quantizer.shared(self.group)
        if shared is not None:
            local, grad_bias = shared.quantize(dy, True, False, need_bias)
            return gather_codes(local, self.group, rowwise, transposed), grad_bias
        rows = self.gathered_rows(dy).wait()
        quantized = quantizer.quantize(rows, rowwise, transposed)[0]
        return quantized, dy.sum(0) if need_bias else None


def gather_codes(
    local: QuantizedTensor, group: Any, rowwise: bool, transposed: bool
) -> QuantizedTensor:
    """All ranks' rows of a matrix with one scale for all: the codes travel, a byte each."""
    assert local.rowwise is not None
    codes = all_gather_rows(local.rowwise, group).wait()
    scale_inv = local.rowwise_scale_inv
    return QuantizedTensor(
        codes if rowwise else None,
        scale_inv,
        byte_transpose(codes) if transposed else None,
        scale_inv,
        local.dtype,
    )
