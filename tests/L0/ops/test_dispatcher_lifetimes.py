"""Lifetimes of a call's arguments while Python code or another thread changes them.

Each case that may end the process runs in one of its own.
"""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from apex_te.runtime import core, function, tensor_list

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
