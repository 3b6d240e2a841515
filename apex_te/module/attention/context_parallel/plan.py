"""Plans of attention with a group of context-parallel ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ....runtime.tracing import is_traced
from ..backends import attend
from ..candidates import Options, Path
from ..choice import choose
from ..masks import Mask, MaskType, Visibility
from ..max_logit import max_logit
from ..packed import packing
from .a2a import own_heads, to_heads, to_tokens
from .all_gather import (
    attend_by_parts,
    gather_rows,
    packed_attention,
    rows_of,
    seen_by_rank,
    without_padding,
)
from .meeting import Everything, Meeting, Neighbourhood
from .pieces import Piece, attend_in_pieces, packed_piece, pieces_of
from .ranks import ContextRanks
from .split import PackedZigZag, ZigZag, check_lengths

# Of each layout, from [s, b, h, d] or the layout itself to [b, h, s, d].
_TO_HEADS = {"sbhd": (1, 2, 0, 3), "bshd": (0, 2, 1, 3)}
_KERNELS = ("cpu", "cudnn", "flash")  # those that pieces take
_Run = Callable[..., torch.Tensor]


class Request(NamedTuple):
    """Arguments of a call of attention besides its tensors, about whole sequences.

    ``cu`` are ``cu_seqlens_q`` and ``_kv``, ``longest`` the two ``max_seqlen``, and ``starts`` the
    two ``cu_seqlens`` with ``_padded``.
    """

    layout: str
    kind: MaskType
    size: tuple[int, int] | None
    mask: Mask
    cu: tuple[torch.Tensor | None, torch.Tensor | None]
    longest: tuple[int | None, int | None]
    has_alibi: bool
    starts: tuple[torch.Tensor | None, torch.Tensor | None]


class Plan(NamedTuple):
    """Path, and the function of ``(q, k, v, bias, sink)`` in the layout that computes it.

    ``largest`` is a function of ``(q, k, bias)``, of the largest logit of this rank's queries and
    each head; None if it is not known, or if ``run`` returns it.
    """

    path: Path
    run: _Run
    largest: _Run | None = None


# Returns the path and the function of [b, h, s, d] tensors for whole sequences, and more.
Route = Callable[[Any, Any, Any, Any, Request], tuple[Any, ...]]
See = Callable[[Any, Any, Any, Request], tuple[Visibility, Mask]]


def plan(
    owner: str,
    ranks: ContextRanks,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
    request: Request,
    options: Options,
    is_self: bool,
    route: Route,
    see: See,
    with_max: bool = False,
) -> Plan:
    """Plans attention to sequences that are split over ranks.

    Args:
        q, k, v: this rank's tokens, in the request's layout.
        bias: of whole scores, or the slopes of ALiBi.
        is_self: queries and keys are the same tokens.
        route: plans attention to whole sequences.
        see: returns which keys the queries of whole sequences see.
        with_max: the plan's function also returns the largest logit of each head, as that of
            ``route`` does then.
    """
    if options.dropout > 0.0:
        raise NotImplementedError(
            f"{owner}: attention_dropout must be 0 while training with a cp_group of {ranks.size} "
            f"ranks, whose random states may be equal, got {options.dropout}"
        )
    if request.layout != "thd":
        time = request.layout.index("s")
        for name, x in (("query_layer", q), ("key_layer", k)):
            if x.shape[time] % 2:
                raise ValueError(
                    f"{owner}: {name} must have two equal chunks of each sequence with a cp_group "
                    f"of {ranks.size} ranks, got {x.shape[time]} tokens"
                )
    served = _exchange_of(ranks, q, k, bias, request)
    if served == "a2a":
        found = _a2a(owner, ranks, q, k, v, bias, request, route)
    else:
        found = _all_gather(owner, ranks, q, k, v, bias, request, options, is_self, see)
        if with_max:
            found = _with_largest(owner, ranks, found)
    if ranks.comm_type != served:
        reason = f"{served} serves cp_comm_type {ranks.comm_type!r}; {found.path.reason}"
        found = found._replace(path=found.path._replace(reason=reason))
    if torch.compiler.is_compiling() or is_traced():
        return found
    return _comparing(owner, ranks, found, request, options, with_max)


def _exchange_of(
    ranks: ContextRanks,
    q: torch.Tensor,
    k: torch.Tensor,
    bias: torch.Tensor | None,
    request: Request,
) -> str:
    """Returns the exchange that serves the ranks' ``comm_type``: the faster one for p2p.

    All-to-all leaves whole sequences to one kernel call; of windows, though, few keys are gathered,
    and of grouped queries fewer bytes than all heads have.
    """
    if ranks.comm_type in ("a2a", "all_gather"):
        return ranks.comm_type
    heads, groups, kind = q.shape[-2], k.shape[-2], request.kind
    divides = not (heads % ranks.size or groups % ranks.size)
    is_whole = request.size is None and request.layout != "thd"
    has_mask = kind.padding or kind.arbitrary or bias is not None
    is_more = has_mask or groups * ranks.size > heads + groups
    return "a2a" if ranks.has_one_group and divides and is_whole and is_more else "all_gather"


def _comparing(
    owner: str, ranks: ContextRanks, plan: Plan, request: Request, options: Options, with_max: bool
) -> Plan:
    """Returns a plan whose function first compares over ranks what decides on collectives."""
    attend = plan.run

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: Any, sink: Any) -> Any:
        if not (q.is_cuda and torch.cuda.is_current_stream_capturing()):
            given = {"query_layer": q, "key_layer": k, "value_layer": v}
            shapes = {f"{name} shape": tuple(x.shape) for name, x in given.items()}
            grads = torch.is_grad_enabled() and any(x.requires_grad for x in given.values())
            values: dict[str, object] = {
                **shapes,
                "dtype": q.dtype,
                "gradients": grads,
                "cp_comm_type": ranks.comm_type,
                "qkv_format": request.layout,
                "attn_mask_type": request.kind.name,
                "window_size": request.size,
                "bias": "alibi" if request.has_alibi else bias is not None,
                "return_max_logit": with_max,
                "batch_invariant": options.independent_rows,
            }
            ranks.compare(owner, values, q.device)
        return attend(q, k, v, bias, sink)

    return plan._replace(run=run)


def _with_largest(owner: str, ranks: ContextRanks, plan: Plan) -> Plan:
    """Returns a plan whose function also returns the largest logits of all ranks."""
    attend, largest = plan.run, plan.largest
    if largest is None:
        raise NotImplementedError(
            f"{owner}: return_max_logit must be False with qkv_format 'thd' and cp_comm_type "
            f"{ranks.comm_type!r} (use 'a2a'), got True"
        )

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: Any, sink: Any) -> Any:
        out = attend(q, k, v, bias, sink)
        with torch.no_grad():
            return out, ranks.gather(largest(q, k, bias)[None]).wait().amax(0)

    return plan._replace(run=run)


def _whole_starts(owner: str, name: str, request: Request, ranks: int, tokens: int) -> torch.Tensor:
    """Returns where whole packed sequences begin and end, padding included."""
    cu, padded = request.cu, request.starts
    if name == "kv" and padded[1] is None and (cu[1] is None or cu[1] is cu[0]):
        name = "q"
    number = 0 if name == "q" else 1
    starts = padded[number]
    name = f"cu_seqlens_{name}" + ("" if starts is None else "_padded")
    starts = cu[number] if starts is None else starts
    if not isinstance(starts, torch.Tensor) or starts.dtype is not torch.int32:
        actual = starts.dtype if isinstance(starts, torch.Tensor) else type(starts).__name__
        raise TypeError(f"{owner}: {name} must be an int32 tensor, got {actual}")
    check_lengths(owner, name, starts, ranks, tokens * ranks)
    return starts


def _a2a(
    owner: str,
    ranks: ContextRanks,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
    request: Request,
    route: Route,
) -> Plan:
    """Plans attention of this rank's part of the heads to whole sequences."""
    n, heads, groups = ranks.size, q.shape[-2], k.shape[-2]
    if heads % n or (groups % n and n % groups):
        raise ValueError(
            f"{owner}: num_attention_heads must be a multiple of the {n} ranks of cp_group with "
            "cp_comm_type 'a2a', and num_gqa_groups a multiple or a divisor, got "
            f"{heads} and {groups} heads on this rank"
        )
    repeats = max(n // groups, 1) if groups % n else 1
    layout = request.layout
    orders: list[Any]
    if layout == "thd":
        starts = [
            _whole_starts(owner, name, request, n, x.shape[0]) for name, x in (("q", q), ("kv", k))
        ]
        orders = [PackedZigZag(n, starts[0], n * q.shape[0])]
        orders *= 2
        if starts[1] is not starts[0] or k.shape[0] != q.shape[0]:
            orders[1] = PackedZigZag(n, starts[1], n * k.shape[0])
        inner = layout
    else:
        orders = [ZigZag(n)] * 2
        inner = "sbhd"
    is_joint = orders[0] is orders[1] and k.shape[:-2] == q.shape[:-2]
    head_dim = -1 if request.has_alibi else 1  # of a bias, or of slopes
    mask = request.mask
    if isinstance(mask, torch.Tensor) and mask.dim() == 4:
        mask = own_heads(ranks, mask, 1, heads)
    part = own_heads(ranks, bias, head_dim, heads)

    def stand_in(x: torch.Tensor, count: int) -> torch.Tensor:
        """Returns a tensor without values for what the ranks make of ``x``."""
        first, *batch = x.shape[1::-1] if layout == "bshd" else x.shape[:-2]
        return x.new_empty(()).expand(n * first, *batch, count, x.shape[-1])

    whole_q = stand_in(q, heads // n)
    whole_k, whole_v = (stand_in(x, groups * repeats // n) for x in (k, v))
    found = route(whole_q, whole_k, whole_v, part, request._replace(layout=inner, mask=mask))
    path, attended = found[:2]

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: Any, sink: Any) -> Any:
        if repeats > 1:
            k, v = (x.repeat_interleave(repeats, -2) for x in (k, v))
        if is_joint:
            q, k, v = to_heads(ranks, orders[0], layout, q, k, v)
        else:
            (q,) = to_heads(ranks, orders[0], layout, q)
            k, v = to_heads(ranks, orders[1], layout, k, v)
        if layout != "thd":
            q, k, v = (x.permute(_TO_HEADS[inner]) for x in (q, k, v))
        bias = own_heads(ranks, bias, head_dim, heads)
        out = attended(q, k, v, bias, own_heads(ranks, sink, 0, heads))
        out, largest = out if isinstance(out, tuple) else (out, None)
        if layout != "thd":
            out = out.permute(2, 0, 1, 3)
        out = to_tokens(ranks, orders[0], layout, out)[0]
        return out if largest is None else (out, ranks.gather(largest).wait())

    reason = f"each of {n} ranks has {heads // n} heads of whole sequences; {path.reason}"
    return Plan(path._replace(name=f"a2a {path.name}", reason=reason), run)


def _all_gather(
    owner: str,
    ranks: ContextRanks,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
    request: Request,
    options: Options,
    is_self: bool,
    see: See,
) -> Plan:
    """Plans attention of this rank's tokens to gathered keys."""
    instead = f"with cp_comm_type {ranks.comm_type!r} (use 'a2a')"
    if request.has_alibi:
        raise NotImplementedError(
            f"{owner}: core_attention_bias_type must not be 'alibi' {instead}"
        )
    n, kind, size = ranks.size, request.kind, request.size
    run: _Run
    if request.layout == "thd":
        if bias is not None or request.mask is not None:
            raise NotImplementedError(
                f"{owner}: attention_mask and core_attention_bias must be None with qkv_format "
                f"'thd' {instead}, got a tensor"
            )
        other = size is not None or kind.arbitrary
        if not is_self if kind.causal else other:
            raise NotImplementedError(
                f"{owner}: attn_mask_type must be causal in self attention, or non-causal "
                f"without a window, with qkv_format 'thd' {instead}, got {kind.name!r}"
            )
        where = packing(owner, *request.cu, *request.longest)
        tokens = (q.shape[0], k.shape[0])
        starts = (
            _whole_starts(owner, "q", request, n, tokens[0]),
            _whole_starts(owner, "kv", request, n, tokens[1]),
        )
        path, run = packed_attention(
            owner, ranks, tokens, where, starts, kind, size, options, q, k, v
        )
        return _gathered(n, path, run, "in two calls, of each sequence's first and second chunk")
    order = _TO_HEADS[request.layout]
    back = (2, 0, 1, 3) if request.layout == "sbhd" else (0, 2, 1, 3)
    q, k, v = (x.permute(order) for x in (q, k, v))
    queries, keys = q.shape[2], k.shape[2]

    def stand_in(x: torch.Tensor) -> torch.Tensor:
        """Returns a tensor without values for ``x`` of all ranks."""
        return x.new_empty(()).expand(*x.shape[:2], n * x.shape[2], x.shape[3])

    seen, _ = see(stand_in(q), stand_in(k), bias, request)
    is_plain = seen.hidden is None and seen.fully_masked_queries is None and bias is None
    # All ranks must decide alike, so not by their pieces.
    chosen = choose(q, k, v, seen if is_plain else Visibility(), None, options)
    fits = is_plain and (seen == Visibility() or queries == keys)
    if fits and chosen.rest is None and chosen.kernel in _KERNELS:
        every = [
            pieces_of(rank, n, queries, keys, seen.causal is not None, seen.window)
            for rank in range(n)
        ]
        pieces = every[ranks.rank]
        paths = [_path_of(piece, q, k, v, options) for piece in pieces]
        kernels = tuple(p.kernel if p.kernel in _KERNELS else chosen.kernel for p in paths)
        meeting: Meeting = Everything(ranks, keys)
        if seen.window is not None and ranks.has_one_group:
            needs = tuple(tuple(span for each in all_ for span in each.keys) for all_ in every)
            near = Neighbourhood(ranks, needs, keys)
            pieces = tuple(each._replace(keys=near.places(each.keys)) for each in pieces)
            meeting = near
        if seen.window is not None and set(kernels) == {"flash"}:
            pieces = packed_piece(pieces, q.shape[0])
            kernels = kernels[: len(pieces)]

        def run(
            q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: Any, sink: Any
        ) -> torch.Tensor:
            q, k, v = (x.permute(order) for x in (q, k, v))
            out = attend_in_pieces(
                meeting, pieces, kernels, options.scale, options.has_sink, q, k, v, sink
            )
            return out.permute(back)

        def largest(q: torch.Tensor, k: torch.Tensor, bias: Any) -> torch.Tensor:
            q, rows = q.permute(order), ranks.gather(k.permute(order).permute(2, 0, 1, 3)).wait()
            found = []
            for piece in every[ranks.rank]:
                keys = torch.cat([rows[a:b] for a, b in piece.keys]).permute(1, 2, 0, 3)
                part = q[:, :, slice(*piece.queries)]
                found.append(max_logit(part, keys, None, _seen_in(piece), options.scale))
            return torch.stack(found).amax(0)

        how = "in one packed call" if pieces[0].packed else f"in {len(pieces)} pieces"
        return _gathered(n, chosen, run, how, largest)
    whole_k, whole_v = stand_in(k), stand_in(v)
    packed = (
        None if bias is not None else without_padding(seen, ranks, options, q, whole_k, whole_v)
    )

    def visible() -> Visibility:
        return seen_by_rank(seen, ranks, n * queries, n * keys, q.device)

    if packed is None:
        own = visible()
        rows = rows_of(bias, ranks, queries // 2)
        path = choose(q, whole_k, whole_v, own, rows, options)
        how = "by one mask of its queries and all keys"
    else:
        path, parts = packed
        how = f"in {len(parts)} call" + "s" * (len(parts) > 1)

    def run(  # type: ignore[no-redef]
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: Any, sink: Any
    ) -> torch.Tensor:
        q = q.permute(order)
        k, v = (x.permute(order).permute(2, 0, 1, 3) for x in (k, v))
        k, v = (ZigZag(n).whole(x).permute(1, 2, 0, 3) for x in gather_rows(ranks, k, v))
        if packed is not None:
            return attend_by_parts(q, k, v, path, parts, options, sink).permute(back)
        bias = rows_of(bias, ranks, queries // 2)
        return attend(q, k, v, bias, path, own, options, sink=sink).permute(back)

    def largest(q: torch.Tensor, k: torch.Tensor, bias: Any) -> torch.Tensor:  # type: ignore[no-redef]
        rows = ranks.gather(k.permute(order).permute(2, 0, 1, 3)).wait()
        k = ZigZag(n).whole(rows).permute(1, 2, 0, 3)
        bias = rows_of(bias, ranks, queries // 2)
        return max_logit(q.permute(order), k, bias, visible(), options.scale)

    return _gathered(n, path, run, how, largest)


def _path_of(
    piece: Piece, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options
) -> Path:
    """Returns the path that one rank would take for a piece."""
    seen = _seen_in(piece)
    if seen.causal is not None:  # queries and keys are as many
        seen = Visibility("upper_left")
    count = sum(b - a for a, b in piece.keys)
    part = q[:, :, slice(*piece.queries)]
    k, v = (x.new_empty(()).expand(*x.shape[:2], count, x.shape[3]) for x in (k, v))
    return choose(part, k, v, seen, None, options)


def _seen_in(piece: Piece) -> Visibility:
    """Returns which of a piece's keys its queries see."""
    if piece.window != (-1, -1):
        return Visibility(window=piece.window)
    return Visibility("bottom_right" if piece.causal else None)


def _gathered(ranks: int, path: Path, run: _Run, how: str, largest: _Run | None = None) -> Plan:
    """Returns a plan with a path that says how gathered keys are used."""
    reason = f"each rank attends to the keys of {ranks} ranks, {how}; {path.reason}"
    return Plan(path._replace(name=f"all_gather {path.name}", reason=reason), run, largest)
