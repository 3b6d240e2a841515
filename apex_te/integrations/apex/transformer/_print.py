"""Printing on one rank."""

from __future__ import annotations

from torch import distributed


def _rank_and_size() -> tuple[int, int]:
    if not distributed.is_initialized():
        return 0, 1
    return distributed.get_rank(), distributed.get_world_size()


def is_last_rank() -> bool:
    """Returns True on the world's last rank."""
    rank, size = _rank_and_size()
    return rank == size - 1


def print_first(message: str) -> None:
    """Prints on the world's first rank."""
    if _rank_and_size()[0] == 0:
        print(message, flush=True)


def print_last(message: str) -> None:
    """Prints on the world's last rank."""
    if is_last_rank():
        print(message, flush=True)
