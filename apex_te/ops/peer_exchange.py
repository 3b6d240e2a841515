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
    """Copies ``source`` into the piece of ``rank`` in the peers' buffers, then sets its flag there.

    The copies run on ``stream``, after the work that the current stream holds at the call.
    ``source`` must stay allocated until they have run. The host does not wait.

    Args:
        source: uint8, contiguous, of any shape.
        targets: buffers of the peers.
        own: the sender's buffer, which gets the bytes without a flag; None to leave it out.
        rank: the sender, this process.
        number: number of this exchange: one more than the last one's, modulo 2^32.
        stream: side stream for the copies.
        fork: event by which ``stream`` waits for the current stream; recorded at least once before,
            so that it exists.
        sent: event that is recorded on ``stream`` after the copies; recorded before, like
            ``fork``.

    Raises:
        ValueError: a buffer that is too small.
    """
    _lib.peer_send(
        source, targets, own, rank, number, stream.cuda_stream, fork.cuda_event, sent.cuda_event
    )


def await_rank(buffer: torch.Tensor, rank: int, number: int, timeout_ms: int) -> None:
    """Makes the current stream wait until the piece of ``rank`` has arrived in ``buffer``.

    After ``timeout_ms`` without it a device-side assert fails, and the process cannot use the GPU
    any more.

    Args:
        buffer: this rank's buffer.
        rank: the rank that sends the piece.
        number: number of the exchange to wait for.
        timeout_ms: time to wait, in milliseconds.
    """
    _lib.peer_await(buffer, rank, number, timeout_ms)


def sum_pieces(
    buffer: torch.Tensor, ranks: int, rank: int, number: int, timeout_ms: int, out: torch.Tensor
) -> None:
    """Writes the sum of all ranks' pieces to ``out``, once the other ranks' pieces have arrived.

    Elements are added in float32 in the order of ranks. A time-out is that of ``await_rank``.

    Args:
        buffer: this rank's buffer, which holds its own piece, too (``own`` of ``send``).
        ranks: number of ranks.
        rank: this rank, whose piece is not waited for.
        number: number of the exchange.
        timeout_ms: time to wait, in milliseconds.
        out: contiguous float32, float16 or bfloat16, as large as a piece and of its dtype.
    """
    _lib.peer_sum(buffer, ranks, rank, number, timeout_ms, out)


def join(buffer: torch.Tensor, sent: torch.cuda.Event) -> None:
    """Makes the current stream wait for an event that ``send`` recorded.

    Args:
        buffer: any tensor of uint8 on the device of the stream.
        sent: the event.
    """
    _lib.peer_join(buffer, sent.cuda_event)
