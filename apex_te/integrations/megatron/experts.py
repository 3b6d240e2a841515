"""``FusedGroupedMLP``: Megatron-Core's experts as one function in FP8.

Megatron-Core must find the alias of Transformer Engine when it is imported.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from ...module.grouped.experts import activated, run_fused
from ...module.grouped.linear import GroupedLinear as NativeGroupedLinear
from ..transformer_engine.pytorch.module import GroupedLinear
from ._config import refuse

try:
    from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
    from megatron.core.extensions.transformer_engine import (
        TEColumnParallelGroupedLinear,
        TERowParallelGroupedLinear,
    )
    from megatron.core.transformer.mlp import MLPSubmodules
    from megatron.core.transformer.moe.experts import TEGroupedMLP
except ImportError as error:
    raise ImportError(
        "apex_te.integrations.megatron.experts: Megatron-Core must be installed: "
        "pip install megatron-core"
    ) from error
if not issubclass(TEColumnParallelGroupedLinear or object, NativeGroupedLinear):
    raise ImportError(
        "apex_te.integrations.megatron.experts: the alias transformer_engine must be installed "
        "before Megatron-Core is imported: set APEX_TE_TRANSFORMER_ENGINE=1"
    )

__all__ = ["FusedGroupedMLP", "use_fused_experts"]

# Makes the hook that waits for a layer's weights, with ``overlap_param_gather``.
_GATHERS = "DistributedDataParallel._make_forward_pre_hook"
# Names of gated activations by the function of their gate, as Megatron computes it.
_GATED = {functional.silu: "swiglu", torch.sigmoid: "glu", functional.relu: "reglu"}


class _Stacked(GroupedLinear):
    """Layer that has its weights in one Parameter, and in state dicts as views, ``weight0`` .."""

    def __init__(self, **options: Any) -> None:
        super().__init__(single_grouped_weight=True, **options)

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        stack = destination.pop(prefix + "weight")
        for i in range(self.num_gemms):
            destination[f"{prefix}weight{i}"] = stack[i]


# Megatron's layers call the constructor of the class that follows them here.
class _Column(TEColumnParallelGroupedLinear, _Stacked):
    """FC1 of the experts."""


class _Row(TERowParallelGroupedLinear, _Stacked):
    """FC2 of the experts."""


class FusedGroupedMLP(TEGroupedMLP):
    """Megatron-Core's ``TEGroupedMLP`` with FC1, activation and FC2 as one function in FP8.

    It computes ``fc2(act(fc1(token)) * prob)`` for ``swiglu``, ``glu`` and ``reglu``, with the
    recipes of ``GroupedLinear`` whose GEMMs take sizes on the device. Without FP8, with the recipe
    ``mxfp8``, and with hooks of a layer other than Megatron's, the layers run one after the other.
    Megatron's own forward handles other activations, ``moe_act`` in ``recompute_modules``, and
    ``fine_grained_activation_offloading``. Tokens are not padded, and the host does not wait for
    ``tokens_per_expert``.

    The weights of a projection are one Parameter, ``linear_fc1.weight``, ``[local experts, out,
    in]``. State dicts have the keys ``linear_fc1.weight0`` .., and ``dist_checkpointing``
    checkpoints, also those of optimizers, are compatible with ``TEGroupedMLP`` and
    ``SequentialMLP``.

    Args:
        num_local_experts: number of experts on this rank.
        config: Megatron's ``TransformerConfig``.
        submodules: as for ``TEGroupedMLP``; only ``activation_func`` is used.
        pg_collection: Megatron's process groups.

    Raises:
        NotImplementedError: ``config`` asks for biases or for weights in FP8.
        ValueError: ``config.moe_apply_probs_on_input`` is set with several experts for each token.
    """

    def __init__(
        self, num_local_experts: int, config: Any, submodules: Any = None, pg_collection: Any = None
    ) -> None:
        owner = type(self).__name__
        for name in ("add_bias_linear", "fp8_param"):
            if getattr(config, name):
                raise refuse(owner, f"config.{name}", False, True)
        if config.moe_apply_probs_on_input and config.moe_router_topk != 1:
            raise ValueError(
                f"{owner}: config.moe_router_topk must be 1 with moe_apply_probs_on_input, "
                f"got {config.moe_router_topk}"
            )
        own = MLPSubmodules(
            linear_fc1=_Column,
            linear_fc2=_Row,
            activation_func=getattr(submodules, "activation_func", None),
        )
        super().__init__(num_local_experts, config, own, pg_collection)
        self._activation = _activation_of(config)

    def forward(
        self,
        permuted_local_hidden_states: torch.Tensor,
        tokens_per_expert: torch.Tensor,
        permuted_probs: torch.Tensor,
    ) -> tuple[torch.Tensor, None]:
        """Computes the experts' results.

        Args:
            permuted_local_hidden_states: ``[rows, hidden]`` in the order of experts.
            tokens_per_expert: int32 or int64 ``[local experts]``, on any device.
            permuted_probs: ``[rows]``.

        Returns:
            ``(out, None)``: ``out`` is ``[rows, hidden]``.
        """
        x, probs = permuted_local_hidden_states, permuted_probs.float()
        if self._activation is None or self._is_asked_for_more():
            out: tuple[torch.Tensor, None] = super().forward(x, tokens_per_expert, permuted_probs)
            return out
        factors: torch.Tensor | None = probs
        if self.config.moe_apply_probs_on_input:
            x, factors = (x * probs[:, None]).to(x.dtype), None
        splits = tokens_per_expert.to(x.device, non_blocking=True)
        layers = self.linear_fc1, self.linear_fc2
        first = layers[0].is_first_microbatch
        if layers[0].disable_parameter_transpose_cache:
            first = None
        gathered = _gather(layers)
        fused = run_fused(*layers, x, splits, self._activation, first, factors, gathered)
        if fused is not None:
            for layer in layers:
                layer.is_first_microbatch = False
            return fused, None
        hidden = activated(self._activation, layers[0](x, splits)[0], factors)
        return layers[1](hidden, splits)[0], None

    def _is_asked_for_more(self) -> bool:
        """Returns True if options of Megatron's apply to the layers' calls or the activation."""
        layers = self.linear_fc1, self.linear_fc2
        return (
            self.activation_recompute
            or self.offload_expert_fc1
            or self.offload_moe_act
            or any(layer.te_quant_params is not None for layer in layers)
        )

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """Returns Megatron's sharded state dict, in which each Parameter is a factory of shards.

        Args:
            prefix, sharded_offsets, metadata: as Megatron passes them.
        """
        state: dict[str, Any] = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        for name in ("linear_fc1", "linear_fc2"):
            key = f"{prefix}{name}.weight"
            shards = [state.pop(f"{key}{i}") for i in range(self.num_local_experts)]
            tails = [shard.key.removeprefix(prefix) for shard in shards]
            # Optimizers find the shards of their states by the Parameter.
            state[key] = ShardedTensorFactory(
                shards[0].key,
                getattr(self, name).weight,
                partial(_shards_of, shards, tails),
                partial(_joined, shards),
                shards[0].replica_id,
            )
        return state


def _gather(layers: tuple[Any, ...]) -> bool:
    """Runs the hooks by which Megatron gathers weights; False if the layers have others."""
    hooks = [(layer, hook) for layer in layers for hook in layer._forward_pre_hooks.values()]
    if not all(getattr(hook, "__qualname__", "").startswith(_GATHERS) for _, hook in hooks):
        return False
    for layer, hook in hooks:
        hook(layer, ())
    return True


def _activation_of(config: Any) -> str | None:
    """Returns the name of an activation, None if Megatron is to compute it."""
    if not config.gated_linear_unit or config.use_te_activation_func:
        return None
    if config.activation_func_clamp_value is not None or config.glu_linear_offset:
        return None
    return None if config.activation_func_fp8_input_store else _GATED.get(config.activation_func)


def _shards_of(
    shards: list[Any],
    tails: list[str],
    key: str,
    stack: torch.Tensor,
    replica_id: Any,
    flattened_range: Any,
) -> list[Any]:
    """Returns the shards of a stack like a layer's weights, such as an optimizer's state of them.

    The shards' keys end with ``tails``; Megatron changes what is before that in ``key`` alone.
    """
    before, found = key.removesuffix(tails[0]), []
    for shard, tail, value in zip(shards, tails, stack.detach(), strict=True):
        own = dataclasses.replace(shard, key=before + tail, data=value, replica_id=replica_id)
        if isinstance(own, ShardedTensorFactory):
            found.append(own.build_fn(own.key, value, replica_id, flattened_range))
        else:
            own.dtype = value.dtype
            found.append(own)
    return found


def _joined(shards: list[Any], loaded: list[Any]) -> torch.Tensor:
    """Returns the stack of loaded shards."""
    merged = [
        shard.merge_fn(value) if isinstance(shard, ShardedTensorFactory) else value
        for shard, value in zip(shards, loaded, strict=True)
    ]
    return torch.stack(merged)


def use_fused_experts(spec: Any) -> Any:
    """Replaces the grouped experts in a layer specification by ``FusedGroupedMLP``.

    Args:
        spec: Megatron's specification of a layer or a block, with ``moe_grouped_gemm=True``;
            changed in place.

    Returns:
        ``spec``.

    Raises:
        ValueError: ``spec`` does not have grouped experts.
    """
    if not _replace(spec):
        raise ValueError(
            "use_fused_experts: spec must have experts of TEGroupedMLP, as with "
            f"moe_grouped_gemm=True, got {type(spec).__name__} without"
        )
    return spec


def _replace(spec: Any) -> int:
    """Replaces Megatron's experts in a part of a specification; returns how many it has."""
    if isinstance(spec, (list, tuple)):
        return sum(_replace(part) for part in spec)
    if getattr(spec, "module", None) in (TEGroupedMLP, FusedGroupedMLP):
        spec.module = FusedGroupedMLP
        return 1
    if isinstance(spec, type) or not dataclasses.is_dataclass(spec):
        return 0
    return sum(_replace(getattr(spec, field.name)) for field in dataclasses.fields(spec))
