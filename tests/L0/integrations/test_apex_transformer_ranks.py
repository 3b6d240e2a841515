"""apex.transformer over two processes: tensor and pipeline parallelism train as one rank does."""

import functools
import itertools
import os
from unittest import mock

import apex_transformer_models as models
import pytest
import torch
import torch.multiprocessing as mp
from torch import distributed

from apex_te.integrations.apex.transformer import amp, parallel_state, tensor_parallel

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available(), reason="needs torch.distributed"
)


def _worker(rank, world, path, functions, backend):
    models.join(rank, world, f"{path}/store", backend)
    torch.save([function() for function in functions], f"{path}/{rank}.pt")
    distributed.barrier()
    distributed.destroy_process_group()


def on_ranks(path, functions, world=2, backend="gloo"):
    """What functions return on each rank, by function; over gloo without GPUs."""
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if backend == "gloo" else {}
    with mock.patch.dict(os.environ, hidden):
        mp.spawn(_worker, (world, str(path), functions, backend), nprocs=world)
    found = [torch.load(path / f"{rank}.pt", weights_only=False) for rank in range(world)]
    return dict(zip(functions, zip(*found, strict=True), strict=True))


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """Results of two ranks, whose processes start once for all tests."""
    functions = [_tensor_parallel, _pipeline, _data_parallel, _collectives]
    return on_ranks(tmp_path_factory.mktemp("ranks"), functions)


def in_state(function, *sizes, **options):
    """Result of a function with groups of these sizes."""
    parallel_state.initialize_model_parallel(*sizes, **options)
    try:
        return function()
    finally:
        parallel_state.destroy_model_parallel()


def _tensor_parallel():
    train = models.train_tensor_parallel
    alone = in_state(functools.partial(train, False), 1)
    cases = [functools.partial(train, False), functools.partial(train, True)]
    cases += [functools.partial(train, False, True), functools.partial(train, True, True)]
    return alone, [in_state(case, 2) for case in cases]


def test_tensor_parallel_training_is_that_of_one_rank(both):
    """With and without sequence parallelism and gradients that are added to main_grad. Sums over
    ranks round otherwise than one sum: a few units in the last place, over 12 steps."""
    for alone, split in both[_tensor_parallel]:
        losses, params = alone
        assert losses[-1] < losses[0]
        for other_losses, other_params in split:
            torch.testing.assert_close(other_losses, losses, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(other_params, params, rtol=1e-4, atol=1e-5)


def _pipeline():
    alone = in_state(functools.partial(models.train_pipeline, 4), 1, 1)
    few = in_state(functools.partial(models.train_pipeline, 4, microbatches=2), 1, 1)
    plain = in_state(functools.partial(models.train_pipeline, 4), 1, 2)
    scaled = functools.partial(
        models.train_pipeline, 4, scales=True, deallocate_pipeline_outputs=True
    )
    piped = [plain, in_state(scaled, 1, 2)]
    virtual = functools.partial(in_state, virtual_pipeline_model_parallel_size_=2)
    run = functools.partial(models.train_pipeline, 4, 2)
    piped += [virtual(run, 1, 2), virtual(functools.partial(scaled, 2), 1, 2)]
    short = virtual(functools.partial(run, microbatches=2), 1, 2)
    return alone, piped, few, short


def test_pipeline_training_is_that_of_one_stage_bitwise(both):
    """1F1B and interleaved, as many microbatches as stages too, with a scale and with outputs
    released: the same operations on the same microbatches in the same order."""
    found = both[_pipeline]
    for (losses, params), runs in (
        (found[0][0], list(zip(*(each[1] for each in found), strict=True))),
        (found[0][2], [tuple(each[3] for each in found)]),
    ):
        assert losses[-1] < losses[0]
        for stages in runs:
            assert stages[0][0] is None
            assert torch.equal(stages[-1][0], losses)
            together = dict(itertools.chain(*(stage[1].items() for stage in stages)))
            assert together.keys() == params.keys()
            assert all(torch.equal(together[name], params[name]) for name in params)


def _data_parallel():
    alone = in_state(functools.partial(models.train_pipeline, 2, microbatches=2), 1, 1)
    return alone, in_state(functools.partial(models.train_pipeline, 2, None, 1, True), 1, 1)


def test_data_parallel_gradients_are_averaged_once(both):
    for (_, params), (_, split) in both[_data_parallel]:
        torch.testing.assert_close(split, params, rtol=1e-5, atol=1e-6)


def _three_stages():
    run = functools.partial(models.train_pipeline, 6, microbatches=6)
    alone = in_state(run, 1, 1)
    several = functools.partial(run, 2)
    return (
        alone,
        in_state(run, 1, 3),
        in_state(several, 1, 3, virtual_pipeline_model_parallel_size_=2),
    )


def _split_over_gpus():
    alone = in_state(functools.partial(models.train_pipeline, 4), 1, 1)
    piped = in_state(functools.partial(models.train_pipeline, 4), 1, 2)
    return alone, piped


@pytest.mark.cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus(tmp_path):
    """NCCL; the sums are those of the CPU test, which GPUs round otherwise with other shapes."""
    found = on_ranks(tmp_path, [_tensor_parallel, _split_over_gpus], backend="nccl")
    for (losses, params), split in found[_tensor_parallel]:
        for other_losses, other_params in split:
            torch.testing.assert_close(other_losses, losses, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(other_params, params, rtol=1e-3, atol=1e-4)
    (losses, params), _ = found[_split_over_gpus][0]
    stages = [each[1] for each in found[_split_over_gpus]]
    torch.testing.assert_close(stages[-1][0], losses)
    together = dict(itertools.chain(*(stage[1].items() for stage in stages)))
    torch.testing.assert_close(together, params)


@pytest.mark.long
def test_three_stages(tmp_path):
    found = on_ranks(tmp_path, [_three_stages], 3)[_three_stages]
    losses, params = found[0][0]
    for schedule in (1, 2):
        stages = [each[schedule] for each in found]
        assert torch.equal(stages[-1][0], losses)
        together = dict(itertools.chain(*(stage[1].items() for stage in stages)))
        assert all(torch.equal(together[name], params[name]) for name in params)


def _collectives():
    return in_state(_rank_and_values, 2)


def _rank_and_values():
    """What the rank, and values of both ranks, decide."""
    rank = distributed.get_rank()
    x = torch.arange(8.0).view(2, 4) + 10 * rank
    tp = tensor_parallel
    found = {
        "reduce": tp.reduce_from_tensor_model_parallel_region(x),
        "columns": tp.scatter_to_tensor_model_parallel_region(x),
        "gathered": tp.gather_from_tensor_model_parallel_region(x),
        "rows": tp.scatter_to_sequence_parallel_region(x),
        "gathered rows": tp.gather_from_sequence_parallel_region(x),
        "summed rows": tp.reduce_scatter_to_sequence_parallel_region(x),
    }
    data = {"a": torch.arange(3) + 5, "b": torch.ones(2, 2, dtype=torch.int64)}
    found |= tp.broadcast_data(["a", "b"], data if rank == 0 else None, torch.int64)
    logits = torch.randn(5, 8, generator=torch.Generator().manual_seed(4))
    mine = logits[:, 4 * rank : 4 * rank + 4].clone().requires_grad_()
    target = torch.tensor([0, 3, 4, 7, 1])
    loss = tp.vocab_parallel_cross_entropy(mine, target, 0.1)
    loss.sum().backward()
    found |= {"loss": loss.detach(), "dlogits": mine.grad}
    tp.model_parallel_cuda_manual_seed(7)
    found["alike"] = torch.rand(2)
    with tp.get_cuda_rng_tracker().fork():
        found["apart"] = torch.rand(2)
    param = torch.nn.Parameter(torch.ones(2))
    scaler = amp.GradScaler(init_scale=4.0)
    scaler._device = "cpu"
    optimizer = torch.optim.SGD([param], lr=1.0)
    scaler.scale(param.sum() * (float("inf") if rank else 1.0)).backward()
    scaler.step(optimizer)
    scaler.update()
    found |= {"param": param.detach(), "scale": scaler.get_scale()}
    names = [
        "get_tensor_model_parallel_rank", "get_tensor_model_parallel_world_size",
        "get_data_parallel_rank", "get_pipeline_model_parallel_rank",
        "get_tensor_model_parallel_src_rank", "is_pipeline_first_stage", "is_pipeline_last_stage",
        "is_rank_in_embedding_group", "get_rank_info",
    ]  # fmt: skip
    found["state"] = [getattr(parallel_state, name)() for name in names]
    return found


def test_collectives_losses_and_random_numbers(both):
    first, second = both[_collectives]
    x = [torch.arange(8.0).view(2, 4) + 10 * rank for rank in range(2)]
    logits = torch.randn(5, 8, generator=torch.Generator().manual_seed(4)).double()
    logits.requires_grad_()
    target = torch.tensor([0, 3, 4, 7, 1])
    log = logits.log_softmax(-1)
    spread = 0.1 * 8 / 7
    loss = -(1 - spread) * log[torch.arange(5), target] - spread * log.mean(-1)
    loss.sum().backward()
    for rank, found in enumerate((first, second)):
        assert torch.equal(found["reduce"], x[0] + x[1])
        assert torch.equal(found["columns"], x[rank][:, 2 * rank : 2 * rank + 2])
        assert torch.equal(found["gathered"], torch.cat(x, 1))
        assert torch.equal(found["rows"], x[rank][rank : rank + 1])
        assert torch.equal(found["gathered rows"], torch.cat(x))
        assert torch.equal(found["summed rows"], (x[0] + x[1])[rank : rank + 1])
        assert found["a"].tolist() == [5, 6, 7]
        assert found["b"].tolist() == [[1, 1], [1, 1]]
        torch.testing.assert_close(found["loss"], loss.float())
        part = logits.grad[:, 4 * rank : 4 * rank + 4].float()
        torch.testing.assert_close(found["dlogits"], part, rtol=1e-5, atol=1e-6)
        assert found["param"].tolist() == [1.0, 1.0]  # both skip
        assert found["scale"] == 2.0
        info = (0, rank, 0, None)
        assert found["state"] == [rank, 2, 0, 0, 0, True, True, True, info]
    assert torch.equal(first["alike"], second["alike"])
    assert not torch.equal(first["apart"], second["apart"])
