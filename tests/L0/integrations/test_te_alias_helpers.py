"""Helpers of the Transformer Engine alias: names of classes, refusals, and neutral keywords."""

import pytest
import torch

from apex_te.integrations.transformer_engine._names import named, neutral, not_served


def test_named_sets_the_module_of_classes_and_functions():
    @named("transformer_engine.pytorch.module.linear")
    class Linear:
        pass

    @named("transformer_engine.pytorch.utils")
    def divide():
        return 3

    assert Linear.__module__ == "transformer_engine.pytorch.module.linear"
    assert Linear.__name__ == "Linear"
    assert divide.__module__ == "transformer_engine.pytorch.utils"
    assert divide() == 3


def test_a_class_that_is_not_served_stands_in_annotations_and_raises_when_constructed():
    cls = not_served("transformer_engine.pytorch.ops.Sequential", "fused ops are modules here")
    assert isinstance(cls, type)
    assert (cls.__module__, cls.__name__) == ("transformer_engine.pytorch.ops", "Sequential")
    assert not isinstance(torch.nn.Identity(), cls)
    assert cls | None

    class Mine(cls):
        def __init__(self, size):
            self.size = size

    for kind in (cls, Mine):
        with pytest.raises(
            NotImplementedError,
            match=r"transformer_engine\.pytorch\.ops\.Sequential .*: fused ops are modules here",
        ):
            kind(3)


def test_a_class_that_is_not_served_has_its_base():
    cls = not_served("a.NVFP4Tensor", "no FP4", base=torch.Tensor)
    assert issubclass(cls, torch.Tensor)
    with pytest.raises(NotImplementedError, match="no FP4"):
        cls(torch.zeros(2))


def test_a_function_that_is_not_served_raises_when_called():
    function = not_served("transformer_engine.pytorch.initialize_ub", "there are no userbuffers")
    assert not isinstance(function, type)
    assert function.__qualname__ == "initialize_ub"
    assert function.__module__ == "transformer_engine.pytorch"
    with pytest.raises(NotImplementedError, match=r"initialize_ub .*: there are no userbuffers"):
        function([1, 2], tp_size=2)


def test_neutral_keywords_pass():
    neutral("Linear", ub_overlap_ag=(False, False), symmetric_ar_type=(None, None))
    neutral("DotProductAttention", cp_comm_type=("p2p", (None, "p2p")), num_splits=(1, 1))
    neutral("Linear", eps=(0, 0.0))


@pytest.mark.parametrize("value", [True, 2, "all", torch.ones(1), torch.ones(3), [False]])
def test_a_keyword_that_asks_for_something_is_refused_by_name(value):
    with pytest.raises(NotImplementedError, match=r"^Linear: ub_bulk must be False or None, .*got"):
        neutral("Linear", name=("x", "x"), ub_bulk=(value, (False, None)))
