"""Copies bytes into the memory of other GPUs of the host, and sums what arrived; CUDA only.

In an exchange every rank sends as many bytes to its peers; exchanges are numbered. Each rank has a
buffer, uint8 in symmetric memory, that its peers write. It begins with a uint32 flag for each rank:
the number of the last exchange in which that rank's bytes arrived whole. Behind ``HEADER`` bytes
lie the pieces, the bytes that each rank sent, in the order of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .. import runtime

__all__ = ["HEADER", "await_rank", "join", "send", "sum_pieces"]

HEADER = 512  # csrc/peer_exchange/peer_exchange.h

_lib = runtime.ops("peer_exchange")


def send(
    source: torch.Tensor,
    targets: Sequence[torch.Tensor],
    own: torch.Tensor | None,
    rank: int,
    number: int,
    stream: torch.cuda.Stream,
    fork: torch.cuda.Event,
    sent: torch.cuda.Event,
) -> None:
    """Copies ``source`` to the place of ``rank`` in the peers' buffers, then sets its flags there.

    The copies run on ``stream`` after all work queued so far on the current stream; ``source``,
    contiguous uint8, must stay allocated until then. ``own`` is the sender's buffer, to which the
    bytes are copied, too, but no flag; None skips it. An exchange's ``number`` is one more than the
    last one's, modulo 2^32. By the event ``fork`` ``stream`` waits for the current stream; ``sent``
    is recorded after the copies. Both must have been recorded before, so that they exist.
    """
    _lib.peer_send(
        source, targets, own, rank, number, stream.cuda_stream, fork.cuda_event, sent.cuda_event
    )


def await_rank(buffer: torch.Tensor, rank: int, number: int, timeout_ms: int) -> None:
    """Makes the current stream wait until the bytes of ``rank`` have arrived in ``buffer``.

    If they have not arrived after ``timeout_ms`` milliseconds, a device-side assert fails; the
    process can then no longer use the GPU.

    Args:
        buffer: this rank's buffer, uint8.
        rank: the sender.
        number: number of the exchange, as in ``send``.
        timeout_ms: milliseconds to wait.
    """
    _lib.peer_await(buffer, rank, number, timeout_ms)


def sum_pieces(
    buffer: torch.Tensor, ranks: int, rank: int, number: int, timeout_ms: int, out: torch.Tensor
) -> None:
    """Writes the sum of all ranks' pieces to ``out``, once the other ranks' pieces have arrived.

    Elements are added in float32 in the order of ranks.

    Args:
        buffer: this rank's buffer, uint8, which must contain its own piece.
        ranks: number of ranks.
        rank: this rank.
        number: number of the exchange, as in ``send``.
        timeout_ms: milliseconds to wait, with the effect described in ``await_rank``.
        out: contiguous float tensor of a piece's size.
    """
    _lib.peer_sum(buffer, ranks, rank, number, timeout_ms, out)


def join(buffer: torch.Tensor, sent: torch.cuda.Event) -> None:
    """Makes the current stream wait for an event that ``send`` recorded.

    Args:
        buffer: this rank's buffer, which names the device.
        sent: the event that ``send`` was given.
    """
    _lib.peer_join(buffer, sent.cuda_event)
