"""The dispatcher: calls and refusals, lifetimes of what is called, and programs."""

import gc
import os
import subprocess
import sys
import textwrap
import threading
import weakref
from pathlib import Path

import pytest
import torch
from torch._subclasses import FakeTensorMode

from apex_te import runtime
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


ROOT = Path(__file__).resolve().parents[3]
PRELUDE = """
import gc
import threading
import torch
from apex_te.runtime import core, dispatcher, function, tensor_list

amax = function("multi_tensor", "multi_tensor_amax")
update = function("amax_scale_update", "amax_scale_update")
copy = function("multi_tensor", "multi_tensor_axpby")
# a first call searches its library, and reads its arguments again
amax([], torch.zeros(0))
copy([torch.ones(1)], [torch.ones(1)], [torch.ones(1)], 1.0, 1.0, -1)
update([], [], [], [], torch.zeros(1, dtype=torch.int32), 0, False, False)


class Calling(torch.Tensor):
    # runs what is in `action` whenever torch is asked about it
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            if action:
                action.pop()()
            return func(*args, **(kwargs or {}))


action = []


def overwrite():
    gc.collect()
    return [torch.full((n,), 7.0) for n in (4, 1000) for _ in range(100)]


gc.collect()
gc.freeze()  # what was imported stays: collections need not search it
"""


def run(code, timeout=120, **environment):
    """Output of a child that runs ``code`` behind the prelude and must end well."""
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", PRELUDE + textwrap.dedent(code)],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, f"{done.returncode}\n{done.stderr[-3000:]}"
    return done.stdout.split()


@pytest.mark.cover(0)
@pytest.mark.parametrize("kind", ["list", "tensor_list"])
def test_torch_function_clears_the_list(kind):
    out = run(
        f"""
        for attempt in range(20):
            tensors = [torch.ones(4).as_subclass(Calling)]
            tensors += [torch.full((1000,), 2.0) for _ in range(50)]
            given = {kind}(tensors) if "{kind}" == "tensor_list" else tensors
            kept = []
            action.append(lambda: (tensors.clear(), kept.append(overwrite())))
            out = torch.zeros(51)
            amax(given, out)
            assert out.tolist() == [1.0] + [2.0] * 50, out
        print("done")
        """
    )
    assert out == ["done"]


@pytest.mark.long
def test_float_method_clears_the_list():
    out = run(
        """
        class Clearing:
            def __float__(self):
                floats.clear()
                overwrite()
                return 448.0

        class Refusing(Clearing):
            def __float__(self):
                super().__float__()
                raise TypeError("no float")

        for attempt in range(50):
            h, s = torch.ones(2, 1), [torch.ones(1) for _ in range(3)]
            floats = [Clearing(), *(448.0 + i for i in range(2))]
            update([h] * 3, s, [t.clone() for t in s], floats, None, 0, False, False)
            assert not floats
            floats = [Refusing()]
            try:
                update([h], s[:1], [s[0].clone()], floats, None, 0, False, False)
            except TypeError as error:
                assert "fp8_max[0] must be a float, got Refusing" in str(error), error
            else:
                raise AssertionError
        print("done")
        """
    )
    assert out == ["done"]


@pytest.mark.long
def test_another_thread_clears_the_list():
    out = run(
        """
        import time

        for attempt in range(10):
            tensors = [torch.full((1 << 23,), 1.0 + i) for i in range(4)]
            out = torch.zeros(4)
            thread = threading.Thread(target=amax, args=(tensors, out))
            thread.start()
            time.sleep(0.002 * (attempt % 5))
            tensors.clear()
            thread.join()
            assert out.tolist() in ([1.0, 2.0, 3.0, 4.0], [0.0] * 4), out
        print("done")
        """,
        OMP_NUM_THREADS="1",
    )
    assert out == ["done"]


@pytest.mark.long
@pytest.mark.cover(0)
@pytest.mark.parametrize(
    "change",
    [
        "x.resize_(1 << 22)",
        "setattr(x, 'data', torch.ones(1 << 22))",
        "x.untyped_storage().resize_(1 << 26)",
    ],
)
def test_an_earlier_tensor_is_changed_by_a_later_conversion(change):
    out = run(
        f"""
        for place in ("argument", "list", "tensor_list"):
            x, late = torch.ones(1 << 20), torch.ones(1 << 20).as_subclass(Calling)
            lists = [[x], [torch.ones(1 << 20)], [late]]
            if place == "tensor_list":
                lists = [tensor_list(items) for items in lists]
            action.append(lambda: {change})
            try:
                if place == "argument":
                    function("current_scale", "current_scale_amax")(x, late, x)
                else:
                    copy(*lists, 1.0, 1.0, -1)
            except RuntimeError as error:
                assert "stay as it is while the call is prepared" in str(error), (place, error)
            else:
                raise AssertionError(place)
        print("done")
        """
    )
    assert out == ["done"]


@pytest.mark.long
def test_resolver_changes_the_arguments():
    """The search for a library runs Python code: the arguments are read again behind it."""
    out = run(
        """
        spec = dispatcher.get_builder("multi_tensor").functions()["multi_tensor_amax"]

        def resolve(device, index):
            tensors[0].resize_(1 << 22).fill_(3)
            tensors.pop()
            overwrite()
            return dispatcher._resolve(
                "multi_tensor", "multi_tensor_amax", spec.signature, device, index
            )

        bound = core().Function("multi_tensor_amax", spec.signature, resolve)
        tensors = [torch.ones(1 << 10), torch.ones(1 << 22)]
        out = torch.zeros(1)
        bound(tensors, out)
        print(out.item())
        """
    )
    assert out == ["3.0"]


@pytest.mark.long
def test_interpreter_exits_while_threads_call():
    for _ in range(3):
        out = run(
            """
            transpose = function("byte_transpose", "byte_transpose")

            def work():
                x, y = (torch.zeros(1000, 1000, dtype=torch.uint8) for _ in range(2))
                while True:
                    transpose(x, y)

            for _ in range(3):
                threading.Thread(target=work, daemon=True).start()
            import time
            time.sleep(0.3)
            print("done")
            """,
            OMP_NUM_THREADS="1",
        )
        assert out == ["done"]


def test_prepared_list_in_a_cycle_is_freed_and_stays_usable_until_then():
    out = run(
        """
        import weakref

        class Owner:
            def __del__(self):
                print(len(self.prepared), len(list(self.prepared)), self.prepared)

        x = torch.ones(3)
        x.owner = Owner()
        x.owner.prepared = tensor_list([x])
        alive = weakref.ref(x)
        del x
        gc.collect()
        print(alive())
        """
    )
    assert out == ["1", "1", "<TensorList", "of", "1", "tensors>", "None"]


def test_names_with_surrogates_are_refused():
    for name, signature in (("f\ud800", "x: Tensor"), ("f", "x\udcff: Tensor")):
        with pytest.raises(ValueError, match=r"Function: (name|signature) must have no surrogates"):
            core().Function(name, signature, lambda device, index: 0)
    cast = function("cast_transpose", "cast_transpose")
    with pytest.raises(TypeError, match="cast_transpose: unknown argument"):
        cast(torch.ones(2, 2), torch.ones(1), **{"row\ud800": None})


def test_numbers_out_of_range_are_refused():
    update = function("amax_scale_update", "amax_scale_update")
    h, s = torch.ones(2, 1), torch.ones(1)

    def call(fp8_max=448.0, margin=0):
        update([h], [s], [s.clone()], [fp8_max], None, margin, False, False)

    for margin in (2**63, -(2**63) - 1, 10**5000):
        with pytest.raises(ValueError, match="margin must be an int of 64 bits"):
            call(margin=margin)
    with pytest.raises(ValueError, match=r"fp8_max\[0\] must be in the range of a double"):
        call(fp8_max=10**400)
    with pytest.raises(ValueError, match="must be in the range of a double"):
        function("multi_tensor", "multi_tensor_scale")([s], [s], 10**400)


def test_an_exception_of_the_users_code_passes():
    class Raising:
        def __float__(self):
            raise KeyError("mine")

    update = function("amax_scale_update", "amax_scale_update")
    h, s = torch.ones(2, 1), torch.ones(1)
    with pytest.raises(KeyError, match="mine"):
        update([h], [s], [s.clone()], [Raising()], None, 0, False, False)
    with pytest.raises(TypeError, match=r"fp8_max\[0\] must be a float, got Tensor"):
        update([h], [s], [s.clone()], [torch.ones(2)], None, 0, False, False)


def test_references_of_a_list_are_dropped():
    """After a call, refused or not, a list's tensors have the references that they had."""
    x, out = torch.ones(4), torch.zeros(2)
    amax = function("multi_tensor", "multi_tensor_amax")
    before = sys.getrefcount(x)
    for given in ([x, x], (x, x), tensor_list([x, x])):
        amax(given, out)
        with pytest.raises(ValueError, match="amax must"):
            amax(given, torch.zeros(5))
    with pytest.raises(TypeError):
        amax([x, None], out)
    given = None
    assert sys.getrefcount(x) == before


def test_addresses_of_nothing_are_refused():
    for read in (core().read_string, core().read_int32):
        with pytest.raises(ValueError, match="must be that of a symbol, got 0"):
            read(0)


SCALE = 0.25


def casting():
    """The bound function, called once as a program requires."""
    function = runtime.function("cast_transpose", "cast_transpose")
    x, scale = torch.ones(2, 2), torch.ones(1)
    function(x, scale, torch.empty(2, 2, dtype=torch.float8_e4m3fn), *[None] * 6)
    return function


def program(x, scale):
    """Casts x, slot 0, to the FP8 data in slot 1 and its inverse scale in bytes 256 to 260 of 2."""
    like = torch.empty(0)
    args = ((0,), scale, (1,), None, None, (2, 256, (1,), (1,), like), None, None, None)
    return runtime.core().Program((x, ..., ...), ((casting(), args),))


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
    run = runtime.core().Program((x, None, ...), ((casting(), args),))
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
    ((torch.ones(1),), ((casting(), ()),), "a step must have all arguments of its Function"),
    ((torch.ones(1),), ((casting(), ((7,), *[None] * 8)),), "a slot must be that of a tensor"),
    ((torch.ones(1),), ((casting(), (None,) * 9),), "a tensor is missing"),
    ((torch.ones(1),), ((casting(), ((0, 1), *[None] * 8)),), "a tensor must be a tuple of 1 or 5"),
    ((torch.ones(1),), ((casting(), (3, *[None] * 8)),), "constants must be tensors"),
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
    return runtime.core().Program((x, ..., ...), ((casting(), args),), makers, after, outputs)


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
    forms, steps = (x, ...), ((casting(), args),)
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
