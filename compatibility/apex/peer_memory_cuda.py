"""apex's peer_memory_cuda: halo exchange by torch.distributed, without raw peer memory.

``torch.distributed._symmetric_memory`` has memory that ranks share, as tensors.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import distributed

from apex_te._version import __version__ as __version__

from ._halos import exchange

__all__ = [
    "allocate_raw",
    "blob_view_float",
    "blob_view_half",
    "blob_view_int",
    "free_raw",
    "get_raw_ipc_address",
    "get_raw_peers",
    "push_pull_halos_1d",
    "zero",
]


def push_pull_halos_1d(
    diagnostics: bool,
    explicit_nhwc: bool,
    numSM: int,
    top_zero: bool,
    top_out_halo: torch.Tensor,
    top_out_tx: torch.Tensor | None,
    top_inp_tx: torch.Tensor | None,
    top_inp_halo: torch.Tensor,
    btm_zero: bool,
    btm_out_halo: torch.Tensor,
    btm_out_tx: torch.Tensor | None,
    btm_inp_tx: torch.Tensor | None,
    btm_inp_halo: torch.Tensor,
    top_signal: torch.Tensor | None,
    btm_signal: torch.Tensor | None,
    waits: torch.Tensor | None,
) -> None:
    """Sends ``out_halo`` to the ranks above and below, and fills ``inp_halo`` with theirs.

    The neighbours are the default process group's ranks before and after this one. At an end of
    the ranks that split an image, ``top_zero`` or ``btm_zero`` is set: nothing is sent there, and
    the input is zeros. Transfer buffers, signals and the first three arguments are not read.
    """
    rank = distributed.get_rank() if distributed.is_initialized() else 0
    peers = (-1 if top_zero else rank - 1, -1 if btm_zero else rank + 1)
    world = distributed.get_world_size() if distributed.is_initialized() else 1
    if not top_zero and rank == 0:
        raise ValueError("push_pull_halos_1d: top_zero must be True on rank 0, got False")
    if not btm_zero and rank + 1 == world:
        raise ValueError(
            f"push_pull_halos_1d: btm_zero must be True on the last rank, {rank}, got False"
        )
    exchange(
        "push_pull_halos_1d", peers, (top_out_halo, btm_out_halo), (top_inp_halo, btm_inp_halo)
    )


def _refuse(name: str) -> NoReturn:
    raise NotImplementedError(
        f"peer_memory_cuda.{name}: raw peer memory is not supported; allocate shared tensors with "
        "torch.distributed._symmetric_memory"
    )


def allocate_raw(size: int) -> int:
    """Raises NotImplementedError: raw peer memory is not supported."""
    _refuse("allocate_raw")


def free_raw(raw: int) -> None:
    """Raises NotImplementedError: raw peer memory is not supported."""
    _refuse("free_raw")


def zero(raw: int, size: int) -> None:
    """Raises NotImplementedError: raw peer memory is not supported."""
    _refuse("zero")


def get_raw_ipc_address(raw: int) -> torch.Tensor:
    """Raises NotImplementedError: raw peer memory is not supported."""
    _refuse("get_raw_ipc_address")


def get_raw_peers(ipc_addresses: torch.Tensor, peer_rank: int, raw: int) -> list[int]:
    """Raises NotImplementedError: raw peer memory is not supported."""
    _refuse("get_raw_peers")


def blob_view_half(raw: int, shape: Any, channels_last: bool) -> torch.Tensor:
    """Raises NotImplementedError: raw peer memory is not supported."""
    _refuse("blob_view_half")


def blob_view_float(raw: int, shape: Any, channels_last: bool) -> torch.Tensor:
    """Raises NotImplementedError: raw peer memory is not supported."""
    _refuse("blob_view_float")


def blob_view_int(raw: int, shape: Any, channels_last: bool) -> torch.Tensor:
    """Raises NotImplementedError: raw peer memory is not supported."""
    _refuse("blob_view_int")
