"""Expert parallelism: each rank has some of the experts of a mixture-of-experts layer.

Tokens are sent to the ranks of their experts, and the experts' results are sent back.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import distributed

from ..ops.moe_permute import make_map
from ..permutation import moe_unpermute
from ..recipe import BlockScaling
from ..runtime.named_arguments import check_ints, named_arguments
from .agreement import check_same
from .collectives import all_gather_rows, world_size
from .exchange_parts import (
    Arriving,
    Chunk,
    DividedRows,
    Join,
    Places,
    join_rows,
    order_by_part,
    sizes_of_parts,
    split_rows,
)
from .groups import check_process_group
from .row_exchange import AllGather, AllToAll, Arrival, Permute, Way, travel, wire_recipe

EXCHANGES = ("all_to_all", "all_gather")
# Names of the values that `_kind` returns.
_COMPARED = (
    "hidden size", "dtype of tokens", "dtype of probs",
    "tokens.requires_grad", "probs.requires_grad",
)  # fmt: skip


class TokenDispatcher:
    """Sends tokens to the ranks of their experts, and the experts' outputs back to the tokens.

        dispatch = dispatcher.dispatch(tokens, probs, routing_map)
        rows = fc2(activation(fc1(dispatch.rows, dispatch.m_splits)), dispatch.m_splits)
        out = dispatch.combine(rows)

    Rank ``r`` of ``group`` has ``num_experts / ranks`` experts, starting at number ``r *
    num_experts / ranks``. ``dispatch`` and ``combine`` are differentiable in tokens, probs and
    results. No token is dropped; for an exception see ``max_experts_per_token``.

    Args:
        num_experts: number of experts on all ranks, a multiple of the number of ranks.
        group: process group of the expert-parallel ranks; None is the whole world.
        align: each expert's rows are padded with zeros to a multiple of this: 16 for FP8 GEMMs, 32
            for MXFP8, 1 for no padding.
        exchange: "all_to_all" sends each copy of a token to its expert's rank. The numbers of
            tokens and of rows per expert may differ between ranks. The host waits for the GPU once,
            to learn how many rows travel, and ``m_splits`` is a list. "all_gather" sends every
            token to every rank, in buffers sized for the worst case. The host does not wait after
            the first call, so calls can be captured in a CUDA graph, and ``m_splits`` is an int32
            tensor on the device. The number of tokens must be equal on all ranks and in all calls.
            "all_gather" moves ``ranks / (experts per token)`` times the bytes of "all_to_all".
        max_experts_per_token: upper bound on the experts of one token, which sizes the buffers of
            "all_gather"; None stands for ``num_experts``. If a token has more than this many
            experts on one rank, "all_gather" may silently skip some of them.
        wire: format in which rows travel between ranks. None is their own dtype. "blockwise" or a
            ``BlockScaling`` recipe is FP8 with a scale for each 1x128 block, for the tokens in
            ``dispatch`` (in the recipe's input format) and for the gradient of the experts' rows
            that ``combine`` sends in backward (in its gradient format). A row then has ``hidden + 4
            * ceil(hidden / 128)`` bytes, 0.52 times those of bfloat16. Results and the gradient of
            tokens are summed, and travel in their own dtype like probs. A single rank sends and
            casts nothing.

    Attributes:
        ranks: number of ranks of ``group``.
        local_experts: number of experts on this rank.
        copies: assumed upper bound on the experts of one token on one rank.

    Rows that arrive in FP8 are decoded to the dtype that was sent. With power-of-two scales this is
    exact, except that magnitudes above 0.93 times the dtype's largest may become infinite. Because
    a block lies within a row, experts under the same ``BlockScaling`` recipe compute with the
    values that finite rows have without ``wire``: outputs are bitwise identical, and with
    "all_to_all" the gradients of tokens and probs, too. Gradients of weights then differ only by
    values that the first cast made subnormal; the gradient of a bias sums rounded rows.
    "all_gather" sends the gradient before multiplying by probs, so that it is rounded twice.
    Experts under other recipes or without FP8 get the rounded rows.

    Do not reduce the gradients of experts' parameters over ``group``: they are already computed
    from the tokens of all its ranks. Delayed scaling reduces amax values over ``fp8_group``. If
    that contains several ranks of ``group``, the ``i``-th local experts of these ranks share
    scales.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: a number is below 1, ``num_experts`` is not a multiple of the number of ranks,
            ``exchange`` is unknown, or ``wire`` is another name or recipe or has other ``scales``
            than ``"pow2"``.
    """

    @named_arguments()
    def __init__(
        self,
        num_experts: int,
        group: Any = None,
        *,
        align: int = 16,
        exchange: str = "all_to_all",
        max_experts_per_token: int | None = None,
        wire: BlockScaling | str | None = None,
    ) -> None:
        numbers = {"num_experts": num_experts, "align": align}
        if max_experts_per_token is not None:
            numbers["max_experts_per_token"] = max_experts_per_token
        check_ints("TokenDispatcher", **numbers)
        check_process_group("TokenDispatcher", "group", group)
        if exchange not in EXCHANGES:
            raise ValueError(
                f"TokenDispatcher: exchange must be one of {', '.join(EXCHANGES)}, got {exchange!r}"
            )
        self.wire = wire_recipe("TokenDispatcher", wire)
        self.ranks = world_size(group)
        self._cast = self.wire if self.ranks > 1 else None  # one rank sends nothing
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
        """Sends ``tokens`` to the ranks of their experts; collective.

        Args:
            tokens: ``[tokens, hidden]`` float32, float16 or bfloat16, of this rank.
            probs: ``[tokens, num_experts]`` float32 or the dtype of ``tokens``: the weight of each
                expert's output.
            routing_map: ``[tokens, num_experts]`` bool, True where a token is routed to an expert.

        Returns:
            A ``Dispatch`` with the rows that this rank's experts compute on. Every rank must then
            call its ``combine``.

        Raises:
            TypeError: an argument has another dtype than listed above.
            ValueError: a shape does not match, or with "all_gather" the number of tokens is not
                that of the first call.
            RankMismatchError: the ranks differ in ``num_experts``, ``exchange``, ``wire``, hidden
                size, dtypes, ``requires_grad`` or, with "all_gather", number of tokens (raised on
                all ranks); or another rank raises one of the errors above. With "all_gather" on
                GPUs only the first call checks this, because the check makes the host wait.
        """
        ((begin,), _) = self.begin_chunks(tokens, probs, routing_map, 1)
        return begin()()

    def begin_chunks(
        self, tokens: torch.Tensor, probs: torch.Tensor, routing_map: torch.Tensor, chunks: int
    ) -> tuple[list[Chunk], Join]:
        """Cuts what ``dispatch`` sends into parts; collective.

        "all_to_all" cuts the experts of each rank, so that every expert has its rows in one part,
        "all_gather" the tokens. The host waits as often as for one part. The other arguments, and
        the errors, are those of ``dispatch``.

        Args:
            chunks: number of parts, equal on all ranks.

        Returns:
            chunks: for each part a function that sends it, and returns a function which waits for
                the ``Dispatch``. Every rank must call all of these, and those of
                ``begin_combine``, in one order.
            join: function from what the parts' ``begin_combine`` return to the sums of all tokens.
        """
        error = self._refusal(tokens, probs, routing_map)
        if error is not None and self.ranks == 1:
            raise error
        run = self._gathered if self.exchange == "all_gather" else self._exchanged
        return run(tokens, probs, routing_map, chunks, error)

    def _refusal(
        self, tokens: torch.Tensor, probs: torch.Tensor, routing_map: torch.Tensor
    ) -> Exception | None:
        """Returns the error for this rank's arguments of ``dispatch``; None if they are valid."""
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

    def _compare(
        self, tokens: torch.Tensor, probs: torch.Tensor, chunks: int, error: Exception | None
    ) -> None:
        """Checks that the ranks call ``dispatch`` alike; collective, and the host waits."""
        values: dict[str, object] = {}
        if error is None:
            named = zip(_COMPARED, _kind(tokens, probs), strict=True)
            options = {name: getattr(self, name) for name in ("num_experts", "exchange", "wire")}
            values = {**options, "exchange_chunks": chunks, **dict(named)}
            if self.exchange == "all_gather":
                values["number of tokens"] = tokens.shape[0]
        check_same("TokenDispatcher", "group", self.group, values, tokens.device, error)

    def _exchanged(
        self,
        tokens: torch.Tensor,
        probs: torch.Tensor,
        routing_map: torch.Tensor,
        chunks: int,
        error: Exception | None,
    ) -> tuple[list[Chunk], Join]:
        """Dispatches with "all_to_all"; raises ``error`` once the other ranks have been told."""
        ranks, local = self.ranks, self.local_experts
        if ranks > 1 and not self._compared:  # the counts would not fit together
            self._compare(tokens, probs, chunks, error)
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
            self._compare(tokens, probs, chunks, error)
        sent, received = ([row[1:] for row in rows] for rows in both)
        sizes = sizes_of_parts(local, chunks)
        ends = list(itertools.accumulate(sizes))
        parts = [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]
        rows = [sum(sum(row[part]) for row in sent) for part in parts]
        ids = make_map(routing_map, num_rows=sum(rows)).row_id_map
        pack: Way = [Permute(ids, sum(rows))]
        each: Sequence[torch.Tensor] = (tokens,)
        if chunks > 1:
            order_by_part(ids, counts[:, 1:], sizes)
            each, pack = DividedRows.apply(travel(tokens, pack, None)(), rows), []
        places = Places(rows), Places(rows)  # of gradients, and of results

        def join(returned: list[torch.Tensor]) -> torch.Tensor:
            return moe_unpermute(join_rows(returned), ids, probs)

        def chunk(k: int, x: torch.Tensor, part: slice) -> Chunk:
            numbers = [row[part] for row in sent], [row[part] for row in received]
            own = [place.of(k) if chunks > 1 else None for place in places]
            return lambda: self._sent(x, pack, part, numbers, arriving[:, 1:][:, part], own, join)

        return [chunk(k, each[k], part) for k, part in enumerate(parts)], join

    def _sent(
        self,
        x: torch.Tensor,
        pack: Way,
        part: slice,
        numbers: tuple[list[list[int]], list[list[int]]],
        arriving: torch.Tensor,
        places: list[Any],
        join: Join,
    ) -> Arriving:
        """Sends rows for the experts ``part`` of each rank; the host knows their numbers."""
        sent, received = numbers
        sizes = ([sum(row) for row in sent], [sum(row) for row in received])
        # Rows arrive ordered by source rank, then expert: each row has one expert here.
        ends = arriving.flatten().cumsum(0)
        at = torch.arange(sum(sizes[1]), device=x.device)
        expert = torch.bucketize(at, ends, right=True) % arriving.shape[1] + part.start
        owners = expert[:, None] == torch.arange(self.local_experts, device=x.device)
        m_splits = [0] * self.local_experts
        own = [sum(column) for column in zip(*received, strict=True)]
        m_splits[part] = [-(-count // self.align) * self.align for count in own]
        total = sum(m_splits)
        made = make_map(owners, align_size=self.align, num_rows=total)
        ways: list[Way] = [[Permute(made.row_id_map, total)]] * 2
        if self.ranks > 1:
            ways = [[AllToAll(*sizes, self.group, place), *ways[0]] for place in places]
        rows = travel(x, [*pack, *ways[0]], self._cast)

        def combine(results: torch.Tensor) -> Arrival:
            return travel(results, ways[1], self._cast, returns=True)

        counts = made.padded_tokens_per_expert
        return lambda: Dispatch(rows(), m_splits, counts, combine, join, self._compare_results)

    def _gathered(
        self,
        tokens: torch.Tensor,
        probs: torch.Tensor,
        routing_map: torch.Tensor,
        chunks: int,
        error: Exception | None,
    ) -> tuple[list[Chunk], Join]:
        """Dispatches with "all_gather"; raises ``error`` once the other ranks have been told."""
        # On a GPU the host would wait for the other ranks' values.
        if self.ranks > 1 and not (tokens.is_cuda and (self._compared or _capturing())):
            self._compare(tokens, probs, chunks, error)
            self._compared = True
        if error is not None:
            raise error
        self._tokens = tokens.shape[0]
        sizes = sizes_of_parts(tokens.shape[0], chunks)
        way: Way = [AllGather(self.group)] if self.ranks > 1 else []
        if self.ranks > 1:
            routing_map = all_gather_rows(routing_map.view(torch.uint8), self.group).wait()
            probs = travel(probs, way, None)()
        # Of each part the rows of all ranks.
        shape = (self.ranks, tokens.shape[0], self.local_experts)
        own = (_columns(self, t).view(shape) for t in (routing_map, probs))
        each = split_rows(tokens, sizes, 0), *(split_rows(t, sizes, 1) for t in own)

        def chunk(x: torch.Tensor, owners: torch.Tensor, probs: torch.Tensor) -> Chunk:
            return lambda: self._sent_to_all(x, way, owners.flatten(0, 1), probs.flatten(0, 1))

        return [chunk(*given) for given in zip(*each, strict=True)], join_rows

    def _sent_to_all(
        self, tokens: torch.Tensor, way: Way, owners: torch.Tensor, probs: torch.Tensor
    ) -> Arriving:
        """Sends tokens to all ranks, given the ``owners`` and ``probs`` of all ranks' tokens."""
        count = owners.shape[0] * self.copies + self.local_experts * (self.align - 1)
        count = -(-count // self.align) * self.align
        made = make_map(owners.contiguous(), align_size=self.align, num_rows=count)
        rows = travel(tokens, [*way, Permute(made.row_id_map, count)], self._cast)

        def combine(results: torch.Tensor) -> Arrival:
            partial = moe_unpermute(results, made.row_id_map, probs.contiguous())
            return travel(partial, way, self._cast, returns=True) if way else lambda: partial

        counts = made.padded_tokens_per_expert
        return lambda: Dispatch(rows(), counts, counts, combine, join_rows, self._compare_results)

    def _compare_results(self, results: torch.Tensor, error: Exception | None) -> None:
        """Checks that the ranks call ``combine`` alike, and raises this rank's ``error``.

        Only the first call with gradients enabled and the first without compare ranks.
        """
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
    """Returns what arguments must have in common on all ranks, in the order of ``_COMPARED``."""
    grad = torch.is_grad_enabled()
    return (
        tokens.shape[1],
        tokens.dtype,
        probs.dtype,
        grad and tokens.requires_grad,
        grad and probs.requires_grad,
    )


def _columns(dispatcher: TokenDispatcher, x: torch.Tensor) -> torch.Tensor:
    """Returns the columns of ``x`` ``[tokens, num_experts]`` for this rank's experts."""
    rank = distributed.get_rank(dispatcher.group) if dispatcher.ranks > 1 else 0
    return x[:, rank * dispatcher.local_experts :][:, : dispatcher.local_experts].contiguous()


def _capturing() -> bool:
    """Returns True if the current stream is in the capture of a CUDA graph."""
    return torch.cuda.is_current_stream_capturing()


class Dispatch:
    """Tokens that this rank's experts compute on, from ``TokenDispatcher.dispatch``.

    Only a ``TokenDispatcher`` constructs it.

    Attributes:
        rows: ``[rows, hidden]`` in the dtype of the tokens, one row for each pair of a token and
            one of this rank's experts, ordered by expert. Each expert's rows are padded with zero
            rows to a multiple of ``align``.
        m_splits: number of rows of each of this rank's experts, padding included: the argument of
            ``GroupedLinear``. A list of ints with "all_to_all", an int32 tensor with "all_gather".
        counts: ``m_splits`` as an int32 tensor on the tokens' device.
    """

    __slots__ = ("_combine", "_compare", "_join", "counts", "m_splits", "rows")

    def __init__(
        self,
        rows: torch.Tensor,
        m_splits: Any,
        counts: torch.Tensor,
        combine: Callable[[torch.Tensor], Arrival],
        join: Join,
        compare: Any,
    ) -> None:
        self.rows = rows
        self.m_splits = m_splits
        self.counts = counts  # m_splits on the device
        self._combine = combine
        self._join = join
        self._compare = compare

    def combine(self, results: torch.Tensor) -> torch.Tensor:
        """Sends results back, and computes ``sum(prob * result)`` over each token's experts.

        Collective: every rank must call it, even if its experts got no tokens.

        Args:
            results: ``[rows, features]``, the experts' outputs for ``rows``, in the dtype of
                ``probs``; if that is float32, also float16 or bfloat16.

        Returns:
            ``[tokens, features]`` in the dtype of ``results``, one row for each token passed to
            ``dispatch``.

        Raises:
            ValueError: ``results`` does not have as many rows as ``rows``.
            RankMismatchError: the ranks differ in features, dtypes or ``requires_grad`` (raised on
                all ranks), or another rank raises ValueError. Only the dispatcher's first call with
                gradients enabled and its first without compare the ranks.
        """
        return self._join([self.begin_combine(results)()])

    def begin_combine(self, results: torch.Tensor) -> Arrival:
        """Begins to send results back, and returns a function that waits for them.

        Collective; argument and errors are those of ``combine``.

        Returns:
            A function without arguments, whose result ``join`` of ``TokenDispatcher.begin_chunks``
                takes.
        """
        error = None
        if results.dim() != 2 or results.shape[0] != self.rows.shape[0]:
            error = ValueError(
                f"Dispatch: results must be [{self.rows.shape[0]}, features], "
                f"got {list(results.shape)}"
            )
        self._compare(results, error)
        return self._combine(results)
