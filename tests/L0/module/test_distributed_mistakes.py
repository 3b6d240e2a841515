"""Mistakes in calls of apex_te.distributed, of statistics and of ops, and their errors."""

import numpy as np
import pytest
import torch
from torch import nn

import apex_te
from apex_te import distributed, ops

X, WEIGHT = torch.ones(2, 32), torch.ones(32)
LOGITS, TARGET = torch.ones(2, 4), torch.tensor([1, 2])


def linear(**options):
    return apex_te.Linear(32, 32, **options)


def sgd():
    return torch.optim.SGD(linear().parameters(), 0.1)


def tracker():
    return distributed.CudaRNGStatesTracker()


def cross_entropy(logits=LOGITS, target=TARGET, **options):
    return distributed.parallel_cross_entropy(logits, target, **options)


# By the function that is named: a wrong call, its error, and words that the error has.
MISTAKES = {
    "get_model_state_dict": [
        (lambda: distributed.get_model_state_dict(None), TypeError, "model", "NoneType"),
        (lambda: distributed.get_model_state_dict(nn.Linear), TypeError, "pass an instance"),
        (lambda: distributed.get_model_state_dict(linear(), options={"full_state_dict": True}),
         TypeError, "options", "StateDictOptions", "dict"),
        (lambda: distributed.get_model_state_dict(linear(), {}), TypeError, "by position"),
        (lambda: distributed.get_model_state_dict(linear(), stacked=2), TypeError,
         "stacked", "int"),
        (lambda: distributed.get_model_state_dict(linear(), expert_group="ep"), TypeError,
         "expert_group", "ProcessGroup", "str"),
    ],
    "get_optimizer_state_dict": [
        (lambda: distributed.get_optimizer_state_dict(linear(), None), TypeError,
         "optimizers", "NoneType"),
        (lambda: distributed.get_optimizer_state_dict(linear(), "adam"), TypeError,
         "optimizers", "str"),
        (lambda: distributed.get_optimizer_state_dict(linear(), sgd().state_dict()), TypeError,
         "optimizers", "dict"),
    ],
    "get_state_dict": [
        (lambda: distributed.get_state_dict(linear(), [None]), TypeError, "optimizers", "NoneType"),
        (lambda: distributed.get_state_dict(linear(), sgd(), option=None), TypeError,
         "did you mean 'options'?"),
    ],
    "set_model_state_dict": [
        (lambda: distributed.set_model_state_dict(linear(), "model.pt"), TypeError,
         "model_state_dict", "str"),
        (lambda: distributed.set_model_state_dict(linear().state_dict(), linear()), TypeError,
         "model", "not its state dict"),
    ],
    "set_optimizer_state_dict": [
        (lambda: distributed.set_optimizer_state_dict(linear(), sgd(), None), TypeError,
         "optim_state_dict", "NoneType"),
    ],
    "set_state_dict": [
        (lambda: distributed.set_state_dict(linear(), sgd(), model_state_dict={}), TypeError,
         "optim_state_dict must be given"),
        (lambda: distributed.set_state_dict(
            linear(), sgd(), model_state_dict={}, optim_state_dict=None),
         TypeError, "optim_state_dict", "NoneType"),
    ],
    "parallel_cross_entropy": [
        (lambda: cross_entropy(None), TypeError, "logits must be a torch.Tensor", "None"),
        (lambda: cross_entropy(np.ones((2, 4))), TypeError, "logits", "torch.Tensor", "ndarray"),
        (lambda: cross_entropy(target=[1, 2]), TypeError, "target", "list"),
        (lambda: cross_entropy(target=TARGET.to("meta")), ValueError, "target", "cpu", "meta"),
        (lambda: cross_entropy(target=TARGET.float()), TypeError, "target", "int64", "float32"),
        (lambda: cross_entropy(target=torch.tensor([1, 2, 3])), ValueError, "target", "[2]", "[3]"),
        (lambda: cross_entropy(reduction="avg"), ValueError, "reduction", "'mean'", "'avg'"),
        (lambda: cross_entropy(reduce=True), TypeError, "did you mean 'reduction'?"),
        (lambda: cross_entropy(group="tp"), TypeError, "group", "ProcessGroup", "str"),
    ],
    "reduce_main_grads": [
        (lambda: distributed.reduce_main_grads(linear(), "dp"), TypeError, "group", "str"),
        (lambda: distributed.reduce_main_grads(linear(), avg=True), TypeError, "'avg'", "average"),
    ],
    "enable_fp8_all_gather": [
        (lambda: distributed.enable_fp8_all_gather(None), TypeError, "model", "NoneType"),
        (lambda: distributed.enable_fp8_all_gather(linear(), "delayd"), ValueError, "'delayd'"),
        (lambda: distributed.enable_fp8_all_gather(linear(), mesh=None), TypeError,
         "'mesh'", "the arguments are model, recipe"),
    ],
    "TokenDispatcher": [
        (lambda: distributed.TokenDispatcher("8"), TypeError, "num_experts", "int", "str"),
        (lambda: distributed.TokenDispatcher(8, exchange="alltoall"), ValueError, "'alltoall'"),
        (lambda: distributed.TokenDispatcher(8, alignment=16), TypeError, "did you mean 'align'?"),
        (lambda: distributed.TokenDispatcher(), TypeError, "num_experts must be given"),
    ],
    "ColumnParallel": [
        (lambda: distributed.ColumnParallel(sequence_paralel=True), TypeError,
         "did you mean 'sequence_parallel'?"),
        (lambda: distributed.ColumnParallel()._apply(linear(), None), TypeError,
         "device_mesh", "DeviceMesh", "NoneType"),
    ],
    "RowParallel": [
        (lambda: distributed.RowParallel(sequence_parallel="yes"), TypeError,
         "sequence_parallel must be a bool"),
    ],
    "LayerParallel": [
        (lambda: distributed.LayerParallel(True), TypeError, "by name"),
    ],
    "CudaRNGStatesTracker": [
        (lambda: tracker().add("model-parallel-rng", "1"), TypeError, "seed", "int", "str"),
        (lambda: tracker().add(1, 2), TypeError, "name", "str", "int"),
    ],
    "Linear": [
        (lambda: linear(tp_group="tp", tp_size=2, parallel_mode="column"), TypeError,
         "tp_group", "ProcessGroup", "str"),
        (lambda: linear(tp_size=2, parallel_mode="column")(X), ValueError, "tp_group", "tp_size=2"),
    ],
    "fp8_statistics": [
        (lambda: apex_te.fp8_statistics(None), TypeError, "model", "NoneType"),
        (lambda: apex_te.fp8_statistics(nn.Linear(32, 32)), ValueError, "FP8 module", "Linear"),
    ],
    "rms_norm": [
        (lambda: ops.rms_norm.rms_norm(), TypeError, "x and weight must be given"),
        (lambda: ops.rms_norm.rms_norm(X, WEIGHT, epss=1e-5), TypeError, "did you mean 'eps'?"),
        (lambda: ops.rms_norm.rms_norm(X, WEIGHT, 1e-5, 3), TypeError, "by position"),
    ],
    "layer_norm": [
        (lambda: ops.layer_norm.layer_norm(X), TypeError, "must be given"),
    ],
    "swiglu": [
        (lambda: ops.swiglu.swiglu(X, dimension=1), TypeError, "unexpected argument 'dimension'"),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("owner", "call", "error", "words"),
    [(owner, *row[:2], row[2:]) for owner, rows in MISTAKES.items() for row in rows],
)
def test_mistake_has_an_error_with_the_users_names(owner, call, error, words):
    with pytest.raises(error) as caught:
        call()
    text = str(caught.value)
    assert text.startswith(f"{owner}: "), text
    assert all(word in text for word in words), text


def test_ranks_without_a_process_group_are_not_left_apart(monkeypatch):
    """torchrun's ranks that forgot init_process_group would train on their own."""
    for alone in ("", "1"):
        monkeypatch.setenv("WORLD_SIZE", alone)
        distributed.reduce_main_grads(linear())
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match=r"^reduce_main_grads: .* 2 ranks .*init_process_group"):
        distributed.reduce_main_grads(linear())
