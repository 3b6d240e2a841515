"""Attention masks (True = masked out): their types, the keys they hide, and sliding windows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from ...runtime.named_arguments import did_you_mean

Mask = torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None


class MaskType(NamedTuple):
    """Type of an attention mask: which masks it reads, and which keys it hides.

    With ``bottom_right`` positions are aligned at the last query and key, else at the first ones.
    An ``arbitrary`` mask broadcasts to the scores.
    """

    name: str
    padding: bool = False
    causal: bool = False
    bottom_right: bool = False
    arbitrary: bool = False


MASK_TYPES = {
    each.name: each
    for each in (
        MaskType("no_mask", bottom_right=True),
        MaskType("padding", padding=True, bottom_right=True),
        MaskType("causal", causal=True),
        MaskType("padding_causal", padding=True, causal=True),
        MaskType("causal_bottom_right", causal=True, bottom_right=True),
        MaskType("padding_causal_bottom_right", padding=True, causal=True, bottom_right=True),
        MaskType("arbitrary", bottom_right=True, arbitrary=True),
    )
}
_INSTEAD = {
    "no_mask": "'padding' or 'arbitrary'",
    "causal": "'padding_causal' or 'arbitrary'",
    "causal_bottom_right": "'padding_causal_bottom_right' or 'arbitrary'",
}


class Visibility(NamedTuple):
    """Keys that each query sees, of scores ``[b, h, sq, sk]``.

    Attributes:
        causal: query i sees keys up to i with ``"upper_left"``, to i + sk - sq with
            ``"bottom_right"``.
        hidden: bool, broadcasts to the scores, True = masked out in addition to ``causal``.
        fully_masked_queries: bool [b or 1, 1, sq, 1], True for padded queries, whose output is 0.
        window: (left, right) around key i + sk - sq, -1 = no limit; the other fields are then None.
        padded: ``hidden`` if that hides the same padded tokens, [b or 1, 1, 1, s], of queries and
            keys, and no other key.
        packed: masks of padded queries and of keys, [b or 1, 1, 1, s], in one ``Visibility`` with
            ``window`` alone; without padded tokens each query sees the keys of its window, counted
            from the last ones.
    """

    causal: str | None = None
    hidden: torch.Tensor | None = None
    fully_masked_queries: torch.Tensor | None = None
    window: tuple[int, int] | None = None
    padded: torch.Tensor | None = None
    packed: tuple[torch.Tensor, torch.Tensor] | None = None


_SEES_ALL = Visibility()
_CAUSAL = Visibility("upper_left")
_BOTTOM_RIGHT = Visibility("bottom_right")


def mask_type(owner: str, name: str, argument: str = "attn_mask_type") -> MaskType:
    """Returns the mask type called ``name``.

    Raises TypeError or ValueError, which name ``owner`` and ``argument``, if there is none.
    """
    if not isinstance(name, str):
        raise TypeError(f"{owner}: {argument} must be a string, got {type(name).__name__}")
    found = MASK_TYPES.get(name)
    if found is None:
        raise ValueError(
            f"{owner}: {argument} must be one of {', '.join(MASK_TYPES)}, got {name!r}"
            + did_you_mean(name, MASK_TYPES)
        )
    return found


def window(
    owner: str, size: Sequence[int] | None, argument: str = "window_size"
) -> tuple[int, int] | None:
    """Returns the checked window (left, right), -1 = no limit; None if neither side has a limit."""
    if size is None:
        return None
    pair = tuple(size) if isinstance(size, Iterable) else ()
    if len(pair) != 2 or any(isinstance(n, bool) or not isinstance(n, int) for n in pair):
        raise TypeError(f"{owner}: {argument} must be two ints (left, right), got {size!r}")
    if min(pair) < -1:
        raise ValueError(f"{owner}: {argument} must be -1 (unlimited) or more, got {size!r}")
    return None if pair == (-1, -1) else pair


def visibility(
    owner: str,
    kind: MaskType,
    mask: Mask,
    size: tuple[int, int] | None,
    cross: bool,
    scores: tuple[int, int, int, int],
    device: torch.device,
    by_length: tuple[torch.Tensor, torch.Tensor] | None = None,
    may_pack: bool = False,
) -> tuple[Visibility, Mask]:
    """Returns the keys that each query sees under a mask type, a mask and a window, and the mask.

    Positions count from the first tokens. With ``bottom_right`` they count back from the last
    tokens, with a padding mask from the last that are not padded. Masks ``by_length`` [b, 1, 1, s],
    for padding types alone, hide what is behind the ends of sequences, and the mask includes them.
    With ``may_pack`` the result has ``packed`` where that says the same.
    """
    left, right = (-1, -1) if size is None else size
    if kind.causal:
        if right > 0:
            raise ValueError(
                f"{owner}: window_size must end at 0 with attn_mask_type {kind.name!r}, got {size}"
            )
        right = 0
    limits = _Window(left, right, kind.bottom_right and scores[2] != scores[3])
    if kind.padding:
        more = None
        if by_length is not None:
            mask, more = _joined_masks(owner, kind, mask, cross, scores, by_length)
        may_pack = may_pack and more is None
        seen = _padding_visibility(owner, kind, mask, size, limits, cross, scores, device, may_pack)
        if more is not None:
            assert seen.hidden is not None
            seen = seen._replace(hidden=seen.hidden | more, padded=None)
        return seen, mask
    if kind.arbitrary:
        hidden = _arbitrary(owner, mask, scores)
        return limits.past_single_query(scores).hide_more(hidden, scores, device), mask
    if mask is not None:
        raise ValueError(
            f"{owner}: attention_mask must be None with attn_mask_type {kind.name!r} "
            f"(use {_INSTEAD[kind.name]}), got a mask"
        )
    return _plain_visibility(limits.past_single_query(scores), scores, device), None


class _Window(NamedTuple):
    """Sliding window of ``left`` and ``right`` keys around a query's position, -1 = no limit.

    With ``bottom_right`` the last query and key are aligned, else the first ones.
    """

    left: int
    right: int
    bottom_right: bool

    def past_single_query(self, scores: tuple[int, int, int, int]) -> _Window:
        """Drops the right end for a single query at the last key, as it hides nothing."""
        is_last = self.bottom_right and scores[2] == 1 and self.right == 0
        return self._replace(right=-1) if is_last else self

    def hide_more(
        self, hidden: torch.Tensor | None, scores: tuple[int, int, int, int], device: torch.device
    ) -> Visibility:
        """Returns the keys that each query sees under this window and ``hidden``, True = hidden."""
        left, right, bottom_right = self
        queries, keys = scores[2:]
        causal = None
        if right == 0:
            causal = "bottom_right" if bottom_right else "upper_left"
        if left >= 0 or right > 0:
            # The causal half, where there is one, stays with ``causal``.
            offset = keys - queries if bottom_right else 0
            other = band(queries, keys, offset, left, -1 if causal else right, device)
            hidden = other if hidden is None else hidden | other
        return Visibility(causal, hidden)


def _plain_visibility(
    limits: _Window, scores: tuple[int, int, int, int], device: torch.device
) -> Visibility:
    """Returns the keys that each query sees under a window alone, for types that read no mask."""
    left, right, bottom_right = limits
    if left < 0 and right < 0:
        return _SEES_ALL
    if left < 0 and right == 0:
        return _BOTTOM_RIGHT if bottom_right else _CAUSAL
    if bottom_right or scores[2] == scores[3]:
        return Visibility(window=(left, right))
    return limits.hide_more(None, scores, device)


def _padding_visibility(
    owner: str,
    kind: MaskType,
    mask: Mask,
    size: tuple[int, int] | None,
    limits: _Window,
    cross: bool,
    scores: tuple[int, int, int, int],
    device: torch.device,
    may_pack: bool,
) -> Visibility:
    """Returns ``visibility`` for mask types that read masks of padded tokens."""
    batch, _, queries, keys = scores
    query_mask, hidden = _padding(owner, kind, mask, cross, batch, queries, keys)
    left, right, _ = limits
    # With one mask, windows count the padded tokens between others, too.
    counts_alike = hidden is not query_mask or max(left, right) <= 0 > left
    if may_pack and kind.bottom_right and query_mask is not None and counts_alike:
        return Visibility(window=(left, right), packed=(query_mask, hidden))
    if kind.bottom_right and hidden is not query_mask and max(left, right) >= 0:
        # Sequences of several lengths: no offset is common to all.
        if query_mask is None:
            raise ValueError(
                f"{owner}: attention_mask must be a tuple (queries, keys) with attn_mask_type "
                f"{kind.name!r} and window_size {size}, whose positions count back from the last "
                "tokens that are not padded, got one tensor"
            )
        positions = _positions_from_the_end(query_mask, hidden)
        seen = Visibility(hidden=hidden | _band(*positions, left, right))
    else:
        seen = limits.hide_more(hidden, scores, device)
    if query_mask is None:
        return seen
    padded = hidden if seen.hidden is hidden and hidden is query_mask else None
    return seen._replace(fully_masked_queries=query_mask.transpose(-1, -2), padded=padded)


def band(
    queries: int, keys: int, offset: int, left: int, right: int, device: torch.device
) -> torch.Tensor:
    """Returns bool [1, 1, queries, keys], True where a key is outside a query's window.

    It is False where i + offset - left <= j <= i + offset + right; left or right -1 = no limit.
    """
    q = torch.arange(offset, queries + offset, device=device)[:, None]
    return _band(q, torch.arange(keys, device=device), left, right)[None, None]


def _band(q: torch.Tensor, k: torch.Tensor, left: int, right: int) -> torch.Tensor:
    """Returns bool in the shape of ``q - k``, True outside of the window, whose -1 = no limit."""
    if left < 0:
        return k > q + right
    if right < 0:
        return k < q - left
    return (k > q + right) | (k < q - left)


def distances(
    kind: MaskType, mask: Mask, queries: int, keys: int, device: torch.device
) -> torch.Tensor:
    """Returns distances, float32 [1 or b, 1, queries, keys], by the positions of ``visibility``."""
    pair = kind.padding and kind.bottom_right and isinstance(mask, (tuple, list))
    if pair and mask[0] is not mask[1]:  # type: ignore[index]
        q, k = _positions_from_the_end(*mask)  # type: ignore[misc]
        return (q - k).abs().float()
    first = keys - queries if kind.bottom_right else 0
    q = torch.arange(first, first + queries, dtype=torch.float32, device=device)
    k = torch.arange(keys, dtype=torch.float32, device=device)
    return (q[:, None] - k).abs()[None, None]


def _joined_masks(
    owner: str,
    kind: MaskType,
    mask: Mask,
    cross: bool,
    scores: tuple[int, int, int, int],
    by_length: tuple[torch.Tensor, torch.Tensor],
) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor | None]:
    """Joins the user's padding mask with masks [b, 1, 1, s] of sequence lengths.

    Returns ``((queries, keys), hidden)``. ``hidden`` is the user's mask if that is a mask of the
    scores, bool [b, 1, sq or 1, sk], which hides further keys; else None.
    """
    if mask is None:
        return by_length, None
    batch, _, queries, keys = scores
    query_mask, hidden = _padding(owner, kind, mask, cross, batch, queries, keys)
    if query_mask is None:
        return by_length, hidden
    joined = by_length[0] | query_mask
    if hidden is query_mask and by_length[0] is by_length[1]:
        return (joined, joined), None
    return (joined, by_length[1] | hidden), None


def broadcasts(x: torch.Tensor, shape: tuple[int, int, int, int]) -> bool:
    """Returns True if ``x`` has four dimensions, each equal to that of ``shape`` or 1."""
    return x.dim() == 4 and all(n == m or n == 1 for n, m in zip(x.shape, shape, strict=True))


def lengths_mask(lengths: torch.Tensor, extent: int) -> torch.Tensor:
    """Returns the padding mask [b, 1, 1, extent] of sequences with ``lengths`` [b] tokens."""
    return (torch.arange(extent, device=lengths.device) >= lengths[:, None])[:, None, None]


def _ranks(mask: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
    """Returns the positions [b, 1, 1, s] of tokens, counted without padded ones.

    ``last`` [b, 1, 1, 1] is one more than the position of the last token that is not padded. A
    padded token has the position of the token before it.
    """
    valid = ~mask
    return valid.cumsum(-1) - valid.sum(-1, keepdim=True) + last - 1


def _positions_from_the_end(
    query_mask: torch.Tensor, key_mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns positions of queries and keys, equal for the last ones that are not padded."""
    last = (~key_mask).sum(-1, keepdim=True)
    return _ranks(query_mask, last).transpose(-1, -2), _ranks(key_mask, last)


def _padding(
    owner: str, kind: MaskType, mask: Mask, cross: bool, batch: int, queries: int, keys: int
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Checks the masks of a padding type; returns those [b, 1, 1, s] of queries and of keys.

    In self attention they may be one tensor. A single tensor in cross attention is a mask of the
    scores, [b, 1, sq or 1, sk], and returned as ``(None, mask)``.
    """
    if isinstance(mask, (tuple, list)):
        if len(mask) != 2:
            raise ValueError(
                f"{owner}: attention_mask must be a tensor or two (queries, keys), got {len(mask)}"
            )
        query_mask, key_mask = mask
    elif mask is None:
        raise ValueError(
            f"{owner}: attention_mask (or cu_seqlens_q and cu_seqlens_kv) must be given with "
            f"attn_mask_type {kind.name!r}, got None"
        )
    elif cross:
        _check_bool(owner, mask)
        if not broadcasts(mask, (batch, 1, queries, keys)) or mask.shape[3] != keys:
            raise ValueError(
                f"{owner}: attention_mask must be a tuple (queries, keys) in cross attention or "
                f"have shape {[batch, 1, queries, keys]}, got {list(mask.shape)}"
            )
        return None, mask
    else:
        query_mask = key_mask = mask
    for what, each, extent in (("query", query_mask, queries), ("key", key_mask, keys)):
        _check_bool(owner, each)
        if not broadcasts(each, (batch, 1, 1, extent)) or each.shape[3] != extent:
            raise ValueError(
                f"{owner}: attention_mask of padded {what} tokens must have shape "
                f"{[batch, 1, 1, extent]}, got {list(each.shape)}"
            )
    return query_mask, key_mask


def _arbitrary(owner: str, mask: Mask, scores: tuple[int, int, int, int]) -> torch.Tensor:
    """Returns the mask of type ``"arbitrary"`` after checking its dtype and shape."""
    _check_bool(owner, mask)
    assert isinstance(mask, torch.Tensor)
    if not broadcasts(mask, scores):
        raise ValueError(
            f"{owner}: attention_mask must broadcast to {list(scores)} with attn_mask_type "
            f"'arbitrary', got shape {list(mask.shape)}"
        )
    return mask


def _check_bool(owner: str, mask: object) -> None:
    """Checks that ``mask`` is a bool tensor."""
    if not isinstance(mask, torch.Tensor) or mask.dtype is not torch.bool:
        actual = mask.dtype if isinstance(mask, torch.Tensor) else type(mask).__name__
        raise TypeError(
            f"{owner}: attention_mask must be a bool tensor, True = masked out, got {actual}"
        )
