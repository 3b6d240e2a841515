"""Automatic sparsity: masks of 2:4 sparse weights, kept while an optimizer trains them."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from .sparse_masklib import create_mask

__all__ = ["ASP", "eligible_modules"]

_LOG = logging.getLogger(__name__)
_SPARSE_PARAMETERS: dict[type[nn.Module], list[str]] = {
    nn.Linear: ["weight"],
    nn.Conv1d: ["weight"],
    nn.Conv2d: ["weight"],
    nn.Conv3d: ["weight"],
    nn.MultiheadAttention: ["q_proj_weight", "k_proj_weight", "v_proj_weight", "in_proj_weight"],
}


class _Sparse(NamedTuple):
    """A parameter with a mask; mask and pruned values are buffers of its module."""

    place: str
    module: nn.Module
    name: str
    parameter: nn.Parameter

    def buffer(self, kind: str) -> Any:
        return self.module._buffers.get(f"__{self.name}_mma_{kind}")


def eligible_modules(
    model: nn.Module,
    whitelist_layer_types: tuple[type[nn.Module], ...],
    allowed_layer_names: Sequence[str] | None,
    disallowed_layer_names: Sequence[str],
) -> list[tuple[str, nn.Module]]:
    """Returns (name, module) pairs of the modules of a model that are to be pruned.

    Args:
        model: the model; names are those of ``named_modules``.
        whitelist_layer_types: types to take, subclasses included.
        allowed_layer_names: names to take; None takes all.
        disallowed_layer_names: names to leave out.
    """
    return [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, whitelist_layer_types)
        and name not in disallowed_layer_names
        and (allowed_layer_names is None or name in allowed_layer_names)
    ]


class ASP:
    """Class methods that keep the weights of one model 2:4 sparse.

    Call ``init_model_for_pruning``, then ``init_optimizer_for_pruning``, and once the dense model
    is trained, ``compute_sparse_masks``. Masks are buffers of the modules, so checkpoints contain
    them.

    Source: apex.contrib.sparsity.
    """

    __model: nn.Module | None = None
    __optimizer: Any = None
    __sparse_parameters: list[_Sparse] = []  # noqa: RUF012
    __calculate_mask: Callable[[torch.Tensor], torch.Tensor] | None = None
    __allow_permutation = True
    __verbosity = 0

    @classmethod
    def init_model_for_pruning(
        cls,
        model: nn.Module,
        mask_calculator: str | Callable[[torch.Tensor], torch.Tensor] = "m4n2_1d",
        verbosity: int = 3,
        whitelist: Sequence[type[nn.Module]] = (
            nn.Linear,
            nn.Conv1d,
            nn.Conv2d,
            nn.Conv3d,
            nn.MultiheadAttention,
        ),
        allowed_layer_names: Sequence[str] | None = None,
        disallowed_layer_names: Sequence[str] = (),
        allow_recompute_mask: bool = False,
        custom_layer_dict: dict[type[nn.Module], list[str]] | None = None,
        allow_permutation: bool = True,
    ) -> None:
        """Adds masks of ones to the weights to be made sparse; nothing is pruned yet.

        Weights whose first dimension is not a multiple of 8, or whose second is not a multiple of
        16, are skipped, because GPUs do not support sparse matmuls of them.

        Args:
            model: the model.
            mask_calculator: a pattern of ``create_mask``, or a function of a weight that returns
                its mask.
            verbosity: 2 and 3 log more through ``logging``.
            whitelist: types of modules with weights to prune.
            allowed_layer_names: names of modules; None allows all.
            disallowed_layer_names: names of modules that stay dense.
            allow_recompute_mask: keep pruned values on the CPU, for ``restore_pruned_weights`` and
                new masks.
            custom_layer_dict: more types of modules, with the names of their weights.
            allow_permutation: ignored with a warning when masks are computed: channels are not
                permuted.

        Raises:
            RuntimeError: ASP already has a model.
            ValueError: a type in ``whitelist`` is unknown.
        """
        if cls.__model is not None:
            raise RuntimeError("ASP.init_model_for_pruning: ASP is already initialized")
        known = {**_SPARSE_PARAMETERS, **(custom_layer_dict or {})}
        types = (*whitelist, *(custom_layer_dict or ()))
        for kind in types:
            if kind not in known:
                raise ValueError(
                    "ASP.init_model_for_pruning: whitelist must have types of "
                    f"{[k.__name__ for k in known]} or of custom_layer_dict, got {kind.__name__}"
                )
        cls.__model, cls.__verbosity = model, verbosity
        cls.__allow_permutation, cls.__sparse_parameters = allow_permutation, []
        if isinstance(mask_calculator, str):
            pattern = mask_calculator
            cls.__calculate_mask = staticmethod(lambda p: create_mask(p, pattern).bool())
        else:
            cls.__calculate_mask = staticmethod(mask_calculator)
        found = eligible_modules(model, types, allowed_layer_names, disallowed_layer_names)
        for place, module in found:
            names = next(known[kind] for kind in type(module).__mro__ if kind in known)
            for name, parameter in module.named_parameters():
                if name not in names or not parameter.requires_grad:
                    continue
                if parameter.shape[0] % 8 or parameter.shape[1] % 16:
                    cls._log(1, "left dense", place, name, parameter)
                    continue
                # In names of buffers there are no dots.
                last = name.rpartition(".")[2]
                sparse = _Sparse(place, module, last, parameter)
                module.register_buffer(
                    f"__{last}_mma_mask", torch.ones_like(parameter, dtype=torch.bool)
                )
                if allow_recompute_mask:
                    pruned = torch.zeros_like(parameter, device="cpu", requires_grad=False)
                    module.register_buffer(f"__{last}_mma_pruned_p", pruned)
                cls.__sparse_parameters.append(sparse)
                cls._log(3, "to be pruned", place, name, parameter)

    @classmethod
    def already_init_asp_model(cls) -> bool:
        """Returns True if ASP has a model."""
        return cls.__model is not None

    @classmethod
    def init_optimizer_for_pruning(cls, optimizer: torch.optim.Optimizer) -> None:
        """Makes the optimizer's steps mask gradients before, and weights after, the update.

        Raises:
            RuntimeError: ASP has no model yet, or an optimizer already.
            TypeError: ``optimizer`` is not a ``torch.optim.Optimizer``.
        """
        name = "ASP.init_optimizer_for_pruning"
        if cls.__optimizer is not None:
            raise RuntimeError(f"{name}: ASP already has an optimizer")
        if cls.__calculate_mask is None:
            raise RuntimeError(f"{name}: ASP.init_model_for_pruning must be called first")
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(
                f"{name}: optimizer must be a torch.optim.Optimizer (for a wrapper, the inner "
                "one), "
                f"got {type(optimizer).__name__}"
            )
        cls.__optimizer = optimizer
        sparse_parameters = cls.__sparse_parameters

        @torch.no_grad()
        def before(*args: Any) -> None:
            for sparse in sparse_parameters:
                if sparse.parameter.grad is not None:
                    sparse.parameter.grad.mul_(sparse.buffer("mask"))

        @torch.no_grad()
        def after(*args: Any) -> None:
            for sparse in sparse_parameters:
                sparse.parameter.mul_(sparse.buffer("mask"))

        optimizer.register_step_pre_hook(before)
        optimizer.register_step_post_hook(after)

    @classmethod
    @torch.no_grad()
    def compute_sparse_masks(cls) -> None:
        """Computes masks from the weights, and sets pruned weights to 0.

        Raises:
            RuntimeError: ASP has no model, or weights are sparse already and their pruned values
                were not kept.
        """
        calculate = cls.__calculate_mask
        if calculate is None:
            raise RuntimeError(
                "ASP.compute_sparse_masks: ASP.init_model_for_pruning must be called first"
            )
        if cls.__allow_permutation:
            warnings.warn(
                "ASP: channels are not permuted, because that is not supported; "
                "allow_permutation=False silences this warning",
                stacklevel=2,
            )
        for sparse in cls.__sparse_parameters:
            cls._restore("compute_sparse_masks", sparse)
            parameter, mask = sparse.parameter, sparse.buffer("mask")
            mask.copy_(calculate(parameter))
            if sparse.buffer("pruned_p") is not None:
                sparse.buffer("pruned_p").copy_(parameter * ~mask)
            parameter.mul_(mask)
            cls._log(2, "pruned", sparse.place, sparse.name, parameter)

    @classmethod
    @torch.no_grad()
    def restore_pruned_weights(cls) -> None:
        """Makes the weights dense again, with their values from before pruning.

        Raises:
            RuntimeError: pruned values were not kept (``allow_recompute_mask``).
        """
        for sparse in cls.__sparse_parameters:
            cls._restore("restore_pruned_weights", sparse)

    @classmethod
    def is_sparsity_enabled(cls) -> bool:
        """Returns True if the masks keep half of the weights, False if all.

        Raises:
            RuntimeError: masks keep different fractions, or neither half nor all of the weights.
        """
        masks = [sparse.buffer("mask") for sparse in cls.__sparse_parameters]
        shares = {mask.sum().item() / mask.numel() for mask in masks}
        if shares - {1.0}:
            if shares != {0.5}:
                raise RuntimeError(
                    "ASP.is_sparsity_enabled: all masks must keep half of the weights, or all, "
                    f"got {sorted(shares)}"
                )
            return True
        return False

    @classmethod
    def prune_trained_model(cls, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Prunes a trained model's linear layers, 2D convolutions and attention.

        The optimizer, which is to train it further, keeps the weights sparse. Errors are those of
        ``init_model_for_pruning``, ``init_optimizer_for_pruning`` and ``compute_sparse_masks``,
        which it calls.
        """
        cls.init_model_for_pruning(
            model, "m4n2_1d", verbosity=2, whitelist=(nn.Linear, nn.Conv2d, nn.MultiheadAttention)
        )
        cls.init_optimizer_for_pruning(optimizer)
        cls.compute_sparse_masks()

    @classmethod
    def set_permutation_saving_params(
        cls,
        allow_permutation: bool = True,
        save_permutation_graph: bool = False,
        permutation_output_dir: str = ".",
    ) -> None:
        """Sets ``allow_permutation``, which is ignored, with a warning when masks are computed.

        Args:
            allow_permutation: the value.
            save_permutation_graph: must be False.
            permutation_output_dir: not read.

        Raises:
            NotImplementedError: ``save_permutation_graph`` is set; there are no permutations.
        """
        if save_permutation_graph:
            raise NotImplementedError(
                "ASP.set_permutation_saving_params: save_permutation_graph must be False, got "
                "True; channels are not permuted"
            )
        cls.__allow_permutation = allow_permutation

    @classmethod
    def _restore(cls, method: str, sparse: _Sparse) -> None:
        """Adds its pruned values to a weight, if it has a mask that leaves some out."""
        mask, pruned = sparse.buffer("mask"), sparse.buffer("pruned_p")
        if mask.all():
            return
        if pruned is None:
            raise RuntimeError(
                f"ASP.{method}: ASP.init_model_for_pruning must have had allow_recompute_mask=True "
                f"to restore {sparse.place}.{sparse.name}"
            )
        sparse.parameter.add_(pruned.to(sparse.parameter.device))
        mask.fill_(True)
        pruned.zero_()

    @classmethod
    def _log(cls, level: int, what: str, place: str, name: str, tensor: torch.Tensor) -> None:
        if cls.__verbosity >= level:
            _LOG.info("ASP: %s.%s %s: %s", place, name, list(tensor.shape), what)
