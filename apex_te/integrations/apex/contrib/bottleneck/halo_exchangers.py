"""Exchange of halos between ranks that split images along one dimension."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import distributed

from apex_te.compatibility.apex import nccl_p2p_cuda

__all__ = [
    "HaloExchanger",
    "HaloExchangerAllGather",
    "HaloExchangerNoComm",
    "HaloExchangerPeer",
    "HaloExchangerSendRecv",
    "HaloPadder",
]

Halos = tuple[torch.Tensor, torch.Tensor]


class HaloExchanger:
    """Base of the exchangers: the neighbours of a rank.

    Args:
        ranks: global ranks that hold the parts of an image, in order.
        rank_in_group: this rank's place in ``ranks``.

    Raises:
        ValueError: ``rank_in_group`` is not a place in ``ranks``.
    """

    def __init__(self, ranks: Sequence[int], rank_in_group: int) -> None:
        if rank_in_group not in range(len(ranks)):
            raise ValueError(
                f"{type(self).__name__}: rank_in_group must be 0 to {len(ranks) - 1}, "
                f"got {rank_in_group}"
            )
        self.ranks, self.rank_in_group, self.group_size = ranks, rank_in_group, len(ranks)
        self.left_zero, self.right_zero = rank_in_group == 0, rank_in_group == len(ranks) - 1
        self.left_rank = -1 if self.left_zero else ranks[rank_in_group - 1]
        self.right_rank = -1 if self.right_zero else ranks[rank_in_group + 1]

    def left_right_halo_exchange(
        self,
        left_output_halo: torch.Tensor,
        right_output_halo: torch.Tensor,
        left_input_halo: torch.Tensor | None = None,
        right_input_halo: torch.Tensor | None = None,
    ) -> Halos:
        """Sends a halo to each neighbour, and returns the (left, right) halos that they sent.

        Collective. At an end of the image the input is zeros.

        Args:
            left_output_halo, right_output_halo: what the left and the right neighbour get, of one
                shape and dtype.
            left_input_halo, right_input_halo: tensors to write to and return; new ones unless both
                are given.
        """
        if left_input_halo is None or right_input_halo is None:
            left_input_halo = torch.empty_like(left_output_halo)
            right_input_halo = torch.empty_like(right_output_halo)
        inputs = (left_input_halo, right_input_halo)
        self._exchange((left_output_halo, right_output_halo), inputs)
        return inputs

    def _exchange(self, outputs: Halos, inputs: Halos) -> None:
        raise NotImplementedError(f"{type(self).__name__}: construct one of its subclasses")


class HaloExchangerNoComm(HaloExchanger):
    """Exchanger without communication, to measure with: the rank gets its own halos, swapped.

    Arguments and errors are those of ``HaloExchanger``; the ends of an image are not zeros.
    """

    def _exchange(self, outputs: Halos, inputs: Halos) -> None:
        for into, out in zip(inputs, reversed(outputs), strict=True):
            into.copy_(out)


class HaloExchangerAllGather(HaloExchanger):
    """Exchanger by an all-gather of the halos of all ranks.

    Args:
        ranks, rank_in_group: as in ``HaloExchanger``.
        comm: process group of these ranks, in their order.

    Raises:
        ValueError: as for ``HaloExchanger``.
    """

    def __init__(self, ranks: Sequence[int], rank_in_group: int, comm: Any) -> None:
        super().__init__(ranks, rank_in_group)
        self.comm = comm

    @torch.no_grad()
    def _exchange(self, outputs: Halos, inputs: Halos) -> None:
        mine = torch.stack(outputs)
        everyones = [torch.empty_like(mine) for _ in self.ranks]
        distributed.all_gather(everyones, mine, group=self.comm)
        here = self.rank_in_group
        for into, is_end, there in zip(
            inputs, (self.left_zero, self.right_zero), (-1, 1), strict=True
        ):
            if is_end:
                into.zero_()
            else:
                # The left neighbour's right halo, and the right neighbour's left one.
                into.copy_(everyones[here + there][1 if there < 0 else 0])


class HaloExchangerSendRecv(HaloExchanger):
    """Exchanger by point-to-point messages in the default process group.

    Arguments and errors are those of ``HaloExchanger``. The first exchange sets up the
    communicator, so every rank of the default group must take part in it.
    """

    def __init__(self, ranks: Sequence[int], rank_in_group: int) -> None:
        super().__init__(ranks, rank_in_group)
        self.handle: int | None = None

    def _exchange(self, outputs: Halos, inputs: Halos) -> None:
        if self.handle is None:
            self.handle = nccl_p2p_cuda.init_nccl_comm(
                nccl_p2p_cuda.get_unique_nccl_id(1),
                distributed.get_rank(), distributed.get_world_size(),
            )  # fmt: skip
        nccl_p2p_cuda.left_right_halo_exchange_inplace(
            self.handle, self.left_rank, self.right_rank, *outputs, *inputs
        )


class HaloExchangerPeer(HaloExchangerSendRecv):
    """``HaloExchangerSendRecv`` with apex's arguments for peer memory, which is not used.

    Args:
        ranks, rank_in_group: as in ``HaloExchanger``.
        peer_pool, explicit_nhwc, numSM: no effect.

    Raises:
        ValueError: as for ``HaloExchanger``.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        rank_in_group: int,
        peer_pool: Any,
        explicit_nhwc: bool,
        numSM: int = 0,
    ) -> None:
        super().__init__(ranks, rank_in_group)
        self.peer_pool, self.explicit_nhwc, self.numSM = peer_pool, explicit_nhwc, numSM


class HaloPadder:
    """Function that adds the halos of the neighbours to a tensor; call the object.

    Args:
        halo_ex: the ``HaloExchanger`` to exchange them with.
    """

    def __init__(self, halo_ex: HaloExchanger) -> None:
        self.halo_ex = halo_ex

    def __call__(
        self, y: torch.Tensor, half_halo: int, explicit_nhwc: bool, H_split: bool
    ) -> torch.Tensor:
        """Returns y with ``half_halo`` more rows, or columns, at both ends; differentiable.

        Args:
            y: [N, C, H, W], or [N, H, W, C] if ``explicit_nhwc``.
            half_halo: rows or columns of a halo, at most those of y.
            explicit_nhwc: the layout of y.
            H_split: H is split instead of W.

        Raises:
            ValueError: ``half_halo`` is larger than the split dimension.
        """
        dim = (1 if explicit_nhwc else 2) + (0 if H_split else 1)
        if not 0 < half_halo <= y.shape[dim]:
            raise ValueError(
                f"HaloPadder: half_halo must be 1 to {y.shape[dim]}, the size of the split "
                f"dimension, got {half_halo}"
            )
        return _Pad.apply(y, self.halo_ex, half_halo, dim)

    def wait(self) -> None:
        """Does nothing: the current stream has waited."""


class _Pad(torch.autograd.Function):
    """Padding along ``dim``; backward sends the halos' gradients to whom the halos came from."""

    @staticmethod
    def forward(
        ctx: Any, y: torch.Tensor, exchanger: HaloExchanger, halo: int, dim: int
    ) -> torch.Tensor:
        ctx.exchanger, ctx.halo, ctx.dim = exchanger, halo, dim
        size = y.shape[dim]
        ends = [y.narrow(dim, 0, halo), y.narrow(dim, size - halo, halo)]
        left, right = exchanger.left_right_halo_exchange(*ends)
        return torch.cat([left, y, right], dim)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (grad,), halo, dim = grads, ctx.halo, ctx.dim
        size = grad.shape[dim] - 2 * halo
        ends = [grad.narrow(dim, 0, halo), grad.narrow(dim, size + halo, halo)]
        left, right = ctx.exchanger.left_right_halo_exchange(*ends)
        dy = grad.narrow(dim, halo, size).clone()
        dy.narrow(dim, 0, halo).add_(left)
        dy.narrow(dim, size - halo, halo).add_(right)
        return dy, None, None, None
