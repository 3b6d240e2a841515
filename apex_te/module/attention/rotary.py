"""RotaryPositionEmbedding, the angles of rotary embedding, and functions that rotate heads by them.

Interfaces follow TransformerEngine's.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from typing import Any

import torch

from ...ops.binding import check_dense
from ...ops.rope import rope
from ...runtime.named_arguments import did_you_mean, named_arguments
from ...runtime.tracing import is_traced
from .._core.arguments import check_count, checked_number
from .qkv_heads import HeadLayout, Rotation, rotation_of, split_heads

__all__ = ["RotaryPositionEmbedding", "apply_fused_qkv_rotary_pos_emb", "apply_rotary_pos_emb"]

_NAME = "RotaryPositionEmbedding"
_FORMATS = ("sbhd", "bshd", "thd")


class RotaryPositionEmbedding(torch.nn.Module):
    """Angles of rotary embedding, ``position / rotary_base ** (2 i / dim)`` for the i-th pair.

    Args:
        dim: elements of a head, even.
        rotary_percent: fraction of these elements that is rotated; ``dim`` below is ``int(dim *
            rotary_percent)``.
        seq_len_interpolation_factor: positions are divided by the larger of this factor and
            ``max_seq_len / pretrained_max_position_embeddings``. If either argument is None, they
            are not divided.
        pretrained_max_position_embeddings: number of positions that the model was trained with.
        rotary_base: base in the formula above.
        interleaved: pairs are elements (2i, 2i + 1); else (i, i + dim / 2).
        device: device on which the angles are computed; None uses PyTorch's default device.

    Attributes:
        inv_freq: float32 buffer [dim / 2], the angles of position 1.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: ``dim`` is odd or below 2, or another number is out of range.

    Source: RoFormer (arXiv 2104.09864); names follow TransformerEngine's RotaryPositionEmbedding.
    """

    inv_freq: torch.Tensor

    @named_arguments()
    def __init__(
        self,
        dim: int,
        rotary_percent: float = 1.0,
        seq_len_interpolation_factor: float | None = None,
        pretrained_max_position_embeddings: int | None = None,
        rotary_base: float = 10000.0,
        interleaved: bool = False,
        *,
        device: torch.device | str | int | None = None,
    ) -> None:
        super().__init__()
        check_count(_NAME, "dim", dim)
        if not 0.0 < checked_number(_NAME, "rotary_percent", rotary_percent) <= 1.0:
            raise ValueError(
                f"{_NAME}: rotary_percent must be above 0 and at most 1, got {rotary_percent}"
            )
        dim = int(dim * rotary_percent)
        if dim < 2 or dim % 2:
            raise ValueError(
                f"{_NAME}: dim (times rotary_percent) must be even and at least 2, got {dim}"
            )
        for name, value in (
            ("rotary_base", rotary_base),
            ("seq_len_interpolation_factor", seq_len_interpolation_factor),
        ):
            if value is not None and not 0.0 < checked_number(_NAME, name, value) < math.inf:
                raise ValueError(f"{_NAME}: {name} must be above 0 and finite, got {value}")
        if pretrained_max_position_embeddings is not None:
            check_count(
                _NAME, "pretrained_max_position_embeddings", pretrained_max_position_embeddings
            )
        self.rotary_base = rotary_base
        self.interleaved = interleaved
        self.seq_len_interpolation_factor = seq_len_interpolation_factor
        self.pretrained_max_position_embeddings = pretrained_max_position_embeddings
        exponents = torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim
        self.register_buffer("inv_freq", 1.0 / rotary_base**exponents)

    def forward(self, max_seq_len: int, offset: int = 0) -> torch.Tensor:
        """Returns the angles of ``max_seq_len`` positions, float32 [max_seq_len, 1, 1, dim].

        Both elements of a pair have the pair's angle. The angles are computed in float32, even
        under ``torch.autocast``.

        Args:
            max_seq_len: the number of positions.
            offset: the first position.

        Raises:
            TypeError: an argument is not an int.
            ValueError: ``max_seq_len`` is below 0.
        """
        # A product of two vectors is no operation that autocast rounds.
        frequencies = self.inv_freq.float()
        try:
            position = torch.arange(
                offset, offset + max_seq_len, device=frequencies.device, dtype=frequencies.dtype
            )
        except (RuntimeError, TypeError) as error:
            for name, value in (("max_seq_len", max_seq_len), ("offset", offset)):
                if not isinstance(value, numbers.Integral):
                    raise TypeError(
                        f"{_NAME}: {name} must be an int, got {type(value).__name__}; "
                        "apply_rotary_pos_emb rotates a tensor by the angles"
                    ) from error
            if max_seq_len < 0:
                raise ValueError(
                    f"{_NAME}: max_seq_len must be at least 0, got {max_seq_len}"
                ) from error
            raise
        trained, factor = self.pretrained_max_position_embeddings, self.seq_len_interpolation_factor
        if trained is not None and factor is not None:
            position = position / max(factor, max_seq_len / trained)
        angles = position[:, None] * frequencies
        if self.interleaved:
            columns = angles.repeat_interleave(2, -1)
        else:
            columns = torch.cat((angles, angles), -1)
        return columns[:, None, None]


def apply_rotary_pos_emb(
    t: torch.Tensor,
    freqs: torch.Tensor,
    tensor_format: str = "sbhd",
    start_positions: torch.Tensor | None = None,
    interleaved: bool = False,
    fused: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,
) -> torch.Tensor:
    """Rotates the first elements of each head by the angles of its position; returns a new tensor.

    Args:
        t: [s, b, h, d], [b, s, h, d] or [t, h, d], float32, float16 or bfloat16; differentiable.
        freqs: angles [positions, 1, 1, c] with even c up to d, float32, float16 or bfloat16; it
            gets no gradient.
        tensor_format: the dimensions of ``t``: ``"sbhd"``, ``"bshd"`` or ``"thd"``.
        start_positions: int32 or int64 [b], the position of each sequence's first token, counted
            over all ranks; None starts at 0.
        interleaved: pairs are elements (2i, 2i + 1); else (i, i + c / 2).
        fused: no effect; one kernel always rotates, computing in float32.
        cu_seqlens: required for thd: where sequences begin and end, int32 [b + 1], counted over all
            ranks.
        cp_size, cp_rank: number of ranks over which a sequence is split, and this rank's number. Of
            ``2 * cp_size`` chunks, the rank has chunks ``cp_rank`` and ``2 * cp_size - 1 -
            cp_rank``.

    Raises:
        TypeError: a tensor has another dtype than those above.
        ValueError: the format is unknown, a shape does not match, or ``cu_seqlens`` is missing for
            thd. ``cu_seqlens`` on the CPU must also ascend from 0 or more to at most the number of
            tokens.
    """
    owner = "apply_rotary_pos_emb"
    options = _options(owner, t, tensor_format, start_positions, cu_seqlens, cp_size)
    if cp_size > 1 and cu_seqlens is not None and tensor_format == "thd":
        place = _own_positions(t.shape[0], cu_seqlens, cp_size, cp_rank, start_positions)
        table = freqs.index_select(0, place.clamp(max=freqs.shape[0] - 1))
        if start_positions is not None:  # NaN outside of the table, as rope gives
            shape = (-1, *(1,) * (table.dim() - 1))
            table = table.masked_fill((place >= freqs.shape[0]).view(shape), float("nan"))
        return rope(t[:, None], table, interleaved=interleaved)[:, 0]
    if cp_size > 1 and start_positions is not None:
        time = tensor_format.index("s")
        parts = _own_chunks(owner, t, time, cp_size, cp_rank)
        found = [
            rope(part, freqs, interleaved=interleaved, start=start, **options)
            for start, part in parts
        ]
        return torch.cat(found, time)
    try:
        if cp_size > 1:
            tokens = t.shape[tensor_format.index("s")]
            freqs = _own_angles(owner, freqs, tokens, cp_size, cp_rank)
        return rope(t, freqs, interleaved=interleaved, **options)
    except (AttributeError, TypeError, ValueError) as error:
        _explain(owner, error, t, freqs, tensor_format)
        raise


def _explain(owner: str, error: Exception, t: Any, freqs: Any, tensor_format: str) -> None:
    """Raises a better error for a rotation that failed, if a tensor is wrong; else returns."""
    if is_traced() or str(error).startswith(owner):
        return
    for name, value in (("t", t), ("freqs", freqs)):
        if value is None:
            raise TypeError(f"{owner}: {name} must be a torch.Tensor, got None") from error
    try:
        check_dense(owner, t=t, freqs=freqs)
    except (TypeError, ValueError) as better:
        raise better from error
    if t.dim() != len(tensor_format):
        raise ValueError(
            f"{owner}: t must have shape [{', '.join(tensor_format)}], got {list(t.shape)}"
        ) from error
    tokens = t.shape[tensor_format.index("s")] if "s" in tensor_format else 0
    if freqs.shape[0] < tokens or freqs.shape[-1] > t.shape[-1] or freqs.shape[-1] % 2:
        raise ValueError(
            f"{owner}: freqs must have the angles of {tokens} positions or more and of an even "
            f"number of elements up to {t.shape[-1]}, got {list(freqs.shape)}"
        ) from error


def apply_fused_qkv_rotary_pos_emb(
    qkv: torch.Tensor,
    q_freqs: torch.Tensor,
    k_freqs: torch.Tensor,
    qkv_split_arg_list: Sequence[int],
    tensor_format: str = "sbhd",
    start_positions: torch.Tensor | None = None,
    interleaved: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Splits a joined tensor into heads [..., heads, size], and rotates queries and keys.

    Args:
        qkv: [s, b, g, n], [b, s, g, n] or [t, g, n] for g groups.
        q_freqs, k_freqs: angles of queries and of keys, as ``freqs`` of ``apply_rotary_pos_emb``.
        qkv_split_arg_list: number of elements of a group's queries, key and value, with sum n.
            Every head has the size of the key.
        tensor_format, start_positions, interleaved, cu_seqlens, cp_size, cp_rank: as in
            ``apply_rotary_pos_emb``; thd requires ``cp_size=1``.

    Returns:
        Queries, keys and values.

    Raises:
        TypeError: a tensor has another dtype than in ``apply_rotary_pos_emb``.
        ValueError: the format is unknown, or a shape or size does not match.
        NotImplementedError: ``cp_size`` is above 1 with thd.
    """
    owner = "apply_fused_qkv_rotary_pos_emb"
    if cp_size > 1 and tensor_format == "thd":
        raise NotImplementedError(
            f"{owner}: cp_size must be 1 with tensor_format 'thd', got {cp_size}"
        )
    options = _options(owner, qkv, tensor_format, start_positions, cu_seqlens, cp_size)
    sizes = tuple(qkv_split_arg_list)
    fits = len(sizes) == 3 and sizes[1] == sizes[2] > 0 == sizes[0] % max(sizes[1], 1)
    if not fits or qkv.dim() != len(tensor_format) or sum(sizes) != qkv.shape[-1]:
        raise ValueError(
            f"{owner}: qkv_split_arg_list must be the sizes of whole query heads, a key head and "
            f"an equal value head in qkv's last dimension, got {list(sizes)} for "
            f"{list(qkv.shape)} in {tensor_format!r}"
        )
    layout = HeadLayout(tensor_format, sizes[0] // sizes[1], qkv.shape[-2], sizes[1], True)
    if cp_size > 1 and start_positions is not None:
        time = tensor_format.index("s")
        rotation: Any = rotation_of(owner, (q_freqs, k_freqs), interleaved, 0, None)
        rotation = rotation._replace(starts=start_positions)
        found = [
            split_heads(part.flatten(-2), layout, rotation._replace(start=start))
            for start, part in _own_chunks(owner, qkv, time, cp_size, cp_rank)
        ]
        queries, keys, values = (torch.cat(parts, time) for parts in zip(*found, strict=True))
        return queries, keys, values
    angles: tuple[torch.Tensor, ...] = (q_freqs, k_freqs)
    if cp_size > 1:
        tokens = qkv.shape[tensor_format.index("s")]
        angles = tuple(_own_angles(owner, each, tokens, cp_size, cp_rank) for each in angles)
    rotation = rotation_of(owner, angles, interleaved, 0, cu_seqlens)
    rotation = rotation._replace(starts=options["starts"])
    queries, keys, values = split_heads(qkv.flatten(-2), layout, rotation)
    return queries, keys, values


def _options(
    owner: str,
    t: torch.Tensor,
    tensor_format: str,
    start_positions: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    cp_size: int,
) -> dict[str, Any]:
    """Checks arguments of the functions above; returns the keywords of ``rope`` that they mean."""
    if tensor_format not in _FORMATS:
        raise ValueError(
            f"{owner}: tensor_format must be 'sbhd', 'bshd' or 'thd', got {tensor_format!r}"
            + did_you_mean(tensor_format, _FORMATS)
        )
    is_packed = tensor_format == "thd"
    if is_packed:
        if cu_seqlens is None:
            raise ValueError(
                f"{owner}: cu_seqlens must be given with tensor_format 'thd', got None"
            )
        if not isinstance(cu_seqlens, torch.Tensor):
            raise TypeError(
                f"{owner}: cu_seqlens must be a torch.Tensor, got {type(cu_seqlens).__name__}"
            )
        if cu_seqlens.device.type == "cpu" and cu_seqlens.numel() and not is_traced():
            bounds = cu_seqlens.flatten().tolist()
            if bounds[0] < 0 or bounds != sorted(bounds) or bounds[-1] > t.shape[0] * cp_size:
                raise ValueError(
                    f"{owner}: cu_seqlens must ascend from 0 or more to at most the "
                    f"{t.shape[0] * cp_size} tokens, got {bounds}"
                )
    return {
        "layout": tensor_format,
        "starts": start_positions,
        "cu_seqlens": cu_seqlens if is_packed else None,
    }


def _own_angles(
    owner: str, freqs: torch.Tensor, tokens: int, cp_size: int, rank: int
) -> torch.Tensor:
    """Returns the angles of a rank's ``tokens``, from those of all positions."""
    if tokens % 2 or freqs.shape[0] < tokens * cp_size or not 0 <= rank < cp_size:
        raise ValueError(
            f"{owner}: freqs must have {tokens * cp_size} positions, for two chunks of each of "
            f"{cp_size} ranks, got {freqs.shape[0]} positions, {tokens} tokens and cp_rank {rank}"
        )
    chunks = freqs[: tokens * cp_size].chunk(2 * cp_size)
    return torch.cat((chunks[rank], chunks[2 * cp_size - 1 - rank]))


def own_rotation(
    owner: str,
    rotation: Rotation,
    tokens: tuple[int, int],
    cu_seqlens: tuple[torch.Tensor | None, torch.Tensor | None],
    cp_size: int,
    rank: int,
) -> Rotation:
    """Returns the rotation of the tokens that a context-parallel rank has.

    Args:
        rotation: that of whole sequences.
        tokens: this rank's numbers of queries and of keys.
        cu_seqlens: of whole packed queries and keys, padding included; None if unpacked.

    ``cu_seqlens`` of the result, for packed queries, makes one sequence of all tokens.
    """

    def own(angles: torch.Tensor, count: int, cu: torch.Tensor | None) -> torch.Tensor:
        if cu is None:
            return _own_angles(owner, angles, count, cp_size, rank)
        place = _own_positions(count, cu, cp_size, rank)
        return angles.index_select(0, place.clamp(max=angles.shape[0] - 1))

    queries = own(rotation.queries, tokens[0], cu_seqlens[0])
    keys, is_one = queries, rotation.keys is rotation.queries and tokens[0] == tokens[1]
    if not is_one or cu_seqlens[0] is not cu_seqlens[1]:
        keys = own(rotation.keys, tokens[1], cu_seqlens[1])
    starts = None if cu_seqlens[0] is None else one_sequence(tokens[0], queries.device)
    return rotation._replace(queries=queries, keys=keys, cu_seqlens=starts)


def one_sequence(tokens: int, device: torch.device) -> torch.Tensor:
    """Returns the ``cu_seqlens`` of one sequence of ``tokens``."""
    return torch.arange(2, dtype=torch.int32, device=device) * tokens


def _own_chunks(
    owner: str, t: torch.Tensor, time: int, cp_size: int, rank: int
) -> list[tuple[int, torch.Tensor]]:
    """Returns a rank's two chunks of each sequence, with distances from the first token."""
    tokens = t.shape[time]
    if tokens % 2 or not 0 <= rank < cp_size:
        raise ValueError(
            f"{owner}: t must have two equal chunks of each of cp_size = {cp_size} ranks, got "
            f"{tokens} tokens and cp_rank {rank}"
        )
    early, late = t.chunk(2, time)
    size = tokens // 2
    return [(rank * size, early), ((2 * cp_size - 1 - rank) * size, late)]


def _own_positions(
    tokens: int,
    cu_seqlens: torch.Tensor,
    cp_size: int,
    rank: int,
    start_positions: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns the positions, int64 [tokens], of the packed tokens that a rank has."""
    starts = cu_seqlens // cp_size
    token = torch.arange(tokens, dtype=starts.dtype, device=starts.device)
    own = (torch.searchsorted(starts, token, right=True) - 1).clamp(0, len(starts) - 2)
    offset, length = token - starts[own], (starts[own + 1] - starts[own]) * cp_size
    chunk = length // (2 * cp_size)
    late = length - (rank + 1) * chunk + offset - chunk
    place = torch.where(offset < chunk, rank * chunk + offset, late).clamp(min=0).long()
    return place if start_positions is None else place + start_positions[own]
