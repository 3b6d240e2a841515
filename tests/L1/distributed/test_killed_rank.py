"""A rank killed in the middle of a step: the others end with an error, what was saved goes on."""

import os
import queue
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.multiprocessing as mp
from on_rank import load, save
from test_expert_parallel import routed
from torch import distributed
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import apex_te
from apex_te import flush_fp8_state, fp8_autocast, init_fp8_state
from apex_te.comm.expert_parallel import TokenDispatcher
from apex_te.distributed.fsdp.fp8_all_gather import enable_fp8_all_gather
from apex_te.fp8.delayed.ranks import amax_groups
from apex_te.recipe import DelayedScaling

RECIPE = DelayedScaling(amax_history_len=4)
HIDDEN, STEPS, SAVED, KILLED = 32, 6, 2, 4
TIMEOUT = 10.0  # seconds, of the process group
KINDS = ("ddp", "tensor parallel", "fsdp", "experts")
SHARED = ("ddp", "fsdp")  # whose torch.distributed.checkpoint holds all there is


class _Experts(torch.nn.Module):
    """Two experts on each rank."""

    def __init__(self):
        super().__init__()
        self.dispatcher = TokenDispatcher(2 * distributed.get_world_size())
        self.fc1 = apex_te.GroupedLinear(2, HIDDEN, HIDDEN, bias=False)
        self.fc2 = apex_te.GroupedLinear(2, HIDDEN, HIDDEN, bias=False)

    def forward(self, x):
        experts = self.dispatcher.num_experts
        _, probs, routing_map, _ = routed(distributed.get_rank(), x.shape[0], experts, 2, "cpu")
        dispatch = self.dispatcher.dispatch(x, probs, routing_map)
        rows = torch.tanh(self.fc1(dispatch.rows, dispatch.m_splits))
        return dispatch.combine(self.fc2(rows, dispatch.m_splits))


def _make(rank, kind):
    """The model, what is called in its place, and its optimizer."""
    amax_groups.pending = 0
    torch.manual_seed(1 + (rank if kind in ("tensor parallel", "experts") else 0))
    if kind == "experts":
        model = run = _Experts()
    else:
        split = {}
        if kind == "tensor parallel":
            split = {"tp_group": distributed.group.WORLD, "sequence_parallel": True}
            split["set_parallel_mode"] = True
        layers = (apex_te.LayerNormMLP(HIDDEN, 2 * HIDDEN, **split) for _ in range(2))
        model = run = torch.nn.Sequential(*layers)
    if kind == "ddp":
        run = DistributedDataParallel(model)
    elif kind == "fsdp":
        enable_fp8_all_gather(model, RECIPE)
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
    return model, run, torch.optim.AdamW(model.parameters(), lr=0.01)


def _one_step(rank, run, optimizer, step, killed=False):
    x = torch.randn(4, HIDDEN, generator=torch.Generator().manual_seed(2 * step + rank))
    optimizer.zero_grad()
    with fp8_autocast(True, RECIPE):
        loss = (run(x) - x).square().mean()
    if killed:
        os.kill(os.getpid(), signal.SIGKILL)
    loss.backward()
    optimizer.step()
    return loss.item()


def _save(rank, kind, model, optimizer, folder):
    """A file of each rank and, where these hold the same or shards, a checkpoint of all."""
    flush_fp8_state()
    if kind in SHARED:
        save(f"{folder}/dcp", model, optimizer, get_state_dict)
    states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    if kind != "fsdp":
        torch.save(states, f"{folder}/last{rank}.pt")
    distributed.barrier()


def _load(rank, kind, model, optimizer, folder):
    """What the model holds after each way of loading, from zeros."""
    loaded = []
    init_fp8_state(model, RECIPE)
    if kind in SHARED:
        _zero(model)
        load(f"{folder}/dcp", model, optimizer, get_state_dict, set_state_dict)
        loaded.append({key: value.clone() for key, value in model.state_dict().items()})
    if kind != "fsdp":
        _zero(model)
        states = torch.load(f"{folder}/last{rank}.pt", weights_only=True)
        model.load_state_dict(states["model"])
        optimizer.load_state_dict(states["optimizer"])
        loaded.append({key: value.clone() for key, value in model.state_dict().items()})
    return loaded


def _zero(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()


def _until_killed(rank, kind, folder, results):
    """Saves on the way; rank 1 dies between its passes, rank 0 tells how it noticed."""
    torch.set_num_threads(1)
    timeout = timedelta(seconds=TIMEOUT)
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2, timeout=timeout
    )
    model, run, optimizer = _make(rank, kind)
    began = time.monotonic()
    try:
        for step in range(STEPS):
            if step == SAVED:
                _save(rank, kind, model, optimizer, folder)
            began = time.monotonic()
            _one_step(rank, run, optimizer, step, rank == 1 and step == KILLED)
    except RuntimeError as error:
        results.put((f"{type(error).__name__}: {error}", time.monotonic() - began))
    results.close()
    results.join_thread()
    os._exit(0)  # its group is broken: there is nothing to say goodbye to


def _end_all(folder, answers):
    """Runs every kind in a process of its own for each rank, forked: what is imported is."""
    context = mp.get_context("fork")
    for kind in KINDS:
        results = context.Queue()
        own = f"{folder}/{kind}"
        os.mkdir(own)
        processes = [
            context.Process(target=_until_killed, args=(rank, kind, own, results))
            for rank in range(2)
        ]
        for process in processes:
            process.start()
        try:
            message, seconds = results.get(timeout=60)
        except queue.Empty:
            message, seconds = "nothing was raised", 60.0
        for process in processes:
            process.join(10)
            process.kill()
        answers.put((kind, message, seconds, [process.exitcode for process in processes]))


@pytest.fixture(scope="module")
def endings(tmp_path_factory):
    """The folder of each kind, rank 0's error and its time, and how both processes ended."""
    folder = tmp_path_factory.mktemp("killed")
    context = mp.get_context("spawn")  # a process without threads, from which others can be forked
    answers = context.Queue()
    launcher = context.Process(target=_end_all, args=(os.fspath(folder), answers))
    launcher.start()
    found = {}
    for _ in KINDS:
        kind, *ending = answers.get(timeout=120)
        found[kind] = (os.fspath(folder / kind), *ending)
    launcher.join(10)
    return found


def _uninterrupted(rank, kind, folder):
    model, run, optimizer = _make(rank, kind)
    losses = []
    for step in range(STEPS):
        if step == SAVED:  # saving flushes, so a run that saves is the same
            _save(rank, kind, model, optimizer, folder)
        losses.append(_one_step(rank, run, optimizer, step))
    return losses[SAVED:]


def _resumed(rank, kind, folder):
    model, run, optimizer = _make(rank, kind)
    first, *others = _load(rank, kind, model, optimizer, folder)
    same = [torch.equal(value, first[key]) for other in others for key, value in other.items()]
    return same, [_one_step(rank, run, optimizer, step) for step in range(SAVED, STEPS)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_is_killed(endings, two_ranks, tmp_path, kind):
    """The other ends with an error within the group's timeout; training resumes bit by bit."""
    folder, message, seconds, codes = endings[kind]
    assert codes == [0, -signal.SIGKILL]
    assert message.startswith(("RuntimeError: ", "DistBackendError: ", "DistNetworkError: "))
    assert seconds < TIMEOUT + 5
    expected = two_ranks.run(_uninterrupted, kind, os.fspath(tmp_path))
    resumed = two_ranks.run(_resumed, kind, folder)
    for (same, losses), uninterrupted in zip(resumed, expected, strict=True):
        assert all(same)
        assert losses == uninterrupted
