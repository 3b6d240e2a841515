"""Programs of the dispatcher: op calls that were bound once and run together."""

import gc
import weakref

import pytest
import torch

from apex_te import runtime

SCALE = 0.25


def cast():
    """The bound function, called once as a program requires."""
    function = runtime.function("cast_transpose", "cast_transpose")
    x, scale = torch.ones(2, 2), torch.ones(1)
    function(x, scale, torch.empty(2, 2, dtype=torch.float8_e4m3fn), *[None] * 6)
    return function


def program(x, scale):
    """Casts x, slot 0, to the FP8 data in slot 1 and its inverse scale in bytes 256 to 260 of 2."""
    like = torch.empty(0)
    args = ((0,), scale, (1,), None, None, (2, 256, (1,), (1,), like), None, None, None)
    return runtime.core().Program((x, ..., ...), ((cast(), args),))


def memory(x):
    return torch.zeros_like(x, dtype=torch.float8_e4m3fn), torch.zeros(512, dtype=torch.uint8)


def test_runs_steps_on_slots_parts_and_constants():
    scale = torch.full((1,), SCALE)
    run = program(torch.randn(8, 16), scale)
    for _ in range(2):
        x = torch.randn(8, 16) * 16
        data, scratch = memory(x)
        assert run(x, data, scratch) is True
        assert torch.equal(data.float(), (x * scale).to(torch.float8_e4m3fn).float())
        assert scratch[256:260].view(torch.float32).item() == 1 / scale.item()
        scale.mul_(2)  # constants are read by each run


@pytest.mark.parametrize("other", [
    torch.randn(8, 15), torch.randn(8, 16, 1), torch.randn(16, 8).t(), torch.randn(8, 16).half(),
    torch.randn(129)[1:].view(8, 16), None, torch.nn.Buffer(torch.randn(8, 16)).view(4, 32),
    torch.empty(8, 16, device="meta"), torch.randn(8, 16, dtype=torch.complex64).imag, 3,
    torch.randn(8, 16).to_sparse(),
])  # fmt: skip
def test_does_nothing_for_a_tensor_of_another_form(other):
    x = torch.randn(8, 16)
    run = program(x, torch.ones(1))
    data, scratch = memory(x)
    assert run(other, data, scratch) is False
    assert not data.view(torch.uint8).any()
    assert not scratch.any()


def test_none_must_stay_none():
    x = torch.randn(8, 16)
    args = ((0,), torch.ones(1), (2,), *[None] * 6)
    run = runtime.core().Program((x, None, ...), ((cast(), args),))
    data, _ = memory(x)
    assert run(x, x, data) is False
    assert run(x, None, data) is True


def test_raises_the_error_of_an_op():
    x = torch.randn(8, 16)
    run = program(x, torch.ones(1))
    with pytest.raises(ValueError, match="cast_transpose: rowwise must have shape"):
        run(x, torch.empty(8, 8, dtype=torch.float8_e4m3fn), memory(x)[1])


def test_keeps_constants_and_no_slot():
    x, scale = torch.randn(8, 16), torch.ones(1)
    run = program(x, scale)
    kept, gone = weakref.ref(scale), weakref.ref(x)
    del x, scale
    gc.collect()
    assert gone() is None
    assert kept() is not None
    del run
    gc.collect()
    assert kept() is None


@pytest.mark.parametrize(("forms", "steps", "message"), [
    ((), (), "a form must be that of a tensor"),
    ((3,), (), "forms must be tensors"),
    ((torch.ones(1),), (3,), "a step must be a pair"),
    ((torch.ones(1),), ((3, ()),), "a step must have a Function and a tuple"),
    ((torch.ones(1),), ((cast(), ()),), "a step must have all arguments of its Function"),
    ((torch.ones(1),), ((cast(), ((7,), *[None] * 8)),), "a slot must be that of a tensor"),
    ((torch.ones(1),), ((cast(), (None,) * 9),), "a tensor is missing"),
    ((torch.ones(1),), ((cast(), ((0, 1), *[None] * 8)),), "a tensor must be a tuple of 1 or 5"),
    ((torch.ones(1),), ((cast(), (3, *[None] * 8)),), "constants must be tensors"),
])  # fmt: skip
def test_refuses_what_is_no_program(forms, steps, message):
    with pytest.raises(TypeError, match=f"Program: {message}"):
        runtime.core().Program(forms, steps)


def made_program(x, scale, outputs, log):
    """The program of ``program``, which makes its FP8 data and scratch memory itself."""
    like = torch.empty(0)
    args = ((0,), scale, (1,), None, None, (2, 256, (1,), (1,), like), None, None, None)
    data, scratch = memory(x)
    makers = ((torch.full_like, data, 0), (torch.zeros_like, scratch))
    after = ((log.append, "first"), (log.append, "second"))
    return runtime.core().Program((x, ..., ...), ((cast(), args),), makers, after, outputs)


def test_makes_tensors_and_returns_outputs():
    x, scale, log = torch.randn(8, 16), torch.full((1,), SCALE), []
    run = made_program(x, scale, (1, -1, 0, 2, 1), log)
    results = []
    for _ in range(2):
        x = torch.randn(8, 16) * 16
        data, nothing, same, scratch, again = run(x)
        assert nothing is None
        assert same is x
        assert again is data
        assert torch.equal(data.float(), (x * scale).to(torch.float8_e4m3fn).float())
        assert scratch[256:260].view(torch.float32).item() == 1 / SCALE
        results.append(data)
    assert results[0] is not results[1]
    assert log == ["first", "second"] * 2


def test_frees_what_it_makes_and_calls_nothing_after_a_refusal():
    x, log = torch.randn(8, 16), []
    run = made_program(x, torch.ones(1), (1,), log)
    gc.collect()
    before = len([o for o in gc.get_objects() if type(o) is torch.Tensor])
    assert run(torch.randn(8, 15)) is False
    assert log == []
    assert len([o for o in gc.get_objects() if type(o) is torch.Tensor]) == before
    (data,) = run(x)
    gone = weakref.ref(data)
    del data
    assert gone() is None


def test_raises_the_error_of_a_maker_and_of_a_call_after():
    def fail(*args):
        raise KeyError("no memory")

    x = torch.randn(8, 16)
    data = memory(x)[0]
    args = ((0,), torch.ones(1), (1,), *[None] * 6)
    forms, steps = (x, ...), ((cast(), args),)
    with pytest.raises(KeyError, match="no memory"):
        runtime.core().Program(forms, steps, ((fail, 1),))(x)
    with pytest.raises(KeyError, match="no memory"):
        runtime.core().Program(forms, steps, ((torch.zeros_like, data),), ((fail,),))(x)
    with pytest.raises(TypeError, match="Program: a maker must return a tensor"):
        runtime.core().Program(forms, steps, ((list,),))(x)


@pytest.mark.parametrize(("index", "value"), [(0, 1.0), (1, 2.0)])
def test_makes_tensors_elsewhere_if_another_device_is_current(index, value):
    x = torch.randn(8, 16)
    makers, elsewhere = ((torch.full, (3,), 1.0),), ((torch.full, (3,), 2.0),)
    program = runtime.core().Program
    run = program((x, ...), (), makers, (), (1,), lambda: index, elsewhere)
    assert run(x)[0].tolist() == [value] * 3
    for answer in (None, "0"):
        with pytest.raises(TypeError):
            program((x, ...), (), makers, (), (1,), lambda answer=answer: answer, elsewhere)(x)
    with pytest.raises(TypeError, match="Program: elsewhere must have as many calls as makers"):
        program((x, ...), (), makers, (), (1,), lambda: 0)


@pytest.mark.parametrize(("options", "message"), [
    (((3,),), "makers and after must be tuples of a callable"),
    ((((),),), "makers and after must be tuples of a callable"),
    (((), ((3, 4),)), "makers and after must be tuples of a callable"),
    (((), (), (1,)), "outputs must be places of tensors or -1"),
    (((), (), (-2,)), "outputs must be places of tensors or -1"),
    (((), (), 3), "extents must be a tuple"),
    (((list,), (list,)), "makers and after|each maker"),
    ((((list,), (list,)),), "each maker must have a form"),
])  # fmt: skip
def test_refuses_makers_and_outputs_that_are_none(options, message):
    with pytest.raises(TypeError, match=f"Program: ({message})"):
        runtime.core().Program((torch.ones(1),), (), *options)


def test_refuses_other_numbers_of_tensors_and_keywords():
    x = torch.randn(8, 16)
    run = program(x, torch.ones(1))
    with pytest.raises(TypeError, match="one tensor must be passed for each form"):
        run(x)
    with pytest.raises(TypeError, match="by position"):
        run(x, *memory(x), slot=x)
