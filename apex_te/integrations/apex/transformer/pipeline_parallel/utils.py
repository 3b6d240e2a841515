"""Microbatches of a step, and helpers of training loops."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from .....ops import multi_tensor
from .. import parallel_state
from .._print import is_last_rank, print_first, print_last
from ..enums import ModelType
from ..microbatches import NumMicroBatchesCalculator, build_num_microbatches_calculator
from ._timers import Timers

__all__ = [
    "average_losses_across_data_parallel_group",
    "calc_params_l2_norm",
    "get_autoresume",
    "get_current_global_batch_size",
    "get_kth_microbatch",
    "get_ltor_masks_and_position_ids",
    "get_micro_batch_size",
    "get_model_type",
    "get_num_microbatches",
    "get_timers",
    "is_last_rank",
    "listify_model",
    "param_is_not_shared",
    "print_params_min_max_norm",
    "print_rank_0",
    "print_rank_last",
    "report_memory",
    "setup_microbatch_calculator",
    "unwrap_model",
    "update_num_microbatches",
]
# Programs read and set these by name.
_GLOBAL_NUM_MICROBATCHES_CALCULATOR: NumMicroBatchesCalculator | None = None
_GLOBAL_AUTORESUME: Any = None
_GLOBAL_TIMERS: Timers | None = None

Model = torch.nn.Module | list[torch.nn.Module]
print_rank_0 = print_first
print_rank_last = print_last


def listify_model(model: Model) -> list[torch.nn.Module]:
    """Returns the model's chunks as a list."""
    return model if isinstance(model, list) else [model]


def setup_microbatch_calculator(
    rank: int,
    rampup_batch_size: list[int] | None,
    global_batch_size: int,
    micro_batch_size: int,
    data_parallel_size: int,
) -> None:
    """Sets the global batch, the microbatch and how the global batch grows.

    Args:
        rank: 0 logs a constant number of microbatches.
        rampup_batch_size: [first global batch, increment, samples until ``global_batch_size`` is
            reached]; None for a constant global batch.
        global_batch_size: samples of a step over all ranks, a multiple of ``micro_batch_size *
            data_parallel_size``.
        micro_batch_size: samples of a microbatch.
        data_parallel_size: number of data-parallel ranks.

    Raises:
        RuntimeError: they are set already.
        ValueError: sizes do not match.
    """
    if _GLOBAL_NUM_MICROBATCHES_CALCULATOR is not None:
        raise RuntimeError("setup_microbatch_calculator: the calculator is already set up")
    _reconfigure(rank, rampup_batch_size, global_batch_size, micro_batch_size, data_parallel_size)


def _reconfigure(*sizes: Any) -> None:
    global _GLOBAL_NUM_MICROBATCHES_CALCULATOR
    _GLOBAL_NUM_MICROBATCHES_CALCULATOR = build_num_microbatches_calculator(*sizes)


def _reconfigure_microbatch_calculator(
    rank: int,
    rampup_batch_size: list[int] | None,
    global_batch_size: int,
    micro_batch_size: int,
    data_parallel_size: int,
) -> None:
    """Sets the sizes again; meant for tests, as a warning says."""
    if rank == 0:
        warnings.warn("This function is only for unittest", stacklevel=2)
    _reconfigure(rank, rampup_batch_size, global_batch_size, micro_batch_size, data_parallel_size)


def _calculator() -> NumMicroBatchesCalculator:
    if _GLOBAL_NUM_MICROBATCHES_CALCULATOR is None:
        raise RuntimeError(
            "the microbatch calculator is not set; call setup_microbatch_calculator() first"
        )
    return _GLOBAL_NUM_MICROBATCHES_CALCULATOR


def get_micro_batch_size() -> int:
    """Returns the samples of a microbatch.

    Raises:
        RuntimeError: ``setup_microbatch_calculator`` was not called.
    """
    return _calculator().micro_batch_size


def get_num_microbatches() -> int:
    """Returns the microbatches of a step, per data-parallel rank.

    Raises:
        RuntimeError: ``setup_microbatch_calculator`` was not called.
    """
    return _calculator().get()


def get_current_global_batch_size() -> int:
    """Returns the samples of a step, over all data-parallel ranks.

    Raises:
        RuntimeError: ``setup_microbatch_calculator`` was not called.
    """
    return _calculator().get_current_global_batch_size()


def update_num_microbatches(consumed_samples: int, consistency_check: bool = True) -> None:
    """Adapts the global batch to the samples that were consumed so far.

    Args:
        consumed_samples: number of samples.
        consistency_check: raise an error if microbatches do not divide the global batch.

    Raises:
        RuntimeError: ``setup_microbatch_calculator`` was not called.
        ValueError: with ``consistency_check``, microbatches do not divide the global batch.
    """
    _calculator().update(consumed_samples, consistency_check)


def get_kth_microbatch(batch: Sequence[torch.Tensor] | None, k: int) -> list[torch.Tensor] | None:
    """Returns the samples of microbatch ``k`` of each tensor, as views; None for None.

    Args:
        batch: tensors whose first dimension is the samples, or None.
        k: number of the microbatch, from 0.

    Raises:
        RuntimeError: ``setup_microbatch_calculator`` was not called.
        ValueError: a tensor has too few samples.
    """
    if batch is None:
        return None
    size = get_micro_batch_size()
    for tensor in batch:
        if len(tensor) < (k + 1) * size:
            raise ValueError(
                f"get_kth_microbatch: batch must have at least {(k + 1) * size} samples, got"
                f" {len(tensor)}"
            )
    return [tensor[k * size : (k + 1) * size] for tensor in batch]


def get_autoresume() -> Any:
    """Returns None: there is no automatic resumption."""
    return _GLOBAL_AUTORESUME


def _set_timers() -> None:
    """Makes the timers that ``get_timers`` returns."""
    global _GLOBAL_TIMERS
    if _GLOBAL_TIMERS is not None:
        raise RuntimeError("the timers are already set")
    _GLOBAL_TIMERS = Timers()


def get_timers() -> Timers:
    """Returns the timers by name.

    Raises:
        RuntimeError: they were not made.
    """
    if _GLOBAL_TIMERS is None:
        raise RuntimeError("the timers are not set")
    return _GLOBAL_TIMERS


def param_is_not_shared(param: torch.nn.Parameter) -> bool:
    """Returns True if a parameter is marked ``shared``, as apex does despite the name."""
    return getattr(param, "shared", False)


def unwrap_model(
    model: Any, module_instances: tuple[type, ...] = (DistributedDataParallel,)
) -> Any:
    """Returns the modules inside of wrappers, as a list if the model is one.

    Args:
        model: a module or a list of modules.
        module_instances: classes of wrappers, whose attribute ``module`` is taken; by default
            torch's DistributedDataParallel.
    """

    def inside(module: Any) -> Any:
        while isinstance(module, module_instances):
            module = getattr(module, "module", None)
        return module

    return [inside(each) for each in model] if isinstance(model, list) else inside(model)


def get_model_type(model: torch.nn.Module) -> ModelType:
    """Returns the attribute ``model_type`` of a module inside of its wrappers.

    Without it ``ModelType.encoder_or_decoder``.
    """
    return getattr(unwrap_model(model), "model_type", ModelType.encoder_or_decoder)


def calc_params_l2_norm(model: Model, bf16: bool) -> float:
    """Returns the L2 norm of the parameters over the ranks of the model, each counted once.

    Collective over the model-parallel group. Parameters marked ``shared`` are left out.

    Args:
        model: a module or a list of modules, this rank's part of the model.
        bf16: convert the parameters to float32 first.
    """
    found = [
        param.detach().float() if bf16 else param.detach()
        for chunk in listify_model(model)
        for param in chunk.parameters()
        if not getattr(param, "shared", False)
        and parallel_state.param_is_not_tensor_parallel_duplicate(param)
    ]
    norm = multi_tensor.l2norm(found) if found else torch.zeros(())
    assert isinstance(norm, torch.Tensor)  # there is one norm for all
    squared = norm.square().reshape(1)
    distributed.all_reduce(squared, group=parallel_state.get_model_parallel_group())
    return float(squared) ** 0.5


def average_losses_across_data_parallel_group(losses: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns the losses [n], each averaged over the data-parallel ranks.

    Collective; the result does not require a gradient.

    Args:
        losses: n tensors of one element each, of one dtype.
    """
    averaged = torch.cat([loss.detach().clone().reshape(1) for loss in losses])
    group = parallel_state.get_data_parallel_group()
    distributed.all_reduce(averaged, group=group)
    return averaged / distributed.get_world_size(group)


def report_memory(name: str) -> None:
    """Prints the GPU memory in use in MiB, on the first data-parallel ranks.

    ``name`` is the title.
    """
    megabytes = {
        "allocated": torch.cuda.memory_allocated(),
        "max allocated": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.memory_reserved(),
        "max reserved": torch.cuda.max_memory_reserved(),
    }
    if parallel_state.get_data_parallel_rank() == 0:
        text = " | ".join(f"{what}: {size / 2**20}" for what, size in megabytes.items())
        print(f"[Rank {distributed.get_rank()}] {name} memory (MB) | {text}", flush=True)


def print_params_min_max_norm(optimizer: Any, iteration: int) -> None:
    """Prints least, largest and norm of each parameter of an optimizer, on every rank.

    Args:
        optimizer: an optimizer, or a wrapper whose attribute ``optimizer`` is one.
        iteration: number to print.
    """
    lines = ["iteration, rank, index, tensor-model-parallel, min, max, norm"]
    inner = getattr(optimizer, "optimizer", optimizer)
    params = [param for group in inner.param_groups for param in group["params"]]
    for index, param in enumerate(params, 1):
        data, split = param.detach(), int(getattr(param, "tensor_model_parallel", False))
        values = f"{data.min():.6E}, {data.max():.6E}, {data.norm():.6E}"
        lines.append(f"{iteration}, {distributed.get_rank()}, {index}, {split}, {values}")
    print("\n".join(lines), flush=True)


def get_ltor_masks_and_position_ids(
    data: torch.Tensor,
    eod_token: int,
    reset_position_ids: bool,
    reset_attention_mask: bool,
    eod_mask_loss: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Builds masks and positions of a left-to-right model.

    Args:
        data: [b, s] integer tokens.
        eod_token: token at the end of a document.
        reset_position_ids: positions restart after it.
        reset_attention_mask: tokens after it do not see those up to it.
        eod_mask_loss: it has no loss.

    Returns:
        The attention mask [b or 1, 1, s, s], True for what is hidden; the loss mask [b, s],
        float32; the positions [b, s], int64.
    """
    b, s = data.shape
    ends = data == eod_token
    positions = torch.arange(s, device=data.device).expand(b, s)
    # index of a token's document: the ends before it
    document = ends.cumsum(1) - ends.long()
    hidden = torch.ones(s, s, dtype=torch.bool, device=data.device).triu(1)[None, None]
    if reset_attention_mask:
        hidden = hidden | (document[:, None, :, None] != document[:, None, None, :])
    if reset_position_ids:
        begins = torch.where(ends, positions + 1, 0).cummax(1)[0].roll(1, 1)
        begins[:, 0] = 0
        positions = positions - begins
    loss_mask = torch.ones(b, s, device=data.device)
    if eod_mask_loss:
        loss_mask[ends] = 0.0
    return hidden, loss_mask, positions
