"""GEMMs of a language model's head, a chunk of rows at a time."""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed

from ...fp8.parameter.operands import dequantized
from ...fp8.scheme import GemmQuantizers
from ...fp8.scheme.base import build_quantizers
from ...fp8.tensor import QuantizedTensor
from ...ops.row_products import row_product
from ...ops.wgrad_gemm import wgrad_gemm
from ...recipe import Recipe
from .gemm import with_independent_rows

_NAME = "head_losses"  # which ``named_arguments`` replaces


class VocabularyGemms:
    """GEMMs of a head with chunks of rows, and the gradients that they add up to.

    ``logits`` divides by ``temperature``; ``add_gradients`` takes the gradient before that. With
    ``independent_rows`` a row of logits has equal bits whatever the other rows are. ``wanted`` says
    of hidden, weight and bias whether it gets a gradient; ``group`` has the ranks over which the
    vocabulary is split, or is None.
    """

    def __init__(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        wanted: tuple[bool, bool, bool],
        recipe: Recipe | None,
        weight_grad_dtype: torch.dtype,
        group: Any,
        temperature: float,
        independent_rows: bool,
    ) -> None:
        weight = dequantized(weight)  # once, and not for each chunk
        self.hidden, self.weight, self.bias = hidden, weight, bias
        self.group, self.temperature = group, temperature
        self.wanted, self.independent_rows = wanted, independent_rows
        self.quantizers: GemmQuantizers | None = None
        if recipe is not None:
            sets = build_quantizers(recipe, None, 1, hidden.device)
            quantizers = sets.recording[0]
            if independent_rows:
                quantizers = with_independent_rows(_NAME, recipe, quantizers)
            self.quantizers = quantizers
            self.fp8_weight = quantizers.weight.quantize(weight, True, wanted[0])[0]
        self.x: QuantizedTensor | None = None
        self.dhidden = torch.empty_like(hidden) if wanted[0] else None
        shape = weight.shape if wanted[1] else (0,)
        self.dweight = weight.new_empty(shape, dtype=weight_grad_dtype)
        self.dbias = weight.new_zeros(len(weight), dtype=torch.float32) if wanted[2] else None
        if len(hidden) == 0:
            self.dweight.zero_()

    def logits(self, begin: int, end: int, out: torch.Tensor) -> torch.Tensor:
        """Writes the logits of rows ``begin`` to ``end`` into ``out``, and returns it."""
        x = self.hidden[begin:end]
        if self.quantizers is not None:
            self.x = self.quantizers.input.quantize(x, True, self.wanted[1])[0]
            self.quantizers.backend.fprop(
                self.x, self.fp8_weight, out.dtype, bias=self.bias, out=out
            )
        elif self.independent_rows:
            out.copy_(row_product(x, self.weight, self.bias))
        elif self.bias is None:
            torch.mm(x, self.weight.t(), out=out)
        else:
            torch.addmm(self.bias, x, self.weight.t(), out=out)
        return out if self.temperature == 1.0 else out.div_(self.temperature)

    def add_gradients(self, begin: int, end: int, dlogits: torch.Tensor) -> None:
        """Adds what rows ``begin`` to ``end`` give to the gradients."""
        x, first = self.hidden[begin:end], begin == 0
        if self.dbias is not None:
            self.dbias += dlogits.sum(0, dtype=torch.float32)
        quantizers = self.quantizers
        if quantizers is None or quantizers.high_precision_wgrad:
            self._add_wgrad(dlogits, x, first)
        if quantizers is None:
            if self.dhidden is not None:
                torch.mm(dlogits, self.weight, out=self.dhidden[begin:end])
            return
        in_fp8 = self.wanted[1] and not quantizers.high_precision_wgrad
        if not in_fp8 and self.dhidden is None:
            return
        dy = quantizers.grad_output.quantize(dlogits, self.wanted[0], in_fp8)[0]
        if self.dhidden is not None:
            quantizers.backend.dgrad(dy, self.fp8_weight, x.dtype, out=self.dhidden[begin:end])
        if in_fp8:
            assert self.x is not None
            quantizers.backend.wgrad(
                dy, self.x, self.dweight.dtype, out=self.dweight, accumulate=not first
            )

    def _add_wgrad(self, dlogits: torch.Tensor, x: torch.Tensor, first: bool) -> None:
        """Adds the weight gradient of some rows, or writes it if they are the first."""
        if not self.wanted[1]:
            return
        if self.dweight.dtype is not x.dtype:
            wgrad_gemm(dlogits, x, self.dweight, accumulate=not first)
        elif first:
            torch.mm(dlogits.t(), x, out=self.dweight)
        else:
            self.dweight.addmm_(dlogits.t(), x)

    def gradients(self) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """Returns the wanted gradients, else None; that of hidden is summed over the ranks."""
        if self.group is not None and self.dhidden is not None:
            distributed.all_reduce(self.dhidden, group=self.group)
        return self.dhidden, self.dweight if self.wanted[1] else None, self.dbias
