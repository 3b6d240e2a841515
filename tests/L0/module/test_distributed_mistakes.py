"""Mistakes in calls of apex_te.distributed, of statistics and of ops, and their errors."""

from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

import apex_te
from apex_te import distributed, ops


class Mistake(NamedTuple):
    """A wrong call, the type of its error, and words that the error has besides the function."""

    call: object
    error: type
    words: tuple


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


MISTAKES = {
    "get_model_state_dict: no model": Mistake(
        lambda: distributed.get_model_state_dict(None), TypeError, ("model", "NoneType")
    ),
    "get_model_state_dict: class": Mistake(
        lambda: distributed.get_model_state_dict(nn.Linear), TypeError, ("pass an instance",)
    ),
    "get_model_state_dict: options as a dict": Mistake(
        lambda: distributed.get_model_state_dict(linear(), options={"full_state_dict": True}),
        TypeError,
        ("options", "StateDictOptions", "dict"),
    ),
    "get_model_state_dict: options by position": Mistake(
        lambda: distributed.get_model_state_dict(linear(), {}), TypeError, ("by position",)
    ),
    "get_model_state_dict: stacked as a number": Mistake(
        lambda: distributed.get_model_state_dict(linear(), stacked=2), TypeError, ("stacked", "int")
    ),
    "get_model_state_dict: name of a group": Mistake(
        lambda: distributed.get_model_state_dict(linear(), expert_group="ep"),
        TypeError,
        ("expert_group", "ProcessGroup", "str"),
    ),
    "get_optimizer_state_dict: no optimizer": Mistake(
        lambda: distributed.get_optimizer_state_dict(linear(), None),
        TypeError,
        ("optimizers", "NoneType"),
    ),
    "get_optimizer_state_dict: name of an optimizer": Mistake(
        lambda: distributed.get_optimizer_state_dict(linear(), "adam"),
        TypeError,
        ("optimizers", "str"),
    ),
    "get_optimizer_state_dict: optimizer's state": Mistake(
        lambda: distributed.get_optimizer_state_dict(linear(), sgd().state_dict()),
        TypeError,
        ("optimizers", "dict"),
    ),
    "get_state_dict: no optimizer": Mistake(
        lambda: distributed.get_state_dict(linear(), [None]), TypeError, ("optimizers", "NoneType")
    ),
    "get_state_dict: misspelt option": Mistake(
        lambda: distributed.get_state_dict(linear(), sgd(), option=None),
        TypeError,
        ("did you mean 'options'?",),
    ),
    "set_model_state_dict: path": Mistake(
        lambda: distributed.set_model_state_dict(linear(), "model.pt"),
        TypeError,
        ("model_state_dict", "str"),
    ),
    "set_model_state_dict: arguments exchanged": Mistake(
        lambda: distributed.set_model_state_dict(linear().state_dict(), linear()),
        TypeError,
        ("model", "not its state dict"),
    ),
    "set_optimizer_state_dict: no state": Mistake(
        lambda: distributed.set_optimizer_state_dict(linear(), sgd(), None),
        TypeError,
        ("optim_state_dict", "NoneType"),
    ),
    "set_state_dict: state of the optimizer missing": Mistake(
        lambda: distributed.set_state_dict(linear(), sgd(), model_state_dict={}),
        TypeError,
        ("optim_state_dict must be given",),
    ),
    "set_state_dict: no state": Mistake(
        lambda: distributed.set_state_dict(
            linear(), sgd(), model_state_dict={}, optim_state_dict=None
        ),
        TypeError,
        ("optim_state_dict", "NoneType"),
    ),
    "parallel_cross_entropy: no logits": Mistake(
        lambda: cross_entropy(None), TypeError, ("logits must be a torch.Tensor", "None")
    ),
    "parallel_cross_entropy: numpy": Mistake(
        lambda: cross_entropy(np.ones((2, 4))), TypeError, ("logits", "torch.Tensor", "ndarray")
    ),
    "parallel_cross_entropy: list of targets": Mistake(
        lambda: cross_entropy(target=[1, 2]), TypeError, ("target", "list")
    ),
    "parallel_cross_entropy: another device": Mistake(
        lambda: cross_entropy(target=TARGET.to("meta")), ValueError, ("target", "cpu", "meta")
    ),
    "parallel_cross_entropy: targets as floats": Mistake(
        lambda: cross_entropy(target=TARGET.float()), TypeError, ("target", "int64", "float32")
    ),
    "parallel_cross_entropy: targets of another size": Mistake(
        lambda: cross_entropy(target=torch.tensor([1, 2, 3])), ValueError, ("target", "[2]", "[3]")
    ),
    "parallel_cross_entropy: misspelt reduction": Mistake(
        lambda: cross_entropy(reduction="avg"), ValueError, ("reduction", "'mean'", "'avg'")
    ),
    "parallel_cross_entropy: argument of torch": Mistake(
        lambda: cross_entropy(reduce=True), TypeError, ("did you mean 'reduction'?",)
    ),
    "parallel_cross_entropy: name of a group": Mistake(
        lambda: cross_entropy(group="tp"), TypeError, ("group", "ProcessGroup", "str")
    ),
    "reduce_main_grads: name of a group": Mistake(
        lambda: distributed.reduce_main_grads(linear(), "dp"), TypeError, ("group", "str")
    ),
    "reduce_main_grads: misspelt average": Mistake(
        lambda: distributed.reduce_main_grads(linear(), avg=True), TypeError, ("'avg'", "average")
    ),
    "enable_fp8_all_gather: no model": Mistake(
        lambda: distributed.enable_fp8_all_gather(None), TypeError, ("model", "NoneType")
    ),
    "enable_fp8_all_gather: misspelt recipe": Mistake(
        lambda: distributed.enable_fp8_all_gather(linear(), "delayd"), ValueError, ("'delayd'",)
    ),
    "enable_fp8_all_gather: argument of fully_shard": Mistake(
        lambda: distributed.enable_fp8_all_gather(linear(), mesh=None),
        TypeError,
        ("'mesh'", "the arguments are model, recipe"),
    ),
    "TokenDispatcher: experts as text": Mistake(
        lambda: distributed.TokenDispatcher("8"), TypeError, ("num_experts", "int", "str")
    ),
    "TokenDispatcher: misspelt exchange": Mistake(
        lambda: distributed.TokenDispatcher(8, exchange="alltoall"), ValueError, ("'alltoall'",)
    ),
    "TokenDispatcher: unknown argument": Mistake(
        lambda: distributed.TokenDispatcher(8, alignment=16), TypeError, ("did you mean 'align'?",)
    ),
    "TokenDispatcher: no experts": Mistake(
        lambda: distributed.TokenDispatcher(), TypeError, ("num_experts must be given",)
    ),
    "ColumnParallel: misspelt argument": Mistake(
        lambda: distributed.ColumnParallel(sequence_paralel=True),
        TypeError,
        ("did you mean 'sequence_parallel'?",),
    ),
    "RowParallel: flag as text": Mistake(
        lambda: distributed.RowParallel(sequence_parallel="yes"),
        TypeError,
        ("sequence_parallel must be a bool",),
    ),
    "LayerParallel: flag by position": Mistake(
        lambda: distributed.LayerParallel(True), TypeError, ("by name",)
    ),
    "ColumnParallel: no mesh": Mistake(
        lambda: distributed.ColumnParallel()._apply(linear(), None),
        TypeError,
        ("device_mesh", "DeviceMesh", "NoneType"),
    ),
    "CudaRNGStatesTracker: seed as text": Mistake(
        lambda: tracker().add("model-parallel-rng", "1"), TypeError, ("seed", "int", "str")
    ),
    "CudaRNGStatesTracker: number as name": Mistake(
        lambda: tracker().add(1, 2), TypeError, ("name", "str", "int")
    ),
    "Linear: name of a group": Mistake(
        lambda: linear(tp_group="tp", tp_size=2, parallel_mode="column"),
        TypeError,
        ("tp_group", "ProcessGroup", "str"),
    ),
    "Linear: ranks without a group": Mistake(
        lambda: linear(tp_size=2, parallel_mode="column")(X), ValueError, ("tp_group", "tp_size=2")
    ),
    "fp8_statistics: no model": Mistake(
        lambda: apex_te.fp8_statistics(None), TypeError, ("model", "NoneType")
    ),
    "fp8_statistics: model without FP8": Mistake(
        lambda: apex_te.fp8_statistics(nn.Linear(32, 32)), ValueError, ("FP8 module", "Linear")
    ),
    "rms_norm: nothing": Mistake(
        lambda: ops.rms_norm.rms_norm(), TypeError, ("x and weight must be given",)
    ),
    "rms_norm: misspelt eps": Mistake(
        lambda: ops.rms_norm.rms_norm(X, WEIGHT, epss=1e-5), TypeError, ("did you mean 'eps'?",)
    ),
    "rms_norm: too much": Mistake(
        lambda: ops.rms_norm.rms_norm(X, WEIGHT, 1e-5, 3), TypeError, ("by position",)
    ),
    "layer_norm: weight missing": Mistake(
        lambda: ops.layer_norm.layer_norm(X), TypeError, ("must be given",)
    ),
    "swiglu: argument that it has not": Mistake(
        lambda: ops.swiglu.swiglu(X, dimension=1), TypeError, ("unexpected argument 'dimension'",)
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistake_has_an_error_with_the_users_names(name):
    mistake = MISTAKES[name]
    with pytest.raises(mistake.error) as caught:
        mistake.call()
    text = str(caught.value)
    assert text.startswith(f"{name.partition(':')[0]}: "), text
    assert all(word in text for word in mistake.words), text


def test_ranks_without_a_process_group_are_not_left_apart(monkeypatch):
    """torchrun's ranks that forgot init_process_group would train on their own."""
    for alone in ("", "1"):
        monkeypatch.setenv("WORLD_SIZE", alone)
        distributed.reduce_main_grads(linear())
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match=r"^reduce_main_grads: .* 2 ranks .*init_process_group"):
        distributed.reduce_main_grads(linear())
