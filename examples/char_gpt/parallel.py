"""Spreads a run over ranks: tensor, sequence and data parallelism, FSDP.

The model and the batches are those of a run on one rank: weights are drawn whole and cut, and every
rank takes its windows of the same batch. What remains is arithmetic in another order.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed, nn

from apex_te.comm.collectives import all_gather_rows
from apex_te.distributed import clip_grad_norm_, enable_fp8_all_gather, reduce_main_grads
from apex_te.recipe import MXFP8Scaling, Recipe


@dataclass(frozen=True)
class Layout:
    """Ranks of a run and what each does; one rank by default.

    Neighbouring ranks form a tensor-parallel group (``tp``), ranks at the same place of these
    groups a data-parallel one (``dp``).

    Attributes:
        started: there is a process group, be it of one rank.
        mesh: of dimensions "dp" and "tp"; None where nothing is started.
        split_rows: sequence parallelism: blocks have this rank's part of the context.
    """

    started: bool = False
    rank: int = 0
    ranks: int = 1
    tp: int = 1
    mesh: Any = None
    split_rows: bool = False
    fsdp: bool = False
    fp8_all_gather: bool = False

    def __str__(self) -> str:
        if not self.started:
            return "one process"
        extra = ", sequence parallel" if self.split_rows else ""
        extra += ", FSDP" if self.fsdp else ""
        extra += " with FP8 gathers" if self.fp8_all_gather else ""
        return f"{self.ranks} ranks: {self.dp} x data, {self.tp} x tensor parallel{extra}"

    @property
    def dp(self) -> int:
        return self.ranks // self.tp

    @property
    def tp_rank(self) -> int:
        return self.rank % self.tp

    @property
    def dp_rank(self) -> int:
        return self.rank // self.tp

    @property
    def tp_group(self) -> Any:
        return self.mesh["tp"].get_group()

    @property
    def dp_group(self) -> Any:
        return self.mesh["dp"].get_group()

    def own_windows(self, batch: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """Returns this rank's windows of a global batch."""
        return tuple(part.chunk(self.dp)[self.dp_rank] for part in batch)

    def mean(self, losses: torch.Tensor) -> torch.Tensor:
        """Returns the mean over data-parallel ranks, whose shares of the batch are equal."""
        if self.dp > 1:
            distributed.all_reduce(losses, group=self.dp_group)
            losses /= self.dp
        return losses

    def cut(self, name: str, whole: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
        """Returns this rank's part of the ``whole`` of a parameter."""
        if not is_split(parameter):
            return whole
        dim: int = parameter.partition_dim  # type: ignore[attr-defined]
        # Queries, keys and values one after the other, of each of which a rank has some heads.
        parts = whole.chunk(3, dim) if "qkv" in name else (whole,)
        return torch.cat([part.chunk(self.tp, dim)[self.tp_rank] for part in parts], dim)

    def whole_shape(self, parameter: torch.Tensor) -> list[int]:
        """Returns the shape of all ranks' parts of a parameter."""
        shape = list(parameter.shape)
        if is_split(parameter):
            shape[parameter.partition_dim] *= self.tp  # type: ignore[attr-defined]
        return shape


def is_split(parameter: torch.Tensor) -> bool:
    """Returns True if each tensor-parallel rank has a part of its own."""
    return getattr(parameter, "tensor_model_parallel", False)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that only runs under torchrun take."""
    group = parser.add_argument_group("several ranks", "with torchrun --nproc_per_node N")
    add = group.add_argument
    add("--tp", type=int, default=1, help="ranks that split every layer; the others split the data")
    add("--sequence-parallel", action="store_true", help="with --tp: split the context between")
    add("--fsdp", action="store_true", help="shard parameters over the data-parallel ranks")
    add("--fp8-all-gather", action="store_true", help="with --fsdp: gather weights as FP8 data")


def launched() -> bool:
    """Returns True if several processes were started together, or a process group exists."""
    return distributed.is_initialized() or "WORLD_SIZE" in os.environ


def rank_and_ranks() -> tuple[int, int]:
    """Returns this process's rank and the number of ranks."""
    if distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def device_of(device: str) -> str:
    """Returns the rank's own GPU if ``device`` is "cuda", else ``device``."""
    if device == "cuda" and launched():
        rank = rank_and_ranks()[0] % torch.cuda.device_count()
        return f"cuda:{os.environ.get('LOCAL_RANK', rank)}"
    return device


def check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Exits with a message for switches and sizes that the ranks cannot have."""
    error, ranks = parser.error, rank_and_ranks()[1]
    if args.tp < 1:
        error(f"--tp must be positive, got {args.tp}")
    if not launched():
        for name in ("sequence_parallel", "fsdp", "fp8_all_gather"):
            if getattr(args, name):
                error(f"--{name.replace('_', '-')} needs torchrun --nproc_per_node N")
    if ranks % args.tp:
        error(f"--tp must divide the number of ranks ({ranks}), got {args.tp}")
    if args.heads % args.tp:
        error(f"--heads must be a multiple of --tp ({args.tp}), got {args.heads}")
    if args.batch % (ranks // args.tp):
        dp = ranks // args.tp
        error(f"--batch must be a multiple of the data-parallel ranks ({dp}), got {args.batch}")
    if args.sequence_parallel and args.tp == 1:
        error("--sequence-parallel needs --tp of at least 2, got 1")
    if args.sequence_parallel and args.context % args.tp:
        error(f"--context must be a multiple of --tp ({args.tp}), got {args.context}")
    if args.fp8_all_gather:
        if not args.fsdp:
            error("--fp8-all-gather needs --fsdp")
        if all(run.recipe is None for run in args.runs):
            error("--fp8-all-gather needs --use-fp8, --fp8-recipe or --fp8-format")
        if any(isinstance(run.recipe, MXFP8Scaling) for run in args.runs):
            error("--fp8-all-gather needs an --fp8-recipe other than mxfp8")
    if args.tp > 1 and args.transformer_impl == "local":
        error("--transformer-impl must be transformer_engine with --tp of at least 2, got local")
    if ranks > 1 and ":" in args.device:
        error(f"--device must be auto, cpu or cuda with {ranks} ranks, got {args.device}")


def start(args: argparse.Namespace) -> Layout:
    """Returns the layout that the switches ask for; starts a process group if there is none."""
    if not launched():
        return Layout()
    device_type = args.device.split(":")[0]
    if device_type == "cuda":
        torch.cuda.set_device(args.device)
    if not distributed.is_initialized():
        distributed.init_process_group("nccl" if device_type == "cuda" else "gloo")
    rank, ranks = rank_and_ranks()
    shape = (ranks // args.tp, args.tp)
    mesh = distributed.init_device_mesh(device_type, shape, mesh_dim_names=("dp", "tp"))
    switches = (args.sequence_parallel, args.fsdp, args.fp8_all_gather)
    return Layout(True, rank, ranks, args.tp, mesh, *switches)


class Parallel:
    """A model on the ranks of a layout, and what a training step does with its gradients.

    Args:
        model: whose ``blocks`` are sharded one by one with FSDP.
        recipe: that of the run; with ``fp8_all_gather`` weights are gathered as it quantizes them.

    Attributes:
        module: to be called in training; ``model`` itself, or what wraps it.
    """

    def __init__(self, layout: Layout, model: nn.Module, recipe: Recipe | None) -> None:
        self.layout = layout
        self.module: Any = model
        # Names, because fully_shard makes new parameters that do not say what they need.
        parameters = dict(model.named_parameters())
        summed = [n for n, p in parameters.items() if getattr(p, "sequence_parallel", False)]
        if layout.fsdp:
            from torch.distributed.fsdp import fully_shard

            if layout.fp8_all_gather and recipe is not None:
                enable_fp8_all_gather(model, recipe)
            blocks: Any = model.blocks
            for block in blocks:
                fully_shard(block, mesh=layout.mesh["dp"])
            fully_shard(model, mesh=layout.mesh["dp"])
        elif layout.dp > 1:
            self.module = nn.parallel.DistributedDataParallel(model, process_group=layout.dp_group)
        self._summed = [model.get_parameter(name) for name in summed]

    def finish_gradients(self) -> None:
        """Sums the gradients of parameters that tensor-parallel ranks have for their own rows."""
        if self._summed:
            reduce_main_grads(self._summed, self.layout.tp_group, average=False)

    def clip_gradients(self, limit: float) -> None:
        """Scales gradients whose norm over all ranks is above ``limit``; the same on each rank."""
        clip_grad_norm_(self.module, limit)


class _OwnRows(torch.autograd.Function):
    """This rank's part of dimension 0; its gradient is gathered."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return _part(x, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return all_gather_rows(grad, ctx.group).wait(), None


class _AllRows(torch.autograd.Function):
    """All ranks' parts of dimension 0, after which the ranks compute the same."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return all_gather_rows(x, group).wait()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _part(grad, ctx.group), None


def _part(x: torch.Tensor, group: Any) -> torch.Tensor:
    parts = x.chunk(distributed.get_world_size(group))
    return parts[distributed.get_rank(group)].contiguous()


def own_rows(x: torch.Tensor, group: Any) -> torch.Tensor:
    """Returns this rank's rows [rows / ranks, ..] of ``x``, which every rank has whole."""
    return _OwnRows.apply(x, group)


def all_rows(x: torch.Tensor, group: Any) -> torch.Tensor:
    """Returns the rows [rows * ranks, ..] of all ranks."""
    return _AllRows.apply(x, group)
