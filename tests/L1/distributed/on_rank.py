"""What functions that run on a rank share: devices, groups, errors as text, checkpoints."""

from contextlib import contextmanager

import torch
import torch.distributed.checkpoint as dcp
from torch import distributed


def device_of(rank):
    """The GPU of a rank over NCCL, else the CPU."""
    return (
        torch.device("cuda", rank) if distributed.get_backend() == "nccl" else torch.device("cpu")
    )


def dtype_of(device):
    return torch.float32 if device.type == "cpu" else torch.bfloat16


def alone(rank):
    """A group of this rank only; every rank makes those of all."""
    return [distributed.new_group([r]) for r in range(distributed.get_world_size())][rank]


@contextmanager
def recorded(name, what=lambda tensor, *args, **kwargs: tensor.numel()):
    """A list of ``what`` makes of the arguments of each call of torch.distributed's ``name``."""
    calls, original = [], getattr(distributed, name)

    def call(*args, **kwargs):
        calls.append(what(*args, **kwargs))
        return original(*args, **kwargs)

    setattr(distributed, name, call)
    try:
        yield calls
    finally:
        setattr(distributed, name, original)


def told(function, *args, **kwargs):
    """The error that a call raises, its kind first."""
    try:
        function(*args, **kwargs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def assert_told(found, expected):
    """Each of the texts begins as expected."""
    for text, start in zip(found, expected, strict=True):
        assert text.startswith(start), text


def states_of(model):
    """The FP8 states of the modules that have run."""
    states = [m.fp8_state for m in model.modules() if hasattr(m, "fp8_state")]
    return [state for state in states if state.allocated]


def assert_same(ours, theirs):
    """Tensors of the same names and bits."""
    assert ours.keys() == theirs.keys()
    assert not [key for key in ours if not torch.equal(ours[key], theirs[key])]


def all_equal(ours, theirs):
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def save(path, model, optimizer, get, **options):
    """A checkpoint of what ``get``, such as torch's ``get_state_dict``, returns."""
    states = dict(zip(("model", "optimizer"), get(model, optimizer, **options), strict=True))
    dcp.save(states, checkpoint_id=path)


def load(path, model, optimizer, get, put, **options):
    """Loads what ``save`` has saved, and ``put`` sets."""
    states = dict(zip(("model", "optimizer"), get(model, optimizer, **options), strict=True))
    dcp.load(states, checkpoint_id=path)
    both = {"model_state_dict": states["model"], "optim_state_dict": states["optimizer"]}
    put(model, optimizer, **both, **options)
