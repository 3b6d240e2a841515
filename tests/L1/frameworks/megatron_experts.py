"""Functions that the tests of ``FusedGroupedMLP`` run on each rank of Megatron-Core."""

from __future__ import annotations

import contextlib
import os
from typing import Any
from unittest import mock

import megatron_gpt as mg
import torch
from megatron.core import dist_checkpointing
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel import layers

from apex_te import fp8_autocast, make_recipe
from apex_te.module.grouped import experts as fused

COUNTS = [9, 0, 20, 3]


def experts_of(options: dict) -> torch.nn.Module:
    """Returns the experts of the first layer of a new GPT; other layers may ask for apex."""
    with mock.patch.object(layers, "_grad_accum_fusion_available", True):
        return mg.gpt(**options).decoder.layers[0].mlp.experts


@contextlib.contextmanager
def counted() -> Any:
    """Context that gives a list with an item for each forward of the fused function."""
    calls: list[int] = []
    of = fused.ExpertsFunction.apply
    with mock.patch.object(
        fused.ExpertsFunction, "apply", lambda *args: calls.append(1) or of(*args)
    ):
        yield calls


def rank_results(rank: int, options: dict, recipe: str | None, on_device: bool) -> dict[str, Any]:
    """Runs Megatron's experts, grouped and one by one, and the suite's on the same weights.

    "apart" is Megatron's forward over the suite's layers. Returns output, gradients of rows, probs
    and weights, and the number of calls of the fused function for each kind.
    """
    found: dict[str, Any] = {}
    with mg.parallel():
        kinds = {
            "fused": experts_of({**options, "fused_experts": True}),
            "grouped": experts_of(options),
            "apart": experts_of({**options, "fused_experts": True}),
            "one by one": experts_of({**options, "moe_grouped_gemm": False}),
        }
        kinds["apart"]._activation = None
        state = kinds["grouped"].state_dict()
        for kind in ("fused", "apart"):
            kinds[kind].load_state_dict(state, strict=True)
        for i, expert in enumerate(kinds["one by one"].local_experts):
            for name in ("linear_fc1", "linear_fc2"):
                weight = state[f"{name}.weight{i}"]
                expert.load_state_dict({f"{name}.weight": weight}, strict=False)
        device = next(kinds["fused"].parameters()).device
        dtype = options.get("params_dtype", torch.float32)
        torch.manual_seed(3)
        rows, dy = torch.randn(2, sum(COUNTS), 64).to(device, dtype)
        probs = torch.rand(sum(COUNTS)).to(device)
        counts = torch.tensor(COUNTS).to(device if on_device else "cpu")
        made = None if recipe is None else make_recipe(recipe)
        for kind, experts in kinds.items():
            x, p = rows.clone().requires_grad_(), probs.clone().requires_grad_()
            with counted() as calls, fp8_autocast(recipe is not None, fp8_recipe=made):
                out, bias = experts(x, counts, p)
            assert bias is None
            out.backward(dy)
            grads = {name: each.grad for name, each in experts.named_parameters()}
            found[kind] = [out, x.grad, p.grad, *stacked(grads)], len(calls)
    return {
        kind: ([value.detach().float().cpu() for value in values], calls)
        for kind, (values, calls) in found.items()
    }


def stacked(grads: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """Returns the gradients of both projections as stacks, whatever holds the weights."""
    return [
        grads[f"{name}.weight"]
        if f"{name}.weight" in grads
        else torch.stack([grad for key, grad in grads.items() if name in key])
        for name in ("linear_fc1", "linear_fc2")
    ]


def rank_main_grads(rank: int, options: dict, recipe: str | None) -> list[torch.Tensor]:
    """Runs two microbatches; returns gradients, and what went into ``main_grad`` in their place."""
    with mg.parallel():
        plain = experts_of({**options, "fused_experts": True})
        adding = experts_of(
            {**options, "fused_experts": True, "gradient_accumulation_fusion": True}
        )
        adding.load_state_dict(plain.state_dict())
        for parameter in adding.parameters():
            parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
        made = None if recipe is None else make_recipe(recipe)
        for step in range(2):
            torch.manual_seed(step)
            rows, probs = torch.randn(sum(COUNTS), 64), torch.rand(sum(COUNTS))
            for experts in (plain, adding):
                with fp8_autocast(recipe is not None, fp8_recipe=made):
                    out, _ = experts(rows, torch.tensor(COUNTS), probs)
                out.square().sum().backward()
        return [
            *(parameter.grad for parameter in plain.parameters()),
            *(parameter.main_grad for parameter in adding.parameters()),
        ]


def rank_calls(rank: int, options: dict, tp: int, ep: int) -> tuple[list[float], int]:
    """Losses of a few steps, and the number of calls of the fused function."""
    with mg.parallel(tp, ep), counted() as calls:
        return mg.train(mg.gpt(**options), range(3)), len(calls)


def rank_overlapped(rank: int, options: dict, overlap: bool) -> tuple[Any, int]:
    """Losses and weights of a few steps with ZeRO, and the number of calls of the function."""
    ddp = {"overlap_grad_reduce": overlap, "overlap_param_gather": overlap}
    with counted() as calls:
        return mg.rank_distributed_optimizer(rank, options, 3, **ddp), len(calls)


def rank_state_keys(rank: int, options: dict) -> list[list[str]]:
    """Keys of the state dicts of Megatron's experts and of the suite's, which load one another's.

    The values are views of the parameters.
    """
    with mg.parallel():
        theirs, ours = experts_of(options), experts_of({**options, "fused_experts": True})
        ours.load_state_dict(theirs.state_dict(), strict=True)
        for i in range(4):
            assert torch.equal(ours.linear_fc1.weight[i], getattr(theirs.linear_fc1, f"weight{i}"))
        state = ours.state_dict()
        assert state["linear_fc2.weight1"].data_ptr() == ours.linear_fc2.weight[1].data_ptr()
        with torch.no_grad():
            for parameter in theirs.parameters():
                parameter.zero_()
        theirs.load_state_dict(state, strict=True)
        assert torch.equal(ours.linear_fc2.weight[3], theirs.linear_fc2.weight3)
        return [sorted(each.state_dict()) for each in (theirs, ours)]


def optimizer_of(model: torch.nn.Module) -> Any:
    """Returns Megatron's Adam, whose states are saved with the shards of the weights."""
    return get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=2e-3), [model])


def train(model: Any, optimizer: Any, steps: range) -> list[float]:
    losses = []
    for step in steps:
        model.set_is_first_microbatch()
        optimizer.zero_grad()
        loss = mg.loss_of(model, step)
        loss.backward()
        mg.finish_gradients(model)
        optimizer.step()
        losses.append(loss.item())
    return losses


def rank_saves(rank: int, options: dict, ep: int, folder: str) -> list[float]:
    """Trains, saves model and optimizer, and goes on; returns the later losses."""
    with on_cpu(ep):
        model = wrapped(options)
        optimizer = optimizer_of(model)
        train(model, optimizer, range(4))
        state = {"model": model.sharded_state_dict()}
        state["optimizer"] = optimizer.sharded_state_dict(state["model"])
        if rank == 0:
            os.makedirs(folder, exist_ok=True)
        torch.distributed.barrier()
        with mock.patch.dict(mg.multiprocessing.current_process()._config, daemon=False):
            dist_checkpointing.save(state, folder)
        return train(model, optimizer, range(4, 7))


def rank_goes_on(rank: int, options: dict, ep: int, folder: str) -> list[float]:
    """Loads model and optimizer, and trains; returns the losses."""
    with on_cpu(ep):
        model = wrapped(options)
        optimizer = optimizer_of(model)
        state = {"model": model.sharded_state_dict()}
        state["optimizer"] = optimizer.sharded_state_dict(state["model"], is_loading=True)
        state = dist_checkpointing.load(state, folder)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        return train(model, optimizer, range(4, 7))


@contextlib.contextmanager
def on_cpu(ep: int) -> Any:
    """Megatron's groups, and its optimizers on the CPU where there is no GPU."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(mg.parallel(1, ep))
        if not torch.cuda.is_available():
            stack.enter_context(mg.OnCPU())
        yield


def wrapped(options: dict) -> torch.nn.Module:
    """Returns a GPT with what ``DistributedDataParallel`` would tell Megatron's optimizers."""
    model = mg.gpt(**options)
    model.ddp_config = mg.DistributedDataParallelConfig()
    return model
