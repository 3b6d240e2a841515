"""Ranks that stop, skip or freeze something: the right result or an error on every rank."""

import os
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from ranks import Ranks
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

import apex_te
from apex_te import flush_fp8_state, fp8_autocast
from apex_te.recipe import DelayedScaling
from apex_te.state import TENSORS, registry

RECIPE = DelayedScaling(amax_history_len=4)
HIDDEN, STEPS, SAVED, KILLED = 32, 6, 2, 4
TIMEOUT = 10.0  # seconds, of the process group


@pytest.fixture
def fresh():
    """Two ranks of their own: what they construct stays in their registries."""
    ranks = Ranks(2)
    yield ranks
    ranks.close()


def _parallel(rank, case):
    """A tensor-parallel MLP beside a plain layer; what one rank skips, freezes or lacks."""
    registry.pending = 0
    torch.manual_seed(1)
    group = distributed.group.WORLD
    mlp = apex_te.LayerNormMLP(
        HIDDEN, 2 * HIDDEN, set_parallel_mode=True, tp_group=group, sequence_parallel=True
    )
    head = apex_te.Linear(HIDDEN, HIDDEN)
    if case == "frozen" and rank:
        head.requires_grad_(False)
    for step in range(3):
        x = torch.full((4, 2, HIDDEN), 1.0 + rank + step)
        x[..., 0] = 0.5
        with fp8_autocast(True, RECIPE):
            out = mlp(x.requires_grad_())
            if case == "skipped" and rank:
                out.sum().backward()
                continue
            out = head(out)
        if case == "no_backward" and rank:
            # Its part of the MLP's backward has collectives; that of the head has none.
            out = out.detach().requires_grad_() + 0 * mlp(x.detach()).sum()
        out.square().sum().backward()
    flush_fp8_state()
    found = {}
    for name, module in (("mlp", mlp), ("head", head)):
        if module._fp8.allocated:
            found[name] = {key: getattr(module._fp8, key).clone() for key in TENSORS}
    return found


@pytest.mark.parametrize("case", ["skipped", "frozen"])
def test_tensor_parallel_modules(two_ranks, case):
    ours, theirs = two_ranks.run(_parallel, case)
    assert ours["mlp"]["scale_bwd"][0] != 1
    for name in ours.keys() & theirs.keys():
        for key in TENSORS:
            assert torch.equal(ours[name][key], theirs[name][key]), (name, key)
    assert ("head" in theirs) == (case == "frozen")
    assert ours["head"]["scale_bwd"][0] != 1  # rank 0's gradients, though it alone has any


def _no_backward(rank):
    """Rank 1 runs the forward only: an evaluation step in the middle of the others' training."""
    registry.pending = 0
    torch.manual_seed(1)
    model = torch.nn.Sequential(apex_te.Linear(HIDDEN, HIDDEN), apex_te.Linear(HIDDEN, HIDDEN))
    for step in range(3):
        with fp8_autocast(True, RECIPE):
            out = model(torch.full((4, HIDDEN), 1.0 + rank))
        if rank == 0 or step == 0:
            (out * (1.0 + rank)).sum().backward()
    flush_fp8_state()
    return [getattr(m._fp8, key).clone() for m in model for key in TENSORS]


def test_backward_is_skipped(two_ranks):
    ours, theirs = two_ranks.run(_no_backward)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert ours[9][0] == 57344 / 2.0  # of the last layer: the largest of all steps and ranks


def _stages(rank, numbered):
    """Two pipeline stages of the same layers, each with its own regions, over the whole world."""
    layer = apex_te.TransformerLayer(
        HIDDEN, HIDDEN, 4, layer_number=rank + 1 if numbered else None, hidden_dropout=0.0
    )
    try:
        for _ in range(3):
            with fp8_autocast(True, RECIPE):
                layer(torch.ones(2, 1, HIDDEN)).sum().backward()
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def test_pipeline_stages(fresh):
    """Told by layer_number, which Megatron counts over all stages; without it they are alike."""
    assert fresh.run(_stages, False) == ["nothing was raised"] * 2
    for message in fresh.run(_stages, True):
        assert message.startswith("RankMismatchError: fp8_autocast: every rank of fp8_group")
        assert message.endswith("are there ranks of another pipeline stage among them?")


def _classes(rank):
    kinds = (apex_te.Linear, apex_te.LayerNormLinear)
    for kind in kinds if rank else kinds[::-1]:
        module = kind(HIDDEN, HIDDEN)
    try:
        for _ in range(3):
            with fp8_autocast(True, RECIPE):
                module(torch.ones(4, HIDDEN)).sum().backward()
    except RuntimeError as error:
        return str(error)
    return "nothing was raised"


def test_modules_in_another_order(fresh):
    for message in fresh.run(_classes):
        assert "whose sizes, classes or layer numbers differ" in message


# A rank is killed, in processes of its own; the others end, and what was saved goes on.


def _make():
    registry.pending = 0
    torch.manual_seed(1)
    model = torch.nn.Sequential(
        apex_te.Linear(HIDDEN, HIDDEN), apex_te.LayerNormMLP(HIDDEN, HIDDEN)
    )
    return model, DistributedDataParallel(model), torch.optim.AdamW(model.parameters(), lr=0.01)


def _one_step(rank, ddp, optimizer, step, killed=False):
    x = torch.randn(4, HIDDEN, generator=torch.Generator().manual_seed(2 * step + rank))
    optimizer.zero_grad()
    with fp8_autocast(True, RECIPE):
        loss = (ddp(x) - x).square().mean()
    if killed:
        os.kill(os.getpid(), signal.SIGKILL)
    loss.backward()
    optimizer.step()
    return loss.item()


def _save(rank, model, optimizer, folder):
    """Both kinds of checkpoint."""
    flush_fp8_state()
    states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.save({"model": states["model"]}, checkpoint_id=f"{folder}/dcp")
    if rank == 0:
        torch.save(states, f"{folder}/last.pt")
    distributed.barrier()


def _until_killed(rank, folder, results):
    """Saves on the way; rank 1 dies between its passes, rank 0 tells how it noticed."""
    torch.set_num_threads(1)
    timeout = timedelta(seconds=TIMEOUT)
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2, timeout=timeout
    )
    model, ddp, optimizer = _make()
    began = time.monotonic()
    try:
        for step in range(STEPS):
            if step == SAVED:
                _save(rank, model, optimizer, folder)
            began = time.monotonic()
            _one_step(rank, ddp, optimizer, step, rank == 1 and step == KILLED)
    except RuntimeError as error:
        results.put((f"{type(error).__name__}: {error}", time.monotonic() - began))
    results.close()
    results.join_thread()
    os._exit(0)  # its group is broken: there is nothing to say goodbye to


def _uninterrupted(rank, folder):
    model, ddp, optimizer = _make()
    losses = []
    for step in range(STEPS):
        if step == SAVED:
            _save(rank, model, optimizer, folder)  # saving flushes, so a run that saves is the same
        losses.append(_one_step(rank, ddp, optimizer, step))
    return losses[SAVED:]


def _resumed(rank, folder):
    model, ddp, optimizer = _make()
    for parameter in model.parameters():
        parameter.data.zero_()
    states = torch.load(f"{folder}/last.pt", weights_only=True)
    model.load_state_dict(states["model"])
    optimizer.load_state_dict(states["optimizer"])
    kept = {key: value.clone() for key, value in model.state_dict().items()}
    for parameter in model.parameters():
        parameter.data.zero_()
    again = {"model": model.state_dict()}
    dcp.load(again, checkpoint_id=f"{folder}/dcp")
    model.load_state_dict(again["model"])
    same = [torch.equal(value, kept[key]) for key, value in model.state_dict().items()]
    return same, [_one_step(rank, ddp, optimizer, step) for step in range(SAVED, STEPS)]


def test_a_rank_is_killed(two_ranks, tmp_path):
    """The other ends with an error within the group's timeout; training resumes bit by bit."""
    first, second = os.fspath(tmp_path / "first"), os.fspath(tmp_path / "second")
    for folder in (first, second):
        os.mkdir(folder)
    context = mp.get_context("spawn")
    results = context.Queue()
    processes = [
        context.Process(target=_until_killed, args=(rank, first, results)) for rank in range(2)
    ]
    for process in processes:
        process.start()
    message, seconds = results.get(timeout=100)
    for process in processes:
        process.join(100)
    assert [process.exitcode for process in processes] == [0, -signal.SIGKILL]
    assert message.startswith(("RuntimeError: ", "DistBackendError: ", "DistNetworkError: "))
    assert seconds < TIMEOUT + 5
    uninterrupted = two_ranks.run(_uninterrupted, second)
    for (same, losses), expected in zip(two_ranks.run(_resumed, first), uninterrupted, strict=True):
        assert all(same)
        assert losses == expected
