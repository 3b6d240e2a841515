"""Router of ``MoELayer``: its linear layer, the choice of experts, the losses and the bias."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch.nn import functional

from ..fp8.autocast import graph_task_id
from ..ops._router_function import run
from ..ops.binding import OpFunction, once_differentiable
from ..router import DenseRouting, Routing, load_balance_loss, update_expert_bias, z_loss_of
from ._core.arguments import fill, materialize
from ._core.programs import is_autocast
from .attention.context_parallel.ranks import ContextRanks


class MoERouter(torch.nn.Module):
    """Linear layer that chooses each token's experts, computed outside of FP8 and autocast.

    The arguments are those of ``MoELayer``, checked there; ``choice`` has those of
    ``apex_te.router.topk_router``. The weight ``[num_experts, hidden_size]`` has the dtype of the
    layer's other parameters, so that optimizers treat it as one of them; each call casts it to
    ``router_dtype``.
    """

    weight: torch.nn.Parameter
    expert_bias: torch.Tensor | None
    local_tokens_per_expert: torch.Tensor | None

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        choice: dict[str, Any],
        *,
        expert_bias: bool,
        bias_update_rate: float,
        aux_loss_coeff: float,
        sequence_first: bool,
        z_loss_coeff: float,
        capacity_factor: float | None,
        token_drop_policy: str,
        router_dtype: torch.dtype,
        init_method: Callable[[torch.Tensor], Any] | None,
        dtype: torch.dtype,
        device: Any,
    ) -> None:
        super().__init__()
        self.top_k = top_k
        self.choice = choice
        self.bias_update_rate = bias_update_rate
        self.aux_loss_coeff = aux_loss_coeff
        self.sequence_first = sequence_first
        self.z_loss_coeff = z_loss_coeff
        self.capacity_factor = capacity_factor
        self.token_drop_policy = token_drop_policy
        self.router_dtype = router_dtype
        self.init_method = init_method
        self.loss_scale: float | torch.Tensor = 1.0
        self.context_ranks: ContextRanks | None = None
        self.aux_loss: torch.Tensor | None = None
        self.z_loss: torch.Tensor | None = None
        self.tokens_per_expert: torch.Tensor | None = None
        made = torch.empty(num_experts, hidden_size, dtype=dtype, device=device)
        self.weight = torch.nn.Parameter(made)
        bias = counts = None
        if expert_bias:
            bias = torch.zeros(num_experts, dtype=torch.float32, device=device)
            counts = torch.zeros(num_experts, dtype=torch.int64, device=device)
        self.register_buffer("expert_bias", bias)
        self.local_tokens_per_expert = counts  # no buffer: DDP would broadcast one rank's
        if not made.is_meta:
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """Fills the weight with ``init_method`` (default N(0, 0.023^2)), bias and counts with 0."""
        materialize(self)
        fill(self.weight, self.init_method)
        for values in (self.expert_bias, self.local_tokens_per_expert):
            if values is not None:
                values.zero_()

    def extra_repr(self) -> str:
        experts, hidden = self.weight.shape
        return f"hidden_size={hidden}, num_experts={experts}, top_k={self.top_k}"

    def forward(
        self, x: torch.Tensor, dense: bool, sequences: int | None = None
    ) -> Routing | DenseRouting:
        """Returns the experts of ``x`` [tokens, hidden_size], without what exceeds the capacity.

        Args:
            x: [tokens, hidden_size].
            dense: return a ``DenseRouting``, whose ``index`` includes what exceeds the capacity.
                Else a ``Routing``, whose ``index`` is -1 there. ``counts`` include it, too.
            sequences: number of sequences, for an auxiliary loss of each; None for one of all
                tokens.
        """
        logits = self._logits(x)
        limited = self.capacity_factor is not None
        aux, z = (bool(c) and self.training for c in (self.aux_loss_coeff, self.z_loss_coeff))
        outputs = ["counts", *(("dense_probs", "routing_map") if dense or limited else ("probs",))]
        if logits.shape[0]:
            outputs += ["scores"] * aux + ["lse"] * z
        # One kernel computes all of it, and one the gradient of all.
        made = run(
            logits, self.top_k, outputs=tuple(outputs), expert_bias=self.expert_bias, **self.choice
        )
        counts = made.counts[0]
        self._note(counts)
        probs = made.dense_probs if dense or limited else made.probs
        losses = {}
        if aux:
            losses["aux_loss"] = self._balance_loss(logits, made.scores, counts, sequences)
        if z:
            z_loss = zero(logits) if made.lse is None else z_loss_of(made.lse, self.z_loss_coeff)
            losses["z_loss"] = z_loss
        probs, kept, index = self._with_losses(probs, losses), made.routing_map, made.index
        if limited:
            kept = self._within_capacity(probs, kept)
            probs = probs * kept
        if dense:
            return DenseRouting(probs, kept, index, counts)
        if limited:
            places = index.long()
            probs, index = probs.gather(1, places), index.masked_fill(~kept.gather(1, places), -1)
        return Routing(probs, index, counts)

    def update_expert_bias(self, group: Any) -> None:
        """Updates the bias by the tokens counted since the last update; see ``MoELayer``."""
        assert self.expert_bias is not None
        assert self.local_tokens_per_expert is not None
        counts, rate = self.local_tokens_per_expert, self.bias_update_rate
        update_expert_bias(self.expert_bias, counts, rate, group=group)
        counts.zero_()

    def _logits(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the logits [tokens, num_experts] in ``router_dtype``."""
        dtype, device_type = self.router_dtype, x.device.type
        own: Any = nullcontext()
        if is_autocast(device_type):
            own = torch.autocast(device_type, enabled=False)
        with own:
            return functional.linear(x.to(dtype), self.weight.to(dtype))

    def _note(self, counts: torch.Tensor) -> None:
        """Keeps the tokens of each expert; those of a recompute, in backward, are not added."""
        self.tokens_per_expert = counts
        total = self.local_tokens_per_expert
        if total is None or not self.training:
            return
        if torch.compiler.is_compiling() or graph_task_id() == -1:
            total.add_(counts)

    def _with_losses(self, probs: torch.Tensor, losses: dict[str, torch.Tensor]) -> torch.Tensor:
        """Returns ``probs``, whose backward also computes the gradients of the losses."""
        for name in ("aux_loss", "z_loss"):
            setattr(self, name, losses[name].detach() if name in losses else None)
        if not losses:
            return probs
        total, *rest = losses.values()
        for loss in rest:
            total = total + loss
        scaled = (total * self.loss_scale).float().reshape(())
        out: torch.Tensor = AddedLossFunction.apply(probs, scaled)
        return out

    def _balance_loss(
        self,
        logits: torch.Tensor,
        scores: torch.Tensor,
        counts: torch.Tensor,
        sequences: int | None,
    ) -> torch.Tensor:
        """Returns the load-balance loss, of each sequence or of all tokens.

        Its counts are those of the choice by scores alone. The mean over context-parallel ranks is
        the loss of whole sequences.
        """
        tokens = logits.shape[0]
        if not tokens:
            return zero(logits)
        first = self.sequence_first
        if sequences is not None or self.choice["group_topk"] or self.expert_bias is not None:
            counts = run(
                logits.detach(), self.top_k, self.choice["score_function"], ("counts",),
                sequences=sequences or 1, sequence_first=first,
            ).counts  # fmt: skip
            counts = counts[0] if sequences is None else counts
        per_sequence, coeff = tokens // (sequences or 1), self.aux_loss_coeff
        # Modules pickled before it was added lack the attribute.
        ranks = self.__dict__.get("context_ranks")
        if ranks is not None and ranks.size > 1:
            counts, coeff = ranks.total(counts), coeff * ranks.size
            per_sequence *= ranks.size
        return load_balance_loss(
            scores, counts, per_sequence, self.top_k, coeff, sequence_first=first
        )

    @torch.no_grad()
    def _within_capacity(self, probs: torch.Tensor, routing_map: torch.Tensor) -> torch.Tensor:
        """Returns ``routing_map`` without the copies that exceed their experts' capacity."""
        assert self.capacity_factor is not None
        tokens, experts = routing_map.shape
        capacity = math.ceil(tokens * self.top_k * self.capacity_factor / experts)
        if self.token_drop_policy == "position":
            return routing_map & (routing_map.cumsum(0, dtype=torch.int32) <= capacity)
        # Stable: of equal probabilities the earlier tokens stay.
        chosen = probs.masked_fill(~routing_map, -1.0)
        order = chosen.sort(dim=0, descending=True, stable=True).indices[:capacity]
        best = torch.zeros_like(routing_map).scatter_(0, order, True)
        return best & routing_map

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        """Moves or casts the module; the bias stays in float32, which its small steps need."""
        bias, counts = self.expert_bias, self.local_tokens_per_expert
        result = super()._apply(fn, recurse)
        if self.expert_bias is not None:
            assert bias is not None
            assert counts is not None
            device = self.expert_bias.device
            if self.expert_bias.dtype is not bias.dtype:
                self.expert_bias = bias.to(device)
            moved = torch.zeros_like(counts, device=device) if counts.is_meta else counts.to(device)
            self.local_tokens_per_expert = moved
        return result


def zero(logits: torch.Tensor) -> torch.Tensor:
    """Returns a differentiable loss of 0 for a batch without tokens."""
    return logits.float().sum()


class AddedLossFunction(OpFunction):
    """Returns ``value``, and gives ``loss``, a float32 scalar, the gradient 1 in backward."""

    LABEL = "MoELayer"

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        return value.view_as(value)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return grad, grad.new_ones((), dtype=torch.float32)
