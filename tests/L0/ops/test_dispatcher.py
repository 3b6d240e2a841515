"""The dispatcher: what it refuses and how it says so, keywords, lists, threads and forks."""

import os
import threading

import pytest
import torch
from torch._subclasses import FakeTensorMode

from apex_te.ops.cast_transpose import cast_transpose
from apex_te.runtime import core, function, tensor_list

E4M3 = torch.float8_e4m3fn


@pytest.fixture(scope="module")
def cast():
    return function("cast_transpose", "cast_transpose")


def refusal(error, call, *args, **kwargs):
    with pytest.raises(error) as raised:
        call(*args, **kwargs)
    return str(raised.value)


def call_with(cast, **change):
    arguments = {"x": torch.ones(2, 2), "scale": torch.ones(1), **change}
    return cast(**arguments)


def test_positional_keyword_and_left_out_arguments_agree(cast):
    x, scale = torch.randn(3, 5), torch.tensor([2.0])
    rows = [torch.empty(3, 5, dtype=E4M3) for _ in range(3)]
    cast(x, scale, rows[0], None, None, None, None, None, None)
    cast(x, scale, rows[1])
    cast(x, rowwise=rows[2], scale=scale)
    assert all(torch.equal(r.view(torch.uint8), rows[0].view(torch.uint8)) for r in rows)


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((), {}, "cast_transpose: missing argument x"),
        ((1,) * 10, {}, "cast_transpose: takes 9 arguments, got 10"),
        ((torch.ones(1, 1), torch.ones(1)), {"scal": 1}, "unknown argument scal"),
        ((torch.ones(1, 1), torch.ones(1)), {"scale": torch.ones(1)}, "got scale twice"),
        (([1.0], torch.ones(1)), {}, "x must be a torch.Tensor, got list"),
        ((None, torch.ones(1)), {}, "x must be a torch.Tensor, got NoneType"),
    ],
)
def test_refuses_a_wrong_call(cast, args, kwargs, message):
    assert message in refusal(TypeError, cast, *args, **kwargs)


def test_refuses_what_dlpack_would_misread(cast):
    complex_x = torch.ones(2, 2, dtype=torch.complex64)
    assert "x must have a real dtype" in refusal(TypeError, call_with, cast, x=complex_x)
    negated = complex_x.conj().imag
    assert negated.is_neg()
    assert "x must be resolved (call resolve_neg()), got a neg view" in refusal(
        TypeError, call_with, cast, x=negated
    )
    call_with(cast, x=negated.resolve_neg().contiguous())


def test_refuses_tensors_without_storage(cast):
    with FakeTensorMode():
        fake = torch.ones(2, 2)
    assert "x must have storage, got a" in refusal(TypeError, call_with, cast, x=fake)
    message = refusal(
        (TypeError, NotImplementedError), call_with, cast, x=torch.ones(2, 2).to("meta")
    )
    assert "cast_transpose: x must be" in message
    sparse = torch.eye(2).to_sparse()
    message = refusal(TypeError, call_with, cast, x=sparse)
    assert "cast_transpose: x must be a dense tensor with storage" in message


def test_accepts_parameters_and_subclasses(cast):
    class Named(torch.Tensor):
        pass

    call_with(cast, x=torch.nn.Parameter(torch.ones(2, 2)))
    call_with(cast, x=torch.ones(2, 2).as_subclass(Named))


def test_kinds_of_scalars_and_lists():
    update = function("amax_scale_update", "amax_scale_update")
    h, s = torch.ones(2, 1), torch.ones(1)
    good = {
        "histories": [h], "scales": (s,), "scale_invs": [s.clone()], "fp8_max": [448.0],
        "nonfinite_count": None, "margin": 0, "most_recent": False, "pow2": False,
    }  # fmt: skip
    update(**good)
    for change, message in (
        ({"histories": h}, "histories must be a list or tuple, got Tensor"),
        ({"histories": [h, 1]}, "histories[1] must be a torch.Tensor, got int"),
        ({"fp8_max": ["a"]}, "fp8_max[0] must be a float, got str"),
        ({"margin": 1.5}, "margin must be an int, got float"),
        ({"margin": True}, "margin must be an int, got bool"),
        ({"pow2": 1}, "pow2 must be a bool, got int"),
    ):
        assert message in refusal(TypeError, update, **{**good, **change})


def amaxes(tensors):
    """max |x| of each tensor, through a call that takes one list."""
    out = torch.zeros(len(tensors))
    function("multi_tensor", "multi_tensor_amax")(tensors, out)
    return out.tolist()


def test_prepared_list_is_a_sequence():
    tensors = [torch.ones(2), torch.zeros(3)]
    prepared = tensor_list(iter(tensors))
    assert len(prepared) == 2
    assert prepared[1] is tensors[1]
    assert prepared[-1] is tensors[1]
    assert [t is u for t, u in zip(prepared, tensors, strict=True)] == [True, True]
    assert tensor_list([]) is not None
    assert not tensor_list([])
    assert repr(prepared) == "<TensorList of 2 tensors>"
    with pytest.raises(IndexError):
        prepared[2]
    with pytest.raises(TypeError, match="not iterable"):
        tensor_list(3)


def test_prepared_list_sees_tensors_as_they_are():
    """New storage, other sizes and other strides between calls; no copy of an old address."""
    x, empty = torch.full((4,), 2.0), torch.empty(0)
    prepared = tensor_list([x, empty])
    assert amaxes(prepared) == [2, 0]
    x.fill_(3)
    assert amaxes(prepared) == [3, 0]
    x.data = torch.full((1000,), 5.0)
    assert amaxes(prepared) == [5, 0]
    x.resize_(2000).fill_(1)
    x[-1] = 7
    assert amaxes(prepared) == [7, 0]
    x.data = torch.arange(8.0).bfloat16()[1:3]
    empty.resize_(3).fill_(-1)
    assert amaxes(prepared) == [2, 1]
    x.data = torch.zeros(2, 2).t()
    x.data[0, 1] = 4
    message = refusal(ValueError, amaxes, prepared)
    assert "tensors[0] must be contiguous, got strides [1, 2]" in message
    x.data = x.data.contiguous()
    assert amaxes(prepared) == [4, 1]


def test_prepared_list_given_twice():
    """The second time it is not described again: it must be what it is in this call."""
    scale, x = function("multi_tensor", "multi_tensor_scale"), torch.full((4,), 2.0)
    prepared, other = tensor_list([x]), tensor_list([torch.zeros(4)])
    scale(prepared, prepared, 3.0)
    assert x.tolist() == [6] * 4
    x.data = torch.full((1000,), 5.0)
    scale(prepared, prepared, 3.0)
    assert x.tolist() == [15] * 1000
    x.resize_(4)
    function("multi_tensor", "multi_tensor_axpby")(other, prepared, prepared, 1.0, 2.0, -1)
    assert x.tolist() == [30] * 4
    assert other[0].tolist() == [0] * 4


def test_prepared_list_refuses_like_a_list():
    good = torch.ones(2)
    for bad in (1.0, torch.ones(2, dtype=torch.complex64), torch.ones(2).to("meta")):
        messages = [refusal(TypeError, amaxes, kind([good, bad])) for kind in (list, tensor_list)]
        assert messages[0] == messages[1]
        assert "tensors[1] must" in messages[0]
    complex_x = torch.ones(2, dtype=torch.complex64)
    prepared = tensor_list([good, good.clone()])
    assert amaxes(prepared) == [1, 1]
    prepared[1].data = complex_x.conj().imag
    assert "tensors[1] must be resolved" in refusal(TypeError, amaxes, prepared)
    prepared[1].data = good.clone()
    assert amaxes(prepared) == [1, 1]


def test_prepared_list_in_many_threads():
    """A call keeps what it reads while another thread's call finds tensors changed."""
    tensors = [torch.ones(2000) for _ in range(50)]
    prepared = tensor_list(tensors)
    wrong = []

    def work():
        for _ in range(100):
            if set(amaxes(prepared)) != {1.0}:
                wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    kept = []
    for i in range(100):
        kept.append(tensors[i % 50].data)
        tensors[i % 50].data = torch.ones(2000)
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.cuda
def test_prepared_list_names_another_device():
    prepared = tensor_list([torch.ones(2, device="cuda"), torch.ones(2)])
    message = refusal(ValueError, amaxes, prepared)
    assert "tensors[1] must be on cuda:0 like tensors, got cpu" in message
    moved = tensor_list([torch.ones(2), torch.ones(2)])
    assert amaxes(moved) == [1, 1]
    moved[1].data = torch.ones(2, device="cuda")
    assert "tensors[1] must be on cpu" in refusal(ValueError, amaxes, moved)


def test_signature_is_checked():
    bad = "x: Tensr"
    assert "unknown type 'Tensr'" in refusal(ValueError, core().Function, "f", bad, lambda *a: 0)


def test_unknown_function_is_an_attribute_error():
    with pytest.raises(AttributeError, match="op cast_transpose has no function nothing"):
        function("cast_transpose", "nothing")


def test_device_without_the_function_is_named():
    decode = function("fp8_gemm", "fp8_gemm")
    codes = torch.zeros(16, 16, dtype=torch.uint8).view(E4M3)
    one = torch.ones(1)
    with pytest.raises(NotImplementedError, match="fp8_gemm: cpu tensors are not supported"):
        decode(codes, codes, one, one, torch.empty(16, 16), None, None, None, None, False, False, 0)


def test_result_does_not_depend_on_the_number_of_threads():
    x = torch.randn(700, 900).bfloat16()
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            out = cast_transpose(x, torch.ones(1), E4M3, with_dbias=True)
            results.append((out.columnwise.view(torch.uint8), out.dbias))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


def test_calls_from_many_threads():
    x = torch.randn(300, 300)
    expected = cast_transpose(x, torch.ones(1), E4M3).columnwise.view(torch.uint8)
    wrong = []

    def work():
        for _ in range(20):
            out = cast_transpose(x, torch.ones(1), E4M3).columnwise.view(torch.uint8)
            if not torch.equal(out, expected):
                wrong.append(out)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_works_after_a_fork():
    """libgomp's threads do not survive a fork: the child must not wait for them."""
    x = torch.randn(600, 600)
    expected = cast_transpose(x, torch.ones(1), E4M3).rowwise.view(torch.uint8).numpy().tobytes()
    child = os.fork()
    if child == 0:
        row = torch.empty(600, 600, dtype=E4M3)
        function("cast_transpose", "cast_transpose")(x, torch.ones(1), row)
        os._exit(0 if row.view(torch.uint8).numpy().tobytes() == expected else 1)
    for _ in range(200):
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            break
        threading.Event().wait(0.05)
    else:
        os.kill(child, 9)
        os.waitpid(child, 0)
        pytest.fail("the forked child hangs")
    assert os.waitstatus_to_exitcode(status) == 0


@pytest.mark.cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs in this process")
def test_second_gpu_is_used_and_the_current_one_restored():
    x = torch.randn(256, 256, device="cuda:1")
    out = cast_transpose(x, torch.ones(1, device="cuda:1"), E4M3).rowwise
    assert torch.cuda.current_device() == 0
    expected = cast_transpose(x.cpu(), torch.ones(1), E4M3).rowwise
    assert torch.equal(out.cpu().view(torch.uint8), expected.view(torch.uint8))
