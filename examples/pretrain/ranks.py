"""Spreads a run over ranks: tensor parallelism in layers, context parallelism, FSDP2 over the rest.

Weights are drawn whole and cut, and all ranks take their part of the same batch, so that a run on
several ranks is the run on one up to the order of sums.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from user_error import UserError

from apex_te.distributed import enable_fp8_all_gather
from apex_te.ops import multi_tensor
from apex_te.recipe import Recipe


@dataclass(frozen=True)
class Ranks:
    """Ranks of a run; neighbours split layers ("tp"), the others the batch and parameters ("dp").

    Of the latter, neighbours may split sequences ("cp").

    Attributes:
        rank, size: this rank and their number.
        tp: ranks that split every layer.
        mesh: device mesh of dimensions "dp" and "tp"; None for one process without torchrun.
        cp: ranks that split every sequence.
        cp_group: their group; None if ``cp`` is 1.
    """

    rank: int = 0
    size: int = 1
    tp: int = 1
    mesh: Any = None
    cp: int = 1
    cp_group: Any = None

    @property
    def dp(self) -> int:
        """Returns the number of ranks that FSDP shards parameters over, those of "cp" included."""
        return self.size // self.tp

    @property
    def batch_parts(self) -> int:
        """Returns the number of parts that a batch's sequences are divided into."""
        return self.dp // self.cp

    @property
    def batch_part(self) -> int:
        """Returns the number of this rank's part of a batch's sequences."""
        return self.rank // (self.tp * self.cp)

    @property
    def is_sharded(self) -> bool:
        """Returns True if FSDP holds the parameters."""
        return self.dp > 1

    @property
    def tp_group(self) -> Any:
        """Returns the group that splits layers, or None."""
        return self.mesh["tp"].get_group() if self.tp > 1 else None

    def part_of(
        self, shape_of: Callable[[str], tuple[int, ...]]
    ) -> Callable[[str, Any, Callable[..., torch.Tensor]], torch.Tensor]:
        """Returns the function that cuts this rank's part out of a weight that is drawn whole.

        Args:
            shape_of: returns the sizes, for all ranks, of the matrices that a weight with this name
                holds one after the other along its split dimension.
        """
        rank = self.rank % self.tp

        def cut(name: str, parameter: Any, draw: Callable[..., torch.Tensor]) -> torch.Tensor:
            if not getattr(parameter, "tensor_model_parallel", False):
                return draw(parameter.shape)
            dim, shape = parameter.partition_dim, list(parameter.shape)
            shape[dim] *= self.tp
            sizes = shape_of(name) if dim == 0 else (shape[dim],)
            parts = draw(shape).split(sizes, dim)
            return torch.cat([part.chunk(self.tp, dim)[rank] for part in parts], dim)

        return cut

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Returns the sum over data-parallel ranks, in place."""
        if self.dp > 1:
            distributed.all_reduce(values, group=self.mesh["dp"].get_group())
        return values

    def agreed(self, value: bool) -> bool:
        """Returns the first rank's ``value``."""
        if self.size == 1:
            return value
        flag = torch.tensor([value], dtype=torch.int32, device=self.mesh.device_type)
        distributed.broadcast(flag, 0)
        return bool(flag.item())

    def barrier(self) -> None:
        """Waits for all ranks."""
        if self.size > 1:
            distributed.barrier()


def start(args: argparse.Namespace) -> tuple[Ranks, torch.device]:
    """Returns the ranks that torchrun has started, and this rank's device.

    Raises:
        UserError: switches or sizes that these ranks cannot have.
    """
    name = args.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    kind = name.partition(":")[0]
    if kind not in ("cpu", "cuda"):
        raise UserError(f"--device must be auto, cpu or cuda, got {name}")
    if kind == "cuda" and not torch.cuda.is_available():
        raise UserError(f"--device must be auto or cpu without an NVIDIA GPU, got {name}")
    size = int(os.environ.get("WORLD_SIZE", "1"))
    _check(args, size)
    if "WORLD_SIZE" not in os.environ:
        return Ranks(), torch.device(name)
    device = torch.device(name)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if not distributed.is_initialized():
        distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
    shape = (size // args.tp, args.tp)
    mesh = distributed.init_device_mesh(device.type, shape, mesh_dim_names=("dp", "tp"))
    cp_group = None
    if args.cp > 1:
        shape = (size // (args.cp * args.tp), args.cp, args.tp)
        names = ("batch", "cp", "tp")
        whole = distributed.init_device_mesh(device.type, shape, mesh_dim_names=names)
        cp_group = whole["cp"].get_group()
    return Ranks(distributed.get_rank(), size, args.tp, mesh, args.cp, cp_group), device


def _check(args: argparse.Namespace, size: int) -> None:
    """Raises ValueError for switches and sizes that ``size`` ranks cannot have."""
    for name, wanted in (("--tp", args.tp), ("--tp x --cp", args.tp * args.cp)):
        if size % wanted:
            todo = f"; start with torchrun --nproc_per_node {wanted}" if size == 1 else ""
            raise UserError(f"{name} must divide the number of ranks ({size}), got {wanted}{todo}")
    dp = size // args.tp
    parts = dp // args.cp
    if args.batch % parts:
        raise UserError(
            f"--batch must be a multiple of {parts} data-parallel ranks, got {args.batch}"
        )
    own = args.batch // parts
    args.microbatch = own if args.microbatch is None else args.microbatch
    if not 0 < args.microbatch <= own or own % args.microbatch:
        raise UserError(
            f"--microbatch must divide the {own} sequences of a rank, got {args.microbatch}"
        )
    if args.fp8_all_gather and dp == 1:
        raise UserError("--fp8-all-gather needs data-parallel ranks, got 1")
    if dp > 1 and (args.main_grads or args.graphs):
        raise UserError(
            f"--main-grads and --graphs need one data-parallel rank and --cp 1, got {dp} ranks"
        )
    if args.tp > 1 and args.fp8_params:
        raise UserError(f"--fp8-params needs --tp 1, got {args.tp}")


def shard(model: nn.Module, ranks: Ranks, recipe: Recipe | None) -> None:
    """Has FSDP2 shard the blocks and the rest of the model over the data-parallel ranks.

    Gradients are summed in float32.

    Args:
        model: whose ``blocks`` are sharded one by one.
        ranks: the ranks.
        recipe: that of gathers as FP8 data, or None.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    if recipe is not None:
        enable_fp8_all_gather(model, recipe)
    blocks: Any = model.blocks
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    for block in blocks:
        fully_shard(block, mesh=ranks.mesh["dp"], mp_policy=policy)
    fully_shard(model, mesh=ranks.mesh["dp"], mp_policy=policy)


class Gradients:
    """Norm and clipping of a model's gradients over all ranks, without waiting for the device.

    Args:
        model: before ``shard``, which makes parameters that do not say how ranks split them.
        ranks: the ranks.
    """

    def __init__(self, model: nn.Module, ranks: Ranks) -> None:
        self.model, self.ranks = model, ranks
        self.split = {
            name for name, parameter in model.named_parameters()
            if getattr(parameter, "tensor_model_parallel", False)
        }  # fmt: skip

    def clip(self, limit: float) -> torch.Tensor:
        """Scales the gradients so that their norm is at most ``limit``; returns the norm before.

        Args:
            limit: the largest norm; 0 leaves the gradients as they are.
        """
        split, others = [], []
        for name, parameter in self.model.named_parameters():
            gradient = _gradient(parameter)
            if gradient is not None:
                (split if name in self.split else others).append(gradient)
        if self.ranks.size == 1:
            norm = multi_tensor.l2norm(others)
        else:
            squares = torch.stack([multi_tensor.l2norm(part).square().to(others[0].device)
                                   for part in (split, others)])  # fmt: skip
            self.ranks.sum(squares)
            if self.ranks.tp > 1:
                distributed.all_reduce(squares[0], group=self.ranks.tp_group)
            norm = squares.sum().sqrt()
        if limit > 0:
            factor = (limit / (norm + 1e-6)).clamp(max=1.0)
            multi_tensor.scale(split + others, split + others, factor)
        return norm


def _gradient(parameter: Any) -> torch.Tensor | None:
    """Returns this rank's part of what the optimizer will read as the parameter's gradient."""
    gradient = getattr(parameter, "decoupled_grad", None)
    gradient = parameter.grad if gradient is None else gradient
    if gradient is None:
        return None
    return gradient.to_local() if hasattr(gradient, "to_local") else gradient


def shared(path: Path | None, ranks: Ranks) -> Path:
    """Returns the first rank's path."""
    found = [path]
    if ranks.size > 1:
        distributed.broadcast_object_list(found, 0)
    assert found[0] is not None
    return found[0]
