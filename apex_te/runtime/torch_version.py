"""Check that the installed torch has what the dispatcher calls."""

from __future__ import annotations


def check_torch() -> None:
    """Imports torch and checks that its tensors can be exchanged through DLPack's C interface."""
    import torch

    if not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
        raise ImportError(
            "apex_te needs torch.Tensor.__dlpack_c_exchange_api__, which torch 2.10 and later "
            f"have, got torch {torch.__version__}"
        )
