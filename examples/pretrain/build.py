"""Builds model, optimizer and precision of a run from its command line."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import main_grads
import torch
from config import shape_of
from experts import scale_losses
from model import Llama, draw_weights, drawn
from plain import to_torchao
from ranks import Gradients, Ranks, shard
from torch.distributed.tensor import DTensor, distribute_tensor

import apex_te
from apex_te.optimizers import FusedAdam
from apex_te.parameter import FP8Parameter
from apex_te.recipe import CurrentScaling, DelayedScaling, Recipe, make_recipe

AMAX_HISTORY = 16  # steps that delayed scaling looks back on


class Built(NamedTuple):
    """Parts of a run.

    Attributes:
        model, optimizer: what is trained.
        gradients: their norm and clipping.
        recipe: the FP8 recipe, or None.
        region: makes the context that a forward runs in.
        parameters: number of parameters on all ranks.
        flops_per_token: operations of forward and backward.
    """

    model: Llama
    optimizer: FusedAdam
    gradients: Gradients
    recipe: Recipe | None
    region: Callable[[], AbstractContextManager[Any]]
    parameters: int
    flops_per_token: float


def make_run_recipe(name: str, microbatches: int) -> Recipe | None:
    """Returns a recipe by its name on the command line; None for ``"bf16"``.

    Args:
        name: one of ``config.RECIPES``.
        microbatches: forwards of an optimizer step, which share delayed scaling's scales.
    """
    if name == "bf16":
        return None
    if name == "hif8":
        return make_recipe("tensorwise", "hif8")
    if name == "delayed":
        # Gradients of a mean over many tokens are far below what scale 1 could hold.
        return DelayedScaling(
            amax_history_len=AMAX_HISTORY, interval=microbatches, first_step="current"
        )
    return make_recipe(name)


def make_optimizer(model: torch.nn.Module, args: argparse.Namespace) -> FusedAdam:
    """Returns AdamW with float32 master weights, which decays matrices only."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    groups = [
        {"params": matrices, "weight_decay": args.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return FusedAdam(
        groups, lr=args.lr, betas=(0.9, 0.95), master_weights=True,
        use_decoupled_grad=args.main_grads,
    )  # fmt: skip


def build(args: argparse.Namespace, ranks: Ranks, device: torch.device, vocabulary: int) -> Built:
    """Builds a run; the same seed gives every recipe, kind of layers and layout the same start.

    Args:
        args: the command line.
        ranks: the ranks.
        device: this rank's.
        vocabulary: number of tokens.
    """
    dtype = dtype_of(args.dtype, device)
    microbatches = args.batch // ranks.batch_parts // args.microbatch
    uses_fp8 = args.layers == "apex_te"
    recipe = make_run_recipe(args.recipe, microbatches) if uses_fp8 else None
    head = CurrentScaling() if isinstance(recipe, DelayedScaling) else recipe
    with apex_te.fp8_model_init(args.fp8_params, recipe):
        model = Llama(
            shape_of(args), vocabulary, args.context, layers=args.layers, tied=args.tied,
            dtype=dtype, device=device, packed=args.packed, recompute=args.recompute,
            main_grads=args.main_grads, tp_group=ranks.tp_group,
            head_recipe=head if args.fp8_head else None,
        )  # fmt: skip
    part_of = ranks.part_of(matrices_of(model)) if ranks.tp > 1 else None
    draw_weights(model, args.seed, part_of)
    counts = (p.numel() * (ranks.tp if getattr(p, "tensor_model_parallel", False) else 1)
              for p in model.parameters())  # fmt: skip
    parameters = sum(counts)
    flops = shape_of(args).flops_per_token(vocabulary, args.context)
    scale_losses(model, microbatches)
    model.split_sequences(ranks.cp_group)
    gradients = Gradients(model, ranks)
    if args.main_grads:
        main_grads.allocate(model.blocks)
    if args.layers == "torchao":
        to_torchao(model)
    if args.compile:
        compile_blocks(model)
    if ranks.is_sharded:
        shard(model, ranks, recipe if args.fp8_all_gather else None)
    optimizer = make_optimizer(model, args)
    if args.fp8_params:
        start_master_weights(model, optimizer, args.seed)

    def region() -> AbstractContextManager[Any]:
        if recipe is None:
            return nullcontext()
        return apex_te.fp8_autocast(
            fp8_recipe=recipe, keep_columnwise_weights=args.keep_columnwise_weights,
            save="small" if args.save_small else "all",
        )  # fmt: skip

    if args.graphs:
        capture_blocks(model, args.microbatch, dtype, recipe, microbatches > 1)
    return Built(model, optimizer, gradients, recipe, region, parameters, flops)


def dtype_of(name: str, device: torch.device) -> torch.dtype:
    """Returns the parameters' dtype by its name on the command line."""
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return getattr(torch, name)


def matrices_of(model: Llama) -> Callable[[str], tuple[int, ...]]:
    """Returns what gives the sizes of the matrices that a split weight of this name holds."""
    shape = model.shape
    keys = shape.groups * (shape.dim // shape.heads)

    def sizes(name: str) -> tuple[int, ...]:
        return (shape.dim, keys, keys) if "qkv" in name else (shape.ffn, shape.ffn)

    return sizes


@torch.no_grad()
def start_master_weights(model: Llama, optimizer: FusedAdam, seed: int) -> None:
    """Gives FP8 weights the master weights that other weights start from, before any rounding."""
    residual = 0.02 / math.sqrt(2 * model.shape.layers)
    matrices = [(n, p) for n, p in model.named_parameters() if p.dim() > 1]
    for index, (name, parameter) in enumerate(matrices):
        if isinstance(getattr(parameter, "_local_tensor", parameter), FP8Parameter):
            values = drawn(index, name, parameter, seed, residual, None).float()
            if isinstance(parameter, DTensor):  # every rank has drawn the whole
                where = parameter.device_mesh, parameter.placements
                values = distribute_tensor(values, *where, src_data_rank=None)
            optimizer.initialize_state(parameter)
            optimizer.set_scaled_state(parameter, "master_param", values)
    for parameter in model.parameters():  # torch loads into all states or makes all of them
        optimizer.initialize_state(parameter)


def compile_blocks(model: Llama) -> None:
    """Has torch.compile compile each block, and the loss of plain layers.

    Blocks are alike, so that they are compiled once.
    """
    for block in model.blocks:
        block.compile()
    model.plain_loss = torch.compile(model.plain_loss)


def capture_blocks(
    model: Llama, sequences: int, dtype: torch.dtype, recipe: Recipe | None, caches_weights: bool
) -> None:
    """Captures each block's forward and backward in CUDA graphs.

    Args:
        model: the model.
        sequences: of a microbatch.
        dtype: of the hidden states.
        recipe: that of the run, or None.
        caches_weights: forwards are told which microbatch is the first.
    """
    shape = (sequences, model.context, model.shape.dim)
    device = model.angles.device
    sample = torch.zeros(shape, dtype=dtype, device=device, requires_grad=True)
    blocks = tuple(model.blocks)
    apex_te.make_graphed_callables(
        blocks, tuple((sample,) for _ in blocks), fp8_enabled=recipe is not None,
        fp8_recipe=recipe, fp8_weight_caching=caches_weights and recipe is not None,
        sample_kwargs=tuple({"rotary_pos_emb": model.angles} for _ in blocks),
    )  # fmt: skip
