"""Exchange of halos with the ranks before and after this one, by torch.distributed."""

from __future__ import annotations

import torch
from torch import distributed


@torch.no_grad()
def exchange(
    op: str,
    peers: tuple[int, int],
    outputs: tuple[torch.Tensor, torch.Tensor],
    inputs: tuple[torch.Tensor, torch.Tensor],
) -> None:
    """Sends the left and right ``outputs`` to ``peers``, and fills ``inputs`` with theirs.

    Args:
        op: name for errors.
        peers: global ranks left and right; a negative one has its input filled with zeros.
        outputs: what the left peer gets as its right input, and the right peer as its left one.
        inputs: of the shapes and dtypes of ``outputs``, in any storage.
    """
    for name, out, into in zip(("left", "right"), outputs, inputs, strict=True):
        if out.shape != into.shape or out.dtype is not into.dtype:
            raise ValueError(
                f"{op}: the {name} input halo must be {out.dtype} of shape {list(out.shape)} as "
                f"the {name} output halo is, got {into.dtype} of shape {list(into.shape)}"
            )
    p2p, received = distributed.P2POp, []
    sends = [
        p2p(distributed.isend, out.contiguous(), peer)
        for peer, out in zip(peers, outputs, strict=True)
        if peer >= 0
    ]
    for peer, into in zip(peers, inputs, strict=True):
        if peer < 0:
            into.zero_()
        else:
            received.append((peer, into, torch.empty(into.shape, dtype=into.dtype,
                                                     device=into.device)))  # fmt: skip
    # Of two messages from one rank, its left output comes first, which is this rank's right input.
    receives = [p2p(distributed.irecv, buffer, peer) for peer, _, buffer in reversed(received)]
    if not sends:
        return
    if not distributed.is_initialized():
        raise RuntimeError(f"{op}: torch.distributed.init_process_group must be called before")
    for work in distributed.batch_isend_irecv([*sends, *receives]):
        work.wait()
    for _, into, buffer in received:
        into.copy_(buffer)
