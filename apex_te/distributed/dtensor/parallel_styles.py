"""Tensor parallelism through torch's ``parallelize_module``: styles for the modules of apex_te.

A style turns a whole module into this rank's part of it. Parameters become DTensors over the mesh,
so that ``torch.distributed.checkpoint``, state dict functions, ``fully_shard`` over another
dimension of the mesh and optimizers see global shapes. The module computes on their local tensors
with its own collectives: gathered rows travel as FP8 data, reductions overlap GEMMs. Inputs and
outputs are plain tensors, this rank's part.

A gradient is a DTensor placed as its parameter is. Gradients that each rank computes from its own
rows or heads only (of norms, of biases of row-parallel layers) are summed over the mesh in
backward, so trainers have nothing left to sum: ``sequence_parallel`` is False on every parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from ...module._core.fused_casts import is_gated
from ...module._core.norm_module import NormModule
from ...module._core.parallel import ParallelModule, divided, tag
from ...module.attention.multihead import MultiheadAttention
from ...module.layer_norm_linear import LayerNormLinear
from ...module.layer_norm_mlp import LayerNormMLP
from ...module.linear import Linear
from ...module.transformer_layer import TransformerLayer
from .local_parameters import local_parameters
from .stacked_rows import Exchange, exchange_of

__all__ = ["ColumnParallel", "LayerParallel", "Replicated", "RowParallel", "SequenceParallel"]

Change = Callable[[], None]


class _Split(NamedTuple):
    """The ranks over which a style splits, and its options."""

    owner: str  # name of the style, for messages
    mesh: DeviceMesh
    sequence_parallel: bool
    src_data_rank: int | None

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.mesh.size()


class _Style(ParallelStyle):
    """Base of the styles: their option, and checks before anything is changed."""

    _kinds: ClassVar[tuple[type[torch.nn.Module], ...]]

    def __init__(self, *, sequence_parallel: bool = False) -> None:
        super().__init__()
        if not isinstance(sequence_parallel, bool):
            raise TypeError(
                f"{type(self).__name__}: sequence_parallel must be a bool, "
                f"got {type(sequence_parallel).__name__}"
            )
        self.sequence_parallel = sequence_parallel

    def _apply(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        owner = type(self).__name__
        if device_mesh.ndim != 1:
            raise ValueError(
                f"{owner}: device_mesh must have one dimension (mesh['tp']), "
                f"got {device_mesh.ndim}: {device_mesh}"
            )
        if not isinstance(module, self._kinds):
            kinds = " or ".join(kind.__name__ for kind in self._kinds)
            raise TypeError(f"{owner}: module must be a {kinds}, got {type(module).__name__}")
        split = _Split(owner, device_mesh, self.sequence_parallel, self.src_data_rank)
        changes = self._changes(module, split)  # all checks, the same on every rank
        for change in changes:
            change()
        return module

    def _changes(self, module: Any, split: _Split) -> list[Change]:
        """Checks ``module``; returns functions that change it."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"{type(self).__name__}(sequence_parallel={self.sequence_parallel})"


class ColumnParallel(_Style):
    """Splits the rows of the weight of a ``Linear`` or ``LayerNormLinear`` (``out_features``).

    The input is whole, or with ``sequence_parallel`` this rank's part of dimension 0; the output
    is this rank's features, as with ``parallel_mode="column"``.

    Raises:
        TypeError: before anything is changed, as all errors: another module.
        ValueError: a mesh of several dimensions, a size that its ranks do not divide, or a module
            that is split already.
        NotImplementedError: ``fuse_wgrad_accumulation``, ``delay_wgrad_compute``, or parameters
            that are not plain (``fp8_model_init``, ``enable_fp8_all_gather``).
    """

    _kinds = (Linear, LayerNormLinear)

    def _changes(self, module: Any, split: _Split) -> list[Change]:
        return _linear_changes(module, split, "column")


class RowParallel(_Style):
    """Splits the columns of the weight of a ``Linear`` (``in_features``).

    The input is this rank's features; the output is whole, or with ``sequence_parallel`` this
    rank's part of dimension 0, as with ``parallel_mode="row"``. Errors are those of
    ``ColumnParallel``.
    """

    _kinds = (Linear,)

    def _changes(self, module: Any, split: _Split) -> list[Change]:
        return _linear_changes(module, split, "row")


class LayerParallel(_Style):
    """Splits a ``LayerNormMLP``, ``MultiheadAttention`` or ``TransformerLayer`` inside.

    Inner features and heads are split; input and output are whole, or with ``sequence_parallel``
    this rank's part of dimension 0, as with ``set_parallel_mode=True``.

    Parameters that hold several matrices one after the other (a gated activation's ``fc1_weight``,
    fused projections with ``qkv_weight_interleaved=False``) are ``Shard(0)``, too, one piece on
    every rank, as checkpoints, ``fully_shard`` and optimizers need. A rank computes with its rows
    of each matrix: forward exchanges rows of the weight, backward rows of its gradient, in an
    all-to-all of at most the bytes of a rank's piece. The exchanged rows are kept until backward,
    beside the parameter.

    Errors are those of ``ColumnParallel``.
    """

    _kinds = (LayerNormMLP, MultiheadAttention, TransformerLayer)

    def _changes(self, module: Any, split: _Split) -> list[Change]:
        if isinstance(module, LayerNormMLP):
            return _mlp_changes(module, split)
        if isinstance(module, MultiheadAttention):
            return _attention_changes(module, split)
        return _layer_changes(module, split)


class SequenceParallel(_Style):
    """Prepares a ``LayerNorm`` or ``RMSNorm`` whose input is this rank's part of dimension 0.

    The parameters stay whole; their gradients are summed over the ranks. Errors are those of
    ``ColumnParallel``.
    """

    _kinds = (NormModule,)

    def __init__(self) -> None:
        super().__init__(sequence_parallel=True)

    def _changes(self, module: Any, split: _Split) -> list[Change]:
        return _whole_changes(module, split, True)


class Replicated(_Style):
    """Leaves a norm, a linear layer or ``LayerNormMLP`` whole, with DTensors as parameters.

    Use it for modules with the same input on all ranks: an optimizer that updates several
    parameters in one call takes DTensors or plain tensors, not both. Errors are those of
    ``ColumnParallel``.
    """

    _kinds = (NormModule, ParallelModule)

    def __init__(self) -> None:
        super().__init__()

    def _changes(self, module: Any, split: _Split) -> list[Change]:
        if isinstance(module, ParallelModule):
            _check_gemms(module, split)
        return _whole_changes(module, split, False)


def _refuse(split: _Split, what: str, wanted: str, got: Any) -> NotImplementedError:
    """Returns the error for a module that styles do not support."""
    return NotImplementedError(f"{split.owner}: {what} must be {wanted}, got {got}")


def _check_parameters(module: torch.nn.Module, split: _Split) -> None:
    """Raises for parameters that cannot become DTensors."""
    name = type(module).__name__
    for key, parameter in module._parameters.items():
        if isinstance(parameter, DTensor):
            raise ValueError(
                f"{split.owner}: {name}.{key} must be whole on every rank (apply styles once, and "
                f"before fully_shard), got a DTensor with {parameter.placements}"
            )
        if parameter is not None and type(parameter) is not torch.nn.Parameter:
            raise _refuse(
                split,
                f"{name}.{key}",
                "a plain torch.nn.Parameter (made outside fp8_model_init, and before "
                "enable_fp8_all_gather)",
                type(parameter).__name__,
            )


def _check_gemms(module: ParallelModule, split: _Split) -> None:
    """Raises for a module that is split already, or cannot be."""
    name = type(module).__name__
    mode: Any = getattr(module, "parallel_mode", None) or getattr(
        module, "set_parallel_mode", False
    )
    if module.tp_size != 1 or mode:
        raise ValueError(
            f"{split.owner}: {name} must be whole before a style is applied, "
            f"got tp_size {module.tp_size} and parallel mode {mode!r}"
        )
    for option in ("fuse_wgrad_accumulation", "delay_wgrad_compute"):
        if getattr(module, option):
            raise _refuse(split, f"{name}.{option}", "False with DTensor parameters", "True")
    _check_parameters(module, split)


def _divided(split: _Split, module: torch.nn.Module, name: str, value: int) -> int:
    return divided(f"{split.owner}: {type(module).__name__}", name, value, split.ranks)


def _linear_changes(
    module: Any, split: _Split, mode: str, matrices: tuple[int, ...] = ()
) -> list[Change]:
    """Checks a linear layer; returns functions that split it.

    Args:
        module: a ``Linear`` or ``LayerNormLinear``.
        split: ranks and options.
        mode: "column" or "row".
        matrices: rows of each matrix in a weight that holds several; the ranks divide them.
    """
    _check_gemms(module, split)
    column = mode == "column"
    weights, biases = (module._linear_names(kind) for kind in ("weight", "bias"))
    if any(module._parameters[key] is None for key in weights):
        raise ValueError(
            f"{split.owner}: {type(module).__name__} must own its weight, got "
            "skip_weight_param_allocation=True"
        )
    features = "out_features" if column else "in_features"
    part = _divided(split, module, features, getattr(module, features))
    parts = module.split
    if column and parts is not None:
        parts = {
            key: _divided(split, module, f"parameters_split[{key!r}]", rows)
            for key, rows in parts.items()
        }
    norm = [key for key in ("layer_norm_weight", "layer_norm_bias") if key in module._parameters]

    def change() -> None:
        _make_parallel(module, split)
        setattr(module, features, part)
        module.split = parts
        module.parallel_mode = mode
        summed = [*norm, *(() if column else biases)] if module.sequence_parallel else []
        _distribute(module, split, weights, Shard(0 if column else 1))
        _distribute(module, split, biases, Shard(0) if column else Replicate())
        _distribute(module, split, norm, Replicate())
        local_parameters(module, summed, _stacked((*weights, *biases), matrices, split))

    return [change]


def _stacked(names: Iterable[str], matrices: tuple[int, ...], split: _Split) -> dict[str, Exchange]:
    """Returns the exchanges of parameters of which a rank's rows are not one piece."""
    if len(matrices) < 2 or split.ranks == 1:
        return {}
    exchange = exchange_of(matrices, split.mesh.get_local_rank(), split.ranks)
    return dict.fromkeys(names, exchange)


def _mlp_changes(module: Any, split: _Split) -> list[Change]:
    _check_gemms(module, split)
    ffn = module.ffn_hidden_size
    _divided(split, module, "ffn_hidden_size", ffn)
    matrices = (ffn, ffn) if is_gated(module.activation) else (ffn,)

    def change() -> None:
        _make_parallel(module, split)
        module.set_parallel_mode = True
        norm = ("layer_norm_weight", "layer_norm_bias")
        first = ("fc1_weight", "fc1_bias")
        _distribute(module, split, first, Shard(0))
        _distribute(module, split, ("fc2_weight",), Shard(1))
        _distribute(module, split, ("fc2_bias", *norm), Replicate())
        summed = ("fc2_bias", *norm) if module.sequence_parallel else ()
        local_parameters(module, summed, _stacked(first, matrices, split))

    return [change]


def _attention_changes(module: Any, split: _Split) -> list[Change]:
    if module.set_parallel_mode:
        raise ValueError(
            f"{split.owner}: MultiheadAttention must be whole before a style is applied, "
            "got set_parallel_mode True"
        )
    core, heads, ranks = module.core_attention, module._heads, split.ranks
    own_heads = _divided(split, module, "num_attention_heads", core.num_attention_heads)
    own_groups = _divided(split, module, "num_gqa_groups", core.num_gqa_groups)
    rows, kv_rows = core.num_attention_heads * heads.size, core.num_gqa_groups * heads.size
    stacked: dict[str, tuple[int, ...]] = {"key_value": (kv_rows, kv_rows)}
    stacked |= dict.fromkeys(("layernorm_qkv", "qkv"), (rows, kv_rows, kv_rows))
    changes: list[Change] = []
    for key in ("layernorm_qkv", "qkv", "layernorm_query", "query_layer", "key_value"):
        projection = module._modules.get(key)
        if projection is None:
            continue
        one_after_other = projection.split is None and not heads.interleaved
        matrices = stacked.get(key, ()) if one_after_other else ()
        changes += _linear_changes(projection, split, "column", matrices)
    for key in ("q_norm", "k_norm"):  # each rank has some of the heads
        if isinstance(module._modules[key], NormModule):
            changes += _whole_changes(module._modules[key], split, True)
    changes += _linear_changes(module.proj, split, "row")

    def change() -> None:
        module.set_parallel_mode = True
        module._heads = heads._replace(groups=own_groups)
        core.tp_size = ranks
        core.num_attention_heads, core.num_gqa_groups = own_heads, own_groups

    return [*changes, change]


def _layer_changes(layer: Any, split: _Split) -> list[Change]:
    changes: list[Change] = []
    for key in ("self_attention", "inter_attention"):
        if key in layer._modules:
            changes += _attention_changes(layer._modules[key], split)
    changes += _mlp_changes(layer.layernorm_mlp, split)
    if layer.output_layernorm:
        changes += _whole_changes(layer.layernorm, split, split.sequence_parallel)

    def change() -> None:
        layer.sequence_parallel = split.sequence_parallel and split.ranks > 1

    return [*changes, change]


def _whole_changes(module: Any, split: _Split, summed: bool) -> list[Change]:
    """Returns the changes of a module that stays whole; ``summed``: its gradients are summed."""
    _check_parameters(module, split)
    names = tuple(module._parameters)

    def change() -> None:
        _distribute(module, split, names, Replicate())
        local_parameters(module, names if summed else ())

    return [change]


def _make_parallel(module: Any, split: _Split) -> None:
    module._make_parallel(
        split.mesh.get_group(),
        1,
        split.sequence_parallel,
        module.get_rng_state_tracker,
        module.rng_tracker_name,
    )
    module._modes.weight_cache.clear()


def _distribute(
    module: torch.nn.Module, split: _Split, names: Iterable[str], placement: Placement
) -> None:
    """Replaces parameters by DTensors with the values of ``src_data_rank``, unless it is None."""
    dim = placement.dim if isinstance(placement, Shard) else None
    for name in names:
        whole = module._parameters.get(name)
        if whole is None:
            continue
        part = distribute_tensor(
            whole.detach(), split.mesh, [placement], src_data_rank=split.src_data_rank
        )
        parameter = torch.nn.Parameter(part, whole.requires_grad)
        tag(parameter, dim, False)
        module.register_parameter(name, parameter)
