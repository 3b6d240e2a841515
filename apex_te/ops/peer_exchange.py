"""Bytes written into the memory of GPUs of the same host, and the sum of what arrived there.

A buffer (uint8, in symmetric memory) has a number for each rank, that of the last exchange whose
bytes of this rank are there, and behind ``HEADER`` bytes a piece of every rank, by rank. CUDA only.
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
    """Copies ``source`` to the piece of ``rank`` in ``targets``, and sets the flag of its arrival.

    The copies run on ``stream``, behind what the current stream has now; ``source`` must live until
    they did. Nothing here waits.

    Args:
        source: uint8 [bytes], contiguous.
        targets: buffers of peers.
        own: a buffer that gets the bytes, too, unsaid.
        number: of this exchange, one more than of the one before, modulo 2^32.
        fork, sent: events that were recorded once; ``sent`` is recorded behind the copies.

    Raises:
        ValueError: a buffer that is too small.
    """
    _lib.peer_send(
        source, targets, own, rank, number, stream.cuda_stream, fork.cuda_event, sent.cuda_event
    )


def await_rank(buffer: torch.Tensor, rank: int, number: int, timeout_ms: int) -> None:
    """Makes the current stream wait for the piece of ``rank`` in ``buffer``.

    A device-side assert after ``timeout_ms``: the process cannot use the GPU any more.
    """
    _lib.peer_await(buffer, rank, number, timeout_ms)


def sum_pieces(
    buffer: torch.Tensor, ranks: int, rank: int, number: int, timeout_ms: int, out: torch.Tensor
) -> None:
    """Computes in ``out`` the sum of the pieces of all ranks, once those of the others are there.

    Args:
        rank: whose piece is not waited for: this one's.
        out: contiguous float32, float16 or bfloat16, as the pieces; sums are float32, by rank.
    """
    _lib.peer_sum(buffer, ranks, rank, number, timeout_ms, out)


def join(buffer: torch.Tensor, sent: torch.cuda.Event) -> None:
    """Makes the current stream wait for an event of ``send``; ``buffer`` names the device."""
    _lib.peer_join(buffer, sent.cuda_event)
