"""Expert parallelism: each rank has some of the experts, and tokens travel to them and back."""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch import distributed

from ..comm.agreement import check_same
from ..comm.collectives import all_gather_rows, all_to_all_rows, reduce_scatter_rows, world_size
from ..comm.groups import check_process_group
from ..permutation import moe_permute, moe_permute_and_pad_with_probs, moe_unpermute

__all__ = ["Dispatch", "TokenDispatcher"]

_EXCHANGES = ("all_to_all", "all_gather")
# Names of the values that `_kind` returns.
_COMPARED = (
    "hidden size", "dtype of tokens", "dtype of probs",
    "tokens.requires_grad", "probs.requires_grad",
)  # fmt: skip


class TokenDispatcher:
    """Sends tokens to the ranks of their experts, and the experts' results back.

        dispatch = dispatcher.dispatch(tokens, probs, routing_map)
        rows = fc2(activation(fc1(dispatch.rows, dispatch.m_splits)), dispatch.m_splits)
        out = dispatch.combine(rows)

    Rank ``r`` of ``group`` has the experts from ``r * num_experts / ranks`` on. Both ways are
    differentiable in tokens and probs; no token is dropped.

    Args:
        num_experts: number of experts on all ranks, a multiple of the number of ranks.
        group: the expert-parallel ranks; None is the whole world.
        align: multiple to which each expert's rows are filled up with zeros: 16 for FP8 GEMMs, 32
            for MXFP8, 1 for none.
        exchange: "all_to_all" sends each copy of a token to its expert's rank; tokens and splits
            may be uneven. The host waits for the GPU once, to learn how many rows travel, and
            ``m_splits`` is a list. "all_gather" sends every token to every rank, in buffers sized
            for the worst case: without a wait after the first call, also in a CUDA graph, and
            ``m_splits`` is an int32 tensor on the device. Every rank must have the same number of
            tokens, in each call. It moves ``ranks / experts per token`` times the bytes.
        max_experts_per_token: sizes the buffers of "all_gather"; None stands for all experts.
            Copies beyond it may be lost.

    Parameters of experts see the tokens of all ranks: their gradients are not to be reduced over
    ``group``. Delayed scaling reduces amaxes over ``fp8_group``; where that holds ranks of
    ``group``, the experts in the same place on these ranks share scales.

    Raises:
        TypeError: an argument of a wrong type.
        ValueError: a number that is too small or that the ranks do not divide.
    """

    def __init__(
        self,
        num_experts: int,
        group: Any = None,
        *,
        align: int = 16,
        exchange: str = "all_to_all",
        max_experts_per_token: int | None = None,
    ) -> None:
        numbers = {"num_experts": num_experts, "align": align}
        if max_experts_per_token is not None:
            numbers["max_experts_per_token"] = max_experts_per_token
        for name, value in numbers.items():
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(
                    f"TokenDispatcher: {name} must be an int, got {type(value).__name__}"
                )
            if value < 1:
                raise ValueError(f"TokenDispatcher: {name} must be at least 1, got {value}")
        check_process_group("TokenDispatcher", "group", group)
        if exchange not in _EXCHANGES:
            raise ValueError(
                f"TokenDispatcher: exchange must be one of {', '.join(_EXCHANGES)}, "
                f"got {exchange!r}"
            )
        self.ranks = world_size(group)
        if num_experts % self.ranks:
            raise ValueError(
                f"TokenDispatcher: num_experts must be a multiple of the {self.ranks} ranks of "
                f"group, got {num_experts}"
            )
        self.num_experts = num_experts
        self.local_experts = num_experts // self.ranks
        self.group = group
        self.align = align
        self.exchange = exchange
        per_token = num_experts if max_experts_per_token is None else max_experts_per_token
        self.copies = min(per_token, self.local_experts)  # of a token on one rank, at most
        self._tokens: int | None = None  # of every rank, with "all_gather"
        self._compared = False  # whether the ranks' first calls were found to agree
        self._combined: set[bool] = set()  # and those of `combine`, with and without gradients

    def dispatch(
        self, tokens: torch.Tensor, probs: torch.Tensor, routing_map: torch.Tensor
    ) -> Dispatch:
        """Sends ``tokens`` to their experts; collective.

        Args:
            tokens: ``[tokens, hidden]`` float32, float16 or bfloat16.
            probs: ``[tokens, num_experts]`` float32 or the dtype of ``tokens``: the weight of each
                expert's result.
            routing_map: ``[tokens, num_experts]`` bool, True where a token goes to an expert.

        Raises:
            TypeError: a dtype.
            ValueError: a shape or, with "all_gather", another number of tokens than in the first
                call.
            RankMismatchError: on all ranks, they differ in ``num_experts``, hidden size, dtypes,
                ``requires_grad`` or, with "all_gather", number of tokens; on the others, a rank
                raises. With "all_gather" on GPUs, where later calls wait for nothing, in the first
                call only.
        """
        error = self._refusal(tokens, probs, routing_map)
        if error is not None and self.ranks == 1:
            raise error
        if self.exchange == "all_gather":
            return self._gathered(tokens, probs, routing_map, error)
        return self._exchanged(tokens, probs, routing_map, error)

    def _refusal(
        self, tokens: torch.Tensor, probs: torch.Tensor, routing_map: torch.Tensor
    ) -> Exception | None:
        """Returns the error for the arguments of this rank; None if they are right."""
        if tokens.dim() != 2:
            return ValueError(
                f"TokenDispatcher: tokens must be [tokens, hidden], got {list(tokens.shape)}"
            )
        shape = (tokens.shape[0], self.num_experts)
        for name, value in (("probs", probs), ("routing_map", routing_map)):
            if value.shape != shape:
                return ValueError(
                    f"TokenDispatcher: {name} must have shape {list(shape)}, "
                    f"got {list(value.shape)}"
                )
        if routing_map.dtype is not torch.bool:
            return TypeError(
                f"TokenDispatcher: routing_map must have dtype bool, got {routing_map.dtype}"
            )
        if probs.dtype not in (torch.float32, tokens.dtype):
            return TypeError(
                f"TokenDispatcher: probs must have dtype float32 or {tokens.dtype}, "
                f"got {probs.dtype}"
            )
        if self.exchange == "all_gather" and self._tokens not in (None, tokens.shape[0]):
            return ValueError(
                f'TokenDispatcher: tokens must be {self._tokens} in each call with "all_gather", '
                f"as in the first, got {tokens.shape[0]}"
            )
        return None

    def _compare(self, tokens: torch.Tensor, probs: torch.Tensor, error: Exception | None) -> None:
        """Raises on every rank if one has an ``error`` or other tokens; the host waits."""
        values: dict[str, object] = {}
        if error is None:
            named = zip(_COMPARED, _kind(tokens, probs), strict=True)
            values = {"num_experts": self.num_experts, "exchange": self.exchange, **dict(named)}
            if self.exchange == "all_gather":
                values["number of tokens"] = tokens.shape[0]
        check_same("TokenDispatcher", "group", self.group, values, tokens.device, error)

    def _exchanged(
        self,
        tokens: torch.Tensor,
        probs: torch.Tensor,
        routing_map: torch.Tensor,
        error: Exception | None,
    ) -> Dispatch:
        """Dispatches with "all_to_all"."""
        ranks, local = self.ranks, self.local_experts
        if ranks > 1 and not self._compared:  # the counts would not fit together
            self._compare(tokens, probs, error)
            self._compared = True
        # By receiving rank: a digest of the kind of rows, and the number that each expert gets.
        counts = torch.empty(ranks, 1 + local, dtype=torch.int32, device=tokens.device)
        if error is None:
            counts[:, 0] = zlib.crc32(repr(_kind(tokens, probs)).encode()) & 0x7FFFFFFF
            counts[:, 1:] = routing_map.sum(0).view(ranks, local)
        else:
            counts.fill_(-1)
        arriving = counts
        if ranks > 1:
            arriving = torch.empty_like(counts)
            distributed.all_to_all_single(arriving, counts, group=self.group)
        both = torch.stack((counts, arriving)).tolist()  # the wait
        kind = both[0][0][0]
        if kind == -1 or any(row[0] != kind for row in both[1]):
            self._compare(tokens, probs, error)
        sent, received = ([row[1:] for row in rows] for rows in both)
        arriving = arriving[:, 1:].flatten()
        sizes = ([sum(row) for row in sent], [sum(row) for row in received])
        permuted, ids = moe_permute(tokens, routing_map, sum(sizes[0]))
        rows = _AllToAll.apply(permuted, sizes[0], sizes[1], self.group) if ranks > 1 else permuted
        # Rows arrive ordered by source rank, then expert: each row has one expert here.
        ends = arriving.cumsum(0)
        at = torch.arange(rows.shape[0], device=rows.device)
        expert = torch.bucketize(at, ends, right=True) % local
        owners = expert[:, None] == torch.arange(local, device=rows.device)
        own = [sum(column) for column in zip(*received, strict=True)]
        m_splits = [-(-count // self.align) * self.align for count in own]
        rows, own_ids = _by_expert(rows, owners, own, self.align, sum(m_splits))

        def combine(results: torch.Tensor) -> torch.Tensor:
            back = moe_unpermute(results, own_ids)
            if ranks > 1:
                back = _AllToAll.apply(back, sizes[1], sizes[0], self.group)
            return moe_unpermute(back, ids, probs)

        return Dispatch(rows, m_splits, combine, self._compare_results)

    def _gathered(
        self,
        tokens: torch.Tensor,
        probs: torch.Tensor,
        routing_map: torch.Tensor,
        error: Exception | None,
    ) -> Dispatch:
        """Dispatches with "all_gather"."""
        # On a GPU the host would wait for the other ranks' values.
        if self.ranks > 1 and not (tokens.is_cuda and (self._compared or _capturing())):
            self._compare(tokens, probs, error)
            self._compared = True
        if error is not None:
            raise error
        self._tokens = tokens.shape[0]
        local = self.local_experts
        rank = distributed.get_rank(self.group) if self.ranks > 1 else 0
        mine = slice(rank * local, (rank + 1) * local)
        if self.ranks > 1:
            routing_map = all_gather_rows(routing_map.view(torch.uint8), self.group).wait()
            tokens = _AllGather.apply(tokens, self.group)
            probs = _AllGather.apply(probs, self.group)
        owners = routing_map[:, mine].contiguous()
        own_probs = probs[:, mine].contiguous()
        count = tokens.shape[0] * self.copies + local * (self.align - 1)
        count = -(-count // self.align) * self.align
        splits = owners.new_zeros(local, dtype=torch.int32)  # only its dtype and device are read
        unweighted = own_probs.detach()
        rows, _, ids, _, m_splits = moe_permute_and_pad_with_probs(
            tokens, unweighted, owners, splits, self.align, count
        )

        def combine(results: torch.Tensor) -> torch.Tensor:
            partial = moe_unpermute(results, ids, own_probs)
            return _ReduceScatter.apply(partial, self.group) if self.ranks > 1 else partial

        return Dispatch(rows, m_splits, combine, self._compare_results)

    def _compare_results(self, results: torch.Tensor, error: Exception | None) -> None:
        """Raises an ``error``; the first time with and without gradients, if any rank has one."""
        grad = torch.is_grad_enabled()
        known = self.ranks == 1 or grad in self._combined
        if not known and not (results.is_cuda and _capturing()):
            values = {
                "shape of a row": list(results.shape[1:]),
                "dtype": results.dtype,
                "results.requires_grad": grad and results.requires_grad,
            }
            check_same("Dispatch", "group", self.group, values, results.device, error)
            self._combined.add(grad)
        if error is not None:
            raise error


def _kind(tokens: torch.Tensor, probs: torch.Tensor) -> tuple:
    """Returns the values that all ranks need alike, in each call, for collectives to fit."""
    grad = torch.is_grad_enabled()
    return (
        tokens.shape[1],
        tokens.dtype,
        probs.dtype,
        grad and tokens.requires_grad,
        grad and probs.requires_grad,
    )


def _capturing() -> bool:
    return torch.cuda.is_current_stream_capturing()


class Dispatch:
    """Tokens that have reached their experts.

    Attributes:
        rows: ``[rows, hidden]``, ordered by this rank's experts; fillings are zero.
        m_splits: rows of each expert, fillings included, for ``GroupedLinear``.
    """

    __slots__ = ("_combine", "_compare", "m_splits", "rows")

    def __init__(self, rows: torch.Tensor, m_splits: Any, combine: Any, compare: Any) -> None:
        self.rows = rows
        self.m_splits = m_splits
        self._combine = combine
        self._compare = compare

    def combine(self, results: torch.Tensor) -> torch.Tensor:
        """Returns ``sum(prob * result)`` over each token's experts; collective.

        Args:
            results: ``[rows, features]``, the experts' results for ``rows``.

        Returns:
            ``[tokens, features]``, a row for each token of this rank.

        Raises:
            ValueError: another number of rows.
            RankMismatchError: in the first call of a dispatcher with gradients, and the first
                without: on all ranks, features, dtypes or ``requires_grad`` differ; on the others,
                a rank raises.
        """
        error = None
        if results.dim() != 2 or results.shape[0] != self.rows.shape[0]:
            error = ValueError(
                f"Dispatch: results must be [{self.rows.shape[0]}, features], "
                f"got {list(results.shape)}"
            )
        self._compare(results, error)
        return self._combine(results)


def _by_expert(
    rows: torch.Tensor, owners: torch.Tensor, counts: list[int], align: int, total: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Orders ``rows`` by the one expert that ``owners`` marks.

    Returns:
        The ordered rows, padded to ``align`` for each expert, and the map for the way back.
    """
    if align == 1:
        return moe_permute(rows, owners, total)
    splits = torch.tensor(counts, dtype=torch.int32)
    no_probs = rows.new_empty(owners.shape, requires_grad=False)
    out, _, ids, _, _ = moe_permute_and_pad_with_probs(rows, no_probs, owners, splits, align, total)
    return out, ids


class _AllToAll(torch.autograd.Function):
    """Exchange of rows between ranks; the gradient goes the way back."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, sent: list[int], received: list[int], group: Any
    ) -> torch.Tensor:
        ctx.sizes, ctx.group = (sent, received), group
        return all_to_all_rows(rows, sent, received, group).wait()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:
        sent, received = ctx.sizes
        return all_to_all_rows(grad, received, sent, ctx.group).wait(), None, None, None


class _AllGather(torch.autograd.Function):
    """Gather of the rows of all ranks; this rank's gradient is the sum over ranks."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return all_gather_rows(rows, group).wait()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:
        return reduce_scatter_rows(grad, ctx.group).wait(), None


class _ReduceScatter(torch.autograd.Function):
    """Sum over ranks, of which this rank gets its rows; its gradient is that of all rows."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return reduce_scatter_rows(rows, group).wait()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:
        return all_gather_rows(grad, ctx.group).wait(), None
