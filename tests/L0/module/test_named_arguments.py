"""The decorator behind errors that name arguments, and the names that it suggests."""

import inspect

import pytest
import torch

import apex_te
from apex_te.runtime.named_arguments import did_you_mean, named_arguments, nearest


@pytest.mark.parametrize(
    ("given", "known", "found"),
    [
        ("RMSnorm", ("LayerNorm", "RMSNorm"), "RMSNorm"),
        ("bhsd", ("sbhd", "bshd", "thd"), "bshd"),
        ("dropout", ("hidden_size", "hidden_dropout"), "hidden_dropout"),
        ("x", ("eps", "bias"), None),
        (3, ("eps",), None),
        ("eps", (), None),
    ],
)
def test_nearest_name(given, known, found):
    assert nearest(given, known) == found
    assert did_you_mean(given, known) == ("" if found is None else f"; did you mean {found!r}?")


def test_decorator_keeps_the_signature_and_other_errors():
    @named_arguments(inner="outer")
    def function(outer, *, flag=False):
        if outer == "passed on":
            raise ValueError("helper: inner must be above 0, got -1")
        raise KeyError(outer)

    assert list(inspect.signature(function).parameters) == ["outer", "flag"]
    with pytest.raises(ValueError, match=r"^function: outer must be above 0, got -1$"):
        function("passed on")
    with pytest.raises(KeyError, match="other"):
        function("other")


def test_cuda_device_where_there_is_none(monkeypatch):
    def fails(*args, **kwargs):
        raise AssertionError("Torch not compiled with CUDA enabled")

    monkeypatch.setattr(torch, "empty", fails)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=r"^Linear: device must be .*got 'cuda:0' without a CUDA"):
        apex_te.Linear(16, 16, device="cuda:0")
    with pytest.raises(AssertionError, match="not compiled"):
        apex_te.Linear(16, 16, device="cpu")
