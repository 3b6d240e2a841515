"""Search for permutations of channels: its interface."""

from __future__ import annotations

from typing import Any, NoReturn

__all__ = ["Permutation"]


def _refuse(*args: Any, **kwargs: Any) -> NoReturn:
    raise NotImplementedError(
        "Permutation: the search for permutations of channels is not supported; pass "
        "allow_permutation=False to ASP.init_model_for_pruning"
    )


class Permutation:
    """Holder of apex's functions, each of which raises NotImplementedError."""

    set_permutation_params_from_asp = staticmethod(_refuse)
    set_identical_seed = staticmethod(_refuse)
    set_permutation_saving_params = staticmethod(_refuse)
    build_offline_permutation_graph = staticmethod(_refuse)
    apply_offline_permutation = staticmethod(_refuse)
