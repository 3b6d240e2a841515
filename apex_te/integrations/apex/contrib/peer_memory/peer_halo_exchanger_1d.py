"""Exchange of the halos of a padded tensor, in place."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..bottleneck.halo_exchangers import HaloExchangerPeer
from .peer_memory import PeerMemoryPool

__all__ = ["PeerHaloExchanger1d"]


class PeerHaloExchanger1d:
    """Exchanges halos between ranks that split images along H or W, by torch.distributed.

    Args:
        ranks: global ranks that hold the parts of an image, in order.
        rank_in_group: this rank's place in ``ranks``.
        peer_pool: not used.
        half_halo: rows or columns of a halo.

    Source: apex.contrib.peer_memory.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        rank_in_group: int,
        peer_pool: PeerMemoryPool | None,
        half_halo: int,
    ) -> None:
        self.exchanger = HaloExchangerPeer(ranks, rank_in_group, peer_pool, False)
        self.ranks, self.peer_rank, self.peer_group_size = ranks, rank_in_group, len(ranks)
        self.low_zero, self.high_zero = self.exchanger.left_zero, self.exchanger.right_zero
        self.half_halo = half_halo

    def __call__(
        self,
        y: torch.Tensor,
        H_split: bool = True,
        explicit_nhwc: bool = False,
        numSM: int = 0,
        diagnostics: bool = False,
    ) -> None:
        """Fills the outer ``half_halo`` rows, or columns, of y with the neighbours' inner ones.

        Args:
            y: [N, C, H, W], or [N, H, W, C] if ``explicit_nhwc``, whose split dimension has
                ``half_halo`` elements at both ends for the halos: zeros at an end of the image.
            H_split: H is split instead of W.
            explicit_nhwc: the layout of y.
            numSM, diagnostics: ignored.
        """
        dim = (1 if explicit_nhwc else 2) + (0 if H_split else 1)
        halo, end = self.half_halo, y.shape[dim]
        self.exchanger.left_right_halo_exchange(
            y.narrow(dim, halo, halo), y.narrow(dim, end - 2 * halo, halo),
            y.narrow(dim, 0, halo), y.narrow(dim, end - halo, halo),
        )  # fmt: skip
