"""Tensor parallelism through torch's ``parallelize_module``: styles for the modules of apex_te.

A style splits a module in place, so that each rank computes its part. Parameters become DTensors
over the mesh, so that ``torch.distributed.checkpoint``, state dict functions, ``fully_shard`` over
another dimension of the mesh and optimizers see global shapes. The module computes on the local
tensors, and runs its own collectives: gathered rows travel as FP8 data, reductions overlap GEMMs.
Inputs and outputs are plain tensors that hold this rank's part.

A gradient is a DTensor with its parameter's placement. Gradients that each rank computes from some
rows or heads only (of norms, of biases of row-parallel layers) are summed over the mesh in
backward. So trainers have none to sum, and the attribute ``sequence_parallel``, which Megatron's
trainers read, is False on every parameter.
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
from ...runtime.named_arguments import check_flags, named_arguments
from .local_parameters import Exchange, exchange_of, local_parameters

Change = Callable[[], None]  # one of the steps that change a module, once all checks have passed


class _Split(NamedTuple):
    """Arguments of one application of a style."""

    owner: str
    mesh: DeviceMesh
    sequence_parallel: bool
    src_data_rank: int | None

    @property
    def ranks(self) -> int:
        """Number of ranks of ``mesh``."""
        return self.mesh.size()


class _Style(ParallelStyle):
    """Base class of the styles, which checks a module entirely before it changes anything."""

    _kinds: ClassVar[tuple[type[torch.nn.Module], ...]]

    @named_arguments()
    def __init__(self, *, sequence_parallel: bool = False) -> None:
        super().__init__()
        check_flags(type(self).__name__, sequence_parallel=sequence_parallel)
        self.sequence_parallel = sequence_parallel

    def _apply(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        owner = type(self).__name__
        if not isinstance(device_mesh, DeviceMesh):
            raise TypeError(
                f"{owner}: device_mesh must be a torch.distributed.DeviceMesh, "
                f"got {type(device_mesh).__name__}"
            )
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
        """Checks ``module``, and returns the functions to call, in order, to split it."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"{type(self).__name__}(sequence_parallel={self.sequence_parallel})"


class ColumnParallel(_Style):
    """Parallel style that splits the ``out_features`` of a linear layer over ranks.

    Pass it to ``torch.distributed.tensor.parallel.parallelize_module`` for a ``Linear`` or
    ``LayerNormLinear``, which then computes as with ``parallel_mode="column"``. The input is the
    full tensor, or with ``sequence_parallel`` this rank's slice of dimension 0. The output has this
    rank's features. All errors are raised before the module is changed.

    Args:
        sequence_parallel: True if the input is split along dimension 0; the layer then gathers it.

    Raises:
        TypeError: the module is not a ``Linear`` or ``LayerNormLinear``.
        ValueError: the mesh has several dimensions, its ranks do not divide a size, or the module
            is already split.
        NotImplementedError: the module has ``fuse_wgrad_accumulation`` or ``delay_wgrad_compute``,
            or a parameter is not a plain ``torch.nn.Parameter``, as after ``fp8_model_init`` or
            ``enable_fp8_all_gather``.
    """

    _kinds = (Linear, LayerNormLinear)

    def _changes(self, module: Any, split: _Split) -> list[Change]:
        return _linear_changes(module, split, "column")


class RowParallel(_Style):
    """Parallel style that splits the ``in_features`` of a ``Linear`` over ranks.

    Pass it to ``torch.distributed.tensor.parallel.parallelize_module``; the layer then computes as
    with ``parallel_mode="row"``. The input has this rank's features. The output is the sum over
    ranks, or with ``sequence_parallel`` this rank's slice of its dimension 0.

    Args:
        sequence_parallel: True to split the output along dimension 0, by a reduce-scatter.

    Raises:
        TypeError: the module is not a ``Linear``.
        ValueError: the mesh has several dimensions, its ranks do not divide a size, or the module
            is already split.
        NotImplementedError: an option or parameter of the module is not supported, as for
            ``ColumnParallel``.
    """

    _kinds = (Linear,)

    def _changes(self, module: Any, split: _Split) -> list[Change]:
        return _linear_changes(module, split, "row")


class LayerParallel(_Style):
    """Parallel style that splits the heads and inner features of attention and MLPs over ranks.

    Pass it to ``torch.distributed.tensor.parallel.parallelize_module`` for a ``LayerNormMLP``,
    ``MultiheadAttention`` or ``TransformerLayer``, which then computes as with
    ``set_parallel_mode=True``. Input and output are full tensors, or with ``sequence_parallel``
    this rank's slice of their dimension 0.

    Some parameters hold several matrices: a gated activation's ``fc1_weight``, and fused
    projections with ``qkv_weight_interleaved=False``. They are also placed as ``Shard(0)``, because
    checkpoints, ``fully_shard`` and optimizers need one contiguous piece per rank, although each
    rank computes with its rows of every matrix. Therefore forward exchanges rows of the weight
    between ranks, and backward rows of its gradient, in an all-to-all of at most one piece per
    rank. The received rows are kept until backward.

    Args:
        sequence_parallel: True if input and output are split along dimension 0.

    Raises:
        TypeError: the module is not of one of these classes.
        ValueError: the mesh has several dimensions, its ranks do not divide a size, or the module
            is already split.
        NotImplementedError: an option or parameter of the module is not supported, as for
            ``ColumnParallel``.
    """

    _kinds = (LayerNormMLP, MultiheadAttention, TransformerLayer)

    def _changes(self, module: Any, split: _Split) -> list[Change]:
        if isinstance(module, LayerNormMLP):
            return _mlp_changes(module, split)
        if isinstance(module, MultiheadAttention):
            return _attention_changes(module, split)
        return _layer_changes(module, split)


class SequenceParallel(_Style):
    """Parallel style for a norm whose input is this rank's slice of dimension 0.

    Pass it to ``torch.distributed.tensor.parallel.parallelize_module`` for a ``LayerNorm`` or
    ``RMSNorm``. The parameters become replicated DTensors; backward sums their gradients over the
    ranks.

    Raises:
        TypeError: the module is not a ``LayerNorm`` or ``RMSNorm``.
        ValueError: the mesh has several dimensions, or a parameter is already a DTensor.
        NotImplementedError: a parameter is not a plain ``torch.nn.Parameter``.
    """

    _kinds = (NormModule,)

    def __init__(self) -> None:
        super().__init__(sequence_parallel=True)

    def _changes(self, module: Any, split: _Split) -> list[Change]:
        return _whole_changes(module, split, True)


class Replicated(_Style):
    """Parallel style that replicates a norm, linear layer or ``LayerNormMLP`` as DTensors.

    Pass it to ``torch.distributed.tensor.parallel.parallelize_module``. The module's input must be
    equal on all ranks, because gradients are not summed. Use this style in models that also have
    split modules: an optimizer that updates several parameters in one call needs all of them as
    DTensors, or none.

    Raises:
        TypeError: the module is not of one of these classes.
        ValueError: the mesh has several dimensions, or the module is already split.
        NotImplementedError: an option or parameter of the module is not supported, as for
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
    """Returns the error for a module that styles do not support; ``wanted`` is what it must be."""
    return NotImplementedError(f"{split.owner}: {what} must be {wanted}, got {got}")


def _check_parameters(module: torch.nn.Module, split: _Split) -> None:
    """Checks that all parameters of ``module`` are plain."""
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
                "a plain torch.nn.Parameter (made outside fp8_model_init, and without "
                "enable_fp8_all_gather)",
                type(parameter).__name__,
            )


def _check_gemms(module: ParallelModule, split: _Split) -> None:
    """Checks that a style can be applied to a module with GEMMs."""
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
    norm_is_apart = hasattr(module, "layer_norm_weight") and (
        "layer_norm_weight" not in module._parameters
    )
    if norm_is_apart and split.sequence_parallel:  # whose gradient each rank has a part of
        raise _refuse(split, "sequence_parallel", f"False for {name}, whose norm is apart", "True")
    _check_parameters(module, split)


def _divided(split: _Split, module: torch.nn.Module, name: str, value: int) -> int:
    """Returns ``value / ranks``; raises ValueError if the ranks do not divide ``name``."""
    return divided(f"{split.owner}: {type(module).__name__}", name, value, split.ranks)


def _linear_changes(
    module: Any, split: _Split, mode: str, matrices: tuple[int, ...] = ()
) -> list[Change]:
    """Returns functions that split a linear layer over the ranks, which is unchanged until then."""
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
    """Returns the exchange of rows for each parameter of several matrices; none for one rank."""
    if len(matrices) < 2 or split.ranks == 1:
        return {}
    exchange = exchange_of(matrices, split.mesh.get_local_rank(), split.ranks)
    return dict.fromkeys(names, exchange)


def _mlp_changes(module: Any, split: _Split) -> list[Change]:
    """Checks a ``LayerNormMLP``, and returns the functions that split its ``ffn_hidden_size``."""
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
    """Checks a ``MultiheadAttention``, and returns the functions that split its heads."""
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
    _check_parameters(core, split)

    def change() -> None:
        module.set_parallel_mode = True
        module._heads = heads._replace(groups=own_groups)
        core.tp_size = ranks
        core.num_attention_heads, core.num_gqa_groups = own_heads, own_groups
        if core._parameters.get("softmax_offset") is not None:
            _distribute(core, split, ("softmax_offset",), Shard(0))
            local_parameters(core, ())

    return [*changes, change]


def _layer_changes(layer: Any, split: _Split) -> list[Change]:
    """Checks a ``TransformerLayer``, and returns the functions that split its parts."""
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
    """Checks a module, and returns the functions that make its parameters replicated DTensors."""
    _check_parameters(module, split)
    names = tuple(module._parameters)

    def change() -> None:
        _distribute(module, split, names, Replicate())
        local_parameters(module, names if summed else ())

    return [change]


def _make_parallel(module: Any, split: _Split) -> None:
    """Sets the group and options of a tensor-parallel module; drops cached FP8 weights."""
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
    """Replaces parameters of ``module`` by DTensors."""
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
