"""apex's nccl_p2p_cuda: halo exchange with neighbouring ranks over the default process group.

There are no communicators of its own: an id has no meaning, and a handle stands for the default
group, which may have any backend.
"""

from __future__ import annotations

import time

import torch
from torch import distributed

from apex_te._version import __version__ as __version__

from ._halos import exchange

__all__ = [
    "add_delay",
    "get_unique_nccl_id",
    "init_nccl_comm",
    "left_right_halo_exchange",
    "left_right_halo_exchange_inplace",
]

_ID_BYTES = 128
_handles: list[tuple[int, int]] = []


def get_unique_nccl_id(n: int) -> torch.Tensor:
    """Returns ``n`` ids, uint8 [n, 128] on the CPU, for ``init_nccl_comm``, which reads none."""
    return torch.zeros(n, _ID_BYTES, dtype=torch.uint8)


def init_nccl_comm(unique_nccl_id: torch.Tensor, my_rank: int, num_ranks: int) -> int:
    """Returns a handle for the exchanges, which stands for the default process group.

    Raises:
        RuntimeError: there is no default process group.
        ValueError: rank or number of ranks is not that of the default process group.
    """
    if not (distributed.is_available() and distributed.is_initialized()):
        raise RuntimeError(
            "init_nccl_comm: torch.distributed.init_process_group must be called before"
        )
    actual = (distributed.get_rank(), distributed.get_world_size())
    if (my_rank, num_ranks) != actual:
        raise ValueError(
            "init_nccl_comm: my_rank and num_ranks must be those of the default process group, "
            f"{actual}, got {(my_rank, num_ranks)}"
        )
    _handles.append(actual)
    return len(_handles) - 1


def left_right_halo_exchange(
    handle: int,
    left_rank: int,
    right_rank: int,
    left_output_halo: torch.Tensor,
    right_output_halo: torch.Tensor,
) -> list[torch.Tensor]:
    """Sends a halo to each neighbour, and returns [left, right] halos that they sent.

    A negative rank has no neighbour there: zeros are returned.
    """
    inputs = [torch.empty_like(halo) for halo in (left_output_halo, right_output_halo)]
    left_right_halo_exchange_inplace(
        handle, left_rank, right_rank, left_output_halo, right_output_halo, *inputs
    )
    return inputs


def left_right_halo_exchange_inplace(
    handle: int,
    left_rank: int,
    right_rank: int,
    left_output_halo: torch.Tensor,
    right_output_halo: torch.Tensor,
    left_input_halo: torch.Tensor,
    right_input_halo: torch.Tensor,
) -> None:
    """Computes ``left_right_halo_exchange`` into the last two tensors.

    Raises:
        ValueError: ``handle`` is not from ``init_nccl_comm``, or shapes or dtypes differ.
    """
    op = "left_right_halo_exchange"
    if handle not in range(len(_handles)):
        raise ValueError(f"{op}: handle must be one that init_nccl_comm returned, got {handle!r}")
    exchange(
        op, (left_rank, right_rank), (left_output_halo, right_output_halo),
        (left_input_halo, right_input_halo),
    )  # fmt: skip


def add_delay(delay: int) -> None:
    """Delays the current stream's work by about ``delay`` nanoseconds, on a CPU the caller."""
    if torch.cuda.is_available():
        torch.cuda._sleep(max(1, round(delay * 1.5)))  # cycles, at 1.5 GHz
    else:
        time.sleep(delay * 1e-9)
