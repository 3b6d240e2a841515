"""Runs the tiny GPT of megatron_gpt.py on ranks of Megatron-Core's context parallelism."""

from __future__ import annotations

import contextlib
from typing import Any
from unittest import mock

import megatron_gpt as mg
import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.utils import get_batch_on_this_cp_rank, get_thd_batch_on_this_cp_rank

# Documents of each of a step's packed batch, padding to multiples of 4 included.
DOCUMENTS = (20, 40, 8, 60)


def rank_context_losses(
    rank: int, options: dict, tp: int, cp: int, packed: bool, comm_type: str, folder: str
) -> list[float]:
    """Losses of training ranks that split each sequence, or each document of a packed batch.

    They start from the weights in ``folder``.
    """
    with mg.parallel(tp, cp=cp), contextlib.ExitStack() as stack:
        if not torch.cuda.is_available():
            stack.enter_context(mg.OnCPU())
            move = mock.patch.object(torch.Tensor, "cuda", lambda x, **kwargs: x)
            stack.enter_context(move)
        model = mg.gpt(**options, context_parallel_size=cp, cp_comm_type=comm_type)
        mg.load(model, folder)
        optimizer = torch.optim.Adam(model.parameters(), 2e-3)
        losses = []
        for step in range(mg.STEPS):
            model.set_is_first_microbatch()
            loss = (_packed_loss if packed else _loss)(model, step)
            loss.backward()
            mg.finish_gradients(model)
            optimizer.step()
            optimizer.zero_grad()
            group = parallel_state.get_context_parallel_group()
            mean = loss.detach() / group.size()  # all ranks have as many tokens
            torch.distributed.all_reduce(mean, group=group)
            losses.append(mean.item())
        return losses


def _loss(model: Any, step: int) -> torch.Tensor:
    device = next(model.parameters()).device
    rows = mg.batch(step).to(device)
    batch = {
        "tokens": rows[:, :-1].contiguous(),
        "labels": rows[:, 1:].contiguous(),
        "position_ids": torch.arange(mg.LENGTH, device=device).repeat(mg.BATCH, 1),
    }
    own = get_batch_on_this_cp_rank(batch)
    return model(own["tokens"], own["position_ids"], None, labels=own["labels"]).mean()


def _packed_loss(model: Any, step: int) -> torch.Tensor:
    """Returns the loss of the same tokens packed as one row of documents."""
    device = next(model.parameters()).device
    rows = mg.batch(step).to(device)
    starts = torch.tensor([0, *DOCUMENTS], dtype=torch.int32, device=device).cumsum(0).int()
    longest = torch.tensor([max(DOCUMENTS)])
    places = torch.cat([torch.arange(n, device=device) for n in DOCUMENTS])
    batch = {
        "tokens": rows[:, :-1].reshape(1, -1),
        "labels": rows[:, 1:].reshape(1, -1),
        "position_ids": places[None],
    }
    own, packing = get_thd_batch_on_this_cp_rank(batch, starts, starts, longest)
    assert isinstance(packing, PackedSeqParams)
    return model(
        own["tokens"], own["position_ids"], None, labels=own["labels"], packed_seq_params=packing
    ).mean()
