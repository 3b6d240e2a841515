"""Functions of apex_te.ops raise the version of each tensor of the caller that they overwrite.

Autograd compares versions with those of saved tensors, and caches of a tensor's casts rely on them.
"""

import pytest
import torch
from public_functions import NAMES, find, make_case


def tensors_in(value):
    """The tensors in an argument: itself, or those of a list or tuple."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [t for item in value for t in tensors_in(item)]
    return []


def bytes_of(tensor):
    return tensor.detach().contiguous().clone().view(-1).view(torch.uint8)


@pytest.mark.parametrize("name", NAMES)
def test_overwritten_tensors_have_a_new_version(name):
    torch.manual_seed(0)
    case = make_case(name)
    given = {key: tensors_in(value) for key, value in case.args.items()}
    before = {key: [(bytes_of(t), t._version) for t in ts] for key, ts in given.items()}
    find(name)(**case.args)
    stale = [
        key
        for key, ts in given.items()
        for t, (old, version) in zip(ts, before[key], strict=True)
        if not torch.equal(bytes_of(t), old) and t._version == version
    ]
    assert not stale, f"{name} overwrites {stale} and leaves the version as it is"
