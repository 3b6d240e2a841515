"""Attention over packed sequences (thd): PyTorch's varlen kernel, or moved to padded ones.

Gaps between sequences, tokens that belong to none, are left out while attention computes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.nn import functional

from .alibi import Alibi
from .backends import attend, packed
from .candidates import Options, Path, Problem
from .choice import choose, first_that_fits
from .kernels import Call
from .masks import MASK_TYPES, Mask, MaskType, Visibility, lengths_mask, visibility
from .max_logit import max_logit
from .places import Places, shared

_ALL, _CAUSAL = Visibility(), Visibility("upper_left")
# Sequences are always told apart, whatever the type says.
_KINDS = {
    "no_mask": MASK_TYPES["padding"],
    "causal": MASK_TYPES["padding_causal"],
    "causal_bottom_right": MASK_TYPES["padding_causal_bottom_right"],
}


class Packing(NamedTuple):
    """Boundaries of packed sequences: sequence i is the tokens ``cu[i]`` to ``cu[i + 1] - 1``.

    ``queries`` and ``keys`` are such ``cu`` tensors, one tensor in self attention.
    ``longest_query`` and ``longest_key`` may be upper bounds. ``ends`` has the last elements of
    both ``cu``, each None if only the device knows it.
    """

    queries: torch.Tensor
    keys: torch.Tensor
    longest_query: int
    longest_key: int
    ends: tuple[int | None, int | None] = (None, None)

    @property
    def is_self(self) -> bool:
        """Returns True if queries and keys have one ``cu_seqlens`` tensor, as in self attention."""
        return self.queries is self.keys


def packing(
    owner: str,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_kv: torch.Tensor | None,
    max_seqlen_q: int | None,
    max_seqlen_kv: int | None,
) -> Packing:
    """Checks ``cu_seqlens`` and makes a ``Packing``; reads missing maxima from the device."""
    if cu_seqlens_q is None:
        raise ValueError(f"{owner}: cu_seqlens_q must be given with qkv_format 'thd', got None")
    if cu_seqlens_kv is None:
        cu_seqlens_kv, max_seqlen_kv = cu_seqlens_q, max_seqlen_q
    elif cu_seqlens_kv is cu_seqlens_q and max_seqlen_q is not None and max_seqlen_kv is not None:
        max_seqlen_q = max_seqlen_kv = max(max_seqlen_q, max_seqlen_kv)
    longest: list[int] = []
    ends: list[int | None] = []
    for name, cu, given in (
        ("q", cu_seqlens_q, max_seqlen_q),
        ("kv", cu_seqlens_kv, max_seqlen_kv),
    ):
        if not isinstance(cu, torch.Tensor) or cu.dtype is not torch.int32:
            actual = cu.dtype if isinstance(cu, torch.Tensor) else type(cu).__name__
            raise TypeError(f"{owner}: cu_seqlens_{name} must be an int32 tensor, got {actual}")
        if cu.dim() != 1 or cu.shape != cu_seqlens_q.shape or cu.shape[0] < 2:
            raise ValueError(
                f"{owner}: cu_seqlens_{name} must have shape [sequences + 1], the same for queries "
                f"and keys, got {list(cu.shape)}"
            )
        if name == "kv" and cu is cu_seqlens_q and given == max_seqlen_q:
            longest.append(longest[0])
            ends.append(ends[0])
            continue
        if given is None and cu.is_meta:
            raise ValueError(
                f"{owner}: max_seqlen_{name} must be given if cu_seqlens_{name} is on the meta "
                "device, got None"
            )
        end = None
        if given is None or (cu.device.type == "cpu" and not torch.compiler.is_compiling()):
            extremes = cu.diff().aminmax()
            shortest, most, first, end = torch.stack((*extremes, cu[0], cu[-1])).tolist()
            if first != 0 or shortest < 0:
                raise ValueError(
                    f"{owner}: cu_seqlens_{name} must ascend from 0, got a first element of "
                    f"{first} and a sequence of {shortest} tokens"
                )
            if given is not None and most > given:
                raise ValueError(
                    f"{owner}: max_seqlen_{name} must be at least the longest sequence, "
                    f"{most}, got {given}"
                )
            given = most if given is None else given
        longest.append(max(given, 1))
        ends.append(end)
    return Packing(cu_seqlens_q, cu_seqlens_kv, longest[0], longest[1], (ends[0], ends[1]))


def gaps_of(
    owner: str, name: str, cu: torch.Tensor, padded: torch.Tensor | None, tokens: int
) -> Places | None:
    """Returns the places of packed tokens; None if ``padded`` is None or ``cu`` itself."""
    if padded is None or padded is cu:
        return None
    argument = f"{owner}: cu_seqlens_{name}_padded"
    if not isinstance(padded, torch.Tensor) or padded.dtype is not torch.int32:
        actual = padded.dtype if isinstance(padded, torch.Tensor) else type(padded).__name__
        raise TypeError(f"{argument} must be an int32 tensor, got {actual}")
    if padded.shape != cu.shape:
        raise ValueError(
            f"{argument} must have the shape of cu_seqlens_{name}, {list(cu.shape)}, "
            f"got {list(padded.shape)}"
        )
    if padded.device.type == "cpu" and not torch.compiler.is_compiling():
        room, last = int((padded.diff() - cu.diff()).min()), int(padded[-1])
        if room < 0 or last > tokens or int(padded[0]) < 0:
            raise ValueError(
                f"{argument} must leave room for each sequence within {tokens} tokens, "
                f"got {padded.tolist()} for sequences of {cu.diff().tolist()} tokens"
            )
    place = torch.arange(tokens, dtype=torch.int32, device=cu.device)
    sequences = cu.shape[0] - 1
    own = _sequence(cu, place, sequences)
    sources = place - cu[own] + padded[own]
    sources = sources.masked_fill((place >= cu[-1]) | (sources >= tokens), -1)
    wide = _sequence(padded, place, sequences)
    offset = place - padded[wide]
    is_gap = (offset < 0) | (offset >= cu[wide + 1] - cu[wide])
    targets = cu[wide] + offset
    return Places(sources, targets.masked_fill(is_gap | (targets >= tokens), -1))


def _sequence(cu: torch.Tensor, place: torch.Tensor, sequences: int) -> torch.Tensor:
    """Returns the number of the sequence that each place is in or behind."""
    return (torch.searchsorted(cu, place, right=True) - 1).clamp(0, sequences - 1)


def choose_packed(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    where: Packing,
    kind: MaskType,
    bias: torch.Tensor | None,
    has_mask: bool,
    options: Options,
    size: tuple[int, int] | None = None,
) -> Path:
    """Chooses ``"filled"``, ``"varlen"``, PyTorch's packed kernel, or else ``"padded"``."""
    if options.independent_rows:
        return Path("padded", "under batch_invariant all sequences take the kernel of padded ones")
    if has_mask:
        return Path("padded", "PyTorch's flash kernel has no mask besides cu_seqlens")
    if not where.is_self and not kind.bottom_right:
        return Path("padded", "PyTorch's flash kernel aligns a causal mask with the last key")
    sequences, tokens = where.queries.shape[0] - 1, q.shape[0]
    q, k, v = (x[None].transpose(1, 2) for x in (q, k, v))
    problem = Problem.of(q, k, v, _ALL, bias, options)
    if kind.causal and where.is_self and size is None and bias is None:
        longest = where.longest_query
        # Of other numbers of tokens cuDNN would plan anew for each batch.
        if tokens == sequences * longest:
            problem = problem._replace(batch=sequences, queries=longest, keys=longest)
            rest = first_that_fits(problem._replace(form="causal"))
            if rest.kernel == "cudnn":
                reason = f"sequences of {longest} tokens are moved apart, then {rest.name}"
                return Path("filled", f"{reason}: {rest.reason}", rest)
    return first_that_fits(problem._replace(form="packed"))


def attend_packed(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
    path: Path,
    owner: str,
    where: Packing,
    kind: MaskType,
    size: tuple[int, int] | None,
    options: Options,
    mask: Mask,
    cross: bool,
    has_alibi: bool,
    gaps: tuple[Places | None, Places | None] = (None, None),
    sink: torch.Tensor | None = None,
    with_max: bool = False,
) -> Any:
    """Computes attention [t, h, dv] within packed sequences; zeros for tokens of no sequence.

    With ``has_alibi``, ``bias`` has the slopes [h] or [n, h]; else it broadcasts to [n, h,
    longest_query, longest_key]. In cross attention ``mask`` may be one mask of the scores.
    With ``with_max`` the result is a pair with the largest logit of each head, see ``max_logit``.
    """
    if gaps[1] is not None:
        k, v = gaps[1].close(k, v)
    if gaps[0] is not None:
        (q,) = gaps[0].close(q)
    uncut = where.queries
    kind = _KINDS.get(kind.name, kind)
    where = _within(owner, where, q.shape[0], k.shape[0])
    largest = alibi = None
    if with_max or path.name == "padded":
        seen, masks = _seen_padded(owner, where, kind, size, mask, cross, q)
        alibi = Alibi(kind, masks) if has_alibi else None
    if with_max:
        wide, keys = (
            _pad(q, where.queries, where.longest_query),
            _pad(k, where.keys, where.longest_key),
        )
        added = bias if alibi is None or bias is None else alibi.bias(bias, wide, keys)
        largest = max_logit(wide, keys, added, seen, options.scale)
    if path.rest is not None and path.name == "filled":
        places = shared(_apart, uncut, where.longest_query)
        out = _attend_filled(q, k, v, path.rest, places, where.longest_query, options, sink)
    elif path.name == "padded":
        out = _attend_padded(q, k, v, bias, where, seen, options, alibi, sink)
    else:
        left, right = (-1, -1) if size is None else size
        limits = (left, 0 if kind.causal else right)
        starts, extents = (where.queries, where.keys), (where.longest_query, where.longest_key)
        is_full = where.ends == (q.shape[0], k.shape[0])
        call = Call(
            options.scale, dropout=options.dropout, window=limits, longest=extents, is_full=is_full
        )
        out = packed(q, k, v, path, starts, call, options.has_sink, sink)
    if gaps[0] is not None:
        (out,) = gaps[0].open(out)
    return (out, largest) if with_max else out


def _apart(starts: torch.Tensor, longest: int) -> Places:
    """Returns the places of packed tokens, and of those of sequences ``longest`` tokens apart."""
    sequences = starts.shape[0] - 1
    place = torch.arange(sequences * longest, dtype=torch.int32, device=starts.device)
    wide, offset = place // longest, place % longest
    opening = (starts[wide] + offset).masked_fill(offset >= starts.diff()[wide], -1)
    own = _sequence(starts, place, sequences)
    offset = place - starts[own]
    is_none = (place >= starts[-1]) | (offset >= longest)
    return Places((own.int() * longest + offset).masked_fill(is_none, -1), opening)


def _attend_filled(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    path: Path,
    places: Places,
    longest: int,
    options: Options,
    sink: torch.Tensor | None,
) -> torch.Tensor:
    """Attends causally to packed sequences, padded to ``longest`` tokens; 0 for tokens of none."""
    q, k, v = (x.unflatten(0, (-1, longest)).transpose(1, 2) for x in places.open(q, k, v))
    out = attend(q, k, v, None, path, _CAUSAL, options, sink=sink)
    return places.close(out.transpose(1, 2).flatten(0, 1))[0]


def _seen_padded(
    owner: str,
    where: Packing,
    kind: MaskType,
    size: tuple[int, int] | None,
    mask: Mask,
    cross: bool,
    q: torch.Tensor,
) -> tuple[Visibility, Mask]:
    """Returns ``visibility`` for padded copies of packed sequences."""
    heads, longest = q.shape[1], where.longest_query
    query_mask = lengths_mask(where.queries.diff(), longest)
    key_mask = query_mask
    if not where.is_self:
        key_mask = lengths_mask(where.keys.diff(), where.longest_key)
    scores = (query_mask.shape[0], heads, longest, where.longest_key)
    mask = _cut(mask, where, cross)
    by_length = (query_mask, key_mask)
    return visibility(owner, kind, mask, size, cross, scores, q.device, by_length)


def _attend_padded(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
    where: Packing,
    seen: Visibility,
    options: Options,
    alibi: Alibi | None,
    sink: torch.Tensor | None,
) -> torch.Tensor:
    """Attends to padded copies of the sequences, and packs the result."""
    longest = where.longest_query
    padded = _pad(q, where.queries, longest)
    keys, values = (_pad(x, where.keys, where.longest_key) for x in (k, v))
    path = choose(padded, keys, values, seen, bias, options)
    out = attend(padded, keys, values, bias, path, seen, options, alibi, sink)
    token = torch.arange(q.shape[0], dtype=torch.int32, device=q.device)
    sequence = (torch.searchsorted(where.queries, token, right=True) - 1).clamp(min=0)
    index = sequence * longest + token - where.queries[sequence]
    outside = _outside(q, where.queries)
    out = out.transpose(1, 2).flatten(0, 1)
    # Of sequences longer than max_seqlen_q, which a GPU alone may know, the rest has no values.
    index = index.masked_fill(outside.flatten(), 0).clamp(0, out.shape[0] - 1)
    out = out.index_select(0, index)
    return out.masked_fill(outside, 0.0)


def _within(owner: str, where: Packing, queries: int, keys: int) -> Packing:
    """Returns the packing with ends within the tokens, cut on the device if the host knows none."""
    for name, end, tokens in zip(("q", "kv"), where.ends, (queries, keys), strict=True):
        if end is not None and end > tokens:
            raise ValueError(
                f"{owner}: cu_seqlens_{name} must end at or before the {tokens} tokens, got {end}"
            )
    if None not in where.ends:
        return where
    cu_queries = where.queries.clamp(0, queries).cummax(0).values
    cu_keys = cu_queries
    if not where.is_self:
        cu_keys = where.keys.clamp(0, keys).cummax(0).values
    return where._replace(queries=cu_queries, keys=cu_keys)


def _cut(mask: Mask, where: Packing, cross: bool) -> Mask:
    """Returns the part of a mask that is about tokens of the longest sequences."""
    queries, keys = where.longest_query, where.longest_key
    if isinstance(mask, torch.Tensor):
        return mask[..., :queries, :keys] if cross else mask[..., :queries]
    if isinstance(mask, (tuple, list)) and len(mask) == 2:
        return mask[0][..., :queries], mask[1][..., :keys]
    return mask


def _outside(x: torch.Tensor, cu: torch.Tensor) -> torch.Tensor:
    """Returns bool [t, 1, 1], True for tokens of ``x`` [t, h, d] after the last sequence."""
    return (torch.arange(x.shape[0], device=x.device) >= cu[-1])[:, None, None]


def _pad(x: torch.Tensor, cu: torch.Tensor, longest: int) -> torch.Tensor:
    """Copies packed tokens to [n, h, longest, d]; elements behind a sequence are arbitrary."""
    if not x.shape[0]:
        x = functional.pad(x, (0, 0, 0, 0, 0, 1))
    index = cu[:-1, None] + torch.arange(longest, dtype=torch.int32, device=x.device)
    index = index.clamp(max=x.shape[0] - 1).flatten()
    return x.index_select(0, index).unflatten(0, (-1, longest)).transpose(1, 2)
