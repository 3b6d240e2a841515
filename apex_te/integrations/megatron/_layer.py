"""Base of Megatron's linear layers: results ``(out, bias)``, attributes, sharded state dicts."""

from __future__ import annotations

import sys
from typing import Any

import torch

from ...fp8.delayed.ranks import number_layer
from ...module._core.parallel import GroupHolder, tag
from ._config import Layout, Reader, refuse


def check_flags(owner: str, required: dict[str, tuple[Any, Any]], **flags: Any) -> None:
    """Checks that arguments have their required values, and that flags are bools.

    ``required`` maps names to ``(wanted, got)``.
    """
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise TypeError(f"{owner}: {name} must be a bool, got {type(value).__name__}")
    for name, (wanted, got) in required.items():
        if got != wanted:
            raise refuse(owner, name, wanted, got)


class MegatronLayer(torch.nn.Module):
    """Mixin that makes linear modules return ``(out, bias)`` and save sharded state dicts.

    Attributes:
        sharded_axes: dimension along which each split parameter is split over ranks, by name;
            parameters that every rank has in full are left out.
        is_first_microbatch: True until the first forward. A Megatron-style loop sets it to True
            before the first microbatch of a step, so that FP8 weights are cast anew. It is
            ignored if ``config.disable_parameter_transpose_cache`` is True.
        return_bias: True if forward returns a bias that it has not added.
    """

    sharded_axes: dict[str, int]
    return_bias: bool
    _several = False  # True for layers with the weights of several experts

    def _finish(self, read: Reader, layout: Layout, axes: dict[str, int]) -> None:
        """Sets attributes of the layer and its parameters, which are split along ``axes``."""
        self.is_first_microbatch = True
        self.disable_parameter_transpose_cache = bool(read.disable_parameter_transpose_cache)
        self.sharded_axes = axes if layout.ranks > 1 else {}
        self._shard_group = GroupHolder(layout.group)
        self._spread = not layout.allreduce
        number_layer(self, read.pipeline_model_parallel_rank, "stage")
        for name, parameter in self.named_parameters(recurse=False):
            if layout.explicit:
                tag(parameter, self.sharded_axes.get(name), False, layout.group)
            parameter.allreduce = layout.allreduce  # type: ignore[attr-defined]

    def _first(self, is_first_microbatch: bool | None) -> bool | None:
        """Returns the argument ``is_first_microbatch`` for the module's forward.

        If ``config`` says so, the attribute replaces None. It is False afterwards.
        """
        if is_first_microbatch is None and not self.disable_parameter_transpose_cache:
            is_first_microbatch = self.is_first_microbatch
        if self.is_first_microbatch:
            self.is_first_microbatch = False
        return is_first_microbatch

    def _paired(self, out: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns ``(out, bias)`` for the result of a module, which may be ``out`` alone."""
        return out if self.return_bias else (out, None)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """Returns a state dict in which split parameters are marked as shards of the full ones.

        If the program has imported Megatron, the entries are its sharded tensors, for
        ``dist_checkpointing``. Otherwise split parameters are DTensors over the tensor-parallel
        ranks, for ``torch.distributed.checkpoint``. Both share memory with the parameters, so
        loading in place fills these. FP8 state does not share memory: load it by
        ``load_state_dict``.

        Args:
            prefix: text before each key.
            sharded_offsets: as Megatron passes them; must be () without Megatron.
            metadata: as Megatron passes it; only the key ``dp_cp_group`` is read, if present.

        Raises:
            ValueError: ``sharded_offsets`` are given without Megatron, or no group is known.
            NotImplementedError: experts are spread over ranks, and Megatron is not imported or the
                module holds several experts.
        """
        owner, axes = type(self).__name__, self.sharded_axes
        group = getattr(self, "tp_group", None)
        if group is None:
            group = self._shard_group.group
        megatron: Any = sys.modules.get("megatron.core.transformer.utils")
        if self._spread and (megatron is None or self._several):
            raise refuse(
                owner, "sharded_state_dict", "of layers that all ranks have",
                "experts of this rank (config.expert_model_parallel_size above 1)",
            )  # fmt: skip
        if megatron is not None:
            more: dict[str, Any] = {}
            if metadata is not None and "dp_cp_group" in metadata:
                more = {"tp_group": group, "dp_cp_group": metadata["dp_cp_group"]}
            return megatron.make_sharded_tensors_for_checkpoint(
                self.state_dict(keep_vars=True), prefix, axes, sharded_offsets, **more
            )
        if sharded_offsets:
            raise ValueError(
                f"{owner}: sharded_offsets must be () without Megatron, got {sharded_offsets}"
            )
        state = self.state_dict()
        if axes and group is None:
            raise ValueError(
                f"{owner}: set_tensor_parallel_group must be called before sharded_state_dict"
            )
        if axes:
            from torch.distributed.device_mesh import DeviceMesh
            from torch.distributed.tensor import DTensor, Shard

            mesh: Any = None
            for name, dim in axes.items():
                if name in state:
                    value = state[name]
                    if mesh is None:
                        mesh = DeviceMesh.from_group(group, value.device.type)
                    state[name] = DTensor.from_local(value, mesh, [Shard(dim)], run_check=False)
        return {prefix + name: value for name, value in state.items()}
